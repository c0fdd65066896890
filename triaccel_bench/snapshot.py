"""Small state as it was before a step, for a step that cannot be finished."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor


def generators(device: torch.device) -> list[Tensor]:
    """States of torch's global generators that a step on this device draws from: the host's, and the device's own."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def set_generators(device: torch.device, states: Sequence[Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state, device)


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
        self._generators: list[Tensor] | None = None

    @torch.no_grad()
    def take(self) -> None:
        self._copy(self._tensors, self._copies)
        self._generators = generators(self._device)

    @torch.no_grad()
    def restore(self) -> None:
        """Nothing, before the first ``take``."""
        if self._generators is None:
            return
        self._copy(self._copies, self._tensors)
        set_generators(self._device, self._generators)

    @staticmethod
    def _copy(sources: list[Tensor], targets: list[Tensor]) -> None:
        pairs = zip(sources, targets, strict=True)
        for _, group in itertools.groupby(pairs, key=lambda pair: pair[0].dtype):
            group_sources, group_targets = zip(*group)
            torch._foreach_copy_(list(group_targets), list(group_sources))
