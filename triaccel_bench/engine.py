"""One training step, from indices of a batch to updated weights, without a host read.

The step is the same for every method: input, forward with each layer in its executed dtype,
backward, gradient moments and the non-finite check, update, loss-scale update, counters. With
``method.update.in_backward`` moments and update run in buckets within the backward pass. What a
method changes between steps (plan, layer rates, batch size) arrives through ``set_*``.

On a CUDA device a step of one batch size under one executed plan is captured once and then
replayed: these models are small, and Python would launch their kernels ten times slower than
the device runs them. The step before a capture is a real one that runs eagerly and warms up
whatever the capture must not meet for the first time.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from triaccel_bench import life, models, precision, resumption
from triaccel_bench.buckets import Buckets
from triaccel_bench.captures import CapturedCalls
from triaccel_bench.convolution import WeightGradients
from triaccel_bench.kernels.bookkeeping import StepScalars
from triaccel_bench.kernels.loss import cross_entropy
from triaccel_bench.kernels.moments import GradientMoments
from triaccel_bench.kernels.update import FusedSGD
from triaccel_bench.models import Network
from triaccel_bench.reading import Reading, start_reading
from triaccel_bench.schedule import Schedule
from triaccel_bench.settings import MethodSettings, OptimizerSettings
from triaccel_bench.snapshot import Snapshot

Source = Callable[..., tuple[Tensor, Tensor]]
"""``(dtype, *inputs) -> (images, labels)``: the batch that a step's inputs stand for, images in ``dtype``."""


def as_given(dtype: torch.dtype, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The ``Source`` of steps whose inputs are the batch itself."""
    return images.to(dtype), labels


class Engine:
    """Owns the optimizer state, the loss scale, the counters and the captured steps of one network.

    Args:
        network: on its device, already prepared by ``precision.prepare``.
        kernels: ``triton`` or ``torch``.
        executed: the executed plan, one dtype a layer.
        source: turns a step's inputs into a batch; runs within the captured step.
        eager, cached, tight: as ``CapturedCalls`` takes them.
        image_sizes: as ``precision.WeightCopies`` takes them.

    Attributes:
        captured: the captured steps and evaluations.
        schedule: eta_0(t), before what batch size and layers make of it.
        updates_in_backward: whether weights are updated within the backward pass.
        on_phase: told "begin", and when "data", "forward", "backward" and "update" are over, of steps that run eagerly.
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
        image_sizes: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        self.network = network
        self._source = source
        self.schedule = schedule
        self._kernels = kernels
        self._normalise = method.precision.normalise_by_batch
        self._initial_batch = method.batch.initial
        self._parameters, layer_of = _ordered_parameters(network)
        device = self._parameters[0].device
        layers = len(network.layers)
        self._narrows_momentum = method.update.momentum_dtype == "bf16"
        self._track = method.precision.adaptive
        models.use_kernels(network, kernels)
        statistics = method.precision.beta, self._track
        rule = optimizer.momentum, optimizer.weight_decay
        self._buckets: Buckets | None = None
        self.updates_in_backward = method.update.in_backward
        if self.updates_in_backward:
            order = _delivery_order(network, self._parameters)
            self._buckets = Buckets(self._parameters, layer_of, layers, order, kernels, *statistics, *rule)
            self.moments = self.sgd = self._buckets
        else:
            sizes = [parameter.numel() for parameter in self._parameters]
            self.moments = GradientMoments(sizes, layers, device, kernels, *statistics)
            self.sgd = FusedSGD(self._parameters, layer_of, kernels, *rule)
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
        self._copies = precision.WeightCopies(network, self._parameters, image_sizes)
        self._evaluation = torch.zeros(2, dtype=torch.float64, device=device)
        self.captured = CapturedCalls(device, eager, cached, tight, self._after_capture)
        self._before = Snapshot([*network.module.buffers(), *self.scalars.state, *self.moments.state])
        self._begun = False
        self._rehearsed: set[tuple[torch.Size, ...]] = set()
        self.on_phase: Callable[[str], None] | None = None
        self.set_plan(executed)

    def set_plan(self, executed: Sequence[str]) -> None:
        """Put an executed plan in force; the loss is scaled from then on if any layer runs in FP16.

        Steps captured under another plan are given up: they would run its dtypes. May be called again
        after it raised for want of memory.
        """
        self.captured.forget()
        self._rehearsed.clear()
        precision.apply(self.network, executed)
        self._input_dtype = precision.DTYPES[executed[0]]
        self.sgd.set_momentum_dtypes(self._momentum_dtypes())
        self._copies.follow()
        self._leaves = self._copies.leaves
        self.sgd.set_copies(self._copies.of_parameters, self._copies.windows)
        self._scaled = "fp16" in executed
        self.scalars.set_scaled(self._scaled)

    def _momentum_dtypes(self) -> list[torch.dtype]:
        """For each parameter: BF16, if it is asked for, for the weight of a layer that runs in 16 bit; else FP32."""
        narrow = torch.bfloat16 if self._narrows_momentum else torch.float32
        weights = [torch.float32 if level == "fp32" else narrow for level in precision.current(self.network)]
        return weights + [torch.float32] * (len(self._parameters) - len(weights))

    def set_rates(self, rates: Sequence[float], factor: float) -> None:
        """Layer rate scales (section 3.2) and the factor by which eta_0 follows the batch size."""
        rates = torch.tensor(rates, dtype=torch.float32)
        if self._rates.is_cuda:
            # A pinned source makes the copy asynchronous; the allocator keeps it until the copy is done.
            rates = rates.pin_memory()
        self._rates.copy_(rates, non_blocking=True)
        self.scalars.rate_factor.fill_(factor)

    def state_dict(self) -> dict[str, Any]:
        """All that steps leave behind, but for 16-bit copies and graphs, which are made anew; between two steps."""
        module, scalars = self.network.module, [*self.scalars.state, self._rates]
        names, tensors = zip(*module.named_parameters(), *module.named_buffers())
        return {
            "model": dict(zip(names, resumption.on_host(tensors))),
            "momenta": resumption.on_host(self.sgd.momenta),
            "scalars": resumption.on_host(scalars),
            "moments": resumption.on_host(self.moments.state),
            "captured": self.captured.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, saved: dict[str, Any], executed: Sequence[str]) -> None:
        """Put such a state and the plan that was in force in place, before the first step.

        Raises:
            CheckpointError: it does not fit this network, or these settings.
        """
        module, section = self.network.module, resumption.section
        names, tensors = zip(*module.named_parameters(), *module.named_buffers())
        resumption.restore(tensors, [section(saved, "model", name) for name in names], "model")
        # Makes momenta of the plan's dtypes, and 16-bit copies of the weights.
        self.set_plan(executed)
        resumption.restore(self.sgd.momenta, section(saved, "momenta"), "momenta")
        resumption.restore([*self.scalars.state, self._rates], section(saved, "scalars"), "scalars")
        resumption.restore(self.moments.state, section(saved, "moments"), "moments")
        self.captured.load_state_dict(section(saved, "captured"))

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer state (momentum)."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.sgd.momenta)

    def step(self, *inputs: Tensor) -> str:
        """One whole training step from the source's inputs; but for a capture, nothing in it waits for the device.

        Returns how: "replayed", "warmed" or "captured" on the way there, or "eager".
        """
        life.sign()
        outcome = self.captured.run("step", self._undoable_step, *inputs)
        self._begun = False
        return outcome

    def eager_step(self, *inputs: Tensor) -> None:
        """The same, neither captured nor replayed."""
        life.sign()
        self._undoable_step(*inputs)
        self._begun = False

    def _undoable_step(self, *inputs: Tensor) -> None:
        # A captured step allocates nothing when it is replayed, and is not executed when it is captured.
        if not (inputs[0].is_cuda and torch.cuda.is_current_stream_capturing()):
            self._before.take()
            self._begun = True
            if self._buckets is not None:
                self._rehearse(self._buckets, inputs)
        self._tell("begin")
        self._whole_step(*inputs)

    def _rehearse(self, buckets: Buckets, inputs: Sequence[Tensor]) -> None:
        """See once under each plan that a step of these shapes fits: when weights have changed, it is too late."""
        buckets.applied = False
        shapes = tuple(tensor.shape for tensor in inputs)
        if shapes in self._rehearsed:
            return
        self._tell("begin")
        with buckets.rehearsal():
            self._whole_step(*inputs)
        self._before.restore()
        self._rehearsed.add(shapes)

    def _tell(self, phase: str) -> None:
        if self._begun and self.on_phase is not None:
            self.on_phase(phase)

    def _whole_step(self, *inputs: Tensor) -> None:
        images, labels = self._source(self._input_dtype, *inputs)
        self._tell("data")
        self.update(*self.forward_backward(images, labels))

    def forward_backward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and correctness of each sample; leaves gradients of the mean loss, scaled if FP16 runs, in ``.grad``.

        With ``method.update.in_backward`` it leaves updated weights and no gradients.
        """
        with WeightGradients() as apart, self._updating(apart, labels.shape[0]):
            logits = self.network.module(images)
            scale = self.scalars.loss_scale if self._scaled else self._one
            losses, correct, gradient = cross_entropy(logits.detach(), labels, scale, backend=self._kernels)
            self._tell("forward")
            logits.backward(gradient)
        self._tell("backward")
        return losses, correct

    def _updating(self, apart: WeightGradients, batch: int) -> AbstractContextManager[None]:
        if self._buckets is None:
            return nullcontext()
        scalars = self.scalars
        scalars.begin(batch)
        values = scalars.learning_rate, self._rates, scalars.inverse_scale, self._batch_factor(batch)
        return self._buckets.updating(self._leaves, apart.settle, *values)

    @torch.no_grad()
    def update(self, losses: Tensor, correct: Tensor) -> None:
        """Statistics, weights, loss scale and counters from the gradients that ``forward_backward`` left."""
        scalars = self.scalars
        if self._buckets is not None:
            scalars.advance(losses, correct, self._buckets.nonfinite, self._scaled)
        else:
            gradients = self.sgd.gather([leaf.grad for leaf in self._leaves])
            self.moments.update(gradients, scalars.inverse_scale, self._batch_factor(losses.shape[0]))
            scalars.advance(losses, correct, self.moments.nonfinite, self._scaled)
            flag, inverse_scale = self.moments.nonfinite, scalars.applied_inverse_scale
            self.sgd.step(gradients, scalars.learning_rate, self._rates, inverse_scale, flag, self.moments.updates)
        self._tell("update")
        self._drop_gradients()

    def _batch_factor(self, batch: int) -> Tensor:
        if not self._normalise:
            return self._one
        if batch not in self._batch_factors:
            self._batch_factors[batch] = torch.full_like(self._one, batch / self._initial_batch)
        return self._batch_factors[batch]

    def recover(self) -> bool:
        """After a step or an evaluation that raised: everything as before it, its memory and that of graphs free.

        Weights and momentum are as before in any case: nothing is allocated once their update has begun.
        Returns whether there were graphs, without which the same might fit.

        Raises:
            torch.OutOfMemoryError: with ``method.update.in_backward`` some weights were updated already.
        """
        torn = self._begun and self._buckets is not None and self._buckets.applied
        if self._begun:
            self._before.restore()
            self._begun = False
        self._rehearsed.clear()
        self._drop_gradients()
        # Cycles through a failed step's frames hold its tensors.
        gc.collect()
        held = self.captured.give_up()
        if self._one.is_cuda:
            torch.cuda.empty_cache()
        if torn:
            raise torch.OutOfMemoryError(
                "memory ran out in a step that had updated some of its weights, so that it cannot be undone, "
                "though its rehearsal had fitted; use method.update.in_backward=false or a smaller method.batch.max"
            )
        return held

    def _after_capture(self) -> None:
        # Gradients of a capture lie in the graph's memory: nobody else may find them.
        self._drop_gradients()
        self.sgd.flush()

    def _drop_gradients(self) -> None:
        for leaf in self._leaves:
            leaf.grad = None

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
                life.sign()
                self.captured.run("evaluation", self._evaluate_batch, images, labels)
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


def _delivery_order(network: Network, parameters: Sequence[Tensor]) -> list[int]:
    """Indices of parameters as a backward pass about comes to them."""
    index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
    used = reversed(list(models.parameters_in_order_of_use(network.module)))
    return list(dict.fromkeys(index_of[id(p)] for p in used if id(p) in index_of))
