"""Trials of tuning, found among records by where they were evaluated, and which of each method's was best."""

from __future__ import annotations

import math
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
    """Each with the mean of its seeds: those of most finished seeds first, by accuracy, and those without any last."""

    @property
    def finished(self) -> int:
        """Trials with a finished seed."""
        return sum(bool(trial.summaries) for trial in self.trials)

    @property
    def finalists(self) -> list[Cell]:
        """Trials with as many finished seeds as any: where some were given a second round, only these."""
        return [trial for trial in self.trials if len(trial.summaries) == len(self.trials[0].summaries)]

    @property
    def best(self) -> Cell | None:
        """The choice: of the finalists within one standard error of the most accurate, the one with fewest FP32 layers.

        The error is binomial, sqrt(p (100 - p) / n) points of n validation images: what is within it is a tie, which
        goes to the cheaper plan, as the one-standard-error rule has it (Breiman et al., 1984), and
        among equals to the more accurate. Methods whose plan cannot move are equals.
        """
        most = accuracy(self.trials[0])
        if most is None:
            return None
        least = most - _standard_error(self.trials[0], most)
        near = [trial for trial in self.finalists if (found := accuracy(trial)) is not None and found >= least]
        return min(near, key=_fp32_layers)


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


def _standard_error(trial: Cell, percent: float) -> float:
    samples = sum(run.evaluation_samples or 0 for run in trial.runs)
    return math.sqrt(percent * (100 - percent) / samples) if samples else 0.0


def _fp32_layers(trial: Cell) -> int:
    """At the end, over all seeds."""
    return sum(summary.layers_executed.get("fp32", 0) for summary in trial.summaries)


def values(trial: Cell) -> dict[str, str]:
    """What was tried, as text by key."""
    return {key: trial.identifying[key] for key in KEYS if key in trial.identifying}


def _conditions(cell: Cell) -> tuple:
    """What a method's trials have in common: everything but what is tried."""
    return tuple(sorted((key, value) for key, value in cell.identifying.items() if key not in KEYS))


def _rank(trial: Cell) -> tuple[float | str, ...]:
    found = accuracy(trial)
    # Of equals the same trial for every method: a cell's name would be another draw for each.
    return -len(trial.summaries), (float("inf") if found is None else -found), *values(trial).values()
