"""Tables 1 and 2 as bar charts beside the paper's figures, from the tables' own frames."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from triaccel_bench import style
from triaccel_bench.layout import Table
from triaccel_bench.paper import BYTES_PER_GB, CARDS, DEVICE_GB
from triaccel_bench.series import Stems
from triaccel_bench.tables import LABELS

MEASURED, PAPER = style.BLUE, style.ORANGE
MEASURED_LABEL = "measured (whisker: ± 1 std over n seeds)"
PAPER_LABEL = f"the paper's ({' and '.join(CARDS)}, {DEVICE_GB} GB)"
BAR = 0.38
ROW_LABEL = 1.7
"""Inches of a row's name, which takes two lines at most."""


@dataclass(frozen=True)
class Panel:
    """One quantity: its axis, its columns in the table's frame, decimals that are written, and a unit's factor."""

    axis: str
    measured: str
    spread: str
    printed: str
    decimals: int
    decimals_printed: int
    factor: float = 1.0


_ACCURACY = Panel("Accuracy (%)", "accuracy_percent_mean", "accuracy_percent_std", "paper_accuracy_percent", 2, 1)
_TIME = Panel(
    "Training time (s an epoch)", "train_seconds_per_epoch_mean", "train_seconds_per_epoch_std", "paper_seconds", 2, 1
)
_GB = {"printed": "paper_memory_gb", "decimals": 3, "factor": 1 / BYTES_PER_GB}
_VRAM1 = Panel("Peak VRAM (GB)", "vram_peak_bytes_mean", "vram_peak_bytes_std", **_GB, decimals_printed=2)
_VRAM2 = Panel("Peak VRAM (GB)", "vram_peak_bytes_mean", "vram_peak_bytes_std", **_GB, decimals_printed=3)
_TENSORS = Panel(
    "Peak of live tensors (GB, not VRAM)", "tensor_peak_bytes_mean", "tensor_peak_bytes_std", **_GB, decimals_printed=2
)
_SCORE = Panel("Eff. Score (% / (s × GB))", "score_mean", "score_std", "paper_score", 2, 2)
_REDUCTION = Panel("Memory below FP32's (%)", "reduction_percent", "", "paper_reduction_percent", 1, 1)


@dataclass(frozen=True)
class Chart:
    """What one chart shows: a row's label and its figures in the table's frame, a panel for each quantity."""

    stem: str
    table: str
    """The table's title."""
    group: str
    """Data set and model."""
    panels: tuple[Panel, ...]
    rows: tuple[tuple[str, dict[str, Any]], ...]
    printed: bool
    """Whether the paper has a figure for any bar."""
    notes: tuple[str, ...]


def table1_charts(table: Table) -> Iterator[Chart]:
    """One for each data set and model."""
    return _charts("table1", table, (_ACCURACY, _TIME, _VRAM1, _SCORE), (_ACCURACY, _TIME, _TENSORS))


def table2_charts(table: Table) -> Iterator[Chart]:
    return _charts("table2", table, (_VRAM2, _REDUCTION), (_TENSORS, _REDUCTION))


def _charts(name: str, table: Table, of_vram: tuple[Panel, ...], of_tensors: tuple[Panel, ...]) -> Iterator[Chart]:
    groups: dict[tuple[str, ...], list[tuple[str, dict[str, Any]]]] = {}
    for row, data in zip(table.rows, table.frame.to_dict("records")):
        groups.setdefault(row[: LABELS - 1], []).append((row[LABELS - 1], data))
    stem = Stems()
    for labels, rows in groups.items():
        metered = any(data["tensor_peak_bytes_mean"] is not None for _, data in rows)
        vram = any(data["vram_peak_bytes_mean"] is not None for _, data in rows)
        panels = of_tensors if metered and not vram else of_vram
        printed = any(data[panel.printed] is not None for _, data in rows for panel in panels)
        notes = [*_notes(table, labels, rows)]
        if not printed:
            notes.append("The paper prints no figures for these settings of data set and model.")
        if _ACCURACY in panels and _SCORE not in panels:
            notes.append("No scores: they need VRAM.")
        file = stem(name, rows[0][1]["dataset"], rows[0][1]["model"])
        yield Chart(file, table.title, ", ".join(labels), panels, tuple(rows), printed, tuple(notes))


def missing(panel: Panel, data: dict[str, Any]) -> str:
    """What stands in the place of a bar that is not there."""
    return "baseline" if panel is _REDUCTION and data["method"] == "fp32" else "n/a"


def drawn(chart: Chart) -> Any:
    """As a figure of matplotlib; only within ``style.drawing``."""
    from matplotlib.patches import Patch

    columns = 2
    lines = -(-len(chart.panels) // columns)
    # A row is three lines of 8 pt; a page is 9.5 inches high.
    height = 1.4 + lines * (0.65 + 0.44 * len(chart.rows))
    figure, axes = style.blank(height, lines, columns, squeeze=False)
    flat = list(axes.flat)
    for index, (place, panel) in enumerate(zip(flat, chart.panels)):
        _bars(place, panel, chart.rows, named=index % columns == 0)
    for place in flat[len(chart.panels) :]:
        place.set_axis_off()
    handles = [Patch(facecolor=MEASURED, edgecolor="black", label=MEASURED_LABEL)]
    if chart.printed:
        handles.append(Patch(facecolor=PAPER, edgecolor="black", hatch="////", label=PAPER_LABEL))
    style.titled(figure, f"{chart.table}: {chart.group}", handles)
    style.noted(figure, chart.notes)
    return figure


def _bars(axes: Any, panel: Panel, rows: Sequence[tuple[str, dict[str, Any]]], named: bool) -> None:
    values, top = [], 0.0
    for _, data in rows:
        measured, printed = data[panel.measured], data[panel.printed]
        std = data[panel.spread] if panel.spread else None
        measured = None if measured is None else measured * panel.factor
        std = None if std is None else std * panel.factor
        values.append((measured, std, printed))
        top = max(top, abs(measured or 0.0) + (std or 0.0), abs(printed or 0.0))
    top = top or 1.0
    paired = any(printed is not None for *_, printed in values)
    for place, (measured, std, printed) in enumerate(values):
        above = place - (BAR / 2 if paired else 0)
        spread = "" if std is None else f" ± {std:.{panel.decimals}f}"
        lacking = missing(panel, rows[place][1])
        text = lacking if measured is None else f"{measured:.{panel.decimals}f}{spread}"
        _bar(axes, above, measured, std, text, top, facecolor=MEASURED)
        if printed is not None:
            _bar(
                axes,
                place + BAR / 2,
                printed,
                None,
                f"{printed:.{panel.decimals_printed}f}",
                top,
                facecolor=PAPER,
                hatch="////",
            )
        elif paired and lacking != "baseline":
            axes.text(0.02 * top, place + BAR / 2, "not printed", ha="left", va="center", style="italic")
    negative = any((value or 0.0) < 0 for value, *_ in values)
    axes.set_xlim(-1.45 * top if negative else 0, 1.45 * top)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_xlabel(panel.axis)
    axes.grid(False, axis="y")
    axes.set_yticks(range(len(rows)), [_row_label(label, data) for label, data in rows] if named else [])
    axes.set_ylim(len(rows) - 0.5, -0.5)


def _bar(axes: Any, y: float, value: float | None, std: float | None, text: str, top: float, **look: Any) -> None:
    if value is not None:
        axes.barh(y, value, height=BAR, edgecolor="black", linewidth=0.7, **look)
        if std is not None:
            axes.errorbar(value, y, xerr=std, color="black", capsize=2.5, linewidth=1.0)
    end = (value or 0.0) + (std or 0.0) * (1 if (value or 0.0) >= 0 else -1)
    outside = end + 0.02 * top * (1 if end >= 0 else -1)
    axes.text(outside, y, text, ha="left" if end >= 0 else "right", va="center")


def _row_label(label: str, data: dict[str, Any]) -> str:
    lines = style.wrapped(label, ROW_LABEL)
    if len(lines) > 2:
        lines = [lines[0], style.shortened(f"{lines[1]}…", ROW_LABEL)]
    # Table 2 is not of training's length.
    epochs = f", {data['epochs']} epochs" if "epochs" in data else ""
    return "\n".join([*lines, f"n = {data['n']}{epochs}"])


def _notes(table: Table, labels: tuple[str, ...], rows: list[tuple[str, dict[str, Any]]]) -> Iterator[str]:
    devices = sorted({str(data["device_name"]) for _, data in rows if data["device_name"]})
    one_seed = " n = 1: one seed, no spread." if any(data["n"] == 1 for _, data in rows) else ""
    yield f"Measured on {', '.join(devices) or 'an unknown device'}.{one_seed}"
    yield from (f"{label}: not in the mean: {data['excluded']}." for label, data in rows if data["excluded"])
    names = {name for label, _ in rows for name in (label, " / ".join([*labels, label]))}
    marks = {mark for label, _ in rows if (mark := label.rpartition(" ")[2]).startswith("[")}
    for footer in table.footers:
        whose, without, _ = footer.partition(": no reduction")
        if footer.partition(" ")[0] in marks or (without and whose in names):
            yield footer
