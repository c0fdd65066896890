"""What each picture of records shows, before anybody draws it: its lines, the words at its axes, the sentences below.

Printed pictures and those of a page are drawn from the same scenes. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from triaccel_bench import series
from triaccel_bench.paper import BYTES_PER_GB
from triaccel_bench.records import RunRecord, Trace
from triaccel_bench.series import Course, Curve, Group, LayerMap, Member, Traces
from triaccel_bench.sheet import Sheet

NO_SEED = "no finished seed"


@dataclass(frozen=True)
class Accuracy:
    """Accuracy over time and over GB·s; a member without a curve is not in it."""

    title: str
    over_time: dict[Member, Curve]
    over_memory: dict[Member, Curve]
    labels: dict[Member, str]
    memory_kind: str
    """What GB·s are of."""
    lacking: tuple[str, str]
    """What stands in either half where it has no curve."""
    notes: tuple[str, ...]


def accuracy(group: Group, sheet: Sheet) -> Accuracy:
    meter, metered = series.of_one_meter(group.members)
    unmeasured = "no VRAM reading" if meter == "vram" else "no memory reading"
    over_time = {one: found for one in group.members if (found := series.accuracy_over_seconds(one.cell))}
    over_memory = {one: found for one in metered if (found := series.accuracy_over_memory(one.cell))}
    notes = []
    if any(curve.seeds > 1 for curve in over_time.values()):
        notes.append("Lines: means over n seeds; bands: lowest to highest seed.")
    if any(curve.seeds == 1 for curve in over_time.values()):
        notes.append("n = 1: one seed, no range.")
    if any(one.cell.mean("probe_peak_bytes") for one in over_memory):
        notes.append("Peaks are training's, curvature probes apart.")
    lacking = [one.name for one in over_time if one not in over_memory]
    if lacking and over_memory:
        notes.append(f"Not over GB·s: {', '.join(lacking)} ({unmeasured}).")
    fewer = [one.name for one, curve in over_memory.items() if curve.seeds < over_time[one].seeds]
    if fewer:
        notes.append(f"Over GB·s fewer seeds, for want of memory readings: {', '.join(fewer)}.")
    return Accuracy(
        title=f"Accuracy over training: {group.title}",
        over_time=over_time,
        over_memory=over_memory,
        labels={one: f"{one.name} (n = {curve.seeds})" for one, curve in over_time.items()},
        memory_kind="peak of live tensors (GB·s, not VRAM)" if meter == "tensors" else "peak VRAM (GB·s)",
        lacking=(NO_SEED, unmeasured if over_time else NO_SEED),
        notes=(" ".join(notes), *_left_out(group.members, sheet)),
    )


@dataclass(frozen=True)
class Memory:
    """Memory against the budget with the batch size beneath, one run of each member."""

    title: str
    courses: dict[Member, Course]
    measured: dict[Member, Course]
    """Those whose memory is drawn."""
    labels: dict[Member, str]
    unit: str
    factor: float
    """Bytes of one unit."""
    kind: str
    budgets: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Names of the members that have each budget in bytes."""
    lacking: str = ""
    notes: tuple[str, ...] = ()


def memory(group: Group, sheet: Sheet, traces: Traces) -> Memory:
    shown = {one: found for one in group.members if (found := traces.first(one.cell))}
    labels = {one: f"{one.name} ({_which(one, run)})" for one, (run, _) in shown.items()}
    title = f"Memory and batch size over training: {group.title}"
    meter, metered = series.of_one_meter(group.members)
    return _memory(title, shown, labels, meter, metered, "One run each.", _left_out(group.members, sheet))


def memory_of_run(member: Member, run: RunRecord, trace: Trace | None) -> Memory:
    """The same of one run, which has an epoch at least and need not have ended well."""
    shown, labels = {member: (run, trace)}, {member: member.name}
    return _memory("Memory and batch size", shown, labels, run.meter, [member], "", [])


def _memory(
    title: str,
    shown: dict[Member, tuple[RunRecord, Trace | None]],
    labels: dict[Member, str],
    meter: str,
    metered: Sequence[Member],
    opening: str,
    left_out: list[str],
) -> Memory:
    courses = {one: series.course(*found) for one, found in shown.items()}
    measured = {one: line for one, line in courses.items() if one in metered and line.memory}
    readings = [value for line in measured.values() for _, value in line.memory]
    unit, factor = ("MB", 1e6) if readings and max(readings) < 1e7 else ("GB", BYTES_PER_GB)
    budgets: dict[int, tuple[str, ...]] = {}
    for one, line in measured.items():
        if line.budget_bytes is not None:
            budgets[line.budget_bytes] = *budgets.get(line.budget_bytes, ()), one.name
    untraced = [one.name for one, line in courses.items() if not line.traced]
    notes = [opening] if courses and opening else []
    if len(untraced) < len(courses):
        notes.append("A level is training's peak between two control steps, curvature probes apart.")
    told = [f"{budget / factor:.4g} {unit} ({', '.join(names)})" for budget, names in sorted(budgets.items())]
    if readings:
        notes.append(f"Thin dotted lines: budgets, {'; '.join(told)}." if told else "No budget.")
    if untraced:
        notes.append(f"No trace, so peaks and mean batch sizes of whole epochs: {', '.join(untraced)}.")
    others = [one.name for one in courses if one not in measured]
    if others and readings:
        notes.append(f"Memory not drawn: {', '.join(others)} (no reading of this kind).")
    return Memory(
        title=title,
        courses=courses,
        measured=measured,
        labels=labels,
        unit=unit,
        factor=factor,
        kind="Peak of live tensors, not VRAM" if meter == "tensors" else "Peak VRAM",
        budgets=budgets,
        lacking="no memory reading" if courses else NO_SEED,
        notes=(" ".join(notes), *left_out),
    )


@dataclass(frozen=True)
class Layers:
    """What was in force in each layer of one run; ``found`` is None where it is ``lacking``."""

    found: LayerMap | None
    lacking: str
    notes: tuple[str, ...]


def layers(member: Member, sheet: Sheet, traces: Traces) -> Layers:
    first, left_out = traces.first(member.cell), _left_out((member,), sheet)
    if first is None or first[1] is None:
        return Layers(None, NO_SEED if first is None else "no trace", tuple(left_out))
    run, trace = first
    return Layers(series.layer_map(run, trace), "", (f"One run of {member.name}: {_which(member, run)}.", *left_out))


def _which(member: Member, run: RunRecord) -> str:
    count = len(member.cell.summaries)
    return f"seed {run.seed}, n = 1" if count == 1 else f"seed {run.seed} of n = {count}"


def _left_out(members: Sequence[Member], sheet: Sheet) -> list[str]:
    notes = [f"Not drawn: {one.name}: {'; '.join(one.cell.excluded)}." for one in members if one.cell.excluded]
    marks = {one.name.rpartition(" ")[2] for one in members}
    return [*notes, *(note for note in sheet.variant_notes if note.partition(" ")[0] in marks)]
