"""B(t+1) of section 3.3: the batch size that a memory budget leaves room for. Pure functions; each size B is a rung.

``batch.growth=paper`` moves B by one rung, down above rho_high of MemMax and up below rho_low. ``batch.growth=model``
fits ``peak(B) = fixed + slope B`` to the rungs seen under the executed plan in force and goes straight to the highest
rung that it puts at rho_high or below; without a line yet, to the highest at which usage in proportion to B, which is
more than any line says, would still be. ``batch.growth=schedule`` does so too, but no further than the learning rate
has been annealed: up to ``g B0 eta_peak / eta_0(t)``, ``g`` being ``batch.head_start``. With ``batch.lr_rule=linear``
the rate in force over B, by which SGD scatters, follows the schedule whatever B is, and the rate itself then never
exceeds ``g`` times the peak at B0 (Smith et al., "Don't Decay the Learning Rate, Increase the Batch Size", 2018). As
every size has to be captured, it waits until the rate allows half of B more. None climbs where the device lacks the
memory, whoever holds it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import LinearRegression, linear_regression

from triaccel_bench.settings import BatchSettings

RETRIED_BELOW = 0.98
"""Share of rho_high that a rung seen above rho_high must be predicted at before it is tried again."""

WORTH_A_CAPTURE = 1.5
"""By what factor the learning rate must let B grow before ``batch.growth=schedule`` tries a size not run yet."""


@dataclass(frozen=True)
class Reading:
    """Peak bytes of the last control window at ``batch``, MemMax, and how much more the device would give."""

    batch: int
    used: int
    budget: int
    free: int | None = None

    @property
    def share(self) -> float:
        return self.used / self.budget


@dataclass(frozen=True)
class Seen:
    """What readings up to now have told of the rungs."""

    last: tuple[int, float] | None = None
    """Batch and share of MemMax at the last reading."""
    factors: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """For a rung and a larger one, by what factor usage grew from one to the other when B last moved between them."""
    peaks: Mapping[int, int] = field(default_factory=dict)
    """For a rung, its newest peak in bytes under the executed plan in force."""

    def with_reading(self, reading: Reading) -> Seen:
        factors, here = dict(self.factors), (reading.batch, reading.share)
        if self.last is not None and self.last[0] != reading.batch and self.last[1] > 0:
            (smaller, less), (larger, more) = sorted([self.last, here])
            factors[smaller, larger] = more / less
        return Seen(here, factors, {**self.peaks, reading.batch: reading.used})

    def under_a_new_plan(self) -> Seen:
        """Peaks of the old plan say nothing of the new one's; what a rung adds in proportion still does."""
        return replace(self, last=None, peaks={})

    def line(self) -> LinearRegression | None:
        """``peak(B)``; ``None`` until two rungs were seen, or if they do not rise."""
        if len(self.peaks) < 2:
            return None
        found = linear_regression(list(self.peaks), list(self.peaks.values()))
        return found if found.slope > 0 else None


def next_rung(reading: Reading, seen: Seen, rules: BatchSettings, rate_share: float | None = None) -> tuple[int, str]:
    """B(t+1), and the reason in words; ``seen`` holds the reading already.

    ``rate_share`` is eta_0(t) over its peak, which ``growth=schedule`` goes by; ``None``: at its peak.
    """
    share, batch = reading.share, reading.batch
    if share > rules.rho_high:
        above = f"{share:.3f} of MemMax is above {rules.rho_high}"
        smaller = max(rules.min, batch - rules.down)
        if smaller == batch:
            return batch, f"hold: {above}, but batch.min={rules.min}"
        if rules.growth != "paper":
            smaller = _lower_rung(reading, seen, rules)
        return smaller, f"shrink: {above}"
    if share >= rules.rho_low:
        return batch, f"hold: {share:.3f} of MemMax lies within [{rules.rho_low}, {rules.rho_high}]"
    below = f"{share:.3f} of MemMax is below {rules.rho_low}"
    if min(rules.max, batch + rules.up) == batch:
        return batch, f"hold: {below}, but batch.max={rules.max}"
    if rules.growth == "schedule":
        rate = 1.0 if rate_share is None else rate_share
        highest = _annealed(batch, rules, seen, rate)
        if highest == batch:
            return batch, f"hold: {below}, but a learning rate at {rate:.3f} of its peak allows no half of B more yet"
        rules = rules.model_copy(update={"max": highest})
    if rules.growth == "paper":
        return _one_rung_up(reading, seen, rules, below)
    if seen.line() is None:
        return _in_proportion(reading, seen, rules, below)
    return _highest_rung(reading, seen, rules, below)


def _annealed(batch: int, rules: BatchSettings, seen: Seen, rate_share: float) -> int:
    """The highest size from ``batch`` on up to g B0 / ``rate_share``, and one not run yet only if far enough."""
    limit = rules.head_start * rules.initial / rate_share if rate_share > 0 else math.inf
    if limit >= rules.max:
        return rules.max
    rung = batch + rules.up * max(0, math.floor((limit - batch) / rules.up))
    if rung >= WORTH_A_CAPTURE * batch:
        return rung
    return max((size for size in (rules.initial, *seen.peaks) if batch < size <= limit), default=batch)


def predicted_peak(reading: Reading, seen: Seen, batch: int) -> float | None:
    """What the line through the rungs seen puts ``batch`` at, from the newest reading on; ``None`` without a line."""
    line = seen.line()
    return None if line is None else _peak_along(line, reading, batch)


def _peak_along(line: LinearRegression, reading: Reading, batch: int) -> float:
    return reading.used + line.slope * (batch - reading.batch)


def _one_rung_up(reading: Reading, seen: Seen, rules: BatchSettings, below: str) -> tuple[int, str]:
    """A rung known to end above rho_high is not tried again until usage has fallen enough.

    Otherwise a rung wider than the band between the thresholds would make B swing for ever.
    """
    batch = reading.batch
    larger = min(rules.max, batch + rules.up)
    predicted = reading.share * seen.factors.get((batch, larger), 1.0)
    # One that did end there needs more than what readings scatter by.
    overshot = seen.peaks.get(larger, 0) > rules.rho_high * reading.budget
    if predicted > rules.rho_high * (RETRIED_BELOW if overshot else 1.0):
        return batch, f"hold: {below}, but B={larger} is predicted at {predicted:.3f}"
    # The whole usage scaled by the growth is an upper bound: weights and their state do not grow with B.
    if reading.free is not None and reading.used * (larger - batch) / batch > reading.free:
        return batch, f"hold: {below}, but the device has only {reading.free} bytes free"
    return larger, f"grow: {below}"


def _in_proportion(reading: Reading, seen: Seen, rules: BatchSettings, below: str) -> tuple[int, str]:
    """One rung up as ever, and on to the highest at which usage scaled by the growth is within rho_high and the device.

    From two neighbouring rungs, what a reading is off by counts many times over at a rung far away.
    """
    rung, reason = _one_rung_up(reading, seen, rules, below)
    most = rules.rho_high * reading.budget
    if reading.free is not None:
        most = min(most, reading.used + reading.free)
    limit = min(rules.max, most * reading.batch / reading.used) if reading.used else rules.max
    further = limit if limit == rules.max else reading.batch + rules.up * math.floor((limit - reading.batch) / rules.up)
    if reading.batch < rung < further:
        return further, f"grow: {below}, and B={further} stays within {rules.rho_high} even in proportion"
    return rung, reason


def _highest_rung(reading: Reading, seen: Seen, rules: BatchSettings, below: str) -> tuple[int, str]:
    batch, reason = reading.batch, f"hold: {below}"
    line = seen.line()
    for rung in (*range(batch + rules.up, rules.max, rules.up), rules.max):
        # A rung seen above what the line says of it is as it was seen: else noise would make B swing.
        predicted = max(_peak_along(line, reading, rung), seen.peaks.get(rung, 0))
        if predicted > rules.rho_high * reading.budget:
            stop = f"B={rung} is predicted at {predicted / reading.budget:.3f}"
        elif reading.free is not None and predicted - reading.used > reading.free:
            stop = f"the device has only {reading.free} bytes free"
        else:
            batch, reason = rung, f"grow: {below}, and B={rung} is predicted at {predicted / reading.budget:.3f}"
            continue
        return batch, reason if batch > reading.batch else f"{reason}, but {stop}"
    return batch, reason


def _lower_rung(reading: Reading, seen: Seen, rules: BatchSettings) -> int:
    """The highest one below that the line puts at rho_high or less; the next one below while there is no line."""
    smaller = max(rules.min, reading.batch - rules.down)
    line = seen.line()
    if line is None:
        return smaller
    while smaller > rules.min and _peak_along(line, reading, smaller) > rules.rho_high * reading.budget:
        smaller = max(rules.min, smaller - rules.down)
    return smaller
