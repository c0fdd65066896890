"""A table of text and figures, written as Markdown, CSV or LaTeX. Knows nothing of runs.

Each writer escapes what its format reads as markup, so that any label can stand in a table.
"""

from __future__ import annotations

from dataclasses import dataclass

import pandas

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
    tail_columns: int = 0
    """Last columns that a narrow terminal keeps in one grid."""
    folding: frozenset[str] = frozenset()
    """Columns of figures that may fold at blanks; no other figure is ever folded."""


def to_markdown(table: Table) -> str:
    rule = ["---"] * table.text_columns + ["---:"] * (len(table.header) - table.text_columns)
    rows = [_markdown_row(table.header), _markdown_row(rule), *map(_markdown_row, table.rows)]
    footers = [f"- {markdown(footer)}" for footer in table.footers]
    blocks = [f"### {markdown(table.title)}", markdown(table.caption), "\n".join(rows), "\n".join(footers)]
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


def _markdown_row(row: tuple[str, ...] | list[str]) -> str:
    return f"| {' | '.join(map(markdown, row))} |"


def markdown(text: str) -> str:
    """Text as a paragraph shows it, whatever it holds: no markup, link, image or row's end, and no hidden character."""
    for character in "\\|<*`":
        text = text.replace(character, f"\\{character}")
    return "".join(filter(str.isprintable, " ".join(text.split()))).replace("](", "]\\(")


def _tex_row(row: tuple[str, ...]) -> str:
    return " & ".join(map(_tex, row)) + r" \\"


def _tex(text: str) -> str:
    escaped = " ".join(text.split()).translate(_TEX)
    return "".join(character if character.isascii() else f"{{[}}U+{ord(character):04X}]" for character in escaped)
