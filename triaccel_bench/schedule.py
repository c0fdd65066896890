"""The learning-rate schedule as a pure function of samples (section 4.3: warm-up, then cosine)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up over ``warmup_samples``, then a half cosine to zero at ``total_samples``.

    Counting samples of applied updates, not calls, keeps methods with different batch sizes
    and with skipped steps on the same curve.
    """

    base_lr: float
    warmup_samples: int
    total_samples: int

    def __call__(self, position: Tensor) -> Tensor:
        """Learning rate at ``position`` applied samples (0-dim float64 tensor, any device) as float32."""
        warm = position / max(self.warmup_samples, 1)
        cosine = 0.5 * (1.0 + torch.cos(math.pi * self._progress(position).clamp(0.0, 1.0)))
        return (self.base_lr * torch.where(position < self.warmup_samples, warm, cosine)).float()

    def share_of_peak(self, samples: int) -> float:
        """How far the cosine has let the rate fall after ``samples`` applied ones, from 1 to 0; 1 during warm-up."""
        return 0.5 * (1.0 + math.cos(math.pi * min(max(self._progress(samples), 0.0), 1.0)))

    def _progress(self, samples: Any) -> Any:
        return (samples - self.warmup_samples) / max(self.total_samples - self.warmup_samples, 1)


def make_schedule(base_lr: float, epochs: int, warmup_epochs: int, samples_per_epoch: int) -> Schedule:
    """Warm-up lasts ``warmup_epochs``, or ``epochs // 4`` where that is shorter."""
    warmup = min(warmup_epochs, epochs // 4)
    return Schedule(base_lr, warmup * samples_per_epoch, epochs * samples_per_epoch)


def batch_rate_factor(rule: str, batch: int, initial: int) -> float:
    """How eta_0 follows the batch size: 1, sqrt(B / B0) or B / B0."""
    ratio = batch / initial
    return {"none": 1.0, "sqrt": math.sqrt(ratio), "linear": ratio}[rule]
