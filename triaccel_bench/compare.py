"""How much two methods differ, from runs that share their seeds, and what may be claimed of it.

Methods are paired by seed: a seed fixes weights, order and augmentation, so that much of what its runs have in
common drops out of their difference. Differences of accuracy are in points; times, bytes and scores are compared as
ratios, through the differences of their logarithms. Knows nothing of runs. scipy is imported where it is needed,
since whoever only asks for help would wait for it.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

CONFIDENCE = 0.95
POWER = 0.80
"""With which ``detectable`` would have been found."""

Verdict = Literal["higher", "lower", "no claim"]


@dataclass(frozen=True)
class Difference:
    """A mean difference d over ``n`` seeds, or a geometric mean ratio, and how well it is known.

    The interval is Student's t, ``d +- t(1 - (1 - confidence) / 2, n - 1) s / sqrt(n)`` with the sample standard
    deviation ``s`` of the seeds' differences. Everything but the mean is None for a single seed.
    """

    mean: float
    n: int
    ratio: bool
    low: float | None = None
    high: float | None = None
    p: float | None = None
    """Two-sided, of a mean that is zero (a ratio that is one)."""
    detectable: float | None = None
    """The smallest true difference (of a ratio: excess over one) that n seeds so far apart show with ``POWER``."""
    standard_error: float | None = None
    """On the scale (difference or logarithm) of the test."""


def paired(ours: Mapping[int, float], theirs: Mapping[int, float], ratio: bool = False) -> Difference | None:
    """``ours - theirs``, or ``ours / theirs``, over the seeds that both have; ``None`` if they share none.

    Raises:
        ValueError: a value that is not finite, or for a ratio not positive.
    """
    shared = sorted(ours.keys() & theirs.keys())
    if not shared:
        return None
    pairs = [(ours[seed], theirs[seed]) for seed in shared]
    lowest = min(min(pair) for pair in pairs)
    if not all(math.isfinite(value) for pair in pairs for value in pair) or (ratio and lowest <= 0):
        expected = "positive and finite" if ratio else "finite"
        raise ValueError(f"expected {expected} values, got {pairs}; a figure that was not measured has no place here")
    apart = [math.log(a / b) if ratio else a - b for a, b in pairs]
    back = math.exp if ratio else float
    mean, n = statistics.fmean(apart), len(apart)
    if n < 2:
        return Difference(back(mean), n, ratio)
    error, quantile = statistics.stdev(apart) / math.sqrt(n), _quantile((1 + CONFIDENCE) / 2, n)
    if error == 0:
        p = 1.0 if mean == 0 else 0.0
    else:
        p = 2 * _beyond(abs(mean) / error, n)
    smallest = back(error * _shift(n)) - (1 if ratio else 0)
    low, high = back(mean - quantile * error), back(mean + quantile * error)
    return Difference(back(mean), n, ratio, low, high, p, smallest, error)


def _beyond(t: float, n: int) -> float:
    """The chance of a larger t with n values."""
    from scipy import special

    return float(special.stdtr(n - 1, -t))


@functools.cache
def _quantile(level: float, n: int) -> float:
    from scipy import special

    return float(special.stdtrit(n - 1, level))


@functools.cache
def _shift(n: int) -> float:
    """The noncentrality, in standard errors, at which a two-sided paired t test of n has ``POWER``.

    To find the wrong sign is no success, and so is not counted.
    """
    from scipy import optimize, stats

    quantile = _quantile((1 + CONFIDENCE) / 2, n)

    def missing(shift: float) -> float:
        return stats.nct.sf(quantile, n - 1, shift) - POWER

    highest = 2.0
    while missing(highest) < 0:
        highest *= 2
    return float(optimize.brentq(missing, 0.0, highest))


@dataclass(frozen=True)
class Bound:
    """One-sided: with ``CONFIDENCE`` ours is no further below theirs than ``below``."""

    below: float | None
    """Theirs minus the lower bound of ours, in points; ``None`` for a single seed."""
    margin: float
    n: int

    @property
    def holds(self) -> bool | None:
        """Whether ours is not inferior by more than the margin; ``None``: not to be known."""
        return None if self.below is None else self.below <= self.margin


def not_inferior(ours: Mapping[int, float], theirs: Mapping[int, float], margin: float) -> Bound | None:
    """Whether a figure of which more is better is no worse than theirs by ``margin``; ``None`` without shared seeds.

    The bound is ``d - t(confidence, n - 1) s / sqrt(n)`` for the mean difference d.
    """
    found = paired(ours, theirs)
    if found is None:
        return None
    if found.standard_error is None:
        return Bound(None, margin, found.n)
    return Bound(_quantile(CONFIDENCE, found.n) * found.standard_error - found.mean, margin, found.n)


def holm(ps: Sequence[float | None]) -> list[float | None]:
    """p values of as many tests, each raised so that all of them together err with the chance that one would.

    Holm (1979): the i-th smallest of m becomes max over j <= i of (m - j + 1) p_j, 1 at most. What is None stays.
    """
    known = sorted((p, place) for place, p in enumerate(ps) if p is not None)
    adjusted: list[float | None] = [None] * len(ps)
    largest = 0.0
    for rank, (p, place) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - rank) * p))
        adjusted[place] = largest
    return adjusted


def verdict(found: Difference | None, adjusted_p: float | None, least: float = 0.0) -> Verdict:
    """What may be said: nothing where the interval includes no difference, p is too large, or it is below ``least``.

    Args:
        adjusted_p: ``holm``'s.
        least: a difference in the figure's own unit that would be noise whatever its interval.
    """
    if found is None or found.low is None or adjusted_p is None or adjusted_p > 1 - CONFIDENCE:
        return "no claim"
    nothing = 1.0 if found.ratio else 0.0
    if found.low <= nothing <= found.high or abs(found.mean - nothing) < least:
        return "no claim"
    return "higher" if found.mean > nothing else "lower"


def propagated(value: float, *relative: float | None) -> float | None:
    """Standard deviation of a product or quotient, by its factors' relative ones: value sqrt(sum r_i^2); first order.

    ``None`` where one is not known.
    """
    if any(each is None for each in relative):
        return None
    return value * math.sqrt(sum(each**2 for each in relative))


def spread(values: Sequence[float]) -> float | None:
    """(max - min) / min: how far runs of the same thing lie apart; ``None`` for fewer than two, or a minimum of 0."""
    return (max(values) - min(values)) / min(values) if len(values) > 1 and min(values) > 0 else None
