"""Cells and seeds to child processes to records. Imports no torch: the device is the children's business."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from triaccel_bench.identity import RESULTS_VERSION, identity
from triaccel_bench.progress import Reporter
from triaccel_bench.records import (
    RUN_FILE,
    TRACE_FILE,
    RecordError,
    RunRecord,
    Status,
    planned_run,
    read_run,
    write_run,
)
from triaccel_bench.settings import Settings


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

    A cell whose data, weights or folder cannot be used is listed as refused and the others go
    on; a seed that fails leaves a record that says so. Commands that ask for the same seed at
    once take turns, and the later one reuses what the earlier one finished.

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
    return Path(settings.results.root) / f"{cell_label(settings).replace('/', '-')}-{cell}" / f"seed-{seed}"


def _run_cell(settings: Settings, label: str, device_name: str, reporter: Reporter, outcomes: list[Outcome]) -> None:
    cell = identity(settings, device_name)
    ended: dict[int, RunRecord] = {}
    for seed in settings.seeds:
        folder = seed_folder(settings, cell, seed)
        path = folder / RUN_FILE
        with _claimed(folder, f"{label}/seed {seed}", reporter):
            if settings.results.reuse and _finished(path, cell, seed, reporter):
                reporter.line(f"{label}/seed {seed}: finished before, reused ({path})")
                outcomes.append(Outcome(label, seed, "done", None, path, reused=True))
                continue
            reporter.start(f"{label}/seed {seed}", settings.memory.meter)
            status, reason = _run_seed(settings, seed, cell, folder, reporter)
            if status != "done":
                reporter.line(f"{label}/seed {seed}: {status}: {reason}")
            outcomes.append(Outcome(label, seed, status, reason, path))
            with contextlib.suppress(RecordError):
                ended[seed] = read_run(path)
    if ended:
        # The largest stands for all: seeds of a cell differ little in it.
        seed = max(ended, key=lambda seed: _step_peak(ended[seed]))
        reporter.memory(f"{label}/seed {seed}", ended[seed])


def _step_peak(run: RunRecord) -> int:
    return 0 if run.memory is None else run.memory.step_peak_bytes or 0


@contextlib.contextmanager
def _claimed(folder: Path, label: str, reporter: Reporter) -> Iterator[None]:
    """Hold a seed's folder alone, waiting for another command that does; the system frees it when a holder dies."""
    lock = folder / ".lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(lock, os.O_WRONLY | os.O_CREAT, 0o644)
    except OSError as error:
        raise Refused(
            f"{folder}: expected a folder that can be written, got {error}; name another by results.root"
        ) from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            reporter.line(f"{label}: another command is running it; waiting for that one to end")
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            # A file system without locks: each command still writes whole records.
            pass
        for name in (RUN_FILE, TRACE_FILE):
            for part in folder.glob(f".{name}.*"):
                part.unlink()
        yield
    finally:
        os.close(handle)


def _finished(path: Path, cell: str, seed: int, reporter: Reporter) -> bool:
    if not path.exists():
        return False
    try:
        run = read_run(path)
    except RecordError as error:
        reporter.line(f"{error.fault}; running that seed again")
        return False
    if run.results_version != RESULTS_VERSION:
        versions = f"results version {run.results_version}, not {RESULTS_VERSION}"
        reporter.line(f"{path}: made by code of {versions}; running that seed again")
        return False
    if (run.cell, run.seed) != (cell, seed):
        reporter.line(f"{path}: holds seed {run.seed} of cell {run.cell}, not of this one; running that seed again")
        return False
    return run.status == "done"


def _run_seed(settings: Settings, seed: int, cell: str, folder: Path, reporter: Reporter) -> tuple[Status, str | None]:
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
    try:
        write_run(folder, lost)
    except OSError as error:
        reason = f"{reason}, and its record cannot be written ({error}); free space below results.root"
    return "failed", reason


def _device_name(device: str, kernels: str) -> str:
    verdict, exit_code = _child("inspect_device", (device, kernels), lambda kind, payload: None)
    if verdict is None:
        raise Refused(f"device={device}: looking at the device ended early ({_how(exit_code)})")
    kind, payload = verdict
    if kind == "refused":
        raise Refused(payload)
    return payload


def _child(
    entry: str, arguments: tuple, receive: Callable[[str, Any], None]
) -> tuple[tuple[str, Any] | None, int | None]:
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
    # Ctrl-C reaches the whole process group; the parent decides and ends the child. The fork
    # server, started here, hands its mask down, so that a child is deaf to it from birth; the
    # resource tracker comes first because its start unblocks the signal.
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        child.start()
    except (EOFError, OSError):
        # The fork server was killed; the next child starts a new one.
        here.close()
        return None, None
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
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
        child.join(timeout=5)
    finally:
        here.close()
        if verdict is None and child.is_alive():
            child.terminate()
        child.join()
    return verdict, child.exitcode


def _enter(entry: str, pipe: Connection, arguments: tuple) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from triaccel_bench import worker

    getattr(worker, entry)(pipe, *arguments)


def _end_with_parent() -> None:
    """A parent killed outright cannot end its child; without this the child would train on, unseen, on the device."""
    multiprocessing.parent_process().join()
    os._exit(1)


def _how(exit_code: int | None) -> str:
    if exit_code is None:
        return "it did not start: the server that forks children was killed"
    if exit_code == -signal.SIGKILL:
        return "signal SIGKILL, as when the machine's memory runs out: lower method.batch.max or evaluation.batch"
    if exit_code < 0:
        return f"signal {signal.Signals(-exit_code).name}"
    return f"exit code {exit_code}"
