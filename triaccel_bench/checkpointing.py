"""Activation checkpointing: a block keeps only its input for the backward pass, and is run again there.

The second run is the first one over again, bit for bit, because it draws and counts nothing: random numbers
are handed on from the first run (``drawn``), and whoever keeps statistics of batches asks whether this one
is known already (``recomputing``). So no generator's state is set back, as ``torch.utils.checkpoint`` would do
and a CUDA graph capture forbids. What autograd wants of a block comes from the second run, which starts
when it asks for the first of it, and goes tensor by tensor when autograd lets go of it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class Checkpointed:
    """Mixin of a block whose computation is ``run``; training passes are checkpointed if ``checkpointing`` is set.

    ``run`` must do the same twice, apart from what it asks ``drawn`` for and does unless ``recomputing``.
    A tuple that is handed to the block is handed to ``run`` item by item.
    """

    checkpointing = False

    def forward(self, x: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        inputs = x if isinstance(x, tuple) else (x,)
        # Without gradients nothing is kept anyway; in evaluation a curvature probe may differentiate twice.
        if not (self.checkpointing and self.training and torch.is_grad_enabled()) or _here.call is not None:
            return self.run(*inputs)
        return _Call(self.run).first(*inputs)


def switch(module: nn.Module, on: bool | int) -> None:
    """Set ``checkpointing`` of every block of ``module`` that can be checkpointed, or of so many first ones alone."""
    blocks = [block for block in module.modules() if isinstance(block, Checkpointed)]
    count = len(blocks) * on if isinstance(on, bool) else on
    for place, block in enumerate(blocks):
        block.checkpointing = place < count


def switched_on(module: nn.Module) -> bool:
    """Whether any block of ``module`` is checkpointed."""
    return any(isinstance(block, Checkpointed) and block.checkpointing for block in module.modules())


def recomputing() -> bool:
    """Whether the caller runs a second time for a backward pass."""
    return _here.call is not None and _here.call.again


def drawn(draw: Callable[[], Tensor]) -> Tensor:
    """What ``draw`` returns; where a block is run again, what it returned in the first run."""
    return draw() if _here.call is None else _here.call.drawn(draw)


@contextmanager
def keeping(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Iterator[None]:
    """Let whatever checkpointing keeps go through ``pack``, as ``saved_tensors_hooks`` does with what autograd saves.

    Those hooks do not see it: inside a checkpointed block autograd asks checkpointing itself.
    """
    global _keeper
    outer, _keeper = _keeper, (pack, unpack)
    try:
        yield
    finally:
        _keeper = outer


_keeper: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] = (Tensor.detach, lambda tensor: tensor)
"""Not a context variable: torch runs backward passes on a thread of its own."""


class _Here(threading.local):
    call: _Call | None = None
    """The call of a checkpointed block that this thread is in."""


_here = _Here()


class _Place:
    """Stands for one tensor that autograd saved; it lives as long as autograd would keep the tensor."""

    __slots__ = ("__weakref__", "kept")

    def __init__(self) -> None:
        self.kept: Any = None


class _Call:
    """One call of a block: what it was given and drew, and the places of what autograd saved of it."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self.again = False
        self._run = run
        self._keep, self._kept = _keeper
        self._inputs: list[tuple[Any, bool]] = []
        self._draws: list[Any] = []
        self._places: list[weakref.ref[_Place]] = []
        self._turn = 0

    def first(self, *inputs: Tensor) -> Any:
        self._inputs = [(self._keep(x), x.requires_grad) for x in inputs]
        with self._entered(), saved_tensors_hooks(self._reserve, self._fetch):
            return self._run(*inputs)

    def drawn(self, draw: Callable[[], Tensor]) -> Tensor:
        if self.again:
            self._turn += 1
            return self._kept(self._draws[self._turn - 1])
        value = draw()
        self._draws.append(self._keep(value))
        return value

    @contextmanager
    def _entered(self) -> Iterator[None]:
        outer, _here.call = _here.call, self
        try:
            yield
        finally:
            _here.call = outer

    def _reserve(self, tensor: Tensor) -> _Place:
        place = _Place()
        self._places.append(weakref.ref(place))
        return place

    def _fetch(self, place: _Place) -> Tensor:
        if place.kept is None:
            self._recompute()
        return self._kept(place.kept)

    def _recompute(self) -> None:
        found = 0

        def fill(tensor: Tensor) -> None:
            nonlocal found
            place = self._places[found]() if found < len(self._places) else None
            found += 1
            if place is not None:
                place.kept = self._keep(tensor)

        self.again, self._turn = True, 0
        try:
            inputs = [self._kept(kept).detach().requires_grad_(wanted) for kept, wanted in self._inputs]
            # The graph of this run is let go at once: it is there to save what the first one would have saved.
            with torch.enable_grad(), self._entered(), saved_tensors_hooks(fill, _nothing):
                self._run(*inputs)
        finally:
            self.again = False
        if found != len(self._places):
            raise RuntimeError(
                f"a checkpointed block: expected {len(self._places)} tensors to be saved when it is run again for its "
                f"backward pass, got {found}; its run must do the same twice"
            )
        # The input is from now on kept by whoever saved it.
        self._inputs, self._draws = [], []


def _nothing(_: None) -> Tensor:
    raise RuntimeError("expected no backward pass through a block's second run, got one")
