"""Which batch size memory allows: the printed rule, the line through the rungs seen, and both in a closed loop."""

from __future__ import annotations

import functools
import random

import pytest
from tiny import images, settings, trainer

from triaccel_bench.configuration import compose
from triaccel_bench.control import Signals, decide, start
from triaccel_bench.rungs import Reading, Seen, next_rung, predicted_peak
from triaccel_bench.settings import BatchSettings, MethodSettings


def native(level: str) -> str:
    return level


@functools.cache
def rules(*overrides: str) -> MethodSettings:
    return compose(["method=triaccel_batch", *overrides]).method


def band(*overrides: str) -> BatchSettings:
    """A band of 0.75 to 0.9."""
    return rules("method.batch.rho_low=0.75", *overrides).batch


def memory(used, budget=1000, batch=96, free=None, seen=None, growth="paper"):
    """(B(t+1), reason, what is known) after one reading."""
    reading = Reading(batch, used, budget, free)
    seen = (seen or Seen()).with_reading(reading)
    size, reason = next_rung(reading, seen, band(f"method.batch.growth={growth}"))
    return size, reason, seen


@pytest.mark.parametrize("growth", ["paper", "model"])
@pytest.mark.parametrize("used, batch, expected, word", [
    (700, 96, 128, "grow"), (749, 96, 128, "grow"), (750, 96, 96, "within"), (900, 96, 96, "within"),
    (901, 96, 64, "shrink"), (950, 32, 32, "batch.min=32"), (100, 512, 512, "batch.max=512"), (100, 500, 512, "grow"),
    (950, 40, 32, "shrink"),
])  # fmt: skip
def test_a_first_reading_moves_batch_by_the_printed_rule_within_bounds(used, batch, expected, word, growth):
    size, reason, _ = memory(used, batch=batch, growth=growth)
    assert size == expected and word in reason


@pytest.mark.parametrize("used, budget", [(None, 1000), (100, None)])
def test_batch_holds_without_a_reading_or_a_budget(used, budget):
    decision, state = start(1, rules(), native)
    signals = Signals(0, None, None, used, budget)
    assert decide(signals, state, rules(), native)[0].batch == 96


def test_a_rung_known_to_be_too_large_waits_until_usage_has_fallen():
    size, _, seen = memory(950, batch=96)
    assert size == 64
    size, reason, seen = memory(700, batch=64, seen=seen)
    assert size == 64 and "B=96 is predicted at 0.950" in reason
    size, reason, _ = memory(660, batch=64, seen=Seen(factors=seen.factors))
    assert size == 96 and "grow" in reason


def test_what_a_rung_adds_is_learned_on_the_way_up_too():
    size, _, seen = memory(600, batch=96)
    size, _, seen = memory(950, batch=size, seen=seen)
    assert size == 96 and seen.factors[96, 128] == pytest.approx(950 / 600)


@pytest.mark.parametrize("growth", ["paper", "model"])
def test_growth_waits_for_free_memory_of_the_device(growth):
    size, reason, _ = memory(600, batch=96, free=150, growth=growth)
    assert size == 96 and "150 bytes free" in reason
    assert memory(600, batch=96, free=250, growth=growth)[0] == 128


def seen_at(*peaks: tuple[int, int]) -> Seen:
    seen = Seen()
    for batch, used in peaks:
        seen = seen.with_reading(Reading(batch, used, 1000))
    return seen


def test_the_line_goes_straight_to_the_highest_rung_below_the_band():
    seen = seen_at((96, 200), (128, 260))  # 20 + 1.875 B
    size, reason, seen = memory(260, batch=128, seen=seen, growth="model")
    assert size == 448 and "B=448 is predicted at 0.860" in reason  # 480 would end at 0.92
    assert predicted_peak(Reading(128, 260, 1000), seen, 448) == pytest.approx(860)
    size, reason, _ = memory(260, batch=128, seen=seen_at((96, 259), (128, 260)), growth="model")
    assert size == 512 and "grow" in reason  # a flat line ends at batch.max
    size, reason, _ = memory(740, batch=128, seen=seen_at((96, 400), (128, 740)), growth="model")
    assert size == 128 and "but B=160 is predicted at 1.080" in reason


def test_the_second_rung_is_as_far_as_usage_in_proportion_to_batch_allows():
    size, reason, _ = memory(300, batch=96, growth="model")
    assert size == 288 and "even in proportion" in reason  # 900 there at the most; one more rung could be 1000
    assert memory(300, batch=96, growth="paper")[0] == 128
    assert memory(300, batch=96, free=250, growth="model")[0] == 160
    assert memory(10, batch=96, growth="model")[0] == 512
    size, reason, _ = memory(600, batch=96, growth="model")
    assert size == 128 and "proportion" not in reason
    # A rung seen above the band is no way up, however little another plan uses below it.
    over = Seen(factors={(96, 128): 3.1})
    assert memory(300, batch=96, seen=over, growth="model")[0] == 96


def test_what_a_long_move_added_is_not_held_against_the_next_rung():
    size, _, seen = memory(300, batch=96, growth="model")
    assert size == 288
    size, _, seen = memory(905, batch=288, seen=seen, growth="model")
    assert size == 256  # and the plan changes to one that needs half of it
    size, reason, seen = memory(460, batch=256, seen=seen.under_a_new_plan(), growth="model")
    assert size == 480 and "even in proportion" in reason


@pytest.mark.parametrize("seed", range(20))
def test_no_second_rung_passes_the_band_whatever_part_of_usage_grows_with_batch(seed):
    draw = random.Random(seed)
    fixed, slope = draw.uniform(0, 400), draw.uniform(0.5, 4)
    used = round(fixed + 96 * slope)
    size, _, _ = memory(used, batch=96, growth="model")
    assert fixed + size * slope <= 901 or size <= 128


def test_the_line_stops_where_the_devices_memory_does():
    seen = seen_at((96, 200), (128, 260))
    assert memory(260, batch=128, seen=seen, free=130, growth="model")[0] == 192
    size, reason, _ = memory(260, batch=128, seen=seen, free=50, growth="model")
    assert size == 128 and "only 50 bytes free" in reason


def test_above_the_band_the_line_shrinks_as_far_as_it_must():
    assert memory(1500, batch=256, seen=seen_at((128, 700), (256, 1500)), growth="model")[0] == 160
    assert memory(5000, batch=256, seen=seen_at((128, 4200), (256, 5000)), growth="model")[0] == 32
    assert memory(1500, batch=256, growth="model")[0] == 224  # no line yet: one rung


def test_peaks_that_do_not_rise_make_no_line_and_those_of_an_old_plan_are_forgotten():
    assert seen_at((96, 300), (128, 300)).line() is None and seen_at((96, 300)).line() is None
    seen = seen_at((96, 200), (128, 260))
    later = seen.under_a_new_plan()
    assert later.line() is None and later.last is None and later.factors == seen.factors


@pytest.mark.parametrize("growth", ["paper", "model"])
def test_batch_settles_inside_the_band_or_at_a_bound(growth):
    for fixed, per_sample in ((100, 5), (10, 9), (500, 2), (0, 1), (2000, 1)):
        settings = rules(f"method.batch.growth={growth}")
        _, state = start(1, settings, native)
        sizes = []
        for _ in range(40):
            used = fixed + per_sample * state.batch
            decision, state = decide(Signals(0, None, None, used, 1000), state, settings, native)
            sizes.append(decision.batch)
        assert len(set(sizes[-10:])) == 1, sizes
        assert settings.batch.min <= sizes[-1] <= settings.batch.max


SCHEDULE = rules("method.batch.growth=schedule", "method.batch.max=1024").batch


def two_rungs(batch: int) -> Seen:
    return Seen(peaks={batch - 32: 10 * (batch - 32), batch: 10 * batch})


@pytest.mark.parametrize(
    ("share", "batch", "expected"),
    [
        (None, 96, 96), (1.0, 96, 96), (0.667, 96, 96), (0.6, 96, 160), (0.5, 96, 192), (0.25, 96, 384),
        (0.4, 160, 160), (0.4, 128, 224), (0.09, 96, 1024), (0.0, 96, 1024), (0.0, 1024, 1024), (0.9, 160, 160),
    ],
)  # fmt: skip
def test_the_batch_grows_as_far_as_the_rate_has_been_annealed(share, batch, expected):
    found, words = next_rung(Reading(batch, 10 * batch, 10**6), two_rungs(batch), SCHEDULE, share)
    assert found == expected
    if expected == batch and batch < 1024:
        assert f"a learning rate at {share or 1.0:.3f} of its peak allows no half of B more yet" in words


def test_sizes_that_were_run_and_b0_wait_for_no_half_more():
    shrunk = Seen(peaks={352: 3520, 384: 3840})
    assert next_rung(Reading(352, 3520, 10**6), shrunk, SCHEDULE, 0.22)[0] == 384
    assert next_rung(Reading(352, 3520, 10**6), shrunk, SCHEDULE, 0.26)[0] == 352, "384 is beyond the rate by then"
    assert next_rung(Reading(352, 3520, 10**6), two_rungs(352), SCHEDULE, 0.22)[0] == 352, "384 was never run"
    below = SCHEDULE.model_copy(update={"min": 16})
    assert next_rung(Reading(80, 800, 10**6), two_rungs(80), below, 1.0)[0] == 96
    assert next_rung(Reading(48, 480, 10**6), Seen(peaks={96: 960, 48: 480}), below, 1.0)[0] == 80


@pytest.mark.parametrize("share", [0.9, 0.6, 0.37, 0.2, 0.13])
def test_with_the_linear_rule_the_rate_stays_below_the_peak_chosen_at_b0(share):
    found, _ = next_rung(Reading(96, 960, 10**6), two_rungs(96), SCHEDULE, share)
    assert share * found / 96 <= 1.0


@pytest.mark.parametrize("share, expected", [(None, 192), (1.0, 192), (0.9, 192), (0.5, 384), (0.1, 1024)])
def test_a_head_start_lets_the_batch_grow_before_the_rate_has_fallen(share, expected):
    ahead = SCHEDULE.model_copy(update={"head_start": 2.0})
    assert next_rung(Reading(96, 960, 10**6), two_rungs(96), ahead, share)[0] == expected
    assert next_rung(Reading(96, 960, 1500), two_rungs(96), ahead, share)[0] == 128, "memory bounds it all the same"


def test_a_head_start_of_less_than_a_capture_is_worth_changes_nothing():
    ahead = SCHEDULE.model_copy(update={"head_start": 1.6})
    assert next_rung(Reading(96, 960, 10**6), two_rungs(96), ahead, 1.0)[0] == 96
    twice = SCHEDULE.model_copy(update={"head_start": 2.0})
    assert next_rung(Reading(192, 1920, 10**6), two_rungs(192), twice, 0.9)[0] == 192, "213 is no half of 192 more"


def test_memory_bounds_an_annealed_batch_too():
    found, words = next_rung(Reading(96, 960, 1700), two_rungs(96), SCHEDULE, 0.1)
    assert found == 128 and "is predicted at" in words
    assert next_rung(Reading(256, 2560, 2600), two_rungs(256), SCHEDULE, 0.0)[0] < 256
    model = SCHEDULE.model_copy(update={"growth": "model"})
    assert next_rung(Reading(96, 960, 4000), two_rungs(96), model, 1.0)[0] == 352


def test_a_run_grows_its_batch_as_its_rate_falls():
    made, run = trainer(
        settings(
            "method=triaccel_batch", "method.batch.growth=schedule", "memory.budget=10", "epochs=8",
            "method.control.interval=2", "method.batch.initial=16", "method.batch.min=16", "method.batch.max=64",
            "method.batch.up=16", "method.batch.down=16",
        ),
        images(train=192),
    )  # fmt: skip
    trace = made.train()
    limits = [16 / d.rate_share if d.rate_share else 64 for d in trace.decisions]
    sizes = [d.batch_after for d in trace.decisions]
    assert all(size <= limit for size, limit in zip(sizes, limits))
    assert sizes == sorted(sizes) and sizes[0] == 16 and sizes[-1] == 64
    assert run.epochs[-1].batch_last == 64


CONTROL_STEPS_AN_EPOCH = 10


def simulated(seed: int, growth: str) -> tuple[list[int], list[float], list[bool]]:
    """Sizes, shares of MemMax and quiet steps of a loop with a neighbour, a change of plan and 1 % of noise."""
    draw = random.Random(f"{growth} {seed}")
    settings = rules(f"method.batch.growth={growth}")
    _, state = start(1, settings, native)
    fixed, slope, budget = draw.uniform(50, 400), draw.uniform(0.5, 6), 1000
    device = draw.choice([1200, 5000])
    annealing = draw.uniform(0.95, 0.99)
    neighbour, changes = 0.0, sorted(draw.sample(range(5, 55), 3))
    sizes, shares, quiet = [], [], []
    for step in range(90):
        if step in changes:
            what = draw.choice(["neighbour", "plan"])
            if what == "neighbour":
                neighbour = draw.choice([0.0, 300.0])
            else:
                slope *= draw.uniform(0.6, 1.5)
                state = state.__class__(**{**vars(state), "seen": state.seen.under_a_new_plan()})
        used = round((fixed + slope * state.batch) * draw.uniform(0.99, 1.0))
        free = round(max(0.0, device - used - neighbour))
        signals = Signals(step, None, None, used, budget, free, rate_share=annealing ** min(step, changes[-1]))
        decision, state = decide(signals, state, settings, native)
        sizes.append(decision.batch)
        shares.append(used / budget)
        quiet.append(step > changes[-1])
    return sizes, shares, quiet


@pytest.mark.parametrize("growth", ["paper", "model", "schedule"])
@pytest.mark.parametrize("seed", range(60))
def test_closed_loop_with_disturbances(seed, growth):
    sizes, shares, quiet = simulated(seed, growth)
    start_of_quiet = quiet.index(True)
    calm = sizes[start_of_quiet:]
    # Not above MemMax for longer than one control step, but on the way down to the floor.
    for before, now, size in zip(shares, shares[1:], sizes[1:]):
        assert not (before > 1.0 and now > 1.0) or now < before or size == 32
    # Settles within 3 control steps of the last rung that it needs: paper walks rung by rung, model jumps, schedule grows by half or more.
    last = calm[-1]
    needed = {"paper": abs(last - sizes[start_of_quiet - 1]) // 32, "model": 2, "schedule": 4}[growth]
    assert all(abs(size - last) <= 32 for size in calm[needed + 3 :]), calm
    # At most one reversal an epoch after that.
    for epoch in range(0, len(calm), CONTROL_STEPS_AN_EPOCH):
        moves = [b - a for a, b in zip(calm[epoch:], calm[epoch + 1 : epoch + CONTROL_STEPS_AN_EPOCH]) if b != a]
        assert sum((a > 0) != (b > 0) for a, b in zip(moves, moves[1:])) <= 1, calm
