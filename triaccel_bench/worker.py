"""One (cell, seed) in a process of its own: look at the device, load the data, train, write the record.

A process a run keeps peaks, caches and crashes of one run out of the next. Functions here are
entry points of child processes; what they report travels as plain values over a pipe.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import traceback
from contextlib import nullcontext
from datetime import datetime, timezone
from importlib import resources
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torchvision

import triaccel_bench
from triaccel_bench import graphs
from triaccel_bench import hardware as hardware_module
from triaccel_bench.anatomy import held
from triaccel_bench.data import DataError, load
from triaccel_bench.hardware import DeviceError, Hardware
from triaccel_bench.identity import RESULTS_VERSION
from triaccel_bench.meters import card_state
from triaccel_bench.models import WeightsError
from triaccel_bench.records import Provenance, RunRecord, Trace, planned_run, write_run
from triaccel_bench.settings import Settings, SettingsError
from triaccel_bench.shortage import DOUBTFUL, cause_of
from triaccel_bench.trainer import Diverged, Trainer

REFUSALS = (DeviceError, DataError, WeightsError, SettingsError)
"""Faults of the set-up, found before any step: they end the command with exit code 2 and leave no record."""


CUBLAS_WORKSPACES = {"CUBLAS_WORKSPACE_CONFIG": ":4096:2:16:8", "CUBLASLT_WORKSPACE_SIZE": "8192"}
"""8 MiB a handle, PyTorch's default before Hopper. Its 32 MiB there would be a quarter of these models' memory."""


def inspect_device(pipe: Connection, device: str, kernels: str) -> None:
    """Send ``("device", name)`` or ``("refused", message)``."""
    try:
        found = hardware_module.inspect(device, kernels)
        pipe.send(("device", found.name))
    except DeviceError as error:
        pipe.send(("refused", str(error)))


def run_seed(pipe: Connection, settings: Settings, seed: int, cell: str, folder: Path) -> None:
    """Train one seed and write its record below ``folder``.

    Sends ``("progress" | "epoch" | "note", payload)`` as it goes, then ``("refused", message)`` or
    ``("finished", (status, reason))``.
    """
    for name, value in CUBLAS_WORKSPACES.items():
        os.environ.setdefault(name, value)

    def emit(kind: str, payload: dict) -> None:
        pipe.send((kind, payload))

    run = planned_run(settings.model_dump(mode="json"), seed, cell, RESULTS_VERSION)
    trace = None
    try:
        found = hardware_module.inspect(settings.device, settings.kernels)
        run.provenance = provenance(found)
        for warning in found.warnings:
            run.warnings.append(warning)
            emit("note", {"text": warning})
        images = load(settings.dataset)
        run.dataset_fingerprint = images.fingerprint
        trace = _train(settings, seed, found, images, run, emit)
    except REFUSALS as error:
        pipe.send(("refused", str(error)))
        return
    except Exception as error:
        _fail(run, error, emit)
    if run.provenance is not None:
        # Read while the card is still warm from the last epoch; at the start it idles.
        run.provenance.sm_clock_mhz, run.provenance.temperature_celsius = card_state(found)
        run.provenance.finished_at = _now()
    try:
        write_run(folder, run, trace)
    except OSError as error:
        run.reason = f"{run.status}, but its record cannot be written ({error}); free space below results.root"
        run.status = "failed"
    pipe.send(("finished", (run.status, run.reason)))


def _train(settings: Settings, seed: int, found: Hardware, images, run: RunRecord, emit) -> Trace | None:
    """Train and put the outcome into ``run``; what had been recorded stays, whatever the outcome."""
    trainer = None
    on_card = found.device.type == "cuda"
    # The stream of captures also for all else: a library's workspace exists once a stream.
    with torch.cuda.stream(graphs.stream(found.device)) if on_card else nullcontext():
        try:
            trainer = Trainer(settings, seed, found, images, run, emit)
            if run.meter_reason:
                run.warnings.append(run.meter_reason)
                emit("note", {"text": run.meter_reason})
            trainer.train()
            run.status, run.reason = "done", None
        except REFUSALS:
            raise
        except Diverged as error:
            run.status, run.reason = "diverged", str(error)
            trainer.finish()
        except Exception as error:
            if cause_of(error) in (None, DOUBTFUL):
                _fail(run, error, emit)
            else:
                batch = trainer.method.decision.batch if trainer else settings.method.batch.initial
                said = (str(error).splitlines() or [type(error).__name__])[0]
                run.status, run.reason = "oom", f"does not fit at batch {batch}: {said}"
                if trainer:
                    trainer.finish()
                    run.reason += f" (held between steps: {held(run.memory)})"
    return trainer.trace if trainer else None


def _fail(run: RunRecord, error: Exception, emit) -> None:
    run.status, run.reason = "failed", f"{type(error).__name__}: {error}"
    emit("note", {"text": "".join(traceback.format_exception(error))})


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


def code_hash() -> str:
    """Twelve hex digits over names and contents of the package's Python and YAML files."""
    digest = hashlib.sha256()
    for package in ("triaccel_bench", "triaccel_bench.kernels", "triaccel_bench.conf"):
        folder = resources.files(package)
        for path in sorted(Path(str(folder)).rglob("*")):
            if path.suffix in (".py", ".yaml"):
                name = f"{package}/{path.relative_to(str(folder))}"
                digest.update(hashlib.sha256(name.encode()).digest() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:12]


def _git_state() -> tuple[str | None, bool | None]:
    """Commit of the source checkout this package runs from, and whether it has changes; ``None`` elsewhere."""
    root = Path(triaccel_bench.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None, None
    try:
        commit = _git(root, "rev-parse", "HEAD")
        return commit, bool(_git(root, "status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return None, None


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
