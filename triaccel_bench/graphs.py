"""Capture of a callable into a CUDA graph, and its replay. Knows nothing of training.

A captured callable must be repeatable: it reads and writes tensors that stay where they are,
allocates through torch only, and waits for nothing. On a CPU there is nothing to capture;
whoever may run on either asks first and calls the function itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


class CaptureError(RuntimeError):
    """A callable that could not be captured; the message holds the first error, on one line."""


class Graph:
    """One captured call of ``function``.

    ``function`` first runs ``warmup`` times on a side stream, so that lazy initialisation and
    library workspaces are not captured, then once under capture. Whatever memory the captured
    call allocated belongs to the graph's pool, its results included: ``outputs`` is what that
    call returned, and each ``replay`` writes it anew.

    Args:
        function: takes no argument; kept until ``release``, since the graph reads its inputs.
        pool: the ``pool`` of an unreleased graph, to share memory with it; then never replay
            one of them while a result of the other is still to be read. ``None``: a private pool.
        warmup: calls before the capture; 0 only if the same kernels have run before.

    Raises:
        CaptureError: no CUDA device, or the call cannot be captured.
        torch.OutOfMemoryError: the device's memory did not suffice; smaller inputs may fit.
        Exception: whatever ``function`` raises during the warm-up, unchanged.
    """

    def __init__(self, function: Callable[[], Any], pool: Any = None, warmup: int = 1) -> None:
        if not torch.cuda.is_available():
            raise CaptureError("expected a CUDA device to capture on, got none; call the function itself")
        self.outputs: Any = None
        self._function: Callable[[], Any] | None = function
        self._graph: torch.cuda.CUDAGraph | None = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream()
        side = _side_stream(torch.cuda.current_device())
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(warmup):
                function()
        current.wait_stream(side)
        failure = self._capture(pool, side)
        # Raised outside any handler: a chained traceback would keep the call's tensors alive.
        if failure is not None:
            self.release()
            _end_capture_mode(side)
            raise failure

    def _capture(self, pool: Any, side: torch.cuda.Stream) -> Exception | None:
        current = torch.cuda.current_stream()
        failure: Exception | None = None
        try:
            with torch.cuda.graph(self._graph, pool=pool, stream=side):
                try:
                    self.outputs = self._function()
                except Exception as error:
                    failure = _described(error)
        except Exception as error:
            # Closing an invalidated capture fails too, and says less than the error that invalidated it.
            failure = failure or _described(error)
        finally:
            # torch leaves the side stream current when closing the capture fails.
            torch.cuda.set_stream(current)
        return failure

    @property
    def pool(self) -> Any:
        """The handle of the graph's memory pool, for captures that share it."""
        return self._captured().pool()

    def replay(self) -> Any:
        """Launch the captured work on the current stream, without waiting; returns ``outputs``."""
        self._captured().replay()
        return self.outputs

    def release(self) -> None:
        """Give up the graph, its outputs and its share of the pool. May be called twice.

        The bytes count as free at once; they stay reserved until ``torch.cuda.empty_cache()``.
        """
        if self._graph is not None:
            self._graph.reset()
        self._graph = self._function = self.outputs = None

    def _captured(self) -> torch.cuda.CUDAGraph:
        if self._graph is None:
            raise RuntimeError("expected a captured graph, got a released one; capture the function again")
        return self._graph


@functools.cache
def _side_stream(device: int) -> torch.cuda.Stream:
    # One for all captures: torch keeps a cuBLAS workspace for every stream that ever multiplied.
    return torch.cuda.Stream(device)


def _described(error: Exception) -> Exception:
    """A copy of ``error`` without its traceback, whose frames hold the tensors of the failed call."""
    line = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, torch.OutOfMemoryError):
        return torch.OutOfMemoryError(str(error))
    return CaptureError(f"{type(error).__name__}: {line}")


def _end_capture_mode(side: torch.cuda.Stream) -> None:
    """After an invalidated capture torch's generator refuses to draw; a capture that ends well frees it."""
    cell = torch.zeros(1, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=side):
        cell.zero_()
