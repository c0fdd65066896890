"""Trials of tuning, found among records by where they were evaluated, and which of each method's was best."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from triaccel_bench.cells import Cell, cells
from triaccel_bench.labels import order
from triaccel_bench.records import RunRecord

KEYS = (
    "optimizer.lr",
    "optimizer.weight_decay",
    "method.precision.tau_low",
    "method.precision.tau_high",
    "method.curvature.alpha",
    "method.curvature.tau_curv",
)
"""Settings that are tuned; a method has those of them that it reads."""


@dataclass(frozen=True)
class Tuning:
    """All trials of one method on one network, data set and device, whichever way they ended."""

    dataset: str
    model: str
    method: str
    trials: tuple[Cell, ...]
    """Each with the mean of its seeds; by accuracy, the best first, and those without any last."""

    @property
    def best(self) -> Cell | None:
        first = self.trials[0]
        return first if accuracy(first) is not None else None


def is_trial(run: RunRecord) -> bool:
    """Whether a run was made to choose by: what is reported is evaluated on test images."""
    return run.settings["dataset"].get("evaluate_on") == "validation"


def tunings(runs: Iterable[RunRecord]) -> list[Tuning]:
    """Trials by data set, model, method and device, in the paper's order."""
    alike: dict[tuple, list[Cell]] = {}
    for cell in cells(run for run in runs if is_trial(run)):
        alike.setdefault((cell.dataset, cell.model, cell.method, _conditions(cell)), []).append(cell)
    found = [Tuning(*key[:3], tuple(sorted(trials, key=_rank))) for key, trials in alike.items()]
    return sorted(found, key=lambda tuning: order(tuning.dataset, tuning.model, tuning.method))


def accuracy(trial: Cell) -> float | None:
    """In percent, after the last epoch, of the validation images."""
    mean = trial.mean("accuracy_percent")
    return None if mean is None else mean.mean


def values(trial: Cell) -> dict[str, str]:
    """What was tried, as text by key."""
    return {key: trial.identifying[key] for key in KEYS if key in trial.identifying}


def _conditions(cell: Cell) -> tuple:
    """What a method's trials have in common: everything but what is tried."""
    return tuple(sorted((key, value) for key, value in cell.identifying.items() if key not in KEYS))


def _rank(trial: Cell) -> tuple[float, str]:
    found = accuracy(trial)
    return (float("inf") if found is None else -found), trial.cell
