"""Where the memory of a run goes: by kind at the peak of its largest training step, and by phase.

Kinds are bytes of tensors that exist, and what is left of a peak that was read; nothing is estimated.
What happens inside a step is read in eager ones, by the allocator's counters, which are the host's:
nothing waits for the device. A replay makes no allocator calls, and needs what the eager step did
that warmed its capture up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, get_args

import torch
from torch import Tensor

from triaccel_bench import checkpointing, graphs
from triaccel_bench.engine import Engine
from triaccel_bench.meters import MemoryMeter, TensorMeter, VramMeter, largest
from triaccel_bench.models import Network
from triaccel_bench.records import Kind, MemoryRecord, Phase
from triaccel_bench.resumption import checked, section


@dataclass(frozen=True)
class Step:
    """One training step at its peak, in bytes, data set included."""

    before: int
    """Allocated as it began."""
    peak: int
    gradients: int
    """Those that existed at the peak."""
    held: Mapping[Kind, int]
    """What of ``before`` is known by kind."""

    def kinds(self, workspace: int | None) -> dict[Kind, int | None]:
        """The peak by kind; ``workspace`` is the libraries' at the end of the run, perhaps none before the step."""
        unknown = self.peak - sum(self.held.values()) - self.gradients
        if workspace is not None:
            workspace = min(workspace, unknown)
            unknown -= workspace
        activations = min(self.peak - self.before - self.gradients, unknown)
        found = {"activations": activations, "workspace": workspace, "other": unknown - activations}
        return {**self.held, "gradients": self.gradients, **found}


class Anatomy:
    """Collects it over a run.

    Args:
        meter: what cannot be known by it stays unknown.
        dataset_bytes: of the data set that lies on the device.
    """

    def __init__(self, meter: MemoryMeter, engine: Engine, dataset_bytes: int) -> None:
        self._meter, self._engine, self._dataset_bytes = meter, engine, dataset_bytes
        self._phases: dict[Phase, int | None] = dict.fromkeys(get_args(Phase))
        self._largest: Step | None = None

    @contextmanager
    def watching(self, due: bool) -> Iterator[None]:
        """Stands around a training step: a ``due`` one, or where steps are captured any, is read if it runs eagerly."""
        if not isinstance(self._meter, VramMeter) or not (due or self._engine.captured.eager_reason is None):
            yield
            return
        watch = _Watch(self._meter.device, self._engine.network)
        self._engine.on_phase = watch
        try:
            yield
        finally:
            self._engine.on_phase = None
            watch.end()
            self._learn(watch)

    def _learn(self, watch: _Watch) -> None:
        for phase, peak in watch.peaks.items():
            self.reached(phase, peak - self._dataset_bytes)
        whole = "update" in watch.peaks
        if whole and (self._largest is None or watch.peak > self._largest.peak):
            self._largest = Step(watch.before, watch.peak, watch.gradients, self._held())

    def reached(self, phase: Phase, peak_bytes: int | None) -> int | None:
        """A phase had that much allocated, without the data set; returns it."""
        self._phases[phase] = largest(self._phases[phase], peak_bytes)
        return peak_bytes

    def headroom_bytes(self, peak_bytes: int, cap_bytes: int | None, lent_bytes: int) -> int | None:
        """By how much that peak could grow: what the card has left, and what a cap on it leaves.

        Args:
            lent_bytes: what a probe has needed of the graphs' pool.
        """
        found = self._meter.headroom_bytes(peak_bytes)
        if found is None:
            return None
        if cap_bytes is not None:
            return min(found, cap_bytes - peak_bytes)
        # A new batch size warms up beside the graphs' memory.
        return found - max(self._engine.captured.pool_bytes, lent_bytes)

    def state_dict(self) -> dict[str, Any]:
        """All that was seen up to now, the meter's share included."""
        largest_step = None if self._largest is None else asdict(self._largest)
        return {"phases": dict(self._phases), "largest": largest_step, "meter": self._meter.state_dict()}

    def load_state_dict(self, saved: object) -> None:
        """Go on from there. Raises ``CheckpointError`` where that is none."""
        self._phases |= checked(dict[Phase, int | None], section(saved, "phases"), "phases")
        self._largest = checked(Step | None, section(saved, "largest"), "largest step")
        self._meter.load_state_dict(section(saved, "meter"))

    def record(self) -> MemoryRecord:
        """All of it at the end of the run, whose captured steps are given up."""
        kinds: dict[Kind, int | None] = dict(self._held())
        phases, peak = self._phases, None
        if isinstance(self._meter, TensorMeter) and self._meter.largest is not None:
            step = self._meter.largest
            # 16-bit copies of weights are among what autograd saves: they are told where they can be told apart.
            kinds |= {"weights": step.resident, "optimizer": step.state, "copies": None if kinds["copies"] else 0}
            kinds |= {"gradients": step.gradients, "activations": step.saved}
            peak = sum(size for size in kinds.values() if size is not None)
            # As the meter has it; what is run again in the backward pass may save more there than the forward pass did.
            forward = None if checkpointing.switched_on(self._engine.network.module) else step.total - step.gradients
            phases = phases | {"forward": forward, "backward": step.total, "update": step.total - step.saved}
        elif isinstance(self._meter, VramMeter):
            capture = self._engine.captured.capture_peak_bytes
            self.reached("capture", None if capture is None else capture - self._dataset_bytes)
            self._engine.captured.give_up()
            workspace = graphs.workspace_bytes(self._meter.device)
            kinds["workspace"] = workspace
            if self._largest is not None:
                kinds, peak = self._largest.kinds(workspace), self._largest.peak
        each = {kind: kinds.get(kind) for kind in get_args(Kind)}
        return MemoryRecord(step_peak_bytes=peak, kind_bytes=each, phase_bytes=phases)

    def _held(self) -> dict[Kind, int]:
        """What is there between two steps, as of now."""
        module = self._engine.network.module
        return {
            "weights": _bytes([*module.parameters(), *module.buffers()]),
            "copies": _bytes(_copies(self._engine.network)),
            "optimizer": self._engine.state_bytes,
            "dataset": self._dataset_bytes,
        }


@dataclass
class _Watch:
    """Told by an engine of one step's phases; knows the peak of each, and the gradients there were at the largest.

    Of a step that does not run eagerly it is told, and knows, nothing.
    """

    device: torch.device
    network: Network
    before: int = 0
    peak: int = 0
    gradients: int = 0
    peaks: dict[Phase, int] = field(default_factory=dict)
    _leaves: list[Tensor] = field(default_factory=list)
    _hooks: list = field(default_factory=list)
    _left: int = 0
    """Gradients that the backward pass left."""

    def __call__(self, phase: str) -> None:
        if phase == "begin":
            self._begin()
            return
        if phase == "data":
            # Its images live on: they are of the forward pass.
            return
        _, peak = graphs.counted(self.device)
        graphs.begin_interval(self.device)
        self.peaks[phase] = peak
        if phase == "backward":
            self.end()
            self._left = self._live()
        self._note(peak, self._left)

    def _begin(self) -> None:
        self.end()
        self.before, _ = graphs.counted(self.device)
        graphs.begin_interval(self.device)
        self.peak, self.gradients, self._left = self.before, 0, 0
        self.peaks.clear()
        parameters = [parameter for parameter in self.network.module.parameters() if parameter.requires_grad]
        self._leaves = [*parameters, *_copies(self.network)]
        # Before a gradient is kept, and so before anybody who uses it up at once.
        self._hooks = [leaf.register_hook(self._arrived) for leaf in self._leaves]

    def _arrived(self, gradient: Tensor) -> None:
        _, peak = graphs.counted(self.device)
        if peak > self.peak:
            self._note(peak, self._live() + gradient.nbytes)

    def _note(self, peak: int, gradients: int) -> None:
        if peak > self.peak:
            self.peak, self.gradients = peak, min(gradients, peak - self.before)

    def _live(self) -> int:
        return sum(leaf.grad.nbytes for leaf in self._leaves if leaf.grad is not None)

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def held(memory: MemoryRecord) -> str:
    """What of it is known to stay between two steps, in words."""
    kinds = ("weights", "copies", "optimizer", "dataset")
    known = [(kind, memory.kind_bytes[kind]) for kind in kinds if memory.kind_bytes[kind]]
    return ", ".join(f"{kind} {size / 1e6:.1f} MB" for kind, size in known) or "nothing that is known"


def _copies(network: Network) -> list[Tensor]:
    return [copy for layer in network.layers.values() for copy in getattr(layer, "copies", {}).values()]


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Of their storages, each counted once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
