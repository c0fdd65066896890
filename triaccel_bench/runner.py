"""Cells and seeds to child processes to records. Imports no torch: the device is the children's business."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from triaccel_bench.child import call as _child
from triaccel_bench.deadline import Deadline
from triaccel_bench.identity import RESULTS_VERSION, identity
from triaccel_bench.outcomes import Outcome
from triaccel_bench.preflight import Check, Report
from triaccel_bench.progress import Reporter
from triaccel_bench.records import (
    CHECKPOINT_FILE,
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


class Refused(RuntimeError):
    """A child found, before any step, that the run cannot be set up; its message says why and what to do."""


def run_cells(cells: Sequence[Settings], reporter: Reporter) -> list[Outcome]:
    """Run every seed of every cell that has no finished record yet, one after the other.

    A cell whose data, weights or folder cannot be used is listed as refused and the others go
    on; a seed that fails leaves a record that says so, and the others go on, unless
    ``on_failure=stop``. Commands that ask for the same seed at once take turns, and the later
    one reuses what the earlier one finished. Once ``runner.max_minutes`` are near, the run under
    way is asked to stop, and no other begins.

    The cheap checks of ``preflight`` come first: which cells cannot run is said before any does.

    Raises:
        Refused: a device that the cells ask for cannot be used; nothing has been run.
    """
    devices, obstacles = _before_the_first(cells, reporter)
    outcomes: list[Outcome] = []
    for number, settings in enumerate(cells):
        label, device_name = cell_label(settings), devices[settings.device, settings.kernels]
        try:
            _run_cell(number, settings, label, device_name, obstacles.get(number), reporter, outcomes)
        except Refused as error:
            outcomes.append(Outcome(label, settings.seeds[0], "refused", str(error), None, number=number))
    return outcomes


def preflight(cells: Sequence[Settings]) -> Report:
    """Every check of every cell, and the expected time by a few steps of the first that can run; no run begins.

    Raises:
        Refused: the process that looks ended early.
    """
    report = _checked(cells, thorough=True)
    obstacles = report.obstacles()
    able = [(number, settings) for number, settings in enumerate(cells) if number not in obstacles]
    if not able:
        return report
    ended = _child("expect_time", (able,), _hear_nothing, cells[0].runner.timeout)
    if ended.verdict is not None:
        return Report((*report.checks, *ended.verdict[1]), report.devices)
    finding = f"{cell_label(able[0][1])}: the process of a few steps ended early ({ended.how})"
    lost = Check("time", "fails", finding, "lower method.batch.initial or use kernels=torch", (able[0][0],))
    return Report((*report.checks, lost), report.devices)


def _checked(cells: Sequence[Settings], thorough: bool) -> Report:
    ended = _child("check_cells", (list(cells), thorough), _hear_nothing, cells[0].runner.timeout)
    if ended.verdict is None:
        raise Refused(f"preflight: its process ended early ({ended.how}); preflight=off goes on without it")
    return ended.verdict[1]


def _hear_nothing(kind: str, payload: object) -> None: ...


def _before_the_first(
    cells: Sequence[Settings], reporter: Reporter
) -> tuple[dict[tuple[str, str], str], dict[int, str]]:
    """Names of the cells' devices, and why cells cannot run, by their number; what else is known is said."""
    keys = dict.fromkeys((settings.device, settings.kernels) for settings in cells)
    if not cells or cells[0].preflight == "off":
        return {key: _device_name(*key, cells[0].runner.timeout) for key in keys}, {}
    report = _checked(cells, thorough=False)
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


def _halt(settings: Settings, outcomes: Sequence[Outcome]) -> Literal["left", "skipped"] | None:
    """What becomes of a run that has not begun, if it is not to begin any more."""
    if any(outcome.status == "left" for outcome in outcomes) or Deadline(settings.runner.max_minutes).near():
        return "left"
    if settings.on_failure == "stop" and any(outcome.failed for outcome in outcomes):
        return "skipped"
    return None


def _run_cell(
    number: int,
    settings: Settings,
    label: str,
    device_name: str,
    obstacle: str | None,
    reporter: Reporter,
    outcomes: list[Outcome],
) -> None:
    cell = identity(settings, device_name)
    ended: dict[int, RunRecord] = {}
    for seed in settings.seeds:
        folder = seed_folder(settings, cell, seed)
        path = folder / RUN_FILE
        halt = _halt(settings, outcomes)
        if halt is not None and not (settings.results.reuse and _finished(path, cell, seed, reporter)):
            outcomes.append(Outcome(label, seed, halt, None, path, number=number))
            continue
        with _claimed(folder, f"{label}/seed {seed}", reporter, Deadline(settings.runner.max_minutes)) as claimed:
            if not claimed:
                reason = "another command is running it"
                outcomes.append(Outcome(label, seed, "left", reason, path, number=number))
                continue
            if settings.results.reuse and _finished(path, cell, seed, reporter):
                reporter.line(f"{label}/seed {seed}: finished before, reused ({path})")
                # Of a run that was killed between its record and its end.
                (folder / CHECKPOINT_FILE).unlink(missing_ok=True)
                outcomes.append(Outcome(label, seed, "done", None, path, reused=True, number=number))
                continue
            if obstacle is not None:
                raise Refused(obstacle)
            reporter.start(f"{label}/seed {seed}", settings.memory.meter)
            status, reason = _run_seed(settings, seed, cell, folder, reporter)
            if status != "done":
                reporter.line(f"{label}/seed {seed}: {status}: {reason}")
            outcomes.append(Outcome(label, seed, status, reason, path, number=number))
            with contextlib.suppress(RecordError):
                ended[seed] = read_run(path)
    if ended:
        # The largest stands for all: seeds of a cell differ little in it.
        seed = max(ended, key=lambda seed: _step_peak(ended[seed]))
        reporter.memory(f"{label}/seed {seed}", ended[seed])


def _step_peak(run: RunRecord) -> int:
    return 0 if run.memory is None else run.memory.step_peak_bytes or 0


@contextlib.contextmanager
def _claimed(folder: Path, label: str, reporter: Reporter, deadline: Deadline) -> Iterator[bool]:
    """Hold a seed's folder alone, waiting for another command that does; the system frees it when a holder dies.

    Yields whether it is held, and not the time up before.
    """
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
            if not _freed(handle, deadline):
                yield False
                return
        except OSError:
            # A file system without locks: each command still writes whole records.
            pass
        for name in (RUN_FILE, TRACE_FILE, CHECKPOINT_FILE):
            for part in folder.glob(f".{name}.*"):
                part.unlink()
        yield True
    finally:
        os.close(handle)


def _freed(handle: int, deadline: Deadline) -> bool:
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if deadline.near():
                return False
            time.sleep(0.5)


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
    settings: Settings, seed: int, cell: str, folder: Path, reporter: Reporter
) -> tuple[Status | Literal["left"], str | None]:
    def receive(kind: str, payload) -> None:
        if kind == "progress":
            reporter.progress(payload)
        elif kind == "epoch":
            reporter.epoch(payload, settings.epochs)
        elif kind == "note":
            reporter.line(payload["text"])

    limits = settings.runner.timeout, Deadline(settings.runner.max_minutes)
    ended = _child("run_seed", (settings, seed, cell, folder), receive, *limits)
    if ended.verdict is not None and ended.verdict[0] == "refused":
        raise Refused(ended.verdict[1])
    if ended.verdict is not None:
        status, reason = ended.verdict[1]
        if ended.out_of_time and status == "interrupted":
            return "left", f"stopped {reason.removeprefix('SIGTERM ')}"
        return status, reason
    if ended.out_of_time:
        return "left", f"{ended.how}; it goes on from the checkpoint before, if there is one"
    reason = ended.how if ended.silence is not None else f"the process of this run ended early ({ended.how})"
    lost = planned_run(settings.model_dump(mode="json"), seed, cell, RESULTS_VERSION)
    lost.reason, lost.traceback = reason, list(ended.words)
    try:
        write_run(folder, lost)
    except OSError as error:
        reason = f"{reason}, and its record cannot be written ({error}); free space below results.root"
    return "failed", reason


def _device_name(device: str, kernels: str, timeout: float | None) -> str:
    ended = _child("inspect_device", (device, kernels), _hear_nothing, timeout)
    if ended.verdict is None:
        raise Refused(f"device={device}: looking at the device ended early ({ended.how})")
    kind, payload = ended.verdict
    if kind == "refused":
        raise Refused(payload)
    return payload
