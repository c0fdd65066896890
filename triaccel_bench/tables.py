"""Run records -> Tables 1 and 2 in the paper's layout, beside the paper's figures.

The same records give the same bytes. What was left out of a mean is named below the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pandas

from triaccel_bench import compare, footers, paper
from triaccel_bench.cells import Cell, as_in_the_paper, baseline, tuned_apart, why_no_baseline
from triaccel_bench.footers import NOT_MEASURED
from triaccel_bench.labels import TENSORS_NOTE, configuration_label, method_label
from triaccel_bench.layout import Table
from triaccel_bench.paper import BYTES_PER_GB
from triaccel_bench.results import Results
from triaccel_bench.sheet import Sheet
from triaccel_bench.stats import Mean

LABELS1 = ("Dataset", "Architecture", "Method")
LABELS2 = ("Dataset", "Architecture", "Configuration")
LABELS = len(LABELS1)

EXECUTED = "Executed"

TIME_TEXT = "Time: training seconds an epoch, mean of as many last epochs as stand in brackets."
SCORE_TEXT = (
    "Eff. Score = Acc (%) / (Time × VRAM in GB), as the paper's column; "
    "Score (device %) = 100 × Acc (%) / (Time × VRAM in % of the device), as its section 4.2."
)
NO_SCORE_TEXT = "No scores: they need VRAM."
BATCH_TEXT = "Batch: samples a step, mean (smallest-largest) where it moved. Executed: layers by dtype at the end."
NOISE = "Noise (%)"
NOISE_TEXT = "Noise: (longest - shortest) / shortest time of the seeds."
RESERVED, PROBE_SECONDS, PROBE_MEMORY = "Reserved (GB)", "Probes (s)", "Probes (GB)"
RESERVED_TEXT = "Reserved: the most that the allocator held at an epoch's end, the data set on the device included."
PROBE_SECONDS_TEXT = "their part of the time"
PROBE_MEMORY_TEXT = "their own peak, which the memory figure is no smaller than"
REDUCTION_TEXT = (
    "Reduction = 1 - mean / mean of FP32 on the same device with the same settings. The maximum is over the whole run, "
    "the first steps at B0 and, of VRAM, curvature probes included: a batch that only shrinks from there saves nothing."
)


@dataclass(frozen=True)
class _Row:
    cell: Cell
    shown: dict[str, str]
    data: dict[str, Any]
    notes: list[str]


def table1(results: Results) -> Table:
    """Table 1: accuracy, time, memory and score of every cell. Scores are taken per seed, then averaged."""
    sheet = Sheet(results, method_label)
    scores = SCORE_TEXT if any(cell.mean("score") for cell in sheet.cells) else NO_SCORE_TEXT
    noise = [NOISE_TEXT] if any(len(cell.summaries) > 1 for cell in sheet.cells) else []
    text = [TIME_TEXT, *noise, footers.timing_text(sheet.cells), scores, *_memory_texts(sheet, True), BATCH_TEXT]
    return _table("Table 1: performance and efficiency", text, sheet, _row1, _of_epochs)


def _of_epochs(found: list[Cell], name: footers.Names) -> list[str]:
    return [*footers.whole_runs(found, name), *footers.splits(found, name), *footers.trends(found, name)]


def table2(results: Results) -> Table:
    """Table 2: memory of each Tri-Accel switch against FP32 on the same data, model, device and other settings."""
    sheet = Sheet(results, configuration_label, _belongs_to_the_ablation)
    return _table("Table 2: ablation of memory", [REDUCTION_TEXT, *_memory_texts(sheet, False)], sheet, _row2)


def _memory_texts(sheet: Sheet, timed: bool) -> list[str]:
    reserved, seconds, peak = (
        any(cell.mean(quantity) for cell in sheet.cells)
        for quantity in ("reserved_bytes", "probe_seconds", "probe_peak_bytes")
    )
    told = [PROBE_SECONDS_TEXT] * (timed and seconds) + [PROBE_MEMORY_TEXT] * peak
    return [RESERVED_TEXT] * reserved + ([f"Probes: {', and '.join(told)}."] if told else [])


def _belongs_to_the_ablation(cell: Cell) -> bool:
    return cell.method in ("fp32", "replay") or cell.method.startswith("triaccel")


def _row1(cell: Cell, sheet: Sheet) -> _Row:
    printed = paper.printed(cell.dataset, cell.model, cell.method) if as_in_the_paper(cell) else None
    misprinted = printed is not None and not printed.score_agrees
    epochs = cell.runs[0].epochs_planned
    timed = max((summary.seconds_epochs for summary in cell.summaries), default=None)
    budget = cell.mean("budget_bytes")
    noise = compare.spread([summary.seconds for summary in cell.summaries if summary.seconds])
    shown = dict(zip(LABELS1, sheet.names(cell), strict=True)) | {
        "Acc (%)": _shown(cell, cell.mean("accuracy_percent"), 2),
        "Time (s)": _shown(cell, cell.mean("seconds"), 3),
        NOISE: NOT_MEASURED if noise is None else f"{100 * noise:.1f}",
        sheet.memory_header: _memory_shown(cell, sheet),
        "Eff. Score": _shown(cell, cell.mean("score"), 2),
        "Score (device %)": _shown(cell, cell.mean("score_percent"), 2),
        RESERVED: _gb_shown(cell, "reserved_bytes"),
        PROBE_SECONDS: _probes_shown(cell, _shown(cell, cell.mean("probe_seconds"), 3)),
        PROBE_MEMORY: _probes_shown(cell, _gb_shown(cell, "probe_peak_bytes")),
        "Batch": _batch_shown(cell),
        EXECUTED: footers.executed_layers(cell) or NOT_MEASURED,
        "Seeds": cell.seeds_told,
        "Epochs (timed)": f"{epochs} ({NOT_MEASURED if timed is None else timed})",
        sheet.budget_header: _budget_shown(budget),
        "Paper: Acc (%)": f"{printed.accuracy_percent:.1f}" if printed else "",
        "Paper: Time (s)": f"{printed.seconds:.1f}" if printed else "",
        "Paper: VRAM (GB)": f"{printed.memory_gb:.2f}" if printed else "",
        "Paper: Eff. Score": f"{printed.score:.2f}{' †' if misprinted else ''}" if printed else "",
    }
    data = _identity_data(cell) | _spread("accuracy_percent", cell.mean("accuracy_percent"))
    data |= _spread("train_seconds_per_epoch", cell.mean("seconds")) | {"epochs": epochs, "timed_epochs": timed}
    data |= _spread("train_seconds_per_run", cell.mean("training_seconds"))
    data |= _spread("first_use_seconds", cell.mean("first_use_seconds"))
    data |= _memory_data(cell) | _spread("probe_seconds_per_epoch", cell.mean("probe_seconds"))
    for name, quantity in (("score", "score"), ("score_percent", "score_percent"), ("batch_samples", "batch_mean")):
        data |= _spread(name, cell.mean(quantity))
    data |= {"score_propagated_std": _propagated_score(cell), "train_seconds_noise": noise}
    data |= _split_data(cell) | _trend_data(cell)
    data |= dict(zip(("batch_samples_min", "batch_samples_max"), _batch_range(cell), strict=True))
    data |= {"layers_requested": footers.requested_layers(cell), "layers_executed": footers.executed_layers(cell)}
    data |= _spread("skipped_steps", cell.mean("steps_skipped")) | _spread("budget_bytes", budget)
    data |= {"budget_source": footers.budget_source(cell)}
    for column in ("accuracy_percent", "seconds", "memory_gb", "score", "score_computed"):
        data[f"paper_{column}"] = getattr(printed, column) if printed else None
    fp32 = baseline(cell, sheet.cells)
    notes = _own_rates(cell, fp32, sheet) if fp32 else []
    if misprinted:
        notes.append(_misprint(sheet.name(cell), f"{printed.score:.2f}", f"{printed.score_computed:.2f}"))
    return _Row(cell, shown, data, notes)


def _own_rates(cell: Cell, fp32: Cell, sheet: Sheet) -> list[str]:
    apart = tuned_apart(cell, fp32)
    return [f"{sheet.name(cell)}: beside FP32, each at its own {apart}"] if apart else []


def _row2(cell: Cell, sheet: Sheet) -> _Row:
    printed = paper.printed_ablation(cell.dataset, cell.model, cell.method) if as_in_the_paper(cell) else None
    misprinted = printed is not None and not printed.reduction_agrees
    fp32 = baseline(cell, sheet.cells)
    memory = cell.mean("memory_peak_bytes")
    reduction = None
    if memory and fp32 and cell.method != "fp32":
        reduction = 100 * (1 - memory.mean / fp32.mean("memory_peak_bytes").mean)
    shown = dict(zip(LABELS2, sheet.names(cell), strict=True)) | {
        sheet.memory_header: _memory_shown(cell, sheet),
        RESERVED: _gb_shown(cell, "reserved_bytes"),
        PROBE_MEMORY: _probes_shown(cell, _gb_shown(cell, "probe_peak_bytes")),
        sheet.budget_header: _budget_shown(cell.mean("budget_bytes")),
        "Reduction": "-" if cell.method == "fp32" else NOT_MEASURED if reduction is None else f"{reduction:.1f} %",
        EXECUTED: footers.executed_layers(cell) or NOT_MEASURED,
        "Seeds": cell.seeds_told,
        "Paper: VRAM (GB)": f"{printed.memory_gb:.3f}" if printed else "",
        "Paper: Reduction": (
            _printed_reduction(printed.reduction_percent) + (" †" if misprinted else "") if printed else ""
        ),
    }
    data = _identity_data(cell) | _memory_data(cell)
    data |= {"reduction_percent": reduction, "baseline_cell": fp32.cell if fp32 else None}
    for column in ("memory_gb", "reduction_percent", "reduction_computed_percent"):
        data[f"paper_{column}"] = getattr(printed, column) if printed else None
    notes = []
    if memory and cell.method != "fp32" and not fp32:
        notes.append(f"{sheet.name(cell)}: no reduction: {why_no_baseline(cell, sheet.cells)}")
    if reduction is not None:
        notes += _own_rates(cell, fp32, sheet)
    if misprinted:
        computed = f"{printed.reduction_computed_percent:.1f} %"
        notes.append(_misprint(sheet.name(cell), _printed_reduction(printed.reduction_percent), computed))
    return _Row(cell, shown, data, notes)


def _table(
    title: str,
    text: list[str],
    sheet: Sheet,
    make_row: Callable[[Cell, Sheet], _Row],
    further: Callable[[list[Cell], footers.Names], list[str]] = lambda found, name: [],
) -> Table:
    # Made from every cell, then cut, so that a table without rows keeps its columns.
    every = [make_row(cell, sheet) for cell in sheet.found]
    belonging = set(map(id, sheet.cells))
    belongs = [id(row.cell) in belonging for row in every]
    rows = [row for row, kept in zip(every, belongs, strict=True) if kept]
    columns = [*every[0].shown] if every else [*LABELS1]
    # Where no row has a figure, the column would only cost width; the CSV keeps it.
    told = [name for name in columns[LABELS:] if any(row.shown[name] not in ("", NOT_MEASURED) for row in rows)]
    header = (*columns[:LABELS], *told)
    found = sheet.cells
    notes = [
        *sheet.variant_notes,
        *(note for row in rows for note in row.notes),
        *footers.left_out(found, sheet.name),
        *footers.executions(found, sheet.name),
        *footers.estimators(found, sheet.name),
        *footers.rounded_products(found, sheet.name),
        *footers.idle_controllers(found, sheet.name),
        *footers.stale_curvature(found, sheet.name),
        *footers.schedules(found, sheet.name),
        *further(found, sheet.name),
        *footers.company(found, sheet.name),
        *(footers.budgets(found, sheet.name) if sheet.budget_header in header else ()),
        *([TENSORS_NOTE] if sheet.meters_differ else ()),
        *footers.spread(found, sheet.name),
        *(f"Not used: {problem}" for problem in sheet.problems),
    ]
    return Table(
        title=title,
        caption=" ".join(part for part in (footers.provenance_text(found), *text) if part),
        header=header,
        rows=tuple(tuple(row.shown[column] for column in header) for row in rows),
        footers=tuple(notes),
        frame=pandas.DataFrame([row.data for row in every], dtype=object).loc[belongs],
        text_columns=LABELS,
        group_columns=2,
        tail_columns=sum(name.startswith("Paper: ") for name in header),
        folding=frozenset({EXECUTED}),
    )


def _propagated_score(cell: Cell) -> float | None:
    """The score's standard deviation by those of its three factors, as if they varied apart from one another."""
    score, factors = cell.mean("score"), [cell.mean(q) for q in ("accuracy_percent", "seconds", "memory_peak_bytes")]
    if score is None or any(each is None or each.std is None or not each.mean for each in factors):
        return None
    return compare.propagated(score.mean, *(each.std / each.mean for each in factors))


def _shown(cell: Cell, value: Mean | None, decimals: int) -> str:
    if value is None:
        return NOT_MEASURED
    fewer = f" (n={value.n})" if value.n != len(cell.summaries) else ""
    if value.std is None and cell.seeds_expected == 1:
        return f"{value.mean:.{decimals}f}"
    spread = NOT_MEASURED if value.std is None else f"{value.std:.{decimals}f}"
    return f"{value.mean:.{decimals}f} ± {spread}{fewer}"


def _memory_shown(cell: Cell, sheet: Sheet) -> str:
    memory = cell.mean("memory_peak_bytes")
    if memory is None:
        return NOT_MEASURED
    mark = " ‡" if sheet.meters_differ and cell.meter == "tensors" else ""
    return _gb_shown(cell, "memory_peak_bytes") + mark


def _gb_shown(cell: Cell, quantity: str) -> str:
    value = cell.mean(quantity)
    return _shown(cell, value and value.scaled(1 / BYTES_PER_GB), 3)


def _probes_shown(cell: Cell, shown: str) -> str:
    """Nothing where there was no probe: it is no figure that is missing."""
    return "" if cell.mean("probe_seconds") is None else shown


def _budget_shown(budget: Mean | None) -> str:
    if budget is None:
        return NOT_MEASURED
    return f"{budget.mean / 1e6:.3f} MB" if budget.mean < 1e6 else f"{budget.mean / BYTES_PER_GB:.3f}"


def _batch_range(cell: Cell) -> tuple[int | None, int | None]:
    smallest = min((summary.batch_min for summary in cell.summaries), default=None)
    return smallest, max((summary.batch_max for summary in cell.summaries), default=None)


def _batch_shown(cell: Cell) -> str:
    smallest, largest = _batch_range(cell)
    if smallest is None:
        return NOT_MEASURED
    if smallest == largest:
        return str(smallest)
    return f"{_shown(cell, cell.mean('batch_mean'), 1)} ({smallest}-{largest})"


def _printed_reduction(percent: float | None) -> str:
    return "-" if percent is None else f"{percent:.1f} %"


def _misprint(name: str, printed: str, computed: str) -> str:
    return f"† {name}: the paper prints {printed}, its own figures give {computed}"


def _identity_data(cell: Cell) -> dict[str, Any]:
    data = {key: getattr(cell, key) for key in ("dataset", "model", "method", "variant", "cell", "device_name")}
    seeds = " ".join(str(summary.seed) for summary in cell.summaries)
    return data | {"n": len(cell.summaries), "seeds": seeds, "excluded": "; ".join(cell.excluded)}


def _memory_data(cell: Cell) -> dict[str, Any]:
    memory = cell.mean("memory_peak_bytes")
    vram, tensors = (memory if cell.meter == meter else None for meter in ("vram", "tensors"))
    data = {"meter": cell.meter} | _spread("vram_peak_bytes", vram) | _spread("tensor_peak_bytes", tensors)
    for quantity in ("reserved_bytes", "probe_peak_bytes"):
        data |= _spread(quantity, cell.mean(quantity))
    return data


def _split_data(cell: Cell) -> dict[str, Any]:
    """Seconds of an epoch by part. Those of probes have columns of their own."""
    verdicts = sorted({summary.verdict for summary in cell.summaries if summary.verdict})
    means = footers.split_means(cell).items()
    return {f"{part}_seconds_per_epoch": mean for part, mean in means if part != "probe"} | {
        "verdict": " ".join(verdicts)
    }


def _trend_data(cell: Cell) -> dict[str, float | None]:
    """The last third of epochs over the first, with its 95 % interval."""
    data: dict[str, float | None] = {}
    for name in ("score", "cost"):
        found = footers.trend(cell, f"{name}_thirds")
        for field in ("mean", "low", "high"):
            data[f"{name}_trend_{field}"] = None if found is None else getattr(found, field)
    return data


def _spread(name: str, value: Mean | None) -> dict[str, float | None]:
    return {f"{name}_mean": value.mean if value else None, f"{name}_std": value.std if value else None}
