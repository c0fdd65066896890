"""Cells and seeds to child processes to records. Imports no torch: the device is the children's business."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from triaccel_bench.claims import Refused, claimed, recover
from triaccel_bench.identity import RESULTS_VERSION, identity
from triaccel_bench.leases import Devices, Lease
from triaccel_bench.preflight import Check, Report, merged
from triaccel_bench.progress import Reporter
from triaccel_bench.records import (
    CHECKPOINT_FILE,
    RUN_FILE,
    RecordError,
    RunRecord,
    Status,
    planned_run,
    read_run,
    write_run,
)
from triaccel_bench.settings import Settings

SECONDS_TO_END = 20.0
"""What a child that was asked to end gets to do so: it needs 10 s at most, and Slurm kills after 30 s."""


@dataclass(frozen=True)
class Outcome:
    label: str
    seed: int
    status: Status | Literal["refused"]
    reason: str | None
    path: Path | None
    reused: bool = False


def run_cells(cells: Sequence[Settings], reporter: Reporter) -> list[Outcome]:
    """Run every seed of every cell that has no finished record yet, one after the other.

    A cell whose data, weights or folder cannot be used is listed as refused and the others go
    on; a seed that fails leaves a record that says so. Commands that ask for the same seed at
    once take turns, and the later one reuses what the earlier one finished.

    The cheap checks of ``preflight`` come first: which cells cannot run is said before any does.

    Raises:
        Refused: a device that the cells ask for cannot be used; nothing has been run.
    """
    outcomes: list[Outcome] = []
    with Devices(reporter.line) as devices:
        names, obstacles = _before_the_first(cells, devices, reporter)
        if devices.fault is not None:
            reporter.line(f"{devices.fault}: nothing keeps other runs off the GPU meanwhile")
        for number, settings in enumerate(cells):
            label, name = cell_label(settings), names[settings.device, settings.kernels]
            # Before any seed is claimed: two that wait for what the other has would wait for ever.
            lease = _lease(devices, settings)
            try:
                _run_cell(settings, label, name, obstacles.get(number), lease, reporter, outcomes)
            except Refused as error:
                outcomes.append(Outcome(label, settings.seeds[0], "refused", str(error), None))
    return outcomes


def preflight(cells: Sequence[Settings]) -> Report:
    """Every check of every cell, and the expected time by a few steps of the first that can run; no run begins.

    Raises:
        Refused: the process that looks ended early.
    """
    with Devices(lambda text: print(text, flush=True)) as devices:
        report = _checked(cells, True, devices)
        obstacles = report.obstacles()
        able = [(number, settings) for number, settings in enumerate(cells) if number not in obstacles]
        if not able:
            return report
        lease = _lease(devices, able[0][1])
        verdict, exit_code = _child("expect_time", (able, lease), lambda kind, payload: None)
    if verdict is not None:
        return Report((*report.checks, *verdict[1]), report.devices)
    finding = f"{cell_label(able[0][1])}: the process of a few steps ended early ({_how(exit_code)})"
    lost = Check("time", "fails", finding, "lower method.batch.initial or use kernels=torch", (able[0][0],))
    return Report((*report.checks, lost), report.devices)


def _lease(devices: Devices, settings: Settings) -> Lease | None:
    return devices.take(settings.device, settings.runner.share_gpu)


def _checked(cells: Sequence[Settings], thorough: bool, devices: Devices) -> Report:
    """The checks of all cells, each on the card that its runs will have."""
    parts = []
    for device in dict.fromkeys(settings.device for settings in cells):
        numbers = [number for number, settings in enumerate(cells) if settings.device == device]
        members = [cells[number] for number in numbers]
        arguments = members, thorough, _lease(devices, members[0])
        verdict, exit_code = _child("check_cells", arguments, lambda kind, payload: None)
        if verdict is None:
            raise Refused(f"preflight: its process ended early ({_how(exit_code)}); preflight=off goes on without it")
        parts.append((device, numbers, verdict[1]))
    return merged(parts)


def _before_the_first(
    cells: Sequence[Settings], devices: Devices, reporter: Reporter
) -> tuple[dict[tuple[str, str], str], dict[int, str]]:
    """Names of the cells' devices, and why cells cannot run, by their number; what else is known is said."""
    if not cells or cells[0].preflight == "off":
        distinct = {(settings.device, settings.kernels): settings for settings in cells}
        return {key: _device_name(*key, _lease(devices, settings)) for key, settings in distinct.items()}, {}
    report = _checked(cells, False, devices)
    obstacles = report.obstacles()
    for number, settings in enumerate(cells):
        if (settings.device, settings.kernels) not in report.devices:
            raise Refused(obstacles[number])
    for line in report.worth_a_line():
        reporter.line(line)
    if len(obstacles) < len(cells):
        # The others run first, perhaps for hours.
        for number, obstacle in obstacles.items():
            reporter.line(f"{cell_label(cells[number])} cannot run: {obstacle}")
    return report.devices, obstacles


def cell_label(settings: Settings) -> str:
    return f"{settings.dataset.name}/{settings.model.name}/{settings.method.name}"


def seed_folder(settings: Settings, cell: str, seed: int) -> Path:
    """``<root>/<dataset>-<model>-<method>-<cell>/seed-<seed>``"""
    return Path(settings.results.root) / f"{cell_label(settings).replace('/', '-')}-{cell}" / f"seed-{seed}"


def _run_cell(
    settings: Settings,
    label: str,
    device_name: str,
    obstacle: str | None,
    lease: Lease | None,
    reporter: Reporter,
    outcomes: list[Outcome],
) -> None:
    cell = identity(settings, device_name)
    ended: dict[int, RunRecord] = {}
    for seed in settings.seeds:
        folder = seed_folder(settings, cell, seed)
        path = folder / RUN_FILE
        with claimed(folder, f"{label}/seed {seed}", reporter):
            if settings.results.reuse:
                recover(folder, settings.results.scratch, f"{label}/seed {seed}", reporter)
            if settings.results.reuse and _finished(path, cell, seed, reporter):
                reporter.line(f"{label}/seed {seed}: finished before, reused ({path})")
                # Of a run that was killed between its record and its end.
                (folder / CHECKPOINT_FILE).unlink(missing_ok=True)
                outcomes.append(Outcome(label, seed, "done", None, path, reused=True))
                continue
            if obstacle is not None:
                raise Refused(obstacle)
            reporter.start(f"{label}/seed {seed}", settings.memory.meter)
            status, reason = _run_seed(settings, seed, cell, folder, lease, reporter)
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


def _run_seed(
    settings: Settings, seed: int, cell: str, folder: Path, lease: Lease | None, reporter: Reporter
) -> tuple[Status, str | None]:
    def receive(kind: str, payload) -> None:
        if kind == "progress":
            reporter.progress(payload)
        elif kind == "epoch":
            reporter.epoch(payload, settings.epochs)
        elif kind == "note":
            reporter.line(payload["text"])

    verdict, exit_code = _child("run_seed", (settings, seed, cell, folder, lease), receive)
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


def _device_name(device: str, kernels: str, lease: Lease | None) -> str:
    verdict, exit_code = _child("inspect_device", (device, kernels, lease), lambda kind, payload: None)
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
    # Ctrl-C reaches the whole process group, and so may Slurm's signals (submitit's is SIGUSR2); the parent decides and
    # ends the child. The fork server, started here, is deaf to them, as nobody else can tell whether its children live,
    # and hands its mask down to them; a child listens when it can stop in good order. The resource tracker comes before
    # the two signals that its start unblocks.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGUSR2})
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        child.start()
    except (EOFError, OSError):
        # The fork server was killed; the next child starts a new one.
        here.close()
        return None, None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
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
        if verdict is None and child.is_alive():
            _end(child, here)
        here.close()
        child.join()
    return verdict, child.exitcode


def _end(child: multiprocessing.Process, pipe: Connection) -> None:
    """Ask the child to end, which then writes a checkpoint, and kill it if that takes too long.

    Whoever interrupts may do so again, as ``timeout`` and Slurm do: that does not cut the wait short.
    """
    asked_again = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    here = threading.current_thread() is threading.main_thread()
    # A call that does nothing, because Python complains of signals that come before they are ignored.
    handlers = {number: signal.signal(number, lambda *_: None) for number in asked_again} if here else {}
    try:
        child.terminate()
        until = time.monotonic() + SECONDS_TO_END
        with contextlib.suppress(EOFError, OSError):
            while (left := until - time.monotonic()) > 0 and pipe.poll(left):
                # Taken from it, or a child with much to say would wait for ever.
                pipe.recv()
        child.join(timeout=max(1.0, until - time.monotonic()))
        if child.is_alive():
            child.kill()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _enter(entry: str, pipe: Connection, arguments: tuple) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from triaccel_bench import worker

    if entry != "run_seed":
        # It has nothing to keep.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
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
