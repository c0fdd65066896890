"""Trials of tuning, found among records by where they were evaluated, and which of each method's was best."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from triaccel_bench.cells import Cell, cells
from triaccel_bench.labels import order
from triaccel_bench.records import RunRecord
from triaccel_bench.stats import why_excluded

KEYS = (
    "optimizer.lr",
    "optimizer.weight_decay",
    "method.precision.tau_low",
    "method.precision.tau_high",
    "method.curvature.alpha",
    "method.curvature.tau_curv",
)
"""Settings that are tuned; a method has those of them that it reads."""

SECOND_ROUND = {"efficientnet_b0": 3}
"""Seeds that a network's finalists have in all, where one does not tell trials apart.

On one H200 trials of EfficientNet-B0 with FP32 and with TF32, alike but for rounding, ended up to 13 points apart, and
those of ResNet-18 0.8 (``results/reference/h200/tuning``).
"""

FINALISTS = 2
"""Trials of a method that have it."""

LOST = ("diverged", "oom")
"""How a trial may end beside finishing; what was killed, crashed or stopped was none."""


@dataclass(frozen=True)
class Tuning:
    """All trials of one method on one network, data set and device, whichever way they ended."""

    dataset: str
    model: str
    method: str
    trials: tuple[Cell, ...]
    """By their mean accuracy with the seeds that all of them have, the best first, and without one last."""

    @property
    def finished(self) -> int:
        """Trials with a finished seed."""
        return sum(bool(trial.summaries) for trial in self.trials)

    @property
    def unfinished(self) -> list[Cell]:
        """Trials of which some seed's run is to be made again."""
        return [trial for trial in self.trials if not all(map(is_over, trial.runs))]

    @property
    def finalists(self) -> tuple[Cell, ...]:
        """Those that are chosen among: where the network has a second round, the most accurate of the first."""
        standing = tuple(trial for trial in self.trials if accuracy(trial) is not None)
        return standing[:FINALISTS] if self.model in SECOND_ROUND else standing

    @property
    def lacking(self) -> list[tuple[Cell, int]]:
        """Finalists whose second round is not over, and how many seeds each lacks."""
        needed = SECOND_ROUND.get(self.model, 1)
        lacking = ((trial, needed - sum(map(is_over, trial.runs))) for trial in self.finalists)
        return [(trial, seeds) for trial, seeds in lacking if seeds > 0]

    @property
    def ranked(self) -> list[Cell]:
        """Finalists by the mean accuracy of all their seeds, without those that lost more seeds than others."""
        fewest = min((_lost(trial) for trial in self.finalists), default=0)
        return sorted((trial for trial in self.finalists if _lost(trial) == fewest), key=lambda t: -accuracy(t))

    @property
    def best(self) -> Cell | None:
        """The choice: of those ranked within one standard error of the first, the one with fewest FP32 layers.

        The error is the larger of two: that of a share of n validation images, sqrt(p (100 - p) / n) points, and that
        of a mean over m seeds, std / sqrt(m). What is within it is a tie, which goes to the cheaper plan, as the
        one-standard-error rule has it (Breiman et al., 1984), and among equals to the more accurate. Methods whose plan
        cannot move are equals.
        """
        if not self.ranked:
            return None
        least = accuracy(self.ranked[0]) - _standard_error(self.ranked[0])
        return min((trial for trial in self.ranked if accuracy(trial) >= least), key=_fp32_layers)


def is_trial(run: RunRecord) -> bool:
    """Whether a run was made to choose by: what is reported is evaluated on test images."""
    return run.settings["dataset"].get("evaluate_on") == "validation"


def is_over(run: RunRecord) -> bool:
    """Whether it was a trial: it finished, or lost."""
    return why_excluded(run) is None or run.status in LOST


def tunings(runs: Iterable[RunRecord]) -> list[Tuning]:
    """Trials by data set, model, method and device, in the paper's order."""
    alike: dict[tuple, dict[str | None, list[Cell]]] = {}
    for cell in cells(run for run in runs if is_trial(run)):
        by_device = alike.setdefault((cell.dataset, cell.model, cell.method, _conditions(cell)), {})
        by_device.setdefault(cell.device_name, []).append(cell)
    found = []
    for names, by_device in alike.items():
        # What ended before it reached a device is a trial of any that has its conditions.
        nowhere = by_device.pop(None, [])
        for trials in by_device.values() or [[]]:
            found.append(Tuning(*names[:3], tuple(_by_first_round([*trials, *nowhere]))))
    return sorted(found, key=lambda tuning: order(tuning.dataset, tuning.model, tuning.method))


def accuracy(trial: Cell) -> float | None:
    """In percent, after the last epoch, of the validation images."""
    mean = trial.mean("accuracy_percent")
    return None if mean is None else mean.mean


def _lost(trial: Cell) -> int:
    return sum(run.status in LOST for run in trial.runs)


def _standard_error(trial: Cell) -> float:
    found = trial.mean("accuracy_percent")
    images = max((run.evaluation_samples or 0 for run in trial.runs), default=0)
    of_images = math.sqrt(found.mean * (100 - found.mean) / images) if images else 0.0
    return max(of_images, 0.0 if found.std is None else found.std / math.sqrt(found.n))


def _fp32_layers(trial: Cell) -> float:
    """At the end, mean over seeds."""
    return fmean(summary.layers_executed.get("fp32", 0) for summary in trial.summaries)


def values(trial: Cell) -> dict[str, str]:
    """What was tried, as text by key."""
    return {key: trial.identifying[key] for key in KEYS if key in trial.identifying}


def _conditions(cell: Cell) -> tuple:
    """What a method's trials have in common: everything but what is tried."""
    return tuple(sorted((key, value) for key, value in cell.identifying.items() if key not in (*KEYS, "device")))


def _by_first_round(trials: Sequence[Cell]) -> list[Cell]:
    """By the seeds that all have: what a second round finds must not change who is in it."""
    shared = set.intersection(*({run.seed for run in trial.runs} for trial in trials))

    def rank(trial: Cell) -> tuple[float | str, ...]:
        found = {summary.seed: summary.accuracy_percent for summary in trial.summaries}
        first = [found.get(seed) for seed in shared or found]
        mean = fmean(first) if first and None not in first else -math.inf
        # Of equals the same trial for every method: a cell's name would be another draw for each.
        return -mean, *values(trial).values()

    return sorted(trials, key=rank)
