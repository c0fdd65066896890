"""A run's scalars for TensorBoard, beside its record: what the record and the trace hold, written as it comes.

Files of scalars are made of record and trace alone. A process that goes on from a checkpoint puts new ones in the place
of those of the process before, which may have come further than the checkpoint: no epoch is ever written twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from triaccel_bench.records import DecisionTrace, EpochRecord, RunRecord, Trace
from triaccel_bench.settings import SettingsError

FOLDER = "tensorboard"
"""Beside ``run.json``."""

_FLUSH_SECONDS = 30
_GB = 1e9

Scalars = Iterator[tuple[str, float | None]]
Emit = Callable[[str, dict[str, Any]], None]


def writer_class() -> type:
    """TensorBoard's ``SummaryWriter``.

    Raises:
        SettingsError: it is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise SettingsError(
            f"tracker=tensorboard: expected the package tensorboard, got none that can be imported ({error}); "
            "pip install -e '.[tensorboard]', or use tracker=none"
        ) from None
    return SummaryWriter


@contextmanager
def followed(kind: Literal["none", "tensorboard"], folder: Path, run: RunRecord, trace: Trace, emit: Emit) -> Iterator:
    """Stands around a run's training, and yields what is to take the place of ``emit`` meanwhile.

    Whenever something is emitted, what ``run`` and ``trace`` have got since is written. A fault ends that, and not the
    run. Scalars of an earlier process in ``folder`` go in any case: they are of another run, or are written again.

    Raises:
        SettingsError: TensorBoard is not installed.
    """
    make = writer_class() if kind == "tensorboard" else None
    board: TensorBoard | None = None

    def attempt(action: Callable[[], Any]) -> Any:
        nonlocal board
        try:
            return action()
        except Exception as error:  # where TensorFlow is installed, its file system raises errors of its own
            board = None
            text = f"tracker={kind}: expected {folder / FOLDER} to take scalars, got {error}; the run goes on without"
            run.warnings.append(text)
            emit("note", {"text": text})

    def told(what: str, payload: dict[str, Any]) -> None:
        emit(what, payload)
        if board is not None:
            attempt(lambda: board.follow(run, trace))

    attempt(lambda: _remove_scalars(folder))
    if make is not None:
        board = attempt(lambda: TensorBoard(make, folder))
    if board is not None:
        attempt(lambda: board.follow(run, trace))
    try:
        yield told
    finally:
        if board is not None:
            attempt(board.close)


def _remove_scalars(folder: Path) -> None:
    for old in (folder / FOLDER).glob("events.out.tfevents.*"):
        old.unlink()


class TensorBoard:
    """Writes one run's scalars. Raises what its writer does where the disk takes none."""

    def __init__(self, make: type, folder: Path) -> None:
        self._writer = make(str(folder / FOLDER), flush_secs=_FLUSH_SECONDS)
        self._epochs = self._decisions = 0

    def follow(self, run: RunRecord, trace: Trace) -> None:
        """Write what both hold since the last call."""
        for decision in trace.decisions[self._decisions :]:
            self._write(decision_scalars(decision), decision.step)
        new = run.epochs[self._epochs :]
        for record in new:
            self._write(epoch_scalars(record), record.epoch)
        self._decisions, self._epochs = len(trace.decisions), len(run.epochs)
        if new:
            self._writer.flush()

    def _write(self, scalars: Scalars, step: int) -> None:
        for tag, value in scalars:
            if value is not None:
                self._writer.add_scalar(tag, value, step)

    def close(self) -> None:
        self._writer.close()


def epoch_scalars(record: EpochRecord) -> Scalars:
    """By tag, over epochs; None for what was not measured."""
    yield "loss/train", record.train_loss
    yield "loss/evaluation", record.evaluation_loss
    yield "accuracy (%)/train", record.train_accuracy_percent
    yield "accuracy (%)/evaluation", record.evaluation_accuracy_percent
    for part in ("train", "evaluation", "controller", "probe", "capture"):
        yield f"seconds/{part}", getattr(record, f"{part}_seconds")
    for kind in ("memory_peak", "probe_peak", "reserved", "process"):
        yield f"memory (GB)/{kind}", _gb(getattr(record, f"{kind}_bytes"))
    for figure in ("mean", "min", "max"):
        yield f"batch/{figure}", getattr(record, f"batch_{figure}")
    yield "rates/learning rate", record.learning_rate_last
    yield "rates/scale, least", record.rate_scale_min
    yield "rates/scale, mean", record.rate_scale_mean
    yield "steps skipped", record.steps_skipped
    yield "loss scale", record.loss_scale_last
    yield "lambda/largest", record.lambda_max
    yield from _layers("layers", record.layers_executed)


def decision_scalars(decision: DecisionTrace) -> Scalars:
    """By tag, over steps; None for what was not measured."""
    yield "control/batch", decision.batch_after
    yield "control/memory (GB)", _gb(decision.memory_bytes)
    yield "control/rate scale, least", min(decision.rate_scale, default=None)
    yield "control/rate, of its peak", decision.rate_share
    yield "control/plan changed", float(decision.plan_changed)
    yield "control/layers promoted", sum(decision.promoted)
    yield from _layers("control/layers", Counter(decision.executed))


def _layers(tag: str, by_dtype: dict[str, Any]) -> Scalars:
    # All dtypes: a curve that ends is not one at zero.
    for dtype in ("fp16", "bf16", "fp32"):
        yield f"{tag}/{dtype}", by_dtype.get(dtype, 0)


def _gb(count: int | None) -> float | None:
    return None if count is None else count / _GB
