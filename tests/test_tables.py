"""From records to Tables 1 and 2 beside the paper's figures."""

from __future__ import annotations

import pytest
from measured import papers_table1, provenance, run, write

from triaccel_bench import paper
from triaccel_bench.results import Results, read_results
from triaccel_bench.tables import audit_table, table1, table2, to_markdown


def column(table, name):
    return [row[table.header.index(name)] for row in table.rows]


def test_the_papers_numbers_give_the_papers_scores_with_the_misprint_flagged():
    table = table1(papers_table1())
    scores = [float(shown.split()[0]) for shown in column(table, "Eff. Score")]
    assert scores == [round(row.score_computed, 2) for row in paper.TABLE1]
    printed = column(table, "Paper: Eff. Score")
    assert printed == [f"{row.score:.2f}" + (" †" if row.score == 12.25 else "") for row in paper.TABLE1]
    assert table.footers == (
        "† CIFAR-10 / ResNet-18 / AMP (Static): the paper prints 12.25, its own figures give 12.44",
    )


def test_table_1_has_the_papers_layout_and_order():
    table = table1(papers_table1())
    assert table.header[:7] == ("Dataset", "Architecture", "Method", "Acc (%)", "Time (s)", "VRAM (GB)", "Eff. Score")
    assert table.rows[1] == (
        "CIFAR-10",
        "ResNet-18",
        "AMP (Static)",
        "77.20 ± n/a",
        "19.400 ± n/a",
        "0.320 ± n/a",
        "12.44 ± n/a",
        "198.97 ± n/a",
        "96.0 ± n/a",
        "1",
        "1 (1)",
        "0.350 GB (fp32)",
        "77.2",
        "19.4",
        "0.32",
        "12.25 †",
    )
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
    assert [footer for footer in table.footers if "no reduction" in footer][0].startswith(
        "CIFAR-10 / ResNet-18 / + Full"
    )


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


@pytest.mark.parametrize(
    ("meter", "shown"), [("vram", "0.350 ± n/a"), ("tensors", "0.350 ± n/a GB tensor bytes (not VRAM)"), ("off", "n/a")]
)
def test_memory_says_which_meter_it_is(meter, shown):
    table = table1(Results((run(meter=meter),)))
    assert column(table, "VRAM (GB)") == [shown]
    assert (column(table, "Eff. Score") != ["n/a"]) == (meter == "vram")
    frame = table.frame
    assert frame["vram_peak_bytes_mean"].isna().all() == (meter != "vram")
    assert frame["tensor_peak_bytes_mean"].isna().all() == (meter != "tensors")


def test_an_unmeasured_memory_is_never_zero():
    frame = table1(Results((run(gb=None),))).frame
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
    ("tree", "architecture"),
    [
        ({"model": {"stem": "imagenet", "input_size": 224, "weights": "none"}}, "ResNet-18 at 224×224"),
        ({"model": {"stem": "imagenet", "input_size": 32, "weights": "imagenet"}}, "ResNet-18, weights imagenet"),
        ({"model": {"stem": "cifar", "input_size": 32, "weights": "none"}}, "ResNet-18"),
        ({"dataset": {"evaluate_on": "validation"}}, "ResNet-18"),
    ],
)
def test_the_papers_figures_stand_only_beside_what_the_paper_ran(tree, architecture):
    table = table1(Results((run(tree=tree),)))
    assert column(table, "Architecture") == [architecture]
    assert not any(name.startswith("Paper") for name in table.header)
    assert "Paper: Acc (%)" in table1(Results((run(tree=tree, cell="other"), run()))).header


def test_cells_of_one_label_are_rows_of_their_own_and_say_how_they_differ():
    runs = (run(tree={"epochs": 1}, cell="a"), run(tree={"epochs": 30}, cell="b", provenance=provenance("Card B")))
    table = table1(Results(runs))
    assert column(table, "Method") == [
        "FP32 Baseline (device_name=Card A, epochs=1)",
        "FP32 Baseline (device_name=Card B, epochs=30)",
    ]
    assert table.caption.startswith("Device: Card A, Card B. Code: 0.1.0 (commit abc1234).")


def test_table_2_without_an_ablation_keeps_its_columns():
    table = table2(Results((run(method="amp"),)))
    assert table.rows == ()
    assert "reduction_percent" in table.frame.columns
    assert to_markdown(table).count("\n|") == 2


def test_audit_table_shows_every_finding():
    table = audit_table()
    assert [row[0] for row in table.rows] == [finding.claim for finding in paper.audit()]
    assert ("12.25", "12.44", "NO") in [row[1:4] for row in table.rows]
