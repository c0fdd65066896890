"""Curvature of a network layer by layer (section 3.2), whichever estimator reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from triaccel_bench.fisher import FisherEstimator
from triaccel_bench.hessian import HessianEstimator
from triaccel_bench.jacobian import JacobianEstimator, check_rows, piecewise_linear
from triaccel_bench.probe import Borrow, Estimator, as_it_is, borrowed
from triaccel_bench.settings import MOST_JACOBIAN_ROWS, CurvatureSettings


def build(
    module: nn.Module,
    layers: Mapping[str, nn.Module],
    settings: CurvatureSettings,
    seed: int,
    borrow: Borrow = as_it_is,
    kernels: str = "torch",
    rows: int | None = None,
    trusted: bool = False,
) -> Estimator:
    """The estimator that ``settings`` ask for; of the mean cross-entropy of (N, classes) logits.

    ``estimator=fisher`` is ``FisherEstimator``. ``estimator=hessian`` goes by ``product``: ``jacobian``
    is ``JacobianEstimator``, ``exact`` and ``difference`` are ``HessianEstimator``, and ``auto`` the
    first of them wherever it is exact and its matrices are known to be small.

    Args:
        rows: samples of a probe times classes; ``None``: not known.
        trusted: as ``FisherEstimator`` takes it.

    Raises:
        ValueError: as the estimator does.
    """
    if settings.estimator == "fisher":
        return FisherEstimator(module, layers, settings, seed, borrow, kernels, trusted)
    if settings.product == "jacobian":
        check_rows(rows or 0)
        return JacobianEstimator(module, layers, settings, borrow)
    if settings.product == "auto" and rows is not None and rows <= MOST_JACOBIAN_ROWS and piecewise_linear(module):
        return JacobianEstimator(module, layers, settings, borrow)
    return HessianEstimator(module, layers, settings, seed, borrow=borrow)


@dataclass(frozen=True)
class LayerEigenvalues:
    """Spectra of L layers at one moment.

    Attributes:
        values: float64 (L, k), descending; NaN beyond the weight's elements and where nothing could be read.
        converged: bool (L,).
        seconds: what reading them took.
    """

    values: Tensor
    converged: Tensor
    seconds: float


def eigenvalues(
    module: nn.Module,
    layers: Mapping[str, nn.Module],
    images: Tensor,
    labels: Tensor,
    settings: CurvatureSettings,
    seed: int = 0,
    borrow: Borrow = as_it_is,
    kernels: str = "torch",
) -> LayerEigenvalues:
    """Read every layer once, whatever it takes; ``module`` is as before afterwards.

    Args:
        borrow: needed where layers may compute in another dtype than that of their weights.
        images, labels: (N, C, H, W) and (N,), on the model's device; ``settings.batch`` is not read.
    """
    rows = None
    if settings.estimator == "hessian" and settings.product in ("auto", "jacobian"):
        with torch.no_grad(), borrowed(module, borrow):
            logits = module(images[:1])
        rows = len(images) * logits.shape[1] if logits.dim() == 2 else None
    probe = build(module, layers, settings, seed, borrow, kernels, rows).probe(images, labels, None)
    spectra = dict(zip(probe.layers, probe.spectra, strict=True))
    values = torch.full((len(layers), settings.k), float("nan"), dtype=torch.float64)
    for row, name in zip(values, layers, strict=True):
        found = spectra[name].eigenvalues
        row[: len(found)] = torch.tensor(found, dtype=torch.float64)
    return LayerEigenvalues(values, torch.tensor([spectra[name].converged for name in layers]), probe.seconds)
