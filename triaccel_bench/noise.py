"""How large a batch the gradient's own noise makes worth its samples. Pure functions on the host.

For the gradient G of the mean loss over N training samples and the covariance S of one sample's, a batch of B of them,
drawn without replacement, has E|g_B|^2 = |G|^2 + tr(S) (1 / B - 1 / N). Two batch sizes tell both (McCandlish et al.,
"An Empirical Model of Large-Batch Training", 2018, appendix A.1): the step's, and that of momentum, whose running
average (1 - mu) m_t = (1 - mu) sum_i mu^i g_(t-i) scatters as the gradient of (1 + mu) / (1 - mu) times as many samples
would, while the gradient itself stays about the same. tr(S) / |G|^2 is the gradient noise scale: a batch far below it
loses no progress a sample, one far above gains none a step.

A gradient that turns within momentum's memory (steps across a valley) adds to the apparent noise, so the scale is
an upper estimate; where momentum's average is shorter than even noise alone would leave it, nothing is told.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

BLEND = 0.3
"""Share of a new reading in the averages, which are taken apart: a ratio of single readings scatters without bound."""


@dataclass(frozen=True)
class Squares:
    """Square norms over the weights of the named layers.

    Attributes:
        step: |g_B|^2, averaged over the last steps.
        momentum: |(1 - mu) m|^2 without weight decay's part.
        steps: (1 + mu) / (1 - mu), by how much momentum's average enlarges the batch.
        samples: N.
    """

    step: float
    momentum: float
    steps: float
    samples: int


@dataclass(frozen=True)
class Noise:
    """Averages of |G|^2 and tr(S); ``None`` before the first reading."""

    signal: float | None = None
    spread: float | None = None

    def with_reading(self, squares: Squares, batch: int) -> Noise:
        """As ``self`` after one more reading at ``batch``; one that is not finite changes nothing."""
        if not math.isfinite(squares.step + squares.momentum) or squares.steps <= 1:
            return self
        spread = (squares.step - squares.momentum) * batch / (1 - 1 / squares.steps)
        signal = squares.step - spread * (1 / batch - 1 / squares.samples)
        return Noise(_blended(self.signal, signal), _blended(self.spread, spread))

    @property
    def scale(self) -> float | None:
        """Samples; 0 where there is no noise, ``None`` where nothing was measured or no gradient is left beside it."""
        if self.signal is None or self.signal <= 0:
            return None
        return max(0.0, self.spread) / self.signal


def _blended(average: float | None, value: float) -> float:
    return value if average is None else average + BLEND * (value - average)
