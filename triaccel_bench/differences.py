"""The table of how much methods differ from the baselines, with what may be claimed of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas

from triaccel_bench import compare, footers
from triaccel_bench.cells import Cell, Counterparts, tuned_apart
from triaccel_bench.compare import Bound, Difference, Verdict
from triaccel_bench.footers import NOT_MEASURED
from triaccel_bench.labels import method_label
from triaccel_bench.layout import Table
from triaccel_bench.results import Results
from triaccel_bench.sheet import Sheet

BASELINES = ("fp32", "tf32", "amp")
MARGIN = 0.3
"""Points of accuracy that a method may lose and count as not inferior, unless another margin is asked for."""
LEAST_BYTES = 2e6
"""Smaller differences of VRAM are the allocator's rounding, and no claim."""
LABELS = ("Dataset", "Architecture", "Method", "Against")
CAPTION = (
    "Paired by seed, n shared seeds, mean with its 95 % interval (Student's t); accuracy in points, the others as "
    "ratios of geometric means. A difference is claimed (higher, lower) only if its interval excludes none at all "
    "and its p value, corrected by Holm over the {tests} of this table, is below 5 %. Detectable: the smallest "
    "difference of accuracy that n seeds so far apart would have shown four times in five. Not inferior: the "
    "one-sided 95 % bound of what accuracy may be lost, against a margin of {margin:g} points."
)


@dataclass(frozen=True)
class Quantity:
    header: str
    field: str
    """Of ``RunSummary``."""
    ratio: bool
    decimals: int


ACCURACY = Quantity("Acc (points)", "accuracy_percent", False, 2)
QUANTITIES = (
    ACCURACY,
    Quantity("Time (×)", "seconds", True, 3),
    Quantity("Memory (×)", "memory_peak_bytes", True, 3),
    Quantity("Score (×)", "score", True, 3),
)


@dataclass(frozen=True)
class _Claim:
    """One quantity's difference, its p value after Holm's correction, and what may be said of it."""

    found: Difference | None
    p: float | None
    verdict: Verdict


@dataclass(frozen=True)
class _Pair:
    cell: Cell
    against: Cell
    claims: dict[Quantity, _Claim]
    bound: Bound | None


def differences(results: Results, margin: float = MARGIN) -> Table:
    """Each method against each baseline that was run with the same data, model, device and other settings."""
    sheet = Sheet(results, method_label)
    pairs = _pairs(sheet.cells, margin)
    count = sum(claim.p is not None for pair in pairs for claim in pair.claims.values())
    caption = CAPTION.format(tests=f"{count} test{'s' * (count != 1)}", margin=margin)
    rows = [_shown(pair, sheet) for pair in pairs]
    columns = [*LABELS, "n", *(q.header for q in QUANTITIES), "Detectable (points)", "Not inferior"]
    told = [name for name in columns[len(LABELS) :] if any(row[name] not in ("", NOT_MEASURED) for row in rows)]
    header = (*LABELS, *(told if rows else columns[len(LABELS) :]))
    accuracies = [pair.claims[ACCURACY].found for pair in pairs]
    notes = [
        *sheet.variant_notes,
        *(["One shared seed: no interval, and no claim."] if any(each and each.n == 1 for each in accuracies) else []),
        *_own_rates(pairs, sheet),
        *footers.left_out(sheet.cells, sheet.name),
        *(f"Not used: {problem}" for problem in sheet.problems),
    ]
    return Table(
        title="Differences between methods",
        caption=f"{footers.provenance_text(sheet.cells)} {caption}",
        header=header,
        rows=tuple(tuple(row[column] for column in header) for row in rows),
        footers=tuple(notes),
        frame=pandas.DataFrame([_data(pair) for pair in pairs], dtype=object),
        text_columns=len(LABELS),
        group_columns=2,
    )


def _own_rates(pairs: list[_Pair], sheet: Sheet) -> list[str]:
    told = [(pair, apart) for pair in pairs if (apart := tuned_apart(pair.cell, pair.against))]
    return [
        f"{sheet.name(pair.cell)} against {sheet.name(pair.against)}: each at its own {apart}" for pair, apart in told
    ]


def _pairs(cells: list[Cell], margin: float) -> list[_Pair]:
    """Of all cells; p values are corrected over all of them together."""
    counterparts = Counterparts(cells)
    compared = [
        (cell, against)
        for cell in cells
        for method in BASELINES[: BASELINES.index(cell.method) if cell.method in BASELINES else None]
        if (against := counterparts.of(cell, method)) is not None
    ]
    found = [
        compare.paired(values(cell, quantity.field), values(against, quantity.field), ratio=quantity.ratio)
        for cell, against in compared
        for quantity in QUANTITIES
    ]
    tests = iter(zip(found, compare.holm([each and each.p for each in found]), strict=True))
    pairs = []
    for cell, against in compared:
        claims = {
            quantity: _Claim(each, p, compare.verdict(each, p, least(against, quantity)))
            for quantity, (each, p) in zip(QUANTITIES, tests)
        }
        accuracies = values(cell, ACCURACY.field), values(against, ACCURACY.field)
        pairs.append(_Pair(cell, against, claims, compare.not_inferior(*accuracies, margin)))
    return pairs


def values(cell: Cell, field: str) -> dict[int, float]:
    """A ``RunSummary`` field of each finished seed that measured it; of memory, by the cell's one meter.

    All but accuracy are compared as ratios, and a clock that saw no second has measured none.
    """
    chosen = cell.summaries
    if field == "memory_peak_bytes":
        chosen = [summary for summary in chosen if summary.meter == cell.meter]
    found = {each.seed: getattr(each, field) for each in chosen if getattr(each, field) is not None}
    return {seed: value for seed, value in found.items() if value > 0 or field == ACCURACY.field}


def least(against: Cell, quantity: Quantity) -> float:
    """The smallest difference from that cell that can be claimed."""
    memory = against.mean("memory_peak_bytes")
    return LEAST_BYTES / memory.mean if quantity.field == "memory_peak_bytes" and memory else 0.0


def _shown(pair: _Pair, sheet: Sheet) -> dict[str, str]:
    shown = dict(zip(LABELS, (*sheet.names(pair.cell), sheet.names(pair.against)[-1]), strict=True))
    shown["n"] = str(max((claim.found.n for claim in pair.claims.values() if claim.found), default=0))
    shown |= {quantity.header: _text(claim, quantity) for quantity, claim in pair.claims.items()}
    accuracy = pair.claims[ACCURACY].found
    detectable = accuracy and accuracy.detectable
    shown["Detectable (points)"] = NOT_MEASURED if detectable is None else f"{detectable:.2f}"
    shown["Not inferior"] = NOT_MEASURED
    if pair.bound is not None and pair.bound.below is not None:
        shown["Not inferior"] = f"{'yes' if pair.bound.holds else 'not shown'} ({-pair.bound.below:+.2f})"
    return shown


def _text(claim: _Claim, quantity: Quantity) -> str:
    found = claim.found
    if found is None:
        return NOT_MEASURED
    sign = "" if quantity.ratio else "+"
    known = [value for value in (found.mean, found.low, found.high) if value is not None]
    mean, *interval = (f"{value:{sign}.{quantity.decimals}f}" for value in known)
    return f"{mean} [{', '.join(interval)}] {claim.verdict}" if interval else mean


def _data(pair: _Pair) -> dict[str, Any]:
    data: dict[str, Any] = {key: getattr(pair.cell, key) for key in ("dataset", "model", "method", "variant", "cell")}
    data |= {"against": pair.against.method, "against_cell": pair.against.cell, "device_name": pair.cell.device_name}
    for quantity, claim in pair.claims.items():
        found, name = claim.found, f"{quantity.field}_{'ratio' if quantity.ratio else 'difference'}"
        for part in ("mean", "low", "high", "n", "p", "detectable"):
            data[name if part == "mean" else f"{name}_{part}"] = found and getattr(found, part)
        data |= {f"{name}_p_holm": claim.p, f"{name}_claim": claim.verdict}
    bound = pair.bound
    data |= {"margin_points": bound and bound.margin, "may_be_lost_points": bound and bound.below}
    return data | {"not_inferior": bound and bound.holds}
