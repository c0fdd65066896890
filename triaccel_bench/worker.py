"""One (cell, seed) in a process of its own: look at the device, load the data, train, write the record.

A process a run keeps peaks, caches and crashes of one run out of the next. Functions here are
entry points of child processes; what they report travels as plain values over a pipe.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import datetime, timedelta, timezone
from importlib import resources
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torchvision

import triaccel_bench
from triaccel_bench import graphs, inspection, pace, tracker
from triaccel_bench import hardware as hardware_module
from triaccel_bench.anatomy import held
from triaccel_bench.data import DataError, load
from triaccel_bench.divergence import Diverged
from triaccel_bench.hardware import DeviceError, Hardware
from triaccel_bench.identity import RESULTS_VERSION
from triaccel_bench.leases import Lease
from triaccel_bench.meters import card_state
from triaccel_bench.outcomes import LAST_WORDS
from triaccel_bench.preflight import Check, failed
from triaccel_bench.records import CHECKPOINT_FILE, Provenance, RunRecord, Trace, planned_run, write_run
from triaccel_bench.resumption import CheckpointError, Interrupted, Keeper, Owner, Stop, stoppable
from triaccel_bench.scratch import Workplace
from triaccel_bench.settings import Settings, SettingsError
from triaccel_bench.shortage import DOUBTFUL, cause_of
from triaccel_bench.trainer import Trainer
from triaccel_bench.weights import WeightsError

REFUSALS = (DeviceError, DataError, WeightsError, SettingsError)
"""Faults of the set-up, found before any step: they end the command with exit code 2 and leave no record."""


CUBLAS_WORKSPACES = {"CUBLAS_WORKSPACE_CONFIG": ":1024:2:16:8", "CUBLASLT_WORKSPACE_SIZE": "2048"}
"""2 MiB a handle. PyTorch's 8 MiB, and 32 on Hopper, for each of several would be much beside these models' memory."""


def inspect_device(pipe: Connection, device: str, kernels: str, lease: Lease | None = None) -> None:
    """Send ``("device", name)`` or ``("refused", message)``."""
    try:
        found = hardware_module.inspect(_entered(lease, device), kernels)
        pipe.send(("device", found.name))
    except DeviceError as error:
        pipe.send(("refused", str(error)))


def check_cells(pipe: Connection, cells: Sequence[Settings], thorough: bool, lease: Lease | None = None) -> None:
    """Send ``("finished", report)``, as ``inspection.look`` makes it; with a lease all cells are on that card."""
    placed = [s.model_copy(update={"device": _entered(lease, s.device)}) for s in cells]
    pipe.send(("finished", inspection.look(placed, thorough)))


def expect_time(pipe: Connection, cells: Sequence[tuple[int, Settings]], lease: Lease | None = None) -> None:
    """Send ``("finished", checks)``: what cells of these numbers will take, by a few steps of the first."""
    number, first = cells[0]
    try:
        with _thrown_away(first, lease) as (found, trainer):
            parts = trainer.engine, trainer.data, trainer.clock
            measured = pace.measure(first, *parts)
            checks = [pace.expectation(measured, trainer.data, [settings for _, settings in cells])]
            if found.capability is not None and not found.fp16_units:
                checks.append(pace.does_fp16_pay(*parts, measured.batch, found))
    except REFUSALS as error:
        checks = [failed("time", str(error), [number])]
    except Exception as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        if cause_of(error) in (None, DOUBTFUL):
            remedy = "run that cell with preflight=off for the whole traceback"
            checks = [Check("time", "fails", f"a step fails ({type(error).__name__}: {said})", remedy, (number,))]
        else:
            finding = f"B={first.method.batch.initial} does not fit ({said}), so that runs would take smaller batches"
            checks = [Check("time", "warning", finding, "lower method.batch.initial")]
    pipe.send(("finished", checks))


def time_epoch(pipe: Connection, settings: Settings, lease: Lease | None = None) -> None:
    """Send ``("finished", seconds)`` of an epoch and its evaluation, by a few steps, or ``("refused", message)``."""
    try:
        with _thrown_away(settings, lease) as (_, trainer):
            measured = pace.measure(settings, trainer.engine, trainer.data, trainer.clock)
            seconds = measured.epoch_seconds(trainer.data.train_count, trainer.data.eval_count)
    except Exception as error:
        known = isinstance(error, REFUSALS)
        said = str(error) if known else traceback.format_exception_only(error)[-1].strip()
        pipe.send(("refused", said))
        return
    pipe.send(("finished", seconds))


@contextmanager
def _thrown_away(settings: Settings, lease: Lease | None) -> Iterator[tuple[Hardware, Trainer]]:
    """The device, and the trainer of a run of the first seed that leaves no record."""
    _hold_workspaces()
    found = hardware_module.inspect(_entered(lease, settings.device), settings.kernels)
    images = pace.images_for(settings.dataset)
    run = planned_run(settings.model_dump(mode="json"), settings.seeds[0], "preflight", RESULTS_VERSION)
    with _stream_of_captures(found):
        yield found, Trainer(settings, settings.seeds[0], found, images, run, lambda kind, payload: None)


def run_seed(
    pipe: Connection, settings: Settings, seed: int, cell: str, folder: Path, lease: Lease | None = None
) -> None:
    """Train one seed, on the leased card if there is one, and write its record below ``folder``.

    Sends ``("progress" | "epoch" | "note", payload)`` as it goes, then ``("refused", message)`` or
    ``("finished", (status, reason))``. SIGTERM, SIGINT and SIGUSR1 end it after the step under way, with a checkpoint
    and the status ``interrupted``.
    """
    _hold_workspaces()
    # Backward passes have a thread of their own, which takes up the card's context with its first product.
    warnings.filterwarnings("ignore", message="Attempting to run cuBLAS, but there was no current CUDA context")
    device = _entered(lease, settings.device)

    def emit(kind: str, payload: dict) -> None:
        pipe.send((kind, payload))

    try:
        with stoppable() as stop:
            _run_seed(pipe, settings, device, seed, cell, folder, emit, stop)
    except Interrupted as interruption:
        # No record: those are of runs that have ended. Who asked may not be there any more.
        with suppress(OSError):
            pipe.send(("finished", ("interrupted", str(interruption))))


def _run_seed(
    pipe: Connection, settings: Settings, device: str, seed: int, cell: str, folder: Path, emit, stop: Stop
) -> None:
    run = planned_run(settings.model_dump(mode="json"), seed, cell, RESULTS_VERSION)
    trace = keeper = sitting = None
    begun = time.monotonic()
    work = Workplace(folder, settings.results.scratch)
    try:
        work.open()
        found = hardware_module.inspect(device, settings.kernels)
        run.provenance = provenance(found)
        sitting = run.provenance.started_at  # a run that goes on keeps that of its first process
        for warning in found.warnings:
            run.warnings.append(warning)
            emit("note", {"text": warning})
        if settings.tracker == "tensorboard":
            tracker.writer_class()  # a refusal comes before data is read
        images = load(settings.dataset)
        run.dataset_fingerprint = images.fingerprint
        if settings.results.resume:
            owner = Owner(cell, seed, RESULTS_VERSION, images.fingerprint)
            path, every = work.folder / CHECKPOINT_FILE, settings.results.checkpoint_every
            keeper = Keeper(path, owner, every, stop, publish=work.publish)
        trace = _train(settings, seed, found, images, run, emit, keeper, folder)
    except REFUSALS as error:
        work.close()
        pipe.send(("refused", str(error)))
        return
    except Interrupted:
        work.close()
        raise
    except Exception as error:
        _fail(run, error, emit)
    stop.deferred = True
    if run.provenance is not None:
        # Read while the card is still warm from the last epoch; at the start it idles.
        run.provenance.sm_clock_mhz, run.provenance.temperature_celsius = card_state(found)
        run.provenance.finished_at = _after(sitting, time.monotonic() - begun)
    try:
        write_run(work.folder, run, trace)
        work.publish_record()
        work.close()
    except OSError as error:
        run.reason = f"{run.status}, but its record cannot be written ({error}); free space below results.root"
        run.status = "failed"
    if run.status in ("done", "diverged"):
        # Only now: until the record is there, nothing else holds what was trained.
        with suppress(OSError):
            (folder / CHECKPOINT_FILE).unlink(missing_ok=True)
    pipe.send(("finished", (run.status, run.reason)))


def _entered(lease: Lease | None, device: str) -> str:
    """The name of the device in this process."""
    if lease is None:
        return device
    lease.enter()
    return "cuda"


def _hold_workspaces() -> None:
    for name, value in CUBLAS_WORKSPACES.items():
        os.environ.setdefault(name, value)


def _stream_of_captures(found: Hardware) -> AbstractContextManager:
    """Also for all else: a library's workspace exists once a stream."""
    return torch.cuda.stream(graphs.stream(found.device)) if found.device.type == "cuda" else nullcontext()


def _train(
    settings: Settings, seed: int, found: Hardware, images, run: RunRecord, emit, keeper: Keeper | None, folder: Path
) -> Trace | None:
    """Train and put the outcome into ``run``; what had been recorded stays, whatever the outcome."""
    trainer = None
    with _stream_of_captures(found):
        try:
            trainer = _trainer(settings, seed, found, images, run, emit, keeper)
            if run.meter_reason and run.meter_reason not in run.warnings:
                run.warnings.append(run.meter_reason)
                emit("note", {"text": run.meter_reason})
            if keeper is not None:
                keeper.stop.deferred = True
            with tracker.followed(settings.tracker, folder, run, trainer.trace, emit) as trainer.emit:
                trainer.train()
            run.status, run.reason = "done", None
        except REFUSALS:
            raise
        except Diverged as error:
            run.status, run.reason, run.traceback = "diverged", str(error), _lines(error)
            trainer.finish()
        except Exception as error:
            if cause_of(error) in (None, DOUBTFUL):
                _fail(run, error, emit)
            else:
                batch = trainer.method.decision.batch if trainer else settings.method.batch.initial
                said = (str(error).splitlines() or [type(error).__name__])[0]
                run.status, run.reason = "oom", f"does not fit at batch {batch}: {said}"
                run.traceback = _lines(error)
                if trainer:
                    trainer.finish()
                    run.reason += f" (held between steps: {held(run.memory)})"
    return trainer.trace if trainer else None


def _trainer(
    settings: Settings, seed: int, found: Hardware, images, run: RunRecord, emit, keeper: Keeper | None
) -> Trainer:
    """One that goes on from the checkpoint, or, where that is of no use, starts from the beginning and says so."""
    parts = settings, seed, found, images, run, emit, keeper
    if keeper is not None:
        try:
            keeper.look()
            return Trainer(*parts)
        except CheckpointError as error:
            text = f"{keeper.path}: {error}; it is ignored, and the run starts from the beginning"
        keeper.found = None
        run.warnings.append(text)
        emit("note", {"text": text})
    return Trainer(*parts)


def _fail(run: RunRecord, error: Exception, emit) -> None:
    run.status, run.reason, run.traceback = "failed", f"{type(error).__name__}: {error}", _lines(error)
    emit("note", {"text": "\n".join(run.traceback)})


def _lines(error: Exception) -> list[str]:
    return "".join(traceback.format_exception(error)).splitlines()[-LAST_WORDS:]


def provenance(found: Hardware) -> Provenance:
    commit, dirty = _git_state()
    capability = None if found.capability is None else "{}.{}".format(*found.capability)
    return Provenance(
        code_version=triaccel_bench.__version__,
        code_hash=code_hash(),
        git_commit=commit,
        git_dirty=dirty,
        python=platform.python_version(),
        torch=torch.__version__,
        torchvision=torchvision.__version__,
        triton=_triton_version(),
        cuda=torch.version.cuda,
        cudnn=_cudnn_version(),
        driver=found.driver,
        device=str(found.device),
        device_name=found.name,
        device_uuid=found.uuid,
        capability=capability,
        device_total_bytes=found.total_bytes,
        bf16_native=found.bf16_native,
        kernels=found.kernels,
        kernels_reason=found.kernels_reason,
        started_at=_now(),
    )


def _triton_version() -> str | None:
    try:
        from importlib.metadata import version

        return version("triton")
    except ImportError:
        return None


def _cudnn_version() -> str | None:
    number = torch.backends.cudnn.version()
    return None if number is None else str(number)


_SOURCES = {"triaccel_bench": "triaccel_bench", "triaccel_bench.kernels": "kernels", "triaccel_bench.conf": "conf"}
"""Packages that ``code_hash`` reads, and where they lie in a checkout."""


def code_hash() -> str:
    """Twelve hex digits over names and contents of the package's Python and YAML files."""
    digest = hashlib.sha256()
    for package in _SOURCES:
        folder = resources.files(package)
        for path in sorted(Path(str(folder)).rglob("*")):
            if path.suffix in (".py", ".yaml"):
                name = f"{package}/{path.relative_to(str(folder))}"
                digest.update(hashlib.sha256(name.encode()).digest() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:12]


def _git_state() -> tuple[str | None, bool | None]:
    """Commit of the source checkout this package runs from, and whether its sources are others; ``None`` elsewhere."""
    root = Path(triaccel_bench.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None, None
    try:
        commit = _git(root, "rev-parse", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no")
        # A file that is new there is read all the same: a choice in conf/tuned, say.
        return commit, bool(
            changed or _git(root, "ls-files", "--others", "--exclude-standard", "--", *_SOURCES.values())
        )
    except (OSError, subprocess.SubprocessError):
        return None, None


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _after(time_of_day: str, seconds: float) -> str:
    """So that no run ends before it began where the machine's clock is put right meanwhile."""
    return (datetime.fromisoformat(time_of_day) + timedelta(seconds=seconds)).isoformat(timespec="seconds")
