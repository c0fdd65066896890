"""The moment by which a command has to be over (``runner.max_minutes``), and when to stop for that."""

from __future__ import annotations

import math
import platform
import time
from pathlib import Path

SECONDS_TO_FINISH = 20.0
"""For a child to end and for the summary, beside what the stretch under way and the checkpoint take."""

_began = time.monotonic()


def begin(at: tuple[str, float] | None = None) -> None:
    """A command begins: its time counts from now.

    Args:
        at: what ``begun`` told where the command began, for a process that works for it. On another machine it means
            nothing, and the time counts from the start of the process.
    """
    global _began
    if at is None:
        _began = time.monotonic()
    elif at[0] == _clock():
        _began = at[1]


def begun() -> tuple[str, float]:
    """Whose clock, and when by it the command began."""
    return _clock(), _began


def _clock() -> str:
    """Processes of one machine have it in common until that is started again."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


class Deadline:
    """``minutes`` after the command began; ``None``: never."""

    def __init__(self, minutes: float | None) -> None:
        self.minutes = minutes
        self._seconds = math.inf if minutes is None else minutes * 60

    @property
    def left(self) -> float:
        """Seconds until then."""
        return _began + self._seconds - time.monotonic()

    def room(self, silence: float = 0.0) -> float:
        """Seconds before it at which to stop.

        Args:
            silence: the longest time in which a run could not be interrupted, the writing of a checkpoint included:
                it may be at the beginning of such a stretch, and then has a checkpoint to write.
        """
        return min(SECONDS_TO_FINISH + 2 * silence, self._seconds / 2)

    def near(self, silence: float = 0.0) -> bool:
        """Whether to stop, or not to begin, now."""
        return self.left <= self.room(silence)
