"""Pictures of run records as PNG and SVG: accuracy, memory, layers, and the tables as charts beside the paper's.

Nothing is told by colour alone, no letter is below 8 pt at a page's width, and what is missing stands in the picture.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from triaccel_bench import charts, scenes, series, style
from triaccel_bench.labels import method_label
from triaccel_bench.results import Results
from triaccel_bench.series import Curve, Group, LayerMap, Member, Traces
from triaccel_bench.sheet import Sheet
from triaccel_bench.tables import table1, table2

ROW_INCHES = 0.15
"""A label of 8 pt and the gap to the next one."""
MOST_ROWS = 44
"""Labels that a page has room for."""
LAYER_LABEL = 1.7
"""Inches of a layer's name."""


def figures(results: Results) -> dict[str, bytes]:
    """Every picture that the records allow, by file name.

    Raises:
        style.NoMatplotlib: the library that draws is not installed.
    """
    files: dict[str, bytes] = {}
    with style.drawing():
        for stem, figure in drawn(results):
            files |= style.both_formats(stem, figure)
    return files


def drawn(results: Results) -> Iterator[tuple[str, Any]]:
    """Stem of a file name and matplotlib figure, one by one; only within ``style.drawing``."""
    for chart in (*charts.table1_charts(table1(results)), *charts.table2_charts(table2(results))):
        yield chart.stem, charts.drawn(chart)
    sheet, traces = Sheet(results, method_label), Traces(results)
    stem = series.Stems()
    for group in series.groups(sheet):
        yield f"accuracy-{group.stem}", _accuracy(group, sheet)
        yield f"memory-{group.stem}", _memory(group, sheet, traces)
        for member in group.members:
            labels = member.cell.dataset, member.cell.model, member.cell.method
            if series.adapts_precision(member.cell):
                yield stem("precision", *labels), _precision(member, group, sheet, traces)
            if series.reads_curvature(member.cell):
                yield stem("curvature", *labels), _curvature(member, group, sheet, traces)


def _accuracy(group: Group, sheet: Sheet) -> Any:
    scene, looks = scenes.accuracy(group, sheet), _looks(group)
    figure, (left, right) = style.blank(4.0, 1, 2, sharey=True)
    for axes, curves, lacking in zip((left, right), (scene.over_time, scene.over_memory), scene.lacking):
        _curves(axes, curves, looks, lacking)
    left.set_xlabel("Training time since the start (s)")
    left.set_ylabel("Evaluation accuracy (%)")
    right.set_xlabel(f"Sum over epochs of time × {_in_two_lines(scene.memory_kind)}")
    _legend(figure, scene.title, looks, scene.labels)
    style.noted(figure, scene.notes)
    return figure


def _in_two_lines(kind: str) -> str:
    """The words that say that this is no VRAM are too many for one line."""
    return kind.replace(" (GB", "\n(GB").replace(", not", ",\nnot") if "not VRAM" in kind else kind


def _curves(axes: Any, curves: dict[Member, Curve], looks: dict[Member, style.Look], lacking: str) -> None:
    if not curves:
        style.said(axes, lacking)
        return
    for one, curve in curves.items():
        look = looks[one]
        axes.plot(curve.x, curve.mean, markevery=max(1, len(curve.x) // 8), **vars(look))
        if curve.seeds > 1:
            axes.fill_between(curve.x, curve.low, curve.high, color=look.color, alpha=0.12, linewidth=0)
            for edge in (curve.low, curve.high):
                axes.plot(curve.x, edge, color=look.color, linestyle=look.linestyle, linewidth=0.6)
    axes.set_xlim(left=0)


def _legend(figure: Any, title: str, looks: dict[Member, style.Look], labels: dict[Member, str]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], label=label, **vars(looks[one])) for one, label in labels.items()]
    style.titled(figure, title, handles)


def _looks(group: Group) -> dict[Member, style.Look]:
    return dict(zip(group.members, style.looks([one.cell.method for one in group.members])))


_BUDGET = {"color": style.BLACK, "linestyle": (0, (1, 1)), "linewidth": 1.0}


def _memory(group: Group, sheet: Sheet, traces: Traces) -> Any:
    scene, looks = scenes.memory(group, sheet, traces), _looks(group)
    figure, (top, bottom) = style.blank(4.6 + 0.1 * len(group.members), 2, 1, sharex=True, height_ratios=(3, 2))
    for number, (one, line) in enumerate(scene.courses.items()):
        if one in scene.measured:
            x, values = zip((0.0, line.memory[0][1]), *line.memory)
            sizes = [value / scene.factor for value in values]
            marked = _apart(x, number, len(scene.courses))
            top.plot(x, sizes, drawstyle="steps-pre", markevery=marked, **vars(looks[one]))
        x, sizes = zip(*line.batch)
        marked = _apart(x, number, len(scene.courses))
        bottom.plot(x, sizes, drawstyle="steps-post", markevery=marked, **vars(looks[one]))
    for budget in scene.budgets:
        top.axhline(budget / scene.factor, **_BUDGET)
    if not scene.measured:
        style.said(top, scene.lacking)
    else:
        top.margins(y=0.2)
    top.set_ylabel(f"{_in_two_lines(scene.kind)} ({scene.unit})")
    if scene.courses:
        bottom.set_ylim(0, 1.12 * max(size for line in scene.courses.values() for _, size in line.batch))
        bottom.set_xlim(left=0)
    else:
        style.said(bottom, scene.lacking)
    bottom.set_ylabel("Batch size (samples)")
    bottom.set_xlabel("Epochs trained")
    _legend(figure, scene.title, looks, scene.labels)
    style.noted(figure, scene.notes)
    return figure


def _apart(points: Sequence[float], number: int, count: int) -> tuple[int, int]:
    """Markers of each line at other points, since methods of one batch size lie upon one another."""
    every = max(1, len(points) // 6)
    return number * every // count, every


def _precision(member: Member, group: Group, sheet: Sheet, traces: Traces) -> Any:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    title, scene = f"Precision by layer: {group.title}, {member.name}", scenes.layers(member, sheet, traces)
    if (layers := scene.found) is None:
        return _untraced(title, scene)
    parts = {"asked for": layers.requested, "executed": layers.executed}
    if not layers.substituted:
        parts = {"asked for and executed": layers.requested}
    figure, axes = _layer_axes(layers, len(parts))
    for place, (name, grid) in zip(axes, parts.items()):
        place.set_title(name)
        for row, (dtypes, promoted) in enumerate(zip(grid, layers.promoted)):
            for dtype, spans in _spans(dtypes, layers.edges).items():
                place.broken_barh(spans, (row - 0.5, 1), lw=0, **_TILES[dtype])
            if spans := _spans(promoted, layers.edges).get(True):
                place.broken_barh(spans, (row - 0.12, 0.24), facecolor="white", edgecolor="black", lw=0.6)
    present = {dtype for grid in parts.values() for row in grid for dtype in row}
    handles = [Patch(label=_dtype_label(dtype), lw=0.6, **look) for dtype, look in _TILES.items() if dtype in present]
    if any(map(any, layers.promoted)):
        handles.append(Line2D([], [], color="white", lw=3, label="promoted for its curvature", path_effects=_outline()))
    style.titled(figure, title, handles)
    style.noted(figure, scene.notes)
    return figure


_TILES = {
    "fp16": {"facecolor": "#FFFFFF", "hatch": "....", "edgecolor": "#666666"},
    "bf16": {"facecolor": style.SKY, "hatch": "", "edgecolor": "#666666"},
    "fp32": {"facecolor": style.BLUE, "hatch": "////", "edgecolor": "#CCE4F2"},
    None: {"facecolor": "#BBBBBB", "hatch": "xxxx", "edgecolor": "#666666"},
}


def _dtype_label(dtype: str | None) -> str:
    return "not recorded" if dtype is None else dtype.upper()


def _outline() -> list[Any]:
    from matplotlib.patheffects import Normal, Stroke

    return [Stroke(linewidth=4.4, foreground="black"), Normal()]


def _spans(values: Sequence[Any], edges: Sequence[float]) -> dict[Any, list[tuple[float, float]]]:
    """Start and length of each stretch by value; neighbours of one value are one."""
    spans: dict[Any, list[tuple[float, float]]] = {}
    begun = 0
    for column in range(1, len(values) + 1):
        if column == len(values) or values[column] != values[begun]:
            spans.setdefault(values[begun], []).append((edges[begun], edges[column] - edges[begun]))
            begun = column
    return spans


def _layer_axes(layers: LayerMap, columns: int) -> tuple[Any, list[Any]]:
    count = len(layers.layers)
    every = -(-count // MOST_ROWS)
    height = 1.7 + ROW_INCHES * max(6, min(count, MOST_ROWS))
    figure, axes = style.blank(height, 1, columns, sharey=True, squeeze=False)
    flat = list(axes.flat)
    rows = range(0, count, every)
    for place in flat:
        place.grid(False)
        place.set_xlim(layers.edges[0], layers.edges[-1])
        place.set_xlabel("Epochs trained")
    flat[0].set_yticks(rows, [style.shortened(layers.layers[row], LAYER_LABEL) for row in rows])
    flat[0].set_ylim(count - 0.5, -0.5)
    flat[0].set_ylabel("Layer, input first" + (f" (one in {every} named)" if every > 1 else ""))
    return figure, flat


def _curvature(member: Member, group: Group, sheet: Sheet, traces: Traces) -> Any:
    from matplotlib.colors import LogNorm, Normalize

    title = f"Curvature and learning rate by layer: {group.title}, {member.name}"
    scene = scenes.layers(member, sheet, traces)
    if (layers := scene.found) is None:
        return _untraced(title, scene)
    figure, (left, right) = _layer_axes(layers, 2)
    positive = [[value if value is not None and value > 0 else None for value in row] for row in layers.lambdas]
    known = [value for row in positive for value in row if value is not None]
    low, high = (min(known), max(known)) if known else (1.0, 1.0)
    wide = 1.0 if low < high else 2.0
    _mesh(figure, left, layers, positive, LogNorm(low / wide, high * wide), "Largest eigenvalue λ of the layer's block")
    style.titled(figure, title)
    notes = []
    if not known:
        left.text(0.5, 0.5, "no λ was read", transform=left.transAxes, ha="center", backgroundcolor="white")
    elif any(value is None for row in positive for value in row):
        notes.append("Hatched: λ not read yet, or not above zero.")
    rates = [value for row in layers.rates for value in row]
    margin = 0.0 if min(rates) < max(rates) else 0.05
    scale = Normalize(min(rates) - margin, max(rates) + margin)
    _mesh(figure, right, layers, layers.rates, scale, "Rate scale (× the schedule's learning rate)")
    if margin:
        notes.append(f"Every layer's rate scale stayed at {rates[0]:g}.")
    first, *others = scene.notes
    style.noted(figure, [" ".join([first, *notes]), *others])
    return figure


def _mesh(figure: Any, axes: Any, layers: LayerMap, grid: Any, scale: Any, label: str) -> None:
    import numpy
    from matplotlib.ticker import FuncFormatter

    values = numpy.array([[numpy.nan if value is None else value for value in row] for row in grid], dtype=float)
    axes.add_patch(_hatched(axes))
    rows = numpy.arange(len(layers.layers) + 1) - 0.5
    # As pixels: in thousands of paths an SVG opens slowly.
    mesh = axes.pcolormesh(layers.edges, rows, values, norm=scale, cmap="cividis", rasterized=True)
    bar = figure.colorbar(mesh, ax=axes, location="bottom", aspect=30, pad=0.02)
    bar.set_label(label)
    bar.ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    bar.ax.xaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))


def _hatched(axes: Any) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((0, 0), 1, 1, transform=axes.transAxes, facecolor="white", edgecolor="#999999", hatch="xxxx", lw=0)


def _untraced(title: str, scene: scenes.Layers) -> Any:
    figure, axes = style.blank(2.2)
    style.titled(figure, title)
    style.said(axes, scene.lacking)
    style.noted(figure, scene.notes)
    return figure
