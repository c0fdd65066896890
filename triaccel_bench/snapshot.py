"""Small state as it was before a step, for a step that cannot be finished."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Snapshot:
    """Copies of tensors, and of the generators that a step on their device draws from.

    Args:
        tensors: written in place by whoever owns them; small, for each has a copy from now on.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        self._copies = [tensor.clone() for tensor in self._tensors]
        self._device = self._tensors[0].device
        self._generators: tuple[Tensor, ...] | None = None

    @torch.no_grad()
    def take(self) -> None:
        torch._foreach_copy_(self._copies, self._tensors)
        on_card = (torch.cuda.get_rng_state(self._device),) if self._device.type == "cuda" else ()
        self._generators = torch.get_rng_state(), *on_card

    @torch.no_grad()
    def restore(self) -> None:
        """Nothing, before the first ``take``."""
        if self._generators is None:
            return
        torch._foreach_copy_(self._tensors, self._copies)
        torch.set_rng_state(self._generators[0])
        for state in self._generators[1:]:
            torch.cuda.set_rng_state(state, self._device)
