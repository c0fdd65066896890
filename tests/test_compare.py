"""Differences between methods: against scipy's own tests and numbers worked out by hand; what may be claimed."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from scipy import stats

from triaccel_bench import compare
from triaccel_bench.compare import Difference, holm, not_inferior, paired, propagated, spread, verdict

OURS = {0: 85.1, 1: 84.7, 2: 85.4, 3: 84.9}
THEIRS = {0: 84.6, 1: 84.5, 2: 84.6, 3: 84.5}


def test_a_difference_is_scipys_paired_t_test():
    found = paired(OURS, THEIRS)
    tested = stats.ttest_rel(list(OURS.values()), list(THEIRS.values()))
    low, high = tested.confidence_interval(0.95)
    assert (found.mean, found.n, found.p) == (pytest.approx(0.475), 4, pytest.approx(tested.pvalue))
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))


def test_a_ratio_is_that_of_geometric_means():
    found = paired({0: 2.0, 1: 8.0}, {0: 1.0, 1: 2.0}, ratio=True)
    assert found.mean == pytest.approx(math.sqrt(8)) and found.low < 1 < found.high
    logs = stats.ttest_1samp([math.log(2), math.log(4)], 0.0)
    assert found.p == pytest.approx(logs.pvalue)
    swapped = paired({0: 1.0, 1: 2.0}, {0: 2.0, 1: 8.0}, ratio=True)
    assert swapped.mean == pytest.approx(1 / found.mean) and swapped.low == pytest.approx(1 / found.high)


def test_only_shared_seeds_count_and_one_has_no_interval():
    assert paired(OURS, {7: 1.0}) is None
    assert paired(OURS, {2: 85.0, 9: 1.0}) == Difference(pytest.approx(0.4), 1, False)
    assert verdict(paired(OURS, {2: 1.0}), None) == "no claim"


def test_pairs_that_move_together_are_told_apart_where_means_could_not_be():
    ours, theirs = ({seed: 80 + seed + by for seed in range(5)} for by in (0.5, 0.0))
    ours[3] += 0.01
    assert paired(ours, theirs).p < 1e-6 < 0.5 < stats.ttest_ind(list(ours.values()), list(theirs.values())).pvalue


@pytest.mark.parametrize("n", [2, 3, 10])
def test_the_detectable_effect_is_found_with_the_power_that_it_says(n):
    chance = random.Random(n)
    found = paired({seed: chance.gauss(0, 1) for seed in range(n)}, dict.fromkeys(range(n), 0.0))
    spread_ = found.standard_error * math.sqrt(n)
    quantile = stats.t.ppf(0.975, n - 1)
    hits = 0
    for _ in range(2000):
        values = [chance.gauss(found.detectable, spread_) for _ in range(n)]
        hits += statistics.fmean(values) > quantile * statistics.stdev(values) / math.sqrt(n)
    assert hits / 2000 == pytest.approx(compare.POWER, abs=0.03)


def test_of_a_ratio_the_detectable_effect_is_an_excess():
    ours = {0: 1.00, 1: 1.02, 2: 0.99}
    logs = paired({seed: math.log(value) for seed, value in ours.items()}, dict.fromkeys(ours, 0.0))
    found = paired(ours, dict.fromkeys(ours, 1.0), ratio=True)
    assert found.detectable == pytest.approx(math.exp(logs.detectable) - 1)


def test_not_inferior_is_a_one_sided_bound():
    bound = not_inferior(OURS, THEIRS, 0.3)
    tested = stats.ttest_rel(list(OURS.values()), list(THEIRS.values()), alternative="greater")
    assert -bound.below == pytest.approx(tested.confidence_interval(0.95).low) and bound.holds
    worse = {seed: value - 0.6 for seed, value in OURS.items()}
    assert not_inferior(worse, THEIRS, 0.3).holds is False and not_inferior(worse, THEIRS, 1.0).holds
    assert not_inferior(OURS, {0: 84.0}, 0.3).holds is None and not_inferior(OURS, {9: 84.0}, 0.3) is None


def test_holm_by_hand():
    assert holm([0.01, None, 0.04, 0.03, 0.005]) == pytest.approx([0.03, None, 0.06, 0.06, 0.02], nan_ok=True)
    assert holm([0.6, 0.9]) == [1.0, 1.0] and holm([]) == [] and holm([None]) == [None]


def test_what_may_be_claimed():
    found = paired(OURS, THEIRS)
    assert verdict(found, found.p) == "higher" and verdict(paired(THEIRS, OURS), found.p) == "lower"
    assert verdict(found, 0.06) == "no claim" and verdict(found, found.p, least=0.5) == "no claim"
    wide = paired({0: 1.0, 1: 9.0}, {0: 0.0, 1: 0.0})
    assert verdict(wide, 0.001) == "no claim" and verdict(None, 0.0) == "no claim"
    times = paired({0: 0.50, 1: 0.51}, {0: 1.0, 1: 1.0}, ratio=True)
    assert verdict(times, times.p) == "lower"


def test_runs_that_are_equal_bit_for_bit_make_no_claim():
    same = paired(THEIRS, THEIRS)
    assert (same.mean, same.p, same.detectable) == (0, 1.0, 0) and verdict(same, same.p) == "no claim"


@pytest.mark.parametrize("wrong, ratio", [(math.nan, False), (math.inf, False), (0.0, True), (-1.0, True)])
def test_what_is_no_figure_is_refused(wrong, ratio):
    with pytest.raises(ValueError, match="expected"):
        paired({0: wrong}, {0: 1.0}, ratio)


def test_errors_of_a_quotient_add_up_in_squares():
    assert propagated(10.0, 0.03, 0.04) == pytest.approx(0.5) and propagated(10.0, 0.1, None) is None
    chance = random.Random(0)
    drawn = [chance.gauss(80, 0.8) / (chance.gauss(2, 0.04) * chance.gauss(0.3, 0.003)) for _ in range(20_000)]
    value = 80 / (2 * 0.3)
    assert statistics.stdev(drawn) == pytest.approx(propagated(value, 0.01, 0.02, 0.01), rel=0.03)


def test_spread_of_times():
    assert spread([2.0, 2.2, 2.1]) == pytest.approx(0.1) and spread([2.0]) is None and spread([0.0, 1.0]) is None
