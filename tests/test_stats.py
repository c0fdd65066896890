"""Per-seed figures, their mean and spread, and the grouping of seeds into cells."""

from __future__ import annotations

import math

import pytest
from measured import GB, epoch, provenance, run

from triaccel_bench.stats import Mean, baseline, cells, mean_std, score, score_percent, summarise, why_excluded


def test_spread_is_the_sample_standard_deviation():
    assert mean_std([77.0, 78.0, 79.0]) == Mean(78.0, 1.0, 3)


def test_a_single_value_has_no_spread():
    assert mean_std([78.0]) == Mean(78.0, None, 1)


def test_what_was_not_measured_is_left_out_and_counted_out():
    assert mean_std([77.0, None, 79.0]) == Mean(78.0, math.sqrt(2), 2)
    assert mean_std([None, None]) is None
    assert mean_std([]) is None


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_is_not_finite_is_refused(value):
    with pytest.raises(ValueError, match="expected finite values"):
        mean_std([1.0, value])


def test_score_is_what_table_1_prints():
    assert score(77.0, 21.0, 0.35 * GB) == pytest.approx(10.476, abs=1e-3)


def test_score_percent_is_the_formula_of_section_4_2():
    assert score_percent(80.0, 20.0, 4 * GB, 16 * GB) == pytest.approx(80 / (20 * 25) * 100)


@pytest.mark.parametrize(
    "factors", [(None, 2.0, GB), (77.0, None, GB), (77.0, 2.0, None), (77.0, 0.0, GB), (77.0, 2.0, 0)]
)
def test_score_is_null_never_infinite(factors):
    assert score(*factors) is None
    assert score_percent(*factors, 16 * GB) is None


def test_score_percent_needs_the_size_of_the_device():
    assert score_percent(77.0, 2.0, GB, None) is None


@pytest.mark.parametrize(("seconds", "mean", "n"), [([9, 9, 1, 2, 3, 4, 5], 3.0, 5), ([1, 2, 6], 3.0, 3)])
def test_time_is_the_mean_of_the_last_five_epochs_or_of_all_if_fewer(seconds, mean, n):
    summary = summarise(run(epochs=[epoch(i, train_seconds=s) for i, s in enumerate(seconds)]))
    assert (summary.seconds, summary.seconds_epochs) == (mean, n)


def test_accuracy_is_that_of_the_last_epoch_not_of_the_best():
    accuracies = [80.0, 79.0]
    summary = summarise(run(epochs=[epoch(i, evaluation_accuracy_percent=a) for i, a in enumerate(accuracies)]))
    assert summary.accuracy_percent == 79.0


def test_memory_is_the_peak_over_epochs_with_probes():
    epochs = [
        epoch(0, memory_peak_bytes=5),
        epoch(1, memory_peak_bytes=3, probe_peak_bytes=9),
        epoch(2, memory_peak_bytes=7),
    ]
    assert summarise(run(epochs=epochs)).memory_peak_bytes == 9


def test_an_epoch_without_a_reading_leaves_the_run_without_a_peak():
    summary = summarise(run(epochs=[epoch(0, memory_peak_bytes=5), epoch(1, memory_peak_bytes=None)]))
    assert (summary.memory_peak_bytes, summary.score, summary.score_percent) == (None, None, None)


@pytest.mark.parametrize(
    ("meter", "memory", "scored"), [("vram", 350_000_000, True), ("tensors", 350_000_000, False), ("off", None, False)]
)
def test_only_vram_gives_a_score(meter, memory, scored):
    summary = summarise(run(meter=meter))
    assert summary.memory_peak_bytes == memory
    assert [summary.score is not None, summary.score_percent is not None] == [scored, scored]


def test_effective_batch_weights_epochs_by_samples():
    epochs = [epoch(0, samples_seen=3000, batch_mean=100.0), epoch(1, samples_seen=1000, batch_mean=300.0)]
    assert summarise(run(epochs=epochs)).batch_mean == 150.0


def test_a_run_without_epochs_has_no_figures():
    summary = summarise(run(epochs=[]))
    figures = (summary.accuracy_percent, summary.seconds, summary.memory_peak_bytes, summary.score, summary.batch_mean)
    assert figures == (None,) * 5


@pytest.mark.parametrize("status", ["diverged", "oom", "failed", "interrupted"])
def test_unfinished_seeds_are_named_and_in_no_mean(status):
    bad = run(
        seed=1,
        status=status,
        reason="first line\n  second line",
        epochs=[epoch(evaluation_accuracy_percent=10.0)],
        cell="c",
    )
    (cell,) = cells(
        [run(seed=0, cell="c"), bad, run(seed=2, cell="c", epochs=[epoch(evaluation_accuracy_percent=79.0)])]
    )
    assert cell.mean("accuracy_percent") == Mean(78.0, pytest.approx(math.sqrt(2)), 2)
    assert cell.excluded == (f"seed 1 {status}: first line second line",)
    assert cell.seeds_expected == 3


def test_a_record_that_says_done_too_early_is_in_no_mean():
    assert why_excluded(run(epochs_planned=30)) == "says done after 1 of 30 epochs"
    assert why_excluded(run(epochs=[], epochs_planned=0)) is not None
    assert why_excluded(run()) is None


def test_seeds_asked_for_without_a_record_are_named():
    (cell,) = cells([run(seed=0, tree={"seeds": [0, 1, 2]}), run(seed=2, tree={"seeds": [0, 1, 2]})])
    assert cell.excluded == ("seed 1 missing: asked for, no record",)
    assert len(cell.summaries) == 2


def test_no_cell_is_grouped_away_for_an_empty_setting():
    methods = {"fp32": None, "amp": None, "triaccel": 0.05, "NA": 0.1}
    found = cells(run(seed=0, method=m, tree={"seeds": [0], "method": {"alpha": a}}) for m, a in methods.items())
    assert sorted(cell.method for cell in found) == sorted(methods)
    assert [len(cell.summaries) for cell in found] == [1, 1, 1, 1]


def test_an_unknown_device_does_not_drop_a_run():
    (cell,) = cells([run(seed=0, provenance=None)])
    assert cell.device_name is None
    assert len(cell.summaries) == 1


def test_devices_are_never_mixed_in_one_mean():
    asked = {"seeds": [0, 1, 2, 3]}
    died_early = run(seed=2, status="failed", reason="no driver", provenance=None, epochs=[], tree=asked)
    runs = [run(seed=0, tree=asked), run(seed=1, tree=asked, provenance=provenance("Card B")), died_early]
    found = cells(runs)
    assert [cell.device_name for cell in found] == ["Card A", "Card B"]
    assert [[s.seed for s in cell.summaries] for cell in found] == [[0], [1]]
    assert [cell.excluded for cell in found] == [
        ("seed 2 failed: no driver", "seed 3 missing: asked for, no record"),
        (),
    ]
    assert [cell.variant for cell in found] == ["device_name=Card A", "device_name=Card B"]


def test_meters_are_never_mixed_in_one_mean():
    runs = [
        run(seed=0, meter="vram"),
        run(seed=1, meter="tensors", epochs=[epoch(memory_peak_bytes=10 * GB)]),
        run(seed=2, meter="off"),
    ]
    (cell,) = cells(runs)
    assert (cell.meter, cell.mean("memory_peak_bytes")) == ("vram", Mean(350_000_000, None, 1))
    assert cell.mean("accuracy_percent").n == 3


def test_cells_of_one_label_are_told_apart_by_what_differs():
    runs = [
        run(seed=0, cell="a", tree={"epochs": 1, "seeds": [0]}),
        run(seed=0, cell="b", tree={"epochs": 30, "seeds": [0, 1], "progress": "rich"}),
        run(seed=0, cell="d", method="amp"),
    ]
    found = cells(runs)
    assert {cell.cell: cell.variant for cell in found} == {"a": "epochs=1", "b": "epochs=30", "d": ""}


def test_cells_that_differ_in_no_setting_are_told_apart_by_their_hash():
    found = cells([run(seed=0, cell="a"), run(seed=0, cell="b")])
    assert [cell.variant for cell in found] == ["cell=a", "cell=b"]


def test_the_order_of_records_changes_nothing():
    runs = [run(seed=seed, method=method) for method in ("fp32", "amp") for seed in (0, 1)]
    assert cells(runs) == cells(reversed(runs))


def test_baseline_shares_all_settings_but_the_methods_own():
    ours = run(seed=0, method="triaccel", cell="t", tree={"memory": {"budget": "fp32", "meter": "vram"}})
    same = run(seed=0, cell="f", tree={"memory": {"budget": "device", "meter": "vram"}})
    longer = run(seed=0, cell="g", tree={"epochs": 30, "memory": {"budget": "fp32", "meter": "vram"}})
    found = cells([ours, same, longer])
    triaccel = next(cell for cell in found if cell.method == "triaccel")
    assert baseline(triaccel, found).cell == "f"
    assert baseline(triaccel, cells([ours, longer])) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"provenance": provenance("Card B")},
        {"meter": "tensors"},
        {"meter": "off"},
        {"status": "failed"},
        {"model": "resnet8"},
    ],
)
def test_baseline_of_another_device_meter_or_model_is_none(changes):
    ours = run(seed=0, method="triaccel")
    found = cells([ours, run(seed=0, **changes)])
    assert baseline(next(cell for cell in found if cell.method == "triaccel"), found) is None
