"""What all curvature estimators share: a probe's result, and how a model is borrowed and given back unchanged."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from triaccel_bench.kernels.eigenvalues import largest_eigenvalues
from triaccel_bench.lanczos import Spectrum

__all__ = [
    "Borrow",
    "Estimator",
    "LayerCurvature",
    "Probe",
    "Spectrum",
    "Tap",
    "as_it_is",
    "borrowed",
    "classifier_output",
    "detached",
    "leading",
    "leaving_no_trace",
    "output_gradients",
    "started",
    "tapped",
    "weight_gradients",
    "weight_names",
    "wide_dtype",
]

Borrow = Callable[[bool], contextlib.AbstractContextManager]
"""Entered around whatever runs the model in Python: puts its layers into the dtype of their weights, without TF32.

The argument tells that nothing will be differentiated twice.
"""


@contextlib.contextmanager
def as_it_is(differentiated_once: bool) -> Iterator[None]:
    """The ``Borrow`` of a model whose layers compute in the dtype of their weights anyway: TF32 off, nothing else."""
    flags = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = flags


PROBED_DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Probe:
    """The layers one probe refreshed, in the order of their turns, and what that cost."""

    layers: tuple[str, ...]
    spectra: tuple[Spectrum, ...]
    seconds: float
    products: int
    """Products with a vector, or passes that gave the products of many vectors at once."""
    replayed_bytes: int = 0
    """What a replayed graph needed beside everything else."""


@dataclass(frozen=True)
class LayerCurvature:
    """The newest spectrum of a layer and the training step it was read at."""

    spectrum: Spectrum
    step: int


class Estimator(Protocol):
    """Reads spectra of the named layers of one model on probe batches."""

    @property
    def eager_reason(self) -> str | None:
        """Why probes run without a CUDA graph although one was tried; ``None`` otherwise."""

    def probe(self, images: Tensor, labels: Tensor, budget_seconds: float | None, pool: Any = None) -> Probe:
        """Refresh the layers whose turn it is: at least one, and as many as ``budget_seconds`` are predicted to allow.

        An estimator that reads all layers at once reads all of them.

        Weights, ``.grad``, flags, torch's generators, and buffers that a pass in evaluation mode does
        not write, are bit-equal before and after, also when an exception leaves this method.

        Args:
            images, labels: (N, C, H, W) and (N,), on the model's device.
            budget_seconds: ``None``: no limit.
            pool: memory of CUDA graphs that is idle now (``Graph.pool``), for graphs that outlive the probe; parameters
                and buffers must then stay where they lie (no ``module.to()``, no ``load_state_dict(assign=True)``).
        """

    def release(self) -> None:
        """Give up what is kept on the device between probes."""

    def state_dict(self) -> dict[str, Any]:
        """What the next probe depends on beside the model: plain values and tensors on the host."""

    def load_state_dict(self, saved: object) -> None:
        """Go on from there. Raises ``CheckpointError`` where that is none."""


def started(device: torch.device, now: Callable[[], float]) -> float:
    """The time once ``device`` has done what was begun before, which is not to be charged to a probe."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return now()


@contextlib.contextmanager
def leaving_no_trace(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Evaluation mode, without gradients, on ``device``; flags and generators as before on exit."""
    flags = [(part, part.training) for part in module.modules()]
    on_cuda = device.type == "cuda"
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast(device.type, enabled=False))
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


@contextlib.contextmanager
def borrowed(module: nn.Module, borrow: Borrow, tf32: bool = False) -> Iterator[None]:
    """``borrow`` for a model differentiated once, and ``leaving_no_trace`` on its device.

    With ``tf32`` matrix units may round operands of FP32 products to 10 bits; ``borrow`` puts the flags back.
    """
    with borrow(True), leaving_no_trace(module, next(module.parameters()).device):
        if tf32:
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        yield


@dataclass(frozen=True)
class Tap:
    """What a layer read, and the place in the graph of autograd that its output's gradient passes."""

    x: Tensor
    edge: GradientEdge
    output_elements: int
    """Of one sample."""


@contextlib.contextmanager
def tapped(layers: Mapping[str, nn.Module], samples: int) -> Iterator[dict[str, Tap]]:
    """Within the context a forward pass fills what it yields, in the order of the layers' calls.

    The layers' outputs carry gradients then, whether or not their weights do:
    ``output_gradients`` reads them without forming the gradient of any weight.

    Raises:
        ValueError: a layer is called a second time (its gradient would be a sum over calls), is not
            given ``samples`` rows, or is called where autograd does not record.
    """
    taps: dict[str, Tap] = {}

    def hook_of(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
        def hook(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            if name in taps:
                raise ValueError(
                    f"layer {name}: expected one call a forward pass, got a second one; "
                    "read its curvature with method.curvature.estimator=hessian and method.curvature.product=exact"
                )
            if not inputs or inputs[0].shape[:1] != (samples,):
                got = list(inputs[0].shape) if inputs else "a call by keywords"
                raise ValueError(
                    f"layer {name}: expected to be called with [{samples}, ...], one row a sample, got {got}; "
                    "read its curvature with method.curvature.estimator=hessian, product=exact"
                )
            if output._is_view() or not output.requires_grad:
                # What overwrites a view gives its base another history, in which no edge of now has a place.
                output = output + torch.zeros((), dtype=output.dtype, device=output.device, requires_grad=True)
            if not output.requires_grad:
                raise ValueError(
                    f"layer {name}: expected a call that autograd records, got one without gradients; "
                    "use non-reentrant checkpointing, or none"
                )
            # An edge, not the tensor: what follows may overwrite the tensor in place.
            edge = torch.autograd.graph.get_gradient_edge(output)
            taps[name] = Tap(inputs[0].detach(), edge, output[0].numel())
            return output

        return hook

    with contextlib.ExitStack() as stack:
        for name, layer in layers.items():
            # Before other people's hooks, which may make something else of the output.
            stack.callback(layer.register_forward_hook(hook_of(name), prepend=True).remove)
        yield taps


def output_gradients(
    logits: Tensor, direction: Tensor, taps: Iterable[Tap], retain_graph: bool = False
) -> tuple[Tensor | None, ...]:
    """Gradients of ``(logits * direction).sum()`` for the outputs behind ``taps``; ``None`` where it depends on none.

    The backward pass goes no deeper than it must.
    """
    edges = [tap.edge for tap in taps]
    if not edges:
        return ()
    return torch.autograd.grad(logits, edges, direction, retain_graph=retain_graph, allow_unused=True)


def detached(module: nn.Module) -> dict[str, Tensor]:
    """Parameters by name, each a tensor on the same storage that needs no gradient."""
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def weight_gradients(
    module: nn.Module, names: Mapping[str, str], images: Tensor, direction_of: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """By layer, the gradient of ``(logits * direction_of(logits)).sum()`` for its weight, zeros if there is none."""
    values = detached(module)
    leaves = {layer: values[name].requires_grad_() for layer, name in names.items()}
    with torch.enable_grad():
        logits = torch.func.functional_call(module, values, (images,))
        found = torch.autograd.grad(
            logits, tuple(leaves.values()), direction_of(logits.detach()), materialize_grads=True, allow_unused=True
        )
    return dict(zip(leaves, found, strict=True))


def wide_dtype(layers: Mapping[str, nn.Module]) -> torch.dtype:
    """FP64 where a weight is, else FP32."""
    return torch.float64 if any(layer.weight.dtype == torch.float64 for layer in layers.values()) else torch.float32


def classifier_output(module: nn.Module, images: Tensor) -> Tensor:
    """``module(images)``, for gradients of what lies between: by no parameter.

    Raises:
        ValueError: it is not (N, classes).
    """
    logits = torch.func.functional_call(module, detached(module), (images,))
    if logits.dim() != 2 or len(logits) != len(images):
        raise ValueError(
            f"logits: expected [{len(images)}, classes], got {list(logits.shape)}; "
            "take method.curvature.estimator=hessian and product=exact, which need no classifier"
        )
    return logits


def weight_names(module: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, str]:
    """The parameter of ``module`` that is each layer's weight.

    Raises:
        ValueError: a layer whose weight is no FP32 or FP64 parameter of ``module``.
    """
    if not layers:
        raise ValueError("layers: expected at least one, got none; name the convolutions and linear layers")
    known = {id(parameter): name for name, parameter in module.named_parameters()}
    names = {}
    for name, layer in layers.items():
        weight = getattr(layer, "weight", None)
        if id(weight) not in known or weight.dtype not in PROBED_DTYPES:
            got = f"a {weight.dtype} tensor" if isinstance(weight, Tensor) else "no tensor"
            if id(weight) not in known and isinstance(weight, Tensor):
                got += " that is none of its parameters"
            raise ValueError(
                f"layer {name}: expected its weight to be an FP32 or FP64 parameter of the module, got {got}; "
                "leave the layer out"
            )
        names[name] = known[id(weight)]
    return names


def leading(matrices: Tensor, sizes: Sequence[int], k: int, backend: str = "torch") -> tuple[Spectrum, ...]:
    """The ``min(k, n)`` largest eigenvalues of positive semidefinite blocks, from matrices with the same ones beside 0.

    Args:
        matrices: (L, M, M); a block for one that is not finite is empty.
        sizes: n of each block.
        backend: as ``largest_eigenvalues`` takes it.
    """
    values = largest_eigenvalues(matrices, min(k, matrices.shape[1]), backend=backend).tolist()
    spectra = []
    for size, found in zip(sizes, values, strict=True):
        top = [max(0.0, value) for value in (*found, *[0.0] * k)][: min(k, size)]
        spectra.append(Spectrum((), 1, False) if math.isnan(found[0]) else Spectrum(tuple(top), 1, True))
    return tuple(spectra)
