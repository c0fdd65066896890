"""What a page tells of each run, and of the machines and code behind all of them, from records alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pandas

from triaccel_bench import series
from triaccel_bench.cells import Cell
from triaccel_bench.footers import NOT_MEASURED, version
from triaccel_bench.identity import flat
from triaccel_bench.labels import layer_mix
from triaccel_bench.layout import Table
from triaccel_bench.paper import BYTES_PER_GB
from triaccel_bench.records import BackOffTrace, DecisionTrace, EpochRecord, Provenance, RunRecord, Trace
from triaccel_bench.series import Stems
from triaccel_bench.sheet import Sheet
from triaccel_bench.stats import RunSummary, epoch_scores, summarise, why_excluded

_MB = 1e6

Facts = list[tuple[str, str]]
"""Names and values."""


@dataclass(frozen=True)
class Part:
    """A part of a whole, as text and, for a bar, as a share of the largest; None: unknown."""

    name: str
    text: str
    percent: float | None


@dataclass(frozen=True)
class Parts:
    title: str
    caption: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class RunPage:
    """One run."""

    anchor: str
    names: tuple[str, ...]
    """Data set, architecture and method, as in the tables."""
    cell: Cell
    run: RunRecord
    trace: Trace | None

    @property
    def title(self) -> str:
        return f"{', '.join(self.names)}, seed {self.run.seed}"

    @property
    def excluded(self) -> str | None:
        return why_excluded(self.run)


def run_pages(sheet: Sheet, traces: series.Traces) -> list[RunPage]:
    """Every run in the order of the sheet, each with an address of its own."""
    stem = Stems()
    return [
        RunPage(
            stem("run", cell.dataset, cell.model, cell.method, cell.cell, f"seed{run.seed}"),
            sheet.names(cell),
            cell,
            run,
            traces.of(run),
        )
        for cell in sheet.found
        for run in cell.runs
    ]


def environments(runs: Sequence[RunRecord]) -> list[tuple[str, Facts]]:
    """The machines and versions that the records name, each once: the device, and what else is known of it."""
    counts = Counter(_environment(run.provenance) for run in runs if run.provenance)
    told = []
    for (device, *values), count in sorted(counts.items()):
        known = [(name, value) for name, value in zip(_ENVIRONMENT, values) if value]
        told.append((device, [*known, ("Runs", str(count))]))
    return told


_ENVIRONMENT = (
    "Memory", "Capability", "Native BF16", "Driver", "CUDA", "cuDNN", "PyTorch", "torchvision", "Triton", "Python",
    "Kernels", "Code",
)  # fmt: skip


def _environment(found: Provenance) -> tuple[str, ...]:
    total = found.device_total_bytes
    known = (
        found.device_name,
        total and f"{_size(total)} GB",
        found.capability,
        "yes" if found.bf16_native else "no",
        found.driver,
        found.cuda,
        found.cudnn,
        found.torch,
        found.torchvision,
        found.triton,
        found.python,
        f"{found.kernels}: {found.kernels_reason}",
        version(found),
    )
    return tuple(value or "" for value in known)


def index(pages: Sequence[RunPage]) -> Table:
    """All runs, those that are in no mean included."""
    header = (
        "Run", "Status", "Epochs", "Acc (%)", "Time (s)", "Memory (GB)", "Eff. Score", "Batch", "Warnings", "Device",
    )  # fmt: skip
    rows = []
    for page in pages:
        found, run = summarise(page.run), page.run
        batch = NOT_MEASURED
        if found.batch_min is not None:
            batch = (
                str(found.batch_min) if found.batch_min == found.batch_max else f"{found.batch_min}–{found.batch_max}"
            )
        rows.append((
            page.title, run.status, f"{len(run.epochs)} of {run.epochs_planned}",
            _figure(found.accuracy_percent, 2), _figure(found.seconds, 3), _size(found.memory_peak_bytes),
            _figure(found.score, 2), batch, str(len(run.warnings)),
            run.provenance.device_name if run.provenance else NOT_MEASURED,
        ))  # fmt: skip
    caption = (
        "Each run has a page. Accuracy is that of the last epoch, time the mean of the last epochs, memory the peak of "
        "the run's own meter; what did not finish is in no mean of the tables."
    )
    return _table("", caption, header, rows)


def facts(page: RunPage) -> Facts:
    """What the record says of the whole run; what is unknown is left out."""
    run, found = page.run, page.run.provenance
    known: list[tuple[str, object]] = [("Cell", run.cell)]
    if found:
        known += [("Device", f"{found.device_name} ({found.device})"), ("Code", version(found))]
        known += [("Kernels", f"{found.kernels}: {found.kernels_reason}")]
        known += [("Started", found.started_at), ("Finished", found.finished_at)]
        known += [("Clock, temperature at the end", _clock(found))]
    known += [
        ("Epochs", f"{len(run.epochs)} of {run.epochs_planned}"),
        ("Steps", f"{run.steps}, {run.steps_skipped} skipped"),
        ("Samples applied", run.samples_applied),
        ("Resumed at step", ", ".join(map(str, run.resumed_at))),
        ("Memory ran out", ", ".join(f"{count} × {cause}" for cause, count in run.retries.items())),
        ("CUDA graphs", {True: "yes", False: f"no: {run.eager_reason}", None: None}[run.graphs]),
        ("Memory meter", f"{run.meter}: {run.meter_reason}" if run.meter_reason else run.meter),
        ("Budget", run.budget_bytes and f"{_size(run.budget_bytes)} GB ({run.budget_source})"),
        ("τ low, τ high", _thresholds(run.tau_low, run.tau_high)),
        ("τ of curvature", _thresholds(run.tau_curv)),
        ("Before the first epoch", run.first_use_seconds and f"{run.first_use_seconds:.2f} s"),
        ("Checkpoints", run.checkpoint_seconds and f"{run.checkpoint_seconds:.2f} s"),
        ("Training, evaluation images", run.train_samples and f"{run.train_samples}, {run.evaluation_samples}"),
        ("Data fingerprint", run.dataset_fingerprint),
    ]
    return [(name, str(value)) for name, value in known if value not in (None, "", 0.0)]


def _clock(found: Provenance) -> str:
    read = ((found.sm_clock_mhz, "MHz"), (found.temperature_celsius, "°C"))
    return ", ".join(f"{value} {unit}" for value, unit in read if value is not None)


def _thresholds(*values: float | None) -> str | None:
    return None if None in values else ", ".join(f"{value:.4g}" for value in values)


def differing_settings(page: RunPage, alike: Sequence[Cell]) -> Table | None:
    """What names this run's cell and is not the same in all cells of its data set and model; None where nothing is."""
    keys = [key for key in page.cell.identifying if len({cell.identifying.get(key) for cell in alike}) > 1]
    if not keys:
        return None
    caption = "Of what this run read, what is not the same in all runs of this data set and architecture."
    return _table("", caption, ("Setting", "Value"), [(key, page.cell.identifying[key]) for key in sorted(keys)])


def all_settings(page: RunPage) -> str:
    return "\n".join(
        f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in flat(page.run.settings)
    )


def epochs(page: RunPage, most: int) -> Table | None:
    """One row an epoch; columns without a figure are left out, and so are rows where there are too many."""
    run = page.run
    if not run.epochs:
        return None
    step = -(-len(run.epochs) // most)
    columns: dict[str, list[str]] = {}
    for number, (epoch, score) in enumerate(zip(run.epochs, epoch_scores(run))):
        if number % step == 0 or number == len(run.epochs) - 1:
            for name, text in _epoch(epoch, score).items():
                columns.setdefault(name, []).append(text)
    told = {
        name: texts
        for name, texts in columns.items()
        if name == "Epoch" or any(t not in ("", NOT_MEASURED) for t in texts)
    }
    footers = [f"Thinned out for the size of this page: one epoch in {step}, and the last."] * (step > 1)
    return _table("", "", tuple(told), list(zip(*told.values())), footers)


def _epoch(epoch: EpochRecord, score: float | None) -> dict[str, str]:
    one_size = epoch.batch_min == epoch.batch_max
    return {
        "Epoch": str(epoch.epoch),
        "Train loss": _figure(epoch.train_loss, 4),
        "Train acc (%)": _figure(epoch.train_accuracy_percent, 2),
        "Eval. loss": _figure(epoch.evaluation_loss, 4),
        "Eval. acc (%)": _figure(epoch.evaluation_accuracy_percent, 2),
        "Time (s)": f"{epoch.train_seconds:.3f}",
        "Peak (GB)": _size(epoch.memory_peak_bytes),
        "Eff. Score": _figure(score, 2),
        "Batch": str(epoch.batch_max) if one_size else f"{epoch.batch_mean:.1f} ({epoch.batch_min}–{epoch.batch_max})",
        "Steps": str(epoch.steps),
        "Skipped": str(epoch.steps_skipped or ""),
        "Learning rate": f"{epoch.learning_rate_last:.4g}",
        "Loss scale": _figure(epoch.loss_scale_last, 0),
        "Executed": layer_mix([epoch.layers_executed]),
        "Plans": str(epoch.plan_changes or ""),
        "Promoted": str(epoch.layers_promoted or ""),
        "Least rate scale": "" if epoch.rate_scale_min == 1.0 else f"{epoch.rate_scale_min:.3f}",
        "Largest λ": "" if epoch.lambda_max is None else f"{epoch.lambda_max:.4g}",
        "Probes (s)": f"{epoch.probe_seconds:.3f}" if epoch.probe_seconds else "",
        "Captures (s)": f"{epoch.capture_seconds:.3f}" if epoch.capture_seconds else "",
    }


def time_parts(page: RunPage) -> Parts | None:
    """Where an epoch's time goes; None where no epoch was trained."""
    found, split = summarise(page.run), page.run.split
    if not found.seconds:
        return None
    caption = f"Seconds an epoch, mean of the last {found.seconds_epochs}, of {found.seconds:.3f} s."
    if split is not None and split.verdict:
        caption += f" Steps are {split.verdict}."
    if split is not None and split.reason:
        caption += f" Unknown in part: {split.reason}."
    if split is None:
        caption += " Steps were not sampled in this run."
    return Parts("Where the time goes", caption, tuple(_time_parts(found)))


def _time_parts(found: RunSummary) -> Iterator[Part]:
    for name, seconds in found.split_seconds.items():
        if seconds is None:
            yield Part(name, NOT_MEASURED, None)
        else:
            share = 100 * seconds / found.seconds
            yield Part(name, f"{seconds:.3f} s, {share:.0f} %", share)


def memory_parts(page: RunPage) -> list[Parts]:
    """What the peak of a step was made of, and the peak of each phase."""
    found = page.run.memory
    if found is None:
        return []
    whole = f" of {found.step_peak_bytes / _MB:.1f} MB" if found.step_peak_bytes is not None else ""
    by_kind = f"At the peak{whole} of the largest training step that was read, data set included."
    by_phase = "At the peak of each phase, without the resident data set."
    told = (("Memory by kind", by_kind, found.kind_bytes), ("Memory by phase", by_phase, found.phase_bytes))
    return [Parts(title, caption, tuple(_memory_parts(sizes))) for title, caption, sizes in told if sizes]


def _memory_parts(sizes: dict[str, int | None]) -> Iterator[Part]:
    largest = max((size for size in sizes.values() if size is not None), default=0)
    for name, size in sizes.items():
        if size is None:
            yield Part(name, NOT_MEASURED, None)
        else:
            yield Part(name, f"{size / _MB:.1f} MB", 100 * size / largest if largest else 0.0)


def decisions(page: RunPage, most: int) -> Table | None:
    """The control steps that changed batch, plan or rates, and where memory ran out; None without a trace."""
    if page.trace is None:
        return None
    rows, before = [], None
    for event in series.events(page.trace):
        if isinstance(event, BackOffTrace):
            rows.append(_back_off(event))
            continue
        if before is None or _acts(event, before):
            rows.append(_decision(event, before))
        before = event
    count = len(page.trace.decisions)
    caption = (
        f"{count} control step{'s' * (count != 1)}; shown are the first, and those that changed batch size, plan or "
        "layer rates. All of them, with every signal, are in the run's trace."
    )
    footers = [f"Cut for the size of this page: the first {most} of {len(rows)} are shown."] * (len(rows) > most)
    columns = {name: [row[name] for row in rows[:most]] for name in _DECISION}
    told = {name: texts for name, texts in columns.items() if any(texts)}
    if columns["Executed"] == columns["Asked for"]:
        told.pop("Executed", None)
    return _table("", caption, tuple(told), list(zip(*told.values())), footers)


_DECISION = (
    "Step", "Epoch", "Changed", "Batch", "Memory of budget (%)", "Rate of peak (%)", "Asked for", "Executed",
    "Promoted", "Least rate scale", "Why this batch",
)  # fmt: skip


def _acts(event: DecisionTrace, before: DecisionTrace) -> bool:
    moved = event.batch_after != event.batch_before or event.plan_changed
    return moved or event.rate_scale != before.rate_scale or event.promoted != before.promoted


def _decision(event: DecisionTrace, before: DecisionTrace | None) -> dict[str, str]:
    moved = event.batch_after != event.batch_before
    rates = event.rate_scale != before.rate_scale if before else min(event.rate_scale, default=1.0) != 1.0
    changed = [name for name, is_so in (("batch", moved), ("plan", event.plan_changed), ("rates", rates)) if is_so]
    share = event.memory_bytes is not None and event.budget_bytes
    least = min(event.rate_scale, default=1.0)
    return dict.fromkeys(_DECISION, "") | {
        "Step": str(event.step),
        "Epoch": str(event.epoch),
        "Changed": ", ".join(changed),
        "Batch": f"{event.batch_before} → {event.batch_after}" if moved else str(event.batch_after),
        "Memory of budget (%)": f"{100 * event.memory_bytes / event.budget_bytes:.1f}" if share else "",
        "Rate of peak (%)": "" if event.rate_share is None else f"{100 * event.rate_share:.1f}",
        "Asked for": layer_mix([Counter(event.requested)]),
        "Executed": layer_mix([Counter(event.executed)]),
        "Promoted": str(sum(event.promoted) or ""),
        "Least rate scale": "" if least == 1.0 else f"{least:.3f}",
        "Why this batch": event.batch_reason,
    }


def _back_off(event: BackOffTrace) -> dict[str, str]:
    return dict.fromkeys(_DECISION, "") | {
        "Step": str(event.in_force_after),
        "Changed": "batch",
        "Batch": f"{event.batch_before} → {event.batch_after}",
        "Why this batch": f"memory ran out in a step of {event.tried} samples",
    }


def _figure(value: float | None, decimals: int) -> str:
    return NOT_MEASURED if value is None else f"{value:.{decimals}f}"


def _size(size: int | None) -> str:
    return NOT_MEASURED if size is None else f"{size / BYTES_PER_GB:.3f}"


def _table(
    title: str, caption: str, header: tuple[str, ...], rows: Sequence[tuple[str, ...]], footers: Sequence[str] = ()
) -> Table:
    return Table(title, caption, header, tuple(rows), tuple(footers), pandas.DataFrame(), text_columns=1)
