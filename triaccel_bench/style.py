"""How pictures look, and how one becomes bytes. matplotlib is imported by the first picture, and not before.

The same figure gives the same bytes with one version of matplotlib, whatever its user's settings.
"""

from __future__ import annotations

import io
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

WIDTH = 6.9
"""Inches of a page's two columns. Fonts below are in points at this size."""
NOTE_COLUMNS = 112
"""Letters of a note in one line of that width."""
LEGEND_COLUMNS = 113
"""Letters of a legend's line, of which a sign takes nine."""

BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILLION, PURPLE = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
"""Okabe and Ito's colours, which the colour-blind tell apart."""

_RC: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 8.0,
    "axes.titlesize": 9.0,
    "axes.titleweight": "bold",
    "axes.labelsize": 8.0,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "legend.fontsize": 8.0,
    "figure.titlesize": 10.0,
    "legend.frameon": False,
    "legend.handlelength": 3.2,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.5,
    "lines.markersize": 4.5,
    "hatch.linewidth": 0.6,
    # Names of data sets are text, whatever signs are in them.
    "text.parse_math": False,
    "axes.formatter.use_mathtext": False,
    "savefig.dpi": 200,
    "figure.dpi": 200,
    # Letters as outlines: printed alike where the font is not there.
    "svg.fonttype": "path",
    "svg.hashsalt": "triaccel-bench",
}


class NoMatplotlib(Exception):
    """The message says how to get it."""


@dataclass(frozen=True)
class Look:
    """A method's line: apart from every other one by more than its colour."""

    color: str
    linestyle: Any
    marker: str


_LONG, _DOTS, _DASH_DOTS = (0, (8, 2)), (0, (1, 1.2)), (0, (5, 1, 1, 1, 1, 1))
_LOOKS = {
    "fp32": Look(BLACK, "-", "o"),
    "tf32": Look(ORANGE, "--", "s"),
    "amp": Look(SKY, "-.", "^"),
    "triaccel": Look(VERMILLION, _LONG, "D"),
    "triaccel_batch": Look(GREEN, _DOTS, "v"),
    "triaccel_precision": Look(PURPLE, _DASH_DOTS, "P"),
    "triaccel_curvature": Look(BLUE, "--", "X"),
}
_LINES = ("-", "--", "-.", _DOTS, _LONG, _DASH_DOTS)
_MARKERS = ("*", "<", ">", "p", "h", "d", "8")
_COLORS = (BLUE, VERMILLION, GREEN, PURPLE, BLACK)
_OTHERS = [Look(_COLORS[n % 5], _LINES[n % 6], _MARKERS[n % 7]) for n in range(5 * 6 * 7)]


def looks(methods: Sequence[str]) -> list[Look]:
    """One for each line of a picture. The first line of a method looks alike in every picture."""
    others, taken = iter(_OTHERS), set()
    chosen = []
    for method in methods:
        look = _LOOKS.get(method)
        if look is None or method in taken:
            look = next(others, _OTHERS[-1])
        taken.add(method)
        chosen.append(look)
    return chosen


@contextmanager
def drawing() -> Iterator[None]:
    """matplotlib with the settings of this module alone, and with those of before afterwards.

    Raises:
        NoMatplotlib: it is not installed.
    """
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise NoMatplotlib(
            "matplotlib: expected it to be installed for pictures, got none; pip install 'triaccel-bench[figures]'"
        ) from None
    with matplotlib.rc_context(), warnings.catch_warnings():
        # A letter that the font lacks is drawn as a box.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_RC)
        yield


def blank(height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Any, Any]:
    """A figure of the page's width with its axes, outside of pyplot and its global state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **options)


def titled(figure: Any, title: str, handles: Sequence[Any] = ()) -> None:
    """The title, and beneath it what is what."""
    title = shortened(title, 90)
    if not handles:
        figure.suptitle(title)
        return
    widths = [len(handle.get_label()) + 9 for handle in handles]
    columns = len(handles) if sum(widths) <= LEGEND_COLUMNS else max(1, min(4, LEGEND_COLUMNS // max(widths)))
    # As the legend's own title: another one would lie upon it.
    figure.legend(handles=handles, title=title, title_fontsize=10, loc="outside upper center", ncols=columns)


def noted(figure: Any, notes: Sequence[str]) -> None:
    """Sentences below the picture; made once all else is in it."""
    lines = [line for note in notes for line in textwrap.wrap(note, NOTE_COLUMNS)]
    if len(lines) > 8:
        lines = [*lines[:7], f"… and {len(lines) - 7} more lines: see the footers of triaccel-tables"]
    if lines:
        figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=8)


def said(axes: Any, text: str) -> None:
    """What is missing, in the middle of empty axes."""
    axes.set_xticks([])
    axes.set_yticks([])
    axes.grid(False)
    axes.text(0.5, 0.5, "\n".join(textwrap.wrap(text, 48)), transform=axes.transAxes, ha="center", va="center")


def shortened(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"


def both_formats(stem: str, figure: Any) -> dict[str, bytes]:
    """The picture by file name."""
    without = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}
    files = {}
    for kind, metadata in without.items():
        content = io.BytesIO()
        figure.savefig(content, format=kind, metadata=metadata)
        files[f"{stem}.{kind}"] = content.getvalue()
    return files
