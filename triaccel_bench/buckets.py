"""The update of a step in a few buckets, each within the backward pass as soon as its gradients are there.

At no time do all gradients live at once. A bucket may change its weights while the backward pass goes
on: autograd calls a leaf's accumulator only after every node that leads there, and it is these nodes
that read the weight for the gradients of their inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from triaccel_bench.kernels.moments import GradientMoments
from triaccel_bench.kernels.update import FusedSGD, Window

BUCKETS = 4
"""A bucket costs two launches and holds its share of the gradients back."""


class _Bucket(NamedTuple):
    members: list[int]
    """Indices of its parameters, ascending."""
    moments: GradientMoments
    sgd: FusedSGD


def deal(sizes: Sequence[int], order: Sequence[int], buckets: int = BUCKETS) -> list[list[int]]:
    """Indices of ``sizes`` in that order, cut before a bucket would exceed its share; ascending in each bucket.

    The share is a ``buckets``-th of all elements, or the largest tensor. Fewer than twice ``buckets`` come out.
    """
    share = max(-(-sum(sizes) // buckets), *sizes)
    dealt: list[list[int]] = [[]]
    filled = 0
    for index in order:
        if dealt[-1] and filled + sizes[index] > share:
            dealt.append([])
            filled = 0
        dealt[-1].append(index)
        filled += sizes[index]
    return [sorted(members) for members in dealt]


class Buckets:
    """Stands in for a step's ``GradientMoments`` and its ``FusedSGD``, whose work it does within ``updating``.

    Each bucket has a flag of its own: one with an inf or NaN in its gradients changes neither its weights
    nor its statistics, whatever the others do.

    Args:
        parameters, layer_of, momentum, weight_decay: as ``FusedSGD`` takes them.
        layers: the first ``layers`` parameters are the layers' weights.
        order: indices of parameters in which their gradients are expected. Any order is right; the closer
            to the truth, the earlier a bucket is complete.
        kernels: ``triton`` or ``torch``.
        beta, statistics: as ``GradientMoments`` takes them.

    Attributes:
        nonfinite: f32 ``[buckets]``, 1.0 for each whose gradients had an inf or NaN in the last step.
        applied: whether weights may have changed since somebody last set it to False.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        layer_of: Sequence[int],
        layers: int,
        order: Sequence[int],
        kernels: str,
        beta: float,
        statistics: bool,
        momentum: float,
        weight_decay: float,
    ) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        dealt = deal(sizes, order)
        device = parameters[0].device
        self.applied = False
        self.nonfinite = torch.zeros(len(dealt), device=device)
        self._rehearsing = False
        self._skip = torch.ones(1, device=device)
        self._buckets = []
        for place, members in enumerate(dealt):
            weights = sum(index < layers for index in members)
            flag = self.nonfinite[place : place + 1]
            own = [sizes[index] for index in members]
            moments = GradientMoments(own, weights, device, kernels, beta, statistics and weights > 0, nonfinite=flag)
            chosen = [parameters[index] for index in members], [layer_of[index] for index in members]
            self._buckets.append(_Bucket(members, moments, FusedSGD(*chosen, kernels, momentum, weight_decay)))
        self._bucket_of = {index: place for place, members in enumerate(dealt) for index in members}
        found = [index for members in dealt for index in members if index < layers]
        self._place_of_layer = torch.tensor(sorted(range(layers), key=found.__getitem__), device=device)

    @property
    def momenta(self) -> list[Tensor]:
        """The momentum buffers, in the parameters' order."""
        by_index = {i: held for part in self._buckets for i, held in zip(part.members, part.sgd.momenta, strict=True)}
        return [by_index[index] for index in range(len(by_index))]

    @property
    def variance(self) -> Tensor:
        """A copy of what ``GradientMoments.variance`` would be, in the layers' order."""
        return torch.cat([part.moments.variance for part in self._buckets])[self._place_of_layer]

    @property
    def ema(self) -> Tensor:
        """A copy of what ``GradientMoments.ema`` would be, in the layers' order."""
        return torch.cat([part.moments.ema for part in self._buckets])[self._place_of_layer]

    @property
    def updates(self) -> Tensor:
        """int32 ``[1]``, finite steps of the bucket that has had the fewest."""
        return torch.cat([part.moments.updates for part in self._buckets]).amin(0, keepdim=True)

    @property
    def state(self) -> list[Tensor]:
        """All that a step writes and keeps beside weights and momenta, where it stays."""
        return [self.nonfinite, *(tensor for part in self._buckets for tensor in part.moments.state[1:])]

    def set_copies(self, copies: Sequence[Tensor | None], windows: Sequence[Window | None]) -> None:
        """``FusedSGD.set_copies``."""
        for part in self._buckets:
            part.sgd.set_copies(*([values[index] for index in part.members] for values in (copies, windows)))

    def set_momentum_dtypes(self, dtypes: Sequence[torch.dtype]) -> None:
        """``FusedSGD.set_momentum_dtypes``."""
        for part in self._buckets:
            part.sgd.set_momentum_dtypes([dtypes[index] for index in part.members])

    def flush(self) -> None:
        """``FusedSGD.flush``."""
        for part in self._buckets:
            part.sgd.flush()

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Within it updates do all that they do, and need all the memory that they need, but change no weight."""
        self._rehearsing = True
        try:
            yield
        finally:
            self._rehearsing = False

    @contextmanager
    def updating(
        self,
        leaves: Sequence[Tensor],
        settle: Callable[[Sequence[Tensor]], None],
        lr: Tensor,
        rates: Tensor,
        inverse_scale: Tensor,
        batch_factor: Tensor,
    ) -> Iterator[None]:
        """Stands around a forward and a backward pass; when it is left, all weights are updated, all gradients gone.

        Args:
            leaves: for each parameter the tensor that its gradient arrives at, without a gradient so far.
            settle: called before gradients are read, with the leaves that they are expected at.
            lr, rates, inverse_scale: as ``FusedSGD.step`` takes them; constant for the while.
            batch_factor: as ``GradientMoments.update`` takes it.

        Raises:
            ValueError: a leaf has got no gradient.
            RuntimeError: one has got another after its bucket was complete, as by a backward pass within the
                backward pass; that cannot be foreseen.
        """
        missing = [set(part.members) for part in self._buckets]

        @torch.no_grad()
        def run(part: _Bucket) -> None:
            own = [leaves[index] for index in part.members]
            settle(own)
            gradients = part.sgd.gather([leaf.grad for leaf in own])
            part.moments.update(gradients, inverse_scale, batch_factor)
            flag = self._skip if self._rehearsing else part.moments.nonfinite
            self.applied = self.applied or not self._rehearsing
            part.sgd.step(gradients, lr, rates, inverse_scale, flag, part.moments.updates)
            for leaf in own:
                leaf.grad = None

        def arrived(index: int, *_: object) -> None:
            place = self._bucket_of[index]
            if not missing[place]:
                raise RuntimeError(
                    f"parameter {index}: expected all of its gradient at once, got more after its update; "
                    "use method.update.in_backward=false"
                )
            missing[place].discard(index)
            if not missing[place]:
                run(self._buckets[place])

        # Of the accumulators, and not of the leaves: they are called even where a gradient is formed elsewhere. Made
        # anew for each step, because they run on the stream on which they were made.
        nodes = [get_gradient_edge(leaf).node for leaf in leaves]
        handles = [node.register_hook(partial(arrived, index)) for index, node in enumerate(nodes)]
        try:
            yield
            for part, left in zip(self._buckets, missing, strict=True):
                if left:
                    left.clear()
                    run(part)
        finally:
            for handle in handles:
                handle.remove()
