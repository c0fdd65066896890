"""Which runs are the same: a cell's name is a hash of what its method reads, the data, the device and the version."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from triaccel_bench.settings import Settings

RESULTS_VERSION = 5
"""Bumped by hand when a change makes earlier records incomparable; part of a cell's identity."""


def identity(settings: Settings, device_name: str) -> str:
    """Twelve hex digits that name a cell: its ``identifying_settings``, the device and ``RESULTS_VERSION``.

    A file counts by its content, wherever it lies; a folder by the names, sizes and times of change of all files below.
    """
    tree = identifying_settings(settings.model_dump(mode="json"))
    if settings.dataset.path is not None:
        tree["dataset"]["path"] = _file_identity(settings.dataset.path)
    if settings.model.weights not in ("none", "imagenet"):
        tree["model"]["weights"] = _file_identity(settings.model.weights)
    tree |= {"device": device_name, "results_version": RESULTS_VERSION}
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:12]


def identifying_settings(dumped: dict[str, Any]) -> dict[str, Any]:
    """What a cell's method reads of ``Settings.model_dump(mode="json")``, or of a record's copy of it.

    Settings that cannot change a result (where it is written, how it is shown, which seeds
    are asked for) are left out, and so are the settings of switches that are off, so that
    FP32 is not run again when ``curvature.alpha`` moves. The device is left out because its
    name, not its number, is part of an identity.
    """
    apart = "seeds", "results", "progress", "preflight", "runner", "on_failure", "tracker", "device"
    tree = {key: value for key, value in dumped.items() if key not in apart}
    tree["dataset"] = _without(tree["dataset"], "root", "download", "mirrors")
    tree["model"] = dict(tree["model"])
    method = tree["method"] = dict(tree["method"])
    adaptive, elastic = method["precision"]["adaptive"], method["batch"]["elastic"]
    rates, promotion = (method["curvature"][switch] for switch in ("rates", "promotion"))
    probes = rates or promotion
    if not adaptive:
        method["precision"] = {key: method["precision"][key] for key in ("bf16_substitute", "cpu_executes")}
    if not probes:
        del method["curvature"]
    elif not (rates and promotion):
        method["curvature"] = _without(method["curvature"], "tau_curv" if rates else "alpha")
    if not elastic:
        method["batch"] = {"initial": method["batch"]["initial"]}
    elif method["batch"].get("growth") != "schedule" or method["batch"].get("head_start") == 1:
        # Nor have earlier records this one, whose runs had no head start.
        method["batch"] = _without(method["batch"], "head_start")
    if "update" in method and not adaptive and method["dtype"] == "fp32":
        # All layers run FP32, unless promotion lifts them: there is nothing wider.
        method["update"] = _without(method["update"], "momentum_dtype")
    if not (elastic or tree["memory"]["enforce"]):
        tree["memory"] = {key: tree["memory"][key] for key in ("meter", "enforce")}
    if not (adaptive or promotion):
        # Records of the first version have no such settings.
        method.pop("capture", None)
        method["control"] = _without(method["control"], "plan_changes_per_epoch")
    if not (adaptive or elastic or probes):
        del method["control"]
    replay = tree.pop("replay", {"run": None})
    if replay["run"] is not None:
        # Where the recording lies is no matter: its schedule, which stands for all that a step goes by, is.
        tree["replay"] = _without(replay, "run", *(("seed",) if replay["shuffle"] is None else ()))
    engine = tree.get("engine", {})
    if dumped["device"] == "cpu":
        tree.pop("engine", None)
    elif not engine.get("graphs", True):
        tree["engine"] = _without(engine, "cached")
    if dumped["device"] == "cpu" or not engine.get("graphs", True):
        method.pop("capture", None)
    return tree


def _without(tree: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in tree.items() if key not in keys}


def _file_identity(path: str) -> list[str]:
    """A file's content; of a folder, names, sizes and times of change of all files below; else where a path leads."""
    real = os.path.realpath(path)
    if os.path.isdir(real):
        files = sorted(os.path.join(folder, name) for folder, _, names in os.walk(real) for name in names)
        found = [(os.path.relpath(file, real), os.stat(file, follow_symlinks=False)) for file in files]
        listing = json.dumps([(file, status.st_size, status.st_mtime_ns) for file, status in found])
        return ["folder", hashlib.sha256(listing.encode()).hexdigest()]
    try:
        if os.path.isfile(real):
            status = os.stat(real)
            return ["file", _digest(real, status.st_size, status.st_mtime_ns)]
    except OSError:
        # Whoever reads it will say so.
        pass
    return [real]


@lru_cache
def _digest(path: str, size: int, changed_ns: int) -> str:
    """Of the content, read once a process while size and time of change stay."""
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**20):
            found.update(block)
    return found.hexdigest()


def flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each setting of a section and of those in it, by its dotted key."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
