"""A run's decisions derived again from what its trace says they saw, by ``control`` alone; needs no torch.

A trace holds every signal to the last bit, so that each decision has to come out as it was recorded.
Another version of Python may take quantiles and lines with other roundings.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from triaccel_bench import control
from triaccel_bench.identity import flat
from triaccel_bench.recording import tells_its_start
from triaccel_bench.records import (
    RUN_FILE,
    TRACE_FILE,
    BackOffTrace,
    DecisionTrace,
    RecordError,
    RunRecord,
    StartTrace,
    Trace,
    read_run,
    read_trace,
)
from triaccel_bench.settings import MethodSettings

SHOWN = 20
"""Mismatches of a run that are listed; one bends all that come after it."""


class NotReplayable(ValueError):
    """A trace without what its decisions rest on; the message says what it lacks."""


@dataclass(frozen=True)
class Mismatch:
    step: int
    field: str
    recorded: object
    derived: object

    def __str__(self) -> str:
        return f"step {self.step}, {self.field}: recorded {self.recorded}, derived {self.derived}"


def mismatches(run: RunRecord, trace: Trace) -> Iterator[Mismatch]:
    """Where decisions, back-offs and final thresholds come out otherwise than recorded; nothing where all agree.

    Raises:
        NotReplayable: the trace does not hold what they rest on.
    """
    start = _start(trace)
    rules = _rules(start.rules, "the rules of its start")
    stated = control.within(_rules(run.settings["method"], "the settings of its record"), start.samples)
    yield from _compared(0, dict(flat(start.rules)), dict(flat(stated.model_dump(mode="json"))), "rules.")
    executed_of = start.executes.__getitem__
    _, state = control.start(len(trace.layers), rules, executed_of)
    for event in trace.events():
        before = {"batch_before": state.batch}
        if isinstance(event, BackOffTrace):
            smaller = control.back_off(state, rules.batch, event.tried)
            derived = before | {"batch_after": None if smaller is None else smaller.batch}
            state = state if smaller is None else smaller
            yield from _compared(event.in_force_after, event.model_dump(), derived, "back-off: ", trace.layers)
            continue
        try:
            decision, state = control.decide(_signals(event), state, rules, executed_of)
        except (TypeError, ValueError):
            raise NotReplayable(f"the signals of step {event.step} are not one of each layer") from None
        derived = before | {
            "batch_after": decision.batch,
            "batch_reason": decision.batch_reason,
            "requested": decision.requested,
            "executed": decision.executed,
            "promoted": decision.promoted,
            "rate_scale": decision.rates,
            "plan_changed": decision.plan_changed,
        }
        yield from _compared(event.step, event.model_dump(), derived, "", trace.layers)
    if run.layers:
        thresholds = {name: getattr(state, name) for name in ("tau_low", "tau_high", "tau_curv")}
        yield from _compared(run.steps, run.model_dump(include=set(thresholds)), thresholds, "")


def _start(trace: Trace) -> StartTrace:
    if not tells_its_start(trace):
        raise NotReplayable(
            "its trace is of an earlier version, which did not hold all that decisions rest on (rules, executed "
            "dtypes, signals that are not finite); run that seed again"
        )
    return trace.start


def _rules(section: dict[str, Any], what: str) -> MethodSettings:
    try:
        return MethodSettings.model_validate_json(json.dumps(section))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise NotReplayable(f"{what} are not this version's ({where}: {first['msg']})") from None


def _signals(seen: DecisionTrace) -> control.Signals:
    return control.Signals(
        epoch=seen.epoch,
        variance=None if seen.variance is None else tuple(seen.variance),
        lambda_max=None if seen.lambda_max is None else tuple(seen.lambda_max),
        memory_bytes=seen.memory_bytes,
        budget_bytes=seen.budget_bytes,
        free_bytes=seen.free_bytes,
        capture_share=seen.capture_share,
        rate_share=seen.rate_share,
    )


def _compared(
    step: int, recorded: dict[str, Any], derived: dict[str, Any], prefix: str, layers: Sequence[str] = ()
) -> Iterator[Mismatch]:
    for name, value in derived.items():
        here = recorded.get(name)
        if not isinstance(value, tuple) or len(here) != len(value):
            pairs = [(prefix + name, here, value)]
        else:
            pairs = [(f"{prefix}{name}[{layer}]", *pair) for layer, *pair in zip(layers, here, value)]
        for field, was, comes_out in pairs:
            both_nan = was != was and comes_out != comes_out
            if was != comes_out and not both_nan:
                yield Mismatch(step, field, was, comes_out)


def report(paths: Iterable[Path]) -> tuple[list[str], int]:
    """Lines on every run below the folders or ``run.json`` files, and an exit code.

    0: every decision came out as recorded; 1: one did not; 2: none did, but a run could not be replayed.
    """
    lines, codes = [], [0]
    for path in paths:
        found = sorted(path.rglob(RUN_FILE)) if path.is_dir() else [path] if path.name == RUN_FILE else []
        if not found or not path.exists():
            got = "no such path" if not path.exists() else "a folder without one" if path.is_dir() else "another file"
            lines.append(f"{path}: expected a folder with {RUN_FILE} in it, or that file, got {got}; name a run's")
            codes.append(2)
            continue
        for file in found:
            told, code = _report(file)
            lines += told
            codes.append(code)
    return lines, 1 if 1 in codes else max(codes)


def _report(path: Path) -> tuple[list[str], int]:
    try:
        run, trace = read_run(path), read_trace(path.parent / TRACE_FILE)
        follows = run.settings.get("replay", {}).get("run")
        if follows is not None:
            return [f"{path}: nothing to replay: it decided nothing, and followed the schedule of {follows}"], 0
        found = list(mismatches(run, trace))
    except RecordError as error:
        return [str(error)], 2
    except NotReplayable as error:
        return [f"{path}: cannot be replayed: {error}"], 2
    count = f"{len(trace.decisions)} decision{'s' * (len(trace.decisions) != 1)}"
    if trace.back_offs:
        count += f", {len(trace.back_offs)} times memory ran out"
    if not found:
        return [f"{path}: {count}, 0 mismatches"], 0
    lines = [f"{path}: {count}, {len(found)} mismatch{'es' * (len(found) != 1)}"]
    if run.provenance is not None and run.provenance.python != platform.python_version():
        lines[0] += f" (recorded under Python {run.provenance.python}, this is {platform.python_version()})"
    lines += [f"  {mismatch}" for mismatch in found[:SHOWN]]
    if len(found) > SHOWN:
        lines.append(f"  and {len(found) - SHOWN} more")
    return lines, 1
