"""What stands above and below the tables: provenance, what a row's figures leave unsaid, and why one is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from triaccel_bench.cells import Cell
from triaccel_bench.labels import layer_mix
from triaccel_bench.records import Provenance

NOT_MEASURED = "n/a"

Names = Callable[[Cell], str]
"""How a cell's row is called in a sentence."""


def provenance_text(found: list[Cell]) -> str:
    """Device, code and conventions of the table, for its caption."""
    provenances = [run.provenance for cell in found for run in cell.runs if run.provenance]
    devices = sorted({provenance.device_name for provenance in provenances})
    versions = sorted({_version(provenance) for provenance in provenances})
    sentences = [f"Device: {', '.join(devices) or 'unknown'}.", f"Code: {', '.join(versions) or 'unknown'}."]
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


def _version(provenance: Provenance) -> str:
    commit = f"commit {provenance.git_commit[:12]}" if provenance.git_commit else f"sources {provenance.code_hash}"
    return f"{provenance.code_version} ({commit}{', modified' if provenance.git_dirty else ''})"


def _probes(cell: Cell) -> bool:
    curvature = cell.settings["method"]["curvature"]
    return curvature["rates"] or curvature["promotion"]


def left_out(found: list[Cell], name: Names) -> list[str]:
    return [f"{name(cell)}: not in the mean: {phrase}" for cell in found for phrase in cell.excluded]


def spread(found: list[Cell], name: Names) -> list[str]:
    single = [cell for cell in found if len(cell.summaries) == 1]
    if not single:
        return []
    whose = "" if len(single) == len(found) else f" for {_listed(name(cell) for cell in single)}"
    return [f"One seed: no standard deviation ({NOT_MEASURED}){whose}."]


def budgets(found: list[Cell], name: Names) -> list[str]:
    """Where each budget came from; the rows are named only where they differ."""
    by_source: dict[str, list[Cell]] = {}
    for cell in found:
        source = budget_source(cell)
        if source is not None:
            by_source.setdefault(source, []).append(cell)
    return [
        f"Budget: {_source_text(source)}" + (f" ({_listed(map(name, members))})." if len(by_source) > 1 else ".")
        for source, members in by_source.items()
    ]


def _source_text(source: str) -> str:
    kind, _, detail = source.partition(": ")
    return f"memory.budget={kind}, {detail}" if detail else f"{source} by memory.budget"


def budget_source(cell: Cell) -> str | None:
    return next((run.budget_source for run in cell.runs if run.budget_source), None)


def executions(found: list[Cell], name: Names) -> list[str]:
    """Rows whose layers ran in other dtypes than the method asked for, and why."""
    by_reason: dict[str, list[str]] = {}
    for cell in found:
        requested, executed = requested_layers(cell), executed_layers(cell)
        if requested != executed:
            by_reason.setdefault(_reason(cell), []).append(f"{name(cell)} asked for {requested}, executed {executed}")
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
    return (
        f"{cell.device_name} has no native BF16 (method.precision.bf16_substitute={precision['bf16_substitute']})"
    )


def idle_controllers(found: list[Cell], name: Names) -> list[str]:
    """Rows of a method with a controller that never moved anything: their figures are a static method's."""
    return [
        f"{name(cell)}: no control decision took effect in {_runs(cell)} ({_pace(cell)})."
        for cell in found
        if cell.summaries and _has_controller(cell) and not any(summary.moved for summary in cell.summaries)
    ]


def _has_controller(cell: Cell) -> bool:
    method = cell.settings["method"]
    return method["precision"]["adaptive"] or method["batch"]["elastic"] or _probes(cell)


def _runs(cell: Cell) -> str:
    count = len(cell.summaries)
    return "this run" if count == 1 else f"these {count} runs"


def _pace(cell: Cell) -> str:
    steps, method = max(run.steps for run in cell.runs), cell.settings["method"]
    text = f"{steps} steps, a control step every {method['control']['interval']}"
    return f"{text}, a probe every {method['curvature']['every']}" if _probes(cell) else text


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
