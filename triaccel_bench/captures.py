"""Calls that are captured in a CUDA graph once for each shape of their inputs, and replayed from then on.

A call's first time is a real one that runs eagerly and warms up whatever the capture must not
meet for the first time. All graphs share one memory pool. Knows nothing of training.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from triaccel_bench.graphs import CaptureError, Graph, Pool, allocated
from triaccel_bench.resumption import checked, section

COUNTED = "step"
"""The kind of call whose captures are counted, timed and bounded in number."""
SIZES_A_PLAN = 2
"""Batch sizes that a new plan has to capture: B, and what is left at an epoch's end."""


@dataclass(frozen=True)
class _Captured:
    """A captured function and the tensors that its replay reads."""

    graph: Graph
    slots: tuple[Tensor, ...]


class CapturedCalls:
    """A small cache of captured calls under one state of affairs, which ``forget`` ends.

    Args:
        eager: why calls shall run eagerly; ``None`` captures them where there is a CUDA device.
        cached: captured steps that are kept, the most recently used ones; calls of another kind are not counted.
        tight: whether reserved memory is capped: an eager call then finds the graphs' memory free.
        after_capture: called after a capture, well or badly ended: what it left in the graph's memory is nobody's.

    Attributes:
        eager_reason: why calls run eagerly; ``None`` while they are captured.
        count: steps captured so far.
        seconds: what captures of steps and the eager steps that warmed them up took.
        recapture_seconds: the part of it for shapes that had been captured before, in another state of affairs.
        replayed_bytes: the largest ``Graph.peak_bytes`` replayed since it was last set to 0.
        capture_peak_bytes: all that was allocated at the peak of a captured step's capture, of the largest;
            ``None`` before the first.
    """

    def __init__(
        self,
        device: torch.device,
        eager: str | None,
        cached: int,
        tight: bool,
        after_capture: Callable[[], None],
    ) -> None:
        self.eager_reason = eager if device.type == "cuda" else f"no CUDA graphs on a {device.type} device"
        self.count = 0
        self.seconds = self.recapture_seconds = 0.0
        self.replayed_bytes = 0
        self.capture_peak_bytes: int | None = None
        self._device, self._cached, self._tight, self._after_capture = device, cached, tight, after_capture
        self._captured_before: set[tuple] = set()
        self._tries_cold = True
        self._pool: Pool | None = None
        self._calls: OrderedDict[tuple, _Captured] = OrderedDict()
        self._warm: set[tuple] = set()

    def __len__(self) -> int:
        return len(self._calls)

    def run(self, kind: str, function: Callable[..., None], *inputs: Tensor) -> str:
        """Do ``function(*inputs)``; but for a capture, nothing in it waits for the device.

        Returns how: "replayed", "warmed" or "captured" on the way there, or "eager".
        """
        outcome, seconds, key = self._run(kind, function, *inputs)
        if outcome != "replayed" and kind == COUNTED:
            self.count += outcome == "captured"
            self.seconds += seconds
            self.recapture_seconds += seconds if key in self._captured_before else 0.0
            if outcome == "captured":
                self._captured_before.add(key)
                # Nothing of it is allocated any more, so that now is as before.
                peak = allocated(self._device)[0] + self._calls[key].graph.peak_bytes
                self.capture_peak_bytes = max(peak, self.capture_peak_bytes or 0)
        return outcome

    def state_dict(self) -> dict[str, Any]:
        """What captures have cost so far; a new process makes its own."""
        names = "count", "seconds", "recapture_seconds", "capture_peak_bytes"
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, saved: object) -> None:
        """Go on counting from there. Raises ``CheckpointError`` where that is none."""
        self.count = checked(int, section(saved, "count"), "count of captures")
        self.seconds = checked(float, section(saved, "seconds"), "seconds of captures")
        self.recapture_seconds = checked(float, section(saved, "recapture_seconds"), "seconds of captures")
        self.capture_peak_bytes = checked(int | None, section(saved, "capture_peak_bytes"), "peak of captures")

    def forget(self) -> None:
        """Give the captured calls up; the pool stays."""
        self._release()
        self._warm.clear()

    def give_up(self) -> bool:
        """Give all of it up, the memory too. Returns whether there was any."""
        held = self._pool is not None
        self._give_memory_back()
        self._warm.clear()
        return held

    def lend_pool(self) -> Any:
        """The pool, whose memory nobody needs between two calls; ``None`` if it may go, or nothing is captured."""
        if self._tight or self.eager_reason is not None:
            return None
        try:
            with torch.cuda.device(self._device):
                self._pool = self._pool or Pool()
                return self._pool.handle
        except CaptureError:
            return None

    @property
    def pool_bytes(self) -> int:
        """What captured calls keep from everybody else, to need it at their replay."""
        return max((captured.graph.peak_bytes for captured in self._calls.values()), default=0)

    def share(self, training_seconds: float) -> float | None:
        """Share of that time that capturing again would have taken after one more change of plan."""
        if self.eager_reason is not None or self.count == 0 or training_seconds <= 0:
            return None
        one_more = SIZES_A_PLAN * self.seconds / self.count
        return (self.recapture_seconds + one_more) / training_seconds

    def _run(self, kind: str, function: Callable[..., None], *inputs: Tensor) -> tuple[str, float, tuple]:
        """Says how, what of its time on the host capturing cost, and for which shapes."""
        key = kind, *(tensor.shape for tensor in inputs)
        if self.eager_reason is not None:
            function(*inputs)
            return "eager", 0.0, key
        outcome, seconds = "replayed", 0.0
        if key not in self._calls:
            started = time.perf_counter()
            if key not in self._warm and not self._captures_cold(key):
                self._warm.add(key)
                if self._tight:
                    self._give_memory_back()
                function(*inputs)
                return "warmed", time.perf_counter() - started, key
            # Calls that the device has yet to finish are no part of the price.
            torch.cuda.synchronize()
            started = time.perf_counter()
            captured = self._capture(function, inputs, key in self._warm)
            if captured is None:
                lost = time.perf_counter() - started
                outcome, seconds, key = self._run(kind, function, *inputs)
                return outcome, lost + seconds, key
            self._calls[key] = captured
            steps = [held for held in self._calls if held[0] == COUNTED]
            for oldest in steps[: max(0, len(steps) - self._cached)]:
                self._calls.pop(oldest).graph.release()
            outcome, seconds = "captured", time.perf_counter() - started
        captured = self._calls[key]
        self._calls.move_to_end(key)
        for slot, value in zip(captured.slots, inputs, strict=True):
            slot.copy_(value)
        captured.graph.replay()
        self.replayed_bytes = max(self.replayed_bytes, captured.graph.peak_bytes)
        return outcome, seconds, key

    def _captures_cold(self, key: tuple) -> bool:
        """Whether shapes that were captured before are tried without an eager call first, which costs as much.

        Not where cuDNN times its algorithms, which it cannot do under capture, and not under a cap on reserved
        memory, where the graphs' memory is given back in between.
        """
        tries = self._tries_cold and not self._tight and not torch.backends.cudnn.benchmark
        return tries and key in self._captured_before

    def _capture(self, function: Callable[..., None], inputs: tuple[Tensor, ...], warmed: bool) -> _Captured | None:
        """The function captured; if it cannot be, this is final where it has been ``warmed`` since ``forget``."""
        slots = tuple(torch.empty_like(value) for value in inputs)
        try:
            with torch.cuda.device(self._device):
                self._pool = self._pool or Pool()
                graph = Graph(lambda: function(*slots), pool=self._pool.handle, warmup=0)
        except CaptureError as error:
            self._give_memory_back()
            if warmed:
                self.eager_reason = f"a step cannot be captured: {error}"
            else:
                # Something still had to be loaded; an eager call does that.
                self._tries_cold = False
            return None
        finally:
            self._after_capture()
        return _Captured(graph, slots)

    def _give_memory_back(self) -> None:
        self._release()
        if self._pool is not None:
            self._pool.release()
            self._pool = None
            torch.cuda.empty_cache()

    def _release(self) -> None:
        if self._calls:
            # A replay may still be under way.
            torch.cuda.synchronize()
        for captured in self._calls.values():
            captured.graph.release()
        self._calls.clear()
