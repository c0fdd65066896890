"""All eigenvalues of each layer's Hessian block at once, where the logits are linear in every layer's weight.

For a network of convolutions, linear layers, BatchNorm in evaluation mode, ReLU and pooling, the logits ``z_i`` of a
sample are a piecewise-linear function of any one layer's weight ``w``, the other weights fixed. Almost everywhere its
second derivative is zero, and the block of the mean cross-entropy's Hessian is its Gauss-Newton part without remainder:

``H = (1/N) sum_i J_i^T (diag(p_i) - p_i p_i^T) J_i``, ``J_i = dz_i / dw`` (classes, n), ``p_i = softmax(z_i)``.

``diag(p) - p p^T = sum_c s_c s_c^T`` with ``s_c = sqrt(p_c) (onehot(c) - p)``, so that ``H`` is ``(1/N) sum r r^T``
over the N x classes rows ``r = J_i^T s_c``, and its eigenvalues other than zero are those of the rows' Gram matrix:
one forward pass, one backward pass for each class and group of layers, and ``gram``. No products with vectors, no
differences, no labels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

from triaccel_bench import life, models
from triaccel_bench.gram import check_layers, gradients, gram, products
from triaccel_bench.graphs import Replayed
from triaccel_bench.lanczos import Spectrum, projections
from triaccel_bench.probe import (
    Borrow,
    Probe,
    Tap,
    as_it_is,
    borrowed,
    classifier_output,
    leading,
    output_gradients,
    started,
    tapped,
    weight_names,
    wide_dtype,
)
from triaccel_bench.settings import MOST_JACOBIAN_ROWS, CurvatureSettings

GROUP_BYTES = 8 * 2**20
"""What may be kept of the backward passes of several layers; others need passes of their own."""

LIMIT_BYTES = 8 * 2**20
"""Temporary memory for the Gram matrix of one layer, at the moment at which most is held."""

STEPS = 32
"""Of Lanczos on a CUDA device, where no dense solver is fast between 32 and a few thousand rows."""

_LINEAR_PIECEWISE = (
    nn.Conv2d, nn.Linear, nn.BatchNorm2d, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.Hardtanh, nn.MaxPool2d, nn.AvgPool2d,
    nn.AdaptiveAvgPool2d,
    nn.Dropout, nn.Identity, nn.Flatten, nn.Sequential, models.ResNet8, torchvision.models.ResNet,
    torchvision.models.resnet.BasicBlock, torchvision.models.resnet.Bottleneck,
)  # fmt: skip
"""Parts whose composition is; each other part, and each subclass that we did not write, may be anything."""


def check_rows(rows: int) -> None:
    """Refuse a Gram matrix that would take longer than the products it replaces."""
    if rows > MOST_JACOBIAN_ROWS:
        raise ValueError(
            f"method.curvature.product=jacobian: expected at most {MOST_JACOBIAN_ROWS} rows (method.curvature.batch x "
            f"classes), got {rows}; lower method.curvature.batch, or take product=exact"
        )


def piecewise_linear(module: nn.Module) -> bool:
    """Whether all parts of ``module`` are known to make its output piecewise linear in each layer's weight.

    Each part and each parameter then stands in one place, and BatchNorm has running statistics.
    """
    parts = list(module.modules())
    known = all(
        type(part) in _LINEAR_PIECEWISE or (isinstance(part, _LINEAR_PIECEWISE) and _ours(type(part))) for part in parts
    )
    # Whatever else takes part in a call could be anything.
    hooks = [hook for part in parts for hook in (*part._forward_hooks.values(), *part._forward_pre_hooks.values())]
    known = known and all(map(_ours, hooks)) and not any("forward" in part.__dict__ for part in parts)
    padded = all(part.padding_mode == "zeros" for part in parts if isinstance(part, nn.Conv2d))
    fixed = all(part.running_mean is not None for part in parts if isinstance(part, nn.BatchNorm2d))
    once = len(list(module.named_modules(remove_duplicate=False))) == len(parts) and len(
        list(module.named_parameters(remove_duplicate=False))
    ) == len(list(module.parameters()))
    return known and padded and fixed and once


def _ours(thing: object) -> bool:
    return getattr(thing, "__module__", "").split(".")[0] == __name__.split(".")[0]


class JacobianEstimator:
    """Top-k spectra of the Hessian blocks of all named layers at once; of the mean cross-entropy alone.

    Args:
        module: a ``piecewise_linear`` classifier; neither copied nor changed.
        layers: names and modules, ``nn.Conv2d`` or ``nn.Linear``, each called once a forward pass.
        settings: ``k``, and ``tolerance`` where Lanczos has to find them.
        now: clock in seconds.

    Raises:
        ValueError: the module is not known to be piecewise linear, or a layer's weight is no FP32 or FP64 parameter.
    """

    def __init__(
        self,
        module: nn.Module,
        layers: Mapping[str, nn.Module],
        settings: CurvatureSettings,
        borrow: Borrow = as_it_is,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        weight_names(module, layers)
        check_layers(layers)
        if not piecewise_linear(module):
            raise ValueError(
                "method.curvature.product=jacobian: expected a network of convolutions, linear layers, BatchNorm, ReLU "
                f"and pooling, each in one place, got {type(module).__name__} with a part not known as one of them; "
                "take product=exact, or auto"
            )
        self._layers = dict(layers)
        self._sizes = [layer.weight.numel() for layer in layers.values()]
        self._k, self._tolerance = settings.k, settings.tolerance
        self._now = now
        self._facts: dict[str, int] = {}
        reading = partial(_projected_gram_matrices, module, self._layers, self._facts)
        self._projections = Replayed(reading, partial(borrowed, module, borrow))

    @property
    def eager_reason(self) -> str | None:
        return self._projections.eager_reason

    def release(self) -> None:
        self._projections.release()

    def state_dict(self) -> dict[str, Any]:
        """Nothing: each probe stands by itself."""
        return {}

    def load_state_dict(self, saved: object) -> None:
        """There is nothing to go on from."""

    def probe(self, images: Tensor, labels: Tensor, budget_seconds: float | None, pool: Any = None) -> Probe:
        """Refresh every layer; as ``Estimator.probe``. ``labels`` are not read: ``H`` does not depend on them here."""
        device = images.device
        begun = started(device, self._now)
        matrices = self._projections(images, pool=pool).cpu() / len(images)
        spectra = leading(matrices, self._sizes, self._k)
        if self._facts["rows"] > matrices.shape[1]:
            # The last step's gain tells how far the largest eigenvalue still is from its own.
            before = leading(matrices[:, :-1, :-1].contiguous(), self._sizes, 1)
            spectra = tuple(map(self._judged, spectra, before))
        seconds, passes = self._now() - begun, self._facts["passes"]
        return Probe(tuple(self._layers), spectra, seconds, passes, self._projections.peak_bytes)

    def _judged(self, found: Spectrum, before: Spectrum) -> Spectrum:
        if not found.eigenvalues:
            return found
        gain = found.eigenvalues[0] - before.eigenvalues[0]
        return replace(found, converged=gain <= self._tolerance * found.eigenvalues[0])


def _projected_gram_matrices(
    module: nn.Module, layers: Mapping[str, nn.Module], facts: dict[str, int], images: Tensor
) -> Tensor:
    """(L, rows, rows) with rows = classes x N, or less where they are projected; of zeros for a layer not called.

    ``facts`` gets the number of rows and of backward passes.
    """
    with torch.enable_grad(), tapped(layers, len(images)) as taps:
        logits = classifier_output(module, images)
    probabilities = logits.detach().softmax(1)
    classes = logits.shape[1]
    rows = classes * len(images)
    check_rows(rows)
    certain = torch.eye(classes, dtype=logits.dtype, device=logits.device)
    directions = probabilities.T.sqrt()[..., None] * (certain[:, None] - probabilities)
    found: list[Tensor] = []
    # The first layers hold the largest images: they come last, when what autograd saved can go.
    groups = list(_groups(layers, taps, rows))[::-1]
    facts.update(rows=rows, passes=classes * len(groups))
    for names in groups:
        read = {name: taps.pop(name) for name in names if name in taps}
        kept = {name: _Rows(layers[name], tap, classes) for name, tap in read.items()}
        for index in range(classes if kept else 0):
            life.sign()
            again = index + 1 < classes or names is not groups[-1]
            returned = output_gradients(logits, directions[index], read.values(), again)
            for each, dy in zip(kept.values(), returned, strict=True):
                each.add(index, dy)
        matrices = torch.zeros(len(names), rows, rows, dtype=wide_dtype(layers), device=logits.device)
        for place, name in enumerate(names):
            if name in kept:
                matrices[place] = kept.pop(name).products()
        # At once: those of all layers together would be a tenth of a small network's memory.
        found.append(_projected(matrices))
    return torch.cat(found[::-1])


def _projected(matrices: Tensor) -> Tensor:
    return projections(matrices, STEPS) if matrices.is_cuda else matrices


def _groups(layers: Mapping[str, nn.Module], taps: Mapping[str, Tap], rows: int) -> Iterator[list[str]]:
    """The layers in their order, as many at a time as ``GROUP_BYTES`` hold what is kept of; at least one."""
    group: list[str] = []
    left = GROUP_BYTES
    for name, layer in layers.items():
        need = rows * min(_bytes_of_a_row(layer, taps[name])) if name in taps else 0
        if group and need > left:
            yield group
            group, left = [], GROUP_BYTES
        group.append(name)
        left -= need
    yield group


def _bytes_of_a_row(layer: nn.Module, tap: Tap) -> tuple[int, int]:
    """Of the row itself, and of what came back instead."""
    return layer.weight.numel() * tap.x.element_size(), tap.output_elements * _narrow(tap.x.dtype).itemsize


def _narrow(dtype: torch.dtype) -> torch.dtype:
    # The rounding of single elements averages out over a row.
    return torch.bfloat16 if dtype == torch.float32 else dtype


@contextmanager
def _tensor_cores() -> Iterator[None]:
    """TF32, whose rounding averages out over a row as well; the passes themselves have none of it."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


class _Rows:
    """What is kept of one layer's backward passes: the rows themselves, or, if that is less, what came back."""

    def __init__(self, layer: nn.Module, tap: Tap, classes: int) -> None:
        self._layer, self._x, self._classes = layer, tap.x, classes
        row, returned = _bytes_of_a_row(layer, tap)
        self._directly = row <= returned
        self._held: Tensor | None = None

    def add(self, index: int, dy: Tensor | None) -> None:
        if dy is None:
            return
        count = len(dy)
        value = gradients(self._layer, self._x, dy) if self._directly else dy
        if self._held is None:
            shape = count * self._classes, *value.shape[1:]
            dtype = value.dtype if self._directly else _narrow(value.dtype)
            last = value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last)
            layout = torch.channels_last if last else torch.contiguous_format
            self._held = torch.empty(shape, dtype=dtype, device=value.device, memory_format=layout)
        self._held[index :: self._classes] = value

    def products(self) -> Tensor:
        if self._held is None:
            return self._x.new_zeros(())
        with _tensor_cores():
            if self._directly:
                return products(self._held)
            return gram(self._layer, self._x, self._held, limit=LIMIT_BYTES)
