"""Eigenvalues of each layer's Fisher block (section 3.2) from one forward and one backward pass of the probe batch.

For logits ``z_i`` of sample ``i`` and a label ``y_i`` drawn from the model's own ``softmax(z_i)``, the block of a
layer with weight ``w`` is ``F = (1/N) sum_i g_i g_i^T``, ``g_i = d(-log softmax(z_i)[y_i]) / dw``: an unbiased
estimate of the Fisher information, which is the Hessian's Gauss-Newton part. True labels instead of drawn ones would
give the "empirical Fisher", which ranks the layers differently (Kunstner et al., 2019). ``F`` is ``(n, n)`` and of
rank ``N`` at most; its other eigenvalues are those of the ``(N, N)`` Gram matrix of the ``g_i``, which ``gram`` takes
from what a layer read and what came back to it. BatchNorm is in evaluation mode, Dropout off. Products may be TF32
where a card has it: they are off by a thousandth, an eigenvalue read from 32 samples by far more.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from triaccel_bench import life
from triaccel_bench.gram import check_layers, gram
from triaccel_bench.graphs import Replayed
from triaccel_bench.kernels.loss import sampled_gradient
from triaccel_bench.probe import (
    Borrow,
    Probe,
    as_it_is,
    borrowed,
    classifier_output,
    leading,
    output_gradients,
    started,
    tapped,
    weight_gradients,
    weight_names,
    wide_dtype,
)
from triaccel_bench.resumption import CheckpointError, checked, section
from triaccel_bench.settings import CurvatureSettings

VERIFIED = 1e-3
"""Relative difference of a gradient's square norm by autograd and by samples that rounding does not reach."""


class FisherEstimator:
    """Top-k spectra of the Fisher blocks of all named layers at once.

    Args:
        module: the model, from (N, C, H, W) images to (N, classes) logits; neither copied nor changed. A sample's
            logits must not depend on the other samples.
        layers: names and modules, ``nn.Conv2d`` or ``nn.Linear``, each called once a forward pass.
        settings: ``k``.
        seed: of the drawn labels; no global generator is touched.
        kernels: the backend, ``triton`` or ``torch``, that draws labels and takes eigenvalues.
        trusted: whether each layer's weight is known to be used as it is, and by the layer's call alone. Of other
            models the first probe asks autograd as well.
        now: clock in seconds.

    Raises:
        ValueError: a layer of another kind, or whose weight is no FP32 or FP64 parameter of ``module``.
    """

    def __init__(
        self,
        module: nn.Module,
        layers: Mapping[str, nn.Module],
        settings: CurvatureSettings,
        seed: int,
        borrow: Borrow = as_it_is,
        kernels: str = "torch",
        trusted: bool = False,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        names = weight_names(module, layers)
        check_layers(layers)
        self._layers = dict(layers)
        self._sizes = [layer.weight.numel() for layer in layers.values()]
        self._k = settings.k
        self._kernels = kernels
        self._random = random.Random(seed)
        self._now = now
        around = partial(borrowed, module, borrow)
        self._matrices = Replayed(partial(_gram_matrices, module, self._layers, kernels), partial(around, tf32=True))
        verify = partial(_verify, module, self._layers, names, kernels, around)
        self._unverified: Callable[[Tensor, Tensor], bool] | None = None if trusted else verify

    @property
    def eager_reason(self) -> str | None:
        return self._matrices.eager_reason

    def release(self) -> None:
        self._matrices.release()

    def state_dict(self) -> dict[str, Any]:
        """Where the stream of drawn labels is."""
        return {"random": self._random.getstate()}

    def load_state_dict(self, saved: object) -> None:
        """Draw on from there. Raises ``CheckpointError`` where that is none."""
        state = checked(tuple[int, tuple[int, ...], float | None], section(saved, "random"), "stream of labels")
        try:
            self._random.setstate(state)
        except (ValueError, OverflowError) as error:
            raise CheckpointError(f"its stream of labels is not as expected ({error})") from None

    def probe(self, images: Tensor, labels: Tensor, budget_seconds: float | None, pool: Any = None) -> Probe:
        """Refresh every layer; as ``Estimator.probe``. ``labels`` are not read.

        With a ``pool`` the pass is captured at the first probe and replayed from then on. Waits for
        the device twice: before it begins, so that earlier work is not charged to it, and for its result.
        """
        device = images.device
        begun = started(device, self._now)
        # Of 24 bits, so that none is rounded up to 1.
        draws = torch.tensor([self._random.getrandbits(24) / 2**24 for _ in images], dtype=torch.float32).to(device)
        if self._unverified is not None and self._unverified(images, draws):
            self._unverified = None
        matrices = self._matrices(images, draws, pool=pool)
        spectra = leading(matrices / len(images), self._sizes, self._k, self._kernels)
        return Probe(tuple(self._layers), spectra, self._now() - begun, 1, self._matrices.peak_bytes)


def _gram_matrices(
    module: nn.Module, layers: Mapping[str, nn.Module], kernels: str, images: Tensor, draws: Tensor
) -> Tensor:
    """(L, N, N), of zeros for a layer that is not called."""
    with torch.enable_grad(), tapped(layers, len(images)) as taps:
        logits = classifier_output(module, images)
    direction = sampled_gradient(logits.detach(), draws, backend=kernels)
    returned = dict(zip(taps, output_gradients(logits, direction, taps.values()), strict=True))
    shape = len(layers), len(images), len(images)
    matrices = torch.zeros(shape, dtype=wide_dtype(layers), device=logits.device)
    for matrix, (name, layer) in zip(matrices, layers.items(), strict=True):
        life.sign()
        dy = returned.pop(name, None)
        if dy is not None:
            matrix.copy_(gram(layer, taps.pop(name).x, dy))
    return matrices


def _verify(
    module: nn.Module,
    layers: Mapping[str, nn.Module],
    names: Mapping[str, str],
    kernels: str,
    around: Callable[[], AbstractContextManager],
    images: Tensor,
    draws: Tensor,
) -> bool:
    """Raise a ValueError that names a layer whose ``sum_ij G[i, j]`` is not ``|sum_i g_i|^2``, by autograd.

    Then its weight is used elsewhere too (tied, in a function), or changed on its way into the layer.
    Returns False where they are no numbers, which tells nothing.
    """
    with around():
        matrices = _gram_matrices(module, layers, kernels, images, draws).double().cpu()
        gradients = weight_gradients(
            module, names, images, lambda logits: sampled_gradient(logits, draws, backend=kernels)
        )
    for name, matrix in zip(layers, matrices, strict=True):
        found, expected = float(matrix.sum()), float(gradients[name].double().square().sum())
        if not math.isfinite(found + expected):
            return False
        if abs(found - expected) > VERIFIED * (expected + float(matrix.trace())):
            raise ValueError(
                f"layer {name}: expected its weight to be used as it is and by its own call alone, got a gradient of "
                f"square norm {expected:.6g} where its calls explain {found:.6g}; "
                "take method.curvature.estimator=hessian and product=exact"
            )
    return True
