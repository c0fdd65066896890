"""Network, method and engine of one (cell, seed), put together on its device; and throw-away copies to try it with."""

from __future__ import annotations

import functools
import gc
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

from triaccel_bench import models, precision
from triaccel_bench.data import DeviceData
from triaccel_bench.engine import Engine
from triaccel_bench.hardware import Hardware, executed_dtype
from triaccel_bench.kernels import backend
from triaccel_bench.meters import MemoryMeter, open_meter
from triaccel_bench.methods import Method, resolve_budget
from triaccel_bench.openloop import OpenLoop
from triaccel_bench.recovery import tolerated
from triaccel_bench.schedule import make_schedule
from triaccel_bench.settings import ModelSettings, Settings

WARM_UP_STEPS = 2
"""Steps of a throw-away copy before the first epoch's clock: library start-up and kernel compilation."""

PLANS_TO_COMPILE = "fp16", "bf16", "fp32"
"""What layers of a method with adaptive precision may come to run in: their kernels compile beforehand.

A mixture has no kernels of its own, since a layer's input, and what a join adds, are brought to its own dtype first.
"""


Budget = tuple[int | None, str | None]
"""MemMax in bytes, and where it comes from."""


def reason_for_eager_steps(settings: Settings) -> str | None:
    """Why the settings want steps that are not captured; ``None`` if they do not."""
    if not settings.engine.graphs:
        return "asked for by engine.graphs=false"
    if settings.memory.meter == "tensors":
        return "memory.meter=tensors counts what autograd saves, which a replay does not show"
    return None


class Parts(NamedTuple):
    network: models.Network
    method: Method | OpenLoop
    engine: Engine


class Assembly:
    """Builds the parts of a run.

    Args:
        data: the resident data set, whose current epoch the engines draw their batches from.
        kernels: ``triton`` or ``torch``.
    """

    def __init__(self, seed: int, hardware: Hardware, data: DeviceData, kernels: str) -> None:
        self._seed, self._hardware, self._data, self._kernels = seed, hardware, data, kernels

    def build(self, settings: Settings, eager: str | None) -> Parts:
        """New parts, whose weights follow the seed; ``eager`` as ``Engine`` takes it."""
        sizes = image_sizes(settings.model.model_copy(update={"weights": "none"}))
        torch.manual_seed(self._seed)
        network = models.build(settings.model, settings.dataset.num_classes)
        layout = torch.channels_last if settings.model.layout == "channels_last" else torch.contiguous_format
        network.module.to(self._hardware.device, memory_format=layout).train()
        precision.prepare(network)
        samples = self._data.train_count
        if settings.replay.run is not None:
            method = OpenLoop(settings, network, self._hardware, samples)
        else:
            method = Method(settings.method, network, self._hardware, self._seed, samples)
        schedule = make_schedule(settings.optimizer.lr, settings.epochs, settings.optimizer.warmup_epochs, samples)
        engine = Engine(
            network,
            settings.method,
            settings.optimizer,
            schedule,
            self._kernels,
            method.decision.executed,
            self._batch,
            eager,
            settings.engine.cached,
            settings.memory.enforce,
            sizes,
        )
        return Parts(network, method, engine)

    def build_run(self, settings: Settings) -> tuple[Parts, int]:
        """The run's own parts, its probes made ready, and what of the graphs' pool a probe needs in bytes."""
        parts = self.build(settings, reason_for_eager_steps(settings))
        if not parts.method.probe_due(0):
            return parts, 0
        batch = self._data.plain_batch(torch.arange(parts.method.probe_images, device=self._hardware.device))
        # What does not fit is left to the first probe.
        needed = tolerated(lambda: parts.method.prepare_probe(*batch, parts.engine.captured.lend_pool()))
        return parts, needed or 0

    def prepare(self, settings: Settings, budget: Budget | None = None) -> Budget:
        """What comes before the run's own parts: MemMax, its enforcement, and a few steps to warm up.

        Args:
            budget: what this returned in an earlier process of the run; measured again, it would be another run.
        """
        if budget is None:
            steps = settings.memory.calibration_steps
            calibrate = partial(self.try_out, ["fp32"], steps, settings.without_savings)
            budget = resolve_budget(settings, self._hardware, calibrate)
        if settings.memory.enforce and budget[0] is not None:
            share = (budget[0] + self._data.bytes) / self._hardware.total_bytes
            torch.cuda.set_per_process_memory_fraction(min(share, 1.0), self._hardware.device)
        # Under the cap, where there is one: what a library tries out now has to fit as well.
        tolerated(lambda: self._warm_up(settings))
        return budget

    def meter_of(self, settings: Settings, engine: Engine) -> MemoryMeter:
        chosen, module = settings.memory.meter, engine.network.module
        return open_meter(chosen, self._hardware, self._data.bytes, module, lambda: engine.state_bytes)

    def _warm_up(self, settings: Settings) -> None:
        """A few steps in each dtype that a run with these settings may come to."""
        moves = settings.method.precision.adaptive or settings.replay.run is not None
        levels = PLANS_TO_COMPILE if moves and self._hardware.device.type == "cuda" else [settings.method.dtype]
        self.try_out(levels, WARM_UP_STEPS, settings)

    def try_out(self, levels: Sequence[str], steps: int, settings: Settings) -> int | None:
        """Train a throw-away copy at B0, ``steps`` with all layers at each of the requested levels.

        It runs eagerly: the memory it needs is the same, and a capture would outlast its few steps.

        Returns:
            The meter's peak under the last.
        """
        # MemMax is FP32's own, whatever the run's method rounds.
        with precision.tf32_allowed(settings.method.tf32):
            return self._tried(levels, steps, settings)

    def _tried(self, levels: Sequence[str], steps: int, settings: Settings) -> int | None:
        network, method, engine = self.build(settings, "a copy of a few steps")
        meter = self.meter_of(settings, engine)
        self._data.begin_epoch(self._seed, 0)
        batch = min(settings.method.batch.initial, self._data.train_count)
        indices = torch.arange(batch, device=self._hardware.device)
        on_card = self._hardware.device.type == "cuda"
        executed = dict.fromkeys(executed_dtype(level, self._hardware, settings.method.precision) for level in levels)
        plans = [[dtype] * len(network.layers) for dtype in executed]
        if self._kernels == "triton" and backend.compiles_together():
            with backend.compiled_together():
                for plan in plans:
                    engine.set_plan(plan)
                    engine.step(indices)
        for plan in plans:
            engine.set_plan(plan)
            if on_card:
                # With engine.autotune the first step also holds the workspace of trials, which no later step needs.
                engine.step(indices)
            meter.begin_window()
            for _ in range(steps):
                with meter.recording():
                    engine.step(indices)
        if on_card:
            torch.cuda.synchronize(self._hardware.device)
        peak = meter.window_peak_bytes()
        del network, method, engine, meter
        gc.collect()
        if on_card:
            torch.cuda.empty_cache()
        return peak

    def _batch(self, dtype: torch.dtype, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The engine's source: augmented images of the current epoch and their labels."""
        images, labels = self._data.input_buffers(len(indices), dtype)
        self._data.fill(images, labels, indices)
        return images, labels


@functools.cache
def image_sizes(model: ModelSettings) -> dict[str, tuple[int, int]]:
    """Height and width of what each two-dimensional convolution reads, by name; told by a network in no memory."""
    with torch.device("meta"):
        network = models.build(model, num_classes=2)
    sizes: dict[str, tuple[int, int]] = {}
    for name, layer in network.layers.items():
        if isinstance(layer, torch.nn.Conv2d):
            layer.register_forward_pre_hook(
                lambda _, inputs, name=name: sizes.update({name: tuple(inputs[0].shape[2:])})
            )
    with torch.no_grad():
        network.module.eval()(torch.empty(1, 3, model.input_size, model.input_size, device="meta"))
    return sizes
