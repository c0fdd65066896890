"""From records to Tables 1 and 2 beside the paper's figures."""

from __future__ import annotations

import math

import pytest
from measured import epoch, papers_table1, provenance, run, write

from triaccel_bench import paper
from triaccel_bench.layout import to_markdown
from triaccel_bench.records import LayerRecord, SplitRecord
from triaccel_bench.results import Results, read_results
from triaccel_bench.tables import table1, table2


def column(table, name):
    return [row[table.header.index(name)] for row in table.rows]


def test_the_papers_numbers_give_the_papers_scores_with_the_misprint_flagged():
    table = table1(papers_table1())
    scores = [float(shown.split()[0]) for shown in column(table, "Eff. Score")]
    assert scores == [round(row.score_computed, 2) for row in paper.TABLE1]
    printed = column(table, "Paper: Eff. Score")
    assert printed == [f"{row.score:.2f}" + (" †" if row.score == 12.25 else "") for row in paper.TABLE1]
    misprint = "† CIFAR-10 / ResNet-18 / AMP (Static): the paper prints 12.25, its own figures give 12.44"
    assert table.footers[0] == misprint
    assert "†" not in "".join(table.footers[1:])


def test_table_1_has_the_papers_layout_and_order():
    table = table1(papers_table1())
    assert table.header[:7] == ("Dataset", "Architecture", "Method", "Acc (%)", "Time (s)", "VRAM (GB)", "Eff. Score")
    assert table.rows[1] == (
        "CIFAR-10",
        "ResNet-18",
        "AMP (Static)",
        "77.20",
        "19.400",
        "0.320",
        "12.44",
        "198.97",
        "96",
        "fp32:21",
        "1",
        "1 (1)",
        "0.350",
        "77.2",
        "19.4",
        "0.32",
        "12.25 †",
    )
    assert column(table, "Method")[:3] == ["FP32 Baseline", "AMP (Static)", "Tri-Accel"]


def test_reserved_memory_and_probes_have_columns_where_any_row_has_them():
    plain = run(epochs=[epoch(1, reserved_bytes=600_000_000)])
    probed = run(
        method="triaccel_curvature",
        epochs=[epoch(1, probe_seconds=0.25, probe_peak_bytes=400_000_000, reserved_bytes=None)],
    )
    both, alone = Results((plain, probed)), Results((run(),))
    for table in (table1(both), table2(both)):
        assert column(table, "Reserved (GB)") == ["0.600", "n/a"]
        assert column(table, "Probes (GB)") == ["", "0.400"]
        assert "Reserved: the most" in table.caption and "their own peak" in table.caption
    assert "Probes: their part of the time, and their own" in table1(both).caption
    assert "part of the time" not in table2(both).caption
    assert column(table1(both), "Probes (s)") == ["", "0.250"]
    assert list(table1(both).frame["probe_seconds_per_epoch_mean"]) == [None, 0.25]
    for table in (table1(alone), table2(alone)):
        assert not {"Reserved (GB)", "Probes (GB)", "Probes (s)"} & set(table.header)
        assert "Reserved" not in table.caption and "Probes" not in table.caption


def test_table_2_of_the_papers_numbers_flags_the_papers_reductions():
    runs = [run(model=row.model, method=row.method, gb=row.memory_gb) for row in reversed(paper.TABLE2)]
    table = table2(Results((*runs, run(method="amp"))))
    assert column(table, "Configuration") == [paper.CONFIGURATION_LABELS[row.method] for row in paper.TABLE2]
    assert column(table, "Reduction") == ["-", "8.3 %", "11.4 %", "12.3 %", "-", "6.3 %", "10.3 %", "12.0 %"]
    assert column(table, "Budget (GB)") == ["0.350"] * 8
    printed = ["-", "8.3 %", "11.4 %", "12.3 %", "-", "6.0 % †", "10.0 % †", "13.3 % †"]
    assert column(table, "Paper: Reduction") == printed
    assert [footer[:1] == "†" for footer in table.footers[:4]] == [True, True, True, False]


def test_reduction_needs_a_baseline_of_the_same_settings():
    runs = (run(), run(method="triaccel", tree={"epochs": 30}, gb=0.3), run(method="triaccel_curvature", gb=0.35))
    table = table2(Results(runs))
    assert column(table, "Configuration") == ["Standard Training", "+ Curvature", "+ Full Tri-Accel"]
    assert column(table, "Reduction") == ["-", "0.0 %", "n/a"]
    assert "+ Full Tri-Accel: no reduction: the fp32 cell differs in epochs=1 (here 30)" in table.footers


def test_scores_are_taken_per_seed_then_averaged():
    runs = tuple(run(seed=seed, accuracy=80.0, seconds=s, gb=1.0) for seed, s in enumerate((1.0, 4.0)))
    assert column(table1(Results(runs)), "Eff. Score") == ["50.00 ± 42.43"]  # not 80 / 2.5 = 32


def test_all_methods_stay_whatever_their_settings_or_name(tmp_path):
    methods = {"fp32": None, "amp": None, "triaccel": 0.05, "NA": 0.1}
    runs = [run(method=m, tree={"alpha": alpha}, accuracy=77.0) for m, alpha in methods.items()]
    runs += [run(method="triaccel", seed=seed, accuracy=77.0 + seed) for seed in (1, 2)]
    table = table1(read_results([write(tmp_path, *runs)]))
    assert dict(zip(column(table, "Method"), column(table, "Acc (%)"), strict=True)) == {
        "FP32 Baseline": "77.00",
        "AMP (Static)": "77.00",
        "Tri-Accel": "78.00 ± 1.00",
        "NA": "77.00",
    }
    assert column(table, "Seeds") == ["1", "1", "3", "1"]


@pytest.mark.parametrize(
    ("meter", "header"), [("vram", "VRAM (GB)"), ("tensors", "Tensors (GB, not VRAM)"), ("off", None)]
)
def test_memory_says_once_which_meter_it_is(meter, header):
    table = table1(Results((run(meter=meter),)))
    named = [name for name in table.header if "Paper" not in name and ("VRAM" in name or "Memory" in name)]
    assert named == ([header] if header else [])
    assert header is None or column(table, header) == ["0.350"]
    assert ("Eff. Score" in table.header) == (meter == "vram")
    assert ("Budget (GB, tensors)" in table.header) == (meter == "tensors")
    frame = table.frame
    assert frame["vram_peak_bytes_mean"].isna().all() == (meter != "vram")
    assert frame["tensor_peak_bytes_mean"].isna().all() == (meter != "tensors")


def test_a_table_of_two_meters_marks_the_rows_that_are_not_vram():
    table = table1(Results((run(), run(method="amp", meter="tensors"))))
    assert column(table, "Memory (GB)") == ["0.350", "0.350 ‡"]
    assert "‡ bytes of live tensors, which are not VRAM" in table.footers


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
    longer = run(tree={"epochs": 30}, cell="b", provenance=provenance("Card B with a long name"))
    table = table1(Results((run(tree={"epochs": 1}, cell="a"), longer)))
    assert column(table, "Method") == ["FP32 Baseline (device=Card A, epochs=1)", "FP32 Baseline [1]"]
    assert table.footers[0] == "[1] device=Card B with a long name, epochs=30"
    assert table.caption.startswith("Device: Card A, Card B with a long name. Code: 0.1.0 (commit abc1234).")
    short = table1(Results((run(tree={"epochs": 1}, cell="a"), run(tree={"epochs": 30}, cell="b"))))
    assert column(short, "Method") == ["FP32 Baseline (epochs=1)", "FP32 Baseline (epochs=30)"]


WHOLE = {"train_samples": 50_000, "evaluation_samples": 10_000}


@pytest.mark.parametrize(
    ("dataset", "counts", "label"),
    [
        ({}, {}, "CIFAR-10"),
        ({"path": "/data/cifar10.npz", "train_size": None, "test_size": None}, WHOLE, "CIFAR-10"),
        ({"path": "/data/mine.npz"}, {"train_samples": 200, "evaluation_samples": 40},
         "CIFAR-10 format: mine.npz (200/40)"),
        ({"path": "/data/mine/", "num_classes": 7}, WHOLE, "CIFAR-10 format: mine (50000/10000, 7 classes)"),
        ({"path": "/data/mine", "train_size": None}, {}, "CIFAR-10 format: mine (n/a/10000)"),
        ({"evaluate_on": "validation"}, {"train_samples": 45_000, "evaluation_samples": 5000},
         "CIFAR-10 (45000/5000, validation)"),
    ],
)  # fmt: skip
def test_own_data_is_not_shown_as_the_papers(dataset, counts, label):
    table = table1(Results((run(tree={"dataset": dataset}, **counts),)))
    assert column(table, "Dataset") == [label]
    assert ("Paper: Acc (%)" in table.header) == (label == "CIFAR-10")


def test_own_data_and_the_papers_are_no_variants_of_each_other():
    own = {"path": "/data/mine.npz", "train_size": 200, "test_size": 40}
    runs = [run(method=m, cell=f"{m}{bool(d)}", tree={"dataset": d}) for d in ({}, own) for m in ("amp", "fp32")]
    table = table1(Results(tuple(runs)))
    assert column(table, "Dataset") == ["CIFAR-10"] * 2 + ["CIFAR-10 format: mine.npz (200/40)"] * 2
    assert column(table, "Method") == ["FP32 Baseline", "AMP (Static)"] * 2


def test_the_executed_precision_is_shown_and_why_it_is_not_the_one_asked_for():
    ran = {"layers_requested": {"fp16": 21}, "layers_executed": {"fp32": 21}}
    table = table1(Results((run(), run(method="amp", tree={"device": "cpu"}, epochs=[epoch(**ran)]))))
    assert column(table, "Executed") == ["fp32:21", "fp32:21"]
    (footer,) = [footer for footer in table.footers if "asked for" in footer]
    assert footer.startswith("AMP (Static) asked for fp16:21, executed fp32:21: a CPU executes FP32")
    assert table.frame["layers_requested"].tolist() == ["fp32:21", "fp16:21"]


def test_a_row_whose_last_epochs_are_not_like_the_rest_says_what_the_whole_run_took():
    even = [epoch(number, train_seconds=2.0) for number in range(1, 11)]
    grown = [epoch(number, train_seconds=6.0 if number <= 5 else 2.0) for number in range(1, 11)]
    table = table1(Results((run(method="fp32", epochs=even), run(method="triaccel", epochs=grown))))
    (footer,) = [footer for footer in table.footers if "whole run" in footer]
    assert (
        footer == "Mean epoch of the whole run, where the last are not like the rest: Tri-Accel 4.000 s, 40.0 s in all."
    )
    assert column(table, "Time (s)") == ["2.000", "2.000"]
    assert table.frame["train_seconds_per_run_mean"].tolist() == [20.0, 40.0]


def test_what_came_before_the_first_epoch_is_in_no_time_and_told_by_itself():
    found = run(method="fp32")
    found.first_use_seconds = 7.25
    other = run(method="amp")
    other.first_use_seconds = None
    frame = table1(Results((found, other))).frame
    assert frame["first_use_seconds_mean"].tolist() == [7.25, None]


@pytest.mark.parametrize("first, told", [(2.36, False), (2.44, True), (1.64, False), (1.56, True)])
def test_a_tenth_of_difference_is_told(first, told):
    uneven = [epoch(number, train_seconds=first if number <= 5 else 2.0) for number in range(1, 11)]
    notes = table1(Results((run(epochs=uneven),))).footers
    assert any("whole run" in footer for footer in notes) == told
    assert not any("whole run" in footer for footer in table2(Results((run(epochs=uneven),))).footers)


def test_rows_with_the_same_to_say_share_a_footer():
    cpu = {"tree": {"device": "cpu"}}
    ran = [epoch(layers_requested={"bf16": 21}, layers_executed={"fp32": 21})]
    runs = [run(method=m, epochs=ran, budget_source="set", **cpu) for m in ("triaccel", "triaccel_precision_batch")]
    footers = table1(Results(tuple(runs))).footers
    names = "+ Dynamic Precision and Batch Sizing, Tri-Accel"
    assert footers[0].startswith(f"{names} asked for bf16:21, executed fp32:21: a CPU")
    assert footers[-2:] == ("Budget: set by memory.budget.", "One seed: no standard deviation (n/a).")


def test_a_card_without_bf16_is_said_to_have_none():
    ran = [epoch(layers_requested={"bf16": 21}, layers_executed={"fp16": 21})]
    footers = table1(Results((run(method="triaccel", epochs=ran),))).footers
    said = "asked for bf16:21, executed fp16:21: Card A has no native BF16 (method.precision.bf16_substitute=fp16)."
    assert f"Tri-Accel {said}" in footers


@pytest.mark.parametrize(
    ("known", "shown"),
    [
        ({}, "Code: 0.1.0 (commit abc1234)."),
        ({"git_dirty": True}, "Code: 0.1.0 (commit abc1234, modified)."),
        ({"git_commit": None, "code_hash": "0aa59604ede1"}, "Code: 0.1.0 (sources 0aa59604ede1)."),
        ({"git_commit": None}, "Code: 0.1.0 (no commit)."),
    ],
)
def test_the_caption_names_the_code_by_the_best_that_is_known(known, shown):
    assert shown in table1(Results((run(provenance=provenance().model_copy(update=known)),))).caption


def test_executed_layers_of_several_seeds_are_a_range():
    mixes = ({"fp16": 14, "bf16": 4, "fp32": 3}, {"fp16": 12, "bf16": 6, "fp32": 3})
    seeds = [run(seed=s, epochs=[epoch(layers_requested=m, layers_executed=m)]) for s, m in enumerate(mixes)]
    assert column(table1(Results(tuple(seeds))), "Executed") == ["fp16:12-14 bf16:4-6 fp32:3"]


@pytest.mark.parametrize(
    ("method", "change", "idle"),
    [
        ("triaccel", {}, True),
        ("fp32", {}, False),
        ("triaccel", {"plan_changes": 1}, False),
        ("triaccel", {"rate_scale_min": 0.9}, False),
        ("triaccel", {"batch_max": 128}, False),
        ("triaccel", {"batch_min": 64, "batch_max": 64}, False),
    ],
)
def test_a_controller_that_never_moved_anything_is_named(method, change, idle):
    table = table1(Results((run(method=method, epochs=[epoch(**change)], steps=10),)))
    pace = "10 steps, a control step every 100, a probe every 200"
    said = f"Tri-Accel: no control decision took effect in this run ({pace})."
    assert (said in table.footers) == idle


@pytest.mark.parametrize(
    ("ages", "method", "told"),
    [
        ([10, 10, 10], "triaccel", False),
        ([900, 10, 10], "triaccel", False),
        ([900, 501, 10], "triaccel", True),
        ([None, 10, 10], "triaccel", True),
        ([], "triaccel", False),
        ([None] * 3, "triaccel, too short for a probe", False),
        ([None, None, None], "triaccel_precision", False),
    ],
)
def test_curvature_that_hardly_took_part_is_told(ages, method, told):
    layers = [
        LayerRecord(name=str(place), elements=1, requested="fp32", executed="fp32", lambda_age_steps=age)
        for place, age in enumerate(ages)
    ]
    method, steps = method.split(",")[0], 100 if "short" in method else 1000
    aged, fresh = run(method=method, steps=steps, layers=layers), run(method=method, seed=1, steps=steps)
    said = [line for line in table1(Results((aged, fresh))).footers if "curvature was never read" in line]
    assert [line.split(":")[0] for line in said] == ["Tri-Accel (seed 0)"] * told


def test_a_recorded_schedule_has_a_row_of_its_own_that_says_what_it_follows():
    replay = {"run": "/home/somebody/results/runs/a/seed-0", "schedule": "0123456789ab", "shuffle": None, "seed": 0}
    followed = run(method="replay", tree={"replay": replay}, gb=0.28)
    shuffled = run(
        method="replay", tree={"replay": replay | {"shuffle": "layers", "seed": 4}}, gb=0.21, cell="shuffled"
    )
    table = table2(Results((run(), run(method="triaccel", gb=0.3), followed, shuffled)))
    text = to_markdown(table)
    assert "Open-Loop Replay (replay.shuffle=null)" in text
    told = "nothing was read or decided; it followed schedule 0123456789ab, recorded in a/seed-0"
    plain, permuted = (note for note in table.footers if told in note)
    assert plain.endswith("seed-0.") and permuted.endswith("permuted among them (replay.seed=4).")
    assert "no reduction" not in text, "FP32 is the baseline of what follows a schedule too"


@pytest.mark.parametrize(("make", "whole"), [(table1, "Tri-Accel"), (table2, "+ Full Tri-Accel")])
def test_curvature_that_is_not_the_hessians_is_named(make, whole):
    fisher = {"method": {"curvature": {"estimator": "fisher"}}}
    reading = [run(method=method, tree=fisher) for method in ("triaccel_curvature", "triaccel")]
    others = [run(tree=fisher), run(method="triaccel_precision", tree=fisher), run(method="triaccel_curvature_batch")]
    said = f"+ Curvature, {whole}: curvature of the Fisher information (method.curvature.estimator=fisher)."
    assert [text for text in make(Results((*reading, *others))).footers if "curvature of" in text] == [said]
    assert not any("curvature of" in text for text in make(Results(tuple(others))).footers)


def test_fp32_layers_that_multiply_in_tf32_are_named():
    rounding = {"method": {"tf32": True}}
    rows = run(), run(method="triaccel_plus", tree=rounding), run(method="tf32", tree=rounding)
    said = [text for text in table1(Results(rows)).footers if "TF32" in text]
    assert said == ["Tri-Accel Plus: layers in FP32 multiply in TF32 where the device has it (method.tf32=true)."]


def test_the_batch_is_b_itself_where_it_did_not_move():
    fixed = epoch(batch_mean=95.8)
    moved = [epoch(batch_mean=80.0, batch_min=64, batch_max=96), fixed]
    table = table1(Results((run(epochs=[fixed]), run(method="triaccel", epochs=moved))))
    assert column(table, "Batch") == ["96", "88.0 (64-96)"]
    assert table.frame["batch_samples_min"].tolist() == [96, 64]


@pytest.mark.parametrize(
    ("source", "count", "shown", "footer"),
    [
        ("fp32: 1 FP32 step at B=96", 350_000_000, "0.350", "Budget: memory.budget=fp32, 1 FP32 step at B=96."),
        ("set", 420_000, "0.420 MB", "Budget: set by memory.budget."),
    ],
)
def test_where_the_budget_comes_from_stands_below(source, count, shown, footer):
    table = table1(Results((run(budget_bytes=count, budget_source=source),)))
    assert column(table, "Budget (GB)") == [shown]
    assert footer in table.footers


def test_one_seed_says_that_it_has_no_spread():
    assert "One seed: no standard deviation (n/a)." in table1(Results((run(),))).footers
    two = tuple(run(method="amp", seed=seed) for seed in (0, 1))
    assert not any("One seed" in footer for footer in table1(Results(two)).footers)
    assert "One seed: no standard deviation (n/a) for FP32 Baseline." in table1(Results((run(), *two))).footers


@pytest.mark.parametrize(("device", "shared"), [("cpu", True), ("cuda", False)])
def test_the_caption_says_what_else_moves_times(device, shared):
    where = provenance().model_copy(update={"device": device})
    caption = table1(Results((run(provenance=where),))).caption
    assert ("a machine that others may use" in caption) == shared
    assert "two runs of one seed" not in caption
    assert "two runs of one seed" in table1(Results((run(method="triaccel"),))).caption


def test_a_column_without_a_figure_in_any_row_is_left_to_the_csv():
    table = table1(Results((run(provenance=None, budget_bytes=None),)))
    assert not {"Score (device %)", "Budget (GB)"} & set(table.header)
    assert {"score_percent_mean", "budget_bytes_mean"} <= set(table.frame.columns)


def test_table_2_without_an_ablation_keeps_its_columns():
    table = table2(Results((run(method="amp"),)))
    assert table.rows == ()
    assert "reduction_percent" in table.frame.columns
    assert to_markdown(table).count("\n|") == 2


def test_times_of_a_shared_card_are_named():
    shared = {"device": "cuda", "runner": {"share_gpu": True}}
    runs = run(seed=0), run(seed=1, tree=shared), run(method="amp"), run(method="tf32", tree=shared | {"device": "cpu"})
    (said,) = [footer for footer in table1(Results(runs)).footers if "share_gpu" in footer]
    assert said == "FP32 Baseline: times on a GPU that other runs shared (runner.share_gpu=true)."


def trained(seed: int, last_seconds: float, **more):
    """Three epochs whose accuracy doubles; only the last one's time is its own."""
    figures = zip((40.0, 60.0, 80.0), (10.0, 10.0, last_seconds))
    epochs = [
        epoch(i, evaluation_accuracy_percent=a, train_seconds=s, memory_peak_bytes=10**9, controller_seconds=0.0)
        for i, (a, s) in enumerate(figures, 1)
    ]
    return run(seed=seed, epochs=epochs, tree={"seeds": [0, 1], "epochs": 3}, **more)


def test_the_trend_of_the_score_stands_beside_what_it_is_divided_by():
    table = table1(Results((trained(0, 5.0), trained(1, 10.0))))
    (said,) = [footer for footer in table.footers if footer.startswith("Score by epoch")]
    ratio, cost = math.sqrt(4.0 * 2.0), math.sqrt(0.5)
    row = table.frame.iloc[0]
    assert (row["score_trend_mean"], row["cost_trend_mean"]) == pytest.approx((ratio, cost))
    assert row["cost_trend_low"] < cost < row["cost_trend_high"]
    low, high = row["score_trend_low"], row["score_trend_high"]
    assert f"FP32 Baseline {ratio:.3f} [{low:.3f}, {high:.3f}] ({cost:.3f} [" in said and said.endswith("; n = 2).")
    (single,) = [f for f in table1(Results((trained(0, 5.0),))).footers if f.startswith("Score by epoch")]
    assert single.endswith(": FP32 Baseline 4.000 (0.500; n = 1).")
    assert not any("Score by epoch" in footer for footer in table1(Results((run(),))).footers)
    assert not any("Score by epoch" in footer for footer in table2(Results((trained(0, 5.0),))).footers)


def test_where_the_time_goes_stands_below_table_1_and_in_the_csv():
    phases = {"data": 0.1, "forward": 0.3, "backward": 0.5, "update": 0.1}
    sampled = SplitRecord(
        clock="device", batch=96, layers_executed={"fp32": 21}, steps=5, phase_seconds=phases, verdict="compute-bound"
    )
    table = table1(Results((trained(0, 10.0, split=sampled), trained(1, 10.0, split=sampled))))
    (said,) = [footer for footer in table.footers if "-bound" in footer]
    assert said == (
        "FP32 Baseline: compute-bound; of its time data 10 %, forward 30 %, backward 50 %, update 10 %, controller 0 %, "
        "probe 0 %, capture 0 %."
    )
    row = table.frame.iloc[0]
    assert row["backward_seconds_per_epoch"] == pytest.approx(5.0) and row["verdict"] == "compute-bound"
    mixed = table1(Results((trained(0, 10.0, split=sampled), trained(1, 10.0))))
    assert mixed.frame.iloc[0]["backward_seconds_per_epoch"] is None
    assert any("backward n/a" in footer for footer in mixed.footers)
    older = table1(Results((trained(0, 10.0),))).frame.iloc[0]
    assert older["verdict"] == "" and older["forward_seconds_per_epoch"] is None
