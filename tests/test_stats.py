"""Per-seed figures, and their mean and spread."""

from __future__ import annotations

import math

import pytest
from measured import GB, epoch, run

from triaccel_bench.stats import (
    Mean,
    epoch_scores,
    mean_std,
    score,
    score_percent,
    summarise,
    thirds,
    why_excluded,
)


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


def test_probes_and_reserved_memory_are_figures_of_their_own():
    seconds = [9.0, 0.0, 0.5, 0.0, 0.5, 0.0]
    epochs = [epoch(i, train_seconds=10.0, probe_seconds=s, memory_peak_bytes=5) for i, s in enumerate(seconds)]
    epochs[1] = epochs[1].model_copy(update={"probe_peak_bytes": 9, "reserved_bytes": 30})
    epochs[4] = epochs[4].model_copy(update={"probe_peak_bytes": 8, "reserved_bytes": 20})
    summary = summarise(run(epochs=epochs))
    assert (summary.probe_seconds, summary.seconds) == (0.2, 10.0)
    assert (summary.probe_peak_bytes, summary.memory_peak_bytes, summary.reserved_bytes) == (9, 9, 30)
    without = summarise(run(epochs=[epoch(0)]))
    assert (without.probe_seconds, without.probe_peak_bytes, without.reserved_bytes) == (None, None, None)


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
    epochs = [
        epoch(0, samples_seen=3000, batch_mean=100.0, batch_min=90, batch_max=110),
        epoch(1, samples_seen=1000, batch_mean=300.0, batch_min=290, batch_max=310),
    ]
    assert summarise(run(epochs=epochs)).batch_mean == 150.0


def test_a_remainder_does_not_lower_a_batch_that_did_not_move():
    summary = summarise(run(epochs=[epoch(batch_mean=95.8)]))
    assert (summary.batch_mean, summary.batch_min, summary.batch_max) == (96.0, 96, 96)


def test_a_run_without_epochs_has_no_figures():
    summary = summarise(run(epochs=[]))
    figures = (summary.accuracy_percent, summary.seconds, summary.memory_peak_bytes, summary.score, summary.batch_mean)
    assert figures == (None,) * 5


def test_a_record_that_says_done_too_early_is_in_no_mean():
    assert why_excluded(run(epochs_planned=30)) == "says done after 1 of 30 epochs"
    assert why_excluded(run(epochs=[], epochs_planned=0)) is not None
    assert why_excluded(run()) is None


def test_an_epochs_score_is_of_its_own_figures():
    epochs = [
        epoch(1, evaluation_accuracy_percent=50.0, train_seconds=10.0, memory_peak_bytes=GB // 2),
        epoch(2, evaluation_accuracy_percent=60.0, train_seconds=5.0, memory_peak_bytes=GB // 2, probe_peak_bytes=GB),
        epoch(3, evaluation_accuracy_percent=None), epoch(4, memory_peak_bytes=None), epoch(5, train_seconds=0.0),
    ]  # fmt: skip
    assert epoch_scores(run(epochs=epochs)) == [10.0, 12.0, None, None, None]
    assert epoch_scores(run(epochs=epochs, meter="tensors")) == [None] * 5


@pytest.mark.parametrize("values, expected", [
    ([1.0, 2.0, 9.0], (1.0, 9.0)), ([1.0, 3.0, 7.0, 9.0, 5.0, 7.0], (2.0, 6.0)), ([1.0, None, 8.0, 9.0], (1.0, 9.0)),
    ([1.0, 2.0], None), ([], None), ([None, 2.0, 3.0], None), ([1.0, 2.0, None], None),
])  # fmt: skip
def test_thirds_are_means_of_both_ends(values, expected):
    assert thirds(values) == expected


def test_thirds_of_a_run_tell_cost_from_score():
    figures = [(40.0, 10.0), (60.0, 10.0), (80.0, 5.0)]
    epochs = [
        epoch(i, evaluation_accuracy_percent=a, train_seconds=s, memory_peak_bytes=GB)
        for i, (a, s) in enumerate(figures)
    ]
    summary = summarise(run(epochs=epochs))
    assert summary.score_thirds == (4.0, 16.0) and summary.cost_thirds == (10.0, 5.0)
