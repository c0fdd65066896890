"""The table of differences: who is compared with whom, what is claimed, and what stands where nothing can be."""

from __future__ import annotations

import math

import pandas
import pytest
from measured import GB, epoch, run

from triaccel_bench import compare
from triaccel_bench.differences import LEAST_BYTES, QUANTITIES, differences
from triaccel_bench.labels import method_label
from triaccel_bench.layout import to_csv, to_markdown
from triaccel_bench.results import Results
from triaccel_bench.tables import table1, table2

FP32 = [(77.1, 21.0, 0.350), (77.4, 21.3, 0.350), (76.9, 20.9, 0.350)]
AMP = [(77.0, 10.0, 0.300), (77.5, 10.2, 0.300), (76.8, 9.9, 0.300)]
OURS = [(78.1, 5.0, 0.299), (78.5, 5.1, 0.299), (77.8, 5.0, 0.299)]


def seeds(method: str, figures, **more):
    return [
        run(method=method, seed=seed, accuracy=accuracy, seconds=seconds, gb=gb, tree={"seeds": [0, 1, 2]}, **more)
        for seed, (accuracy, seconds, gb) in enumerate(figures)
    ]


def made(*groups, margin: float = 0.3):
    return differences(Results(tuple(one for group in groups for one in group)), margin)


ALL = seeds("fp32", FP32), seeds("amp", AMP), seeds("triaccel", OURS)


def row(table, method: str, against: str) -> pandas.Series:
    frame = table.frame
    (found,) = frame.index[(frame.method == method) & (frame.against == against)]
    return frame.loc[found]


def test_methods_stand_against_baselines_and_baselines_against_earlier_ones():
    table = made(*ALL)
    fp32, amp, ours = map(method_label, ("fp32", "amp", "triaccel"))
    assert [row[2:4] for row in table.rows] == [(amp, fp32), (ours, fp32), (ours, amp)]


def test_figures_are_those_of_the_paired_test_with_holm_over_the_whole_table():
    table = made(*ALL)
    accuracy = {
        name: {seed: each[0] for seed, each in enumerate(figures)} for name, figures in (("o", OURS), ("a", AMP))
    }
    expected, found = compare.paired(accuracy["o"], accuracy["a"]), row(table, "triaccel", "amp")
    assert found.accuracy_percent_difference == pytest.approx(expected.mean)
    assert found.accuracy_percent_difference_p == pytest.approx(expected.p)
    ps, fields = [], []
    for _, each in table.frame.iterrows():
        for quantity in QUANTITIES:
            name = f"{quantity.field}_{'ratio' if quantity.ratio else 'difference'}"
            ps.append(each[f"{name}_p"])
            fields.append(each[f"{name}_p_holm"])
    assert fields == pytest.approx(compare.holm(ps)) and f"over the {len(ps)} tests" in table.caption


def test_what_is_claimed_and_what_is_not():
    found = row(made(*ALL), "triaccel", "amp")
    assert found.seconds_ratio == pytest.approx(0.5, abs=0.01) and found.seconds_ratio_claim == "lower"
    assert found.accuracy_percent_difference_claim == "higher" and bool(found.not_inferior)
    # A megabyte less for every seed is as certain as it is nothing.
    assert (0.300 - 0.299) * GB < LEAST_BYTES and found.memory_peak_bytes_ratio_p < 1e-6
    assert found.memory_peak_bytes_ratio_claim == "no claim"
    assert row(made(*ALL), "amp", "fp32").accuracy_percent_difference_claim == "no claim"


def test_the_margin_decides_what_is_not_inferior():
    worse = [(accuracy - 0.5, seconds, gb) for accuracy, seconds, gb in FP32]
    slightly = [(accuracy + 0.01 * seed, *rest) for seed, (accuracy, *rest) in enumerate(worse)]
    groups = seeds("fp32", FP32), seeds("triaccel", slightly)
    assert not row(made(*groups), "triaccel", "fp32").not_inferior
    assert row(made(*groups, margin=1.0), "triaccel", "fp32").not_inferior
    assert "a margin of 1 points" in made(*groups, margin=1.0).caption


def test_only_cells_that_differ_in_their_method_alone_are_compared():
    other = seeds("triaccel", OURS)
    for one in other:
        one.settings["epochs"] = 99
    assert made(ALL[0], other).rows == ()
    assert len(made(ALL[0], seeds("triaccel", OURS)).rows) == 1


def tuned(method: str, figures, lr: float, cell: str):
    made = seeds(method, figures, cell=cell)
    for one in made:
        one.settings["optimizer"]["lr"] = lr
    return made


def test_methods_at_their_own_learning_rates_are_compared_and_it_is_said():
    table = made(ALL[0], tuned("triaccel", OURS, 0.05, "own"))
    assert row(table, "triaccel", "fp32").seconds_ratio_claim == "lower"
    (said,) = [footer for footer in table.footers if "each at its own" in footer]
    assert "optimizer.lr (0.05 and 0.1)" in said
    reductions = table2(Results((*ALL[0], *tuned("triaccel", OURS, 0.05, "own"))))
    assert reductions.frame.reduction_percent.iloc[1] == pytest.approx(100 * (1 - 0.299 / 0.350))
    rows = table1(Results((*ALL[0], *tuned("triaccel", OURS, 0.05, "own"))))
    for table in (rows, reductions):
        (said,) = [footer for footer in table.footers if "each at its own" in footer]
        assert "Tri-Accel" in said and "beside FP32, each at its own optimizer.lr (0.05 and 0.1)" in said
    assert not any("each at its own" in footer for footer in table1(Results(tuple(ALL[0]))).footers)


def test_the_same_learning_rate_comes_first():
    other = [(accuracy, 2 * seconds, gb) for accuracy, seconds, gb in FP32]
    table = made(ALL[0], tuned("fp32", other, 0.05, "other"), tuned("triaccel", OURS, 0.05, "own"))
    assert row(table, "triaccel", "fp32").against_cell == "other"
    assert not any("each at its own" in footer for footer in table.footers)
    none = made(ALL[0], tuned("fp32", other, 0.05, "other"), tuned("triaccel", OURS, 0.2, "own"))
    assert none.rows == ()  # which of the two it would be is not to be known


def test_one_seed_makes_no_claim_and_no_interval():
    table = made(seeds("fp32", FP32[:1]), seeds("triaccel", OURS[:1]))
    ((*_, n, accuracy, time, memory, score),) = table.rows
    assert (n, accuracy, time) == ("1", "+1.00", "0.238") and "Detectable (points)" not in table.header
    assert any("One shared seed" in footer for footer in table.footers)


def test_seeds_that_only_one_method_finished_are_left_out():
    table = made(seeds("fp32", FP32), seeds("triaccel", OURS[:2]))
    assert row(table, "triaccel", "fp32").seconds_ratio_n == 2
    assert any("seed 2 missing" in footer for footer in table.footers)


def test_memory_that_was_not_measured_is_no_ratio():
    table = made(
        seeds("fp32", [(*each[:2], None) for each in FP32]), seeds("triaccel", [(*each[:2], None) for each in OURS])
    )
    assert "Memory (×)" not in table.header and "Time (×)" in table.header


def test_an_accuracy_that_is_missing_makes_no_difference():
    missing = [
        run(method="triaccel", seed=0, epochs=[epoch(evaluation_accuracy_percent=None)], tree={"seeds": [0, 1, 2]})
    ]
    assert row(made(seeds("fp32", FP32), missing), "triaccel", "fp32").accuracy_percent_difference is None


def test_the_same_records_give_the_same_bytes():
    first, second = (made(*groups) for groups in (ALL, ALL[::-1]))
    assert to_csv(first) == to_csv(second) and to_markdown(first) == to_markdown(second)
    assert made().rows == () and "Acc (points)" in made().header


def test_table_1_tells_noise_of_time_and_the_scores_propagated_error():
    table = table1(Results(tuple(ALL[0])))
    assert table.rows[0][table.header.index("Noise (%)")] == f"{100 * (21.3 - 20.9) / 20.9:.1f}"
    relative = [table.frame.iloc[0][f"{name}_std"] / table.frame.iloc[0][f"{name}_mean"] for name in ("accuracy_percent", "train_seconds_per_epoch", "vram_peak_bytes")]  # fmt: skip
    expected = table.frame.iloc[0].score_mean * math.sqrt(sum(each**2 for each in relative))
    assert table.frame.iloc[0].score_propagated_std == pytest.approx(expected)
