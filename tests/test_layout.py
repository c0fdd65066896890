"""Writers: every row whole, every label as it is, the same bytes every time."""

from __future__ import annotations

import io
import re
import shutil
import subprocess

import pandas
import pytest
from measured import papers_table1, run, write

from triaccel_bench.audit import audit_table, records_table
from triaccel_bench.layout import to_csv, to_latex, to_markdown
from triaccel_bench.results import Results, read_results
from triaccel_bench.tables import table1, table2
from triaccel_bench.terminal import render_terminal


def test_labels_and_figures_survive_the_csv():
    runs = [run(method=name, accuracy=100 / 3) for name in ("NA", "null", "nan", "None", 'a,"b')]
    text = to_csv(table1(Results(tuple(runs))))
    frame = pandas.read_csv(io.StringIO(text), keep_default_na=False, na_values=["n/a"])
    assert sorted(frame["method"]) == sorted(["NA", "null", "nan", "None", 'a,"b'])
    assert list(frame["accuracy_percent_mean"]) == [100 / 3] * 5
    assert frame["accuracy_percent_std"].isna().all() and "33.333333333333336,n/a," in text
    assert frame["vram_peak_bytes_mean"].dtype.kind in "if"


@pytest.mark.parametrize("writer", [to_markdown, to_csv, to_latex])
def test_the_same_records_give_the_same_bytes(tmp_path, writer):
    runs = [run(method=m, seed=s, accuracy=70 + s) for m in ("fp32", "amp", "triaccel") for s in (0, 1, 2)]
    forward, backward = write(tmp_path / "a", *runs), write(tmp_path / "b", *reversed(runs))
    for make in (table1, table2):
        assert len({writer(make(read_results([folder]))) for folder in (forward, forward, backward)}) == 1


def test_markdown_escapes_and_keeps_every_row_whole():
    odd = run(method="a|b\n<c>", tree={"seeds": [0, 9]})
    lines = to_markdown(table1(Results((*papers_table1().runs, odd)))).splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1
    assert len(rows) == 2 + 12 + 1
    assert any(r"a\|b \<c>" in row for row in rows)


def test_latex_escapes_and_keeps_every_row_whole():
    odd = run(method="[50%_a&b#$~^\\{x}é", status="failed", reason="C:\\tmp_1 & 100 %")
    text = to_latex(table1(Results((*papers_table1().runs, odd))))
    body = text.partition(r"\midrule")[2].partition(r"\bottomrule")[0].strip().splitlines()
    columns = len(re.search(r"\\begin\{tabular\}\{(\w+)\}", text).group(1))
    assert len(body) == 13
    assert {len(re.findall(r"(?<!\\)&", row)) + 1 for row in body} == {columns}
    assert all(row.endswith(r" \\") and not row.startswith(("[", "*")) for row in body)
    assert r"{[}50\%\_a\&b\#\$\textasciitilde{}\textasciicircum{}\textbackslash{}\{x\}{[}U+00E9]" in text
    plain = re.sub(r"\\[{}]", "", text)
    assert plain.count("{") == plain.count("}")
    assert text.isascii()
    assert text.count(r"\caption{Performance and efficiency. Device") == 1


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs pdflatex")
def test_latex_compiles(tmp_path):
    odd = run(dataset="*[d", method="[50%_a&b#$~^\\{x}é<|>", status="failed", reason='C:\\tmp_1 & "100 %" of `z`')
    results = Results((*papers_table1().runs, odd), ("a_b.json: bad",))
    tables = "".join(map(to_latex, (table1(results), table2(results), audit_table(), records_table(results))))
    packages = r"\usepackage{booktabs}\usepackage{graphicx}"
    document = rf"\documentclass{{article}}{packages}\begin{{document}}{tables}\end{{document}}"
    (tmp_path / "t.tex").write_text(document.replace("{document}%", "{document}\n%"))
    command = ["pdflatex", "-draftmode", "-interaction=nonstopmode", "-halt-on-error", "t.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]


def test_piped_output_is_never_cut():
    out = io.StringIO()
    table = table1(Results((*papers_table1().runs, run(method="m" * 60))))
    render_terminal(table, out)
    lines = out.getvalue().splitlines()
    assert all(any(all(cell in line for cell in row) for line in lines) for row in table.rows)
    assert table.caption in lines


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown_on_a_terminal(monkeypatch, table, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    render_terminal(table, out)
    return re.sub(r"\x1b\[\d*m", "", out.getvalue())


@pytest.mark.parametrize("columns", [60, 80, 100, 120, 160])
def test_a_terminal_shows_every_word_and_figure_uncut_within_its_width(monkeypatch, columns):
    table = table1(Results((*papers_table1().runs, *(run(method="tf32", seed=seed) for seed in range(3)))))
    text = shown_on_a_terminal(monkeypatch, table, columns)
    assert max(map(len, text.splitlines())) <= columns
    words = set(text.replace(",", "").split())
    for row in (table.header[2:], *table.rows):
        assert set(" ".join(row).split()) <= words
    assert "B0" not in words, "EfficientNet-B0 is one word"
    lines = [line for line in text.splitlines() if "Paper:" in line]
    assert columns < 80 or max(line.count("Paper:") for line in lines) >= 2
    for row in table.rows:
        figures = set(row[3:]) - {row[table.header.index("Executed")]}
        assert all(any(figure in line for line in text.splitlines()) for figure in figures)


def test_a_long_name_is_folded_and_not_cut(monkeypatch):
    text = shown_on_a_terminal(monkeypatch, table2(Results((run(method="triaccel_" + "m" * 60),))), 80)
    assert text.count("m") >= 60 and "…" not in text


@pytest.mark.parametrize(("encoding", "shown"), [("ascii", "77.50 +/- 0.71"), ("latin-1", "77.50 ± 0.71")])
def test_a_terminal_without_utf_8_gets_plain_characters(encoding, shown):
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding=encoding)
    runs = (run(accuracy=77.0), run(accuracy=78.0, seed=1), run(method="é→"))
    render_terminal(table1(Results(runs)), out)
    out.flush()
    text = raw.getvalue().decode(encoding)
    assert shown in text and "\\u2192" in text


def test_markup_in_a_label_is_printed_as_it_is():
    out = io.StringIO()
    render_terminal(table1(Results((run(method="[bold]x[/]"),))), out)
    assert "[bold]x[/]" in out.getvalue()
