"""How pictures look, and how one becomes bytes. matplotlib is imported by the first picture, and not before.

The same figure gives the same bytes with one version of matplotlib, whatever its user's settings.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

WIDTH = 6.9
"""Inches of a page's two columns. Fonts below are in points at this size."""
NOTE_LINES = 8
FONT, POINTS = "DejaVu Sans", 8.0
"""Comes with matplotlib, so that it is everywhere."""
SIGN = 0.65
"""Inches that a legend's sign takes, with the gap to the next one."""

BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILLION, PURPLE = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
"""Okabe and Ito's colours, which the colour-blind tell apart."""

_RC: dict[str, Any] = {
    "font.family": FONT,
    "font.size": POINTS,
    "axes.titlesize": 9.0,
    "axes.titleweight": "bold",
    "axes.labelsize": POINTS,
    "xtick.labelsize": POINTS,
    "ytick.labelsize": POINTS,
    "legend.fontsize": POINTS,
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
    title = shortened(title, 0.95 * WIDTH * POINTS / 10)
    if not handles:
        figure.suptitle(title)
        return
    for handle in handles:
        handle.set_label(shortened(handle.get_label(), 0.95 * WIDTH - SIGN))
    widths = [inches(handle.get_label()) + SIGN for handle in handles]
    columns = len(handles) if sum(widths) <= WIDTH else max(1, min(4, int(WIDTH / max(widths))))
    # As the legend's own title: another one would lie upon it.
    figure.legend(handles=handles, title=title, title_fontsize=10, loc="outside upper center", ncols=columns)


def noted(figure: Any, notes: Sequence[str]) -> None:
    """Sentences below the picture; made once all else is in it."""
    lines = [line for note in notes for line in wrapped(note, 0.97 * WIDTH)]
    if len(lines) > NOTE_LINES:
        more = len(lines) - NOTE_LINES + 1
        lines = [*lines[: NOTE_LINES - 1], f"… and {more} more lines, which stand below the tables of triaccel-tables"]
    if lines:
        figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=POINTS)


def said(axes: Any, text: str) -> None:
    """What is missing, in the middle of empty axes."""
    axes.set_xticks([])
    axes.set_yticks([])
    axes.grid(False)
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center")


def inches(text: str) -> float:
    """Width of a line of text in the pictures' font."""
    from matplotlib.font_manager import findfont, get_font

    font = get_font(findfont(FONT))
    font.set_size(POINTS, 72)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        font.set_text(text)
    return font.get_width_height()[0] / 64 / 72


def shortened(text: str, width: float) -> str:
    """No wider than so many inches, with an ellipsis where something was cut."""
    if inches(text) <= width:
        return text
    kept = len(text)
    while kept and inches(f"{text[:kept]}…") > width:
        kept -= 1
    return f"{text[:kept]}…"


def wrapped(text: str, width: float) -> list[str]:
    """Lines no wider than so many inches, broken at blanks."""
    lines: list[str] = []
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and inches(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(shortened(word, width))
    return lines


def both_formats(stem: str, figure: Any) -> dict[str, bytes]:
    """The picture by file name."""
    figure.draw_without_rendering()
    # Both are laid out as the first was, in half the time.
    figure.set_layout_engine("none")
    without = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}
    files = {}
    for kind, metadata in without.items():
        content = io.BytesIO()
        figure.savefig(content, format=kind, metadata=metadata)
        files[f"{stem}.{kind}"] = content.getvalue()
    return files
