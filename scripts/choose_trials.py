#!/usr/bin/env python3
"""Choose each method's best trial by validation accuracy, and write its values with their origin into conf/tuned.

What is within one standard error of the most accurate trial is a tie, which goes to the plan with fewest FP32 layers.
Where one seed does not tell trials apart, the choice is among the best two, by their means over more seeds.

python scripts/choose_trials.py [RECORDS ...] [--out DIR] [--force | --keep]     folders of run.json (results/tuning)

Without --out they go where triaccel-bench reads them: into the conf of the package that is installed.
Every method has to have had every trial; one that diverged or ran out of memory was a trial, and lost. A file that is
there stays as it is unless --force is given, since reported runs may rest on it. Exit codes: 0 all are chosen; 1 some
method lacks trials or has another choice on file (which --keep allows); 2 no trials, or a choice that cannot be read
or written.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from omegaconf import OmegaConf

from triaccel_bench.cells import Cell
from triaccel_bench.files import write_together
from triaccel_bench.reproduction import TRIALS, trial_files, trial_name
from triaccel_bench.results import read_results
from triaccel_bench.tuning import SECOND_ROUND, Tuning, accuracy, tunings, values

TUNED = TRIALS.parent / "tuned"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Choose each method's best trial by validation accuracy.")
    parser.add_argument("results", nargs="*", type=_folder, default=[Path("results/tuning")], metavar="RECORDS")
    parser.add_argument("--out", type=Path, default=TUNED, metavar="DIR", help="default: %(default)s")
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--force", action="store_true", help="replace files that hold another choice")
    other.add_argument("--keep", action="store_true", help="a file that holds another choice is no fault")
    options = parser.parse_args(arguments)
    found = _found(options.results)
    if not found:
        told = ", ".join(map(str, options.results))
        print(f"No trials below {told}; make some by: triaccel-bench +experiment=reproduce/tuning", file=sys.stderr)
        return 2
    names = [(tuning.dataset, tuning.model, tuning.method) for tuning in found]
    choices, kept, faults, unusable = {}, [], [], []
    every = trial_files().keys()
    for tuning, name in zip(found, names):
        path = options.out / f"{'-'.join(name)}.yaml"
        if names.count(name) > 1:
            faults.append(f"{path.name}: expected trials of one device and one length, got several; name one folder")
        elif strange := [trial.cell for trial in tuning.trials if trial_name(trial) is None]:
            faults.append(f"{path.name}: expected trials of conf/trial, got cells {', '.join(strange)}; move them away")
        elif undone := ", ".join(str(trial_name(trial)) for trial in tuning.unfinished):
            faults.append(
                f"{path.name}: expected trials that ended by themselves, {undone} did not; run the tuning again"
            )
        elif lacking := sorted(every - {trial_name(trial) for trial in tuning.trials}):
            faults.append(f"{path.name}: expected every trial, {', '.join(lacking)} lacking; run the tuning again")
        elif fewer := ", ".join(f"{trial_name(trial)} lacks {seeds}" for trial, seeds in tuning.lacking):
            seeds = SECOND_ROUND[tuning.model]
            faults.append(
                f"{path.name}: expected {seeds} seeds of the best trials, {fewer}; run the tuning's second round"
            )
        elif tuning.best is None:
            faults.append(f"{path.name}: none of {len(tuning.trials)} trials was finished; look at their records")
        else:
            text = chosen(tuning, tuning.best)
            try:
                if _on_file(path, options.force) in (None, text):
                    choices[path] = text.encode()
                else:
                    kept.append(f"{path.name}: holds another choice, which stays; --force replaces it")
            except Unreadable as error:
                unusable.append(str(error))
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        write_together(choices)
    except OSError as error:
        unusable.append(f"{options.out}: expected a folder that can be written, got {error}; name another by --out")
    else:
        print(*(f"Written: {path}" for path in choices), sep="\n", end="\n" * bool(choices))
    told = [*kept, *faults]
    print(*told, sep="\n", end="\n" * bool(told))
    print(*unusable, sep="\n", end="\n" * bool(unusable), file=sys.stderr)
    return 2 if unusable else 1 if faults or (kept and not options.keep) else 0


def _folder(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("expected a folder of records, got nothing; name one")
    return Path(text)


class Unreadable(Exception):
    """What lies where a choice belongs is none that can be compared; the message says what to do."""


def _found(folders: Sequence[Path]) -> list[Tuning]:
    """All that was tuned below the folders; says which of the records there are not used, and why."""
    results = read_results([folder for folder in folders if os.path.isdir(folder)])
    missing = [
        f"{folder}: expected a folder, got {'a file' if os.path.exists(folder) else 'no such folder'}; correct its name"
        for folder in folders
        if not os.path.isdir(folder)
    ]
    for problem in (*missing, *results.problems):
        print(f"Not used: {problem}", file=sys.stderr)
    return tunings(results.runs)


def _on_file(path: Path, replaced: bool) -> str | None:
    """The choice that is there and counts; ``None``: none. Raises ``Unreadable``."""
    if os.path.isdir(path):
        raise Unreadable(f"{path}: expected a choice, got a folder; move it away")
    if replaced:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise Unreadable(
            f"{path}: expected a choice in UTF-8 that can be read, got {error}; remove it, or replace it by --force"
        ) from None


def chosen(tuning: Tuning, best: Cell) -> str:
    """The file of the group ``tuned`` for a method on a network and data set."""
    dataset, first = best.settings["dataset"], best.runs[0]
    codes = sorted({str(run.provenance.code_hash) for run in best.runs if run.provenance})
    among = f"{len(tuning.trials)} ({tuning.finished} finished)"
    if tuning.model in SECOND_ROUND:
        among = f"{len(tuning.finalists)} in the second round, of {among}"
    most = tuning.ranked[0]
    why = f"the best of {among}"
    if best is not most:
        why = (
            f"of {among} within one standard error of the most accurate, "
            f"{trial_name(most)} with {accuracy(most):.2f} %, the one with fewest FP32 layers"
        )
    origin = (
        f"Trial {trial_name(best)}, {why}:",
        f"{accuracy(best):.2f} % of the validation images",
        f"(validation_fraction {dataset['validation_fraction']}), epochs {first.epochs_planned}, seeds "
        f"{', '.join(str(summary.seed) for summary in best.summaries)}, on {best.device_name}, "
        f"sources {', '.join(codes) or 'unknown'}.",
        "Written by scripts/choose_trials.py.",
    )
    config = OmegaConf.create()
    for key, value in values(best).items():
        OmegaConf.update(config, key, OmegaConf.create(f"value: {value}").value)
    return "\n".join(["# @package _global_", *(f"# {line}" for line in origin), OmegaConf.to_yaml(config)])


if __name__ == "__main__":
    sys.exit(main())
