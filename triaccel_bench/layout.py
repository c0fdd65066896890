"""A table of text and figures, written as Markdown, CSV, LaTeX or on a terminal. Knows nothing of runs.

Each writer escapes what its format reads as markup, so that any label can stand in a table.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TextIO

import pandas
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

_TEX = str.maketrans(
    {character: f"\\{character}" for character in "&%$#_{}"}
    | {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        "±": r"$\pm$",
        "×": r"$\times$",
        "†": r"\textdagger{}",
        "‡": r"\textdaggerdbl{}",
        # After the end of a row these two would be read as its options.
        "[": "{[}",
        "*": "{*}",
    }
)

_ASCII = {"±": "+/-", "×": "x", "†": "*", "‡": "**"}

_GAP = 2
"""Blanks between two columns on a terminal."""

_LONGEST_WORD = 24
"""A longer word may be folded inside."""


@dataclass(frozen=True)
class Table:
    """A table as text for readers and, in ``frame``, at full precision for programs."""

    title: str
    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    footers: tuple[str, ...]
    frame: pandas.DataFrame
    text_columns: int
    """Leading columns that hold labels; the others hold figures and are set flush right."""
    group_columns: int = 0
    """Leading labels that a narrow terminal shows once, above the rows that share them."""
    folding: frozenset[str] = frozenset()
    """Columns of figures that may fold at blanks; no other figure is ever folded."""


def to_markdown(table: Table) -> str:
    rule = ["---"] * table.text_columns + ["---:"] * (len(table.header) - table.text_columns)
    rows = [_markdown_row(table.header), _markdown_row(rule), *map(_markdown_row, table.rows)]
    footers = [f"- {_markdown(footer)}" for footer in table.footers]
    blocks = [f"### {_markdown(table.title)}", _markdown(table.caption), "\n".join(rows), "\n".join(footers)]
    return "\n\n".join(block for block in blocks if block) + "\n"


def to_csv(table: Table) -> str:
    """One row per cell, full precision, ``n/a`` where there is no figure.

    Read it with ``pandas.read_csv(path, keep_default_na=False, na_values=["n/a"])``: a label such as
    ``NA`` then stays a label.
    """
    return table.frame.to_csv(index=False, lineterminator="\n", na_rep="n/a")


def to_latex(table: Table) -> str:
    r"""A ``table`` environment for ``\input``; the document needs the packages booktabs and graphicx."""
    alignment = "l" * table.text_columns + "r" * (len(table.header) - table.text_columns)
    footers = [_tex(footer) + r"\par" for footer in table.footers]
    # LaTeX numbers its tables itself.
    title = table.title.partition(": ")[2] or table.title
    lines = [
        r"% needs \usepackage{booktabs} and \usepackage{graphicx}",
        r"\begin{table}[t]",
        r"\centering",
        rf"\caption{{{_tex(title[:1].upper() + title[1:])}. {_tex(table.caption)}}}",
        r"\resizebox{\textwidth}{!}{%",
        rf"\begin{{tabular}}{{{alignment}}}",
        r"\toprule",
        _tex_row(table.header),
        r"\midrule",
        *map(_tex_row, table.rows),
        r"\bottomrule",
        r"\end{tabular}}",
        *([r"\par\smallskip", r"{\footnotesize\raggedright", *footers, "}"] if footers else []),
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def render_terminal(table: Table, file: TextIO | None = None) -> None:
    """Print the table: fitted to the width of a terminal, and as wide as it is, a line a row, anywhere else.

    Text folds at blanks and figures never do. Where even that is too wide, the columns of figures
    are dealt out over several grids, each with the labels.
    """
    file = file or sys.stdout
    if file is None:
        # The caller closed its standard output.
        return
    table = _encodable(table, getattr(file, "encoding", None) or "utf-8")
    console = Console(file=file, highlight=False)
    on_terminal = console.is_terminal
    grids = list(_grids(table, console.width)) if on_terminal else [_grid(_columns(table), None)]
    if not on_terminal:
        console.width = max(console.measure(grid, options=console.options.update(width=10_000)).maximum for grid in grids)
    # One write, so that a reader that has gone is met here and nowhere inside rich.
    with console.capture() as capture:
        console.print(Text(table.title, style="bold"), soft_wrap=not on_terminal)
        for grid in grids:
            console.print(grid)
            console.print()
        for line in (table.caption, *table.footers):
            console.print(Text(line), soft_wrap=not on_terminal)
    file.write(capture.get())


@dataclass(frozen=True)
class _Column:
    name: str
    cells: tuple[str, ...]
    is_text: bool
    may_fold: bool

    @property
    def natural(self) -> int:
        return max(map(cell_len, (self.name, *self.cells)))

    @property
    def least(self) -> int:
        """The narrowest width at which no word of a text and no figure is cut."""
        words = [word for cell in (self.cells if self.may_fold else ()) for word in cell.split()] + self.name.split()
        figures = () if self.may_fold else self.cells
        return max(1, *(min(cell_len(word), _LONGEST_WORD) for word in words), *map(cell_len, figures))


def _columns(table: Table) -> list[_Column]:
    return [
        _Column(name, cells, index < table.text_columns, index < table.text_columns or name in table.folding)
        for index, (name, *cells) in enumerate(zip(table.header, *table.rows, strict=True))
    ]


def _grids(table: Table, width: int) -> Iterator[RichTable]:
    columns = _columns(table)
    if _total(column.least for column in columns) <= width:
        yield _grid(columns, width)
        return
    columns = _columns(_under_headings(table))
    labels = [column for column in columns if column.is_text]
    figures = columns[len(labels) :]
    while True:
        taken = 1
        while taken < len(figures) and _total(c.least for c in (*labels, *figures[: taken + 1])) <= width:
            taken += 1
        yield _grid([*labels, *figures[:taken]], width)
        figures = figures[taken:]
        if not figures:
            return


def _under_headings(table: Table) -> Table:
    """The same rows, their group in a row of its own above those that share it."""
    count = table.group_columns
    if not count:
        return table
    rows = []
    for group, members in groupby(table.rows, key=lambda row: row[:count]):
        rows.append((", ".join(group), *[""] * (len(table.header) - count - 1)))
        rows += [row[count:] for row in members]
    header, text_columns = table.header[count:], table.text_columns - count
    return replace(table, header=header, rows=tuple(rows), text_columns=text_columns, group_columns=0)


def _grid(columns: Sequence[_Column], width: int | None) -> RichTable:
    widths = [column.natural for column in columns]
    while width is not None and _total(widths) > width:
        # Names of figure columns fold before labels do.
        slack = [
            (not column.is_text, now, index)
            for index, (column, now) in enumerate(zip(columns, widths, strict=True))
            if now > column.least
        ]
        if not slack:
            break
        widths[max(slack)[-1]] -= 1
    grid = RichTable(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    for column, chosen in zip(columns, widths, strict=True):
        justify = "left" if column.is_text else "right"
        grid.add_column(Text(column.name), justify=justify, width=chosen, overflow="fold")
    for row in zip(*(column.cells for column in columns), strict=True):
        is_heading = bool(row[0]) and not any(row[1:])
        grid.add_row(*map(Text, row), style="bold" if is_heading and len(row) > 1 else None)
    return grid


def _total(widths: Iterable[int]) -> int:
    widths = list(widths)
    return sum(widths) + _GAP * (len(widths) - 1)


def _encodable(table: Table, encoding: str) -> Table:
    """The table in characters that ``encoding`` has."""

    def plain(text: str) -> str:
        try:
            text.encode(encoding)
        except UnicodeEncodeError:
            translated = text.translate(str.maketrans(_ASCII))
            return translated.encode(encoding, "backslashreplace").decode(encoding)
        return text

    return replace(
        table,
        title=plain(table.title),
        caption=plain(table.caption),
        header=tuple(map(plain, table.header)),
        rows=tuple(tuple(map(plain, row)) for row in table.rows),
        footers=tuple(map(plain, table.footers)),
        folding=frozenset(map(plain, table.folding)),
    )


def _markdown_row(row: tuple[str, ...] | list[str]) -> str:
    return f"| {' | '.join(map(_markdown, row))} |"


def _markdown(text: str) -> str:
    for character in "\\|<*`":
        text = text.replace(character, f"\\{character}")
    return " ".join(text.split())


def _tex_row(row: tuple[str, ...]) -> str:
    return " & ".join(map(_tex, row)) + r" \\"


def _tex(text: str) -> str:
    escaped = " ".join(text.split()).translate(_TEX)
    return "".join(character if character.isascii() else f"{{[}}U+{ord(character):04X}]" for character in escaped)
