"""From record files to Tables 1 and 2 in every format, and the command that writes them."""

from __future__ import annotations

import io
import re
import subprocess
import sys

import pandas
import pytest

from triaccel_bench import paper, tables_cli
from triaccel_bench.records import EpochRecord, Provenance, RunRecord, write_run
from triaccel_bench.results import Results, read_results
from triaccel_bench.tables import audit_table, render_terminal, table1, table2, to_csv, to_latex, to_markdown

GB = 10**9


def run(dataset="cifar10", model="resnet18", method="fp32", seed=0, *, accuracy=77.0, seconds=21.0, gb=0.35, epochs=1,
        tree=None, device_name="Card A", **changes):  # fmt: skip
    settings = {
        "seeds": [0],
        "dataset": {"name": dataset, "evaluate_on": "test"},
        "model": {"name": model, "stem": "imagenet", "input_size": 32, "weights": "none"},
        "method": {"name": method, "batch": {"initial": 96}},
        "memory": {"meter": "vram", "budget": "fp32"},
    }
    record = EpochRecord(
        epoch=0, train_loss=1.0, train_accuracy_percent=50.0, evaluation_accuracy_percent=accuracy, train_seconds=seconds,
        steps=10, samples_seen=960, batch_mean=96.0, batch_min=96, batch_max=96, batch_last=96, learning_rate_last=0.1,
        memory_peak_bytes=None if gb is None else round(gb * GB), layers_requested={}, layers_executed={},
    )  # fmt: skip
    provenance = Provenance(
        code_version="0.1.0", git_commit="abc1234", python="3.12", torch="2.6", torchvision="0.21", device="cuda",
        device_name=device_name, device_total_bytes=16 * GB, bf16_native=True, kernels="torch", kernels_reason="asked for",
        started_at="2025-01-01T00:00:00", finished_at=f"2025-01-01T00:00:0{seed}",
    )  # fmt: skip
    plain = dict(
        results_version=1, status="done", cell=f"{dataset}-{model}-{method}", dataset=dataset, model=model, method=method,
        seed=seed, epochs_planned=epochs, settings=settings | (tree or {}), provenance=provenance, meter="vram",
        budget_bytes=350_000_000, budget_source="fp32", epochs=[record.model_copy(update={"epoch": e}) for e in range(epochs)],
    )  # fmt: skip
    return RunRecord(**plain | changes)


def write(folder, *runs):
    for one in runs:
        write_run(folder / one.cell / f"seed{one.seed}", one)
    return folder


def column(table, name):
    return [row[table.header.index(name)] for row in table.rows]


def read_back(table):
    return pandas.read_csv(io.StringIO(to_csv(table)), keep_default_na=False, na_values=[""])


@pytest.fixture
def papers_own():
    """The paper's Table 1 as if it had been measured, one seed a cell."""
    rows = paper.TABLE1
    return Results(
        tuple(
            run(row.dataset, row.model, row.method, accuracy=row.accuracy_percent, seconds=row.seconds, gb=row.memory_gb)
            for row in rows
        )
    )


def test_the_papers_numbers_give_the_papers_scores_with_the_misprint_flagged(papers_own):
    table = table1(papers_own)
    scores = [float(shown.split()[0]) for shown in column(table, "Eff. Score")]
    assert scores == [round(row.score_computed, 2) for row in paper.TABLE1]
    printed = column(table, "Paper: Eff. Score")
    assert printed == [f"{row.score:.2f}" + (" †" if row.score == 12.25 else "") for row in paper.TABLE1]
    assert table.footers == (
        "† CIFAR-10 / ResNet-18 / AMP (Static): the paper prints 12.25, its own figures give 12.44",
    )


def test_table_1_has_the_papers_layout_and_order(papers_own):
    table = table1(papers_own)
    assert table.header[:7] == ("Dataset", "Architecture", "Method", "Acc (%)", "Time (s)", "VRAM (GB)", "Eff. Score")
    assert table.rows[1] == (
        "CIFAR-10", "ResNet-18", "AMP (Static)", "77.20 ± n/a", "19.40 ± n/a", "0.320 ± n/a", "12.44 ± n/a", "198.97 ± n/a",
        "96.0 ± n/a", "1", "1 (1)", "0.350 GB (fp32)", "77.2", "19.4", "0.32", "12.25 †",
    )  # fmt: skip
    assert column(table, "Method")[:3] == ["FP32 Baseline", "AMP (Static)", "Tri-Accel"]


def test_table_2_of_the_papers_numbers_flags_the_papers_reductions():
    runs = [run(model=row.model, method=row.method, gb=row.memory_gb) for row in reversed(paper.TABLE2)]
    table = table2(Results((*runs, run(method="amp"))))
    assert column(table, "Configuration") == [paper.CONFIGURATION_LABELS[row.method] for row in paper.TABLE2]
    assert column(table, "Reduction") == ["-", "8.3 %", "11.4 %", "12.3 %", "-", "6.3 %", "10.3 %", "12.0 %"]
    printed = ["-", "8.3 %", "11.4 %", "12.3 %", "-", "6.0 % †", "10.0 % †", "13.3 % †"]
    assert column(table, "Paper: Reduction") == printed
    assert [footer[:1] for footer in table.footers] == ["†"] * 3


def test_reduction_needs_a_baseline_of_the_same_settings():
    runs = (run(), run(method="triaccel", tree={"epochs": 30}, gb=0.3), run(method="triaccel_curvature", gb=0.35))
    table = table2(Results(runs))
    assert column(table, "Configuration") == ["Standard Training", "+ Curvature", "+ Full Tri-Accel"]
    assert column(table, "Reduction") == ["-", "0.0 %", "n/a"]
    assert [footer for footer in table.footers if "no reduction" in footer][0].startswith("CIFAR-10 / ResNet-18 / + Full")


def test_scores_are_taken_per_seed_then_averaged():
    runs = tuple(run(seed=seed, accuracy=80.0, seconds=s, gb=1.0) for seed, s in enumerate((1.0, 4.0)))
    assert column(table1(Results(runs)), "Eff. Score") == ["50.00 ± 42.43"]  # not 80 / 2.5 = 32


def test_all_methods_stay_whatever_their_settings_or_name(tmp_path):
    methods = {"fp32": None, "amp": None, "triaccel": 0.05, "NA": 0.1}
    runs = [run(method=m, tree={"alpha": alpha}, accuracy=77.0) for m, alpha in methods.items()]
    runs += [run(method="triaccel", seed=seed, accuracy=77.0 + seed) for seed in (1, 2)]
    table = table1(read_results([write(tmp_path, *runs)]))
    assert dict(zip(column(table, "Method"), column(table, "Acc (%)"), strict=True)) == {
        "FP32 Baseline": "77.00 ± n/a",
        "AMP (Static)": "77.00 ± n/a",
        "Tri-Accel": "78.00 ± 1.00",
        "NA": "77.00 ± n/a",
    }
    assert column(table, "Seeds") == ["1", "1", "3", "1"]


def test_labels_and_figures_survive_the_csv():
    runs = [run(method=name, accuracy=100 / 3) for name in ("NA", "null", "nan", "None", "n/a", 'a,"b')]
    frame = read_back(table1(Results(tuple(runs))))
    assert sorted(frame["method"]) == sorted(["NA", "null", "nan", "None", "n/a", 'a,"b'])
    assert list(frame["accuracy_percent_mean"]) == [100 / 3] * 6
    assert frame["accuracy_percent_std"].isna().all()
    assert frame["vram_peak_bytes_mean"].dtype.kind in "if"


@pytest.mark.parametrize(
    ("meter", "shown"), [("vram", "0.350 ± n/a"), ("tensors", "0.350 ± n/a GB tensor bytes (not VRAM)"), ("off", "n/a")]
)
def test_memory_says_which_meter_it_is(meter, shown):
    table = table1(Results((run(meter=meter),)))
    assert column(table, "VRAM (GB)") == [shown]
    assert (column(table, "Eff. Score") != ["n/a"]) == (meter == "vram")
    frame = read_back(table)
    assert frame["vram_peak_bytes_mean"].isna().all() == (meter != "vram")
    assert frame["tensor_peak_bytes_mean"].isna().all() == (meter != "tensors")


def test_an_unmeasured_memory_is_never_zero():
    frame = read_back(table1(Results((run(gb=None),))))
    assert frame[["vram_peak_bytes_mean", "score_mean", "score_percent_mean"]].isna().all(axis=None)


def test_unfinished_and_missing_seeds_are_named_with_their_reasons():
    asked = {"seeds": [0, 1, 2, 3]}
    runs = (
        run(seed=0, tree=asked),
        run(seed=1, tree=asked, status="diverged", reason="60 skips in a row", accuracy=10.0),
        run(seed=2, tree=asked, status="oom", reason="does not fit at batch 8", accuracy=10.0),
    )
    for table in (table1(Results(runs)), table2(Results(runs))):
        assert column(table, "Seeds") == ["1 of 4"]
        text = "\n".join(table.footers)
        for phrase in ("seed 1 diverged: 60 skips in a row", "seed 2 oom: does not fit at batch 8", "seed 3 missing"):
            assert phrase in text
    assert column(table1(Results(runs)), "Acc (%)") == ["77.00 ± n/a"]


def test_a_figure_of_fewer_seeds_than_the_row_says_so():
    runs = (run(seed=0), run(seed=1), run(seed=2, gb=None))
    assert column(table1(Results(runs)), "VRAM (GB)") == ["0.350 ± 0.000 (n=2)"]


@pytest.mark.parametrize(
    "tree",
    [
        {"model": {"stem": "imagenet", "input_size": 224, "weights": "none"}},
        {"model": {"stem": "imagenet", "input_size": 32, "weights": "imagenet"}},
        {"model": {"stem": "cifar", "input_size": 32, "weights": "none"}},
        {"dataset": {"evaluate_on": "validation"}},
    ],
)
def test_the_papers_figures_stand_only_beside_what_the_paper_ran(tree):
    table = table1(Results((run(tree=tree),)))
    assert not any(name.startswith("Paper") for name in table.header)
    assert "Paper: Acc (%)" in table1(Results((run(tree=tree, cell="other"), run()))).header


def test_cells_of_one_label_are_rows_of_their_own_and_say_how_they_differ():
    runs = (run(tree={"epochs": 1}, cell="a"), run(tree={"epochs": 30}, cell="b", device_name="Card B"))
    table = table1(Results(runs))
    assert column(table, "Method") == [
        "FP32 Baseline (device_name=Card A, epochs=1)",
        "FP32 Baseline (device_name=Card B, epochs=30)",
    ]
    assert table.caption.startswith("Device: Card A, Card B. Code: 0.1.0 (commit abc1234).")


def test_broken_files_are_named(tmp_path):
    write(tmp_path, run(seed=0), run(seed=1))
    broken = tmp_path / "cell" / "run.json"
    broken.parent.mkdir()
    broken.write_text('{"results_version": 1,')
    results = read_results([tmp_path, tmp_path / "absent"])
    assert len(results.runs) == 2
    assert [str(tmp_path / "absent") in results.problems[0], str(broken) in results.problems[1]] == [True, True]
    assert f"Not used: {results.problems[1]}" in table1(results).footers


def test_a_seed_counts_once(tmp_path):
    first = write(tmp_path / "first", run(seed=0), run(seed=1, status="failed", reason="lost the machine"))
    again = write(tmp_path / "again", run(seed=0), run(seed=1, accuracy=79.0))
    results = read_results([first, first / ".." / "first", again])
    assert sorted((one.seed, one.status) for one in results.runs) == [(0, "done"), (1, "done")]
    assert len(results.problems) == 1
    assert results.problems[0].startswith(str(first)) and "recorded twice" in results.problems[0]


@pytest.mark.parametrize("writer", [to_markdown, to_csv, to_latex])
def test_the_same_records_give_the_same_bytes(tmp_path, writer):
    runs = [run(method=m, seed=s, accuracy=70 + s) for m in ("fp32", "amp", "triaccel") for s in (0, 1, 2)]
    forward, backward = write(tmp_path / "a", *runs), write(tmp_path / "b", *reversed(runs))
    texts = {writer(make(read_results([folder]))) for folder in (forward, forward, backward) for make in (table1,)}
    assert len(texts) == 1


def test_markdown_escapes_and_keeps_every_row_whole(papers_own):
    odd = run(method="a|b\n<c>", tree={"seeds": [0, 9]})
    lines = to_markdown(table1(Results((*papers_own.runs, odd)))).splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1
    assert len(rows) == 2 + 12 + 1
    assert any(r"a\|b \<c>" in row for row in rows)


def test_latex_escapes_and_keeps_every_row_whole(papers_own):
    odd = run(method="[50%_a&b#$~^\\{x}é", status="failed", reason="C:\\tmp_1 & 100 %")
    text = to_latex(table1(Results((*papers_own.runs, odd))))
    body = text.partition(r"\midrule")[2].partition(r"\bottomrule")[0].strip().splitlines()
    columns = len(re.search(r"\\begin\{tabular\}\{(\w+)\}", text).group(1))
    assert len(body) == 13
    assert {len(re.findall(r"(?<!\\)&", row)) + 1 for row in body} == {columns}
    assert all(row.endswith(r" \\") and not row.startswith(("[", "*")) for row in body)
    assert r"{[}50\%\_a\&b\#\$\textasciitilde{}\textasciicircum{}\textbackslash{}\{x\}{[}U+00E9]" in text
    plain = re.sub(r"\\[{}]", "", text)
    assert plain.count("{") == plain.count("}")
    assert text.isascii()


def test_piped_output_is_never_cut(papers_own):
    out = io.StringIO()
    table = table1(Results((*papers_own.runs, run(method="m" * 60))))
    render_terminal(table, out)
    lines = out.getvalue().splitlines()
    assert all(any(all(cell in line for cell in row) for line in lines) for row in table.rows)
    assert table.caption in lines


def test_markup_in_a_label_is_printed_as_it_is():
    out = io.StringIO()
    render_terminal(table1(Results((run(method="[bold]x[/]"),))), out)
    assert "[bold]x[/]" in out.getvalue()


def test_table_2_without_an_ablation_keeps_its_columns():
    table = table2(Results((run(method="amp"),)))
    assert table.rows == ()
    assert "reduction_percent" in read_back(table).columns
    assert to_markdown(table).count("\n|") == 2


def test_audit_table_shows_every_finding():
    table = audit_table()
    assert [row[0] for row in table.rows] == [finding.claim for finding in paper.audit()]
    assert ("12.25", "12.44", "NO") in [row[1:4] for row in table.rows]


def test_command_writes_and_prints_both_tables(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "results" / "runs", run(), run(method="triaccel", gb=0.3), run(method="triaccel", seed=1, status="oom"))
    assert tables_cli.main([]) == 0
    out = capsys.readouterr().out
    for name in (f"table{n}.{suffix}" for n in (1, 2) for suffix in ("md", "csv", "tex")):
        assert (tmp_path / "results" / "tables" / name).stat().st_size > 0
        assert name in out
    assert "Table 1" in out and "Table 2" in out and "seed 1 oom" in out


@pytest.mark.parametrize("there", [True, False])
def test_command_without_records_says_in_one_sentence_how_to_make_some(tmp_path, capsys, there):
    folder = tmp_path / "runs"
    if there:
        folder.mkdir()
    assert tables_cli.main(["--results", str(folder), "--out", str(tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1 and "triaccel-bench +experiment=demo" in captured.err
    assert not (tmp_path / "out").exists()


def test_command_fails_when_no_record_is_of_a_finished_run(tmp_path, capsys):
    write(tmp_path, run(status="diverged", reason="60 skips in a row"))
    assert tables_cli.main(["--results", str(tmp_path), "--out", str(tmp_path / "out")]) == 1
    captured = capsys.readouterr()
    assert "seed 0 diverged: 60 skips in a row" in captured.out
    assert "No finished run" in captured.err


def test_command_fails_and_names_the_files_when_none_can_be_read(tmp_path, capsys):
    (tmp_path / "run.json").write_text("")
    assert tables_cli.main(["--results", str(tmp_path), "--out", str(tmp_path / "out")]) == 1
    assert str(tmp_path / "run.json") in capsys.readouterr().err


def test_command_audits(capsys):
    assert tables_cli.main(["audit"]) == 0
    assert "12.44" in capsys.readouterr().out


def test_tables_need_no_torch():
    code = "import sys, triaccel_bench.tables_cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
