"""From run records to per-seed figures, and from those to mean and spread.

What was not measured stays ``None``; what did not finish has no place in a mean.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import get_args

from triaccel_bench.paper import BYTES_PER_GB
from triaccel_bench.records import EpochRecord, Meter, RunRecord, StepPhase, Verdict

LAST_EPOCHS = 5
"""Epochs at the end of a run that its time is the mean of (section 4.2)."""

PARTS = (*get_args(StepPhase), "controller", "probe", "capture")
"""Of an epoch's time."""


@dataclass(frozen=True)
class Mean:
    """Mean and sample standard deviation (n - 1) of ``n`` values; ``std`` is None for a single one."""

    mean: float
    std: float | None
    n: int

    def scaled(self, factor: float) -> Mean:
        return Mean(self.mean * factor, None if self.std is None else self.std * factor, self.n)


@dataclass(frozen=True)
class RunSummary:
    """One finished seed in the units of section 4.2; None where not measured."""

    seed: int
    accuracy_percent: float | None
    """Evaluation accuracy after the last epoch."""
    seconds: float | None
    """Training seconds an epoch, mean of the last ``seconds_epochs`` epochs."""
    seconds_epochs: int
    training_seconds: float | None
    """Of the whole run."""
    loop_seconds: float | None
    """Part of those: controller, probes and captures; None where they were not clocked."""
    first_use_seconds: float | None
    """Before the first epoch: libraries, kernels, MemMax, captures of probes."""
    meter: Meter
    memory_peak_bytes: int | None
    """In the meter's own sense: bytes of live tensors are not VRAM."""
    reserved_bytes: int | None
    """The most that the process's allocator held at the end of an epoch."""
    probe_seconds: float | None
    """Part of ``seconds``: curvature probes, mean of the same epochs; None for a run without probes."""
    probe_peak_bytes: int | None
    """The largest peak of a probe; ``memory_peak_bytes`` is no smaller."""
    score: float | None
    score_percent: float | None
    batch_mean: float | None
    """Effective batch that an average sample was trained in; B itself where it did not move."""
    batch_min: int | None
    batch_max: int | None
    layers_requested: dict[str, int]
    """Layers by dtype in the last epoch, as the method asked for and as the device executed."""
    layers_executed: dict[str, int]
    moved: bool
    """Whether any control decision took effect: another batch, plan or rate than at the start."""
    hardly_probed: bool
    """Whether the run ended without curvature of some layer, or with that of the first half of its steps for most."""
    steps_skipped: int
    epochs: int
    budget_bytes: int | None
    split_seconds: dict[str, float | None] = field(default_factory=dict)
    """``seconds`` by ``PARTS``; one is None where it is unknown of one of those epochs."""
    verdict: Verdict | None = None
    score_thirds: tuple[float, float] | None = None
    """Mean of ``epoch_scores`` in the first and in the last third of the epochs."""
    cost_thirds: tuple[float, float] | None = None
    """The same of an epoch's seconds x GB, by which its score is divided."""


def mean_std(values: Iterable[float | None]) -> Mean | None:
    """Mean and sample standard deviation of the values that were measured; None when none was.

    Raises:
        ValueError: a value is not finite.
    """
    return _mean_std(tuple(value for value in values if value is not None))


@lru_cache(maxsize=2**16)
def _mean_std(measured: tuple[float, ...]) -> Mean | None:
    # Exact sums of fractions take their time, and every table asks for the same ones again.
    if not all(math.isfinite(value) for value in measured):
        raise ValueError(f"expected finite values, got {list(measured)}; a figure that was not measured is None")
    if not measured:
        return None
    return Mean(statistics.fmean(measured), statistics.stdev(measured) if len(measured) > 1 else None, len(measured))


def score(accuracy_percent: float | None, seconds: float | None, memory_bytes: float | None) -> float | None:
    """Score = Acc(%) / (Time(s) x VRAM(GB)), GB = 1e9 bytes: what Table 1 prints.

    None where a factor was not measured or is zero: such a score would be infinite, not good.
    """
    if accuracy_percent is None or not seconds or not memory_bytes:
        return None
    return accuracy_percent / (seconds * memory_bytes / BYTES_PER_GB)


def score_percent(
    accuracy_percent: float | None, seconds: float | None, memory_bytes: float | None, device_total_bytes: float | None
) -> float | None:
    """Score = Acc(%) / (Time(s) x Memory Usage(%)) x 100, the formula of section 4.2; usage as a share of the device.

    None where a factor was not measured or is zero.
    """
    if accuracy_percent is None or not seconds or not memory_bytes or not device_total_bytes:
        return None
    return accuracy_percent / (seconds * 100 * memory_bytes / device_total_bytes) * 100


def epoch_scores(run: RunRecord) -> list[float | None]:
    """Score of each epoch from its own accuracy, seconds and VRAM peak; None where one of them was not measured."""
    costs = _epoch_costs(run)
    accuracies = [epoch.evaluation_accuracy_percent for epoch in run.epochs]
    return [
        None if accuracy is None or cost is None else accuracy / cost
        for accuracy, cost in zip(accuracies, costs, strict=True)
    ]


def _epoch_costs(run: RunRecord) -> list[float | None]:
    """Seconds x GB of each epoch."""
    peaks = [_peak_bytes([epoch]) if run.meter == "vram" else None for epoch in run.epochs]
    found = [epoch.train_seconds * (peak or 0) / BYTES_PER_GB for epoch, peak in zip(run.epochs, peaks, strict=True)]
    return [cost or None for cost in found]


def thirds(values: list[float | None]) -> tuple[float, float] | None:
    """Means of the first and of the last third; None with fewer than three values, or where one was not measured.

    A middle that does not divide by three belongs to neither.
    """
    size = len(values) // 3
    if size == 0 or None in (ends := [*values[:size], *values[-size:]]):
        return None
    return statistics.fmean(ends[:size]), statistics.fmean(ends[size:])


def split_seconds(run: RunRecord, epoch: EpochRecord) -> dict[str, float | None]:
    """An epoch's training seconds by ``PARTS``; None where a part is unknown.

    Controller, probes and captures (with the steps that warm them up) were clocked. The rest is divided as the sampled
    steps are, in an epoch of the batch size and of as many layers in each dtype as those; of others it is unknown.
    """
    clocked = {"controller": epoch.controller_seconds, "probe": epoch.probe_seconds, "capture": epoch.capture_seconds}
    rest = max(0.0, epoch.train_seconds - sum(seconds or 0.0 for seconds in clocked.values()))
    phases: dict[str, float | None] = dict.fromkeys(get_args(StepPhase))
    if run.split is not None and _is_of_sampled_steps(run, epoch):
        whole = sum(seconds or 0.0 for seconds in run.split.phase_seconds.values())
        shares = run.split.phase_seconds.items()
        phases |= {phase: None if seconds is None else rest * seconds / whole for phase, seconds in shares if whole}
    return {**phases, **clocked}


def _is_of_sampled_steps(run: RunRecord, epoch: EpochRecord) -> bool:
    same_batch = epoch.batch_min == epoch.batch_max == run.split.batch
    return same_batch and not epoch.plan_changes and epoch.layers_executed == run.split.layers_executed


def _mean_of_all(values: list[float | None]) -> float | None:
    return None if not values or None in values else statistics.fmean(values)


def _hardly_probed(run: RunRecord) -> bool:
    ages = [layer.lambda_age_steps for layer in run.layers]
    due = run.steps >= run.settings["method"]["curvature"]["every"]
    return bool(ages) and due and (None in ages or 2 * statistics.median(ages) > run.steps)


def _loop_seconds(epochs: Sequence[EpochRecord]) -> float | None:
    parts = [part for e in epochs for part in (e.controller_seconds, e.probe_seconds, e.capture_seconds)]
    return None if None in parts or not parts else math.fsum(parts)


def summarise(run: RunRecord) -> RunSummary:
    """The figures of one run. Scores need a VRAM meter: bytes of live tensors give none."""
    last = run.epochs[-LAST_EPOCHS:]
    accuracy = run.epochs[-1].evaluation_accuracy_percent if run.epochs else None
    seconds = statistics.fmean(epoch.train_seconds for epoch in last) if last else None
    memory = None if run.meter == "off" else _peak_bytes(run.epochs)
    vram = memory if run.meter == "vram" else None
    samples = sum(epoch.samples_seen for epoch in run.epochs)
    probed = any(epoch.probe_seconds for epoch in run.epochs)
    splits = [split_seconds(run, epoch) for epoch in last]
    return RunSummary(
        seed=run.seed,
        accuracy_percent=accuracy,
        seconds=seconds,
        seconds_epochs=len(last),
        training_seconds=math.fsum(epoch.train_seconds for epoch in run.epochs) if run.epochs else None,
        loop_seconds=_loop_seconds(run.epochs),
        first_use_seconds=run.first_use_seconds,
        meter=run.meter,
        memory_peak_bytes=memory,
        reserved_bytes=_largest(epoch.reserved_bytes for epoch in run.epochs),
        probe_seconds=statistics.fmean(epoch.probe_seconds for epoch in last) if probed else None,
        probe_peak_bytes=None if memory is None else _largest(epoch.probe_peak_bytes for epoch in run.epochs),
        score=score(accuracy, seconds, vram),
        score_percent=score_percent(
            accuracy, seconds, vram, run.provenance.device_total_bytes if run.provenance else None
        ),
        batch_mean=sum(e.samples_seen * _batch(e) for e in run.epochs) / samples if samples else None,
        batch_min=min((epoch.batch_min for epoch in run.epochs), default=None),
        batch_max=max((epoch.batch_max for epoch in run.epochs), default=None),
        layers_requested=run.epochs[-1].layers_requested if run.epochs else {},
        layers_executed=run.epochs[-1].layers_executed if run.epochs else {},
        moved=any(_moved(epoch, run.settings["method"]["batch"]["initial"]) for epoch in run.epochs),
        hardly_probed=_hardly_probed(run),
        steps_skipped=run.steps_skipped,
        epochs=len(run.epochs),
        budget_bytes=run.budget_bytes,
        split_seconds={part: _mean_of_all([split[part] for split in splits]) for part in PARTS},
        verdict=None if run.split is None else run.split.verdict,
        score_thirds=thirds(epoch_scores(run)),
        cost_thirds=thirds(_epoch_costs(run)),
    )


def _peak_bytes(epochs: list[EpochRecord]) -> int | None:
    # An epoch that was not metered may hold the peak, so the run then has none.
    if not epochs or any(epoch.memory_peak_bytes is None for epoch in epochs):
        return None
    return max(max(epoch.memory_peak_bytes, epoch.probe_peak_bytes or 0) for epoch in epochs)


def _largest(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _batch(epoch: EpochRecord) -> float:
    # The epoch's remainder lowers samples over steps, and says nothing of the method's choice.
    return epoch.batch_max if epoch.batch_min == epoch.batch_max else epoch.batch_mean


def _moved(epoch: EpochRecord, initial: int) -> bool:
    batch_moved = not epoch.batch_min == epoch.batch_max == initial
    return batch_moved or epoch.plan_changes > 0 or epoch.rate_scale_min != 1.0


def why_excluded(run: RunRecord) -> str | None:
    """Why a run stands in no mean; None for a finished one."""
    if run.status != "done":
        return f"{run.status}: {' '.join(run.reason.split())}" if run.reason else run.status
    if not run.epochs or len(run.epochs) < run.epochs_planned:
        return f"says done after {len(run.epochs)} of {run.epochs_planned} epochs"
    return None
