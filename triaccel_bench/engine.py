"""One training step, from indices of a batch to updated weights, without a host read.

The step is the same for every method: input, forward with each layer in its executed dtype,
backward, gradient moments and the non-finite check, update, loss-scale update, counters. What a
method changes between steps (plan, layer rates, batch size) arrives through ``set_*``.

On a CUDA device a step of one batch size under one executed plan is captured once and then
replayed: these models are small, and Python would launch their kernels ten times slower than
the device runs them. The step before a capture is a real one that runs eagerly and warms up
whatever the capture must not meet for the first time.
"""

from __future__ import annotations

import gc
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from triaccel_bench import models, precision
from triaccel_bench.convolution import WeightGradients
from triaccel_bench.graphs import CaptureError, Graph, Pool
from triaccel_bench.kernels.bookkeeping import StepScalars
from triaccel_bench.kernels.loss import cross_entropy
from triaccel_bench.kernels.moments import GradientMoments
from triaccel_bench.kernels.update import FusedSGD
from triaccel_bench.models import Network
from triaccel_bench.reading import Reading, start_reading
from triaccel_bench.schedule import Schedule
from triaccel_bench.settings import MethodSettings, OptimizerSettings
from triaccel_bench.snapshot import Snapshot

SIZES_A_PLAN = 2
"""Batch sizes that a new plan has to capture: B, and what is left at an epoch's end."""

Source = Callable[..., tuple[Tensor, Tensor]]
"""``(dtype, *inputs) -> (images, labels)``: the batch that a step's inputs stand for, images in ``dtype``."""


def as_given(dtype: torch.dtype, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The ``Source`` of steps whose inputs are the batch itself."""
    return images.to(dtype), labels


@dataclass(frozen=True)
class _Captured:
    """A captured function and the tensors that its replay reads."""

    graph: Graph
    slots: tuple[Tensor, ...]


class Engine:
    """Owns the optimizer state, the loss scale, the counters and the captured steps of one network.

    Args:
        network: on its device, already prepared by ``precision.prepare``.
        kernels: ``triton`` or ``torch``.
        executed: the executed plan, one dtype a layer.
        source: turns a step's inputs into a batch; runs within the captured step.
        eager: why steps shall run eagerly; ``None`` captures them where there is a CUDA device.
        cached: captured steps that are kept, the most recently used ones; evaluations are not counted.
        tight: whether reserved memory is capped: an eager step then finds the graphs' memory free.

    Attributes:
        eager_reason: why steps run eagerly; ``None`` while they are captured.
        captures: steps captured so far.
        capture_seconds: what captures of steps and the eager steps that warmed them up took.
        recapture_seconds: the part of it for batch sizes that had been captured before, under another plan.
        replayed_bytes: the largest ``Graph.peak_bytes`` replayed since it was last set to 0.
    """

    def __init__(
        self,
        network: Network,
        method: MethodSettings,
        optimizer: OptimizerSettings,
        schedule: Schedule,
        kernels: str,
        executed: Sequence[str],
        source: Source = as_given,
        eager: str | None = "not asked for",
        cached: int = 8,
        tight: bool = False,
    ) -> None:
        self.network = network
        self._source = source
        self._kernels = kernels
        self._normalise = method.precision.normalise_by_batch
        self._initial_batch = method.batch.initial
        self._parameters, layer_of = _ordered_parameters(network)
        device = self._parameters[0].device
        layers = len(network.layers)
        self._track = method.precision.adaptive
        models.use_kernels(network, kernels)
        sizes = [parameter.numel() for parameter in self._parameters]
        self.moments = GradientMoments(sizes, layers, device, kernels, method.precision.beta, self._track)
        self.sgd = FusedSGD(self._parameters, layer_of, kernels, optimizer.momentum, optimizer.weight_decay)
        scaling = method.loss_scale
        self.scalars = StepScalars(
            schedule.base_lr,
            schedule.warmup_samples,
            schedule.total_samples,
            scaling.initial,
            scaling.growth_factor,
            scaling.backoff_factor,
            scaling.growth_interval,
            device,
            kernels,
        )
        self._rates = torch.ones(layers, device=device)
        self._one = torch.ones((), device=device)
        self._batch_factors: dict[int, Tensor] = {}
        self._copies = precision.WeightCopies(network, self._parameters)
        self._evaluation = torch.zeros(2, dtype=torch.float64, device=device)
        self.eager_reason = eager if device.type == "cuda" else f"no CUDA graphs on a {device.type} device"
        self.captures = 0
        self.capture_seconds = self.recapture_seconds = 0.0
        self.replayed_bytes = 0
        self._cached, self._tight = cached, tight
        self._captured_before: set[tuple] = set()
        self._tries_cold = True
        scalars, moments = self.scalars, self.moments
        self._before = Snapshot(
            [
                *network.module.buffers(),
                *(scalars.counters, scalars.learning_rate, scalars.loss_scale, scalars.growth_tracker),
                *(scalars.inverse_scale, scalars.applied_inverse_scale),
                *(moments.nonfinite, moments.variance, moments.ema, moments.updates),
            ]
        )
        self._begun = False
        self._pool: Pool | None = None
        self._steps: OrderedDict[tuple, _Captured] = OrderedDict()
        self._warm: set[tuple] = set()
        self.set_plan(executed)

    def set_plan(self, executed: Sequence[str]) -> None:
        """Put an executed plan in force; the loss is scaled from then on if any layer runs in FP16.

        Steps captured under another plan are given up: they would run its dtypes.
        """
        self._release_captures()
        self._warm.clear()
        precision.apply(self.network, executed)
        self._input_dtype = precision.DTYPES[executed[0]]
        self._copies.follow()
        self._leaves = self._copies.leaves
        self.sgd.set_copies(self._copies.of_parameters)
        self._scaled = "fp16" in executed
        self.scalars.set_scaled(self._scaled)

    def set_rates(self, rates: Sequence[float], factor: float) -> None:
        """Layer rate scales (section 3.2) and the factor by which eta_0 follows the batch size."""
        rates = torch.tensor(rates, dtype=torch.float32)
        if self._rates.is_cuda:
            # A pinned source makes the copy asynchronous; the allocator keeps it until the copy is done.
            rates = rates.pin_memory()
        self._rates.copy_(rates, non_blocking=True)
        self.scalars.rate_factor.fill_(factor)

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer state (momentum)."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.sgd.momenta)

    def step(self, *inputs: Tensor) -> str:
        """One whole training step from the source's inputs; but for a capture, nothing in it waits for the device.

        Returns how: "replayed", "warmed" or "captured" on the way there, or "eager".
        """
        outcome, seconds, key = self._run("step", self._undoable_step, *inputs)
        self._begun = False
        if outcome != "replayed":
            self.captures += outcome == "captured"
            self.capture_seconds += seconds
            self.recapture_seconds += seconds if key in self._captured_before else 0.0
            if outcome == "captured":
                self._captured_before.add(key)
        return outcome

    def _undoable_step(self, *inputs: Tensor) -> None:
        # A captured step allocates nothing when it is replayed, and is not executed when it is captured.
        if not (inputs[0].is_cuda and torch.cuda.is_current_stream_capturing()):
            self._before.take()
            self._begun = True
        self._whole_step(*inputs)

    def _whole_step(self, *inputs: Tensor) -> None:
        images, labels = self._source(self._input_dtype, *inputs)
        self.update(*self.forward_backward(images, labels))

    def forward_backward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and correctness of each sample; leaves gradients of the mean loss, scaled if FP16 runs, in ``.grad``."""
        with WeightGradients():
            logits = self.network.module(images)
            scale = self.scalars.loss_scale if self._scaled else self._one
            losses, correct, gradient = cross_entropy(logits.detach(), labels, scale, backend=self._kernels)
            logits.backward(gradient)
        return losses, correct

    @torch.no_grad()
    def update(self, losses: Tensor, correct: Tensor) -> None:
        """Statistics, weights, loss scale and counters from the gradients that ``forward_backward`` left."""
        gradients = self.sgd.gather([leaf.grad for leaf in self._leaves])
        scalars = self.scalars
        self.moments.update(gradients, scalars.inverse_scale, self._batch_factor(losses.shape[0]))
        scalars.advance(losses, correct, self.moments.nonfinite, self._scaled)
        self.sgd.step(
            gradients, scalars.learning_rate, self._rates, scalars.applied_inverse_scale, self.moments.nonfinite
        )
        for leaf in self._leaves:
            leaf.grad = None

    def _batch_factor(self, batch: int) -> Tensor:
        if not self._normalise:
            return self._one
        if batch not in self._batch_factors:
            self._batch_factors[batch] = torch.full_like(self._one, batch / self._initial_batch)
        return self._batch_factors[batch]

    def _run(self, kind: str, function: Callable[..., None], *inputs: Tensor) -> tuple[str, float, tuple]:
        """Do ``function(*inputs)``; says how, what of its time on the host capturing cost, and for which shapes."""
        key = kind, *(tensor.shape for tensor in inputs)
        if self.eager_reason is not None:
            function(*inputs)
            return "eager", 0.0, key
        outcome, seconds = "replayed", 0.0
        if key not in self._steps:
            started = time.perf_counter()
            if key not in self._warm and not self._captures_cold(key):
                self._warm.add(key)
                if self._tight:
                    self._give_memory_back()
                function(*inputs)
                return "warmed", time.perf_counter() - started, key
            # Steps that the device has yet to finish are no part of the price.
            torch.cuda.synchronize()
            started = time.perf_counter()
            captured = self._capture(function, inputs, key in self._warm)
            if captured is None:
                lost = time.perf_counter() - started
                outcome, seconds, key = self._run(kind, function, *inputs)
                return outcome, lost + seconds, key
            self._steps[key] = captured
            steps = [held for held in self._steps if held[0] == "step"]
            for oldest in steps[: max(0, len(steps) - self._cached)]:
                self._steps.pop(oldest).graph.release()
            outcome, seconds = "captured", time.perf_counter() - started
        captured = self._steps[key]
        self._steps.move_to_end(key)
        for slot, value in zip(captured.slots, inputs, strict=True):
            slot.copy_(value)
        captured.graph.replay()
        self.replayed_bytes = max(self.replayed_bytes, captured.graph.peak_bytes)
        return outcome, seconds, key

    def _captures_cold(self, key: tuple) -> bool:
        """Whether shapes that another plan captured before are tried without an eager step first, which costs as much.

        Not where cuDNN times its algorithms, which it cannot do under capture, and not under a cap on reserved
        memory, where the graphs' memory is given back between two plans.
        """
        tries = self._tries_cold and not self._tight and not torch.backends.cudnn.benchmark
        return tries and key in self._captured_before

    def recover(self) -> bool:
        """After a step or an evaluation that raised: everything as before it, its memory and that of graphs free.

        Weights and momentum are as before in any case: nothing is allocated once their update has begun.
        Returns whether there were graphs, without which the same might fit.
        """
        held = bool(self._steps)
        if self._begun:
            self._before.restore()
            self._begun = False
        for leaf in self._leaves:
            leaf.grad = None
        # Cycles through a failed step's frames hold its tensors.
        gc.collect()
        self._give_memory_back()
        self._warm.clear()
        if self._one.is_cuda:
            torch.cuda.empty_cache()
        return held

    @property
    def idle_pool(self) -> Any:
        """The pool of the captured steps, whose memory nobody needs between two of them; ``None`` if it may go."""
        return None if self._pool is None or self._tight else self._pool.handle

    @property
    def pool_bytes(self) -> int:
        """What captured steps keep from everybody else, to need it at their replay."""
        return max((captured.graph.peak_bytes for captured in self._steps.values()), default=0)

    def capture_share(self, training_seconds: float) -> float | None:
        """Share of that time that capturing again would have taken after one more change of plan."""
        if self.eager_reason is not None or self.captures == 0 or training_seconds <= 0:
            return None
        one_more = SIZES_A_PLAN * self.capture_seconds / self.captures
        return (self.recapture_seconds + one_more) / training_seconds

    def _give_memory_back(self) -> None:
        self._release_captures()
        if self._pool is not None:
            self._pool.release()
            self._pool = None
            torch.cuda.empty_cache()

    def _capture(self, function: Callable[..., None], inputs: tuple[Tensor, ...], warmed: bool) -> _Captured | None:
        """The function captured; if it cannot be, this is final where it has been ``warmed`` under this plan."""
        slots = tuple(torch.empty_like(value) for value in inputs)
        try:
            with torch.cuda.device(self._one.device):
                self._pool = self._pool or Pool()
                graph = Graph(lambda: function(*slots), pool=self._pool.handle, warmup=0)
        except CaptureError as error:
            self._give_memory_back()
            if warmed:
                self.eager_reason = f"a step cannot be captured: {error}"
            else:
                # Something still had to be loaded; an eager step does that.
                self._tries_cold = False
            return None
        finally:
            # Gradients of a capture lie in the graph's memory: nobody else may find them.
            for leaf in self._leaves:
                leaf.grad = None
            self.sgd.flush()
        return _Captured(graph, slots)

    def _release_captures(self) -> None:
        if self._steps:
            # A replay may still be under way.
            torch.cuda.synchronize()
        for captured in self._steps.values():
            captured.graph.release()
        self._steps.clear()

    def start_reading(self) -> Callable[[], Reading]:
        """Begin the one host read-back of a control step: everything as of now, in a single copy.

        The call that is returned waits for it, but for no step that is begun in between.
        """
        return start_reading(self.scalars, self.moments if self._track else None)

    def read(self) -> Reading:
        """``start_reading``, and the wait for it."""
        return self.start_reading()()

    @torch.no_grad()
    def evaluate(self, batches) -> tuple[float, int, int]:
        """(sum of losses, correct, samples) over ``(images, labels)`` batches: evaluation mode, the plan's casts."""
        module = self.network.module
        module.eval()
        self._evaluation.zero_()
        samples = 0
        try:
            for images, labels in batches:
                self._run("evaluation", self._evaluate_batch, images, labels)
                samples += labels.shape[0]
        finally:
            module.train()
        loss_sum, correct = self._evaluation.tolist()
        return loss_sum, int(correct), samples

    def _evaluate_batch(self, images: Tensor, labels: Tensor) -> None:
        logits = self.network.module(images)
        loss = functional.cross_entropy(logits, labels, reduction="sum")
        self._evaluation += torch.stack((loss.double(), (logits.argmax(1) == labels).sum().double()))


def _ordered_parameters(network: Network) -> tuple[list[Tensor], list[int]]:
    """Parameters with the named layers' weights first, and for each the layer whose rate scales it (-1: none).

    A layer's bias follows its layer's rate; normalisation parameters keep the base rate.
    """
    weights = [layer.weight for layer in network.layers.values()]
    owners = {id(weight): index for index, weight in enumerate(weights)}
    for index, layer in enumerate(network.layers.values()):
        if layer.bias is not None:
            owners.setdefault(id(layer.bias), index)
    first = {id(weight) for weight in weights}
    rest = [p for p in network.module.parameters() if p.requires_grad and id(p) not in first]
    parameters = [*weights, *rest]
    return parameters, [owners.get(id(parameter), -1) for parameter in parameters]
