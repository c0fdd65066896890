"""Signs of life: whoever gets something done says so, and a process that is watched tells, once a second at most.

Silence is what tells a hang from slow work: a step, a batch of an evaluation, a product with curvature or a part
of a download ends every few seconds on any machine, however long an epoch takes. Where nobody watches it is a no-op.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY_SECONDS = 1.0

_due = math.inf
_pass_on: Callable[[], None] | None = None


def sign() -> None:
    """Something got done. In the main thread alone: what passes it on need not bear two at once."""
    global _due
    if time.monotonic() >= _due:
        _due = time.monotonic() + EVERY_SECONDS
        _pass_on()


@contextmanager
def watched(pass_on: Callable[[], None]) -> Iterator[None]:
    """Signs go to ``pass_on`` within it."""
    global _due, _pass_on
    _due, _pass_on = time.monotonic(), pass_on
    try:
        yield
    finally:
        _due, _pass_on = math.inf, None
