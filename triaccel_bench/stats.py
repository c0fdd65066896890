"""From run records to per-seed figures, and from those to one cell's mean and spread.

What was not measured stays ``None``; what did not finish is kept out of every mean and named.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from triaccel_bench.paper import BYTES_PER_GB
from triaccel_bench.records import EpochRecord, Meter, RunRecord

LAST_EPOCHS = 5
"""Epochs at the end of a run that its time is the mean of (section 4.2)."""

_BESIDE_THE_POINT = ("seeds", "progress", "results.", "dataset.root", "dataset.download", "dataset.mirrors")
"""Settings that cannot change a result."""

_OF_THE_METHOD = ("method.", "memory.budget", "memory.calibration_steps")


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
    meter: Meter
    memory_peak_bytes: int | None
    """In the meter's own sense: bytes of live tensors are not VRAM."""
    score: float | None
    score_percent: float | None
    batch_mean: float | None
    """Effective batch that an average sample was trained in."""
    steps_skipped: int
    epochs: int
    budget_bytes: int | None


@dataclass(frozen=True)
class Cell:
    """All seeds of one configuration on one device. Only finished seeds are in ``summaries``."""

    cell: str
    dataset: str
    model: str
    method: str
    device_name: str | None
    settings: dict[str, Any]
    runs: tuple[RunRecord, ...]
    summaries: tuple[RunSummary, ...]
    excluded: tuple[str, ...]
    """One phrase per seed that is in no mean: its number and why."""
    variant: str = ""
    """What sets this cell apart from others of the same label; empty where nothing does."""

    @property
    def seeds_expected(self) -> int:
        return len(self.summaries) + len(self.excluded)

    @property
    def meter(self) -> Meter:
        """The meter of the cell's memory figures; "off" where no seed has any."""
        return next((summary.meter for summary in self.summaries if summary.meter != "off"), "off")

    def mean(self, quantity: str) -> Mean | None:
        """Mean of a ``RunSummary`` field over the finished seeds that measured it."""
        one_meter = quantity == "memory_peak_bytes"
        chosen = (summary for summary in self.summaries if not one_meter or summary.meter == self.meter)
        return mean_std(getattr(summary, quantity) for summary in chosen)


def mean_std(values: Iterable[float | None]) -> Mean | None:
    """Mean and sample standard deviation of the values that were measured; None when none was.

    Raises:
        ValueError: a value is not finite.
    """
    measured = [value for value in values if value is not None]
    if not all(math.isfinite(value) for value in measured):
        raise ValueError(f"expected finite values, got {measured}; a figure that was not measured is None")
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


def summarise(run: RunRecord) -> RunSummary:
    """The figures of one run. Scores need a VRAM meter: bytes of live tensors give none."""
    last = run.epochs[-LAST_EPOCHS:]
    accuracy = run.epochs[-1].evaluation_accuracy_percent if run.epochs else None
    seconds = statistics.fmean(epoch.train_seconds for epoch in last) if last else None
    memory = None if run.meter == "off" else _peak_bytes(run.epochs)
    vram = memory if run.meter == "vram" else None
    samples = sum(epoch.samples_seen for epoch in run.epochs)
    return RunSummary(
        seed=run.seed,
        accuracy_percent=accuracy,
        seconds=seconds,
        seconds_epochs=len(last),
        meter=run.meter,
        memory_peak_bytes=memory,
        score=score(accuracy, seconds, vram),
        score_percent=score_percent(
            accuracy, seconds, vram, run.provenance.device_total_bytes if run.provenance else None
        ),
        batch_mean=sum(e.samples_seen * e.batch_mean for e in run.epochs) / samples if samples else None,
        steps_skipped=run.steps_skipped,
        epochs=len(run.epochs),
        budget_bytes=run.budget_bytes,
    )


def _peak_bytes(epochs: list[EpochRecord]) -> int | None:
    # An epoch that was not metered may hold the peak, so the run then has none.
    if not epochs or any(epoch.memory_peak_bytes is None for epoch in epochs):
        return None
    return max(max(epoch.memory_peak_bytes, epoch.probe_peak_bytes or 0) for epoch in epochs)


def why_excluded(run: RunRecord) -> str | None:
    """Why a run stands in no mean; None for a finished one."""
    if run.status != "done":
        return f"{run.status}: {' '.join(run.reason.split())}" if run.reason else run.status
    if not run.epochs or len(run.epochs) < run.epochs_planned:
        return f"says done after {len(run.epochs)} of {run.epochs_planned} epochs"
    return None


def cells(runs: Iterable[RunRecord]) -> list[Cell]:
    """Group runs by cell hash and device, in the order of label, hash and device.

    Seeds that a cell's settings ask for and no record holds are excluded as missing. Cells of the
    same label get a ``variant`` that names the settings in which they differ.
    """
    by_hash: dict[str, list[RunRecord]] = {}
    for run in runs:
        by_hash.setdefault(run.cell, []).append(run)
    found = [cell for members in by_hash.values() for cell in _cells_of_one_hash(members)]
    found.sort(key=lambda cell: (*_label(cell), cell.cell, cell.device_name or ""))
    by_label: dict[tuple[str, ...], list[Cell]] = {}
    for cell in found:
        by_label.setdefault(_label(cell), []).append(cell)
    return [cell for alike in by_label.values() for cell in _told_apart(alike)]


def _label(cell: Cell) -> tuple[str, ...]:
    return cell.dataset, cell.model, cell.method


def _cells_of_one_hash(members: list[RunRecord]) -> Iterator[Cell]:
    devices = sorted({run.provenance.device_name for run in members if run.provenance}) or [None]
    asked = {seed for run in members for seed in run.settings.get("seeds", ())}
    missing = sorted(asked - {run.seed for run in members})
    for device in devices:
        # A run that failed before it reached a device is listed with the first one, as missing seeds are.
        here = [run for run in members if (run.provenance.device_name if run.provenance else devices[0]) == device]
        here.sort(key=lambda run: run.seed)
        excluded = [f"seed {run.seed} {reason}" for run in here if (reason := why_excluded(run))]
        if device == devices[0]:
            excluded += [f"seed {seed} missing: asked for, no record" for seed in missing]
        first = here[0]
        yield Cell(
            cell=first.cell,
            dataset=first.dataset,
            model=first.model,
            method=first.method,
            device_name=device,
            settings=first.settings,
            runs=tuple(here),
            summaries=tuple(summarise(run) for run in here if why_excluded(run) is None),
            excluded=tuple(excluded),
        )


def _told_apart(alike: list[Cell]) -> Iterator[Cell]:
    if len(alike) == 1:
        yield from alike
        return
    flat = [dict(_identifying(cell)) for cell in alike]
    keys = sorted({key for settings in flat for key in settings})
    differing = [key for key in keys if len({settings.get(key) for settings in flat}) > 1]
    variants = [", ".join(f"{key}={settings.get(key)}" for key in differing) for settings in flat]
    for cell, variant in zip(alike, variants, strict=True):
        if variants.count(variant) > 1:
            variant = f"{variant}, cell={cell.cell}".removeprefix(", ")
        yield replace(cell, variant=variant)


def baseline(cell: Cell, found: Iterable[Cell]) -> Cell | None:
    """The one fp32 cell, with memory of the same meter, that differs from ``cell`` in its method and budget alone."""

    def shared(one: Cell) -> dict[str, str]:
        read = {key: value for key, value in _identifying(one) if not key.startswith(_OF_THE_METHOD)}
        return read | {"initial": one.settings["method"]["batch"]["initial"], "meter": one.meter}

    candidates = [other for other in found if _label(other) == (cell.dataset, cell.model, "fp32")]
    alike = [other for other in candidates if other.mean("memory_peak_bytes") and shared(other) == shared(cell)]
    return alike[0] if len(alike) == 1 else None


def _identifying(cell: Cell) -> Iterator[tuple[str, str]]:
    for key, value in _flat(cell.settings):
        if not key.startswith(_BESIDE_THE_POINT):
            yield key, value if isinstance(value, str) else json.dumps(value)
    yield "device_name", str(cell.device_name)
    yield "results_version", str(cell.runs[0].results_version)


def _flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
