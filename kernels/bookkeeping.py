"""The scalars of training on the device: learning rate, loss scale and counters, moved on in one launch a step."""

# Without the postponed annotations of other files: Triton 3.2's interpreter needs `tl.constexpr` itself, not its name.

import math

import torch
from torch import Tensor

from triaccel_bench.kernels.backend import require_backend, tl, triton

COUNTERS = (
    "loss_sum",
    "loss_samples",
    "correct",
    "samples",
    "samples_applied",
    "steps_skipped",
    "consecutive_skips",
    "longest_skip_run",
)
"""What the elements of ``StepScalars.counters`` count."""
APPLIED, RUN, LONGEST = (COUNTERS.index(name) for name in ("samples_applied", "consecutive_skips", "longest_skip_run"))
SAMPLES_AT_ONCE = 1024
"""Samples whose losses are read in one go."""
MOST_FLAGS = 8
"""Parts of a step whose gradients may be checked apart."""


def begin_reference(scalars: "StepScalars", batch: int) -> None:
    """What ``StepScalars.begin`` computes, in torch operations that can be captured; ``learning_rate`` is written."""
    base_lr, warmup, warmup_divisor, end, span, half_pi, _, _ = scalars._settings.unbind()
    position = scalars.counters[APPLIED] + 0.5 * batch
    remaining = ((end - position) / span).clamp(0.0, 1.0)
    curve = torch.where(position < warmup, position / warmup_divisor, torch.sin(half_pi * remaining).square())
    scalars.learning_rate.copy_((base_lr * curve).float() * scalars.rate_factor)


@torch.no_grad()
def advance_reference(scalars: "StepScalars", losses: Tensor, correct: Tensor, nonfinite: Tensor, scaled: bool) -> None:
    """What ``StepScalars.advance`` computes, in torch operations that can be captured; ``scalars`` is written."""
    counters, batch = scalars.counters, losses.numel()
    nonfinite = nonfinite if nonfinite.numel() == 1 else nonfinite.amax(0, keepdim=True)
    skipped = nonfinite[0].double()
    begin_reference(scalars, batch)

    _invert(scalars.loss_scale, scaled, scalars.applied_inverse_scale)
    if scaled:
        torch._amp_update_scale_(scalars.loss_scale, scalars.growth_tracker, nonfinite, *scalars._scaling)
    _invert(scalars.loss_scale, scaled, scalars.inverse_scale)

    total = losses.double().sum()
    counted = torch.isfinite(total).double() * batch
    ahead = (
        total.nan_to_num(0.0, 0.0, 0.0),
        counted,
        correct.sum().double(),
        torch.full_like(counted, batch),
        (1.0 - skipped) * batch,
        skipped,
    )
    run = (counters[RUN] + skipped) * skipped
    longest = torch.maximum(counters[LONGEST], run)
    counters.copy_(torch.cat((counters[:RUN] + torch.stack(ahead), torch.stack((run, longest)))))


if triton is not None:
    FLAGS = tl.constexpr(MOST_FLAGS)

    @triton.jit
    def _rate_at(settings, rate_factor, applied, size):
        """The learning rate of a step of ``size`` samples after ``applied`` of them, both FP64."""
        base_lr = tl.load(settings + 0)
        warmup = tl.load(settings + 1)
        warmup_divisor = tl.load(settings + 2)
        end = tl.load(settings + 3)
        span = tl.load(settings + 4)
        half_pi = tl.load(settings + 5)
        position = applied + 0.5 * size
        remaining = tl.minimum(tl.maximum((end - position) / span, 0.0), 1.0)
        wave = tl.sin(half_pi * remaining)
        curve = tl.where(position < warmup, position / warmup_divisor, wave * wave)
        return (base_lr * curve).to(tl.float32) * tl.load(rate_factor)

    @triton.jit(do_not_specialize=["rate_factor", "batch"])
    def _begin_kernel(settings, rate_factor, counters, learning_rate, batch):
        applied = tl.load(counters + 4)
        tl.store(learning_rate, _rate_at(settings, rate_factor, applied, batch.to(tl.float64)))

    @triton.jit(
        do_not_specialize=[
            "losses",
            "correct",
            "nonfinite",
            "rate_factor",
            "batch",
            "flags",
            "scaled",
            "growth_interval",
        ]
    )
    def _advance_kernel(
        losses,
        correct,
        nonfinite,
        settings,
        rate_factor,
        counters,
        learning_rate,
        loss_scale,
        inverse_scale,
        applied_inverse_scale,
        growth_tracker,
        batch,
        flags,
        scaled,
        growth_interval,
        AT_ONCE: tl.constexpr,
    ):
        """One program: everything is read, then everything is written."""
        loss_sum = tl.load(counters + 0)
        loss_samples = tl.load(counters + 1)
        right = tl.load(counters + 2)
        samples = tl.load(counters + 3)
        applied = tl.load(counters + 4)
        steps_skipped = tl.load(counters + 5)
        run = tl.load(counters + 6)
        longest = tl.load(counters + 7)
        growth_factor = tl.load(settings + 6)
        backoff_factor = tl.load(settings + 7)
        scale = tl.load(loss_scale)
        tracker = tl.load(growth_tracker)
        part = tl.arange(0, FLAGS)
        bad = tl.max(tl.load(nonfinite + part, mask=part < flags, other=0.0), axis=0) != 0.0

        partial_losses = tl.zeros((AT_ONCE,), tl.float64)
        partial_right = tl.zeros((AT_ONCE,), tl.int32)
        begin = 0
        # `while`, as a range over a run-time bound fails in the interpreter of Triton 3.6 with numpy 2.4.
        while begin < batch:
            place = begin + tl.arange(0, AT_ONCE)
            live = place < batch
            partial_losses += tl.load(losses + place, mask=live, other=0.0).to(tl.float64)
            partial_right += tl.load(correct + place, mask=live, other=0)
            begin += AT_ONCE
        total = tl.sum(partial_losses, axis=0)
        # Every thread has read the old state before one of them writes the new one.
        tl.debug_barrier()

        size = batch.to(tl.float64)
        finite = tl.abs(total) < float("inf")
        run = tl.where(bad, run + 1.0, 0.0)
        tl.store(counters + 0, loss_sum + tl.where(finite, total, 0.0))
        tl.store(counters + 1, loss_samples + tl.where(finite, size, 0.0))
        tl.store(counters + 2, right + tl.sum(partial_right, axis=0).to(tl.float64))
        tl.store(counters + 3, samples + size)
        tl.store(counters + 4, applied + tl.where(bad, 0.0, size))
        tl.store(counters + 5, steps_skipped + tl.where(bad, 1.0, 0.0))
        tl.store(counters + 6, run)
        tl.store(counters + 7, tl.maximum(longest, run))

        tl.store(learning_rate, _rate_at(settings, rate_factor, applied, size))

        # In FP64: an FP32 division here is approximate, and _amp_update_scale_ multiplies by doubles as well.
        wide = scale.to(tl.float64)
        is_scaled = scaled != 0
        grown = (wide * growth_factor).to(tl.float32)
        grown = tl.where(tl.abs(grown) < float("inf"), grown, scale)
        reached = tracker + 1 == growth_interval
        following = tl.where(bad, (wide * backoff_factor).to(tl.float32), tl.where(reached, grown, scale))
        following = tl.where(is_scaled, following, scale)
        tracker = tl.where(is_scaled, tl.where(bad | reached, 0, tracker + 1), tracker)
        tl.store(loss_scale, following)
        tl.store(growth_tracker, tracker)
        tl.store(applied_inverse_scale, tl.where(is_scaled, 1.0 / wide, 1.0).to(tl.float32))
        tl.store(inverse_scale, tl.where(is_scaled, 1.0 / following.to(tl.float64), 1.0).to(tl.float32))


class StepScalars:
    """Every scalar of a training step, on the device and fixed in place: a captured graph reads and writes them.

    Learning rate at position s, the samples of applied updates at the middle of the batch, for
    base rate b, warm-up W, total N (in FP64, stored as FP32), times the rate factor:

        b s / W  for s < W,  else  b (1 + cos(pi p)) / 2 = b sin^2(pi (1 - p) / 2),  p = (s - W) / (N - W) in [0, 1].

    The squared sine keeps its digits where the rate goes to zero.

    A step reads its inverse scale twice, and the loss scale moves on in between. ``inverse_scale``
    belongs to the coming step: between steps it is 1 / ``loss_scale`` if that step is scaled, else
    1, and whatever runs before ``advance`` (gradient statistics) reads it. ``advance`` leaves what
    it was in ``applied_inverse_scale``, which the weight update after it reads. Where weights are
    updated before ``advance``, ``begin`` tells their learning rate, and ``inverse_scale`` is theirs.

    Args:
        base_lr: rate at the end of the warm-up.
        warmup_samples: samples of the linear warm-up, 0 for none.
        total_samples: samples at which the rate reaches zero.
        initial_scale: loss scale at the start.
        growth_factor: what the loss scale is multiplied by after ``growth_interval`` good steps in
            a row, unless it would leave FP32's range.
        backoff_factor: what it is multiplied by after a bad one.
        growth_interval: a number of steps.
        device: where the tensors live.
        backend: ``"triton"`` (one launch a step) or ``"torch"`` (the reference).

    Attributes:
        counters: f64 ``[8]``, cumulative, in the order of ``COUNTERS``.
        learning_rate: f32 scalar, of the step last begun or advanced; 0 before.
        rate_factor: f32 scalar, 1 at the start; set it with ``fill_``.
        loss_scale: f32 scalar. Who writes it calls ``set_scaled`` afterwards.
        growth_tracker: int32 scalar, good steps since the scale last changed.
        inverse_scale: f32 scalar, for the coming step; 1 until ``set_scaled(True)``.
        applied_inverse_scale: f32 scalar, for the update of the step last advanced.

    Raises:
        ValueError: the backend cannot run on the device, or ``growth_interval`` is not positive.
    """

    def __init__(
        self,
        base_lr: float,
        warmup_samples: int,
        total_samples: int,
        initial_scale: float,
        growth_factor: float,
        backoff_factor: float,
        growth_interval: int,
        device: torch.device | str,
        backend: str,
    ) -> None:
        if growth_interval < 1:
            raise ValueError(f"growth_interval: expected at least 1, got {growth_interval}; pass a number of steps")
        self.counters = torch.zeros(len(COUNTERS), dtype=torch.float64, device=device)
        self.learning_rate = torch.zeros((), device=device)
        self.rate_factor = torch.ones((), device=device)
        self.loss_scale = torch.full((), float(initial_scale), device=device)
        self.growth_tracker = torch.zeros((), dtype=torch.int32, device=device)
        self.inverse_scale = torch.ones((), device=device)
        self.applied_inverse_scale = torch.ones((), device=device)
        require_backend(backend, self.counters.device)
        self._triton = backend == "triton"
        self._scaling = float(growth_factor), float(backoff_factor), int(growth_interval)
        span = max(total_samples - warmup_samples, 1)
        # A Python float would reach the kernel as FP32; in a tensor it keeps its digits.
        self._settings = torch.tensor(
            [
                base_lr,
                warmup_samples,
                max(warmup_samples, 1),
                warmup_samples + span,
                span,
                math.pi / 2,
                growth_factor,
                backoff_factor,
            ],
            dtype=torch.float64,
            device=device,
        )

    @property
    def state(self) -> list[Tensor]:
        """All that steps and their caller write, where it stays: the seven attributes."""
        scales = self.loss_scale, self.growth_tracker, self.inverse_scale, self.applied_inverse_scale
        return [self.counters, self.learning_rate, self.rate_factor, *scales]

    @torch.no_grad()
    def set_scaled(self, scaled: bool) -> None:
        """Say, between steps and outside of capture, whether the coming steps scale their loss; waits for nothing."""
        _invert(self.loss_scale, scaled, self.inverse_scale)

    @torch.no_grad()
    def begin(self, batch: int) -> None:
        """Learning rate of the coming step, of ``batch`` samples, as ``advance`` will compute it; may be captured."""
        if not self._triton:
            begin_reference(self, batch)
            return
        with torch.cuda.device_of(self.counters):
            _begin_kernel[(1,)](self._settings, self.rate_factor, self.counters, self.learning_rate, batch, num_warps=1)

    @torch.no_grad()
    def advance(self, losses: Tensor, correct: Tensor, nonfinite: Tensor, scaled: bool) -> None:
        """Take in one step, after the check of its gradients; may be captured.

        Learning rate of this step; ``applied_inverse_scale`` for its update; then loss scale,
        ``growth_tracker`` and ``inverse_scale`` for the next step, as ``torch._amp_update_scale_``
        computes them (only if ``scaled``); then the counters. The losses are summed in FP64 and in a
        fixed order; they count only if all of them are finite. A skipped step adds its samples to
        ``samples`` but not to ``samples_applied``, so that it does not move the schedule.

        Args:
            losses: f32 ``[B]``, unscaled, for any B > 0.
            correct: int32 ``[B]``, 1 where the answer is right, else 0.
            nonfinite: f32 ``[n]`` for n up to 8 parts of the step; 1.0 where one is skipped, else 0.0. A step of
                which any part is skipped counts as skipped.
            scaled: whether this step's loss was multiplied by ``loss_scale``.

        Raises:
            ValueError: an argument differs from this in shape, dtype or device.
        """
        expected = {
            "losses": (losses, torch.float32, max(losses.numel(), 1)),
            "correct": (correct, torch.int32, losses.numel()),
            "nonfinite": (nonfinite, torch.float32, min(max(nonfinite.numel(), 1), MOST_FLAGS)),
        }
        device = self.counters.device
        for name, (tensor, dtype, size) in expected.items():
            if (tensor.dtype, tensor.shape, tensor.device) != (dtype, (size,), device) or not tensor.is_contiguous():
                raise ValueError(
                    f"{name}: expected contiguous {dtype} [{size}] on {device}, got {tensor.dtype} "
                    f"{list(tensor.shape)} with strides {list(tensor.stride())} on {tensor.device}; "
                    "pass what cross_entropy and GradientMoments return"
                )
        if not self._triton:
            advance_reference(self, losses, correct, nonfinite, scaled)
            return
        with torch.cuda.device_of(self.counters):
            _advance_kernel[(1,)](
                losses,
                correct,
                nonfinite,
                self._settings,
                self.rate_factor,
                self.counters,
                self.learning_rate,
                self.loss_scale,
                self.inverse_scale,
                self.applied_inverse_scale,
                self.growth_tracker,
                losses.numel(),
                nonfinite.numel(),
                int(scaled),
                self._scaling[2],
                AT_ONCE=SAMPLES_AT_ONCE,
                num_warps=4,
            )


def _invert(scale: Tensor, scaled: bool, out: Tensor) -> None:
    if scaled:
        torch.reciprocal(scale, out=out)
    else:
        out.fill_(1.0)
