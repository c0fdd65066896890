"""Writers: every row whole, every label as it is, the same bytes every time."""

from __future__ import annotations

import io
import re
import shutil
import subprocess

import pandas
import pytest
from measured import papers_table1, run, write

from triaccel_bench.layout import render_terminal, to_csv, to_latex, to_markdown
from triaccel_bench.results import Results, read_results
from triaccel_bench.tables import audit_table, table1, table2


def test_labels_and_figures_survive_the_csv():
    runs = [run(method=name, accuracy=100 / 3) for name in ("NA", "null", "nan", "None", "n/a", 'a,"b')]
    text = to_csv(table1(Results(tuple(runs))))
    frame = pandas.read_csv(io.StringIO(text), keep_default_na=False, na_values=[""])
    assert sorted(frame["method"]) == sorted(["NA", "null", "nan", "None", "n/a", 'a,"b'])
    assert list(frame["accuracy_percent_mean"]) == [100 / 3] * 6
    assert frame["accuracy_percent_std"].isna().all()
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
    assert text.count(r"\caption{performance and efficiency. Device") == 1


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs pdflatex")
def test_latex_compiles(tmp_path):
    odd = run(dataset="*[d", method="[50%_a&b#$~^\\{x}é<|>", status="failed", reason='C:\\tmp_1 & "100 %" of `z`')
    results = Results((*papers_table1().runs, odd), ("a_b.json: bad",))
    tables = "".join(map(to_latex, (table1(results), table2(results), audit_table())))
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


def test_a_narrow_terminal_folds_and_cuts_nothing(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    render_terminal(table2(Results((run(method="triaccel_" + "m" * 60),))), out)
    assert out.getvalue().count("m") >= 60 and "…" not in out.getvalue()


def test_markup_in_a_label_is_printed_as_it_is():
    out = io.StringIO()
    render_terminal(table1(Results((run(method="[bold]x[/]"),))), out)
    assert "[bold]x[/]" in out.getvalue()
