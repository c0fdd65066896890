"""Memory that runs out is an event of a run: it is told, all is as before, and what failed can be tried smaller."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from triaccel_bench.engine import Engine
from triaccel_bench.records import RunRecord
from triaccel_bench.resumption import checked, section
from triaccel_bench.shortage import DOUBTFUL, cause_of, error_of

Result = TypeVar("Result")


def tolerated(call: Callable[[], Result]) -> Result | None:
    """``call()``, or ``None`` where memory did not suffice; what it does not keep is free again either way."""
    result = None
    try:
        result = call()
    except Exception as error:
        if cause_of(error) is None:
            raise
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return result


class Recovery:
    """Attempts at what may not fit, each followed by ``Engine.recover`` where it did not.

    Args:
        run: ``retries`` counts causes, ``warnings`` get a sentence each.
        release: gives up what others keep in the engine's pool.
        emit: gets that sentence as a note.
    """

    def __init__(
        self,
        run: RunRecord,
        engine: Engine,
        release: Callable[[], None],
        emit: Callable[[str, dict[str, Any]], None],
    ) -> None:
        self._run, self._engine, self._release, self._emit = run, engine, release, emit
        self._doubtful: set[str] = set()

    def state_dict(self) -> dict[str, Any]:
        return {"doubtful": sorted(self._doubtful)}

    def load_state_dict(self, saved: object) -> None:
        """Go on from there. Raises ``CheckpointError`` where that is none."""
        self._doubtful = set(checked(list[str], section(saved, "doubtful"), "doubtful attempts"))

    def attempt(self, kind: str, what: str, call: Callable[[], Result]) -> tuple[Result | None, str | None]:
        """``(call(), None)``, or ``(None, the error's words)`` if memory ran out; any other error is raised.

        Where graphs held memory, it is tried once more without them. What is said to be unsupported may be for want
        of memory: it is raised where the next attempt of that ``kind`` says so too, which is a smaller one.
        """
        again_in_doubt = kind in self._doubtful
        self._doubtful.discard(kind)
        while True:
            try:
                return call(), None
            except Exception as error:
                cause = cause_of(error)
                if cause is None or (cause == DOUBTFUL and again_in_doubt):
                    raise
                if cause == DOUBTFUL:
                    self._doubtful.add(kind)
                said = (str(error).splitlines() or [type(error).__name__])[0]
            self._run.retries[cause] = self._run.retries.get(cause, 0) + 1
            text = f"memory ran out in {what} ({cause}): {said}"
            self._run.warnings.append(text)
            self._emit("note", {"text": text})
            # Outside of the handler, whose error holds the frames of what failed, and with them its tensors.
            self._release()
            if not self._engine.recover():
                return None, said

    def must(self, what: str, call: Callable[[], Result]) -> Result:
        """``call()``, which has no smaller form.

        Raises:
            torch.OutOfMemoryError: it does not fit without the graphs either.
        """
        result, said = self.attempt(what, what, call)
        if said is not None:
            raise error_of(said)
        return result

    def in_halves(self, what: str, size: int, call: Callable[[int], Result]) -> tuple[Result, int]:
        """``call(size)``, or of the half as often as it takes, and that size.

        Raises:
            torch.OutOfMemoryError: not even one fits.
        """
        while True:
            result, said = self.attempt(what, f"{what} of {size}", lambda size=size: call(size))
            if said is None:
                return result, size
            if size == 1:
                raise error_of(said)
            size = max(1, size // 2)
