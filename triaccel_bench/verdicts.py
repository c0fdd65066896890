"""Each claim of the paper, the tests of our records that bear on it, and the verdict. The rules stand in ``RULES``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from triaccel_bench import compare, footers
from triaccel_bench.cells import Cell
from triaccel_bench.compare import Difference
from triaccel_bench.differences import MARGIN, values
from triaccel_bench.evidence import Compared, Evidence
from triaccel_bench.findings import findings
from triaccel_bench.labels import METHODS
from triaccel_bench.paper import (
    BYTES_PER_GB,
    CLAIMS,
    DATASET_LABELS,
    MEASURABLE,
    MODEL_LABELS,
    Claim,
    Table1Row,
    printed,
)

State = Literal["holds", "weaker", "open", "opposite", "untested"]
Verdict = Literal["reproduced", "in part", "not reproduced", "contradicted", "not tested"]
VERDICT: dict[State, Verdict] = {
    "holds": "reproduced",
    "weaker": "in part",
    "open": "not reproduced",
    "opposite": "contradicted",
    "untested": "not tested",
}
"""Of a claim that rests on a single test."""

LESS_IS_BETTER = ("seconds", "memory_peak_bytes")

MATCHING = 1.01
"""A ratio of time or memory up to which one matches the other."""
LOW_SHARE = 0.05
"""Of the time: more is no low overhead."""
NEAR = 0.05
"""Of a printed figure: an interval this near to it is that figure."""

RULES = (
    "A test holds where the difference is shown in the claim's direction (its 95 % interval excludes none at all, and "
    "p, corrected by Holm over all tests of the paper's claims, is below 5 %) and a printed size lies within the "
    "interval or is exceeded. It is weaker where the direction is shown and the printed size is not reached, opposite "
    "where the other direction is shown, and open otherwise. Without an interval (one seed) nothing is tested.",
    f"“Matches or outperforms” holds where the one-sided 95 % bound of accuracy loses no more than {MARGIN:g} points, "
    f"or where the interval of a ratio ends at {MATCHING:g} or better.",
    "A limit on a figure (a mean by itself) holds where the whole interval keeps it, is opposite where none of it "
    f"does, and open otherwise. A printed figure holds where the whole interval lies within {100 * NEAR:g} % of it; "
    "otherwise it is opposite where the interval excludes it, and open where not. Tri-Accel's accuracy is held as the "
    "least and its memory as the most that the paper claims, AMP's memory as a printed figure.",
    f"Overhead is low up to {100 * LOW_SHARE:g} % of the time. Efficiency improves where seconds × GB of an epoch fall "
    "from the first third of the epochs to the last: accuracy, which rises whatever the method does, is left out.",
    "A claim is reproduced if all its tests hold, and in part if some hold or are weaker. Otherwise it is contradicted "
    "if one is opposite, not reproduced if one is open, and not tested if there is none.",
    "Where the paper says “up to”, one test that holds is enough, and only if all are opposite it is contradicted.",
)


@dataclass(frozen=True)
class Checked:
    """One comparison of a claim, and what was measured, as text."""

    state: State
    text: str


@dataclass(frozen=True)
class Judged:
    claim: Claim
    tests: tuple[Checked, ...]
    verdict: Verdict

    @property
    def measured(self) -> str:
        return "; ".join(
            test.text if test.state == "untested" or len(self.tests) == 1 else f"{test.text} ({test.state})"
            for test in self.tests
        )


def every(tests: Sequence[Checked]) -> Verdict:
    """Of a claim that is made of all its tests."""
    states = {test.state for test in tests}
    return "reproduced" if states == {"holds"} else _short_of_all(states)


def some(tests: Sequence[Checked]) -> Verdict:
    """Of a claim of the best case: "up to"."""
    states = {test.state for test in tests}
    if "holds" in states:
        return "reproduced"
    if "weaker" not in states and {"opposite"} < states:
        # One of those that are open or were not tested may be the best case.
        return "not reproduced"
    return _short_of_all(states)


def _short_of_all(states: set[State]) -> Verdict:
    if states & {"holds", "weaker"}:
        return "in part"
    return VERDICT[next((state for state in ("opposite", "open") if state in states), "untested")]


def direction(compared: Compared, higher: bool) -> State:
    """Whether the difference that the claim is of is shown."""
    if not compared.known:
        return "untested"
    if compared.verdict == "no claim":
        return "open"
    return "holds" if (compared.verdict == "higher") == higher else "opposite"


_higher, _lower = partial(direction, higher=True), partial(direction, higher=False)


def reaches(compared: Compared, size: float) -> State:
    """Whether a difference of at least that size, in the unit of the test, may be what was measured."""
    nothing = 1.0 if compared.quantity.ratio else 0.0
    state = direction(compared, size > nothing)
    if state != "holds":
        return state
    reached = compared.found.high >= size if size > nothing else compared.found.low <= size
    return "holds" if reached else "weaker"


def no_worse(compared: Compared) -> State:
    """ "Matches or outperforms": more is better of accuracy and score, less of time and memory."""
    if not compared.known:
        return "untested"
    field = compared.quantity.field
    if field == "accuracy_percent":
        bound = compare.not_inferior(*(values(cell, field) for cell in (compared.ours, compared.theirs)), MARGIN)
        holds, worse = bound.holds, compared.verdict == "lower"
    elif field == "score":
        holds, worse = compared.found.low >= 1 / MATCHING, compared.verdict == "lower"
    else:
        holds, worse = compared.found.high <= MATCHING, compared.verdict == "higher"
    return "holds" if holds else "opposite" if worse else "open"


def judged(evidence: Evidence) -> list[Judged]:
    """All claims in the paper's order: those with figures, then those without."""
    return [
        _judged(claim, *_CLAIMS[key](evidence)) if key in _CLAIMS else Judged(claim, (_audited(key),), "not tested")
        for key, claim in (CLAIMS | MEASURABLE).items()
    ]


def _judged(claim: Claim, tests: list[Checked], rule: Callable[[Sequence[Checked]], Verdict]) -> Judged:
    return Judged(claim, tuple(tests), rule(tests))


def _audited(key: str) -> Checked:
    claim = CLAIMS[key]
    finding = next(each for each in findings() if (each.where, each.what) == (claim.where, claim.what))
    return Checked("untested", f"a matter of the paper's own figures, which the audit finds: {finding.verdict}")


_Rule = Callable[[Sequence[Checked]], Verdict]
_Claim = Callable[[Evidence], tuple[list[Checked], _Rule]]

_ALL, _CIFAR10, _CIFAR100 = tuple(DATASET_LABELS), ("cifar10",), ("cifar100",)
_MODELS, _BASELINES = tuple(MODEL_LABELS), ("fp32", "amp")


def _pairs(
    judge: Callable[[Compared], State],
    field: str,
    against: Sequence[str] = _BASELINES,
    datasets: Sequence[str] = _ALL,
    models: Sequence[str] = _MODELS,
    ours: str = "triaccel",
    rule: _Rule = every,
) -> _Claim:
    def tests(evidence: Evidence) -> tuple[list[Checked], _Rule]:
        made = [
            _pair(evidence, judge, field, dataset, model, ours, theirs)
            for dataset in datasets
            if evidence.has(dataset)
            for model in models
            for theirs in against
        ]
        return [*made, *_without_records(evidence, datasets)], rule

    return tests


def _pair(evidence: Evidence, judge, field: str, dataset: str, model: str, ours: str, theirs: str) -> Checked:
    where = _where(dataset, model)
    compared = evidence.pair(dataset, model, ours, theirs, field)
    if compared is None:
        lacking = [METHODS[each] for each in (ours, theirs) if evidence.cell(dataset, model, each) is None]
        return Checked("untested", f"{where}: no finished run of {' and '.join(lacking)}")
    if compared.found is None:
        return Checked("untested", f"{where} against {METHODS[theirs]}: {compared.text}, or not measured")
    return Checked(judge(compared), f"{where} against {METHODS[theirs]}: {compared.text_with_p}")


def _without_records(evidence: Evidence, datasets: Iterable[str]) -> list[Checked]:
    lacking = [DATASET_LABELS[dataset] for dataset in datasets if not evidence.has(dataset)]
    return [Checked("untested", f"{' and '.join(lacking)}: no record")] if lacking else []


def _where(dataset: str, model: str) -> str:
    return MODEL_LABELS[model] if dataset == "cifar10" else f"{MODEL_LABELS[model]} on {DATASET_LABELS[dataset]}"


def _number(key: str) -> float:
    """The one that the paper prints for a claim."""
    return float(next(word for word in CLAIMS[key].printed.split() if word[0].isdigit()))


def _lower_by(key: str) -> Callable[[Compared], State]:
    return lambda compared: reaches(compared, 1 - _number(key) / 100)


def _higher_by(key: str) -> Callable[[Compared], State]:
    return lambda compared: reaches(compared, _number(key) if not compared.quantity.ratio else 1 + _number(key) / 100)


def _level(method: str, field: str, scale: float, unit: str, judge: Callable[[Difference], State]) -> _Claim:
    """A figure of ResNet-18 on CIFAR-10 by itself."""

    def tests(evidence: Evidence) -> tuple[list[Checked], _Rule]:
        cell = evidence.cell("cifar10", "resnet18", method)
        if cell is None:
            return [
                Checked("untested", f"{_where('cifar10', 'resnet18')}: no finished run of {METHODS[method]}")
            ], every
        return [alone({seed: value / scale for seed, value in values(cell, field).items()}, judge, unit)], every

    return tests


def alone(measured: dict[int, float], judge: Callable[[Difference], State], unit: str, where: str = "") -> Checked:
    """A mean with its interval, beside no other cell."""
    found = compare.paired(measured, dict.fromkeys(measured, 0.0))
    if found is None:
        return Checked("untested", f"{where}not measured")
    interval = "" if found.low is None else f" [{found.low:.4g}, {found.high:.4g}]"
    text = f"{where}{found.mean:.4g}{interval} {unit}, n = {found.n}"
    if found.low is None:
        return Checked("untested", text)
    return Checked(judge(found), text)


def _of_each(judge: Callable[[Cell, str], Checked], datasets: Sequence[str] = _ALL) -> _Claim:
    """A claim about Tri-Accel by itself, on every network."""

    def tests(evidence: Evidence) -> tuple[list[Checked], _Rule]:
        made = []
        for dataset in datasets:
            for model in _MODELS if evidence.has(dataset) else ():
                cell = evidence.cell(dataset, model, "triaccel")
                where = _where(dataset, model)
                missing = Checked("untested", f"{where}: no finished run of {METHODS['triaccel']}")
                made.append(missing if cell is None else judge(cell, f"{where}: "))
        return [*made, *_without_records(evidence, datasets)], every

    return tests


def _efficiency(cell: Cell, where: str) -> Checked:
    found = footers.trend(cell, "cost_thirds")
    if found is None or found.low is None:
        return Checked("untested", f"{where}needs three epochs, VRAM and two seeds")
    state: State = "holds" if found.high < 1 else "opposite" if found.low > 1 else "open"
    text = f"seconds × GB in the last third of epochs × {found.mean:.3f} [{found.low:.3f}, {found.high:.3f}]"
    return Checked(state, f"{where}{text}, n = {found.n}")


def _overhead(cell: Cell, where: str) -> Checked:
    shares = {
        each.seed: 100 * each.loop_seconds / each.training_seconds
        for each in cell.summaries
        if each.training_seconds and each.loop_seconds is not None
    }
    return alone(shares, at_most(100 * LOW_SHARE), "% of the run's time", where)


def _stability(cell: Cell, where: str) -> Checked:
    lost = [f"seed {run.seed} {run.status}" for run in cell.runs if run.status in ("diverged", "oom", "failed")]
    finished, planned = len(cell.summaries), len(cell.summaries) + len(cell.excluded)
    text = f"{where}{finished} of {planned} runs finished"
    if lost:
        return Checked("opposite", f"{text} ({', '.join(lost)})")
    # One run that ends well tells of no other.
    return Checked("untested" if finished < 2 else "holds" if finished == planned else "open", text)


def _below_budget(cell: Cell, where: str) -> Checked:
    shares = {
        each.seed: each.memory_peak_bytes / each.budget_bytes
        for each in cell.summaries
        if each.memory_peak_bytes is not None and each.budget_bytes and each.meter == "vram"
    }
    return alone(shares, at_most(1.0), "of the budget", where)


def at_most(limit: float) -> Callable[[Difference], State]:
    """Whether a whole interval keeps a limit, or none of it does."""
    return lambda found: "holds" if found.high <= limit else "opposite" if found.low > limit else "open"


def at_least(limit: float) -> Callable[[Difference], State]:
    return lambda found: "holds" if found.low >= limit else "opposite" if found.high < limit else "open"


def about(figure: float) -> Callable[[Difference], State]:
    """Whether a whole interval lies within ``NEAR`` of a figure, or excludes it."""

    def judged(found: Difference) -> State:
        if abs(found.low - figure) <= NEAR * figure and abs(found.high - figure) <= NEAR * figure:
            return "holds"
        return "open" if found.low <= figure <= found.high else "opposite"

    return judged


_CLAIMS: dict[str, _Claim] = {
    "time_cifar10": _pairs(_lower_by("time_cifar10"), "seconds", ("fp32",), _CIFAR10, rule=some),
    "memory_cifar10": _pairs(_lower_by("memory_cifar10"), "memory_peak_bytes", ("fp32",), _CIFAR10, rule=some),
    "accuracy_cifar10": _pairs(_higher_by("accuracy_cifar10"), "accuracy_percent", ("fp32",), _CIFAR10),
    "accuracy": _level("triaccel", "accuracy_percent", 1, "%", at_least(_number("accuracy"))),
    "memory_amp": _level("amp", "memory_peak_bytes", BYTES_PER_GB, "GB", about(_number("memory_amp"))),
    "memory": _level("triaccel", "memory_peak_bytes", BYTES_PER_GB, "GB", at_most(_number("memory"))),
    "occupancy": _pairs(_higher, "memory_peak_bytes", ("fp32",)),
    "over_78": _level("triaccel", "accuracy_percent", 1, "%", at_least(_number("over_78"))),
    "no_worse_accuracy": _pairs(no_worse, "accuracy_percent"),
    "no_worse_time": _pairs(no_worse, "seconds"),
    "no_worse_memory": _pairs(no_worse, "memory_peak_bytes"),
    "faster_than_amp": _pairs(_lower, "seconds", ("amp",)),
    "resnet_memory": _pairs(_lower, "memory_peak_bytes", models=("resnet18",)),
    "resnet_accuracy": _pairs(no_worse, "accuracy_percent", models=("resnet18",)),
    "efficientnet_time": _pairs(_lower, "seconds", models=("efficientnet_b0",)),
    "best_score": _pairs(_higher, "score", datasets=_CIFAR10),
    "cifar100_accuracy": _pairs(_higher, "accuracy_percent", datasets=_CIFAR100),
    "trade_off": _pairs(_lower, "score", datasets=_CIFAR100),
    "precision_alone": _pairs(_lower, "memory_peak_bytes", ("fp32",), _CIFAR10, ours="triaccel_precision"),
    "combination": _pairs(_lower, "memory_peak_bytes", ("triaccel_precision",), _CIFAR10),
    **{
        f"saved_{model}": _pairs(_lower_by(f"saved_{model}"), "memory_peak_bytes", ("fp32",), _CIFAR10, (model,))
        for model in _MODELS
    },
    "faster": _pairs(_lower_by("faster"), "seconds", ("fp32",), rule=some),
    "less_memory": _pairs(_lower_by("less_memory"), "memory_peak_bytes", ("fp32",), rule=some),
    "gained_least": _pairs(_higher_by("gained_least"), "accuracy_percent", ("fp32",)),
    "gained_most": _pairs(_higher_by("gained_most"), "accuracy_percent", ("fp32",), rule=some),
    "gained_amp": _pairs(_higher_by("gained_amp"), "accuracy_percent", ("amp",), rule=some),
    "score_fp32": _pairs(_higher_by("score_fp32"), "score", ("fp32",), rule=some),
    "score_amp": _pairs(_higher_by("score_amp"), "score", ("amp",), rule=some),
    "efficiency": _of_each(_efficiency),
    "overhead": _of_each(_overhead),
    "stability": _of_each(_stability),
    "below_budget": _of_each(_below_budget),
    "throughput": _pairs(_lower, "seconds", ("fp32",), _CIFAR10, ours="triaccel_batch"),
}
"""Claims of the paper's own figures alone have no entry."""


def printed_effect(ours: Table1Row, theirs: Table1Row, field: str) -> float:
    """What Table 1 prints of a quantity, as the difference or the ratio that is tested."""
    if field == "accuracy_percent":
        return ours.accuracy_percent - theirs.accuracy_percent
    name = {"seconds": "seconds", "memory_peak_bytes": "memory_gb", "score": "score"}[field]
    return getattr(ours, name) / getattr(theirs, name)


def against_printed(compared: Compared, effect: float) -> State:
    """Whether what was measured is what the paper prints.

    A gain as ``reaches`` has it, no difference as ``no_worse``; of a loss holds what may be as small as printed.
    """
    nothing, less = (1.0 if compared.quantity.ratio else 0.0), compared.quantity.field in LESS_IS_BETTER
    if effect == nothing:
        return no_worse(compared)
    if (effect < nothing) == less:
        return reaches(compared, effect)
    if not compared.known:
        return "untested"
    as_small = compared.found.low <= effect if less else compared.found.high >= effect
    return "holds" if as_small else "opposite"


def printed_pairs(dataset: str, model: str) -> list[tuple[Table1Row, Table1Row]]:
    """Rows of Table 1 that a reader compares."""
    pairs = (("amp", "fp32"), ("triaccel", "fp32"), ("triaccel", "amp"))
    return [(printed(dataset, model, ours), printed(dataset, model, theirs)) for ours, theirs in pairs]
