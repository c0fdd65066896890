"""One step: what it does to weights, statistics, loss scale and counters, and what a bad step leaves alone."""

import warnings

import pytest
import torch
from tiny import engine
from torch.nn import functional

from triaccel_bench.schedule import Schedule

FP16 = ["fp16"] * 10


def batch(size: int = 16, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 3, 8, 8, generator=generator), torch.randint(0, 10, (size,), generator=generator)


def poison(made, value=float("inf")):
    """Leave gradients of which one element is not finite, as an overflowing loss does."""
    losses, correct = made.forward_backward(*batch())
    made._leaves[-1].grad[0] = value
    made.update(losses, correct)


def test_fp32_step_is_plain_sgd():
    made = engine("method=fp32", schedule=Schedule(0.1, 0, 10_000))
    plain = engine("method=fp32").network.module
    optimizer = torch.optim.SGD(plain.parameters(), lr=1.0, momentum=0.9, weight_decay=5e-4)
    for step in range(5):
        images, labels = batch(seed=step)
        made.step(images, labels)
        optimizer.param_groups[0]["lr"] = made.read().learning_rate
        optimizer.zero_grad()
        functional.cross_entropy(plain(images), labels).backward()
        optimizer.step()
    for ours, theirs in zip(made.network.module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_skipped_steps_do_not_move_the_schedule():
    """Two of four batches overflow: the rate is the one after two applied batches, and nobody warns of call order."""
    made = engine(plan=FP16, schedule=Schedule(0.1, 64, 640))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        poison(made)
        poison(made)
        for seed in range(2):
            made.step(*batch(seed=seed))
    reading = made.read()
    assert (reading.steps_skipped, reading.samples_applied, reading.samples) == (2, 32, 64)
    assert (reading.consecutive_skips, reading.longest_skip_run) == (0, 2)
    expected = Schedule(0.1, 64, 640)(torch.tensor(16 + 8, dtype=torch.float64)).item()
    assert reading.learning_rate == pytest.approx(expected)
    assert reading.loss_scale == 65536 / 4


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_bad_step_leaves_weights_momentum_and_statistics_alone(value):
    made = engine(plan=FP16)
    made.step(*batch())
    weights = [p.detach().clone() for p in made.network.module.parameters()]
    momenta = [m.clone() for m in made.sgd.momenta]
    ema = made.moments.ema.clone()
    poison(made, value)
    assert all(torch.equal(a, b) for a, b in zip(weights, made.network.module.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(momenta, made.sgd.momenta, strict=True))
    assert torch.equal(ema, made.moments.ema) and torch.isfinite(ema).all()
    made.step(*batch(seed=1))
    assert made.read().steps_skipped == 1


def test_statistics_do_not_depend_on_the_loss_scale():
    """Scales 1 and 65536 give the same moving averages: they are taken after unscaling."""
    readings = []
    for scale in (1.0, 65536.0):
        made = engine(f"method.loss_scale.initial={scale}")
        # Scaling without FP16 rounding, which would differ between scales by itself.
        made._scaled = True
        made.scalars.set_scaled(True)
        for step in range(20):
            made.step(*batch(seed=step))
        readings.append(torch.tensor(made.read().variance))
    torch.testing.assert_close(readings[0], readings[1], rtol=1e-3, atol=0)


def test_loss_scale_follows_grad_scaler():
    made = engine("method.loss_scale.growth_interval=2", plan=FP16)
    reference = torch.amp.GradScaler("cpu", 65536.0, growth_interval=2)
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for bad in (True, False, False, False, True, False, False):
        poison(made) if bad else made.step(*batch())
        reference.scale(weight.sum()).backward()
        if bad:
            weight.grad.fill_(float("inf"))
        reference.step(optimizer)
        reference.update()
        optimizer.zero_grad()
        assert made.read().loss_scale == reference.get_scale()


def test_variance_is_that_of_the_weight_gradients_times_the_batch_ratio():
    made = engine()
    images, labels = batch(8)
    losses, correct = made.forward_backward(images, labels)
    expected = [layer.weight.grad.double().var(correction=0).item() * 8 / 16 for layer in made.network.layers.values()]
    made.update(losses, correct)
    assert made.read().variance == pytest.approx(expected, rel=1e-5)


def test_rates_scale_their_layer_only_and_its_bias_with_it():
    def change(rates):
        made = engine("method=fp32")
        before = {name: p.detach().clone() for name, p in made.network.module.named_parameters()}
        made.set_rates(rates, 1.0)
        made.step(*batch())
        return {name: p.detach() - before[name] for name, p in made.network.module.named_parameters()}

    full, half = change([1.0] * 10), change([1.0] * 9 + [0.5])
    for name in full:
        factor = 0.5 if name.startswith("fc.") else 1.0
        torch.testing.assert_close(half[name], factor * full[name], rtol=1e-4, atol=1e-8)


def test_train_loss_and_accuracy_are_weighted_by_samples():
    made = engine("method=fp32", "optimizer.lr=1e-30")
    losses, correct = [], 0
    for size in (16, 7, 16, 3):
        images, labels = batch(size, seed=size)
        with torch.no_grad():
            logits = made.network.module(images)
        losses.append(functional.cross_entropy(logits, labels, reduction="sum").item())
        correct += (logits.argmax(1) == labels).sum().item()
        made.step(images, labels)
    reading = made.read()
    assert reading.samples == reading.loss_samples == 42
    assert reading.loss_sum == pytest.approx(sum(losses), rel=1e-5)
    assert reading.correct == correct


@pytest.mark.parametrize("size", [1, 7, 96, 1000])
def test_evaluation_counts_every_image_once_whatever_the_batch(size):
    """10,000 predictions of which the last 16 are right and 70 % of the others: 70.05 %, not a mean of batch means."""
    made = engine("method=fp32")
    count = 10_000
    right = torch.arange(count) < 6_989
    right[-16:] = True
    labels = torch.randint(0, 10, (count,))
    answers = torch.where(right, labels, (labels + 1) % 10)
    place = iter(range(0, count, size))

    class Answers(torch.nn.Module):
        def forward(self, images):
            start = next(place)
            return functional.one_hot(answers[start : start + size], 10).float()

    made.network = type(made.network)(Answers(), {}, {}, ())
    batches = ((torch.zeros(len(part), 1), part) for part in labels.split(size))
    loss_sum, correct, samples = made.evaluate(batches)
    assert (correct, samples) == (7_005, count)


def test_evaluation_leaves_training_mode_and_buffers_alone():
    made = engine("method=fp32")
    made.network.module.train()
    buffers = {name: value.clone() for name, value in made.network.module.named_buffers()}
    made.evaluate([batch()])
    assert made.network.module.training
    assert all(torch.equal(value, buffers[name]) for name, value in made.network.module.named_buffers())


def test_statistics_are_not_kept_for_static_methods():
    made = engine("method=amp", plan=FP16)
    made.step(*batch())
    assert made.read().variance is None


def test_on_a_cpu_steps_run_eagerly_and_the_reason_is_known():
    made = engine("method=fp32")
    made.step(*batch())
    assert made.captured.eager_reason == "no CUDA graphs on a cpu device"
    assert (made.captured.count, made.captured.seconds, made.captured.replayed_bytes) == (0, 0.0, 0)


def test_a_plan_may_change_between_steps():
    """Copies of 16-bit layers come and go, and the update goes on from the FP32 weights."""
    made = engine(schedule=Schedule(0.01, 0, 10_000))
    for step, plan in enumerate((["fp32"] * 10, FP16, ["bf16", "fp16"] * 5, ["fp32"] * 10)):
        made.set_plan(plan)
        made.step(*batch(seed=step))
        for copy, parameter in zip(made._copies.of_parameters, made._parameters, strict=True):
            assert copy is None or torch.equal(copy, parameter.to(copy.dtype))
    reading = made.read()
    assert reading.samples_applied == 64 and reading.loss_samples == 64
