"""Capture of a callable into a CUDA graph, and its replay. Knows nothing of training.

A captured callable must be repeatable: it reads and writes tensors that stay where they are,
allocates through torch only, and waits for nothing. On a CPU there is nothing to capture;
whoever may run on either asks first and calls the function itself.

A replay makes no allocator calls, so the allocator's own peak counter does not see it. Each graph
therefore knows what its call needed at its peak, and ``peak_allocated`` is the counter to read: a
capture, which has to reset the allocator's, does not disturb it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from triaccel_bench.shortage import cause_of, error_of


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

    Attributes:
        peak_bytes: what the captured call had allocated at its peak, beyond what was allocated before it.
            That much is in use during every replay.

    Raises:
        CaptureError: no CUDA device, or the call cannot be captured.
        torch.OutOfMemoryError: the device's memory did not suffice; smaller inputs may fit.
        Exception: whatever ``function`` raises during the warm-up, unchanged.
    """

    def __init__(self, function: Callable[[], Any], pool: Any = None, warmup: int = 1) -> None:
        if not torch.cuda.is_available():
            raise CaptureError("expected a CUDA device to capture on, got none; call the function itself")
        self.outputs: Any = None
        self.peak_bytes = 0
        self._function: Callable[[], Any] | None = function
        self._graph: torch.cuda.CUDAGraph | None = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream()
        side = stream(torch.device("cuda", torch.cuda.current_device()))
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(warmup):
                function()
        current.wait_stream(side)
        # One of our own, where none is given, to know its name if the capture is invalidated.
        pool = torch.cuda.graph_pool_handle() if pool is None else pool
        failure = self._capture(pool, side)
        # Raised outside any handler: a chained traceback would keep the call's tensors alive.
        if failure is not None:
            if _end_recording(pool):
                _spoilt[pool] = self._graph
            self.release()
            _end_capture_mode(side)
            raise failure
        _alive.add(self)

    def _capture(self, pool: Any, side: torch.cuda.Stream) -> Exception | None:
        current = torch.cuda.current_stream()
        device = torch.cuda.current_device()
        failure: Exception | None = None
        try:
            with torch.cuda.graph(self._graph, pool=pool, stream=side):
                try:
                    begin_interval(torch.device("cuda", device))
                    before = torch.cuda.memory_allocated(device)
                    self.outputs = self._function()
                    self.peak_bytes = torch.cuda.max_memory_allocated(device) - before
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
        _alive.discard(self)
        self._graph = self._function = self.outputs = None

    def _captured(self) -> torch.cuda.CUDAGraph:
        if self._graph is None:
            raise RuntimeError("expected a captured graph, got a released one; capture the function again")
        return self._graph


class Pool:
    """Memory that graphs share: what a released one held serves the next, and all need no more than the largest.

    Raises:
        CaptureError: as ``Graph`` does.
    """

    def __init__(self) -> None:
        # torch gives a pool up with its last graph; this one stays and needs no memory itself.
        self._cell = torch.zeros(1, device="cuda") if torch.cuda.is_available() else None
        self._anchor = Graph(self._touch, warmup=0)

    def _touch(self) -> None:
        self._cell.zero_()

    @property
    def handle(self) -> Any:
        """What ``Graph`` takes as ``pool``; another one once a capture in it was invalidated."""
        if self._anchor.pool in _spoilt:
            # What lies in the old one stays there until its graphs are released.
            self._anchor.release()
            self._anchor = Graph(self._touch, warmup=0)
        return self._anchor.pool

    def release(self) -> None:
        """Give up the pool, once all of its graphs are released."""
        self._anchor.release()


class Replayed:
    """``function(*tensors)``, captured at its first call that is lent a pool and replayed from then on.

    Without a pool, or where it cannot be captured, it is called. What it returns after a replay is
    overwritten by the next one, and by whatever else replays in that pool. Nothing but the graph
    and a copy of its inputs outlives a call. Whatever else the function reads must stay where it
    lies; a pool that its owner has released is kept until the next call or ``release``.

    Args:
        around: a context to call or capture it in; a replay needs none.

    Attributes:
        eager_reason: why it could not be captured; ``None`` while it can.
        peak_bytes: ``Graph.peak_bytes`` of the last call, 0 if it was no replay.
    """

    def __init__(
        self, function: Callable[..., Any], around: Callable[[], AbstractContextManager] = nullcontext
    ) -> None:
        self._around = around
        self.eager_reason: str | None = None
        self.peak_bytes = 0
        self._function = function
        self._graph: Graph | None = None
        self._key: tuple | None = None
        self._slots: tuple[torch.Tensor, ...] = ()

    def __call__(self, *inputs: torch.Tensor, pool: Any = None) -> Any:
        if pool is not None and self.eager_reason is None:
            key = pool, *((value.shape, value.dtype, value.device) for value in inputs)
            if key != self._key:
                self.release()
                self._capture(key, inputs)
        else:
            self.release()
        if self._graph is None:
            self.peak_bytes = 0
            with self._around():
                return self._function(*inputs)
        for slot, value in zip(self._slots, inputs, strict=True):
            slot.copy_(value)
        self.peak_bytes = self._graph.peak_bytes
        return self._graph.replay()

    def _capture(self, key: tuple, inputs: tuple[torch.Tensor, ...]) -> None:
        slots = tuple(value.clone() for value in inputs)
        try:
            with self._around():
                self._graph = Graph(lambda: self._function(*slots), pool=key[0])
            self._key, self._slots = key, slots
        except CaptureError as error:
            self.eager_reason = str(error)

    def release(self) -> None:
        """Give up the graph and its inputs."""
        if self._graph is not None:
            # A replay may still be under way.
            torch.cuda.synchronize(self._slots[0].device)
            self._graph.release()
        self._graph, self._key, self._slots = None, None, ()


def clear_workspaces(device: torch.device) -> None:
    """Free the cuBLAS workspaces (up to 64 MiB) that captures got on their stream, unless all else runs on it too."""
    if device.type == "cuda" and torch.cuda.current_stream(device) != stream(device):
        torch._C._cuda_clearCublasWorkspaces()


def workspace_bytes(device: torch.device) -> int | None:
    """What this process's cuBLAS workspaces take, which are freed to be counted; ``None``: not to be known.

    That is while any graph is not released: its replays would write where its workspace was.
    """
    if device.type != "cuda" or _alive:
        return None
    torch.cuda.synchronize(device)
    before, _ = counted(device)
    torch._C._cuda_clearCublasWorkspaces()
    return before - counted(device)[0]


_alive: weakref.WeakSet[Graph] = weakref.WeakSet()
"""Graphs that may still be replayed."""


def stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which every capture on ``device`` runs.

    torch keeps a cuBLAS workspace for every stream that ever multiplied: a program that also runs
    its uncaptured work on this stream has one of them less.
    """
    return _stream(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


_earlier_peaks: dict[int, int] = {}
"""By device: the largest count of allocated bytes since ``reset_peak`` that torch's counter has since forgotten."""


def allocated(device: torch.device) -> tuple[int, int]:
    """Bytes that tensors on ``device`` take now, and at most since ``reset_peak``: captures included, replays not."""
    now, peak = counted(device)
    return now, max(peak, _earlier_peaks.get(device.index or 0, 0))


def counted(device: torch.device) -> tuple[int, int]:
    """As ``allocated``, but at most since ``begin_interval``, if that was later than ``reset_peak``."""
    # One question for both: torch's flat statistics take it ten times as long.
    found = torch.cuda.memory_stats_as_nested_dict(device).get("allocated_bytes", {}).get("all", {})
    return found.get("current", 0), found.get("peak", 0)


def peak_allocated(device: torch.device) -> int:
    """The second of ``allocated``."""
    return allocated(device)[1]


def reset_peak(device: torch.device) -> None:
    """Forget the peak of ``device``."""
    _earlier_peaks.pop(device.index or 0, None)
    torch.cuda.reset_peak_memory_stats(device)


def begin_interval(device: torch.device) -> None:
    """Let ``counted`` forget the peak of ``device``, and ``allocated`` remember it."""
    _earlier_peaks[device.index or 0] = peak_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)


def _described(error: Exception) -> Exception:
    """A copy of ``error`` without its traceback, whose frames hold the tensors of the failed call."""
    line = (str(error).strip().splitlines() or [""])[0]
    if cause_of(error) is not None:
        return error_of(str(error))
    return CaptureError(f"{type(error).__name__}: {line}")


_spoilt: dict[Any, torch.cuda.CUDAGraph] = {}
"""Pools in which a capture was invalidated, and the graph that it was to be.

torch's allocator of pinned memory takes such a pool to be recorded into for good (2.11), so that no
further capture may begin in it; and it asks the graph of whichever capture is under way.
"""


def _end_recording(pool: Any) -> bool:
    """End what torch leaves begun after an invalidated capture, which is recording into the pool; False: it was not."""
    device = torch.cuda.current_device()
    # Named otherwise before torch 2.8.
    end = getattr(torch._C, "_cuda_endAllocateToPool", None) or torch._C._cuda_endAllocateCurrentStreamToPool
    try:
        end(device, pool)
    except RuntimeError:
        # Closed already: then the capture had not begun, or had ended.
        return False
    torch._C._cuda_releasePool(device, pool)
    return True


def _end_capture_mode(side: torch.cuda.Stream) -> None:
    """After an invalidated capture torch's generator refuses to draw; a capture that ends well frees it."""
    cell = torch.zeros(1, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=side):
        cell.zero_()
