"""Learning rate, loss scale and counters on the device: each backend against plain arithmetic and torch's own."""

from __future__ import annotations

import math

import pytest
import torch
from places import (  # noqa: F401
    assert_passes_in_the_interpreter,
    gpu,
    needs_card,
    on_every_backend,
    once,
    poisoned_memory,
    variants,
)

from triaccel_bench.kernels import bookkeeping
from triaccel_bench.kernels.backend import INTERPRETED, triton
from triaccel_bench.kernels.bookkeeping import APPLIED, COUNTERS, StepScalars
from triaccel_bench.schedule import Schedule

INF, NAN = math.inf, math.nan
TENSORS = (
    "counters",
    "learning_rate",
    "rate_factor",
    "loss_scale",
    "growth_tracker",
    "inverse_scale",
    "applied_inverse_scale",
)


def new_scalars(place, base_lr=0.1, warmup=64, total=640, scale=65536.0, growth=2.0, backoff=0.5, interval=2000):
    backend, device = place
    return StepScalars(base_lr, warmup, total, scale, growth, backoff, interval, device, backend)


def step_inputs(size: int, seed: int, device: str, bad: bool = False):
    generator = torch.Generator().manual_seed(seed)
    losses = torch.rand(size, generator=generator) * 3.0
    correct = torch.randint(0, 2, (size,), generator=generator).int()
    return losses.to(device), correct.to(device), torch.full((1,), float(bad), device=device)


def fp32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()


def sine_rate(schedule: Schedule, position: float) -> float:
    """The schedule in a form that keeps its digits where the rate goes to zero."""
    if position < schedule.warmup_samples:
        return schedule.base_lr * position / schedule.warmup_samples
    rest = (schedule.total_samples - position) / (schedule.total_samples - schedule.warmup_samples)
    return schedule.base_lr * math.sin(0.5 * math.pi * min(max(rest, 0.0), 1.0)) ** 2


class Ledger:
    """The same scalars in Python's double precision."""

    def __init__(self, schedule: Schedule, scale: float, growth: float, backoff: float, interval: int) -> None:
        self.counters = dict.fromkeys(COUNTERS, 0.0)
        self.schedule, self.scale, self.tracker = schedule, scale, 0
        self.growth, self.backoff, self.interval = growth, backoff, interval

    def advance(self, losses: list[float], correct: list[int], bad: bool, scaled: bool, factor: float) -> None:
        counters, size = self.counters, len(losses)
        middle = torch.tensor(counters["samples_applied"] + 0.5 * size, dtype=torch.float64)
        self.learning_rate = self.schedule(middle).item() * factor
        self.applied_inverse = 1.0 / self.scale if scaled else 1.0
        if scaled and bad:
            self.scale, self.tracker = fp32(self.scale * self.backoff), 0
        elif scaled:
            self.tracker += 1
            if self.tracker == self.interval:
                grown = fp32(self.scale * self.growth)
                self.scale, self.tracker = grown if math.isfinite(grown) else self.scale, 0
        self.inverse = 1.0 / self.scale if scaled else 1.0
        mean = sum(losses) / size
        if math.isfinite(mean):
            counters["loss_sum"] += mean * size
            counters["loss_samples"] += size
        counters["correct"] += sum(correct)
        counters["samples"] += size
        counters["samples_applied"] += size * (1 - bad)
        counters["steps_skipped"] += bad
        counters["consecutive_skips"] = (counters["consecutive_skips"] + bad) * bad
        counters["longest_skip_run"] = max(counters["longest_skip_run"], counters["consecutive_skips"])


STEPS = [
    # (samples, skipped, one loss replaced by, scaled)
    (16, False, None, True),
    (1, True, INF, True),
    (7, True, None, True),
    (33, False, NAN, True),
    (130, False, None, False),
    (16, True, -INF, False),
    (33, False, None, True),
    (1, True, NAN, True),
    (7, False, None, True),
    (130, True, None, True),
    (130, False, None, True),
    (64, False, None, True),
    (300, False, None, True),
    (16, False, None, True),
]


@on_every_backend
@pytest.mark.parametrize("at_once", [32, 1024])
def test_a_training_of_good_and_bad_steps_is_book_kept_as_in_plain_arithmetic(place, at_once, monkeypatch):
    monkeypatch.setattr(bookkeeping, "SAMPLES_AT_ONCE", at_once)
    device = place[1]
    scalars = new_scalars(place, scale=1000.0, growth=1.7, backoff=0.3, interval=3)
    ledger = Ledger(Schedule(0.1, 64, 640), 1000.0, 1.7, 0.3, 3)
    addresses = [getattr(scalars, name).data_ptr() for name in TENSORS]
    for seed, (size, bad, replaced, scaled) in enumerate(STEPS):
        losses, correct, nonfinite = step_inputs(size, seed, device, bad)
        if replaced is not None:
            losses[size // 2] = replaced
        factor = 1.0 + 0.5 * seed
        scalars.rate_factor.fill_(factor)
        scalars.set_scaled(scaled)
        before = fp32(1.0 / ledger.scale) if scaled else 1.0
        assert scalars.inverse_scale.item() == before
        scalars.advance(losses, correct, nonfinite, scaled)
        ledger.advance(losses.tolist(), correct.tolist(), bad, scaled, factor)

        assert scalars.applied_inverse_scale.item() == before == fp32(ledger.applied_inverse)
        assert scalars.inverse_scale.item() == fp32(ledger.inverse)
        assert (scalars.loss_scale.item(), scalars.growth_tracker.item()) == (ledger.scale, ledger.tracker)
        counters = dict(zip(COUNTERS, scalars.counters.tolist(), strict=True))
        assert counters.pop("loss_sum") == pytest.approx(ledger.counters["loss_sum"], rel=1e-13)
        assert counters == {name: value for name, value in ledger.counters.items() if name != "loss_sum"}
        assert scalars.learning_rate.item() == pytest.approx(ledger.learning_rate, rel=1e-6)
    assert [getattr(scalars, name).data_ptr() for name in TENSORS] == addresses
    assert ledger.counters["longest_skip_run"] == 2 and ledger.counters["steps_skipped"] == 5


@on_every_backend
def test_loss_scale_follows_grad_scaler(place):
    scalars = new_scalars(place, scale=65536.0, interval=2)
    reference = torch.amp.GradScaler("cpu", 65536.0, growth_interval=2)
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for seed, bad in enumerate((True, False, False, False, True, True, False, False, False, False, True)):
        reference.scale(weight.sum()).backward()
        if bad:
            weight.grad.fill_(INF)
        reference.step(optimizer)
        reference.update()
        optimizer.zero_grad()
        scalars.advance(*step_inputs(1, seed, place[1], bad), scaled=True)
        assert scalars.loss_scale.item() == reference.get_scale()
        assert scalars.growth_tracker.item() == reference._get_growth_tracker()


@on_every_backend
@pytest.mark.parametrize("growth, expected", [(1.5, 1.5 * 2.0**127), (2.0, 2.0**127)])
def test_a_loss_scale_does_not_grow_out_of_range(place, growth, expected):
    scalars = new_scalars(place, scale=2.0**127, growth=growth, interval=1)
    scalars.advance(*step_inputs(1, 0, place[1]), scaled=True)
    assert (scalars.loss_scale.item(), scalars.growth_tracker.item()) == (expected, 0)
    assert scalars.inverse_scale.item() == fp32(1.0 / expected) > 0.0


@on_every_backend
def test_a_loss_scale_that_has_shrunk_to_nothing_behaves_as_in_torch(place):
    scalars = new_scalars(place, scale=2.0**-149)
    scalars.advance(*step_inputs(1, 0, place[1], bad=True), scaled=True)
    scale, tracker = torch.tensor(2.0**-149), torch.tensor(0, dtype=torch.int32)
    torch._amp_update_scale_(scale, tracker, torch.ones(1), 2.0, 0.5, 2000)
    assert scalars.loss_scale.item() == scale.item() == 0.0
    assert scalars.inverse_scale.item() == INF


@on_every_backend
def test_a_step_that_is_not_scaled_leaves_the_loss_scale_alone(place):
    scalars = new_scalars(place, scale=512.0, interval=1)
    assert (scalars.inverse_scale.item(), scalars.applied_inverse_scale.item()) == (1.0, 1.0)
    for bad in (False, True):
        scalars.advance(*step_inputs(3, 0, place[1], bad), scaled=False)
        assert (scalars.loss_scale.item(), scalars.growth_tracker.item()) == (512.0, 0)
        assert (scalars.inverse_scale.item(), scalars.applied_inverse_scale.item()) == (1.0, 1.0)
    scalars.set_scaled(True)
    assert (scalars.inverse_scale.item(), scalars.applied_inverse_scale.item()) == (1 / 512, 1.0)
    scalars.advance(*step_inputs(3, 0, place[1]), scaled=True)
    assert (scalars.inverse_scale.item(), scalars.applied_inverse_scale.item()) == (1 / 1024, 1 / 512)
    scalars.set_scaled(False)
    assert (scalars.inverse_scale.item(), scalars.applied_inverse_scale.item()) == (1.0, 1 / 512)


@on_every_backend
@pytest.mark.parametrize(
    "warmup, total, size", [(120, 400, 7), (300, 1000, 33), (0, 1000, 33), (1, 333, 7), (300, 1000, 130)]
)
def test_rate_is_that_of_the_schedule_over_the_whole_training(place, warmup, total, size):
    schedule = Schedule(0.1, warmup, total)
    scalars = new_scalars(place, warmup=warmup, total=total)
    inputs = step_inputs(size, 0, place[1])
    rates, middles = [], []
    for first in range(0, total + 2 * size, size):
        scalars.advance(*inputs, scaled=False)
        rates.append(scalars.learning_rate.clone())
        middles.append(first + 0.5 * size)
    expected = schedule(torch.tensor(middles, dtype=torch.float64))
    torch.testing.assert_close(torch.stack(rates).cpu(), expected, rtol=1e-6, atol=1e-16)
    assert rates[-1].item() == 0.0 and min(expected[:-3].tolist()) > 0.0


@on_every_backend
def test_rate_keeps_its_digits_in_a_long_training_and_at_its_end(place):
    schedule = Schedule(0.1, 250_000, 1_500_000)
    scalars = new_scalars(place, warmup=250_000, total=1_500_000)
    inputs = step_inputs(1, 0, place[1])
    for applied in (0, 1, 1234, 249_999, 250_000, 875_000, 1_400_000, 1_499_000, 1_499_990, 1_499_999, 1_500_000):
        scalars.counters[APPLIED].fill_(applied)
        scalars.advance(*inputs, scaled=False)
        rate, position = scalars.learning_rate.item(), applied + 0.5
        assert rate == pytest.approx(sine_rate(schedule, position), rel=2e-7, abs=0.0)
        # Next to zero 1 + cos has few digits left: a unit in its last place is all that can be asked of it.
        cosine = schedule(torch.tensor(position, dtype=torch.float64)).item()
        assert rate == pytest.approx(cosine, rel=1e-6, abs=0.1 * 2.0**-52)


@on_every_backend
@pytest.mark.parametrize("warmup, total", [(100, 100), (100, 50), (0, 0)])
def test_a_training_without_room_for_a_cosine_has_the_rates_of_the_schedule(place, warmup, total):
    schedule = Schedule(0.1, warmup, total)
    scalars = new_scalars(place, warmup=warmup, total=total)
    for applied in (0, 49, 99, 100, 150):
        scalars.counters[APPLIED].fill_(applied)
        scalars.advance(*step_inputs(1, 0, place[1]), scaled=False)
        expected = schedule(torch.tensor(applied + 0.5, dtype=torch.float64)).item()
        assert scalars.learning_rate.item() == pytest.approx(expected, rel=1e-6, abs=1e-16)


@on_every_backend
def test_the_rate_is_the_one_before_the_step_and_skipped_steps_do_not_move_it(place):
    scalars = new_scalars(place, warmup=64, total=640)
    schedule = Schedule(0.1, 64, 640)
    for seed, (bad, position) in enumerate([(True, 8), (True, 8), (False, 8), (False, 24)]):
        scalars.advance(*step_inputs(16, seed, place[1], bad), scaled=True)
        expected = schedule(torch.tensor(position, dtype=torch.float64)).item()
        assert scalars.learning_rate.item() == pytest.approx(expected, rel=1e-6)


@on_every_backend
def test_large_losses_count_as_long_as_each_is_finite(place):
    scalars = new_scalars(place)
    _, correct, nonfinite = step_inputs(4, 0, place[1])
    largest = torch.finfo(torch.float32).max
    scalars.advance(torch.full((4,), largest, device=place[1]), correct, nonfinite, scaled=False)
    assert scalars.counters[:2].tolist() == [4 * largest, 4.0]


def test_what_does_not_fit_is_refused():
    scalars = new_scalars(("triton" if INTERPRETED else "torch", "cpu"))
    losses, correct, nonfinite = step_inputs(4, 0, "cpu")
    for match, arguments in {
        r"losses: expected contiguous torch.float32 \[4\] on cpu, got torch.float64": (
            losses.double(),
            correct,
            nonfinite,
        ),
        "losses: expected": (losses[:0], correct[:0], nonfinite),
        r"losses: expected .* strides \[2\]": (losses[::2], correct[:2], nonfinite),
        "correct: expected contiguous torch.int32": (losses, correct.bool(), nonfinite),
        r"correct: expected contiguous torch.int32 \[4\]": (losses, correct[:3], nonfinite),
        r"nonfinite: expected contiguous torch.float32 \[1\]": (losses, correct, nonfinite[0]),
    }.items():
        with pytest.raises(ValueError, match=match):
            scalars.advance(*arguments, scaled=False)
    with pytest.raises(ValueError, match="growth_interval: expected at least 1, got 0"):
        new_scalars(("torch", "cpu"), interval=0)
    with pytest.raises(ValueError, match="backend='cuda'"):
        new_scalars(("cuda", "cpu"))


@once
@pytest.mark.skipif(triton is None, reason="needs Triton")
def test_the_triton_kernel_passes_this_file_in_the_interpreter():
    assert_passes_in_the_interpreter(__file__)


@gpu
@needs_card
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_replays_of_a_captured_step_keep_the_books_of_eager_steps(backend):
    captured, eager = (new_scalars((backend, "cuda"), scale=1000.0, interval=2) for _ in range(2))
    fixed = step_inputs(33, 0, "cuda")
    # Compiles what a capture cannot.
    new_scalars((backend, "cuda")).advance(*fixed, scaled=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.advance(*fixed, scaled=True)
    steps = [step_inputs(33, seed, "cuda", bad=seed % 3 == 0) for seed in range(8)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in steps:
            captured.set_scaled(True)
            eager.set_scaled(True)
            for tensor, value in zip(fixed, step, strict=True):
                tensor.copy_(value)
            graph.replay()
            eager.advance(*step, scaled=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for name in TENSORS:
        assert torch.equal(getattr(captured, name), getattr(eager, name)), name
    assert captured.counters[3].item() == 8 * 33


@gpu
@needs_card
def test_batch_sizes_and_scaling_share_one_compiled_kernel():
    kernel = bookkeeping._advance_kernel
    scalars = new_scalars(("triton", "cuda"))
    scalars.advance(*step_inputs(96, 0, "cuda"), scaled=True)
    before = variants(kernel)
    for size in (1, 2, 7, 16, 33, 128, 4096):
        new_scalars(("triton", "cuda"), interval=size).advance(*step_inputs(size, 0, "cuda"), scaled=size % 2 == 0)
    assert variants(kernel) == before
