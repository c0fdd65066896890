"""Run records -> Tables 1 and 2 in the paper's layout, beside the paper's figures, and the audit of those.

The same records give the same bytes. What was left out of a mean is named below the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pandas

from triaccel_bench import paper
from triaccel_bench.labels import configuration_label, dataset_label, method_label, model_label, order
from triaccel_bench.layout import Table, render_terminal, to_csv, to_latex, to_markdown
from triaccel_bench.paper import BYTES_PER_GB
from triaccel_bench.records import Provenance
from triaccel_bench.results import Results, read_results
from triaccel_bench.stats import Cell, Mean, baseline, cells

__all__ = [
    "Results", "Table", "audit_table", "read_results", "render_terminal", "table1", "table2",
    "to_csv", "to_latex", "to_markdown",
]  # fmt: skip

NOT_MEASURED = "n/a"

HEADER1 = (
    "Dataset", "Architecture", "Method", "Acc (%)", "Time (s)", "VRAM (GB)", "Eff. Score", "Score (device %)",
    "Batch", "Seeds", "Epochs (timed)", "Budget",
    "Paper: Acc (%)", "Paper: Time (s)", "Paper: VRAM (GB)", "Paper: Eff. Score",
)  # fmt: skip
HEADER2 = (
    "Dataset", "Architecture", "Configuration", "VRAM (GB)", "Reduction", "Seeds",
    "Paper: VRAM (GB)", "Paper: Reduction",
)  # fmt: skip


TABLE1_TEXT = (
    "Time: training seconds an epoch, mean of as many last epochs as stand in brackets. "
    "Eff. Score = Acc (%) / (Time × VRAM in GB), as the paper's column; "
    "Score (device %) = 100 × Acc (%) / (Time × VRAM in % of the device), as its section 4.2."
)
TABLE2_TEXT = "Reduction = 1 - mean / mean of FP32 on the same device with the same settings."


@dataclass(frozen=True)
class _Row:
    cell: Cell
    shown: tuple[str, ...]
    data: dict[str, Any]
    notes: list[str]


def table1(results: Results) -> Table:
    """Table 1: accuracy, time, memory and score of every cell. Scores are taken per seed, then averaged."""
    rows = [_row1(cell) for cell in _ordered(cells(results.runs))]
    return _table("Table 1: performance and efficiency", TABLE1_TEXT, HEADER1, 4, rows, results)


def table2(results: Results) -> Table:
    """Table 2: memory of each Tri-Accel switch against FP32 on the same data, model, device and other settings."""
    found = _ordered(cells(results.runs))
    rows = [_row2(cell, baseline(cell, found)) for cell in found]
    return _table("Table 2: ablation of memory", TABLE2_TEXT, HEADER2, 2, rows, results, _belongs_to_the_ablation)


def _belongs_to_the_ablation(cell: Cell) -> bool:
    return cell.method == "fp32" or cell.method.startswith("triaccel")


def audit_table() -> Table:
    """The paper's claims beside what its own tables give for them."""
    findings = paper.audit()
    rows = tuple((f.claim, f.printed, f.computed, "yes" if f.agrees else "NO", f.note) for f in findings)
    agreeing = sum(finding.agrees for finding in findings)
    return Table(
        title="Audit of the paper's printed numbers",
        caption=f"{agreeing} of {len(findings)} claims agree with the printed tables; misprints are shown as printed.",
        header=("Claim", "Printed", "Computed", "Agrees", "Note"),
        rows=rows,
        footers=(),
        frame=pandas.DataFrame(findings),
        text_columns=5,
    )


def _row1(cell: Cell) -> _Row:
    printed = paper.printed(cell.dataset, cell.model, cell.method) if _as_in_the_paper(cell) else None
    misprinted = printed is not None and not printed.score_agrees
    epochs = cell.runs[0].epochs_planned
    timed = max((summary.seconds_epochs for summary in cell.summaries), default=None)
    budget = cell.mean("budget_bytes")
    source = next((run.budget_source for run in cell.runs if run.budget_source), None)
    names = _names(cell, method_label(cell.method))
    shown = (
        *names,
        _shown(cell, cell.mean("accuracy_percent"), 2),
        _shown(cell, cell.mean("seconds"), 3),
        _memory_shown(cell),
        _shown(cell, cell.mean("score"), 2),
        _shown(cell, cell.mean("score_percent"), 2),
        _shown(cell, cell.mean("batch_mean"), 1),
        _seeds_shown(cell),
        f"{epochs} ({NOT_MEASURED if timed is None else timed})",
        f"{budget.mean / BYTES_PER_GB:.3f} GB ({source})" if budget else NOT_MEASURED,
        f"{printed.accuracy_percent:.1f}" if printed else "",
        f"{printed.seconds:.1f}" if printed else "",
        f"{printed.memory_gb:.2f}" if printed else "",
        f"{printed.score:.2f}{' †' if misprinted else ''}" if printed else "",
    )
    data = _identity_data(cell) | _spread("accuracy_percent", cell.mean("accuracy_percent"))
    data |= _spread("train_seconds_per_epoch", cell.mean("seconds")) | {"epochs": epochs, "timed_epochs": timed}
    data |= _memory_data(cell)
    for name, quantity in (("score", "score"), ("score_percent", "score_percent"), ("batch_samples", "batch_mean")):
        data |= _spread(name, cell.mean(quantity))
    data |= _spread("skipped_steps", cell.mean("steps_skipped")) | _spread("budget_bytes", budget)
    data |= {"budget_source": source}
    for column in ("accuracy_percent", "seconds", "memory_gb", "score", "score_computed"):
        data[f"paper_{column}"] = getattr(printed, column) if printed else None
    notes = _left_out(cell, names)
    if misprinted:
        notes.append(_misprint(names, f"{printed.score:.2f}", f"{printed.score_computed:.2f}"))
    return _Row(cell, shown, data, notes)


def _row2(cell: Cell, fp32: Cell | None) -> _Row:
    printed = paper.printed_ablation(cell.dataset, cell.model, cell.method) if _as_in_the_paper(cell) else None
    misprinted = printed is not None and not printed.reduction_agrees
    memory = cell.mean("memory_peak_bytes")
    reduction = None
    if memory and fp32 and cell.method != "fp32":
        reduction = 100 * (1 - memory.mean / fp32.mean("memory_peak_bytes").mean)
    names = _names(cell, configuration_label(cell.method))
    shown = (
        *names,
        _memory_shown(cell),
        "-" if cell.method == "fp32" else NOT_MEASURED if reduction is None else f"{reduction:.1f} %",
        _seeds_shown(cell),
        f"{printed.memory_gb:.3f}" if printed else "",
        "" if printed is None else _printed_reduction(printed.reduction_percent) + (" †" if misprinted else ""),
    )
    data = _identity_data(cell) | _memory_data(cell)
    data |= {"reduction_percent": reduction, "baseline_cell": fp32.cell if fp32 else None}
    for column in ("memory_gb", "reduction_percent", "reduction_computed_percent"):
        data[f"paper_{column}"] = getattr(printed, column) if printed else None
    notes = _left_out(cell, names)
    if memory and cell.method != "fp32" and not fp32:
        notes.append(f"{' / '.join(names)}: no reduction without exactly one finished fp32 cell of the same settings")
    if misprinted:
        computed = f"{printed.reduction_computed_percent:.1f} %"
        notes.append(_misprint(names, _printed_reduction(printed.reduction_percent), computed))
    return _Row(cell, shown, data, notes)


def _table(
    title: str,
    text: str,
    header: tuple[str, ...],
    paper_columns: int,
    rows: list[_Row],
    results: Results,
    belongs: Callable[[Cell], bool] = lambda cell: True,
) -> Table:
    kept = [row for row in rows if belongs(row.cell)]
    # Where the paper prints nothing for any row, its empty columns would only cost width.
    width = len(header) if any(any(row.shown[-paper_columns:]) for row in kept) else len(header) - paper_columns
    notes = [note for row in kept for note in row.notes] + [f"Not used: {problem}" for problem in results.problems]
    # Made from every row, then cut, so that a table without rows keeps its columns.
    frame = pandas.DataFrame([row.data for row in rows], dtype=object).loc[[belongs(row.cell) for row in rows]]
    return Table(
        title=title,
        caption=f"{_caption([row.cell for row in kept])} {text}",
        header=header[:width],
        rows=tuple(row.shown[:width] for row in kept),
        footers=tuple(notes),
        frame=frame,
        text_columns=3,
    )


def _caption(found: list[Cell]) -> str:
    provenances = [run.provenance for cell in found for run in cell.runs if run.provenance]
    devices = sorted({provenance.device_name for provenance in provenances})
    versions = sorted({_version(provenance) for provenance in provenances})
    return (
        f"Device: {', '.join(devices) or 'unknown'}. Code: {', '.join(versions) or 'unknown'}. "
        "Mean ± sample standard deviation (n - 1) over seeds. GB = 1e9 bytes."
    )


def _version(provenance: Provenance) -> str:
    commit = f"commit {provenance.git_commit}" if provenance.git_commit else "no commit"
    return f"{provenance.code_version} ({commit}{', modified' if provenance.git_dirty else ''})"


def _ordered(found: list[Cell]) -> list[Cell]:
    """The paper's order of labels; cells of one label keep theirs."""
    return sorted(found, key=lambda cell: order(cell.dataset, cell.model, cell.method))


def _names(cell: Cell, method: str) -> tuple[str, str, str]:
    variant = f" ({cell.variant})" if cell.variant else ""
    return dataset_label(cell.dataset), model_label(cell.model, cell.settings), method + variant


def _as_in_the_paper(cell: Cell) -> bool:
    """Torchvision's models at 32x32 from scratch, which the paper's VRAM fits, on the test set."""
    model, dataset = cell.settings.get("model", {}), cell.settings.get("dataset", {})
    shape = (model.get("stem"), model.get("input_size"), model.get("weights"))
    return shape == ("imagenet", 32, "none") and dataset.get("evaluate_on") == "test"


def _shown(cell: Cell, value: Mean | None, decimals: int) -> str:
    if value is None:
        return NOT_MEASURED
    spread = NOT_MEASURED if value.std is None else f"{value.std:.{decimals}f}"
    fewer = f" (n={value.n})" if value.n != len(cell.summaries) else ""
    return f"{value.mean:.{decimals}f} ± {spread}{fewer}"


def _memory_shown(cell: Cell) -> str:
    memory = cell.mean("memory_peak_bytes")
    if memory is None:
        return NOT_MEASURED
    shown = _shown(cell, memory.scaled(1 / BYTES_PER_GB), 3)
    return shown if cell.meter == "vram" else f"{shown} GB tensor bytes (not VRAM)"


def _seeds_shown(cell: Cell) -> str:
    done = len(cell.summaries)
    return str(done) if done == cell.seeds_expected else f"{done} of {cell.seeds_expected}"


def _printed_reduction(percent: float | None) -> str:
    return "-" if percent is None else f"{percent:.1f} %"


def _left_out(cell: Cell, names: tuple[str, ...]) -> list[str]:
    return [f"{' / '.join(names)}: not in the mean: {phrase}" for phrase in cell.excluded]


def _misprint(names: tuple[str, ...], printed: str, computed: str) -> str:
    return f"† {' / '.join(names)}: the paper prints {printed}, its own figures give {computed}"


def _identity_data(cell: Cell) -> dict[str, Any]:
    data = {key: getattr(cell, key) for key in ("dataset", "model", "method", "variant", "cell", "device_name")}
    seeds = " ".join(str(summary.seed) for summary in cell.summaries)
    return data | {"n": len(cell.summaries), "seeds": seeds, "excluded": "; ".join(cell.excluded)}


def _memory_data(cell: Cell) -> dict[str, Any]:
    memory = cell.mean("memory_peak_bytes")
    vram, tensors = (memory if cell.meter == meter else None for meter in ("vram", "tensors"))
    return {"meter": cell.meter} | _spread("vram_peak_bytes", vram) | _spread("tensor_peak_bytes", tensors)


def _spread(name: str, value: Mean | None) -> dict[str, float | None]:
    return {f"{name}_mean": value.mean if value else None, f"{name}_std": value.std if value else None}
