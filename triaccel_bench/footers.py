"""What stands above and below the tables: provenance, what a row's figures leave unsaid, and why one is missing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from triaccel_bench import compare
from triaccel_bench.cells import Cell
from triaccel_bench.labels import ESTIMATORS, PAPER_ESTIMATOR, layer_mix
from triaccel_bench.records import Provenance
from triaccel_bench.stats import PARTS

NOT_MEASURED = "n/a"
UNEVEN = 0.1
"""Share by which a run's mean epoch may differ from its last epochs before that is told."""

Names = Callable[[Cell], str]
"""How a cell's row is called in a sentence."""


def provenance_text(found: list[Cell]) -> str:
    """Device, code and conventions of the table, for its caption."""
    provenances = [run.provenance for cell in found for run in cell.runs if run.provenance]
    devices = sorted({provenance.device_name for provenance in provenances})
    versions = sorted({version(provenance) for provenance in provenances})
    code, sources = ", ".join(versions) or "unknown", sorted({str(provenance.code_hash) for provenance in provenances})
    if len(sources) > len(versions):
        code += f"; sources {', '.join(sources)}"
    sentences = [f"Device: {', '.join(devices) or 'unknown'}.", f"Code: {code}."]
    if any(len(cell.summaries) > 1 for cell in found):
        sentences.append("Mean ± sample standard deviation (n - 1) over seeds.")
    return " ".join([*sentences, "GB = 1e9 bytes."])


def timing_text(found: list[Cell]) -> str:
    """What else moved the times, for the caption; empty where nothing did."""
    sentences = []
    if any(run.provenance and run.provenance.device == "cpu" for cell in found for run in cell.runs):
        sentences.append("Times are wall-clock on a machine that others may use.")
    if any(_probes(cell) for cell in found):
        sentences.append(
            "Curvature probes get a share of the time (method.curvature.max_overhead), so that two runs of one seed "
            "can decide differently."
        )
    return " ".join(sentences)


def version(provenance: Provenance) -> str:
    """The code that a run was made with, as a caption tells it."""
    state = "no commit"
    if provenance.git_commit:
        state = f"commit {provenance.git_commit[:12]}{', modified' if provenance.git_dirty else ''}"
    elif provenance.code_hash:
        state = f"sources {provenance.code_hash}"
    return f"{provenance.code_version} ({state})"


def _probes(cell: Cell) -> bool:
    curvature = cell.settings["method"]["curvature"]
    return curvature["rates"] or curvature["promotion"]


def left_out(found: list[Cell], name: Names) -> list[str]:
    return [f"{name(cell)}: not in the mean: {phrase}" for cell in found for phrase in cell.excluded]


def spread(found: list[Cell], name: Names) -> list[str]:
    single = [cell for cell in found if len(cell.summaries) == 1]
    if not single:
        return []
    whose = "" if len(single) == len(found) else f" for {', '.join(map(name, single))}"
    return [f"One seed: no standard deviation ({NOT_MEASURED}){whose}."]


def budgets(found: list[Cell], name: Names) -> list[str]:
    """Where each budget came from; the rows are named only where they differ."""
    sources = _alike([cell for cell in found if budget_source(cell)], name, budget_source)
    return [
        f"Budget: {_source_text(source)}" + (f" ({names})." if len(sources) > 1 else ".") for source, names in sources
    ]


def _source_text(source: str) -> str:
    kind, _, detail = source.partition(": ")
    return f"memory.budget={kind}, {detail}" if detail else f"{source} by memory.budget"


def budget_source(cell: Cell) -> str | None:
    return next((run.budget_source for run in cell.runs if run.budget_source), None)


def executions(found: list[Cell], name: Names) -> list[str]:
    """Rows whose layers ran in other dtypes than the method asked for, and why."""
    differing = [cell for cell in found if requested_layers(cell) != executed_layers(cell)]
    by_reason: dict[str, list[str]] = {}
    mixes = _alike(differing, name, lambda cell: (requested_layers(cell), executed_layers(cell), _reason(cell)))
    for (requested, executed, reason), names in mixes:
        by_reason.setdefault(reason, []).append(f"{names} asked for {requested}, executed {executed}")
    return [f"{'; '.join(rows)}: {reason}." for reason, rows in by_reason.items()]


def requested_layers(cell: Cell) -> str:
    return layer_mix(summary.layers_requested for summary in cell.summaries)


def executed_layers(cell: Cell) -> str:
    return layer_mix(summary.layers_executed for summary in cell.summaries)


def _reason(cell: Cell) -> str:
    precision = cell.settings["method"]["precision"]
    if cell.settings["device"] == "cpu":
        return (
            f"a CPU executes FP32 for 16-bit layers (method.precision.cpu_executes={precision['cpu_executes']}), "
            "so these rows' arithmetic is FP32's"
        )
    return f"{cell.device_name} has no native BF16 (method.precision.bf16_substitute={precision['bf16_substitute']})"


def estimators(found: list[Cell], name: Names) -> list[str]:
    """Rows whose curvature is another than the paper's."""
    others = [cell for cell in found if _probes(cell) and _estimator(cell) != PAPER_ESTIMATOR]
    return [
        f"{names}: curvature of the {ESTIMATORS.get(estimator, estimator)} (method.curvature.estimator={estimator})."
        for estimator, names in _alike(others, name, _estimator)
    ]


def rounded_products(found: list[Cell], name: Names) -> list[str]:
    """Rows, beside the baseline TF32 itself, whose FP32 layers are not FP32 in all."""
    rounded = [cell for cell in found if cell.settings["method"].get("tf32") and cell.method != "tf32"]
    if not rounded:
        return []
    names = ", ".join(map(name, rounded))
    return [f"{names}: layers in FP32 multiply in TF32 where the device has it (method.tf32=true)."]


def _estimator(cell: Cell) -> str:
    return cell.settings["method"]["curvature"]["estimator"]


def idle_controllers(found: list[Cell], name: Names) -> list[str]:
    """Rows of a method with a controller that never moved anything: their figures are a static method's."""
    idle = [
        cell
        for cell in found
        if cell.summaries and _has_controller(cell) and not any(summary.moved for summary in cell.summaries)
    ]
    return [
        f"{names}: no control decision took effect in {'this run' if runs == 1 else f'these {runs} runs'} ({pace})."
        for (pace, runs), names in _alike(idle, name, lambda cell: (_pace(cell), len(cell.summaries)))
    ]


def stale_curvature(found: list[Cell], name: Names) -> list[str]:
    """Rows whose curvature hardly took part."""
    told = []
    for cell in filter(_probes, found):
        seeds = [summary.seed for summary in cell.summaries if summary.hardly_probed]
        if seeds:
            told.append(f"{name(cell)} (seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))})")
    what = "curvature was never read of some layers, or of most of them in the first half of the steps alone"
    return [f"{'; '.join(told)}: {what}."] if told else []


def schedules(found: list[Cell], name: Names) -> list[str]:
    """Rows that followed a recorded schedule, and which."""
    following = [cell for cell in found if cell.settings.get("replay", {}).get("run") is not None]
    return [f"{names}: {told}." for told, names in _alike(following, name, _schedule)]


def _schedule(cell: Cell) -> str:
    replay = cell.settings["replay"]
    # Of the place where that was: cell and seed.
    recorded = "/".join(Path(replay["run"]).parts[-2:])
    told = f"nothing was read or decided; it followed schedule {replay['schedule']}, recorded in {recorded}"
    if replay["shuffle"] is None:
        return told
    return f"{told}, with the layers' dtypes and rates permuted among them (replay.seed={replay['seed']})"


def _has_controller(cell: Cell) -> bool:
    method = cell.settings["method"]
    return method["precision"]["adaptive"] or method["batch"]["elastic"] or _probes(cell)


def _pace(cell: Cell) -> str:
    steps, method = max(run.steps for run in cell.runs), cell.settings["method"]
    text = f"{steps} steps, a control step every {method['control']['interval']}"
    return f"{text}, a probe every {method['curvature']['every']}" if _probes(cell) else text


def whole_runs(found: list[Cell], name: Names) -> list[str]:
    """Rows whose last epochs, which are their time, are not like the rest."""
    told = []
    for cell in found:
        seconds, whole = cell.mean("seconds"), cell.mean("training_seconds")
        epochs = {summary.epochs for summary in cell.summaries}
        if not seconds or not seconds.mean or not whole or len(epochs) != 1:
            continue
        each = whole.mean / epochs.pop()
        if abs(each / seconds.mean - 1) > UNEVEN:
            told.append(f"{name(cell)} {each:.3f} s, {whole.mean:.1f} s in all")
    return [f"Mean epoch of the whole run, where the last are not like the rest: {'; '.join(told)}."] if told else []


def company(found: list[Cell], name: Names) -> list[str]:
    """Rows whose times were taken on a card that other runs may have used meanwhile."""
    rows = [name(cell) for cell in found if any(_shares_its_card(run.settings) for run in cell.runs)]
    return [f"{', '.join(rows)}: times on a GPU that other runs shared (runner.share_gpu=true)."] if rows else []


def _shares_its_card(settings: dict[str, Any]) -> bool:
    # Earlier records have no such setting.
    return settings["device"] != "cpu" and settings.get("runner", {}).get("share_gpu", False)


def splits(found: list[Cell], name: Names) -> list[str]:
    """Where the time of each row goes, in percent of it, and what bounds its steps."""
    return [f"{name(cell)}: {told}." for cell in found if (told := _split(cell))]


def _split(cell: Cell) -> str:
    verdicts = sorted({summary.verdict for summary in cell.summaries if summary.verdict})
    seconds, parts = cell.mean("seconds"), split_means(cell)
    if not verdicts or not seconds or not seconds.mean:
        return ""
    shares = ", ".join(
        f"{part} {NOT_MEASURED if mean is None else f'{100 * mean / seconds.mean:.0f} %'}"
        for part, mean in parts.items()
    )
    return f"{' or '.join(verdicts)}; of its time {shares}"


def split_means(cell: Cell) -> dict[str, float | None]:
    """Seconds of an epoch by part, mean over the seeds; None where one of them does not know."""
    each = {part: [summary.split_seconds.get(part) for summary in cell.summaries] for part in PARTS}
    return {part: None if not s or None in s else sum(s) / len(s) for part, s in each.items()}


def trends(found: list[Cell], name: Names) -> list[str]:
    """How each row's score by epoch changes over training, and what it is divided by."""
    told = [f"{name(cell)} {text}" for cell in found if (text := _trend(cell))]
    if not told:
        return []
    return [
        "Score by epoch, each from its own accuracy, seconds and peak: the last third of epochs over the first, and in "
        f"brackets the same of seconds × GB, whose fall alone is a gain in efficiency: {'; '.join(told)}."
    ]


def _trend(cell: Cell) -> str:
    score, cost = trend(cell, "score_thirds"), trend(cell, "cost_thirds")
    return f"{ratio(score)} ({ratio(cost)}; n = {score.n})" if score and cost else ""


def trend(cell: Cell, thirds: str) -> compare.Difference | None:
    """The last third over the first of that field, as a ratio, paired by seed."""
    known = {s.seed: value for s in cell.summaries if (value := getattr(s, thirds)) and min(value) > 0}
    first, last = ({seed: value[end] for seed, value in known.items()} for end in (0, 1))
    return compare.paired(last, first, ratio=True)


def ratio(found: compare.Difference) -> str:
    """With its interval, where there is one."""
    interval = "" if found.low is None else f" [{found.low:.3f}, {found.high:.3f}]"
    return f"{found.mean:.3f}{interval}"


def _alike(found: list[Cell], name: Names, key: Callable[[Cell], Any]) -> list[tuple[Any, str]]:
    """Each key that cells share, with their names, in the order of the cells."""
    shared: dict[Any, list[str]] = {}
    for cell in found:
        shared.setdefault(key(cell), []).append(name(cell))
    return [(value, ", ".join(names)) for value, names in shared.items()]
