"""Cells and seeds to child processes to records. Imports no torch: the device is the children's business."""

from __future__ import annotations

import contextlib
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from triaccel_bench import child
from triaccel_bench.cells import as_text, differing, told
from triaccel_bench.child import Ended
from triaccel_bench.claims import Refused, claimed, recover
from triaccel_bench.deadline import Deadline
from triaccel_bench.identity import RESULTS_VERSION, identifying_settings, identity
from triaccel_bench.leases import Devices, GivenUp, Lease
from triaccel_bench.outcomes import Outcome
from triaccel_bench.preflight import RECORD_BYTES, Check, Report, merged, space
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
from triaccel_bench.stats import why_excluded


def run_cells(
    cells: Sequence[Settings],
    reporter: Reporter,
    failed_elsewhere: Callable[[], bool] = lambda: False,
    labels: Sequence[str] | None = None,
) -> list[Outcome]:
    """Run every seed of every cell that has no finished record yet, one after the other.

    The first seed of all cells comes first, then their second: what makes a machine slower for a while then meets all
    methods alike, and a sweep that is cut short has something of each. ``runner.order=cells`` takes cell by cell.

    A cell whose data, weights or folder cannot be used is listed as refused and the others go
    on; a seed that fails leaves a record that says so, and the others go on, unless
    ``on_failure=stop``. Commands that ask for the same seed at once take turns, and the later
    one reuses what the earlier one finished. Once ``runner.max_minutes`` are near, the run under
    way is asked to stop, no GPU is waited for, and no other begins.

    The cheap checks of ``preflight`` come first: which cells cannot run is said before any does.

    Args:
        failed_elsewhere: whether another job of the same sweep had a run that failed.
        labels: what the cells are called among those of a whole sweep; ``cell_labels`` where ``None``.

    Raises:
        Refused: a device that the cells ask for cannot be used; nothing has been run.
    """
    outcomes: list[Outcome] = []
    labels = cell_labels(cells) if labels is None else labels
    deadline = Deadline(cells[0].runner.max_minutes if cells else None)
    with Devices(reporter.line, deadline.near) as devices:
        try:
            names, obstacles = _before_the_first(cells, labels, devices, reporter)
        except GivenUp as error:
            waited = [(number, cell, seed) for number, cell in enumerate(cells) for seed in cell.seeds]
            return [Outcome(labels[n], seed, "left", str(error), None, number=n) for n, cell, seed in waited]
        if devices.fault is not None:
            reporter.line(f"{devices.fault}: nothing keeps other runs off the GPU meanwhile")
        largest: dict[int, RunRecord] = {}
        for number, seed in _turns(cells):
            settings, label = cells[number], labels[number]
            if any(outcome.status == "refused" and outcome.number == number for outcome in outcomes):
                continue
            cell = identity(settings, names[settings.device, settings.kernels])

            def halt(settings: Settings = settings) -> Literal["left", "skipped"] | None:
                return _halt(settings, outcomes, failed_elsewhere)

            try:
                # Before the seed is claimed: two that wait for what the other has would wait for ever.
                lease = None if halt() else _lease(devices, settings)
                outcome = _run_turn(number, label, settings, seed, cell, obstacles.get(number), lease, reporter, halt)
            except GivenUp as error:
                outcome = Outcome(label, seed, "left", str(error), None, number=number)
            except Refused as error:
                outcome = Outcome(label, settings.seeds[0], "refused", str(error), None, number=number)
            outcomes.append(outcome)
            if outcome.path is not None and not outcome.reused and outcome.status not in ("left", "skipped"):
                with contextlib.suppress(RecordError):
                    run = read_run(outcome.path)
                    largest[number] = max(largest.get(number, run), run, key=_step_peak)
            if seed == settings.seeds[-1] and number in largest:
                # It stands for all: seeds of a cell differ little in it.
                reporter.memory(f"{label}/seed {largest[number].seed}", largest[number])
    return sorted(outcomes, key=lambda outcome: outcome.number)


def _turns(cells: Sequence[Settings]) -> list[tuple[int, int]]:
    """Numbers of cells, and a seed of each, in the order in which they run."""
    turns = [
        (place, number, seed) for number, settings in enumerate(cells) for place, seed in enumerate(settings.seeds)
    ]
    if cells and cells[0].runner.order == "interleaved":
        turns.sort()
    return [(number, seed) for _, number, seed in turns]


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
        ended = _child("expect_time", (able, lease), _hear_nothing, cells[0].runner.timeout)
    if ended.verdict is not None:
        return Report((*report.checks, *ended.verdict[1]), report.devices)
    finding = f"{cell_label(able[0][1])}: the process of a few steps ended early ({ended.how})"
    lost = Check("time", "fails", finding, "lower method.batch.initial or use kernels=torch", (able[0][0],))
    return Report((*report.checks, lost), report.devices)


def device_name(settings: Settings) -> str:
    """What the device that the settings ask for is called. Raises ``Refused`` where it cannot be used."""
    return _device_name(settings, None)


def epoch_seconds(settings: Settings) -> float:
    """Seconds that an epoch with its evaluation will take, by a few steps of a run that is thrown away.

    Raises:
        Refused: such a run cannot be set up, or its process ended early.
    """
    with Devices(lambda text: print(text, flush=True)) as devices:
        ended = _child("time_epoch", (settings, _lease(devices, settings)), _hear_nothing, settings.runner.timeout)
    return _answer(ended, f"{cell_label(settings)}: the process of a few steps")


def _lease(devices: Devices, settings: Settings) -> Lease | None:
    return devices.take(settings.device, settings.runner.share_gpu)


def _checked(cells: Sequence[Settings], thorough: bool, devices: Devices) -> Report:
    """The checks of all cells, each on the card that its runs will have."""
    parts = []
    for device in dict.fromkeys(settings.device for settings in cells):
        numbers = [number for number, settings in enumerate(cells) if settings.device == device]
        members = [cells[number] for number in numbers]
        arguments = members, thorough, _lease(devices, members[0])
        ended = _child("check_cells", arguments, _hear_nothing, cells[0].runner.timeout)
        if ended.verdict is None:
            raise Refused(f"preflight: its process ended early ({ended.how}); preflight=off goes on without it")
        parts.append((device, numbers, ended.verdict[1]))
    return merged(parts)


def _hear_nothing(kind: str, payload: object) -> None: ...


def _before_the_first(
    cells: Sequence[Settings], labels: Sequence[str], devices: Devices, reporter: Reporter
) -> tuple[dict[tuple[str, str], str], dict[int, str]]:
    """Names of the cells' devices, and why cells cannot run, by their number; what else is known is said."""
    if not cells or cells[0].preflight == "off":
        distinct = {(settings.device, settings.kernels): settings for settings in cells}
        return {key: _device_name(settings, _lease(devices, settings)) for key, settings in distinct.items()}, {}
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
            reporter.line(f"{labels[number]} cannot run: {obstacle}")
    return report.devices, obstacles


def cell_label(settings: Settings) -> str:
    return f"{settings.dataset.name}/{settings.model.name}/{settings.method.name}"


def cell_labels(cells: Sequence[Settings]) -> list[str]:
    """``cell_label`` of each; of several alike, with a setting that tells them apart, or all that differ."""
    labels = [cell_label(settings) for settings in cells]
    for label in [label for label, count in Counter(labels).items() if count > 1]:
        alike = [number for number, other in enumerate(labels) if other == label]
        texts = [as_text(identifying_settings(cells[number].model_dump(mode="json"))) for number in alike]
        keys = differing(texts)
        # What most sweeps are of comes first.
        telling = [
            key for key in ("optimizer.lr", *keys) if len({text[key] for text in texts if key in text}) == len(alike)
        ]
        for number, text in zip(alike, texts):
            if variant := told(text, telling[:1] or keys):
                labels[number] = f"{label} ({variant})"
    return labels


def seed_folder(settings: Settings, cell: str, seed: int) -> Path:
    """``<root>/<dataset>-<model>-<method>-<cell>/seed-<seed>``"""
    return Path(settings.results.root) / f"{cell_label(settings).replace('/', '-')}-{cell}" / f"seed-{seed}"


def _halt(
    settings: Settings, outcomes: Sequence[Outcome], failed_elsewhere: Callable[[], bool]
) -> Literal["left", "skipped"] | None:
    """What becomes of a run that has not begun, if it is not to begin any more."""
    if any(outcome.status == "left" for outcome in outcomes) or Deadline(settings.runner.max_minutes).near():
        return "left"
    if settings.on_failure == "stop" and (any(outcome.failed for outcome in outcomes) or failed_elsewhere()):
        return "skipped"
    return None


def _run_turn(
    number: int,
    label: str,
    settings: Settings,
    seed: int,
    cell: str,
    obstacle: str | None,
    lease: Lease | None,
    reporter: Reporter,
    halt: Callable[[], Literal["left", "skipped"] | None],
) -> Outcome:
    """Raises ``Refused`` where the cell cannot be run."""
    folder = seed_folder(settings, cell, seed)
    name, path = f"{label}/seed {seed}", folder / RUN_FILE
    halted = halt()
    if halted is not None and not (settings.results.reuse and _finished(path, cell, seed, reporter)):
        return Outcome(label, seed, halted, None, path, number=number)
    with claimed(folder, name, reporter, Deadline(settings.runner.max_minutes)) as ours:
        if not ours:
            return Outcome(label, seed, "left", "another command is running it", path, number=number)
        if settings.results.reuse:
            recover(folder, settings.results.scratch, name, reporter)
        if settings.results.reuse and _finished(path, cell, seed, reporter):
            told = "" if settings.tracker == "none" else "; no scalars of it, which results.reuse=false would make"
            reporter.line(f"{name}: finished before, reused ({path}){told}")
            # Of a run that was killed between its record and its end.
            with contextlib.suppress(OSError):
                (folder / CHECKPOINT_FILE).unlink(missing_ok=True)
            return Outcome(label, seed, "done", None, path, reused=True, number=number)
        if obstacle is not None:
            raise Refused(obstacle)
        room = space(folder, "results.root", RECORD_BYTES, 0, ())
        if settings.preflight != "off" and room.verdict == "fails":
            # Runs before this one, or others, have filled the disk; it would train for nothing.
            raise Refused(room.sentence)
        reporter.start(name, settings.memory.meter)
        status, reason = _run_seed(settings, seed, cell, folder, lease, reporter)
        if status != "done":
            reporter.line(f"{name}: {status}: {reason}")
        return Outcome(label, seed, status, reason, path, number=number)


def _step_peak(run: RunRecord) -> int:
    return 0 if run.memory is None else run.memory.step_peak_bytes or 0


def recorded_run(settings: Settings, device_name: str, seed: int) -> RunRecord | None:
    """The record of this seed on that device, whichever way it ended."""
    cell = identity(settings, device_name)
    return _record(seed_folder(settings, cell, seed) / RUN_FILE, cell, seed)[0]


def finished_run(settings: Settings, device_name: str, seed: int) -> RunRecord | None:
    """The record that a sweep on that device would reuse for this seed."""
    run = recorded_run(settings, device_name, seed)
    return run if run is not None and why_excluded(run) is None else None


def _finished(path: Path, cell: str, seed: int, reporter: Reporter) -> bool:
    run, fault = _record(path, cell, seed)
    why = None if run is None else why_excluded(run)
    if why is not None and run.status == "done":
        fault = f"{path}: {why}"
    if fault is not None:
        reporter.line(f"{fault}; running that seed again")
    return run is not None and why is None


def _record(path: Path, cell: str, seed: int) -> tuple[RunRecord | None, str | None]:
    """A seed's record, or why what lies there is none of it; neither where nothing does."""
    if not path.exists():
        return None, None
    try:
        run = read_run(path)
    except RecordError as error:
        return None, error.fault
    if run.results_version != RESULTS_VERSION:
        return None, f"{path}: made by code of results version {run.results_version}, not {RESULTS_VERSION}"
    if (run.cell, run.seed) != (cell, seed):
        return None, f"{path}: holds seed {run.seed} of cell {run.cell}, not of this one"
    return run, None


def _run_seed(
    settings: Settings, seed: int, cell: str, folder: Path, lease: Lease | None, reporter: Reporter
) -> tuple[Status | Literal["left"], str | None]:
    def receive(kind: str, payload) -> None:
        if kind == "progress":
            reporter.progress(payload)
        elif kind == "epoch":
            reporter.epoch(payload, settings.epochs)
        elif kind == "note":
            reporter.line(payload["text"])

    limits = settings.runner.timeout, Deadline(settings.runner.max_minutes)
    ended = _child("run_seed", (settings, seed, cell, folder, lease), receive, *limits)
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


def _device_name(settings: Settings, lease: Lease | None) -> str:
    ended = _child("inspect_device", (settings.device, settings.kernels, lease), _hear_nothing, settings.runner.timeout)
    return _answer(ended, f"device={settings.device}: looking at the device")


def _answer(ended: Ended, what: str) -> Any:
    """What a child was asked for. Raises ``Refused`` where it refused, or ended without a word."""
    if ended.verdict is None:
        raise Refused(f"{what} ended early ({ended.how})")
    kind, payload = ended.verdict
    if kind == "refused":
        raise Refused(payload)
    return payload


def _child(
    entry: str,
    arguments: tuple,
    receive: Callable[[str, Any], None],
    timeout: float | None,
    deadline: Deadline | None = None,
) -> Ended:
    try:
        tempfile.gettempdir()
    except OSError as error:
        # The fork server's sockets lie there.
        said = f"expected a folder for temporary files that can be written, got none ({error})"
        raise Refused(f"TMPDIR: {said}; set TMPDIR to one") from None
    return child.call(entry, arguments, receive, timeout, deadline)
