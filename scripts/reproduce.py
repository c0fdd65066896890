#!/usr/bin/env python3
"""Run everything that results/README.md rests on, on one GPU: tuning, both tables, ten seeds, controls.

python scripts/reproduce.py [--only PART,PART] [--list] [key=value ...]     overrides as triaccel-bench takes them

First it says how many minutes the runs that are left will take. A sweep that is refused keeps none of the others from
being run, and at the end, or when the time is up, tables and results/README.md are written from what records there are.
Finished runs are not made again, so that the same command goes on after anything; runner.max_minutes=50 cuts it in
sittings, each counted from its first sweep. Exit codes are those of triaccel-bench, of several sweeps the highest, and
1 also where records are lacking that a control or the choice of trials rests on, or where a choice cannot be written.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from triaccel_bench import cli, runner, tables_cli
from triaccel_bench.outcomes import TIME_IS_UP
from triaccel_bench.preflight import duration
from triaccel_bench.reproduction import (
    PARTS,
    Forecast,
    Forecaster,
    Sweep,
    controls,
    limited,
    second_round,
    sweep,
    tuning_root,
)
from triaccel_bench.results import run_files
from triaccel_bench.runner import Refused
from triaccel_bench.settings import Settings, SettingsError
from triaccel_bench.terminal import silence_output

sys.path.insert(0, str(Path(__file__).resolve().parent))
import choose_trials  # noqa: E402

SOME_FAILED, REFUSED, INTERRUPTED = 1, 2, 130


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_intermixed_args(arguments)
    try:
        return _run(options)
    except (HydraException, OmegaConfBaseException, SettingsError, Refused) as error:
        print(f"reproduce: {cli.sentence(error)}", file=sys.stderr)
        return REFUSED
    except BrokenPipeError:
        # Whoever read the output has seen enough.
        silence_output()
        return INTERRUPTED
    except KeyboardInterrupt:
        print("reproduce: interrupted; finished runs are kept, run the same command to go on", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Run everything that results/README.md rests on, on one GPU.")
    parts = "; ".join(f"{part}: {what}" for part, what in PARTS.items())
    parser.add_argument("--only", type=_parts, default=list(PARTS), metavar="PART,PART", help=f"of {parts}")
    parser.add_argument("--list", action="store_true", help="say what would be run and how long it takes; run nothing")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of every part, as triaccel-bench takes them")
    return parser


def _parts(text: str) -> list[str]:
    unknown = [part for part in text.split(",") if part not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"expected some of {','.join(PARTS)}, got {','.join(unknown)}")
    return text.split(",")


def _run(options: argparse.Namespace) -> int:
    given = [text for text in options.overrides if not text.startswith("runner.max_minutes=")]
    # A mistake in them is said by the first sweep's own settings.
    table1 = sweep("table1", options.overrides).jobs()
    minutes = table1[0].runner.max_minutes
    name = runner.device_name(table1[0])
    commands = _say_what_it_takes(options.only, table1, name, given, tried=minutes is None or options.list)
    if options.list:
        print(*commands, sep="\n")
        return 0
    trials = tuning_root(table1, given)
    code = _run_parts(options.only, given, name, trials, minutes)
    if code == INTERRUPTED:
        return code
    roots = [root for root in dict.fromkeys((table1[0].results.root, trials)) if _has_records(root)]
    return max(code, _write_results(roots)) if roots else code


def _run_parts(parts: Sequence[str], given: Sequence[str], name: str, trials: str, minutes: float | None) -> int:
    """The worst of the sweeps' codes: one that is refused keeps none of the others from being run."""
    # Here and not where the command began: the look ahead would leave nothing of a short limit.
    started = time.monotonic()
    worst = 0
    for part in (part for part in PARTS if part in parts):
        for wanted in _sweeps(part, given, name):
            left = None if minutes is None else minutes - (time.monotonic() - started) / 60
            if left is not None and left <= 0:
                print(f"time is up (runner.max_minutes={minutes:g}) before: {wanted.command}")
                return TIME_IS_UP
            print(f"\n{part}: {wanted.command}", flush=True)
            ended = cli.run(list(limited(wanted, left).overrides))
            if ended in (TIME_IS_UP, INTERRUPTED):
                return ended
            # A trial that diverged has lost, which is no failure of the reproduction.
            worst = max(worst, 0 if part == "tuning" and ended == SOME_FAILED else ended)
        if part == "tuning" and choose_trials.main([trials, "--keep"]):
            worst = max(worst, SOME_FAILED)
        if part == "controls" and _lacking(given, name):
            worst = max(worst, SOME_FAILED)
    return worst


def _has_records(root: str) -> bool:
    return next(run_files(Path(root), []), None) is not None


def _write_results(roots: Sequence[str]) -> int:
    """The tables of what was run, and the page of verdicts."""
    print()
    return max(tables_cli.main(["--results", roots[0]]), tables_cli.main(["verdicts", "--results", *roots]))


def _sweeps(part: str, given: Sequence[str], name: str) -> Iterator[Sweep]:
    """Of a part as records stand when each is asked for."""
    if part == "controls":
        yield from controls(sweep("table1", given).jobs(), name, given)[0]
        return
    yield sweep(part, given)
    if part == "tuning":
        yield from second_round(name, given)[0]


def _lacking(given: Sequence[str], name: str) -> bool:
    lacking = controls(sweep("table1", given).jobs(), name, given)[1]
    print(*(f"controls not run: {sentence}" for sentence in lacking), sep="\n", end="\n" * bool(lacking))
    return bool(lacking)


def _say_what_it_takes(
    parts: Sequence[str], table1: Sequence[Settings], name: str, given: Sequence[str], tried: bool
) -> list[str]:
    """Print a line a part; returns the commands that they consist of.

    Args:
        tried: take the time of a method that nothing is recorded of by a few steps.
    """
    how = "is tried for a few steps" if tried else "takes an unknown time, since runner.max_minutes is set"
    print(f"Looking at what the runs will take on {name}; a method without records here {how}.", flush=True)
    forecaster = Forecaster(name, _epoch_seconds if tried else lambda settings: math.nan)
    forecasts, commands = [], []
    coming: set[str] = set()
    for part in (part for part in PARTS if part in parts):
        if part == "controls":
            made, lacking = controls(table1, name, given)
            commands += [*(each.command for each in made), *(f"# {sentence}" for sentence in lacking)]
            # Where no part before makes the records that are lacking, there will be no controls.
            promised = [settings for settings in table1 if lacking and settings.model.name in coming]
            jobs = [] if promised else [job for each in made for job in _jobs_or_none(each)]
            forecasts.append(forecaster.of_controls(promised) if promised else forecaster.forecast(part, jobs))
        else:
            jobs = sweep(part, given).jobs()
            coming |= {job.model.name for job in jobs if part in ("table1", "seeds")}
            commands.append(sweep(part, given).command)
            if part == "tuning":
                second, promised = second_round(name, given)
                jobs += [*(job for each in second for job in each.jobs()), *promised]
                commands += [each.command for each in second]
                networks = ", ".join(dict.fromkeys(job.model.name for job in promised))
                commands += [f"# then each method's best trials on {networks} with more seeds"] * bool(promised)
            forecasts.append(forecaster.forecast(part, jobs))
    _print_forecasts(forecasts)
    return commands


def _jobs_or_none(control: Sweep) -> list[Settings]:
    """None of one that will be refused, as a replay of a run without a schedule: the others are run all the same."""
    try:
        return control.jobs()
    except SettingsError as error:
        print(f"cannot be run: {control.command}: {error}")
        return []


def _epoch_seconds(settings: Settings) -> float:
    try:
        return runner.epoch_seconds(settings)
    except Refused as error:
        print(f"{runner.cell_label(settings)}: its time is unknown: {error}")
        return math.nan


def _print_forecasts(forecasts: Sequence[Forecast]) -> None:
    total = sum(forecast.minutes for forecast in forecasts)
    for forecast in forecasts:
        print(f"  {forecast.part:<9} {forecast.runs:>4} runs, {forecast.done:>4} done, {_told(forecast.minutes)} left")
    about = "" if math.isnan(total) else "about "
    counts = "A run that several parts share counts in the first."
    print(f"In all {about}{_told(total)}, one run after the other. {counts}", flush=True)


def _told(minutes: float) -> str:
    return "an unknown time" if math.isnan(minutes) else duration(minutes)


if __name__ == "__main__":
    cli.interruptible(lambda: main(sys.argv[1:]))
