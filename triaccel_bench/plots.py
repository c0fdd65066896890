"""Pictures whose values show under the pointer: the scenes as Vega-Lite specifications, which a page draws.

Plain data, for JSON. Colours and the order of things are those of the printed pictures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from triaccel_bench import charts, scenes, style, vegalite
from triaccel_bench.records import RunRecord, Trace
from triaccel_bench.series import Course, Curve, Group, LayerMap, Member, Traces
from triaccel_bench.sheet import Sheet
from triaccel_bench.vegalite import Panel, Picture

PLOT_HEIGHT, LOW_HEIGHT, BAR_HEIGHT = 260, 130, 17
"""Pixels of a plot of lines, of the lower one of two, and of a bar."""
LAYER_HEIGHTS = 9, 16
"""Pixels of a layer's row: in a network of many layers, and at most."""
MAP_HEIGHT = 420
"""Pixels that a map of few layers takes at most."""

_FROM_TO = {"start": "Epochs trained, from", "end": "to"}
_DTYPES = {"FP16": style.YELLOW, "BF16": style.SKY, "FP32": style.BLUE, "not recorded": "#999999"}
"""Apart in lightness, too."""


def tables(found: Iterator[charts.Chart]) -> Iterator[Picture]:
    """Tables as bars beside the paper's."""
    for chart in found:
        key = [(charts.MEASURED, charts.MEASURED_LABEL)]
        if chart.printed:
            key.append((charts.PAPER, charts.PAPER_LABEL))
        panels = tuple(_bars(panel, chart) for panel in chart.panels)
        yield Picture(f"bars-{chart.stem}", chart.group, panels, notes=chart.notes, key=tuple(key))


def _bars(panel: charts.Panel, chart: charts.Chart) -> Panel:
    columns: dict[str, list[Any]] = {
        name: [] for name in ("row", "whose", "seeds", "value", "low", "high", "end", "text")
    }
    alike = len({data["n"] for _, data in chart.rows}) == 1
    labels = [label if alike else f"{label}, n = {data['n']}" for label, data in chart.rows]
    for label, (_, data) in zip(labels, chart.rows):
        value, std = (data[name] * panel.factor if name and data[name] is not None else None for name in (
            panel.measured, panel.spread
        ))  # fmt: skip
        spread = "" if std is None else f" ± {std:.{panel.decimals}f}"
        text = charts.missing(panel, data) if value is None else f"{value:.{panel.decimals}f}{spread}"
        _append(columns, label, "measured", data["n"], value, std, text)
        printed = data[panel.printed]
        if printed is not None:
            _append(columns, label, "paper", None, printed, None, f"{printed:.{panel.decimals_printed}f}")
        elif any(other[panel.printed] is not None for _, other in chart.rows) and text != "baseline":
            _append(columns, label, "paper", None, None, None, "not printed")
    ends = [abs(end) for end in columns["end"]]
    reach = 1.6 * (max(ends) or 1.0)
    least = -reach if min(columns["end"]) < 0 else 0.0
    whose = [name for name in ("measured", "paper") if name in columns["whose"]]
    x = {"field": "value", "type": "quantitative", "title": None}
    height = round(1.4 * BAR_HEIGHT * len(whose) * len(labels))
    spec = {
        "data": {"name": "bars"},
        "height": height,
        "encoding": {
            "y": {
                "field": "row",
                "type": "nominal",
                "sort": None,
                "title": None,
                "scale": {"domain": labels, "paddingInner": 0.3},
            },
            "yOffset": {"field": "whose", "scale": {"domain": whose}},
        },
        "layer": [
            {
                "mark": "bar",
                "encoding": {
                    "x": x | {"scale": {"domain": [vegalite.short(least), vegalite.short(reach)], "nice": False}},
                    "color": {
                        "field": "whose",
                        "scale": {"domain": ["measured", "paper"], "range": [charts.MEASURED, charts.PAPER]},
                        "legend": None,
                    },
                    "tooltip": vegalite.tooltip(
                        {"row": "Row", "whose": "Whose", "text": panel.axis}, {"seeds": "Seeds"}
                    ),
                },
            },
            {
                "transform": [{"filter": "isValid(datum.low)"}],
                "mark": {"type": "rule", "strokeWidth": 1.5},
                "encoding": {"x": x | {"field": "low"}, "x2": {"field": "high"}},
            },
            {
                "mark": {"type": "text", "align": "left", "dx": 4},
                "encoding": {"x": x | {"field": "end"}, "text": {"field": "text"}},
            },
        ],
    }
    return Panel(panel.axis, spec, {"bars": vegalite.packed(columns)}, height)


def _append(
    columns: dict[str, list[Any]],
    row: str,
    whose: str,
    seeds: int | None,
    value: float | None,
    std: float | None,
    text: str,
) -> None:
    low, high = (None, None) if value is None or std is None else (value - std, value + std)
    end = 0.0 if value is None else max(high if high is not None else value, 0.0)
    for name, each in zip(columns, (row, whose, seeds, value, low, high, end, text)):
        columns[name].append(each)


def accuracy(group: Group, sheet: Sheet, most: int) -> Picture:
    """Over time and over GB·s; ``most`` points a line."""
    scene, looks = scenes.accuracy(group, sheet), _looks(group)
    over = ("Training time since the start (s)", f"Sum over epochs of time × {scene.memory_kind}")
    panels, lacking, steps = [], [], set()
    for title, curves, missing in zip(over, (scene.over_time, scene.over_memory), scene.lacking):
        if not curves:
            lacking.append(f"{title}: {missing}.")
            continue
        thinned = {one: _thinned_curve(curve, most) for one, curve in curves.items()}
        steps |= {step for _, step in thinned.values()}
        panels.append(_curves(title, {one: curve for one, (curve, _) in thinned.items()}, scene.labels, looks))
    notes = *filter(None, scene.notes), *_thinning(steps, "epoch")
    return Picture(f"accuracy-{group.stem}", group.title, tuple(panels), tuple(lacking), notes)


def _curves(
    title: str, curves: dict[Member, Curve], labels: dict[Member, str], looks: dict[Member, style.Look]
) -> Panel:
    columns: dict[str, list[Any]] = {name: [] for name in ("line", "x", "mean", "low", "high", "range")}
    for one, curve in curves.items():
        columns["line"] += [labels[one]] * len(curve.x)
        columns["x"] += curve.x
        columns["mean"] += curve.mean
        alone = curve.seeds == 1
        columns["low"] += [None] * len(curve.x) if alone else curve.low
        columns["high"] += [None] * len(curve.x) if alone else curve.high
        columns["range"] += ["one seed" if alone else f"{a:.2f} to {b:.2f}" for a, b in zip(curve.low, curve.high)]
    y = {"field": "mean", "type": "quantitative", "title": None, "scale": {"zero": False}}
    colour, dash, shape = vegalite.line_scales({labels[one]: looks[one] for one in curves})
    layers = [
        {"mark": "line", "encoding": dash},
        {"mark": "point", "encoding": shape},
        vegalite.hover(vegalite.tooltip({"line": "Line", "range": "Seeds (%)"}, {"mean": "Accuracy (%)", "x": title})),
    ]
    if any(curve.seeds > 1 for curve in curves.values()):
        band = {"y": y | {"field": "low"}, "y2": {"field": "high"}}
        layers.insert(0, {"mark": {"type": "area", "opacity": 0.15}, "encoding": band})
    x = {"field": "x", "type": "quantitative", "title": title, "scale": {"zero": True}}
    spec = vegalite.layered("lines", layers, {"x": x, "y": y}, colour, PLOT_HEIGHT)
    return Panel("Evaluation accuracy (%)", spec, {"lines": vegalite.packed(columns)}, PLOT_HEIGHT)


def memory(group: Group, sheet: Sheet, traces: Traces, most: int) -> Picture:
    """Memory against the budget, and the batch size beneath."""
    return _memory(f"memory-{group.stem}", group.title, scenes.memory(group, sheet, traces), _looks(group), most)


def memory_of_run(stem: str, member: Member, run: RunRecord, trace: Trace | None, most: int) -> Picture:
    looks = {member: style.looks([run.method])[0]}
    return _memory(stem, "Memory and batch size", scenes.memory_of_run(member, run, trace), looks, most)


def _memory(stem: str, title: str, scene: scenes.Memory, looks: dict[Member, style.Look], most: int) -> Picture:
    panels, lacking, steps = [], [], set()
    thinned = {one: _thinned_course(course, most) for one, course in scene.courses.items()}
    steps |= {step for _, step in thinned.values()}
    x = {"field": "x", "type": "quantitative", "title": "Epochs trained"}
    for measured, heading in ((True, f"{scene.kind} ({scene.unit})"), (False, "Batch size (samples)")):
        members = [one for one in scene.courses if not measured or one in scene.measured]
        if not members:
            lacking.append(f"{heading}: {scene.lacking}.")
            continue
        columns: dict[str, list[Any]] = {"line": [], "x": [], "y": [], "marked": []}
        for number, one in enumerate(members):
            course, factor = thinned[one][0], scene.factor if measured else 1.0
            points = [(0.0, course.memory[0][1]), *course.memory] if measured else course.batch
            every = max(1, len(points) // 6)
            columns["line"] += [scene.labels[one]] * len(points)
            columns["x"] += [at for at, _ in points]
            columns["y"] += [value / factor for _, value in points]
            # Markers of each line at other points, since lines may lie upon one another.
            columns["marked"] += [place % every == number * every // len(members) for place in range(len(points))]
        y = {
            "field": "y",
            "type": "quantitative",
            "title": None,
            "scale": {"zero": not measured, "padding": 8 if measured else 0},
        }
        colour, dash, shape = vegalite.line_scales({scene.labels[one]: looks[one] for one in members})
        stairs = {"type": "line", "interpolate": "step-before" if measured else "step-after"}
        layers = [
            {"mark": stairs, "encoding": dash},
            {"transform": [{"filter": "datum.marked"}], "mark": "point", "encoding": shape},
            vegalite.hover(vegalite.tooltip({"line": "Line"}, {"y": heading, "x": "Epochs trained"})),
        ]
        data = {"lines": vegalite.packed(columns)}
        if measured and scene.budgets:
            data["budgets"] = vegalite.packed({
                "budget": [budget / scene.factor for budget in scene.budgets],
                "whose": [", ".join(names) for names in scene.budgets.values()],
            })  # fmt: skip
        height = PLOT_HEIGHT if measured else LOW_HEIGHT
        spec = vegalite.layered("lines", layers, {"x": x, "y": y}, colour, height)
        if "budgets" in data:
            tooltip = vegalite.tooltip({"whose": "Budget of"}, {"budget": f"Budget ({scene.unit})"})
            rule = {"y": y | {"field": "budget"}, "tooltip": tooltip}
            mark = {"type": "rule", "strokeDash": [2, 3], "strokeWidth": 1.5}
            spec["layer"].insert(0, {"data": {"name": "budgets"}, "mark": mark, "encoding": rule})
        panels.append(Panel(heading, spec, data, height))
    notes = *filter(None, scene.notes), *_thinning(steps, "control step")
    return Picture(stem, title, tuple(panels), tuple(lacking), notes, stacked=True)


def precision(stem: str, member: Member, group: Group, sheet: Sheet, traces: Traces, most: int) -> Picture:
    """What each layer asked for and what ran; ``most`` columns."""
    title, scene = f"{group.title}, {member.name}: precision", scenes.layers(member, sheet, traces)
    if scene.found is None:
        return Picture(stem, title, (), (f"{scene.lacking[:1].upper()}{scene.lacking[1:]}.",), scene.notes)
    found, step = _thinned_map(scene.found, most)
    grids = {"Asked for and executed": found.requested}
    if found.substituted:
        grids = {"Asked for": found.requested, "Executed": found.executed}
    panels, lacking = [], []
    for heading, grid in grids.items():
        if len(only := {dtype for row in grid for dtype in row}) == 1 and not any(map(any, found.promoted)):
            lacking.append(f"{heading}: {_dtype(only.pop())} in every layer, all the time.")
            continue
        shown = [[_dtype(dtype) for dtype in row] for row in grid]
        spans = _spans(found, {"dtype": shown, "promoted": found.promoted})
        present = [name for name in _DTYPES if name in spans["dtype"]]
        colour = {
            "field": "dtype",
            "type": "nominal",
            "title": None,
            "legend": {"columns": len(present)},
            "scale": {"domain": present, "range": [_DTYPES[name] for name in present]},
        }
        tooltip = vegalite.tooltip({"layer": "Layer", "dtype": "Dtype", "promoted": "Promoted"}, _FROM_TO)
        spec = _map(found, colour, tooltip)
        if any(spans["promoted"]):
            for colour_of, width in (("#000000", 5), ("#FFFFFF", 3)):
                mark = {"type": "rule", "color": colour_of, "strokeWidth": width}
                spec["layer"].append({"transform": [{"filter": "datum.promoted"}], "mark": mark})
        panels.append(Panel(heading, spec, {"spans": vegalite.packed(spans)}, _map_height(found)))
    notes = [*scene.notes, *_thinning({step}, "control step")]
    if any(map(any, found.promoted)):
        notes.append("White lines: promoted for its curvature.")
    return Picture(stem, title, tuple(panels), tuple(lacking), tuple(notes))


def _dtype(dtype: str | None) -> str:
    return "not recorded" if dtype is None else dtype.upper()


def curvature(stem: str, member: Member, group: Group, sheet: Sheet, traces: Traces, most: int) -> Picture:
    """The largest eigenvalue and the rate scale of each layer; ``most`` columns."""
    title = f"{group.title}, {member.name}: curvature and learning rates"
    scene = scenes.layers(member, sheet, traces)
    if scene.found is None:
        return Picture(stem, title, (), (f"{scene.lacking[:1].upper()}{scene.lacking[1:]}.",), scene.notes)
    found, step = _thinned_map(scene.found, most)
    lambdas = _spans(found, {"value": found.lambdas})
    kept = [place for place, value in enumerate(lambdas["value"]) if value is not None and value > 0]
    lambdas = {name: [values[place] for place in kept] for name, values in lambdas.items()}
    rates = _spans(found, {"value": found.rates})
    panels, lacking = [], []
    parts = (("λ, the largest eigenvalue of the layer's block", lambdas, "log"),)
    parts += (("Rate scale (× the schedule's learning rate)", rates, "linear"),)
    for heading, spans, kind in parts:
        if not spans["value"]:
            lacking.append(f"{heading}: none was read.")
            continue
        ends = [vegalite.short(min(spans["value"])), vegalite.short(max(spans["value"]))]
        if ends[0] == ends[1]:
            lacking.append(f"{heading}: {ends[0]:g} in every layer that was read, all the time.")
            continue
        scale = {"type": kind, "scheme": "cividis", "domain": ends, "nice": False}
        colour = {"field": "value", "type": "quantitative", "title": None, "scale": scale}
        tooltip = vegalite.tooltip({"layer": "Layer"}, {"value": heading.partition(",")[0]} | _FROM_TO)
        panels.append(
            Panel(heading, _map(found, colour, tooltip), {"spans": vegalite.packed(spans)}, _map_height(found))
        )
    notes = [*scene.notes, *_thinning({step}, "control step")]
    if any(value is None or value <= 0 for row in found.lambdas for value in row):
        notes.append("Grey: λ not read yet, or not above zero.")
    return Picture(stem, title, tuple(panels), tuple(lacking), tuple(notes))


def _map(found: LayerMap, colour: dict[str, Any], tooltip: list[dict[str, Any]]) -> dict[str, Any]:
    span = [found.edges[0], found.edges[-1]]
    x = {"field": "start", "type": "quantitative", "title": "Epochs trained"}
    y = {"field": "layer", "type": "nominal", "sort": None, "title": None, "axis": {"labelOverlap": True}}
    encoding = {
        "x": x | {"scale": {"domain": span, "nice": False}},
        "x2": {"field": "end"},
        "y": y | {"scale": {"domain": [*found.layers], "padding": 0}},
        "tooltip": tooltip,
    }
    return {
        "data": {"name": "spans"},
        "height": _map_height(found),
        "view": {"fill": "#88888840"},
        "encoding": encoding,
        "layer": [{"mark": {"type": "rect", "tooltip": True}, "encoding": {"color": colour}}],
    }


def _map_height(found: LayerMap) -> int:
    least, most = LAYER_HEIGHTS
    return len(found.layers) * max(least, min(most, MAP_HEIGHT // len(found.layers)))


def _spans(found: LayerMap, grids: Mapping[str, Sequence[Sequence[Any]]]) -> dict[str, list[Any]]:
    """One row for each stretch of a layer in which no grid changes."""
    columns: dict[str, list[Any]] = {name: [] for name in ("layer", "start", "end", *grids)}
    for number, layer in enumerate(found.layers):
        cells = list(zip(*(grid[number] for grid in grids.values())))
        begun = 0
        for column in range(1, len(cells) + 1):
            if column == len(cells) or cells[column] != cells[begun]:
                spanned = (layer, found.edges[begun], found.edges[column], *cells[begun])
                for name, value in zip(columns, spanned):
                    columns[name].append(value)
                begun = column
    return columns


def _looks(group: Group) -> dict[Member, style.Look]:
    return dict(zip(group.members, style.looks([one.cell.method for one in group.members])))


def _thinned_curve(curve: Curve, most: int) -> tuple[Curve, int]:
    """One point in so many, and that number."""
    step = -(-len(curve.x) // most)
    kept = _kept(len(curve.x), step)
    parts = (tuple(values[place] for place in kept) for values in (curve.x, curve.mean, curve.low, curve.high))
    return Curve(*parts, seeds=curve.seeds), step


def _thinned_course(course: Course, most: int) -> tuple[Course, int]:
    step = -(-max(len(course.memory), len(course.batch)) // most)
    memory, batch = (
        tuple(points[place] for place in _kept(len(points), step)) for points in (course.memory, course.batch)
    )
    return replace(course, memory=memory, batch=batch), step


def _kept(count: int, step: int) -> list[int]:
    kept = list(range(0, count, step))
    return kept if not count or kept[-1] == count - 1 else [*kept, count - 1]


def _thinned_map(found: LayerMap, most: int) -> tuple[LayerMap, int]:
    step = -(-(len(found.edges) - 1) // most)
    grids = {
        name: tuple(row[::step] for row in getattr(found, name))
        for name in ("requested", "executed", "promoted", "rates", "lambdas")
    }
    return replace(found, edges=(*found.edges[:-1:step], found.edges[-1]), **grids), step


def _thinning(steps: set[int], what: str) -> list[str]:
    step = max(steps, default=1)
    return [f"Thinned out for the size of this page: one {what} in {step} is drawn."] if step > 1 else []
