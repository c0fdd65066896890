"""The decisions of section 3 as pure functions: every branch of the printed formulas, and what they leave open."""

import math
from dataclasses import replace

import pytest

from triaccel_bench import control
from triaccel_bench.configuration import compose
from triaccel_bench.control import Signals, decide, start
from triaccel_bench.settings import SettingsError


def native(level):
    return level


def without_bf16(level):
    return "fp16" if level == "bf16" else level


def cpu(level):
    return "fp32"


def rules(*overrides: str, method: str = "triaccel"):
    return compose([f"method={method}", "tuned=none", *overrides]).method


def signals(**changes) -> Signals:
    return replace(Signals(1, None, None, None, None), **changes)


@pytest.mark.parametrize("variance, level", [
    (0.0, "fp16"), (0.9, "fp16"), (1.0, "bf16"), (9.9, "bf16"), (10.0, "fp32"), (math.inf, "fp32"), (math.nan, "fp32"),
])  # fmt: skip
def test_level_by_variance_is_the_printed_rule(variance, level):
    assert control.level_by_variance(variance, 1.0, 10.0) == level


@pytest.mark.parametrize("current, variance, level", [
    ("fp16", 1.3, "fp16"), ("fp16", 1.5, "bf16"), ("bf16", 0.8, "bf16"), ("bf16", 0.6, "fp16"),
    ("bf16", 13.0, "bf16"), ("bf16", 15.0, "fp32"), ("fp32", 8.0, "fp32"), ("fp32", 6.0, "bf16"),
    ("fp32", 0.1, "fp16"), ("fp16", 100.0, "fp32"), ("fp16", math.nan, "fp32"),
])  # fmt: skip
def test_hysteresis_of_factor_two(current, variance, level):
    assert control.level_with_hysteresis(current, variance, 1.0, 10.0, 2.0) == level


def test_hysteresis_of_one_is_the_printed_rule():
    for current in control.LEVELS:
        for variance in (0.5, 1.0, 5.0, 10.0, 20.0):
            expected = control.level_by_variance(variance, 1.0, 10.0)
            assert control.level_with_hysteresis(current, variance, 1.0, 10.0, 1.0) == expected


def test_auto_thresholds_come_after_two_windows_and_then_stay():
    settings = rules("method.precision.dwell=1")
    _, state = start(11, settings, native)
    values = tuple(10.0**-n for n in range(11))
    first, state = decide(signals(variance=values), state, settings, native)
    assert state.tau_low is None and set(first.requested) == {"bf16"}
    second, state = decide(signals(variance=values), state, settings, native)
    assert state.tau_low == pytest.approx(1e-5) and state.tau_high == pytest.approx(0.1)
    assert second.plan_changed and set(second.requested) == {"fp16", "bf16", "fp32"}
    _, later = decide(signals(variance=tuple(v * 100 for v in values), epoch=2), state, settings, native)
    assert (later.tau_low, later.tau_high) == (state.tau_low, state.tau_high)


def test_fixed_thresholds_are_used_at_once():
    settings = rules("method.precision.tau_low=0.1", "method.precision.tau_high=1.0", "method.precision.dwell=1")
    decision, _ = decide(signals(variance=(0.01, 0.3, 5.0)), start(3, settings, native)[1], settings, native)
    assert decision.requested == ("fp16", "bf16", "fp32")


def test_a_ladder_without_fp16():
    settings = rules(
        "method.precision.narrowest=bf16", "method.precision.tau_low=0.1", "method.precision.tau_high=1.0",
        "method.precision.dwell=1",
    )  # fmt: skip
    decision, _ = decide(signals(variance=(0.01, 0.3, 5.0)), start(3, settings, native)[1], settings, native)
    assert decision.requested == ("bf16", "bf16", "fp32")
    with pytest.raises(SettingsError, match="method.dtype=fp16 and method.precision.narrowest=bf16"):
        rules("method.precision.narrowest=bf16", "method.dtype=fp16")


def test_dwell_keeps_a_layer_in_place():
    settings = rules(
        "method.precision.tau_low=0.1", "method.precision.tau_high=1.0", "method.precision.dwell=3",
        "method.control.plan_changes_per_epoch=99",
    )  # fmt: skip
    _, state = start(1, settings, native)
    seen = []
    for variance in (5.0, 0.01, 0.01, 0.01, 0.01):
        decision, state = decide(signals(variance=(variance,)), state, settings, native)
        seen.append(decision.requested[0])
    assert seen == ["fp32", "fp32", "fp32", "fp16", "fp16"]


def test_one_plan_change_an_epoch_and_the_wish_survives_to_the_next():
    settings = rules("method.precision.tau_low=0.1", "method.precision.tau_high=1.0", "method.precision.dwell=1")
    _, state = start(2, settings, native)
    first, state = decide(signals(variance=(0.01, 0.3)), state, settings, native)
    second, state = decide(signals(variance=(0.01, 5.0)), state, settings, native)
    third, state = decide(signals(variance=(0.01, 5.0), epoch=2), state, settings, native)
    assert [d.plan_changed for d in (first, second, third)] == [True, False, True]
    assert second.requested == ("fp16", "bf16") and third.requested == ("fp16", "fp32")


@pytest.mark.parametrize("executed_of, level, lifted", [
    (native, "fp16", "bf16"), (native, "bf16", "fp32"), (native, "fp32", "fp32"),
    (without_bf16, "fp16", "fp32"), (without_bf16, "bf16", "fp32"), (cpu, "fp16", "fp16"),
])  # fmt: skip
def test_promotion_goes_to_a_dtype_that_is_executed_wider(executed_of, level, lifted):
    assert control.wider(level, executed_of) == lifted


def test_promotion_lasts_until_a_later_probe_is_below():
    settings = rules("method.curvature.tau_curv=10", method="triaccel_precision_curvature")
    _, state = start(3, settings, native)
    up, state = decide(signals(lambda_max=(11.0, 9.0, None)), state, settings, native)
    assert up.promoted == (True, False, False) and up.requested == ("fp32", "bf16", "bf16")
    kept, state = decide(signals(lambda_max=(None, 9.0, None), epoch=2), state, settings, native)
    assert kept.promoted[0] and not kept.plan_changed
    unread, state = decide(signals(lambda_max=(math.nan, 9.0, None), epoch=2), state, settings, native)
    assert unread.promoted[0]
    down, _ = decide(signals(lambda_max=(9.0, 9.0, None), epoch=3), state, settings, native)
    assert down.promoted == (False, False, False) and set(down.requested) == {"bf16"}


def test_auto_tau_curv_waits_for_half_of_the_layers_and_then_stays():
    settings = rules(method="triaccel_precision_curvature")
    _, state = start(5, settings, native)
    _, state = decide(signals(lambda_max=(1.0, 2.0, None, None, None)), state, settings, native)
    assert state.tau_curv is None
    decision, state = decide(signals(lambda_max=(1.0, 2.0, 100.0, None, None)), state, settings, native)
    assert 2.0 < state.tau_curv < 100.0 and decision.promoted == (False, False, True, False, False)
    _, later = decide(signals(lambda_max=(1e3, 1e3, 1e3, 1e3, 1e3)), state, settings, native)
    assert later.tau_curv == state.tau_curv


@pytest.mark.parametrize("value, rate", [
    (0.0, 1.0), (20.0, 0.5), (-20.0, 1.0), (-1e9, 1.0), (1e12, 2e-11), (math.nan, 0.7), (math.inf, 0.7), (None, 0.7),
])  # fmt: skip
def test_rates_follow_the_printed_formula_and_stay_in_range(value, rate):
    (found,) = control.rate_scales([value], [0.7], rules().curvature)
    assert found == pytest.approx(rate) and 0.0 < found <= 1.0


@pytest.mark.parametrize("method, moves", [
    ("fp32", set()), ("tf32", set()), ("amp", set()), ("triaccel_batch", {"batch"}), ("triaccel_precision", {"plan"}),
    ("triaccel_curvature", {"rates"}), ("triaccel_precision_batch", {"plan", "batch"}),
    ("triaccel_precision_curvature", {"plan", "rates"}), ("triaccel_curvature_batch", {"rates", "batch"}),
    ("triaccel", {"plan", "rates", "batch"}),
])  # fmt: skip
def test_each_ablation_moves_its_own_switch_only(method, moves):
    settings = rules(method=method)
    first, state = start(3, settings, native)
    for _ in range(3):
        decision, state = decide(
            signals(variance=(1e-9, 1e-5, 1.0), lambda_max=(1.0, 5.0, 50.0), memory_bytes=100, budget_bytes=1000),
            state, settings, native,
        )  # fmt: skip
    changed = {
        name
        for name, same in (
            ("plan", decision.executed == first.executed),
            ("rates", decision.rates == first.rates),
            ("batch", decision.batch == first.batch),
        )
        if not same
    }
    assert changed == moves


def test_a_change_of_plan_is_not_taken_for_what_a_rung_added():
    settings = rules("method.precision.tau_low=0.1", "method.precision.tau_high=1.0", "method.precision.dwell=1")
    _, state = start(1, settings, native)
    for variance, used in ((0.5, 600), (5.0, 600), (5.0, 950)):
        decision, state = decide(
            signals(variance=(variance,), memory_bytes=used, budget_bytes=1000), state, settings, native
        )
    assert decision.batch == 96 and state.seen.factors == {(96, 128): pytest.approx(1.0)}


def test_the_quota_is_on_what_is_executed():
    """On a card that runs BF16 as FP16 a change between the two costs nothing and uses up nothing."""
    settings = rules(
        "method.precision.tau_low=0.1", "method.precision.tau_high=1.0", "method.precision.dwell=1",
        method="triaccel_precision",
    )  # fmt: skip
    _, state = start(2, settings, without_bf16)
    first, state = decide(signals(variance=(0.01, 0.3)), state, settings, without_bf16)
    second, state = decide(signals(variance=(0.01, 5.0)), state, settings, without_bf16)
    third, _ = decide(signals(variance=(5.0, 5.0)), state, settings, without_bf16)
    assert first.requested == ("fp16", "bf16") and first.plan_changed
    assert second.executed == ("fp16", "fp32")
    assert third.executed == second.executed


def test_b_does_not_grow_on_a_reading_of_the_plan_that_was():
    settings = rules("method.precision.tau_low=0.1", "method.precision.tau_high=1.0", "method.precision.dwell=1")
    _, state = start(1, settings, native)
    reading = signals(variance=(5.0,), memory_bytes=100, budget_bytes=1000)
    changed, state = decide(reading, state, settings, native)
    assert changed.plan_changed and changed.batch == 96 and "the plan changes" in changed.batch_reason
    settled, _ = decide(reading, state, settings, native)
    assert not settled.plan_changed and settled.batch == 128


@pytest.mark.parametrize("share, changes", [(None, True), (0.05, True), (0.051, False), (9.0, False)])
def test_a_plan_waits_while_capturing_it_would_take_too_much_of_the_time(share, changes):
    """Rates and batch do not wait, nor does a change that leaves the executed plan as it is."""
    settings = rules(
        "method.precision.tau_low=1.0", "method.precision.tau_high=10.0", "method.capture.max_overhead=0.05"
    )
    _, state = start(2, settings, native)
    seen = signals(variance=(0.01, 0.01), lambda_max=(1.0, 1.0), memory_bytes=99, budget_bytes=100, capture_share=share)
    decision, _ = decide(seen, state, settings, native)
    assert decision.executed == (("fp16",) * 2 if changes else ("bf16",) * 2)
    assert decision.rates[0] < 1.0 and decision.batch < settings.batch.initial
    decision, _ = decide(seen, state, settings, without_bf16)
    assert decision.requested == ("fp16",) * 2 and decision.executed == ("fp16",) * 2


def test_a_plan_that_waited_is_put_in_force_once_it_is_affordable():
    settings = rules("method.precision.tau_low=1.0", "method.precision.tau_high=10.0")
    _, state = start(2, settings, native)
    for share in (0.5, 0.2, 0.06):
        decision, state = decide(signals(variance=(0.01, 0.01), capture_share=share), state, settings, native)
        assert not decision.plan_changed
    decision, _ = decide(signals(variance=(0.01, 0.01), capture_share=0.04), state, settings, native)
    assert decision.executed == ("fp16",) * 2
