"""The audit as tables: the paper's figures, and our own records held against the same lower bounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, get_args

import pandas

from triaccel_bench import bounds, labels, paper
from triaccel_bench.bounds import Arithmetic, Widths
from triaccel_bench.findings import BYTES_PER_GIB, Verdict, findings
from triaccel_bench.layout import Table
from triaccel_bench.paper import BYTES_PER_GB
from triaccel_bench.records import Meter, RunRecord
from triaccel_bench.results import Results

CONSISTENT, IMPOSSIBLE, NO_BOUND, NOT_MEASURED = "consistent", "impossible", "no bound", "nothing measured"

_MISSING = "n/a"

_MEMORY_TEXT = (
    "Memory, at least: weights, momentum, and the inputs of all normalisations at the end of the forward pass or all "
    "gradients at the end of the backward pass; where blocks may be run again, one normalisation's input beside its "
    "gradient. No workspace, copies, buffers or other results."
)
_TIME_TEXT = (
    "Time, at least: multiply-adds forward and backward, by the fewest multiplications of a fast convolution, with "
    "every unit of the card busy at its highest clock. No data, normalisation, update or launch."
)
_PAPER_TEXT = (
    "In the paper's favour: FP32 rows keep 4 bytes an element; AMP 4 for weights and momentum, 2 for the rest; "
    f"Tri-Accel's precision 2 for everything; any method may run blocks again; GB is read as {BYTES_PER_GIB:,} bytes; "
    "the faster card of the two counts."
)
_OURS_TEXT = (
    "For each record the epoch that comes nearest to its bound, at that epoch's smallest batch and the narrowest dtype "
    "that the run executed. Memory is the meter's peak without the resident data set."
)


@dataclass(frozen=True)
class CheckedRecord:
    """One record's figures beside its lower bounds; None where there is no figure or no bound."""

    dataset: str
    model: str
    input_size: int | None
    method: str
    cell: str
    seed: int
    device_name: str | None
    meter: Meter
    epochs: int
    memory_peak_bytes: int | None
    memory_bound_bytes: int | None
    train_seconds: float | None
    bound_seconds: float | None

    @property
    def verdict(self) -> str:
        held = [
            measured >= bound
            for measured, bound in (
                (self.memory_peak_bytes, self.memory_bound_bytes),
                (self.train_seconds, self.bound_seconds),
            )
            if measured is not None and bound is not None
        ]
        if held:
            return CONSISTENT if all(held) else IMPOSSIBLE
        return NO_BOUND if self.epochs else NOT_MEASURED


def audit_table() -> Table:
    """Every figure that the paper prints, what was computed for it, and the verdict."""
    found = findings()
    counts = Counter(finding.verdict for finding in found)
    told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in get_args(Verdict))
    return Table(
        title="Audit of the paper's printed numbers",
        caption=f"{len(found)} findings: {told}. Misprints are shown as printed.",
        header=("Where", "What", "Printed", "Computed", "Verdict", "Note"),
        rows=tuple((f.where, f.what, f.printed, f.computed, f.verdict, f.note) for f in found),
        footers=(_MEMORY_TEXT, _TIME_TEXT, _PAPER_TEXT, *paper.REMARKS),
        frame=pandas.DataFrame(found),
        text_columns=6,
    )


def records_table(results: Results) -> Table:
    """Every record beside the lower bounds of its own network, batch, dtypes and card."""
    checked = check_records(results)
    counts = Counter(record.verdict for record in checked)
    told = ", ".join(
        f"{counts[verdict]} {verdict}"
        for verdict in (CONSISTENT, IMPOSSIBLE, NO_BOUND, NOT_MEASURED)
        if counts[verdict]
    )
    return Table(
        title="Audit of the records against lower bounds",
        caption=f"{len(checked)} records: {told}. {_OURS_TEXT}",
        header=(
            "Dataset", "Architecture", "Method", "Cell", "Seed", "Device",
            "Memory (GB)", "Least (GB)", "Time (s)", "Least (s)", "Verdict",
        ),
        rows=tuple(map(_row, checked)),
        footers=(_MEMORY_TEXT, _TIME_TEXT, *_notes(checked), *(f"Not used: {problem}" for problem in results.problems)),
        frame=pandas.DataFrame([asdict(record) | {"verdict": record.verdict} for record in checked], dtype=object),
        text_columns=6,
        group_columns=2,
        folding=frozenset({"Verdict"}),
    )  # fmt: skip


def check_records(results: Results) -> list[CheckedRecord]:
    """All records, finished or not, by data set, model, method, cell and seed."""
    return sorted(
        map(_checked, results.runs),
        key=lambda record: (record.dataset, record.model, record.method, record.cell, record.seed),
    )


def _checked(run: RunRecord) -> CheckedRecord:
    device = run.provenance.device_name if run.provenance else None
    memory_bytes, memory_bound = min(_memory(run), key=_nearness, default=(None, None))
    seconds, seconds_bound = min(_seconds(run, device), key=_nearness, default=(None, None))
    return CheckedRecord(
        dataset=run.dataset,
        model=run.model,
        input_size=_setting(run, "model.input_size", None),
        method=run.method,
        cell=run.cell,
        seed=run.seed,
        device_name=device,
        meter=run.meter,
        epochs=len(run.epochs),
        memory_peak_bytes=memory_bytes,
        memory_bound_bytes=memory_bound,
        train_seconds=seconds,
        bound_seconds=seconds_bound,
    )


def _nearness(pair: tuple[float, float | None]) -> float:
    measured, bound = pair
    return measured / bound if bound else measured


def _memory(run: RunRecord) -> Iterator[tuple[int, int | None]]:
    """Each metered epoch's peak and its bound."""
    shape = _shape(run)
    widths, rerun = _widths(run), bool(_setting(run, "model.checkpointing", False))
    for epoch in run.epochs:
        if run.meter != "off" and epoch.memory_peak_bytes is not None:
            least = shape and bounds.memory_bytes(shape, _classes(run), epoch.batch_min, widths, rerun)
            yield epoch.memory_peak_bytes, least


def _seconds(run: RunRecord, device: str | None) -> Iterator[tuple[float, float | None]]:
    """Each epoch's training seconds and their bound."""
    shape, card = _shape(run), bounds.card_of(device)
    for epoch in run.epochs:
        known = shape is not None and card is not None
        least = bounds.seconds(shape, _classes(run), epoch.samples_seen, card.rate(_arithmetic(run))) if known else None
        yield epoch.train_seconds, least


def _shape(run: RunRecord) -> bounds.NetworkShape | None:
    return bounds.shape_of(run.model, _setting(run, "model.input_size", None))


def _classes(run: RunRecord) -> int:
    return run.settings["dataset"]["num_classes"]


def _widths(run: RunRecord) -> Widths:
    """What our runs keep: weights in FP32 always, all else as the settings and the executed dtypes say."""
    narrow = 2 if _is_narrow(run) else 4
    momentum = 2 if _setting(run, "method.update.momentum_dtype", "fp32") == "bf16" else 4
    return Widths(
        momentum=momentum if _setting(run, "optimizer.momentum", 0) else 0,
        gradients=0 if _setting(run, "method.update.in_backward", False) else narrow,
        activations=narrow,
    )


def _arithmetic(run: RunRecord) -> Arithmetic:
    if _is_narrow(run):
        return "16 bit"
    return "tf32" if _setting(run, "method.tf32", False) else "fp32"


def _is_narrow(run: RunRecord) -> bool:
    """Whether any layer may have executed in 16 bit: a plan that moves may have, between two ends of epochs."""
    executed = {dtype for epoch in run.epochs for dtype, layers in epoch.layers_executed.items() if layers}
    return bool(executed - {"fp32"}) or bool(_setting(run, "method.precision.adaptive", False))


def _setting(run: RunRecord, key: str, default: Any) -> Any:
    """A setting of a record, which another version may have written without it."""
    tree: Any = run.settings
    for part in key.split("."):
        if not isinstance(tree, dict) or part not in tree:
            return default
        tree = tree[part]
    return tree


def _row(record: CheckedRecord) -> tuple[str, ...]:
    mark = " ‡" if record.meter == "tensors" else ""
    return (
        labels.DATASETS.get(record.dataset, record.dataset),
        labels.MODELS.get(record.model, record.model),
        labels.METHODS.get(record.method, record.method),
        record.cell,
        str(record.seed),
        record.device_name or _MISSING,
        _gb(record.memory_peak_bytes) + (mark if record.memory_peak_bytes is not None else ""),
        _gb(record.memory_bound_bytes),
        _MISSING if record.train_seconds is None else f"{record.train_seconds:.3f}",
        _MISSING if record.bound_seconds is None else f"{record.bound_seconds:.3f}",
        record.verdict,
    )


def _gb(size: int | None) -> str:
    return _MISSING if size is None else f"{size / BYTES_PER_GB:.3f}"


def _notes(checked: list[CheckedRecord]) -> Iterator[str]:
    if any(record.meter == "tensors" for record in checked):
        yield labels.TENSORS_NOTE
    networks = {(record.model, record.input_size) for record in checked}
    lacking = sorted(f"{model} at {size}" for model, size in networks if bounds.shape_of(model, size) is None)
    devices = {record.device_name for record in checked if record.epochs and record.device_name}
    unknown = sorted(device for device in devices if bounds.card_of(device) is None)
    if unknown:
        yield f"No bound on time: {', '.join(unknown)}; rates are known of {', '.join(bounds.CARDS)}"
    if lacking:
        yield f"No bound: {', '.join(lacking)}; scripts/make_bounds.py counts the networks that it lists"
