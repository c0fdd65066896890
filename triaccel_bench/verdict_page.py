"""``results/README.md``: what the paper states, what records say of it, and what Tri-Accel+ has to reach.

The same records give the same bytes. No figure is typed here: the paper's come from ``paper``, targets from
``targets``, all others from records.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from triaccel_bench import footers, targets, verdicts
from triaccel_bench import verdict_tables as tables
from triaccel_bench.cells import Cell
from triaccel_bench.evidence import EQUAL_TIME, FOLLOWED, MEAN_BATCH, OURS, SHUFFLED, Evidence
from triaccel_bench.labels import METHODS
from triaccel_bench.layout import Table, markdown, to_markdown
from triaccel_bench.paper import DATASET_LABELS, MODEL_LABELS
from triaccel_bench.results import Results


class NoEvidence(Exception):
    """The message says what there is instead."""


TITLE = "# What of Tri-Accel's paper reproduces"
"""The first line."""


def evidence_of(results: Results, device: str = "") -> Evidence:
    """What a page rests on; ``device`` as ``Evidence`` takes it.

    Raises:
        NoEvidence: no record of a cell of the paper is of a device so named.
    """
    evidence = Evidence(results, device)
    if device and evidence.device_name is None:
        known = " or ".join(evidence.other_devices) or "no device"
        raise NoEvidence(f"--device {device}: expected part of a device's name, got records of {known}; correct it")
    return evidence


def page(evidence: Evidence) -> str:
    """The whole page as Markdown."""
    judged = verdicts.judged(evidence)
    blocks = [
        TITLE,
        _introduction(evidence, judged),
        _section(tables.measured(evidence)),
        _section(tables.claims(judged)),
        "### How verdicts are made",
        "\n".join(f"- {rule}" for rule in verdicts.RULES),
        _section(tables.rows_of_table1(evidence)),
        _section(tables.targets_table(evidence)),
        _section(tables.controls(evidence)),
        _section(tables.where_time_goes(evidence, tables.losses(evidence))),
        _section(tables.levelled(evidence)),
        _section(tables.trials(evidence)),
        "## What is missing",
        "\n".join(f"- {markdown(sentence)}" for sentence in _missing(evidence)),
    ]
    return "\n\n".join(block.strip() for block in blocks if block.strip()) + "\n"


def _section(table: Table) -> str:
    """A table whose title is a heading of the page."""
    return to_markdown(table).removeprefix("#")


def _introduction(evidence: Evidence, judged: Sequence[verdicts.Judged]) -> str:
    counts = Counter(each.verdict for each in judged)
    told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in verdicts.VERDICT.values() if counts[verdict])
    runs = sum(len(cell.summaries) for cell in evidence.cells)
    outcomes = Counter(each.outcome for each in targets.reached(evidence))
    sentences = [
        "Made by `triaccel-tables verdicts` from run records alone: the same records give the same page, and no figure "
        "is typed by hand.",
        markdown(footers.provenance_text(evidence.cells)),
        f"{tables.count(runs, 'finished run')} in {tables.count(len(evidence.cells), 'cell')}.",
        "Methods are compared seed by seed, as differences of accuracy in points and as ratios of all else, with 95 % "
        f"intervals; {tables.count(evidence.tests, 'p value')} are corrected by Holm, those of the paper's claims, of "
        "the targets and of the controls each among themselves.",
    ]
    summary = [
        f"**Of {len(judged)} claims:** {told}.",
        f"**Of {outcomes.total()} targets for Tri-Accel Plus:** "
        + ", ".join(f"{outcomes[outcome]} {outcome}" for outcome in targets.OUTCOMES if outcomes[outcome])
        + ".",
        _lead(evidence),
    ]
    return "\n\n".join([" ".join(sentences), *summary])


def _lead(evidence: Evidence) -> str:
    losses = tables.losses(evidence)
    return f"**The paper's method against AMP:** {' '.join(losses)}" if losses else ""


METHODS_TUNED = ("fp32", "tf32", "amp", "triaccel", OURS)
_METHODS_PLANNED = ("fp32", "tf32", "amp", "triaccel_batch", "triaccel_precision", "triaccel", OURS)
_CONTROLS_PLANNED = (
    (MEAN_BATCH, "amp"), (EQUAL_TIME, "fp32"), (EQUAL_TIME, "amp"), (FOLLOWED, "replay"), (SHUFFLED, "replay"),
)  # fmt: skip


def _trials_finished(evidence: Evidence, model: str) -> dict[str, int]:
    """Of each method that is tuned, in whichever of its tunings has most."""
    finished = dict.fromkeys(METHODS_TUNED, 0)
    for each in evidence.tunings:
        if (each.dataset, each.model) == ("cifar10", model) and each.method in finished:
            finished[each.method] = max(finished[each.method], each.finished)
    return finished


def seeds_planned(model: str, method: str) -> int:
    """As ``conf/experiment/reproduce`` has them: more where accuracy is held against a margin of tenths of a point."""
    return 10 if model == "resnet18" and method in ("fp32", "amp", "triaccel", OURS) else 3


def _fewer_seeds(found: Mapping[str, Cell | None], model: str) -> list[str]:
    counts = {m: (len(cell.summaries), seeds_planned(model, m)) for m, cell in found.items() if cell is not None}
    return [
        f"{METHODS[method]} ({count} of {planned})" for method, (count, planned) in counts.items() if count < planned
    ]


def _controls_lacking(evidence: Evidence, model: str) -> list[str]:
    """None where there is nothing that they could be held against, which is told by itself."""
    if evidence.cell("cifar10", model, OURS) is None:
        return []
    found = {(kind, cell.method): len(cell.summaries) for kind, cell in evidence.controls("cifar10", model)}
    lacking = []
    for kind, method in _CONTROLS_PLANNED:
        seeds, planned = found.get((kind, method), 0), seeds_planned(model, "replay")
        if seeds < planned:
            of_them = f" ({seeds} of {tables.count(planned, 'seed')})" if seeds else ""
            lacking.append((kind if method == "replay" else f"{METHODS[method]} {kind}") + of_them)
    return lacking


def _missing(evidence: Evidence) -> list[str]:
    """What a whole reproduction has and these records have not."""
    told = []
    for model, label in MODEL_LABELS.items():
        found = {m: evidence.cell("cifar10", model, m) for m in _METHODS_PLANNED}
        lacking = [METHODS[method] for method, cell in found.items() if cell is None]
        told += [f"CIFAR-10, {label}: no record of {', '.join(lacking)}."] if lacking else []
        fewer = _fewer_seeds(found, model)
        told += [f"CIFAR-10, {label}: fewer seeds than planned: {', '.join(fewer)}."] if fewer else []
        lacking = _controls_lacking(evidence, model)
        told += [f"CIFAR-10, {label}: controls lacking: {', '.join(lacking)}."] if lacking else []
        tried = _trials_finished(evidence, model)
        most = max(tried.values())
        fewer = [f"{METHODS[method]} ({count} of {most})" for method, count in tried.items() if count < most]
        told += [f"CIFAR-10, {label}: fewer finished trials than another method has: {', '.join(fewer)}."] * bool(fewer)
        first = [METHODS[each.method] for each in evidence.tunings if each.model == model and each.lacking]
        told += [f"{label}: no second round of trials of {', '.join(first)}."] * bool(first)
    told += [f"{label}: no record." for dataset, label in DATASET_LABELS.items() if not evidence.has(dataset)]
    for cell in evidence.unfinished:
        kind = next((kind for kind, each in evidence.controls(cell.dataset, cell.model) if each is cell), None)
        told += [f"{tables.name(cell, kind)}: not in the mean: {phrase}" for phrase in cell.excluded]
    for cell in evidence.unused:
        told.append(f"Not on this page: {tables.name(cell)}, cell {cell.cell}: not comparable with the rest.")
    told += [f"Not on this page: records of {device}." for device in evidence.other_devices]
    if strange := ", ".join("/".join(each) for each in evidence.strange):
        whole = "whose networks train from scratch on the whole of CIFAR-10 or CIFAR-100 at 32 x 32"
        told.append(f"Not on this page: records of {strange}: no cell of the paper, {whole}.")
    told += [f"Not used: {problem}" for problem in evidence.problems]
    return told or ["Nothing."]
