"""A run's state on disk: one that was killed goes on where it was, and ends as if nothing had happened.

Whoever has state tells it as plain tensors and plain Python values, and takes it back in place; the
trainer collects it, a ``Keeper`` writes it. What is read comes from a file that anybody may have
written: torch unpickles it in its restricted mode, and nothing of it is used unchecked.
"""

from __future__ import annotations

import signal
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from triaccel_bench.files import replacing

FORMAT = "triaccel-bench checkpoint"
VERSION = 1
"""Bumped by hand when the state is told in another way: older files are then foreign."""

MAX_SHARE = 0.05
"""Share of the time since the last checkpoint that writing one may take at an epoch's end; else a later one gets it."""

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

Value = TypeVar("Value")


class CheckpointError(ValueError):
    """A checkpoint that a run cannot go on from; the message says what is wrong with it."""


class Interrupted(BaseException):
    """A signal asked the run to stop; the message says how far it had come. No fault, so no ``Exception``."""


class Stop:
    """Whether a signal has asked this process to stop.

    Attributes:
        asked: the name of the signal; ``None``: none has.
        deferred: whether somebody looks at ``asked`` soon enough. Until then there is nothing to be kept,
            and a signal raises ``Interrupted`` in the midst of whatever is going on.
    """

    def __init__(self) -> None:
        self.asked: str | None = None
        self.deferred = False

    def __call__(self, number: int, frame: object = None) -> None:
        self.asked = signal.Signals(number).name
        if not self.deferred:
            raise Interrupted(f"{self.asked} before the first step of this process")


@contextmanager
def stoppable() -> Iterator[Stop]:
    """SIGTERM, SIGINT and SIGUSR1 go to a ``Stop`` within it; in the main thread alone, where Python hears of them.

    Raises:
        Interrupted: one was waiting already.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    before = {number: signal.signal(number, stop) for number in SIGNALS}
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        yield stop
    finally:
        stop.deferred = True
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class Owner:
    """Whose state a checkpoint holds: the run that may go on from it."""

    cell: str
    seed: int
    results_version: int
    data: str
    """The data set's fingerprint."""


class Keeper:
    """The checkpoint of one run.

    It is written to a temporary file, synced and renamed, between two epochs and while no clock of training runs.
    Its size is that of weights, momentum and buffers: about 90 MB for ResNet-18 (8 bytes a parameter), which takes
    some 0.1 s on a local disk and seconds on a mounted drive. ``MAX_SHARE`` keeps that from adding up where
    epochs are short: a run that is killed loses ``every`` epochs at most, or twenty times what one write takes.

    Args:
        every: epochs between two of them.
        publish: brings the file of that name to where others find it, for a path that is not the place itself.

    Attributes:
        found: the state to go on from; ``None``: from the beginning.
    """

    def __init__(
        self,
        path: Path,
        owner: Owner,
        every: int,
        stop: Stop | None = None,
        now=time.perf_counter,
        publish: Callable[[str], None] = lambda name: None,
    ) -> None:
        self.path, self._owner, self._every, self._now, self._publish = path, owner, every, now, publish
        self.stop = stop or Stop()
        self.found: dict[str, Any] | None = None
        self._last_took = 0.0
        self._since = now()

    def look(self) -> None:
        """Read the checkpoint, if there is one.

        Raises:
            CheckpointError: it is damaged, or another run's.
        """
        self.found = load(self.path, self._owner) if self.path.exists() else None

    def due(self, epoch: int) -> bool:
        """Whether the state is to be written after this epoch."""
        return epoch % self._every == 0 and self._last_took <= MAX_SHARE * (self._now() - self._since)

    def keep(self, state: Mapping[str, Any]) -> tuple[str | None, float]:
        """Write it; returns why that was not possible, and the seconds that it took."""
        begun = self._now()
        try:
            save(self.path, self._owner, state)
            self._publish(self.path.name)
            fault = None
        except (OSError, RuntimeError) as error:
            fault = (str(_first_cause(error)).splitlines() or [type(error).__name__])[0]
        self._since = self._now()
        self._last_took = self._since - begun
        return fault, self._last_took


def _first_cause(error: BaseException) -> BaseException:
    """What the system said of a full disk, say: torch tells of it in words about its archive."""
    first = error
    while not isinstance(first, OSError) and first.__context__ is not None:
        first = first.__context__
    return first if isinstance(first, OSError) else error


def save(path: Path, owner: Owner, state: Mapping[str, Any]) -> None:
    """Write one checkpoint, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        torch.save({"format": FORMAT, "version": VERSION, "owner": asdict(owner), "state": dict(state)}, file)


def load(path: Path, owner: Owner) -> dict[str, Any]:
    """The state in a checkpoint of that run, on the host.

    Raises:
        CheckpointError: the file is damaged, no checkpoint, or one of another run or version.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            # torch reads a file with flipped bits without a word.
            damaged = archive.testzip()
        if damaged is not None:
            raise ValueError(f"{damaged} is not as it was written")
        held = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"it is damaged ({said})") from None
    if not isinstance(held, dict) or held.get("format") != FORMAT:
        raise CheckpointError("it is no checkpoint of triaccel-bench")
    if held.get("version") != VERSION:
        raise CheckpointError(f"it has format version {held.get('version')!r}, not {VERSION}")
    if held.get("owner") != asdict(owner):
        raise CheckpointError(f"it is another run's: expected {asdict(owner)}, got {held.get('owner')!r}")
    return section(held, "state")


def section(tree: object, *names: str) -> Any:
    """What lies in nested dictionaries under these names.

    Raises:
        CheckpointError: one of them is missing.
    """
    for name in names:
        if not isinstance(tree, dict) or name not in tree:
            raise CheckpointError(f"it lacks {'.'.join(names)}")
        tree = tree[name]
    return tree


def checked(kind: type[Value] | Any, value: object, what: str) -> Value:
    """``value`` as this type (a dataclass, a record, a type expression), which ``dataclasses.asdict`` may have taken
    apart.

    Raises:
        CheckpointError: it is none.
    """
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, (what, *first["loc"])))
        raise CheckpointError(f"its {where} is not as expected ({first['msg']})") from None


def on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same values on the host, each in a storage of its own size: a file holds whole storages."""
    moved = [tensor.detach().cpu() for tensor in tensors]
    return [tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor for tensor in moved]


@torch.no_grad()
def restore(targets: Sequence[Tensor], saved: object, what: str) -> None:
    """Copy saved values into tensors, in place.

    Raises:
        CheckpointError: there is not one for each, alike in shape and dtype; then none has changed.
    """
    if not isinstance(saved, (list, tuple)) or len(saved) != len(targets):
        got = len(saved) if isinstance(saved, (list, tuple)) else type(saved).__name__
        raise CheckpointError(f"its {what} is not as expected ({len(targets)} tensors, got {got})")
    for index, (target, value) in enumerate(zip(targets, saved)):
        if not isinstance(value, Tensor) or (value.shape, value.dtype) != (target.shape, target.dtype):
            got = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            expected = f"{target.dtype} {list(target.shape)}"
            raise CheckpointError(f"its {what}.{index} is not as expected ({expected}, got {got})")
    for target, value in zip(targets, saved):
        target.copy_(value)
