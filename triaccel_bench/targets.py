"""What Tri-Accel+ has to reach within FP32's own memory peak as budget, and whether the records show it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from triaccel_bench import compare
from triaccel_bench.differences import MARGIN, values
from triaccel_bench.evidence import OURS, Compared, Evidence

Outcome = Literal["met", "missed", "not shown", "not tested"]
OUTCOMES = get_args(Outcome)


@dataclass(frozen=True)
class Target:
    """Ratios to the same quantity of another method on CIFAR-10; accuracy may be lower by ``margin`` points at most."""

    model: str
    against: str
    seconds: float
    memory_peak_bytes: float
    score: float
    margin: float = MARGIN


TARGETS = (
    Target("resnet18", "fp32", seconds=0.15, memory_peak_bytes=0.87, score=7.0),
    Target("resnet18", "amp", seconds=0.45, memory_peak_bytes=1.3, score=1.7),
    Target("efficientnet_b0", "fp32", seconds=0.5, memory_peak_bytes=0.87, score=2.2),
    Target("efficientnet_b0", "amp", seconds=0.75, memory_peak_bytes=1.3, score=1.1),
)
AT_LEAST = ("score",)
"""Fields of which more is better; the others are to be at most what they say."""

RULES = (
    "met: the whole 95 % interval lies on the right side of the target, its end included; missed: on the wrong side; "
    "not shown: the target lies within. Accuracy: met where the one-sided 95 % bound loses no more than the margin, "
    "missed where the whole 95 % interval loses more, and not shown otherwise."
)


@dataclass(frozen=True)
class Reached:
    target: Target
    field: str
    asked: str
    measured: str
    outcome: Outcome


def reached(evidence: Evidence) -> list[Reached]:
    """Every target with what was measured."""
    return [each for target in TARGETS for each in _reached(evidence, target)]


def _reached(evidence: Evidence, target: Target) -> list[Reached]:
    made = []
    for field in ("seconds", "memory_peak_bytes", "score"):
        limit, more = getattr(target, field), field in AT_LEAST
        compared = evidence.pair("cifar10", target.model, OURS, target.against, field)
        asked = f"{'at least' if more else 'at most'} × {limit:g}"
        made.append(Reached(target, field, asked, _text(compared), ratio_outcome(compared, limit, more)))
    compared = evidence.pair("cifar10", target.model, OURS, target.against, "accuracy_percent")
    asked = f"no more than {target.margin:g} points lower"
    return [*made, Reached(target, "accuracy_percent", asked, *_accuracy(compared, target.margin))]


def ratio_outcome(compared: Compared | None, limit: float, more: bool) -> Outcome:
    """Whether a ratio is at most, or at least, its limit."""
    if compared is None or not compared.known:
        return "not tested"
    low, high = compared.found.low, compared.found.high
    if low >= limit if more else high <= limit:
        return "met"
    return "missed" if (high < limit if more else low > limit) else "not shown"


def _accuracy(compared: Compared | None, margin: float) -> tuple[str, Outcome]:
    if compared is None or not compared.known:
        return _text(compared), "not tested"
    bound = compare.not_inferior(
        *(values(cell, "accuracy_percent") for cell in (compared.ours, compared.theirs)), margin
    )
    text = f"{compared.text}; one-sided bound {-bound.below:+.2f}"
    return text, "met" if bound.holds else "missed" if compared.found.high < -margin else "not shown"


def _text(compared: Compared | None) -> str:
    return "no finished runs of both" if compared is None else compared.text
