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
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from triaccel_bench.graphs import CaptureError, Graph, clear_workspaces
from triaccel_bench.lanczos import Product, Spectrum, lanczos, most_products, unit
from triaccel_bench.settings import CurvatureSettings

__all__ = ["HessianEstimator", "LayerCurvature", "Loss", "Probe", "Spectrum", "mean_cross_entropy"]

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]

WARM_START_NOISE = 0.1
"""Norm of the random part of a warm start, relative to the kept vector.

A kept vector that is still an eigenvector, but no longer the top one, would pass the residual
test at once; the random part reaches every direction, at a cost of a product or two when k is small.
"""

RELATIVE_STEP = {torch.float32: 1e-3, torch.float64: 1e-6}
"""Step of a gradient difference relative to the weight's norm.

A much larger step truncates, a much smaller one cancels; tests hold these against dense Hessians.
"""


@dataclass(frozen=True)
class Probe:
    """The layers one probe refreshed, in the order of their turns, and what that cost."""

    layers: tuple[str, ...]
    spectra: tuple[Spectrum, ...]
    seconds: float
    products: int
    replayed_bytes: int = 0
    """What a replayed graph of gradients needed beside everything else."""


@dataclass(frozen=True)
class LayerCurvature:
    """The newest spectrum of a layer and the training step it was read at."""

    spectrum: Spectrum
    step: int


def mean_cross_entropy(module: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of ``images`` (N, C, H, W) and ``labels`` (N,), in FP32."""
    return nn.functional.cross_entropy(module(images).float(), labels)


class HessianEstimator:
    """Top-k spectra of the Hessian blocks of named layers, a few layers at a time.

    Every layer must compute in the dtype of its weights during a probe, with TF32 off.

    Args:
        module: the model; neither copied nor changed.
        layers: names and modules whose ``weight`` is a parameter of ``module``.
        settings: ``k``, ``iterations``, ``tolerance`` and ``product``. ``exact`` products are
            double backward, ``difference`` ones ``(g(w + e v) - g(w - e v)) / 2e`` of the
            gradient ``g``: far cheaper where double backward is slow (grouped convolutions, which
            ``auto`` goes by), but for smooth activations only; units of a ReLU that switch between
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
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.product = settings.product
        if settings.product == "auto":
            grouped = any(isinstance(part, _ConvNd) and part.groups > 1 for part in module.modules())
            self.product = "difference" if grouped else "exact"
        self.eager_reason: str | None = None
        self._objective = _Objective(module, loss)
        self._names = _parameter_names(self._objective, layers)
        self._settings = settings
        self._seed = seed
        self._now = now
        self._turns = list(layers)
        self._refreshes = dict.fromkeys(layers, 0)
        self._vectors: dict[str, Tensor] = {}
        self._last_turns: dict[str, tuple[float, int]] = {}
        self._seconds_per_product = 0.0

    def probe(self, images: Tensor, labels: Tensor, budget_seconds: float | None) -> Probe:
        """Refresh the layers whose turn it is, least recently refreshed first.

        The first layer is always refreshed; each further one only while its predicted cost stays
        within ``budget_seconds`` (``None``: no limit). Predicted is what the layer's last turn took, at
        as many products as it may take now, or, before its first one, those times the price of
        one in the turn before. Within a budget a layer's first look takes ``k`` products.
        Waits for the device at the start, so that earlier work is not charged to the probe, and
        once per product. Needs device memory for the gradients of one batch and for one layer's
        Lanczos vectors; all of it is free again on return. What is kept is one 16-bit host
        vector per layer.

        Weights, buffers, ``.grad``, flags and generators are bit-equal before and after, also
        when an exception leaves this method.
        """
        device = images.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begun = self._now()
        spectra: dict[str, Spectrum] = {}
        with _leaving_no_trace(self._objective, device), self._captured(images, labels) as graph:
            replayed_bytes = 0 if graph is None else graph.peak_bytes
            for name in tuple(self._turns):
                allowed = self._iterations(name, priced=budget_seconds is not None)
                if spectra and budget_seconds is not None:
                    if self._now() - begun + self._predicted_seconds(name, allowed) > budget_seconds:
                        break
                spectra[name] = self._refresh(name, allowed, images, labels, graph)
        products = sum(spectrum.iterations for spectrum in spectra.values())
        return Probe(tuple(spectra), tuple(spectra.values()), self._now() - begun, products, replayed_bytes)

    def _refresh(self, name: str, allowed: int, images: Tensor, labels: Tensor, graph: Graph | None) -> Spectrum:
        begun = self._now()
        leaf = self._leaf(name)
        generator = torch.Generator(leaf.device)
        generator.manual_seed(zlib.crc32(f"{self._seed} {name} {self._refreshes[name]}".encode()))

        def random_unit() -> Tensor:
            return unit(torch.randn(leaf.numel(), generator=generator, device=leaf.device, dtype=leaf.dtype))

        start = random_unit()
        if name in self._vectors:
            start = unit(self._vectors[name].to(leaf)) + WARM_START_NOISE * start
        with self._products(name, leaf, images, labels, graph) as product:
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
        # A second tensor on the weight's storage: differentiating it cannot touch the parameter's grad or flags.
        return self._objective.get_parameter(self._names[name]).detach().requires_grad_()

    def _gradients(self, leaves: Mapping[str, Tensor], images: Tensor, labels: Tensor, create_graph: bool = False):
        """Gradients of the mean loss by layer name, each of its weight's shape."""
        values = {name: parameter.detach() for name, parameter in self._objective.named_parameters()}
        values |= {self._names[name]: leaf for name, leaf in leaves.items()}
        with torch.enable_grad():
            loss = torch.func.functional_call(self._objective, values, (images, labels))
            gradients = _grad(loss, tuple(leaves.values()), create_graph=create_graph)
        return dict(zip(leaves, gradients))

    @contextlib.contextmanager
    def _captured(self, images: Tensor, labels: Tensor) -> Iterator[Graph | None]:
        """One graph of all layers' gradients, for difference products on a CUDA device."""
        graph = None
        if self.product == "difference" and _can_capture(images.device) and self.eager_reason is None:
            leaves = {name: self._leaf(name) for name in self._names}
            try:
                graph = Graph(lambda: self._gradients(leaves, images, labels))
            except CaptureError as error:
                self.eager_reason = str(error)
        try:
            yield graph
        finally:
            if graph is not None:
                graph.release()
                clear_workspaces(images.device)
                torch.cuda.empty_cache()

    @contextlib.contextmanager
    def _products(
        self, name: str, leaf: Tensor, images: Tensor, labels: Tensor, graph: Graph | None
    ) -> Iterator[Product]:
        if self.product == "exact":
            gradient = self._gradients({name: leaf}, images, labels, create_graph=True)[name]
            yield lambda vector: _grad(gradient, (leaf,), vector.view_as(leaf), retain_graph=True)[0].reshape(-1)
            return

        def gradient() -> Tensor:
            if graph is None:
                return self._gradients({name: leaf}, images, labels)[name]
            return graph.replay()[name].clone()

        weight = leaf.detach()
        saved = weight.clone()
        try:
            yield _difference_product(weight, saved, gradient)
        finally:
            weight.copy_(saved)


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


def _parameter_names(objective: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, str]:
    known = {id(parameter): name for name, parameter in objective.named_parameters()}
    names = {}
    for name, layer in layers.items():
        weight = getattr(layer, "weight", None)
        if id(weight) not in known or weight.dtype not in RELATIVE_STEP:
            got = f"a {weight.dtype} tensor" if isinstance(weight, Tensor) else "no tensor"
            raise ValueError(
                f"layer {name}: expected its weight to be an FP32 or FP64 parameter of the module, got {got}; "
                "leave the layer out"
            )
        names[name] = known[id(weight)]
    return names


def _can_capture(device: torch.device) -> bool:
    return device.type == "cuda"


@contextlib.contextmanager
def _leaving_no_trace(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Evaluation mode, without gradients, on ``device``; flags and generators as before on exit."""
    flags = [(part, part.training) for part in module.modules()]
    on_cuda = device.type == "cuda"
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if on_cuda:
            stack.enter_context(torch.cuda.device(device))
        stack.enter_context(torch.random.fork_rng([device] if on_cuda else []))
        try:
            # Not eval(): modules that override train() would refuse or do more.
            for part, _ in flags:
                part.training = False
            yield
        finally:
            for part, training in flags:
                part.training = training
