"""One GPU for each job at a time: the visible cards by UUID, and locks that the system frees when their holders die.

Runs of one user on one machine agree by locks in one folder. Imports no torch: cards are told by NVML, in the order of
their PCI addresses, which is also nvidia-smi's.
"""

from __future__ import annotations

import fcntl
import os
import random
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

FOLDER = Path(f"/tmp/triaccel-bench-{os.getuid()}")
"""Not TMPDIR and no runtime folder: jobs of a queue and sessions that end have others, and would not meet."""

POLL_SECONDS = 0.5


class Unknown(RuntimeError):
    """Nobody can say which cards there are, or hold them; the message says why."""


class GivenUp(RuntimeError):
    """No card became free in time; the message says what was waited for."""


@dataclass(frozen=True)
class Card:
    """A GPU, or a slice of one, as CUDA_VISIBLE_DEVICES may name it."""

    uuid: str
    name: str


class Lease:
    """A card that is held until ``close``, or until all processes that were given this object have ended."""

    def __init__(self, card: Card, shared: bool, handle: int) -> None:
        self.card, self.shared, self._handle = card, shared, handle

    def enter(self) -> None:
        """Let this process see that card alone, as ``cuda:0``; it must not have asked CUDA for anything yet."""
        os.environ["CUDA_VISIBLE_DEVICES"] = self.card.uuid

    def close(self) -> None:
        os.close(self._handle)

    def __getstate__(self) -> tuple[Card, bool, Any]:
        # A child that outlives its parent by a moment still holds memory of the card.
        return self.card, self.shared, DupFd(self._handle)

    def __setstate__(self, state: tuple[Card, bool, Any]) -> None:
        self.card, self.shared, handle = state
        self._handle = handle.detach()


class Devices(AbstractContextManager):
    """What the runs of one command train on, one leased card at most at a time.

    Args:
        say: hears in one line that a card has to be waited for.
        give_up: whether to wait no longer.

    Attributes:
        fault: why cards could not be leased, if so.
    """

    def __init__(self, say: Callable[[str], None], give_up: Callable[[], bool] = lambda: False) -> None:
        self._say, self._give_up = say, give_up
        self._held: Lease | None = None
        self.fault: str | None = None

    def __exit__(self, *exception: object) -> None:
        self.release()

    def release(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.close()

    def take(self, device: str, shared: bool) -> Lease | None:
        """Hold a card for ``device`` ("cpu", "cuda" or "cuda:N"), and wait for one that is not free.

        "cuda" is any visible card of the same model as the first. With ``shared`` others may hold it as well, who
        asked for that too. What was held before is kept if it will do, and else let go. None: no card is asked
        for, there is no such card, or none can be leased (``fault``).

        Raises:
            GivenUp: none became free before it was time to ``give_up``.
        """
        try:
            wanted = [] if device == "cpu" else candidates(device, visible_cards())
            if self._held is not None and self._held.card in wanted and self._held.shared == shared:
                return self._held
            self.release()
            self._held = self._wait_for(device, wanted, shared) if wanted else None
        except Unknown as error:
            self.fault = str(error)
        return self._held

    def _wait_for(self, device: str, wanted: Sequence[Card], shared: bool) -> Lease:
        cards = "the card is" if len(wanted) == 1 else f"all {len(wanted)} cards are"
        waiting = False
        while (lease := lease_one(wanted, shared)) is None:
            if self._give_up():
                raise GivenUp(f"device={device}: {cards} in use by other runs")
            if not waiting:
                self._say(f"device={device}: {cards} in use by other runs; waiting for one to end")
                waiting = True
            time.sleep(POLL_SECONDS)
        return lease


def candidates(device: str, cards: Sequence[Card]) -> list[Card]:
    """The cards that "cuda" or "cuda:N" may be."""
    if device == "cuda":
        # A cell's seeds belong on one model of card, whichever is free.
        return [card for card in cards if card.name == cards[0].name]
    number = int(device.removeprefix("cuda:"))
    return list(cards[number : number + 1])


def lease_one(cards: Sequence[Card], shared: bool) -> Lease | None:
    """The first of the cards that nobody holds, or for ``shared`` else one that is shared already.

    Raises:
        Unknown: there can be no locks on this machine.
    """
    try:
        folder = _folder()
        for card in cards:
            if (handle := _locked(folder, card, fcntl.LOCK_EX)) is not None:
                if shared:
                    fcntl.flock(handle, fcntl.LOCK_SH)
                return Lease(card, shared, handle)
        for card in random.sample(cards, len(cards)) if shared else ():
            if (handle := _locked(folder, card, fcntl.LOCK_SH)) is not None:
                return Lease(card, shared, handle)
    except OSError as error:
        raise Unknown(f"no locks in {FOLDER} ({error})") from None
    return None


def _folder() -> Path:
    with suppress(FileExistsError):
        FOLDER.mkdir(mode=0o700)
    found = FOLDER.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError("expected a folder of this user's alone")
    return FOLDER


def _locked(folder: Path, card: Card, how: int) -> int | None:
    path = folder / card.uuid.replace("/", "-")
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(handle, how | fcntl.LOCK_NB)
            # What clears folders of old files goes by this time.
            os.utime(handle)
            if _is_still(path, handle):
                return handle
        except BlockingIOError:
            os.close(handle)
            return None
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _is_still(path: Path, handle: int) -> bool:
    """Whether others who open the path meet this file, and not another one that took its place."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(handle))
    except FileNotFoundError:
        return False


def visible_cards() -> list[Card]:
    """The cards that CUDA_VISIBLE_DEVICES leaves, as it numbers them; of a card that is divided, its slices.

    Raises:
        Unknown: NVML cannot be asked.
    """
    try:
        import pynvml
    except ImportError as error:
        raise Unknown(f"pynvml cannot be imported ({error})") from None
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        whole = [_card(pynvml, handle) for handle in handles]
        slices = [_slices(pynvml, handle) for handle in handles]
    except pynvml.NVMLError as error:
        raise Unknown(f"NVML is off ({error})") from None
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return [card for one, parts in zip(whole, slices) for card in (parts if parts is not None else [one])]
    found: list[Card] = []
    for name in (part.strip() for part in named.split(",")):
        card = _called(name, whole, slices)
        if card is None:
            # CUDA too stops at the first name that it does not know.
            break
        if card not in found:
            found.append(card)
    return found


def _card(pynvml: Any, handle: Any) -> Card:
    return Card(pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetName(handle))


def _slices(pynvml: Any, handle: Any) -> list[Card] | None:
    """None for a card that is not divided, or cannot be."""
    try:
        current, _ = pynvml.nvmlDeviceGetMigMode(handle)
    except pynvml.NVMLError:
        return None
    if not current:
        return None
    found = []
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        # Of as many as there could be.
        with suppress(pynvml.NVMLError):
            found.append(_card(pynvml, pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)))
    return found


def _called(name: str, whole: Sequence[Card], slices: Sequence[list[Card] | None]) -> Card | None:
    """What one name of CUDA_VISIBLE_DEVICES means: a number, a UUID, or the beginning of one."""
    if name.startswith("MIG-"):
        return next((card for parts in slices for card in parts or () if card.uuid.startswith(name)), None)
    for number, (card, parts) in enumerate(zip(whole, slices)):
        if name == str(number) or (name.startswith("GPU-") and card.uuid.startswith(name)):
            return card if parts is None else next(iter(parts), None)
    return None
