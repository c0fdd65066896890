"""Records of a run as plain data: units stand in the field names, JSON goes in and out.

``None`` means "not measured" (no meter, no card, not reached) and stays ``None`` through
every table; it is never replaced by a number.
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError

from triaccel_bench.files import write_together


def _told(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


Bytes = Annotated[int, Field(ge=0)]
Signal = Annotated[float, Field(allow_inf_nan=True), PlainSerializer(_told, float | str, "json")]
"""A number as a decision saw it, to the last bit; "nan", "inf" and "-inf" are values, where ``null`` is none."""
Status = Literal["done", "diverged", "oom", "failed", "interrupted"]
Meter = Literal["vram", "tensors", "off"]
Kind = Literal["weights", "copies", "gradients", "optimizer", "activations", "workspace", "dataset", "other"]
"""Parameters and buffers; 16-bit copies of weights; gradients; momentum; what else a step needs, what convolutions
borrow included; what the library of matrix products keeps; all samples' images and labels; the rest."""
Phase = Literal["forward", "backward", "update", "capture", "probe", "evaluation"]
StepPhase = Literal["data", "forward", "backward", "update"]
Verdict = Literal["input-bound", "launch-bound", "compute-bound"]
"""Launch-bound: steps run eagerly on a card, and the host takes longer to launch one than the card to do it.
Input-bound, of the others: assembling a batch takes longer than all else of a step. Compute-bound: neither."""

RUN_FILE = "run.json"
TRACE_FILE = "trace.json.gz"
CHECKPOINT_FILE = "checkpoint.pt"
"""Beside them while a run is under way: what a new process goes on from."""


class RecordError(ValueError):
    """A record file that cannot be read; the message names the file, its ``fault`` and the remedy."""

    def __init__(self, fault: str) -> None:
        super().__init__(f"{fault}; remove it and run that seed again")
        self.fault = fault


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Provenance(_Record):
    code_version: str
    code_hash: str | None = None
    """Twelve hex digits over the package's source files: tells two states of one version apart, with or without git."""
    git_commit: str | None = None
    git_dirty: bool | None = None
    python: str
    torch: str
    torchvision: str
    triton: str | None = None
    cuda: str | None = None
    cudnn: str | None = None
    driver: str | None = None
    device: str
    device_name: str
    device_uuid: str | None = None
    capability: str | None = None
    device_total_bytes: Bytes | None = None
    sm_clock_mhz: int | None = None
    """Clock and temperature as the last epoch ended."""
    temperature_celsius: int | None = None
    bf16_native: bool
    kernels: Literal["triton", "torch"]
    kernels_reason: str
    started_at: str
    finished_at: str | None = None


class EpochRecord(_Record):
    """One epoch. Train figures weight every sample alike; evaluation sees every image once."""

    epoch: int
    train_loss: float | None
    train_accuracy_percent: float | None = Field(ge=0, le=100)
    evaluation_loss: float | None = None
    evaluation_accuracy_percent: float | None = Field(None, ge=0, le=100)
    evaluation_samples: int = 0
    train_seconds: float = Field(ge=0)
    """Wall-clock of training: data, steps, controller, probes, plan changes; the device is idle at both ends."""
    evaluation_seconds: float = Field(0.0, ge=0)
    probe_seconds: float = Field(0.0, ge=0)
    controller_seconds: float | None = None
    """Part of ``train_seconds``: the host's, to begin read-backs, and from the arrival of one until what was decided
    is in force. A card has a step to do meanwhile: so much at most was lost. None: recorded before this was."""
    captures: int = 0
    """Steps captured in a CUDA graph within this epoch."""
    capture_seconds: float = 0.0
    """Part of ``train_seconds``: those captures, and the eager steps that warmed them up."""
    steps: int
    steps_skipped: int = 0
    samples_seen: int
    batch_mean: float
    """Effective batch: samples over steps."""
    batch_min: int
    batch_max: int
    """Smallest and largest B that the controller chose; an epoch's remainder, smaller by chance, is not among them."""
    batch_last: int
    learning_rate_last: float
    loss_scale_last: float | None = None
    memory_peak_bytes: Bytes | None = None
    """The meter's own peak without the resident data set (``RunRecord.meter`` says which meter)."""
    probe_peak_bytes: Bytes | None = None
    reserved_bytes: Bytes | None = None
    process_bytes: Bytes | None = None
    """What NVML attributes to this process, CUDA context included."""
    device_used_bytes: Bytes | None = None
    layers_requested: dict[str, int]
    layers_executed: dict[str, int]
    plan_changes: int = 0
    layers_promoted: int = 0
    rate_scale_min: float = 1.0
    rate_scale_mean: float = 1.0
    lambda_max: float | None = None
    lambda_median: float | None = None
    lambda_age_steps_max: int | None = None
    layers_probed: int = 0


class LayerRecord(_Record):
    """The state of one named layer when the run ended."""

    name: str
    elements: int
    requested: str
    executed: str
    promoted: bool = False
    rate_scale: float = 1.0
    variance: float | None = None
    eigenvalues: list[float] | None = None
    lambda_age_steps: int | None = None
    iterations: int | None = None
    converged: bool | None = None


class MemoryRecord(_Record):
    """Where the memory of a run goes, in bytes; None: unknown."""

    model_config = ConfigDict(frozen=True)

    step_peak_bytes: Bytes | None
    """Allocated at the peak of the largest training step that was read, data set included: the sum of its kinds.

    Where steps are replayed from CUDA graphs, those were read that ran eagerly before a capture.
    """
    kind_bytes: dict[Kind, Bytes | None]
    """At that peak."""
    phase_bytes: dict[Phase, Bytes | None]
    """At the peak of each phase, of whichever step, without the resident data set."""


class SplitRecord(_Record):
    """Where the time of a training step goes, sampled after training; the steps themselves are undone.

    Sampled are eager steps of the batch size and the plan in force at the end. On a CPU a clock is read between phases.
    On a card events stand between them, behind a wait that lets the host launch all of a step before the device begins
    it, so that no phase holds time in which the device waits for launches. None: unknown.
    """

    model_config = ConfigDict(frozen=True)

    clock: Literal["host", "device"]
    """What read the phases."""
    batch: int
    layers_executed: dict[str, int]
    steps: int
    """Sampled; each figure is their median."""
    phase_seconds: dict[StepPhase, float | None]
    """With ``method.update.in_backward`` the update is part of "backward", and by itself unknown."""
    launch_seconds: float | None = None
    """What the host takes to launch such a step; None on a CPU, which launches nothing."""
    verdict: Verdict | None
    reason: str | None = None
    """Why something is unknown."""


def _with_groups(settings: dict[str, Any]) -> dict[str, Any]:
    """Refuses what no version wrote: whoever reads records asks these groups of settings."""
    for group in ("dataset", "model", "method", "memory"):
        if not isinstance(settings.get(group), dict):
            raise ValueError(f"expected a group {group}, got {settings.get(group)!r}")
    return settings | {"method": _of_this_version(settings["method"])}


def _of_this_version(method: dict[str, Any]) -> dict[str, Any]:
    """Without a setting that is no more where it was not read, and with a later one at what it was before."""
    batch = method.get("batch")
    if not isinstance(batch, dict) or batch.get("growth") == "noise":
        return method
    return method | {"batch": {"head_start": 1.0} | {k: v for k, v in batch.items() if k != "noise_share"}}


def _without(*former: str) -> BeforeValidator:
    """For a record that earlier versions wrote with these fields."""
    return BeforeValidator(
        lambda told: {k: v for k, v in told.items() if k not in former} if isinstance(told, dict) else told
    )


class RunRecord(_Record):
    """One (cell, seed)."""

    results_version: int
    status: Status
    reason: str | None = None
    traceback: list[str] = Field(default_factory=list)
    """Lines: of the exception that ended it, of the crash of its process, or of its threads' stacks as it hung."""
    cell: str
    dataset: str
    model: str
    method: str
    seed: int
    epochs_planned: int
    settings: Annotated[dict[str, Any], AfterValidator(_with_groups)]
    provenance: Provenance | None = None
    meter: Meter = "off"
    meter_reason: str | None = None
    dataset_fingerprint: str | None = None
    dataset_bytes: Bytes | None = None
    train_samples: int | None = None
    evaluation_samples: int | None = None
    budget_bytes: Bytes | None = None
    budget_source: str | None = None
    tau_low: float | None = None
    tau_high: float | None = None
    tau_curv: float | None = None
    graphs: bool | None = None
    """Whether steps were replayed from CUDA graphs to the end; ``eager_reason`` says why not."""
    eager_reason: str | None = None
    first_use_seconds: float | None = None
    """Compilation, library start-up, memory calibration and a probe to make ready, before the first epoch's clock."""
    resumed_at: list[int] = Field(default_factory=list)
    """Steps after which a new process went on from a checkpoint. Figures in seconds add up over the processes."""
    checkpoint_seconds: float = 0.0
    """Spent on writing checkpoints between epochs; part of no epoch's figure."""
    steps: int = 0
    steps_skipped: int = 0
    samples_applied: int = 0
    """Samples of applied updates: the position of the learning-rate schedule."""
    retries: dict[str, int] = Field(default_factory=dict)
    warnings: list[str] = Field(default_factory=list)
    memory: MemoryRecord | None = None
    split: SplitRecord | None = None
    epochs: list[EpochRecord] = Field(default_factory=list)
    layers: list[LayerRecord] = Field(default_factory=list)


def planned_run(settings: dict[str, Any], seed: int, cell: str, results_version: int) -> RunRecord:
    """The record of a run that has not happened yet; ``settings`` is ``Settings.model_dump(mode="json")``."""
    return RunRecord(
        results_version=results_version,
        status="failed",
        reason="the run did not end",
        cell=cell,
        dataset=settings["dataset"]["name"],
        model=settings["model"]["name"],
        method=settings["method"]["name"],
        seed=seed,
        epochs_planned=settings["epochs"],
        settings=settings,
    )


class StartTrace(_Record):
    """What every decision of a run rests on beside its signals."""

    rules: Annotated[dict[str, Any], AfterValidator(_of_this_version)]
    """``MethodSettings`` in force, as JSON has them: those of the run's record, with B within the training samples."""
    executes: dict[str, str]
    """The dtype that the device runs for each that may be requested."""
    samples: int
    """How many are trained on."""


class DecisionTrace(_Record):
    """What one control step saw and decided. Lists follow ``Trace.layers``."""

    step: int
    """The last one that the signals are of."""
    in_force_after: int | None = None
    """Steps done when it came into force, which may be one more; None: recorded before this was."""
    epoch: int
    variance: list[Signal | None] | None
    lambda_max: list[Signal | None] | None
    memory_bytes: Bytes | None
    budget_bytes: Bytes | None
    free_bytes: int | None
    batch_before: int
    batch_after: int
    batch_reason: str
    requested: list[str]
    executed: list[str]
    promoted: list[bool]
    rate_scale: list[float]
    plan_changed: bool
    capture_share: Signal | None = None
    """Share of training time spent on capturing, with one more plan; None where nothing is captured."""
    rate_share: Signal | None = None
    """eta_0(t) over its peak, 1 during warm-up; None: recorded before this was."""


class BackOffTrace(_Record):
    """Memory ran out in a step of ``tried`` samples, which was made again with a smaller B."""

    in_force_after: int
    """Steps done before that one."""
    tried: int
    batch_before: int
    batch_after: int


class ProbeTrace(_Record):
    """One curvature probe: the layers refreshed, their spectra, and what it cost."""

    step: int
    seconds: float
    peak_bytes: Bytes | None
    layers: list[str]
    eigenvalues: list[list[float]]
    iterations: list[int]
    converged: list[bool]


class Trace(_Record):
    layers: list[str]
    start: Annotated[StartTrace, _without("momentum_steps")] | None = None
    """None: recorded before this was, or nothing was decided, since the run followed a recorded schedule."""
    decisions: list[Annotated[DecisionTrace, _without("gradient_square", "momentum_square", "noise_scale")]] = Field(
        default_factory=list
    )
    back_offs: list[BackOffTrace] = Field(default_factory=list)
    probes: list[ProbeTrace] = Field(default_factory=list)

    def events(self) -> list[DecisionTrace | BackOffTrace]:
        """Decisions and back-offs in the order in which they came into force, of a trace that tells when they did."""
        # Between two steps the decision comes first; memory runs out in the attempt at the next one.
        return sorted(
            [*self.decisions, *self.back_offs], key=lambda event: (event.in_force_after, type(event) is BackOffTrace)
        )


def write_run(folder: Path, run: RunRecord, trace: Trace | None = None) -> Path:
    """Write the trace, then ``run.json``; a reader that finds ``run.json`` finds a whole run.

    Raises:
        OSError: not both could be written; those of before are then as they were.
    """
    folder.mkdir(parents=True, exist_ok=True)
    contents = {folder / RUN_FILE: (run.model_dump_json(indent=1) + "\n").encode()}
    if trace is not None:
        packed = gzip.compress(trace.model_dump_json().encode(), mtime=0)
        contents = {folder / TRACE_FILE: packed, **contents}
    write_together(contents)
    if trace is None:
        (folder / TRACE_FILE).unlink(missing_ok=True)
    return folder / RUN_FILE


def read_run(path: Path) -> RunRecord:
    """Read one ``run.json``.

    Raises:
        RecordError: the file is missing, cut off, or not a record of this version's shape.
    """
    return _read(path, lambda: RunRecord.model_validate_json(path.read_bytes()))


def read_trace(path: Path) -> Trace:
    """Read the trace beside a ``run.json``. Raises ``RecordError`` as ``read_run`` does."""
    return _read(path, lambda: Trace.model_validate_json(gzip.decompress(path.read_bytes())))


def _read(path: Path, load):
    try:
        return load()
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the whole file"
        raise RecordError(f"{path}: not a record ({where}: {first['msg']})") from None
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise RecordError(f"{path}: cannot be read ({error})") from None


def finite(value: float | None) -> float | None:
    """``None`` for a figure that is missing or not finite, so that it can stand in a record."""
    return None if value is None or value != value or value in (float("inf"), float("-inf")) else float(value)
