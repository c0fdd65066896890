"""The schedule that came out of a recorded run: what was in force from which step on. Reads records, needs no torch."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from triaccel_bench.records import RUN_FILE, TRACE_FILE, DecisionTrace, RecordError, Trace, read_run, read_trace
from triaccel_bench.settings import SettingsError


@dataclass(frozen=True)
class Change:
    """What is in force from one step on. Sequences follow the recording's layers."""

    after: int
    """Steps done before."""
    requested: tuple[str, ...]
    promoted: tuple[bool, ...]
    rates: tuple[float, ...]
    batch: int


@dataclass(frozen=True)
class Recording:
    path: str
    epochs: int
    samples: int
    """Trained on, an epoch."""
    layers: tuple[str, ...]
    method: dict[str, Any]
    """The recorded run's section of settings."""
    optimizer: dict[str, Any]
    """The recorded run's section of settings; tuned values are of a method, and none of a replay."""
    checkpointing: bool | int
    """The recorded run's ``model.checkpointing``, which counts as its method's."""
    changes: tuple[Change, ...]
    """From the start on, which is the first."""

    def fingerprint(self) -> str:
        """Twelve hex digits over the schedule and what else of the recorded method a step goes by."""
        method, changes = self.method, [list(vars(change).values()) for change in self.changes]
        read = {name: method[name] for name in ("dtype", "tf32", "loss_scale", "update")}
        read |= {name: method["precision"][name] for name in ("bf16_substitute", "cpu_executes")}
        read |= {name: method["batch"][name] for name in ("initial", "lr_rule")}
        told = json.dumps([self.samples, self.layers, read, changes], sort_keys=True)
        return hashlib.sha256(told.encode()).hexdigest()[:12]

    def with_layers_shuffled(self, seed: int) -> Recording:
        """Every layer gets the plan and the rates of another one, the same over the whole run, drawn by ``seed``."""
        order = _order(len(self.layers), seed)

        def moved(values: Sequence) -> tuple:
            return tuple(values[index] for index in order)

        changes = (
            replace(
                change,
                requested=moved(change.requested),
                promoted=moved(change.promoted),
                rates=moved(change.rates),
            )
            for change in self.changes
        )
        return replace(self, changes=tuple(changes))


def _order(layers: int, seed: int) -> list[int]:
    """A permutation that is not the identity, but for a single layer."""
    order, chance = list(range(layers)), random.Random(f"layers {seed}")
    while layers > 1 and order == sorted(order):
        chance.shuffle(order)
    return order


def read_recording(where: str) -> Recording:
    """The schedule of a run, by its folder or its ``run.json``.

    Raises:
        SettingsError: there is none, or none to be followed.
    """
    path = Path(os.path.expanduser(where))
    path = path / RUN_FILE if path.is_dir() else path
    if not path.is_file():
        raise _refusal(where, "the folder of a run, or its run.json", "no such file", "name one")
    try:
        run = read_run(path)
        if run.status != "done":
            raise _refusal(where, "a run that is done", f"one that is {run.status}", "name one")
        trace = read_trace(path.parent / TRACE_FILE)
    except RecordError as error:
        raise _refusal(where, "the folder of a run, or its run.json", error.fault, "name one") from None
    if run.settings.get("replay", {}).get("run") is not None:
        other = run.settings["replay"]["run"]
        raise _refusal(where, "a run that decided", f"one that followed the schedule of {other}", "name that one")
    if not trace.decisions:
        got = f"a trace without one, of {run.steps} steps"
        raise _refusal(where, "a run with control decisions", got, "record one with a shorter method.control.interval")
    if not tells_its_start(trace):
        got = "a trace of an earlier version, which does not tell when decisions came into force"
        raise _refusal(where, "a trace with its start", got, "run that seed again")
    count, method = len(trace.layers), run.settings["method"]
    checkpointing = run.settings["model"].get("checkpointing", False)
    change = Change(0, (method["dtype"],) * count, (False,) * count, (1.0,) * count, method["batch"]["initial"])
    changes = [change]
    for event in trace.events():
        if isinstance(event, DecisionTrace):
            plan = tuple(event.requested), tuple(event.promoted), tuple(event.rate_scale)
        else:
            plan = change.requested, change.promoted, change.rates
        following = Change(event.in_force_after, *plan, event.batch_after)
        if replace(following, after=change.after) != change:
            changes.append(following)
            change = following
    layers, changes = tuple(trace.layers), _last_of_each_step(changes)
    optimizer = run.settings["optimizer"]
    return Recording(where, run.epochs_planned, trace.start.samples, layers, method, optimizer, checkpointing, changes)


def tells_its_start(trace: Trace) -> bool:
    """Whether it holds what decisions rest on, and when they came into force; earlier versions' did not."""
    return trace.start is not None and all(decision.in_force_after is not None for decision in trace.decisions)


def _last_of_each_step(changes: list[Change]) -> tuple[Change, ...]:
    return tuple({change.after: change for change in changes}.values())


def _refusal(where: str, expected: str, got: str, remedy: str) -> SettingsError:
    return SettingsError(f"replay.run={where}: expected {expected}, got {got}; {remedy}")


def open_loop(method: dict[str, Any], name: str) -> dict[str, Any]:
    """Settings of a method of this name that runs a step as the recorded ``method`` did, and decides nothing."""
    switched_off = {
        "precision": method["precision"] | {"adaptive": False},
        "curvature": method["curvature"] | {"rates": False, "promotion": False},
        "batch": method["batch"] | {"elastic": False},
    }
    return method | switched_off | {"name": name}


def with_recorded_method(config: dict[str, Any]) -> dict[str, Any]:
    """A plain configuration whose method, where it is ``replay``, is filled in from the run that it follows.

    So is how much of the network is run again, which no file pairs with ``replay``.

    What the configuration says of the method itself has to agree with the recorded run's.

    Raises:
        SettingsError: the run cannot be followed, or not with these settings.
    """
    replay, method = config.get("replay"), config.get("method")
    if not isinstance(replay, dict) or not isinstance(method, dict):
        return config
    where, follows = replay.get("run"), "precision" not in method or method.get("name") == "replay"
    if where is None and not follows:
        return config
    if where is None:
        raise SettingsError("method=replay and replay.run=null: expected the folder of a recorded run; name one")
    if not follows:
        raise SettingsError(
            f"method.name={method.get('name')} and replay.run={where}: expected method=replay, which takes its "
            "settings from that run; use it, or leave replay.run out"
        )
    recording = read_recording(str(where))
    for key, value, recorded in _differences(method, recording.method, "method"):
        raise SettingsError(
            f"{key}={value}: expected {recorded} as in the run of replay.run={where}, whose method is followed; "
            "leave it out, or set it to that"
        )
    if config.get("epochs") != recording.epochs:
        raise SettingsError(
            f"epochs={config.get('epochs')} and replay.run={where}: expected that run's {recording.epochs} epochs; "
            f"set epochs={recording.epochs}"
        )
    optimizer = config.get("optimizer")
    for key, value, recorded in _differences(
        optimizer if isinstance(optimizer, dict) else {}, recording.optimizer, "optimizer"
    ):
        raise SettingsError(
            f"{key}={value} and replay.run={where}: expected that run's {recorded}; set {key}={recorded}"
        )
    schedule = recording.fingerprint()
    if replay.get("schedule") not in (None, schedule):
        raise SettingsError(
            f"replay.schedule={replay['schedule']} and replay.run={where}: expected {schedule}, the schedule of that "
            "run; name the run that is meant, or leave replay.schedule out"
        )
    model = _with_recorded_checkpointing(config.get("model"), recording)
    method = open_loop(recording.method, method["name"])
    return config | {"model": model, "method": method, "replay": replay | {"schedule": schedule}}


def _with_recorded_checkpointing(model: Any, recording: Recording) -> Any:
    if not isinstance(model, dict):
        return model
    given, recorded = model.get("checkpointing", False), recording.checkpointing
    # False is also what nobody has asked for. True is all blocks and 1 the first one, which are equal in Python.
    if given != 0 and (type(given) is not type(recorded) or given != recorded):
        raise SettingsError(
            f"model.checkpointing={_written(given)}: expected {_written(recorded)} as in the run of "
            f"replay.run={recording.path}, got {_written(given)}; leave it out"
        )
    return model | {"checkpointing": recorded}


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _differences(given: dict[str, Any], recorded: dict[str, Any], prefix: str):
    for name, value in given.items():
        key, there = f"{prefix}.{name}", recorded.get(name)
        if isinstance(value, dict) and isinstance(there, dict):
            yield from _differences(value, there, key)
        elif value != there and key != "method.name":
            yield key, value, there
