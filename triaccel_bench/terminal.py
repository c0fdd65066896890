"""A table on a terminal of any width, or as wide as it is in a pipe or a file."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, Group
from rich.table import Table as RichTable
from rich.text import Text

from triaccel_bench.layout import Table

_ASCII = {"±": "+/-", "×": "x", "†": "*", "‡": "**"}

_GAP = 2
"""Blanks between two columns on a terminal."""

_LONGEST_WORD = 24
"""A longer word may be folded inside."""


def silence_output() -> None:
    """For an output that failed: Python flushes what is left as it ends, and would show that failure too."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def print_any_name() -> None:
    """A name that the output's encoding lacks is worth an escape, not the loss of a run."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


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
        unbounded = console.options.update(width=10_000)
        console.width = max(console.measure(grid, options=unbounded).maximum for grid in grids)
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
    natural: int
    """Width at which nothing folds."""
    comfortable: int
    """Width at which only the column's name folds."""
    least: int
    """The narrowest width at which no word of a text and no figure is cut."""


def _columns(table: Table) -> list[_Column]:
    columns = []
    for index, (name, *cells) in enumerate(zip(table.header, *table.rows, strict=True)):
        is_text = index < table.text_columns
        body = [cell for cell, row in zip(cells, table.rows, strict=True) if not _is_heading(row)]
        words = [min(cell_len(word), _LONGEST_WORD) for cell in body for word in cell.split()]
        named = max(map(cell_len, name.split()), default=1)
        whole = max(map(cell_len, body), default=0)
        least = max(named, *words, 1) if is_text or name in table.folding else max(named, whole)
        columns.append(
            _Column(
                name,
                tuple(cells),
                is_text,
                natural=max(cell_len(name), whole),
                comfortable=max(least, whole),
                least=least,
            )
        )
    return columns


def _is_heading(row: Sequence[str]) -> bool:
    return len(row) > 1 and not any(row[1:])


def _grids(table: Table, width: int) -> Iterator[Group]:
    columns = _columns(table)
    if _total(column.least for column in columns) <= width:
        yield _grid(columns, width)
        return
    columns = _columns(_under_headings(table))
    labels = [column for column in columns if column.is_text]
    cut = len(columns) - table.tail_columns
    for figures in _dealt(labels, columns[len(labels) : cut], columns[cut:], width):
        yield _grid([*labels, *figures], width)


def _dealt(labels: list[_Column], figures: list[_Column], tail: list[_Column], width: int) -> list[list[_Column]]:
    """The figures of each grid: as many as fit, those of the tail together."""

    def fit(*chosen: _Column) -> bool:
        return _total(column.least for column in (*labels, *chosen)) <= width

    dealt: list[list[_Column]] = []
    for column in figures:
        if dealt and fit(*dealt[-1], column):
            dealt[-1].append(column)
        else:
            dealt.append([column])
    if not tail:
        return dealt or [[]]
    if dealt and fit(*dealt[-1], *tail):
        dealt[-1] += tail
        return dealt
    return dealt + _dealt(labels, tail, [], width)


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


def _grid(columns: Sequence[_Column], width: int | None) -> Group:
    widths = [column.natural for column in columns]
    for floor in ([column.comfortable for column in columns], [column.least for column in columns]):
        while width is not None and _total(widths) > width:
            slack = [(now, index) for index, now in enumerate(widths) if now > floor[index]]
            if not slack:
                break
            widths[max(slack)[1]] -= 1

    def part(show_header: bool) -> RichTable:
        grid = RichTable(
            box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True, show_header=show_header
        )
        for column, chosen in zip(columns, widths, strict=True):
            justify = "left" if column.is_text else "right"
            grid.add_column(Text(column.name), justify=justify, width=chosen, overflow="fold")
        return grid

    # A heading runs over all columns, so the rows below it are a part of their own, of the same widths.
    parts: list[Text | RichTable] = [part(show_header=True)]
    for row in zip(*(column.cells for column in columns), strict=True):
        if _is_heading(row):
            parts += [Text(row[0], style="bold"), part(show_header=False)]
        else:
            parts[-1].add_row(*map(Text, row))
    return Group(*parts)


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
