"""The one host read-back of a control step: counters, statistics, loss scale and learning rate in a single copy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from triaccel_bench.kernels.bookkeeping import COUNTERS, StepScalars
from triaccel_bench.kernels.moments import GradientMoments


@dataclass(frozen=True)
class Reading:
    """What one host read-back brings: cumulative counters, statistics, loss scale and learning rate."""

    loss_sum: float
    """Sum over samples of the losses that were finite."""
    loss_samples: int
    correct: int
    samples: int
    samples_applied: int
    steps_skipped: int
    consecutive_skips: int
    """Skipped steps up to now without an applied one between."""
    longest_skip_run: int
    learning_rate: float
    loss_scale: float
    variance: tuple[float, ...] | None
    """v_l(t), the EMA over applied steps; ``None`` before the first one or without statistics."""


def start_reading(scalars: StepScalars, moments: GradientMoments | None) -> Callable[[], Reading]:
    """Begin to read everything as of now; the call that is returned waits for it, but for nothing begun since.

    Args:
        moments: ``None`` where there are no statistics.
    """
    parts = [scalars.counters, scalars.learning_rate[None].double(), scalars.loss_scale[None].double()]
    if moments is not None:
        parts += [moments.updates.double(), moments.ema.double()]
    values = torch.cat(parts)
    if not values.is_cuda:
        return partial(_reading_of, values)
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def finish() -> Reading:
        copied.synchronize()
        return _reading_of(host)

    return finish


def _reading_of(host: Tensor) -> Reading:
    values = host.tolist()
    counters = dict(zip(COUNTERS, values, strict=False))
    loss_sum = counters.pop("loss_sum")
    learning_rate, loss_scale, *statistics = values[len(COUNTERS) :]
    return Reading(
        loss_sum=loss_sum,
        **{name: int(value) for name, value in counters.items()},
        learning_rate=learning_rate,
        loss_scale=loss_scale,
        variance=tuple(statistics[1:]) if statistics and statistics[0] > 0 else None,
    )
