"""The moment by which a command has to be over (``runner.max_minutes``), and when to stop for that."""

from __future__ import annotations

import math
import time

SECONDS_TO_FINISH = 20.0
"""For a child to end and for the summary, beside what the stretch under way and the checkpoint take."""

_began = time.monotonic()


def begin() -> None:
    """A command begins: its time counts from now. In a process that somebody else's launcher made, from its start."""
    global _began
    _began = time.monotonic()


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
