"""Cells and seeds to child processes to records. Imports no torch: the device is the children's business."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

from triaccel_bench.progress import Reporter
from triaccel_bench.records import RUN_FILE, RecordError, Status, planned_run, read_run, write_run
from triaccel_bench.settings import RESULTS_VERSION, Settings, identity


@dataclass(frozen=True)
class Outcome:
    label: str
    seed: int
    status: Status | Literal["refused"]
    reason: str | None
    path: Path | None
    reused: bool = False


class Refused(RuntimeError):
    """A child found, before any step, that the run cannot be set up; its message says why and what to do."""


def run_cells(cells: Sequence[Settings], reporter: Reporter) -> list[Outcome]:
    """Run every seed of every cell that has no finished record yet, one after the other.

    A cell whose data or weights cannot be used is listed as refused and the others go on; a
    seed that fails leaves a record that says so.

    Raises:
        Refused: a device that the cells ask for cannot be used; nothing has been run.
    """
    devices = {key: _device_name(*key) for key in dict.fromkeys((s.device, s.kernels) for s in cells)}
    outcomes: list[Outcome] = []
    for settings in cells:
        label = cell_label(settings)
        try:
            _run_cell(settings, label, devices[settings.device, settings.kernels], reporter, outcomes)
        except Refused as error:
            outcomes.append(Outcome(label, settings.seeds[0], "refused", str(error), None))
    return outcomes


def cell_label(settings: Settings) -> str:
    return f"{settings.dataset.name}/{settings.model.name}/{settings.method.name}"


def seed_folder(settings: Settings, cell: str, seed: int) -> Path:
    """``<root>/<dataset>-<model>-<method>-<cell>/seed-<seed>``"""
    return Path(settings.results.root).expanduser() / f"{cell_label(settings).replace('/', '-')}-{cell}" / f"seed-{seed}"


def _run_cell(
    settings: Settings, label: str, device_name: str, reporter: Reporter, outcomes: list[Outcome]
) -> None:
    cell = identity(settings, device_name)
    for seed in settings.seeds:
        folder = seed_folder(settings, cell, seed)
        path = folder / RUN_FILE
        if settings.results.reuse and _finished(path, reporter):
            reporter.line(f"{label}/seed {seed}: finished before, reused ({path})")
            outcomes.append(Outcome(label, seed, "done", None, path, reused=True))
            continue
        reporter.start(f"{label}/seed {seed}", settings.memory.meter)
        status, reason = _run_seed(settings, seed, cell, folder, reporter)
        if status != "done":
            reporter.line(f"{label}/seed {seed}: {status}: {reason}")
        outcomes.append(Outcome(label, seed, status, reason, path))


def _finished(path: Path, reporter: Reporter) -> bool:
    if not path.exists():
        return False
    try:
        return read_run(path).status == "done"
    except RecordError as error:
        reporter.line(f"{error}; running it again")
        return False


def _run_seed(
    settings: Settings, seed: int, cell: str, folder: Path, reporter: Reporter
) -> tuple[Status, str | None]:
    def receive(kind: str, payload) -> None:
        if kind == "progress":
            reporter.progress(payload)
        elif kind == "epoch":
            reporter.epoch(payload, settings.epochs)
        elif kind == "note":
            reporter.line(payload["text"])

    verdict, exit_code = _child("run_seed", (settings, seed, cell, folder), receive)
    if verdict is not None and verdict[0] == "refused":
        raise Refused(verdict[1])
    if verdict is not None:
        return verdict[1]
    reason = f"the process of this run ended early ({_how(exit_code)})"
    lost = planned_run(settings.model_dump(mode="json"), seed, cell, RESULTS_VERSION)
    lost.reason = reason
    write_run(folder, lost)
    return "failed", reason


def _device_name(device: str, kernels: str) -> str:
    verdict, exit_code = _child("inspect_device", (device, kernels), lambda kind, payload: None)
    if verdict is None:
        raise Refused(f"device={device}: looking at the device ended early ({_how(exit_code)})")
    kind, payload = verdict
    if kind == "refused":
        raise Refused(payload)
    return payload


def _child(entry: str, arguments: tuple, receive) -> tuple[tuple | None, int | None]:
    """Call ``worker.<entry>`` in a child and pass on its messages; returns the last one and the exit code.

    The fork server imports torch once and never touches CUDA, so a child starts in
    milliseconds and with a clean device.
    """
    # Threads that spin while they wait cost a busy two-core machine a factor of ten; the setting is read at start-up.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["triaccel_bench.worker"])
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_enter, args=(entry, there, arguments), daemon=True)
    child.start()
    there.close()
    verdict = None
    try:
        while True:
            kind, payload = here.recv()
            if kind in ("device", "refused", "finished"):
                verdict = (kind, payload)
            else:
                receive(kind, payload)
    except EOFError:
        pass
    finally:
        if verdict is None and child.is_alive():
            child.join(timeout=1)
            child.terminate()
        child.join()
        here.close()
    return verdict, child.exitcode


def _enter(entry: str, pipe: Connection, arguments: tuple) -> None:
    # Ctrl-C reaches the whole process group; the parent decides and ends the child.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from triaccel_bench import worker

    getattr(worker, entry)(pipe, *arguments)


def _how(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"signal {signal.Signals(-exit_code).name}"
    return f"exit code {exit_code}"
