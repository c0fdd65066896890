"""Starting weights of a model, from torchvision or a file."""

from __future__ import annotations

from pathlib import Path

import torch
import torchvision
from torch import Tensor, nn


class WeightsError(ValueError):
    """A state dict that does not fit the model; the message names the file and the first mismatch."""


def load(module: nn.Module, chosen: str, name: str, head: str) -> None:
    """Load every tensor but a classifier made for another number of classes.

    Args:
        chosen: ``model.weights``: none, imagenet, or a file with a state dict.
        name: torchvision's, of the architecture.
        head: what the names of the classifier's tensors begin with.

    Raises:
        WeightsError: the file is none, or does not fit.
    """
    if chosen == "none":
        return
    if chosen == "imagenet":
        found = torchvision.models.get_model_weights(name).DEFAULT
        _load(module, found.get_state_dict(progress=False, check_hash=True), head, "ImageNet weights")
    else:
        _load(module, _file_state(Path(chosen)), head, chosen)


def _file_state(path: Path) -> dict[str, Tensor]:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise WeightsError(f"model.weights={path}: expected a state dict saved by torch.save; {error}") from None


def _load(module: nn.Module, state: dict[str, Tensor], head: str, source: str) -> None:
    own = module.state_dict()
    fits = {
        key: value
        for key, value in state.items()
        if not (key.startswith(head) and key in own and own[key].shape != value.shape)
    }
    missing = sorted(key for key in own.keys() - fits.keys() if not key.startswith(head))
    unfit = sorted(
        key for key, value in fits.items() if key not in own or own[key].shape != getattr(value, "shape", None)
    )
    if missing or unfit:
        raise WeightsError(
            f"{source}: expected the tensors of {type(module).__name__}; "
            f"{len(missing)} missing {missing[:1]}, {len(unfit)} unknown or of another shape {unfit[:1]}"
        )
    module.load_state_dict(fits, strict=False)
