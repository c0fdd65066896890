"""One training step, from a batch on the device to updated weights, without a host read.

The step is the same for every method: forward with each layer in its executed dtype, backward,
gradient moments and the non-finite check, update, loss-scale update, counters. What a method
changes between steps (plan, layer rates, batch size) arrives through ``set_*``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from triaccel_bench import precision
from triaccel_bench.kernels.moments import GradientMoments
from triaccel_bench.kernels.update import FusedSGD
from triaccel_bench.models import Network
from triaccel_bench.schedule import Schedule
from triaccel_bench.settings import LossScaleSettings, MethodSettings, OptimizerSettings

_COUNTERS = (
    "loss_sum",
    "loss_samples",
    "correct",
    "samples",
    "samples_applied",
    "steps_skipped",
    "consecutive_skips",
    "longest_skip_run",
)
_SUMS = _COUNTERS.index("consecutive_skips")
"""The counters before it add up over steps."""


@dataclass(frozen=True)
class Reading:
    """What one host read-back brings: cumulative counters, statistics, loss scale and learning rate."""

    loss_sum: float
    """Sum over samples of the losses that were finite."""
    loss_samples: int
    correct: int
    samples: int
    samples_applied: int
    steps_skipped: int
    consecutive_skips: int
    """Skipped steps up to now without an applied one between."""
    longest_skip_run: int
    learning_rate: float
    loss_scale: float
    variance: tuple[float, ...] | None
    """v_l(t), the EMA over applied steps; ``None`` before the first one or without statistics."""


class Engine:
    """Owns the optimizer state, the loss scale and the counters of one network.

    Args:
        network: on its device, already prepared by ``precision.prepare``.
        kernels: ``triton`` or ``torch``.
        executed: the executed plan, one dtype a layer.
    """

    def __init__(
        self,
        network: Network,
        method: MethodSettings,
        optimizer: OptimizerSettings,
        schedule: Schedule,
        kernels: str,
        executed: Sequence[str],
    ) -> None:
        self.network = network
        self.schedule = schedule
        self._scaling: LossScaleSettings = method.loss_scale
        self._normalise = method.precision.normalise_by_batch
        self._initial_batch = method.batch.initial
        self._parameters, layer_of = _ordered_parameters(network)
        device = self._parameters[0].device
        layers = len(network.layers)
        self._track = method.precision.adaptive
        sizes = [parameter.numel() for parameter in self._parameters]
        self.moments = GradientMoments(sizes, layers, device, kernels, method.precision.beta, self._track)
        self.sgd = FusedSGD(self._parameters, layer_of, kernels, optimizer.momentum, optimizer.weight_decay)
        self._rates = torch.ones(layers, device=device)
        self._scale = torch.full((), self._scaling.initial, device=device)
        self._growth = torch.zeros((), dtype=torch.int32, device=device)
        self._one = torch.ones((), device=device)
        self._rate_factor = torch.ones((), device=device)
        self._learning_rate = torch.zeros((), device=device)
        self._counters = torch.zeros(len(_COUNTERS), dtype=torch.float64, device=device)
        self._scaled = False
        self.set_plan(executed)

    def set_plan(self, executed: Sequence[str]) -> None:
        """Put an executed plan in force; the loss is scaled from then on if any layer runs in FP16."""
        precision.apply(self.network, executed)
        self._scaled = "fp16" in executed

    def set_rates(self, rates: Sequence[float], factor: float) -> None:
        """Layer rate scales (section 3.2) and the factor by which eta_0 follows the batch size."""
        rates = torch.tensor(rates, dtype=torch.float32)
        if self._rates.is_cuda:
            # A pinned source makes the copy asynchronous; the allocator keeps it until the copy is done.
            rates = rates.pin_memory()
        self._rates.copy_(rates, non_blocking=True)
        self._rate_factor.fill_(factor)

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer state (momentum)."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.sgd.momenta)

    def forward_backward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Mean loss and logits; gradients, scaled where FP16 runs, are left in ``.grad``."""
        logits = self.network.module(images)
        loss = functional.cross_entropy(logits, labels)
        (loss * self._scale if self._scaled else loss).backward()
        return loss.detach(), logits.detach()

    def step(self, images: Tensor, labels: Tensor) -> None:
        """One whole training step; nothing in it waits for the device."""
        loss, logits = self.forward_backward(images, labels)
        self.update(loss, logits, labels)

    @torch.no_grad()
    def update(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Statistics, weights, loss scale and counters from the gradients that ``forward_backward`` left."""
        batch = labels.shape[0]
        gradients = [parameter.grad for parameter in self._parameters]
        inverse_scale = self._scale.reciprocal() if self._scaled else self._one
        batch_factor = self._one * (batch / self._initial_batch if self._normalise else 1.0)
        self.moments.update(gradients, inverse_scale, batch_factor)
        skipped = self.moments.nonfinite
        # The middle of the batch, so that neither the first nor the last step has a rate of zero.
        position = self._counters[_COUNTERS.index("samples_applied")] + 0.5 * batch
        self._learning_rate = self.schedule(position) * self._rate_factor
        self.sgd.step(gradients, self._learning_rate, self._rates, inverse_scale, skipped)
        if self._scaled:
            s = self._scaling
            torch._amp_update_scale_(
                self._scale, self._growth, skipped, s.growth_factor, s.backoff_factor, s.growth_interval
            )
        self._count(loss, logits, labels, skipped[0].double())
        for parameter in self._parameters:
            parameter.grad = None

    def _count(self, loss: Tensor, logits: Tensor, labels: Tensor, skipped: Tensor) -> None:
        batch = labels.shape[0]
        counted = torch.isfinite(loss).double() * batch
        correct = (logits.argmax(1) == labels).sum()
        sums, run, longest = self._counters[:_SUMS], self._counters[_SUMS], self._counters[_SUMS + 1]
        run = (run + skipped) * skipped
        longest = torch.maximum(longest, run)
        ahead = torch.stack(
            (
                torch.nan_to_num(loss.double(), 0.0, 0.0, 0.0) * counted,
                counted,
                correct.double(),
                torch.full_like(counted, batch),
                (1.0 - skipped) * batch,
                skipped,
            )
        )
        self._counters = torch.cat((sums + ahead, run[None], longest[None]))

    def read(self) -> Reading:
        """The one host read-back of a control step: everything in a single copy."""
        parts = [self._counters, self._learning_rate[None].double(), self._scale[None].double()]
        if self._track:
            parts += [self.moments.updates.double(), self.moments.ema.double()]
        values = torch.cat(parts).tolist()
        counters = dict(zip(_COUNTERS, values, strict=False))
        loss_sum = counters.pop("loss_sum")
        learning_rate, loss_scale, *statistics = values[len(_COUNTERS) :]
        variance = tuple(statistics[1:]) if self._track and statistics[0] > 0 else None
        return Reading(
            loss_sum=loss_sum,
            **{name: int(value) for name, value in counters.items()},
            learning_rate=learning_rate,
            loss_scale=loss_scale,
            variance=variance,
        )

    @torch.no_grad()
    def evaluate(self, batches) -> tuple[float, int, int]:
        """(sum of losses, correct, samples) over ``(images, labels)`` batches: evaluation mode, the plan's casts."""
        module = self.network.module
        module.eval()
        total = torch.zeros(2, dtype=torch.float64, device=self._counters.device)
        samples = 0
        try:
            for images, labels in batches:
                logits = module(images)
                loss = functional.cross_entropy(logits, labels, reduction="sum")
                total += torch.stack((loss.double(), (logits.argmax(1) == labels).sum().double()))
                samples += labels.shape[0]
        finally:
            module.train()
        loss_sum, correct = total.tolist()
        return loss_sum, int(correct), samples


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
