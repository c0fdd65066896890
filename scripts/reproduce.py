#!/usr/bin/env python3
"""Run everything that results/README.md rests on, on one GPU: tuning, both tables, ten seeds, controls.

python scripts/reproduce.py [--only PART,PART] [--list] [key=value ...]     overrides as triaccel-bench takes them

First it says how many minutes the runs that are left will take, and at the end it writes tables and results/README.md.
Finished runs are not made again, so that the same command goes on after anything; runner.max_minutes=50 cuts it in
sittings. Exit codes are those of triaccel-bench, and 1 also where records are lacking that a control or the choice of
trials rests on.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from triaccel_bench import cli, runner, tables_cli
from triaccel_bench.outcomes import TIME_IS_UP
from triaccel_bench.preflight import duration
from triaccel_bench.reproduction import PARTS, Forecast, Forecaster, Sweep, controls, limited, sweep, tuning_root
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
    started = time.monotonic()
    given = [text for text in options.overrides if not text.startswith("runner.max_minutes=")]
    # A mistake in them is said by the first sweep's own settings.
    table1 = sweep("table1", options.overrides).jobs()
    minutes = table1[0].runner.max_minutes
    name = runner.device_name(table1[0])
    commands = _say_what_it_takes(options.only, table1, name, given)
    if options.list:
        print(*commands, sep="\n")
        return 0
    code, trials = 0, tuning_root(table1, given)
    for part in PARTS:
        if part not in options.only:
            continue
        for wanted in _sweeps(part, given, name):
            left = None if minutes is None else minutes - (time.monotonic() - started) / 60
            if left is not None and left <= 0:
                print(f"time is up (runner.max_minutes={minutes:g}) before: {wanted.command}")
                return TIME_IS_UP
            print(f"\n{part}: {wanted.command}", flush=True)
            ended = cli.run(list(limited(wanted, left).overrides))
            if ended not in (0, SOME_FAILED):
                return ended
            if part == "tuning":
                # A trial that diverged has lost, which is no failure of the reproduction.
                ended = choose_trials.main([trials])
            code = max(code, ended)
        if part == "controls" and _lacking(given, name):
            code = SOME_FAILED
    roots = [root for root in dict.fromkeys((table1[0].results.root, trials)) if Path(root).is_dir()]
    return max(code, _write_results(roots)) if roots else code


def _write_results(roots: Sequence[str]) -> int:
    """The tables of what was run, and the page of verdicts."""
    print()
    return max(tables_cli.main(["--results", roots[0]]), tables_cli.main(["verdicts", "--results", *roots]))


def _sweeps(part: str, given: Sequence[str], name: str) -> list[Sweep]:
    """Of a part as records stand now."""
    if part != "controls":
        return [sweep(part, given)]
    return controls(sweep("table1", given).jobs(), name, given)[0]


def _lacking(given: Sequence[str], name: str) -> bool:
    lacking = controls(sweep("table1", given).jobs(), name, given)[1]
    print(*(f"controls not run: {sentence}" for sentence in lacking), sep="\n", end="\n" * bool(lacking))
    return bool(lacking)


def _say_what_it_takes(parts: Sequence[str], table1: Sequence[Settings], name: str, given: Sequence[str]) -> list[str]:
    """Print a line a part; returns the commands that they consist of."""
    print(f"Looking at what the runs will take on {name}; a method without records here is tried for a few steps.")
    forecaster = Forecaster(name, _epoch_seconds)
    forecasts, commands = [], []
    for part in (part for part in PARTS if part in parts):
        if part == "controls":
            made, lacking = controls(table1, name, given)
            commands += [*(each.command for each in made), *(f"# {sentence}" for sentence in lacking)]
            jobs = [job for each in made for job in each.jobs()]
            forecasts.append(forecaster.of_controls(table1) if lacking else forecaster.forecast(part, jobs))
        else:
            forecasts.append(forecaster.forecast(part, sweep(part, given).jobs()))
            commands.append(sweep(part, given).command)
    _print_forecasts(forecasts)
    return commands


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
    print(f"In all about {_told(total)}. A run that several parts share counts in the first.", flush=True)


def _told(minutes: float) -> str:
    return "an unknown time" if math.isnan(minutes) else duration(minutes)


if __name__ == "__main__":
    cli.interruptible(lambda: main(sys.argv[1:]))
