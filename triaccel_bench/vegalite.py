"""Parts of Vega-Lite specifications, and the data beside them, packed for JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from triaccel_bench.style import Look

_DASHES = {"-": [1, 0], "--": [7, 3], "-.": [7, 3, 2, 3]}
_X = "M-1,-.6L-.6,-1L0,-.4L.6,-1L1,-.6L.4,0L1,.6L.6,1L0,.4L-.6,1L-1,.6L-.4,0Z"
_STAR = "M0,-1.2L.28,-.39L1.14,-.37L.46,.14L.71,.97L0,.48L-.71,.97L-.46,.14L-1.14,-.37L-.28,-.39Z"
_SHAPES = {
    "o": "circle", "s": "square", "^": "triangle-up", "D": "diamond", "v": "triangle-down", "P": "cross", "X": _X,
    "*": _STAR, "<": "triangle-left", ">": "triangle-right", "p": "wedge", "h": "arrow", "d": "diamond",
}  # fmt: skip


@dataclass(frozen=True)
class Panel:
    """One plot: its heading, which names what is on its vertical axis, a Vega-Lite specification, and its data."""

    heading: str
    spec: dict[str, Any]
    data: dict[str, dict[str, Any]]
    height: int
    """Pixels that it will take, axes apart."""


@dataclass(frozen=True)
class Picture:
    """Panels under one title; what is missing stands in ``lacking``, what was thinned out in ``notes``."""

    stem: str
    title: str
    """Below the heading of what all pictures beside it show."""
    panels: tuple[Panel, ...]
    lacking: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    key: tuple[tuple[str, str], ...] = ()
    """Colours and what they stand for, where panels have no legends of their own."""
    stacked: bool = False
    """Whether panels share their horizontal axis, and stand above one another."""


def layered(
    data: str, layers: list[dict[str, Any]], place: dict[str, Any], colour: dict[str, Any], height: int
) -> dict[str, Any]:
    """All layers at the same place, in their lines' colours, but for the one that only the pointer finds."""
    own = [
        layer | {"encoding": place | ({} if "tooltip" in layer["encoding"] else colour) | layer["encoding"]}
        for layer in layers
    ]
    return {"data": {"name": data}, "height": height, "layer": own}


def hover(shown: list[dict[str, Any]]) -> dict[str, Any]:
    """Wider than what is seen, so that a finger finds it."""
    return {"mark": {"type": "point", "size": 160, "opacity": 0, "filled": True}, "encoding": {"tooltip": shown}}


def tooltip(words: Mapping[str, str], figures: Mapping[str, str]) -> list[dict[str, Any]]:
    """Titles by field."""
    told = [{"field": name, "title": title, "type": "nominal"} for name, title in words.items()]
    return told + [
        {"field": name, "title": title, "type": "quantitative", "format": ".5~g"} for name, title in figures.items()
    ]


def line_scales(looks: Mapping[str, Look]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Encodings of colour, dashes and markers by the lines' labels: one legend together, of a single line none."""
    # Bands of seeds are pale, and their legend would be, too.
    legend = {"legend": None if len(looks) == 1 else {"symbolOpacity": 1}}
    ways = {"color": _color, "strokeDash": _dash, "shape": _shape}
    color, dash, shape = (
        {
            way: {
                "field": "line",
                "type": "nominal",
                "title": None,
                "scale": {"domain": [*looks], "range": [chosen(look) for look in looks.values()]},
                **legend,
            }
        }
        for way, chosen in ways.items()
    )
    return color, dash, shape


def _color(look: Look) -> str:
    return look.color


def _dash(look: Look) -> list[float]:
    if isinstance(look.linestyle, str):
        return _DASHES[look.linestyle]
    return [1.5 * length for length in look.linestyle[1]]


def _shape(look: Look) -> str:
    return _SHAPES.get(look.marker, "square")


def packed(columns: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Columns for JSON: figures to six digits, and of text each word once."""
    return {name: _packed_column(values) for name, values in columns.items()}


def _packed_column(values: Iterable[Any]) -> Any:
    if any(isinstance(value, str) for value in values):
        levels = list(dict.fromkeys(values))
        places = {level: place for place, level in enumerate(levels)}
        return {"levels": levels, "codes": [places[value] for value in values]}
    return [value if value is None or isinstance(value, bool) else short(value) for value in values]


def short(value: float) -> float:
    """To six digits, as an integer where it is one."""
    short = float(f"{value:.6g}")
    return int(short) if short == int(short) else short
