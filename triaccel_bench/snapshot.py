"""Small state as it was before a step, for a step that cannot be finished."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor


class Snapshot:
    """Copies of tensors, and of the generators that a step on their device draws from.

    Args:
        tensors: written in place by whoever owns them; small, for each has a copy from now on.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        # By dtype: torch copies many tensors in one launch only if they have one.
        self._tensors = sorted(tensors, key=lambda tensor: str(tensor.dtype))
        self._copies = [tensor.clone() for tensor in self._tensors]
        self._device = self._tensors[0].device
        self._generators: tuple[Tensor, ...] | None = None

    @torch.no_grad()
    def take(self) -> None:
        self._copy(self._tensors, self._copies)
        on_card = (torch.cuda.get_rng_state(self._device),) if self._device.type == "cuda" else ()
        self._generators = torch.get_rng_state(), *on_card

    @torch.no_grad()
    def restore(self) -> None:
        """Nothing, before the first ``take``."""
        if self._generators is None:
            return
        self._copy(self._copies, self._tensors)
        torch.set_rng_state(self._generators[0])
        for state in self._generators[1:]:
            torch.cuda.set_rng_state(state, self._device)

    @staticmethod
    def _copy(sources: list[Tensor], targets: list[Tensor]) -> None:
        pairs = zip(sources, targets, strict=True)
        for _, group in itertools.groupby(pairs, key=lambda pair: pair[0].dtype):
            group_sources, group_targets = zip(*group)
            torch._foreach_copy_(list(group_targets), list(group_sources))
