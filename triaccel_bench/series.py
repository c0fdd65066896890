"""Records and traces to series over training, for pictures. Draws nothing, imports no torch.

Steps are placed by epochs trained, so that runs of different batch sizes share an axis.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import fmean

from triaccel_bench.cells import Cell
from triaccel_bench.paper import BYTES_PER_GB
from triaccel_bench.records import TRACE_FILE, BackOffTrace, DecisionTrace, RecordError, RunRecord, Trace, read_trace
from triaccel_bench.results import Results
from triaccel_bench.sheet import Sheet
from triaccel_bench.stats import why_excluded


@dataclass(frozen=True, eq=False)
class Member:
    """A cell in a picture, and how it is called there."""

    cell: Cell
    name: str


@dataclass(frozen=True)
class Group:
    """The cells of one data set and model, which share a picture."""

    stem: str
    title: str
    members: tuple[Member, ...]


def groups(sheet: Sheet) -> list[Group]:
    """In the order of the sheet. Stems are file names, each there once."""
    alike: dict[tuple[str, ...], list[Member]] = {}
    for cell in sheet.cells:
        *labels, name = sheet.names(cell)
        alike.setdefault(tuple(labels), []).append(Member(cell, name))
    stem = Stems()
    return [
        Group(stem(found[0].cell.dataset, found[0].cell.model), ", ".join(labels), tuple(found))
        for labels, found in alike.items()
    ]


class Stems:
    """File names made of labels; one that is taken gets a number."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def __call__(self, *parts: str) -> str:
        plain = "-".join(re.sub(r"[^a-z0-9_.]+", "_", part.lower()) for part in parts)
        stem, number = plain, 1
        while stem in self._taken:
            number += 1
            stem = f"{plain}-{number}"
        self._taken.add(stem)
        return stem


def finished(cell: Cell) -> list[RunRecord]:
    return [run for run in cell.runs if why_excluded(run) is None]


@dataclass(frozen=True)
class Curve:
    """Accuracy after each epoch: mean over seeds, lowest and highest, at the mean of their positions."""

    x: tuple[float, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    seeds: int


def accuracy_over_seconds(cell: Cell) -> Curve | None:
    """Over training seconds since the start; None where no finished seed was evaluated."""
    return _curve(finished(cell), lambda run: [epoch.train_seconds for epoch in run.epochs])


def accuracy_over_memory(cell: Cell) -> Curve | None:
    """Over the sum of seconds times peak GB of each epoch; None where no finished seed was metered throughout."""
    runs = [run for run in finished(cell) if run.meter == cell.meter != "off"]
    metered = [run for run in runs if all(epoch.memory_peak_bytes is not None for epoch in run.epochs)]
    return _curve(
        metered,
        lambda run: [epoch.train_seconds * epoch.memory_peak_bytes / BYTES_PER_GB for epoch in run.epochs],
    )


def _curve(runs: list[RunRecord], spent: Callable[[RunRecord], list[float]]) -> Curve | None:
    positions = [tuple(accumulate(spent(run))) for run in runs]
    points = []
    for number in range(min((len(run.epochs) for run in runs), default=0)):
        values = [run.epochs[number].evaluation_accuracy_percent for run in runs]
        if None not in values:
            points.append((fmean(x[number] for x in positions), fmean(values), min(values), max(values)))
    return Curve(*zip(*points), seeds=len(runs)) if points else None


class Traces:
    """Finds the trace beside a record."""

    def __init__(self, results: Results) -> None:
        self._paths: dict[tuple[str, int, str | None], Path] = {
            _key(run): path.with_name(TRACE_FILE) for run, path in zip(results.runs, results.paths)
        }
        self._read: dict[Path, Trace | None] = {}

    def of(self, run: RunRecord) -> Trace | None:
        """None where there is none, or none that can be read or holds a decision."""
        path = self._paths.get(_key(run))
        if path is None:
            return None
        if path not in self._read:
            try:
                self._read[path] = read_trace(path)
            except RecordError:
                self._read[path] = None
        trace = self._read[path]
        return trace if trace is not None and trace.decisions else None

    def first(self, cell: Cell) -> tuple[RunRecord, Trace | None] | None:
        """The finished seed that a picture of one run shows: the first with a trace, else the first."""
        runs = finished(cell)
        for run in runs:
            if (trace := self.of(run)) is not None:
                return run, trace
        return (runs[0], None) if runs else None


def _key(run: RunRecord) -> tuple[str, int, str | None]:
    return run.cell, run.seed, run.provenance.device_name if run.provenance else None


def epochs_trained(run: RunRecord) -> Callable[[int], float]:
    """Steps done to epochs done, the last epoch's end included."""
    ends = [0, *accumulate(epoch.steps for epoch in run.epochs)]

    def position(step: int) -> float:
        for number, (start, end) in enumerate(zip(ends, ends[1:])):
            if step <= end:
                return number + (step - start) / max(end - start, 1)
        return float(len(run.epochs))

    return position


@dataclass(frozen=True)
class Course:
    """Memory and batch size of one run by epochs trained."""

    memory: tuple[tuple[float, int], ...]
    """Epochs and the peak in bytes since the point before."""
    batch: tuple[tuple[float, float], ...]
    """Epochs and the batch size from there on."""
    budget_bytes: int | None
    traced: bool
    """Points are control steps; otherwise they are ends of epochs, and batch sizes are their means."""


def course(run: RunRecord, trace: Trace | None) -> Course:
    if trace is None:
        memory = [(number, epoch.memory_peak_bytes) for number, epoch in enumerate(run.epochs, 1)]
        batch = [(float(number), epoch.batch_mean) for number, epoch in enumerate(run.epochs)]
        # An epoch's remainder lowers its mean where B stood still.
        batch = [
            (at, float(epoch.batch_max) if epoch.batch_min == epoch.batch_max else mean)
            for (at, mean), epoch in zip(batch, run.epochs)
        ]
    else:
        at = epochs_trained(run)
        memory = [(at(seen.step), seen.memory_bytes) for seen in trace.decisions]
        batch = [(0.0, float(trace.decisions[0].batch_before))]
        batch += [(at(in_force_after(event)), float(event.batch_after)) for event in events(trace)]
    measured = () if run.meter == "off" else tuple((float(x), value) for x, value in memory if value is not None)
    end = float(len(run.epochs))
    return Course(measured, (*batch, (end, batch[-1][1])), run.budget_bytes, trace is not None)


def events(trace: Trace) -> list[DecisionTrace | BackOffTrace]:
    # Earlier traces do not tell when a decision came into force, so that ``Trace.events`` has no order of theirs.
    return sorted([*trace.decisions, *trace.back_offs], key=lambda e: (in_force_after(e), type(e) is BackOffTrace))


def in_force_after(event: DecisionTrace | BackOffTrace) -> int:
    return event.step if event.in_force_after is None else event.in_force_after


@dataclass(frozen=True)
class LayerMap:
    """What was in force in each layer. Grids hold one row a layer and one column between two edges."""

    layers: tuple[str, ...]
    edges: tuple[float, ...]
    """Epochs trained, from the start to the end."""
    requested: tuple[tuple[str | None, ...], ...]
    """None: not recorded."""
    executed: tuple[tuple[str | None, ...], ...]
    promoted: tuple[tuple[bool, ...], ...]
    """Whether its curvature raised what the layer asks for."""
    rates: tuple[tuple[float, ...], ...]
    lambdas: tuple[tuple[float | None, ...], ...]
    """Largest eigenvalues as the decision saw them; None: not read yet, or not finite."""

    @property
    def substituted(self) -> bool:
        """Whether some layer ran in another dtype than was asked for."""
        pairs = ((a, e) for asks, runs in zip(self.requested, self.executed) for a, e in zip(asks, runs))
        return any(asked != ran for asked, ran in pairs if None not in (asked, ran))


def layer_map(run: RunRecord, trace: Trace) -> LayerMap:
    at, count = epochs_trained(run), len(trace.layers)
    columns = [(0.0, *_at_the_start(run, trace), (False,) * count, (1.0,) * count, (None,) * count)]
    for seen in trace.decisions:
        lambdas = tuple(map(_finite, seen.lambda_max)) if seen.lambda_max is not None else (None,) * count
        plan = tuple(seen.requested), tuple(seen.executed), tuple(seen.promoted)
        columns.append((at(in_force_after(seen)), *plan, tuple(seen.rate_scale), lambdas))
    # What came into force at the very end was trained with by nobody.
    end = float(len(run.epochs))
    columns = [column for column in columns if column[0] < end]
    starts, *grids = zip(*columns)
    return LayerMap(tuple(trace.layers), (*starts, end), *(tuple(zip(*grid)) for grid in grids))


def _at_the_start(run: RunRecord, trace: Trace) -> tuple[tuple[str | None, ...], tuple[str | None, ...]]:
    dtype, count = run.settings["method"]["dtype"], len(trace.layers)
    if trace.start is not None:
        return (dtype,) * count, (trace.start.executes[dtype],) * count
    first = trace.decisions[0]
    return (dtype,) * count, (None,) * count if first.plan_changed else tuple(first.executed)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def adapts_precision(cell: Cell) -> bool:
    method = cell.settings["method"]
    # FP32 layers have no wider dtype to be promoted to.
    return method["precision"]["adaptive"] or (method["curvature"]["promotion"] and method["dtype"] != "fp32")


def reads_curvature(cell: Cell) -> bool:
    curvature = cell.settings["method"]["curvature"]
    return curvature["rates"] or curvature["promotion"]


def of_one_meter(members: Iterable[Member]) -> tuple[str, list[Member]]:
    """VRAM where some cell has it, else live tensors, and the members that were measured so."""
    members = list(members)
    meter = next((name for name in ("vram", "tensors") if any(one.cell.meter == name for one in members)), "off")
    return meter, [one for one in members if one.cell.meter == meter != "off"]
