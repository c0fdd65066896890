"""Warm-up and cosine as a function of samples alone."""

import math

import pytest
import torch

from triaccel_bench.schedule import batch_rate_factor, make_schedule


def at(schedule, position: float) -> float:
    return schedule(torch.tensor(position, dtype=torch.float64)).item()


def test_shape():
    schedule = make_schedule(base_lr=0.1, epochs=30, warmup_epochs=5, samples_per_epoch=100)
    assert at(schedule, 0) == 0.0
    assert at(schedule, 250) == pytest.approx(0.05)
    assert at(schedule, 500) == pytest.approx(0.1)
    assert at(schedule, 500 + 1250) == pytest.approx(0.05)
    assert at(schedule, 3000) == pytest.approx(0.0, abs=1e-9)
    assert at(schedule, 4000) == pytest.approx(0.0, abs=1e-9)
    assert at(schedule, 1000) == pytest.approx(0.05 * (1 + math.cos(math.pi * 0.2)))


@pytest.mark.parametrize("epochs, warmup_samples", [(1, 0), (3, 0), (4, 100), (10, 200), (20, 500), (100, 500)])
def test_short_runs_warm_up_for_a_quarter_at_most(epochs, warmup_samples):
    assert make_schedule(0.1, epochs, 5, 100).warmup_samples == warmup_samples


def test_no_warm_up_starts_at_the_base_rate():
    assert at(make_schedule(0.1, 2, 5, 100), 0) == pytest.approx(0.1)


@pytest.mark.parametrize("rule, factor", [("none", 1.0), ("sqrt", 2.0), ("linear", 4.0)])
def test_rate_follows_the_batch_by_rule(rule, factor):
    assert batch_rate_factor(rule, 384, 96) == factor


@pytest.mark.parametrize("samples", range(0, 3001, 50))
def test_the_share_of_its_peak_is_what_the_cosine_has_left(samples):
    schedule = make_schedule(base_lr=0.1, epochs=30, warmup_epochs=5, samples_per_epoch=100)
    share = schedule.share_of_peak(samples)
    assert share == (1.0 if samples <= 500 else pytest.approx(at(schedule, samples) / 0.1, abs=1e-6))
    assert schedule.share_of_peak(3000 + samples) == 0.0


def test_a_schedule_without_warm_up_falls_from_the_first_sample():
    assert make_schedule(0.1, 2, 5, 100).share_of_peak(100) == pytest.approx(0.5)
