"""Largest eigenvalues of each layer's block of the loss Hessian (section 3.2); borrows the model and leaves no trace.

For a layer's weight ``w`` and the mean loss ``L`` of one probe batch, the block is
``H = d2L / dw2`` of shape ``(n, n)``, ``n = w.numel()``, with BatchNorm in evaluation mode and
Dropout off. The paper's power iteration finds the eigenvalue of largest magnitude, which may be
negative and then says nothing about steepness; Lanczos finds the algebraically largest ones
from the same Hessian-vector products, in fewer of them.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from triaccel_bench.graphs import CaptureError, Pool, Replayed, clear_workspaces
from triaccel_bench.lanczos import Product, Spectrum, lanczos, most_products, unit
from triaccel_bench.probe import Borrow, Probe, as_it_is, detached, leaving_no_trace, started, weight_names
from triaccel_bench.resumption import CheckpointError, checked, restore, section
from triaccel_bench.settings import CurvatureSettings

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]

WARM_START_NOISE = 0.1
"""Norm of the random part of a warm start, relative to the kept vector.

A kept vector that is still an eigenvector, but no longer the top one, would pass the residual
test at once; the random part reaches every direction, at a cost of a product or two when k is small.
"""

RELATIVE_STEP = {torch.float32: 1e-5, torch.float64: 1e-6}
"""Step of a gradient difference relative to the weight's norm.

A much larger step truncates, a much smaller one cancels; tests hold these against dense Hessians.
"""


def mean_cross_entropy(module: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of ``images`` (N, C, H, W) and ``labels`` (N,), in FP32, or FP64 where logits are."""
    logits = module(images)
    return nn.functional.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), labels)


_SMOOTH = nn.SiLU, nn.GELU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.ELU, nn.CELU, nn.LogSigmoid, nn.Softsign
_KINKED = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.RReLU, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Hardshrink,
    nn.Softshrink, nn.SELU, nn.Threshold, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AdaptiveMaxPool2d,
)  # fmt: skip


def _smooth(module: nn.Module) -> bool:
    """Whether its activations are known, and have no kink that a difference of gradients would step over."""
    parts = list(module.modules())
    return any(isinstance(part, _SMOOTH) for part in parts) and not any(isinstance(part, _KINKED) for part in parts)


class HessianEstimator:
    """Top-k spectra of the Hessian blocks of named layers, a few layers at a time.

    Args:
        module: the model; neither copied nor changed.
        layers: names and modules whose ``weight`` is a parameter of ``module``.
        settings: ``k``, ``iterations``, ``tolerance`` and ``product``. ``exact`` products are
            double backward, ``difference`` ones ``(g(w + e v) - g(w - e v)) / 2e`` of the
            gradient ``g``: far cheaper where double backward is slow (``auto``: grouped convolutions between
            smooth activations), but for smooth activations only; units of a ReLU that switch between
            the two points add a jump that the Hessian does not have, often many times its size.
        seed: of the start vectors; no global generator is touched.
        loss: mean loss of ``(module, images, labels)``.
        now: clock in seconds.

    Attributes:
        product: ``exact`` or ``difference``, ``auto`` resolved.
        eager_reason: why gradients could not be captured in a CUDA graph; ``None`` if they can.

    Raises:
        ValueError: a layer whose weight is no FP32 or FP64 parameter of ``module``.
    """

    def __init__(
        self,
        module: nn.Module,
        layers: Mapping[str, nn.Module],
        settings: CurvatureSettings,
        seed: int,
        loss: Loss = mean_cross_entropy,
        borrow: Borrow = as_it_is,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._borrow = borrow
        if settings.product == "jacobian":
            raise ValueError("product=jacobian: expected auto, exact or difference; take JacobianEstimator")
        self.product = settings.product
        if settings.product == "auto":
            grouped = any(isinstance(part, _ConvNd) and part.groups > 1 for part in module.modules())
            self.product = "difference" if grouped and _smooth(module) else "exact"
        self._objective = _Objective(module, loss)
        self._names = weight_names(self._objective, layers)
        self._settings = settings
        self._seed = seed
        self._now = now
        self._turns = list(layers)
        self._refreshes = dict.fromkeys(layers, 0)
        self._vectors: dict[str, Tensor] = {}
        self._last_turns: dict[str, tuple[float, int]] = {}
        self._seconds_per_product = 0.0
        self._all_gradients = Replayed(partial(_gradients_of_all, self._objective, tuple(self._names.values())))

    @property
    def eager_reason(self) -> str | None:
        return self._all_gradients.eager_reason

    def release(self) -> None:
        self._all_gradients.release()

    def state_dict(self) -> dict[str, Any]:
        """Whose turn it is, what each layer's next start is drawn from, and what turns took."""
        return {
            "turns": list(self._turns),
            "refreshes": dict(self._refreshes),
            "vectors": dict(self._vectors),
            "last_turns": dict(self._last_turns),
            "seconds_per_product": self._seconds_per_product,
        }

    def load_state_dict(self, saved: object) -> None:
        """Go on from there. Raises ``CheckpointError`` where that is none of these layers."""
        turns = checked(list[str], section(saved, "turns"), "turns")
        refreshes = checked(dict[str, int], section(saved, "refreshes"), "refreshes")
        last_turns = checked(dict[str, tuple[float, int]], section(saved, "last_turns"), "last turns")
        vectors = checked(dict[str, Any], section(saved, "vectors"), "vectors")
        known = sorted(self._names)
        if sorted(turns) != known or sorted(refreshes) != known or not {*last_turns, *vectors} <= set(known):
            raise CheckpointError("its turns of layers are not as expected (those of other layers)")
        self._vectors = {name: torch.zeros(self._leaf(name).numel(), dtype=torch.float16) for name in vectors}
        restore(list(self._vectors.values()), list(vectors.values()), "vectors")
        self._turns, self._refreshes, self._last_turns = turns, refreshes, last_turns
        self._seconds_per_product = checked(float, section(saved, "seconds_per_product"), "seconds of a product")

    def probe(self, images: Tensor, labels: Tensor, budget_seconds: float | None, pool: Any = None) -> Probe:
        """Refresh the layers whose turn it is, least recently refreshed first; as ``Estimator.probe``.

        The first layer is always refreshed; each further one only while its predicted cost stays
        within ``budget_seconds`` (``None``: no limit). Predicted is what the layer's last turn took, at
        as many products as it may take now, or, before its first one, those times the price of
        one in the turn before. Within a budget a layer's first look takes ``k`` products.
        Waits for the device at the start, so that earlier work is not charged to the probe, and
        once per product. Needs device memory for the gradients of one batch and for one layer's
        Lanczos vectors; all of it is free again on return but for what lies in ``pool``. What is kept
        beside is one 16-bit host vector per layer.
        """
        device = images.device
        begun = started(device, self._now)
        spectra: dict[str, Spectrum] = {}
        with (
            self._borrow(self.product != "exact"),
            leaving_no_trace(self._objective, device),
            self._memory(pool, device) as pool,
        ):
            for name in tuple(self._turns):
                allowed = self._iterations(name, priced=budget_seconds is not None)
                if spectra and budget_seconds is not None:
                    if self._now() - begun + self._predicted_seconds(name, allowed) > budget_seconds:
                        break
                spectra[name] = self._refresh(name, allowed, images, labels, pool)
        products = sum(spectrum.iterations for spectrum in spectra.values())
        seconds = self._now() - begun
        replayed_bytes = self._all_gradients.peak_bytes
        if replayed_bytes:
            # A replay has the layer's Lanczos vectors, and what it is about to add to them, beside it.
            vectors = max(spectrum.iterations for spectrum in spectra.values()) + 3
            replayed_bytes += vectors * max(self._leaf(name).nbytes for name in spectra)
        return Probe(tuple(spectra), tuple(spectra.values()), seconds, products, replayed_bytes)

    def _refresh(self, name: str, allowed: int, images: Tensor, labels: Tensor, pool: Any) -> Spectrum:
        begun = self._now()
        leaf = self._leaf(name)
        generator = torch.Generator(leaf.device)
        generator.manual_seed(zlib.crc32(f"{self._seed} {name} {self._refreshes[name]}".encode()))

        def random_unit() -> Tensor:
            return unit(torch.randn(leaf.numel(), generator=generator, device=leaf.device, dtype=leaf.dtype))

        start = random_unit()
        if name in self._vectors:
            start = unit(self._vectors[name].to(leaf)) + WARM_START_NOISE * start
        with self._products(name, leaf, images, labels, pool) as product:
            spectrum, top = lanczos(product, start, self._settings.k, allowed, self._settings.tolerance, random_unit)
        if spectrum.eigenvalues:
            self._vectors[name] = top.to("cpu", torch.float16)
        self._refreshes[name] += 1
        self._turns.remove(name)
        self._turns.append(name)
        seconds = self._now() - begun
        self._last_turns[name] = seconds, allowed
        self._seconds_per_product = seconds / spectrum.iterations
        return spectrum

    def _predicted_seconds(self, name: str, allowed: int) -> float:
        if name in self._last_turns:
            seconds, allowed_then = self._last_turns[name]
            return seconds * allowed / allowed_then
        products = most_products(self._leaf(name).numel(), self._settings.k, allowed)
        return products * self._seconds_per_product

    def _iterations(self, name: str, priced: bool) -> int:
        """Breadth first: within a price, a first look at every layer comes before a second at any."""
        first = priced and not self._refreshes[name]
        return min(self._settings.k, self._settings.iterations) if first else self._settings.iterations

    def _leaf(self, name: str) -> Tensor:
        return _leaf(self._objective, self._names[name])

    @contextlib.contextmanager
    def _memory(self, pool: Any, device: torch.device) -> Iterator[Any]:
        """A pool for the graph of all layers' gradients: the one that is lent, or one for this probe alone."""
        captures = self.product == "difference" and self.eager_reason is None and _can_capture(device)
        if pool is not None or not captures:
            yield pool
            return
        try:
            own = Pool()
        except CaptureError as error:
            self._all_gradients.eager_reason = str(error)
            yield None
            return
        try:
            yield own.handle
        finally:
            self._all_gradients.release()
            own.release()
            clear_workspaces(device)
            torch.cuda.empty_cache()

    @contextlib.contextmanager
    def _products(self, name: str, leaf: Tensor, images: Tensor, labels: Tensor, pool: Any) -> Iterator[Product]:
        if self.product == "exact":
            gradient = _gradients(self._objective, {self._names[name]: leaf}, images, labels, create_graph=True)[0]
            yield lambda vector: _grad(gradient, (leaf,), vector.view_as(leaf), retain_graph=True)[0].reshape(-1)
            return

        def gradient() -> Tensor:
            if pool is None or self.eager_reason is not None:
                return _gradients(self._objective, {self._names[name]: leaf}, images, labels)[0]
            return self._all_gradients(images, labels, pool=pool)[place].clone()

        weight = leaf.detach()
        saved = weight.clone()
        place = list(self._names).index(name)
        try:
            yield _difference_product(weight, saved, gradient)
        finally:
            weight.copy_(saved)


def _leaf(objective: nn.Module, parameter: str) -> Tensor:
    # A second tensor on the weight's storage: differentiating it cannot touch the parameter's grad or flags.
    return objective.get_parameter(parameter).detach().requires_grad_()


def _gradients(
    objective: nn.Module, leaves: Mapping[str, Tensor], images: Tensor, labels: Tensor, create_graph: bool = False
) -> tuple[Tensor, ...]:
    """Gradients of the mean loss, each of its weight's shape; ``leaves`` stand in for the parameters of their names."""
    with torch.enable_grad():
        loss = torch.func.functional_call(objective, {**detached(objective), **leaves}, (images, labels))
        return _grad(loss, tuple(leaves.values()), create_graph=create_graph)


def _gradients_of_all(
    objective: nn.Module, parameters: tuple[str, ...], images: Tensor, labels: Tensor
) -> tuple[Tensor, ...]:
    return _gradients(objective, {name: _leaf(objective, name) for name in parameters}, images, labels)


def _difference_product(weight: Tensor, saved: Tensor, gradient: Callable[[], Tensor]) -> Product:
    """Product with unit vectors by central differences, moving ``weight`` in place around ``saved``."""
    norm = torch.linalg.vector_norm(saved)
    step = RELATIVE_STEP[saved.dtype] * torch.where(norm > 0, norm, 1.0)

    def product(vector: Tensor) -> Tensor:
        direction = vector.view_as(saved)
        torch.addcmul(saved, step, direction, out=weight)
        ahead = gradient()
        torch.addcmul(saved, step, direction, value=-1, out=weight)
        return ((ahead - gradient()) / (2 * step)).reshape(-1)

    return product


def _grad(output: Tensor, inputs: tuple[Tensor, ...], *args: Tensor, **options: bool) -> tuple[Tensor, ...]:
    """``torch.autograd.grad``, with zeros where ``output`` does not depend on an input."""
    if not output.requires_grad:
        return tuple(torch.zeros_like(value) for value in inputs)
    return torch.autograd.grad(output, inputs, *args, materialize_grads=True, **options)


class _Objective(nn.Module):
    """The loss as a module, so that ``functional_call`` can put other tensors in the model's place."""

    def __init__(self, module: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.module = module
        self.loss = loss

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.module, images, labels)


def _can_capture(device: torch.device) -> bool:
    return device.type == "cuda"
