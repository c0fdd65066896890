"""The audit of the paper: every figure that it prints, beside what its own figures and lower bounds give for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from triaccel_bench import bounds, paper
from triaccel_bench.bounds import FP32, MASTERED, NARROWEST, NetworkShape, Widths
from triaccel_bench.paper import (
    BYTES_PER_GB,
    CLAIMS,
    CONFIGURATION_LABELS,
    DATASET_LABELS,
    METHOD_LABELS,
    MODEL_LABELS,
    TABLE1,
    TABLE2,
    Table1Row,
    Table2Row,
    printed,
    rounds_to,
)

Verdict = Literal["consistent", "arithmetic slip", "physically impossible"]
CONSISTENT: Verdict = "consistent"
SLIP: Verdict = "arithmetic slip"
IMPOSSIBLE: Verdict = "physically impossible"

BYTES_PER_GIB = 2**30

_WIDTHS = {"fp32": FP32, "triaccel_batch": FP32, "amp": MASTERED}
"""What each method keeps at least, by what the paper says of it; others may keep everything in 16 bit."""


@dataclass(frozen=True)
class Finding:
    """One printed figure or claim, and what was computed for it, both as they would be printed."""

    where: str
    what: str
    printed: str
    computed: str
    verdict: Verdict
    note: str


def findings() -> list[Finding]:
    """All of them: tables, text, then what the printed bytes and seconds would have needed."""
    return [*_scores(), *_reductions(), *_both_tables(), *_claims(), *_memory(), *_times()]


def _judged(follows: bool) -> Verdict:
    return CONSISTENT if follows else SLIP


def _name1(row: Table1Row) -> str:
    return f"{DATASET_LABELS[row.dataset]}, {MODEL_LABELS[row.model]}, {METHOD_LABELS[row.method]}"


def _name2(row: Table2Row) -> str:
    return f"{MODEL_LABELS[row.model]}, {CONFIGURATION_LABELS[row.method]}"


def _scores() -> list[Finding]:
    return [
        Finding(
            "Table 1",
            f"{_name1(row)}: score",
            f"{row.score:.2f}",
            f"{row.score_computed:.2f}",
            _judged(row.score_agrees),
            f"{row.accuracy_percent} / ({row.seconds} s x {row.memory_gb:.2f} GB).",
        )
        for row in TABLE1
    ]


def _reductions() -> list[Finding]:
    return [
        Finding(
            "Table 2",
            f"{_name2(row)}: reduction",
            f"{row.reduction_percent:.1f} %",
            f"{row.reduction_computed_percent:.1f} %",
            _judged(row.reduction_agrees),
            f"{row.memory_gb:.3f} GB beside {_standard(row.model).memory_gb:.3f} GB.",
        )
        for row in TABLE2
        if row.reduction_percent is not None
    ]


def _standard(model: str) -> Table2Row:
    return _ablation(model, "fp32")


def _ablation(model: str, method: str) -> Table2Row:
    return next(row for row in TABLE2 if (row.model, row.method) == (model, method))


def _both_tables() -> list[Finding]:
    both = [(row, printed("cifar10", row.model, row.method)) for row in TABLE2]
    return [
        Finding(
            "Tables 1 and 2",
            f"{_name2(row)}: VRAM",
            f"{other.memory_gb:.2f} GB",
            f"{row.memory_gb:.3f} GB",
            _judged(rounds_to(row.memory_gb, other.memory_gb, 2)),
            "Table 1 prints what Table 2 prints with one more digit.",
        )
        for row, other in both
        if other is not None
    ]


def _claims() -> list[Finding]:
    cifar10, cifar100 = ("cifar10",), ("cifar100",)
    fp32, amp, ours = (printed("cifar10", "resnet18", method) for method in METHOD_LABELS)
    less_time = -min(_changes("seconds", "fp32"))
    less_memory = -min(_changes("memory_gb", "fp32", cifar10))
    gained = _gains("fp32")
    table2 = _ablation("efficientnet_b0", "triaccel").reduction_computed_percent
    cut_off = f"The largest is {less_time:.2f} %"
    made = [
        _number(
            "time_cifar10",
            -min(_changes("seconds", "fp32", cifar10)),
            f"{cut_off}, of {_where_most('seconds')}.",
        ),
        _number("memory_cifar10", less_memory, f"By Table 1's two digits; by Table 2's three it is {table2:.1f} %."),
        _number("accuracy_cifar10", max(_gains("fp32", cifar10)), "The same for both architectures."),
        _number("accuracy", ours.accuracy_percent, "Printed so in Table 1."),
        _number("memory_amp", amp.memory_gb, f"The figure is that of FP32, {fp32.memory_gb:.2f} GB."),
        _number("memory", ours.memory_gb, "Printed so in Table 1."),
        _occupancy(),
        _over_78(ours),
        _no_worse("no_worse_accuracy", "accuracy_percent", False),
        _no_worse("no_worse_time", "seconds", True),
        _no_worse("no_worse_memory", "memory_gb", True),
        _images(),
        _formula(),
        _spread("faster_than_amp", _changes("seconds", "amp"), lambda change: change < 0, "AMP's"),
        _spread("resnet_memory", _beside("memory_gb", "resnet18"), lambda change: change < 0, "theirs"),
        _spread("resnet_accuracy", _beside("accuracy_percent", "resnet18"), lambda change: change >= 0, "theirs"),
        _spread("efficientnet_time", _beside("seconds", "efficientnet_b0"), lambda change: change < 0, "theirs"),
        _spread("best_score", _beside("score", datasets=cifar10), lambda change: change > 0, "theirs"),
        _spread(
            "cifar100_accuracy", _beside("accuracy_percent", datasets=cifar100), lambda change: change > 0, "theirs"
        ),
        _trade_off(_beside("score", datasets=cifar100)),
        _precision_alone(),
        _combination(),
        *(
            _number(f"saved_{model}", _ablation(model, "triaccel").reduction_computed_percent, "From Table 2.")
            for model in MODEL_LABELS
        ),
        _number("faster", less_time, f"{cut_off}, which was cut off and not rounded."),
        _number("less_memory", -min(_changes("memory_gb", "fp32")), "By Table 1's two digits."),
        _number("gained_least", min(gained), "Printed so in Table 1."),
        _number("gained_most", max(gained), "Printed so in Table 1."),
        _number("gained_amp", max(_gains("amp")), f"Already the least is {min(_gains('amp')):.1f} pp."),
        _number("score_fp32", max(_changes("score", "fp32")), "From the printed scores."),
        _number("score_amp", max(_changes("score", "amp")), "From the printed scores."),
    ]
    return made


def _found(key: str, computed: str, follows: bool, note: str) -> Finding:
    claim = CLAIMS[key]
    return Finding(claim.where, claim.what, claim.printed, computed, _judged(follows), note)


def _number(key: str, computed: float, note: str) -> Finding:
    number, unit = CLAIMS[key].printed.split()
    decimals = len(number.partition(".")[2])
    # A whole-number claim is answered with a decimal, so that the size of the difference shows.
    shown = f"{computed:.{decimals or 1}f} {unit}"
    return _found(key, shown, rounds_to(computed, float(number), decimals), note)


def _spread(key: str, changes: list[float], follows: Callable[[float], bool], whose: str) -> Finding:
    shown = f"{min(changes):+.1f} to {max(changes):+.1f} %"
    return _found(key, shown, all(map(follows, changes)), f"Beside {whose}, over {len(changes)} pairs of Table 1.")


def _no_worse(key: str, field: str, less_is_better: bool) -> Finding:
    changes = _beside(field)
    worst = max(changes) if less_is_better else min(changes)
    note = f"The worst of {len(changes)} pairs of Table 1."
    return _found(key, f"{worst:+.1f} %", worst <= 0 if less_is_better else worst >= 0, note)


def _trade_off(changes: list[float]) -> Finding:
    shown = f"{min(changes):+.1f} to {max(changes):+.1f} %"
    return _found("trade_off", shown, min(changes) < 0, "Nothing is given up: Tri-Accel's score is the best there too.")


def _occupancy() -> Finding:
    shares = [100 * row.memory_gb / paper.DEVICE_GB for row in TABLE1 if row.method == "triaccel"]
    shown = f"{min(shares):.1f} to {max(shares):.1f} %"
    note = (
        f"Of {paper.DEVICE_GB} GB, and less than FP32 occupies; were that MemMax, the rule of section 3.3 could only "
        "raise B."
    )
    return _found("occupancy", shown, min(_changes("memory_gb", "fp32")) >= 0, note)


def _over_78(ours: Table1Row) -> Finding:
    least = float(CLAIMS["over_78"].printed.split()[1])
    return _found("over_78", f"{ours.accuracy_percent:.1f} %", ours.accuracy_percent > least, "Printed so in Table 1.")


def _images() -> Finding:
    total = paper.TRAIN_IMAGES + paper.TEST_IMAGES
    note = f"{paper.TRAIN_IMAGES:,} + {paper.TEST_IMAGES:,}."
    return _found("images", f"{total:,}", total == paper.IMAGES, note)


def _formula() -> Finding:
    computed = [100 * row.accuracy_percent / (row.seconds * 100 * row.memory_gb / paper.DEVICE_GB) for row in TABLE1]
    agreeing = sum(abs(value - row.score) <= paper.SCORE_TOLERANCE for value, row in zip(computed, TABLE1))
    first = TABLE1[0]
    note = (
        f"In percent of {paper.DEVICE_GB} GB the first row would print {computed[0]:.2f} for {first.score:.2f}; "
        "the column holds Acc / (Time x VRAM in GB)."
    )
    return _found("formula", f"{agreeing} of {len(TABLE1)} rows", agreeing == len(TABLE1), note)


def _precision_alone() -> Finding:
    reductions = [_ablation(model, "triaccel_precision").reduction_computed_percent for model in MODEL_LABELS]
    shown = f"-{max(reductions):.1f} to -{min(reductions):.1f} %"
    return _found("precision_alone", shown, min(reductions) > 0, "From Table 2.")


def _combination() -> Finding:
    shares = [
        100
        * _ablation(model, "triaccel_precision").reduction_computed_percent
        / _ablation(model, "triaccel").reduction_computed_percent
        for model in MODEL_LABELS
    ]
    shown = f"{min(shares):.0f} to {max(shares):.0f} %"
    return _found("combination", shown, max(shares) < 100, "Not the full reduction, but most of it.")


def _pairs(baseline: str, datasets: tuple[str, ...]) -> list[tuple[Table1Row, Table1Row]]:
    """Tri-Accel's row and the baseline's for each data set and model of Table 1."""
    ours = (row for row in TABLE1 if row.method == "triaccel" and row.dataset in datasets)
    return [(row, printed(row.dataset, row.model, baseline)) for row in ours]


def _changes(
    field: str, baseline: str, datasets: tuple[str, ...] = tuple(DATASET_LABELS), model: str | None = None
) -> list[float]:
    """100 x (Tri-Accel / baseline - 1) of one column: negative where Tri-Accel prints the smaller figure."""
    pairs = _pairs(baseline, datasets)
    return [
        100 * (getattr(ours, field) / getattr(theirs, field) - 1)
        for ours, theirs in pairs
        if model in (None, ours.model)
    ]


def _beside(field: str, model: str | None = None, datasets: tuple[str, ...] = tuple(DATASET_LABELS)) -> list[float]:
    """The changes beside both baselines."""
    return [change for baseline in ("fp32", "amp") for change in _changes(field, baseline, datasets, model)]


def _gains(baseline: str, datasets: tuple[str, ...] = tuple(DATASET_LABELS)) -> list[float]:
    return [ours.accuracy_percent - theirs.accuracy_percent for ours, theirs in _pairs(baseline, datasets)]


def _where_most(field: str) -> str:
    """The pair in which Tri-Accel's figure falls most below FP32's."""
    ours, _ = min(
        _pairs("fp32", tuple(DATASET_LABELS)), key=lambda pair: getattr(pair[0], field) / getattr(pair[1], field)
    )
    return f"{MODEL_LABELS[ours.model]} on {DATASET_LABELS[ours.dataset]}"


def _memory() -> list[Finding]:
    rows1 = [("Table 1", _name1(row), row, row.dataset, 2) for row in TABLE1]
    rows2 = [("Table 2", _name2(row), row, "cifar10", 3) for row in TABLE2]
    return [_fits(*row) for row in (*rows1, *rows2)]


def _fits(where: str, name: str, row: Table1Row | Table2Row, dataset: str, decimals: int) -> Finding:
    size, classes = paper.INPUT_SIZES[row.model], paper.CLASSES[dataset]
    widths = _WIDTHS.get(row.method, NARROWEST)
    least = _least_gb(row.model, size, classes, widths, rerun=True)
    plain = _least_gb(row.model, size, classes, widths, rerun=False)
    note = f"B = {paper.BATCH} at {size}x{size}"
    if plain > least:
        small = min(paper.INPUT_SIZES.values())
        note += (
            f", blocks run again for the backward pass; {plain:.2f} GB where none is, "
            f"and {_least_gb(row.model, small, classes, widths, rerun=False):.2f} GB at {small}x{small}"
        )
    # Read as high as it can be: what rounds to it, in the larger unit.
    most = (row.memory_gb + 0.5 * 10**-decimals) * BYTES_PER_GIB / BYTES_PER_GB
    verdict = IMPOSSIBLE if least > most else CONSISTENT
    printed_gb = f"{row.memory_gb:.{decimals}f} GB"
    return Finding(where, f"{name}: VRAM of a step", printed_gb, f"at least {least:.2f} GB", verdict, f"{note}.")


def _least_gb(model: str, size: int, classes: int, widths: Widths, rerun: bool) -> float:
    return bounds.memory_bytes(_shape(model, size), classes, paper.BATCH, widths, rerun) / BYTES_PER_GB


def _shape(model: str, size: int) -> NetworkShape:
    shape = bounds.shape_of(model, size)
    if shape is None:
        raise LookupError(f"{bounds.FILE}: expected {model} at {size}, got no such network; run scripts/make_bounds.py")
    return shape


def _times() -> list[Finding]:
    return [_in_time(row) for row in TABLE1]


def _in_time(row: Table1Row) -> Finding:
    size = paper.INPUT_SIZES[row.model]
    arithmetic = "fp32" if row.method == "fp32" else "16 bit"
    rates = {name: bounds.CARDS[name].rate(arithmetic) for name in paper.CARDS}
    fastest = max(rates, key=rates.get)
    shape = _shape(row.model, size)
    least = bounds.seconds(shape, paper.CLASSES[row.dataset], paper.TRAIN_IMAGES, rates[fastest])
    note = (
        f"{100 * least / row.seconds:.1f} % of the time, at the {rates[fastest] / 1e12:.1f} TFLOP/s ({arithmetic}) "
        f"of the {fastest}, images of {size}x{size}"
    )
    other = printed(row.dataset, "resnet18", row.method)
    if row.seconds < other.seconds:
        ratio = shape.products / _shape(other.model, paper.INPUT_SIZES[other.model]).products
        note += f"; {ratio:.0f} times the multiply-adds of {MODEL_LABELS[other.model]}, whose epoch is printed longer"
    # Read as long as it can be: what rounds to it.
    verdict = IMPOSSIBLE if least > row.seconds + 0.05 else CONSISTENT
    what = f"{_name1(row)}: time of an epoch"
    return Finding("Table 1", what, f"{row.seconds} s", f"at least {least:.2f} s", verdict, f"{note}.")
