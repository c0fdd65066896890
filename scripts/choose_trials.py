#!/usr/bin/env python3
"""Choose each method's best trial by validation accuracy, and write its values with their origin into conf/tuned.

python scripts/choose_trials.py [RECORDS ...] [--out DIR] [--force]     folders searched for run.json (results/tuning)

Every method has to have had every trial; one that diverged or ran out of memory was a trial, and lost. A file that is
there stays as it is unless --force is given, since reported runs may rest on it. Exit codes: 0 all are chosen; 1 some
method lacks trials or has another choice on file; 2 no trials.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from omegaconf import OmegaConf

from triaccel_bench.cells import Cell
from triaccel_bench.files import write_together
from triaccel_bench.identity import flat
from triaccel_bench.results import read_results
from triaccel_bench.tuning import Tuning, accuracy, tunings, values

ROOT = Path(__file__).resolve().parent.parent
TRIALS, TUNED = ROOT / "conf" / "trial", ROOT / "conf" / "tuned"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Choose each method's best trial by validation accuracy.")
    parser.add_argument("results", nargs="*", type=Path, default=[Path("results/tuning")], metavar="RECORDS")
    parser.add_argument("--out", type=Path, default=TUNED, metavar="DIR", help="default: conf/tuned")
    parser.add_argument("--force", action="store_true", help="replace files that hold another choice")
    options = parser.parse_args(arguments)
    found = tunings(read_results(options.results).runs)
    if not found:
        told = ", ".join(map(str, options.results))
        print(f"No trials below {told}; make some by: triaccel-bench +experiment=reproduce/tuning", file=sys.stderr)
        return 2
    names = [(tuning.dataset, tuning.model, tuning.method) for tuning in found]
    files, faults = {}, []
    for tuning, name in zip(found, names):
        path = options.out / f"{'-'.join(name)}.yaml"
        if names.count(name) > 1:
            faults.append(f"{path.name}: expected trials of one device and one length, got several; name one folder")
        elif lacking := sorted(_trial_files().keys() - {_trial_name(trial) for trial in tuning.trials}):
            faults.append(f"{path.name}: expected every trial, {', '.join(lacking)} lacking; run the tuning again")
        elif tuning.best is None:
            faults.append(f"{path.name}: none of {len(tuning.trials)} trials was finished; look at their records")
        else:
            text = chosen(tuning, tuning.best)
            if path.exists() and path.read_text() != text and not options.force:
                faults.append(f"{path.name}: holds another choice, which stays; --force replaces it")
            else:
                files[path] = text.encode()
    options.out.mkdir(parents=True, exist_ok=True)
    write_together(files)
    print(*(f"Written: {path}" for path in files), *faults, sep="\n")
    return 1 if faults else 0


def chosen(tuning: Tuning, best: Cell) -> str:
    """The file of the group ``tuned`` for a method on a network and data set."""
    dataset, first = best.settings["dataset"], best.runs[0]
    finished = sum(accuracy(trial) is not None for trial in tuning.trials)
    code = first.provenance.code_hash if first.provenance else None
    origin = (
        f"Trial {_trial_name(best)}, the best of {len(tuning.trials)} ({finished} finished): {accuracy(best):.2f} % of "
        f"the validation images",
        f"(validation_fraction {dataset['validation_fraction']}), epochs {first.epochs_planned}, seeds "
        f"{', '.join(str(run.seed) for run in best.runs)}, on {best.device_name}, sources {code}.",
        "Written by scripts/choose_trials.py.",
    )
    config = OmegaConf.create()
    for key, value in values(best).items():
        OmegaConf.update(config, key, OmegaConf.create(f"value: {value}").value)
    return "\n".join(["# @package _global_", *(f"# {line}" for line in origin), OmegaConf.to_yaml(config)])


def _trial_files() -> dict[str, dict[str, object]]:
    return {path.stem: dict(flat(OmegaConf.to_container(OmegaConf.load(path)))) for path in TRIALS.glob("*.yaml")}


def _trial_name(trial: Cell) -> str | None:
    """Which of the files it was; ``None``: it was none of them."""
    tried = {key: OmegaConf.create(f"value: {text}").value for key, text in values(trial).items()}
    return next((name for name, file in _trial_files().items() if tried == {key: file[key] for key in tried}), None)


if __name__ == "__main__":
    sys.exit(main())
