"""Readings in seconds and bytes: the clock, the CUDA allocator, NVML, and a count of live tensors for any machine.

A memory meter reports the peak of one window, and a run has a meter of its own, so no figure
outlives the run that made it. A figure that cannot be read is None, never 0.
"""

from __future__ import annotations

import os
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from triaccel_bench import checkpointing, graphs
from triaccel_bench.resumption import checked, section


class Card(Protocol):
    """The part of ``hardware.Hardware`` that the meters read."""

    device: torch.device
    nvml: Any | None
    nvml_reason: str | None


class Clock:
    """Wall-clock seconds at which the device has finished all that it was given.

    Kernels run after the call that launched them returns: a clock read without waiting times
    the launches. Two ``read`` calls therefore enclose work, at the price of one wait each.
    """

    def __init__(
        self,
        device: torch.device,
        now: Callable[[], float] = time.perf_counter,
        synchronise: Callable[[], None] | None = None,
    ) -> None:
        self._now = now
        self._synchronise = synchronise or (partial(torch.cuda.synchronize, device) if device.type == "cuda" else None)

    def read(self) -> float:
        if self._synchronise is not None:
            self._synchronise()
        return self._now()

    def now(self) -> float:
        """The same clock without a wait, for moments at which the device is known to have finished."""
        return self._now()


@dataclass(frozen=True)
class Readings:
    """Memory at one moment, beside the meter's own peak."""

    reserved_bytes: int | None = None  # held by this process's allocator
    process_bytes: int | None = None  # what NVML attributes to this process, CUDA context included
    device_used_bytes: int | None = None  # everybody's use of the card, without the driver's own share


class CardState(NamedTuple):
    sm_clock_mhz: int | None
    temperature_celsius: int | None


@dataclass
class Peaks:
    """Peak bytes since the last control step, and of the epoch; ``None`` where nothing was measured."""

    window: int | None = None
    epoch: int | None = None
    probe: int | None = None


def largest(*values: int | None) -> int | None:
    """The largest that was measured; ``None`` if none was."""
    return max((value for value in values if value is not None), default=None)


@dataclass(frozen=True)
class CountedStep:
    """What ``TensorMeter`` counts of one training step, in bytes."""

    resident: int  # parameters and buffers
    gradients: int
    state: int
    saved: int  # for the backward pass, at most

    @property
    def total(self) -> int:
        return self.resident + self.gradients + self.state + self.saved


class MemoryMeter:
    """What a run asks of its meter; on its own it measures nothing.

    ``reason`` is None or one line that says what is off and why, to be shown once.
    """

    name: Literal["vram", "tensors", "off"] = "off"
    reason: str | None = None

    def begin_window(self) -> None:
        """Forget the peak."""

    def window_peak_bytes(self, replayed_bytes: int = 0) -> int | None:
        """Peak since ``begin_window``, without the resident data set.

        ``replayed_bytes`` is the largest ``peak_bytes`` of the graphs replayed since then: a replay makes
        no allocator calls, so its share has to be told.
        """
        return None

    def headroom_bytes(self, peak_bytes: int) -> int | None:
        """By how much a window's peak of ``peak_bytes`` could grow on this device; others' memory lowers it."""
        return None

    def readings(self) -> Readings:
        return Readings()

    def recording(self) -> AbstractContextManager[None]:
        """Stands around a step, for a meter that must watch it."""
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """What it remembers beyond a window."""
        return {}

    def load_state_dict(self, saved: object) -> None:
        """Remember that. Raises ``CheckpointError`` where that is none."""


class NoMeter(MemoryMeter):
    """Measures nothing, and says why."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


class VramMeter(MemoryMeter):
    """Bytes that this process's tensors take on the card, as the CUDA allocator counts them.

    The peak is the allocator's own, or what is allocated now plus what replayed graphs need if
    that is more, minus ``dataset_bytes``. It needs no NVML, and neither other processes nor the
    driver enter it. Reading it does not wait for the device.
    """

    name = "vram"

    def __init__(self, hardware: Card, dataset_bytes: int) -> None:
        self.reason = None if hardware.nvml is not None else f"NVML off: {hardware.nvml_reason}"
        self.device = hardware.device
        self._nvml = hardware.nvml
        self._dataset_bytes = dataset_bytes

    def begin_window(self) -> None:
        graphs.reset_peak(self.device)

    def window_peak_bytes(self, replayed_bytes: int = 0) -> int:
        now, peak = graphs.allocated(self.device)
        return max(peak, now + replayed_bytes) - self._dataset_bytes

    def headroom_bytes(self, peak_bytes: int) -> int:
        # Not what is free now, between two steps: the next step needs its old peak of that again.
        free, _ = torch.cuda.mem_get_info(self.device)
        return free + torch.cuda.memory_reserved(self.device) - self._dataset_bytes - peak_bytes

    def readings(self) -> Readings:
        reserved = torch.cuda.memory_reserved(self.device)
        return Readings(
            reserved_bytes=reserved,
            process_bytes=_ask(self._nvml, lambda nvml, card: _process_bytes(nvml, card, at_least=reserved)),
            device_used_bytes=_ask(self._nvml, _device_used_bytes),
        )


class TensorMeter(MemoryMeter):
    """Bytes of the tensors that a training step keeps alive, counted on any device.

    parameters + buffers + one gradient per trainable parameter + ``state_bytes`` (optimizer
    state) + the peak of what autograd and checkpointing keep for backward, each storage counted once and
    parameters and buffers not again. The count depends on shapes and dtypes alone. Workspace
    and tensors that backward creates are not in it, so it is no VRAM figure.

    Only steps inside ``recording`` are counted, and a window without one has no peak (None).
    Steps of one batch size and one precision plan are alike, so one of them a window will do.

    Attributes:
        largest: the largest step counted so far, whatever the window; ``None`` before the first.
    """

    name = "tensors"

    def __init__(self, module: nn.Module, state_bytes: int | Callable[[], int] = 0) -> None:
        self._module = module
        self._state_bytes = state_bytes
        self._peak_bytes: int | None = None
        self.largest: CountedStep | None = None

    def begin_window(self) -> None:
        self._peak_bytes = None

    def window_peak_bytes(self, replayed_bytes: int = 0) -> int | None:
        return self._peak_bytes

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Watch one step; a step that raises leaves no reading. Not for use around ``torch.func`` transforms."""
        resident = [*self._module.parameters(), *self._module.buffers()]
        saved = _SavedBytes(except_in=resident)
        hooks = saved.pack, lambda held: held.tensor
        with saved_tensors_hooks(*hooks), checkpointing.keeping(*hooks):
            yield
        gradients = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
        state = self._state_bytes() if callable(self._state_bytes) else self._state_bytes
        step = CountedStep(_total(resident), _total(gradients), state, saved.peak)
        self._peak_bytes = max(step.total, self._peak_bytes or 0)
        if self.largest is None or step.total > self.largest.total:
            self.largest = step

    def state_dict(self) -> dict[str, Any]:
        return {"largest": None if self.largest is None else asdict(self.largest)}

    def load_state_dict(self, saved: object) -> None:
        self.largest = checked(CountedStep | None, section(saved, "largest"), "largest step")


def open_meter(
    kind: Literal["vram", "tensors"],
    hardware: Card,
    dataset_bytes: int,
    module: nn.Module,
    state_bytes: int | Callable[[], int] = 0,
) -> MemoryMeter:
    """The meter of a run. "vram" without a CUDA device is no error: the run goes on without a memory figure."""
    if kind == "tensors":
        return TensorMeter(module, state_bytes)
    if hardware.device.type != "cuda":
        return NoMeter("VRAM monitor off: no CUDA device")
    return VramMeter(hardware, dataset_bytes)


def card_state(hardware: Card) -> CardState:
    """SM clock rate and temperature now, for the record of a run."""
    return CardState(
        _ask(hardware.nvml, lambda nvml, card: nvml.nvmlDeviceGetClockInfo(card, nvml.NVML_CLOCK_SM)),
        _ask(hardware.nvml, lambda nvml, card: nvml.nvmlDeviceGetTemperature(card, nvml.NVML_TEMPERATURE_GPU)),
    )


def _total(tensors: list[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


class _Held:
    """A saved tensor; autograd drops it once backward no longer needs it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class _SavedBytes:
    """Live bytes of the storages that autograd holds, and their peak. It keeps no tensor alive itself."""

    def __init__(self, except_in: list[Tensor]) -> None:
        self.peak = 0
        self._live = 0
        self._holders: Counter[int] = Counter()
        self._excepted = {tensor.untyped_storage()._cdata for tensor in except_in}

    def pack(self, tensor: Tensor) -> _Held:
        # Detached: an output that its own graph node held would keep both alive if backward never runs.
        held, storage = _Held(tensor.detach()), tensor.untyped_storage()
        # Not where its data lies: a tensor on the meta device has a size and no data.
        address, size_bytes = storage._cdata, storage.nbytes()
        if address not in self._excepted:
            self._count(address, +1, size_bytes)
            weakref.finalize(held, self._count, address, -1, size_bytes)
        return held

    def _count(self, address: int, change: int, size_bytes: int) -> None:
        before = self._holders[address]
        self._holders[address] = before + change
        if before == 0 or before + change == 0:
            self._live += change * size_bytes
            self.peak = max(self.peak, self._live)


def _ask(handle: Any | None, query: Callable[[Any, Any], int | None]) -> int | None:
    """NVML's answer, or None where there is no NVML or this card does not support the question."""
    if handle is None:
        return None
    import pynvml

    try:
        return query(pynvml, handle)
    except pynvml.NVMLError:
        return None


def _process_bytes(nvml: Any, card: Any, at_least: int) -> int | None:
    """This process's bytes, if NVML tells."""
    mine = [process for process in nvml.nvmlDeviceGetComputeRunningProcesses(card) if process.pid == os.getpid()]
    sizes = [process.usedGpuMemory for process in mine if process.usedGpuMemory is not None]
    # A container may be told the host's process numbers: one like ours that holds less than we do is not us.
    return sum(sizes) if sizes and sum(sizes) >= at_least else None


def _device_used_bytes(nvml: Any, card: Any) -> int:
    # The first version of this query counts what the driver keeps for itself as used.
    return nvml.nvmlDeviceGetMemoryInfo(card, version=nvml.nvmlMemory_v2).used
