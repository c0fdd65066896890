"""The paper's section 3 as pure functions on the host: signals in, a decision out. No torch, no device.

One call of ``decide`` is one pass of the unified loop (section 3.4): precision from gradient
variance, promotion and per-layer rates from curvature, batch size from memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import quantiles

from triaccel_bench import rungs
from triaccel_bench.settings import BatchSettings, CurvatureSettings, MethodSettings, PrecisionSettings

LEVELS = ("fp16", "bf16", "fp32")
"""Dtypes in the paper's order, from narrow to wide."""

WINDOWS_BEFORE_AUTO = 2
"""Control windows of statistics before ``auto`` thresholds are taken from them."""

LAYERS_BEFORE_AUTO = 0.5
"""Share of the layers whose spectrum must be known before ``auto`` takes tau_curv from them."""


@dataclass(frozen=True)
class Signals:
    """What the loop reads at one control step. Sequences follow the order of the named layers."""

    epoch: int
    variance: tuple[float, ...] | None
    """v_l(t), the EMA; ``None`` before the first applied step, and where no statistics are kept."""
    lambda_max: tuple[float | None, ...] | None
    """Newest max_i lambda_i(H_l); ``None`` for a layer not probed yet."""
    memory_bytes: int | None
    """MemUsage(t): peak of the last control window without the resident data set."""
    budget_bytes: int | None
    free_bytes: int | None = None
    """By how much that peak could grow on this device."""
    capture_share: float | None = None
    """Share of training time that capturing steps again would have taken after one more change of plan."""
    rate_share: float | None = None
    """``Schedule.share_of_peak``; ``None`` where no schedule is known."""


@dataclass(frozen=True)
class State:
    """What the controller remembers between control steps."""

    base: tuple[str, ...]
    """Level by variance alone."""
    promoted: tuple[bool, ...]
    dwelt: tuple[int, ...]
    """Control windows since each layer's base level last changed."""
    rates: tuple[float, ...]
    batch: int
    windows: int = 0
    tau_low: float | None = None
    tau_high: float | None = None
    tau_curv: float | None = None
    changes_epoch: int = -1
    changes: int = 0
    seen: rungs.Seen = rungs.Seen()
    ceiling: int | None = None
    """Above this batch memory has run out; ``None``: it has not."""


@dataclass(frozen=True)
class Decision:
    requested: tuple[str, ...]
    executed: tuple[str, ...]
    promoted: tuple[bool, ...]
    rates: tuple[float, ...]
    batch: int
    batch_reason: str
    plan_changed: bool


def within(rules: MethodSettings, samples: int) -> MethodSettings:
    """The rules with no batch above what there is to train on, but for B0."""
    highest = max(rules.batch.initial, min(rules.batch.max, samples))
    return rules.model_copy(update={"batch": rules.batch.model_copy(update={"max": highest})})


def start(layers: int, rules: MethodSettings, executed_of: Callable[[str], str]) -> tuple[Decision, State]:
    """Every layer in ``method.dtype``, full rates, batch B0."""
    state = State(
        base=(rules.dtype,) * layers,
        promoted=(False,) * layers,
        dwelt=(rules.precision.dwell,) * layers,
        rates=(1.0,) * layers,
        batch=rules.batch.initial,
        tau_low=_number(rules.precision.tau_low),
        tau_high=_number(rules.precision.tau_high),
        tau_curv=_number(rules.curvature.tau_curv),
    )
    requested = state.base
    executed = tuple(map(executed_of, requested))
    return Decision(requested, executed, state.promoted, state.rates, state.batch, "start", False), state


def decide(
    signals: Signals, state: State, rules: MethodSettings, executed_of: Callable[[str], str]
) -> tuple[Decision, State]:
    """One pass of section 3.4.

    ``executed_of`` maps a requested dtype to the one the device runs for it. A change of plan
    beyond ``control.plan_changes_per_epoch`` waits for the next epoch, and one whose capture would
    exceed ``capture.max_overhead`` until training has gone on long enough; rates and batch do not.
    """
    before = plan(state, executed_of)
    state = replace(state, windows=state.windows + 1, dwelt=tuple(n + 1 for n in state.dwelt))
    state = _thresholds(signals, state, rules)

    proposal = state
    if rules.precision.adaptive and signals.variance is not None and state.tau_low is not None:
        proposal = _assign(signals.variance, proposal, rules.precision)
    if rules.curvature.promotion and signals.lambda_max is not None and state.tau_curv is not None:
        proposal = replace(proposal, promoted=promotions(signals.lambda_max, state.promoted, state.tau_curv))

    after = plan(proposal, executed_of)
    executed_before, executed = tuple(map(executed_of, before)), tuple(map(executed_of, after))
    if executed != executed_before:
        # The quota is on what is executed: BF16 against FP16 on a card that runs both as FP16 costs nothing.
        changes = state.changes if state.changes_epoch == signals.epoch else 0
        affordable = signals.capture_share is None or signals.capture_share <= rules.capture.max_overhead
        if affordable and changes < rules.control.plan_changes_per_epoch:
            proposal = replace(proposal, changes_epoch=signals.epoch, changes=changes + 1)
        else:
            proposal, after, executed = state, before, executed_before
    state = proposal

    if rules.curvature.rates and signals.lambda_max is not None:
        state = replace(state, rates=rate_scales(signals.lambda_max, state.rates, rules.curvature))

    reason = "fixed"
    if rules.batch.elastic:
        resized, reason = next_batch(signals, state, rules.batch)
        if executed != executed_before:
            # The reading was of the old plan: it may tell B to shrink, but not what the new plan leaves room for,
            # and the next reading will differ from it by more than what a rung adds.
            if resized.batch > state.batch:
                resized, reason = replace(resized, batch=state.batch), f"hold: the plan changes ({reason})"
            resized = replace(resized, seen=resized.seen.under_a_new_plan(), ceiling=None)
        state = resized
    changed = after != before
    decision = Decision(after, executed, state.promoted, state.rates, state.batch, reason, changed)
    return decision, state


def plan(state: State, executed_of: Callable[[str], str]) -> tuple[str, ...]:
    """The requested plan: the level by variance, one executed step wider where promoted."""
    return tuple(
        wider(level, executed_of) if lifted else level for level, lifted in zip(state.base, state.promoted, strict=True)
    )


def wider(level: str, executed_of: Callable[[str], str]) -> str:
    """The next level up whose executed dtype is wider; the level itself where there is none.

    On a card without native BF16 the step up from FP16 is FP32, not a BF16 that runs as FP16 again.
    """
    here = LEVELS.index(executed_of(level))
    for candidate in LEVELS[LEVELS.index(level) + 1 :]:
        if LEVELS.index(executed_of(candidate)) > here:
            return candidate
    return level


def level_by_variance(variance: float, tau_low: float, tau_high: float) -> str:
    """p_l(t) of section 3.1. A NaN fails every comparison of the formula; it gets the widest dtype."""
    if variance < tau_low:
        return "fp16"
    if variance < tau_high:
        return "bf16"
    return "fp32"


def level_with_hysteresis(current: str, variance: float, tau_low: float, tau_high: float, width: float) -> str:
    """As ``level_by_variance``, but a threshold must be passed by sqrt(``width``) to be crossed either way."""
    margin = math.sqrt(width)
    # Going up needs v >= tau * margin, going down v < tau / margin; between the two the layer stays.
    if variance != variance:
        return "fp32"
    up = level_by_variance(variance, tau_low * margin, tau_high * margin)
    down = level_by_variance(variance, tau_low / margin, tau_high / margin)
    here = LEVELS.index(current)
    if LEVELS.index(up) > here:
        return up
    if LEVELS.index(down) < here:
        return down
    return current


def promotions(lambda_max: Sequence[float | None], promoted: Sequence[bool], tau_curv: float) -> tuple[bool, ...]:
    """Section 3.2: above tau_curv a layer is lifted until a later probe is below; unknown keeps what was."""
    return tuple(
        was if value is None or not math.isfinite(value) else value > tau_curv
        for value, was in zip(lambda_max, promoted, strict=True)
    )


def rate_scales(
    lambda_max: Sequence[float | None], rates: Sequence[float], rules: CurvatureSettings
) -> tuple[float, ...]:
    """eta_l / eta_0 = 1 / (1 + alpha * max(0, max_i lambda_i)) (section 3.2); always in (0, 1].

    Negative curvature counts as none: the printed formula divides by zero at lambda = -1 / alpha.
    A value that is missing or not finite keeps the layer's last rate.
    """
    return tuple(
        rate if value is None or not math.isfinite(value) else 1.0 / (1.0 + rules.alpha * max(0.0, value))
        for value, rate in zip(lambda_max, rates, strict=True)
    )


def next_batch(signals: Signals, state: State, rules: BatchSettings) -> tuple[State, str]:
    """B(t+1) of section 3.3; the new state and the reason in words."""
    if signals.memory_bytes is None or signals.budget_bytes is None:
        return state, "hold: no memory reading"
    if state.ceiling is not None:
        rules = rules.model_copy(update={"max": min(rules.max, state.ceiling)})
    reading = rungs.Reading(state.batch, signals.memory_bytes, signals.budget_bytes, signals.free_bytes)
    seen = state.seen.with_reading(reading)
    batch, reason = rungs.next_rung(reading, seen, rules, signals.rate_share)
    return replace(state, seen=seen, batch=batch), reason


def back_off(state: State, rules: BatchSettings, tried: int) -> State | None:
    """After memory ran out with ``tried`` samples: the next rung below B with fewer; ``None`` if there is none.

    It is the highest from then on, under the plan in force.
    """
    smaller = max(rules.min, state.batch - rules.down)
    while smaller >= tried and smaller > rules.min:
        smaller = max(rules.min, smaller - rules.down)
    if smaller >= min(tried, state.batch):
        return None
    return replace(state, batch=smaller, ceiling=smaller, seen=rungs.Seen(peaks=state.seen.peaks))


def _assign(variance: Sequence[float], state: State, rules: PrecisionSettings) -> State:
    base, dwelt = [], []
    for level, value, since in zip(state.base, variance, state.dwelt, strict=True):
        proposed = level_with_hysteresis(level, value, state.tau_low, state.tau_high, rules.hysteresis)
        proposed = max(proposed, rules.narrowest, key=LEVELS.index)
        if proposed != level and since < rules.dwell:
            proposed = level
        base.append(proposed)
        dwelt.append(since if proposed == level else 0)
    return replace(state, base=tuple(base), dwelt=tuple(dwelt))


def _thresholds(signals: Signals, state: State, rules: MethodSettings) -> State:
    """Fix ``auto`` thresholds once: tau_low/high after two windows, tau_curv once half of the layers were read."""
    if rules.precision.adaptive and state.tau_low is None and state.windows >= WINDOWS_BEFORE_AUTO:
        if signals.variance is not None and len(seen := _finite(signals.variance)) >= 2:
            state = replace(state, tau_low=_quantile(seen, 0.5), tau_high=_quantile(seen, 0.9))
    if rules.curvature.promotion and state.tau_curv is None and signals.lambda_max is not None:
        seen = _finite(signals.lambda_max)
        if len(seen) >= max(2, LAYERS_BEFORE_AUTO * len(signals.lambda_max)):
            state = replace(state, tau_curv=_quantile(seen, 0.9))
    return state


def _finite(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def _quantile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between order statistics, in tenths."""
    return quantiles(values, n=10, method="inclusive")[round(share * 10) - 1]


def _number(value: str | float) -> float | None:
    return None if isinstance(value, str) else float(value)
