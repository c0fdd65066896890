"""The tables of the page of verdicts, each with what is to be said below it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

import pandas

from triaccel_bench import compare, footers, targets, tuning, verdicts
from triaccel_bench.cells import Cell, tuned_apart
from triaccel_bench.differences import MARGIN, QUANTITIES, values
from triaccel_bench.evidence import EQUAL_TIME, FOLLOWED, MEAN_BATCH, OURS, SHUFFLED, Compared, Evidence
from triaccel_bench.footers import NOT_MEASURED
from triaccel_bench.labels import METHODS, dataset_label, model_label
from triaccel_bench.layout import Table
from triaccel_bench.paper import BYTES_PER_GB, DATASET_LABELS, MODEL_LABELS
from triaccel_bench.stats import PARTS

QUANTITY_NAMES = {"accuracy_percent": "accuracy", "seconds": "time", "memory_peak_bytes": "VRAM", "score": "score"}
PARTS_OF_RUN = 10
"""Levelled off is said by the last of so many parts of a run beside the one before."""


def measured(evidence: Evidence) -> Table:
    header = (
        "Dataset", "Architecture", "Method", "Acc (%)", "Time (s)", "VRAM (GB)", "Eff. Score", "Batch", "Training (s)",
        "Start (s)", "Seeds", "Epochs",
    )  # fmt: skip
    rows = []
    for cell in evidence.cells:
        figures = (
            _mean(cell, "accuracy_percent", 2), _mean(cell, "seconds", 3),
            _mean(cell, "memory_peak_bytes", 4, BYTES_PER_GB), _mean(cell, "score", 2), _mean(cell, "batch_mean", 0),
            _mean(cell, "training_seconds", 1), _mean(cell, "first_use_seconds", 1),
        )  # fmt: skip
        rows.append((*_names(cell), *figures, cell.seeds_told, str(cell.runs[0].epochs_planned)))
    notes = [
        *footers.executions(evidence.cells, name),
        *footers.estimators(evidence.cells, name),
        *footers.stale_curvature(evidence.cells, name),
        *footers.rounded_products(evidence.cells, name),
        *footers.company(evidence.cells, name),
    ]
    caption = (
        "Time: training seconds an epoch over the last epochs. VRAM: peak of the whole run, without the data set. "
        "Batch: that an average sample was trained in. Training: seconds of the whole run. "
        "Start: seconds before the first epoch, in which libraries load, kernels compile where they never did, and "
        "MemMax is measured; runs that went on add up."
    )
    return _table("Measured", caption, header, rows, notes)


def _mean(cell: Cell, quantity: str, decimals: int, scale: float = 1) -> str:
    value = cell.mean(quantity)
    if value is None:
        return NOT_MEASURED
    value = value.scaled(1 / scale)
    return f"{value.mean:.{decimals}f}" + ("" if value.std is None else f" ± {value.std:.{decimals}f}")


def claims(judged: Sequence[verdicts.Judged]) -> Table:
    rows = [(each.claim.where, each.claim.what, each.claim.printed, each.measured, each.verdict) for each in judged]
    header = ("Where", "What the paper says", "It prints", "Measured here", "Verdict")
    return _table("Claim by claim", "On CIFAR-10 where nothing else is said.", header, rows)


def rows_of_table1(evidence: Evidence) -> Table:
    header = ("Dataset", "Architecture", "Method", "Against", *(quantity.header for quantity in QUANTITIES))
    rows = []
    for dataset in DATASET_LABELS:
        for model in MODEL_LABELS if evidence.has(dataset) else ():
            for ours, theirs in verdicts.printed_pairs(dataset, model):
                shown = []
                for quantity in QUANTITIES:
                    effect = verdicts.printed_effect(ours, theirs, quantity.field)
                    sign = "" if quantity.ratio else "+"
                    compared = evidence.pair(dataset, model, ours.method, theirs.method, quantity.field)
                    state = "untested" if compared is None else verdicts.against_printed(compared, effect)
                    measured = "no finished runs of both" if compared is None else compared.text
                    shown.append(f"{effect:{sign}.{quantity.decimals}f} → {measured}: {verdicts.VERDICT[state]}")
                names = DATASET_LABELS[dataset], MODEL_LABELS[model], METHODS[ours.method], METHODS[theirs.method]
                rows.append((*names, *shown))
    caption = (
        "The printed figure of the first method beside that of the second, then the same of what was measured. Cards "
        "differ, so that seconds are compared within each. Where the paper prints a loss, it is reproduced if "
        "it may be as small as printed."
    )
    notes = [f"{label}: no record." for dataset, label in DATASET_LABELS.items() if not evidence.has(dataset)]
    return _table("Table 1, row against row", caption, header, rows, notes, text_columns=4)


def targets_table(evidence: Evidence) -> Table:
    rows = [
        (
            MODEL_LABELS[each.target.model], METHODS[each.target.against], QUANTITY_NAMES[each.field], each.asked,
            each.measured, each.outcome,
        )
        for each in targets.reached(evidence)
    ]  # fmt: skip
    caption = f"On CIFAR-10, with FP32's measured peak as the memory budget. {targets.RULES}"
    header = ("Architecture", "Against", "Quantity", "Target", "Measured", "Outcome")
    budgets = [
        f"{name(cell)}: budget {_mean(cell, 'budget_bytes', 4, BYTES_PER_GB)} GB ({footers.budget_source(cell)})"
        for cell in evidence.cells
        if cell.method == OURS
    ]
    return _table(
        "Targets of Tri-Accel Plus", caption, header, rows, [*budgets, *_gains(evidence), *_whole_runs(evidence)]
    )


def _gains(evidence: Evidence) -> list[str]:
    """Beside the paper's own gain in accuracy, for whoever asks how Tri-Accel Plus compares with that."""
    claim = verdicts.CLAIMS["accuracy_cifar10"]
    told = [
        f"{MODEL_LABELS[model]} {compared.text}"
        for model in MODEL_LABELS
        if (compared := evidence.pair("cifar10", model, OURS, "fp32", "accuracy_percent"))
    ]
    return [f"The paper's gain over FP32 is {claim.printed}; Tri-Accel Plus's: {'; '.join(told)}."] if told else []


def _whole_runs(evidence: Evidence) -> list[str]:
    """A time that is the last epochs' flatters a method whose epochs become shorter."""
    told = []
    for model, label in MODEL_LABELS.items():
        ours = evidence.cell("cifar10", model, OURS)
        for against in ("fp32", "amp"):
            theirs = evidence.cell("cifar10", model, against)
            if ours is None or theirs is None:
                continue
            found = compare.paired(values(ours, "training_seconds"), values(theirs, "training_seconds"), ratio=True)
            if found is not None:
                told.append(f"{label} × {footers.ratio(found)} {METHODS[against]}'s, n = {found.n}")
    said = f"Time and score are of the last epochs. Training seconds of whole runs, no target: {'; '.join(told)}."
    return [said] if told else []


SAID = {
    MEAN_BATCH: "AMP with Tri-Accel Plus's mean batch from the start, at the rate that its rule gives there",
    EQUAL_TIME: "as many epochs as fit in Tri-Accel Plus's training time",
    FOLLOWED: "its recorded schedule, open loop: nothing is read or decided",
    SHUFFLED: "that schedule with the layers dealt one another's rates (and dtypes, where they differ)",
}


def controls(evidence: Evidence) -> Table:
    header = (
        "Architecture", "Control", "What it is", "Acc (%)", "Training (s)", "Acc (points)",
        "Time (×)", "Memory (×)", "Score (×)",
    )  # fmt: skip
    rows, notes = [], []
    for dataset in DATASET_LABELS:
        for model in MODEL_LABELS:
            ours, found = evidence.cell(dataset, model, OURS), evidence.controls(dataset, model)
            for kind, cell in found:
                compared = (_plain(evidence.compared(ours, cell, quantity.field)) for quantity in QUANTITIES)
                rows.append((MODEL_LABELS[model], _control_label(kind, cell), SAID[kind], *_run(cell), *compared))
            if found:
                rows.append((MODEL_LABELS[model], METHODS[OURS], "", *_run(ours), *[""] * len(QUANTITIES)))
            notes += _layers(evidence, model, found)
    caption = (
        "Each control has one thing of Tri-Accel Plus and not the rest. Where Tri-Accel Plus is no better than a "
        "control, that one thing is enough for its gain. Acc (points) and what follows: Tri-Accel Plus against it."
    )
    return _table(
        "Where its gain comes from", caption, header, rows, notes or ["No controls among the records."] * (not rows)
    )


def _control_label(kind: str, cell: Cell) -> str:
    batch, epochs = cell.settings["method"]["batch"]["initial"], cell.runs[0].epochs_planned
    if kind == MEAN_BATCH:
        return f"{METHODS[cell.method]}, B = {batch}"
    return f"{METHODS[cell.method]}, {count(epochs, 'epoch')}" if kind == EQUAL_TIME else kind


def _run(cell: Cell) -> tuple[str, str]:
    """What a run came to and took."""
    return _mean(cell, "accuracy_percent", 2), _mean(cell, "training_seconds", 1)


def _plain(compared: Compared | None) -> str:
    if compared is None or compared.found is None:
        return NOT_MEASURED
    return f"{compared.text} ({compared.verdict})" if compared.known else compared.text


def _layers(evidence: Evidence, model: str, found: list[tuple[str, Cell]]) -> list[str]:
    """Whether it matters which layer has which plan."""
    notes = []
    for cell in (cell for kind, cell in found if kind == FOLLOWED):
        for other in (other for kind, other in found if kind == SHUFFLED):
            compared = evidence.compared(cell, other, "accuracy_percent")
            if compared is not None:
                notes.append(
                    f"{MODEL_LABELS[model]}: the schedule against its shuffled twin: accuracy {_plain(compared)}."
                )
    return notes


def losses(evidence: Evidence) -> list[str]:
    """A sentence a network: in what Tri-Accel as printed is worse than AMP."""
    told = []
    for (dataset, model), (ours, theirs) in _both(evidence):
        compared = {field: evidence.compared(ours, theirs, field) for field in QUANTITY_NAMES}
        known = {field: each for field, each in compared.items() if each is not None and each.known}
        where = f"{DATASET_LABELS[dataset]}, {MODEL_LABELS[model]}"
        good = {field: "lower" if field in verdicts.LESS_IS_BETTER else "higher" for field in known}
        better = [field for field, each in known.items() if each.verdict == good[field]]
        worse = [field for field, each in known.items() if each.verdict not in ("no claim", good[field])]
        parts = [
            f"{verb} in {_list(f'{QUANTITY_NAMES[f]} ({known[f].text})' for f in fields)}"
            for verb, fields in (("loses", worse), ("wins", better))
            if fields
        ]
        if parts:
            told.append(f"{where}: it {' and '.join(parts)}.")
        elif known:
            measured = _list(f"{QUANTITY_NAMES[field]} {each.text}" for field, each in known.items())
            told.append(f"{where}: no difference is shown (p corrected by Holm): {measured}.")
        else:
            told.append(f"{where}: no pair of seeds to tell by.")
    return told


def _both(evidence: Evidence) -> Iterable[tuple[tuple[str, str], tuple[Cell, Cell]]]:
    for dataset in DATASET_LABELS:
        for model in MODEL_LABELS:
            ours, theirs = (evidence.cell(dataset, model, method) for method in ("triaccel", "amp"))
            if ours is not None and theirs is not None:
                yield (dataset, model), (ours, theirs)


def _list(parts: Iterable[str]) -> str:
    return ", ".join(parts)


def where_time_goes(evidence: Evidence, losses: list[str]) -> Table:
    """Where an epoch's seconds go."""
    beside = "Steps are", "Batch", "Layers at the end"
    header = ("Dataset", "Architecture", "Method", "Time (s)", *(f"{part} (s)" for part in PARTS), *beside)
    rows = []
    for cell in evidence.cells:
        if cell.method in ("fp32", "amp", "triaccel", OURS):
            parts = footers.split_means(cell)
            shown = (NOT_MEASURED if parts[part] is None else f"{parts[part]:.3f}" for part in PARTS)
            limits = sorted({summary.verdict for summary in cell.summaries if summary.verdict})
            told = " or ".join(limits) or NOT_MEASURED, _mean(cell, "batch_mean", 0), footers.executed_layers(cell)
            rows.append((*_names(cell), _mean(cell, "seconds", 3), *shown, *told))
    notes = [*losses, *(sentence for _, pair in _both(evidence) if (sentence := _difference(*pair)))]
    caption = (
        "Seconds an epoch. Controller, probes and captures were clocked; the others are shares of sampled steps, and "
        f"{NOT_MEASURED} for epochs of another batch size or plan than the last."
    )
    return _table(
        "The paper's Tri-Accel against AMP, and where the time goes", caption, header, rows, notes, text_columns=3
    )


def _difference(ours: Cell, theirs: Cell) -> str:
    seconds = ours.mean("seconds"), theirs.mean("seconds")
    parts = footers.split_means(ours)
    clocked = {part: parts[part] for part in ("controller", "probe", "capture")}
    if None in seconds or None in clocked.values():
        return ""
    apart = seconds[0].mean - seconds[1].mean
    told = ", ".join(f"{part} {value:+.3f} s" for part, value in clocked.items())
    rest = apart - sum(clocked.values())
    return f"{name(ours)} against AMP: {apart:+.3f} s an epoch, of which {told}, and all steps together {rest:+.3f} s."


def levelled(evidence: Evidence) -> Table:
    rows = []
    for cell in (cell for cell in evidence.cells if cell.method == "fp32"):
        found = compare.paired(*_last_parts(cell))
        rows.append((*_names(cell)[:2], str(cell.runs[0].epochs_planned), *levelled_off(found)))
    caption = (
        f"Test accuracy, mean over the last of {PARTS_OF_RUN} equal parts of a run's epochs less that of the part "
        f"before, seed by seed. Levelled off: the whole 95 % interval lies below {MARGIN:g} points; still rising: "
        "above. The learning rate falls to zero by the last epoch whatever their number, so that this says that the "
        "run was finished, and not that a longer one would end no higher."
    )
    return _table("Had FP32 levelled off?", caption, ("Dataset", "Architecture", "Epochs", "Gain", "Verdict"), rows)


def _last_parts(cell: Cell) -> tuple[dict[int, float], dict[int, float]]:
    last, before = {}, {}
    done = {summary.seed for summary in cell.summaries}
    for run in (run for run in cell.runs if run.seed in done):
        accuracies = [epoch.evaluation_accuracy_percent for epoch in run.epochs]
        size = len(accuracies) // PARTS_OF_RUN
        ends = accuracies[-2 * size :]
        if size and None not in ends:
            last[run.seed], before[run.seed] = statistics.fmean(ends[size:]), statistics.fmean(ends[:size])
    return last, before


def levelled_off(found: compare.Difference | None) -> tuple[str, str]:
    """The gain as text, and what it says."""
    if found is None:
        return NOT_MEASURED, f"not tested: fewer than {PARTS_OF_RUN} epochs"
    if found.low is None:
        return f"{found.mean:+.2f} points, n = {found.n}", "not tested: one seed"
    text = f"{found.mean:+.2f} [{found.low:+.2f}, {found.high:+.2f}] points, n = {found.n}"
    return text, "levelled off" if found.high < MARGIN else "still rising" if found.low > MARGIN else "not shown"


def trials(evidence: Evidence) -> Table:
    rows = []
    for each in evidence.tunings:
        best, seeds, chosen = NOT_MEASURED, NOT_MEASURED, ""
        if (choice := each.best) is not None:
            best, seeds, chosen = f"{tuning.accuracy(choice):.2f}", str(len(choice.summaries)), _tuned_values(choice)
        names = DATASET_LABELS.get(each.dataset, each.dataset), MODEL_LABELS.get(each.model, each.model)
        epochs, told = each.trials[0].runs[0].epochs_planned, f"{each.finished} of {len(each.trials)}"
        rows.append((*names, METHODS.get(each.method, each.method), told, str(epochs), best, seeds, chosen))
    notes = (
        []
        if rows
        else ["No trials of this device among the records: all methods ran with the values that their records hold."]
    )
    alone = dict.fromkeys((each.dataset, each.model) for each in evidence.tunings if each.lacking)
    notes += [
        f"{DATASET_LABELS[dataset]} / {MODEL_LABELS[model]}: best of the first round alone, which does not tell trials "
        "of this network apart"
        for dataset, model in alone
    ]
    notes += [
        f"{name(cell)}: the runs above have {told}"
        for each in evidence.tunings
        for cell, told in _otherwise(evidence, each)
    ]
    notes += [f"{name(cell)} and {name(other)}: {apart}" for cell, other, apart in _own_rates(evidence)]
    choice = "Validation accuracy (%)", "Seeds", "Best"
    header = ("Dataset", "Architecture", "Method", "Trials finished", "Epochs", *choice)
    return _table("Tuning", "On training images that were held out.", header, rows, notes, text_columns=3)


def _otherwise(evidence: Evidence, tuned: tuning.Tuning) -> Iterable[tuple[Cell, str]]:
    """The cell that is reported, where it was not made with the best trial's values."""
    cell = evidence.cell(tuned.dataset, tuned.model, tuned.method)
    if cell is not None and tuned.best is not None and tuning.values(cell) != tuning.values(tuned.best):
        yield cell, _tuned_values(cell)


def _tuned_values(cell: Cell) -> str:
    return ", ".join(f"{key}={value}" for key, value in tuning.values(cell).items())


def _own_rates(evidence: Evidence) -> Iterable[tuple[Cell, Cell, str]]:
    """Cells that were compared at different learning rates or weight decays, beside FP32."""
    for cell in evidence.cells:
        fp32 = evidence.cell(cell.dataset, cell.model, "fp32")
        if fp32 is not None and (apart := tuned_apart(cell, fp32)):
            yield cell, fp32, apart


def _names(cell: Cell) -> tuple[str, str, str]:
    data = dataset_label(cell.dataset, cell.settings["dataset"], cell.samples)
    return data, model_label(cell.model, cell.settings), METHODS.get(cell.method, cell.method)


def name(cell: Cell, control: str | None = None) -> str:
    """``control``: its kind, of one of ``Evidence.controls``, which bears the name of the method that it is like."""
    dataset, model, method = _names(cell)
    return " / ".join((dataset, model, method if control is None else _control_label(control, cell)))


def _table(
    title: str,
    caption: str,
    header: Sequence[str],
    rows: Sequence[tuple[str, ...]],
    notes: Sequence[str] = (),
    text_columns: int | None = None,
) -> Table:
    frame = pandas.DataFrame(rows, columns=list(header), dtype=object)
    return Table(title, caption, tuple(header), tuple(rows), tuple(notes), frame, text_columns or len(header))


def count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
