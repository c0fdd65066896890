"""The gradient noise scale: against gradients whose signal and covariance are known, and what the batch makes of it."""

from __future__ import annotations

import math

import pytest
import torch
from tiny import images, settings, trainer

from triaccel_bench import rungs
from triaccel_bench.configuration import compose
from triaccel_bench.noise import Noise, Squares
from triaccel_bench.settings import SettingsError

MU = 0.9
STEPS = (1 + MU) / (1 - MU)


def squares_of(signal: torch.Tensor, variance: float, batch: int, count: int = 4000) -> list[Squares]:
    """A reading every 100 steps of a gradient ``signal`` with independent noise of that variance an element."""
    generator = torch.Generator().manual_seed(0)
    momentum, average, found = torch.zeros_like(signal), 0.0, []
    for step in range(1, count + 1):
        noise = torch.randn(signal.shape, generator=generator, dtype=signal.dtype)
        gradient = signal + math.sqrt(variance / batch) * noise
        momentum = MU * momentum + gradient
        square = float(gradient.square().sum())
        average = square if step == 1 else average + 0.1 * (square - average)
        if step % 100 == 0:
            found.append(Squares(average, float((1 - MU) ** 2 * momentum.square().sum()), STEPS, 10**9))
    return found


@pytest.mark.parametrize("batch", [32, 96])
@pytest.mark.parametrize("scale", [50.0, 400.0, 3000.0])
def test_the_noise_scale_of_a_known_gradient_is_found(batch, scale):
    size = 2000
    signal = torch.full((size,), 0.1, dtype=torch.float64)
    variance = scale * float(signal.square().sum()) / size
    noise = Noise()
    for squares in squares_of(signal, variance, batch):
        noise = noise.with_reading(squares, batch)
    assert noise.scale == pytest.approx(scale, rel=0.15)
    assert noise.signal == pytest.approx(float(signal.square().sum()), rel=0.1)


def test_batches_without_replacement_scatter_less():
    """Samples of gradients 0 and 2 with mean 1, a fourth of them a batch: what N leaves out is 6 times what is left."""
    count, batch = 40, 10
    generator = torch.Generator().manual_seed(0)
    gradients = torch.tensor([0.0, 2.0]).repeat(count // 2)
    momentum, average, total, steps, noise = 10.0, 1.0, 0.0, 0, Noise()
    for _ in range(400):
        for indices in torch.randperm(count, generator=generator).split(batch):
            gradient = float(gradients[indices].mean())
            momentum = MU * momentum + gradient
            average += 0.01 * (gradient**2 - average)
            total += ((1 - MU) * momentum) ** 2
            steps += 1
    noise = noise.with_reading(Squares(average, total / steps, STEPS, count), batch)
    assert noise.scale == pytest.approx(1.0, rel=0.35)
    assert Noise().with_reading(Squares(average, total / steps, STEPS, 10**9), batch).signal < noise.signal


def test_a_gradient_that_turns_tells_nothing_and_a_pure_one_has_no_noise():
    turning = Noise().with_reading(Squares(step=19.0, momentum=0.9, steps=19.0, samples=10**9), 96)
    assert turning.signal < 0 and turning.scale is None
    clean = Noise().with_reading(Squares(step=2.0, momentum=2.0, steps=19.0, samples=10**9), 96)
    assert clean.scale == 0.0
    assert Noise().scale is None


@pytest.mark.parametrize(
    "squares", [Squares(math.nan, 1.0, 19.0, 100), Squares(1.0, math.inf, 19.0, 100), Squares(2.0, 1.0, 1.0, 100)]
)
def test_a_reading_that_tells_nothing_changes_nothing(squares):
    before = Noise(1.0, 2.0)
    assert before.with_reading(squares, 96) == before


RULES = compose(["method=triaccel", "method.batch.growth=noise", "method.batch.noise_share=0.5"]).method.batch


def seen(batch: int) -> rungs.Seen:
    return rungs.Seen(peaks={batch - 32: 10 * (batch - 32), batch: 10 * batch})


@pytest.mark.parametrize(
    ("scale", "batch", "reason"),
    [
        (None, 96, "no gradient stands out of the noise"),
        (0.0, 96, "a gradient noise scale of 0 is no larger batch"),
        (254.0, 96, "a gradient noise scale of 254 is no larger batch"),
        (256.0, 128, "grow"),
        (350.0, 160, "grow"),
        (1e6, 192, "grow"),
    ],
)
def test_the_batch_grows_no_further_than_its_samples_are_worth(scale, batch, reason):
    reading = rungs.Reading(96, 960, 4000)
    found, words = rungs.next_rung(reading, seen(96), RULES, scale)
    assert found == batch and reason in words


def test_a_batch_below_a_rung_grows_by_one_rung():
    rules = RULES.model_copy(update={"initial": 16, "min": 16})
    assert rungs.next_rung(rungs.Reading(16, 160, 4000), seen(16), rules, 1e5)[0] == 48
    assert rungs.next_rung(rungs.Reading(16, 160, 4000), seen(16), rules, 60.0)[0] == 16


def test_memory_holds_the_batch_whatever_the_noise():
    batch, words = rungs.next_rung(rungs.Reading(96, 960, 1700), seen(96), RULES, 1e6)
    assert batch == 128 and "is predicted at" in words


def test_a_noise_scale_that_falls_shrinks_nothing_but_memory_does():
    assert rungs.next_rung(rungs.Reading(256, 2560, 4000), seen(256), RULES, 100.0)[0] == 256
    assert rungs.next_rung(rungs.Reading(256, 2560, 2600), seen(256), RULES, 1e6)[0] < 256
    model = RULES.model_copy(update={"growth": "model"})
    assert rungs.next_rung(rungs.Reading(96, 960, 4000), seen(96), model, 0.0)[0] == 352


def test_a_run_measures_it_and_says_so_in_the_trace():
    made, run = trainer(
        settings(
            "method=triaccel_batch", "method.batch.growth=noise", "memory.budget=10", "epochs=8",
            "method.control.interval=20", "method.batch.initial=16", "method.batch.min=16", "method.batch.max=64",
            "method.batch.up=16", "method.batch.down=16",
        ),
        images(train=192),
    )  # fmt: skip
    trace = made.train()
    assert trace.decisions[0].variance is not None
    assert any(each.noise_scale is not None for each in trace.decisions)
    reading = made.engine.read()
    layers = len(made.network.layers)
    weights = [layer.weight.detach() for layer in made.network.layers.values()]
    momenta = made.engine.sgd.momenta[:layers]
    expected = sum(float((0.1 * m - 5e-4 * w).square().sum()) for m, w in zip(momenta, weights, strict=True))
    assert reading.momentum_square == pytest.approx(expected, rel=1e-4)


def test_what_cannot_tell_gradient_from_noise_is_refused():
    with pytest.raises(
        SettingsError, match="optimizer.momentum=0.0 and method.control.interval=100: expected momentum above 0"
    ):
        compose(["method=triaccel_batch", "method.batch.growth=noise", "optimizer.momentum=0.0"])
    with pytest.raises(SettingsError, match="an interval of at least .* = 20, over which"):
        compose(["method=triaccel_batch", "method.batch.growth=noise", "method.control.interval=19"])
    compose(["method=fp32", "method.batch.growth=noise", "optimizer.momentum=0.0"])
