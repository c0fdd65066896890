"""Runs each named layer in the dtype a plan assigns to it (section 3.1 of the paper).

Weights stay FP32. A layer casts its input on the way in, as autocast does, and its result to the
dtype of the layer that consumes it on the way out (``models`` says why). Its weights it casts
too, unless it has been lent 16-bit copies that the update keeps in step.
Normalisation and activations in between run in the dtype of their input, with FP32 parameters
and statistics. A uniform FP16 or BF16 plan therefore computes what ``torch.autocast`` computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional

from triaccel_bench.convolution import conv2d, live_taps
from triaccel_bench.kernels.depthwise import depthwise_conv2d
from triaccel_bench.kernels.stem import MAX_CHANNELS, MAX_KERNEL, has_matrix_units, stem_conv2d
from triaccel_bench.kernels.update import Window
from triaccel_bench.models import LAYER_TYPES, Network

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


class _Cast:
    compute_dtype = output_dtype = torch.float32
    copies: dict[str, Tensor] = {}
    """16-bit copies of "weight" and "bias"; they take the gradient in the parameter's place."""

    def _operands(self) -> tuple[Tensor, Tensor | None]:
        return self._operand("weight"), None if self.bias is None else self._operand("bias")

    def _operand(self, name: str) -> Tensor:
        copy = self.copies.get(name)
        if copy is not None and copy.dtype == self.compute_dtype:
            return copy
        return getattr(self, name).to(self.compute_dtype)


class _CastConvolution(_Cast):
    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x.to(self.compute_dtype), *self._operands()).to(self.output_dtype)


class _CastConv1d(_CastConvolution, nn.Conv1d): ...


class _CastConv2d(_CastConvolution, nn.Conv2d):
    kernels = "torch"
    differentiated_once = False
    """Whether nobody will differentiate twice what it computes in evaluation mode either."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not self._is_zero_padded() or keeps_torchs_sums(x):
            return super()._conv_forward(x, weight, bias)
        once = self.training or self.differentiated_once or not torch.is_grad_enabled()
        ours = once and self.kernels == "triton"
        if ours and self._is_plain():
            if self.groups == self.in_channels == self.out_channels:
                return depthwise_conv2d(x, weight, self.stride[0], self.padding[0], backend=self.kernels)
            if self._is_stem(weight):
                return stem_conv2d(x, weight, self.stride[0], self.padding[0], backend=self.kernels)
        shape = self.stride, self.padding, self.dilation, self.groups
        return conv2d(x, weight, bias, *shape, differentiable_once=ours, kernel=self.kernel_size)

    def live_window(self, size: tuple[int, int]) -> Window | None:
        """The taps of ``weight`` that meet an image of ``size`` pixels; None: all of them, or another route's."""
        if not self._is_zero_padded() or self.groups != 1 or self.in_channels <= MAX_CHANNELS:
            return None
        shape = zip(size, self.kernel_size, self.stride, self.padding, self.dilation)
        taps = [live_taps(*dimension) for dimension in shape]
        window = tuple(slice(each.first, each.last) for each in taps)
        whole = tuple(slice(0, kernel) for kernel in self.kernel_size)
        return None if window == whole else (slice(None), slice(None), *window)

    def _is_zero_padded(self) -> bool:
        return self.padding_mode == "zeros" and not isinstance(self.padding, str)

    def _is_plain(self) -> bool:
        """Whether our kernels take its shape: alike in both dimensions, without dilation and bias."""
        square = all(len(set(pair)) == 1 for pair in (self.kernel_size, self.stride, self.padding))
        return square and self.dilation == (1, 1) and self.bias is None

    def _is_stem(self, weight: Tensor) -> bool:
        takes = self.groups == 1 and self.in_channels <= MAX_CHANNELS and self.kernel_size[0] in (1, 3, 5, MAX_KERNEL)
        return takes and has_matrix_units(weight)


def keeps_torchs_sums(x: Tensor) -> bool:
    """Whether ``x`` is on a CPU, whose results are those of the plain model bit for bit."""
    return not x.is_cuda


class _CastConv3d(_CastConvolution, nn.Conv3d): ...


class _CastLinear(_Cast, nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x.to(self.compute_dtype), *self._operands()).to(self.output_dtype)


_CAST_TYPES = dict(zip(LAYER_TYPES, (_CastConv1d, _CastConv2d, _CastConv3d, _CastLinear), strict=True))


def prepare(network: Network) -> None:
    """Let every named layer take a dtype; the network's output is FP32 whatever its last layer runs in.

    State dicts, deep copies and parameters are untouched: only the layers' class changes.
    A layer of a subclass of our own or of the user's is left as it is and runs in FP32.
    """
    for layer in network.layers.values():
        layer.__class__ = _CAST_TYPES.get(type(layer), type(layer))
    network.module.register_forward_hook(_to_fp32)


def _to_fp32(module: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
    return output.float()


def apply(network: Network, executed: Sequence[str]) -> None:
    """Put a plan in force: one executed dtype for each of ``network.layers``, in order.

    Raises:
        ValueError: the plan's length or a dtype's name is wrong.
    """
    if len(executed) != len(network.layers) or not set(executed) <= DTYPES.keys():
        raise ValueError(f"plan {list(executed)}: expected {len(network.layers)} of {list(DTYPES)}")
    by_name = {}
    for (name, layer), level in zip(network.layers.items(), executed, strict=True):
        if hasattr(type(layer), "compute_dtype"):
            layer.compute_dtype = by_name[name] = DTYPES[level]
        else:
            by_name[name] = torch.float32
    for name, layer in network.layers.items():
        if hasattr(type(layer), "output_dtype"):
            layer.output_dtype = by_name[network.consumers[name]]
    for module, consumer in network.joins:
        module.join_dtype = by_name[consumer]


def current(network: Network) -> tuple[str, ...]:
    """The executed plan now in force."""
    names = {dtype: level for level, dtype in DTYPES.items()}
    return tuple(names[getattr(layer, "compute_dtype", torch.float32)] for layer in network.layers.values())


@contextmanager
def strict_fp32(network: Network, differentiated_once: bool = False) -> Iterator[None]:
    """Every layer in FP32 without TF32, for the curvature probe; the plan and flags come back afterwards.

    Kernels that can be differentiated only once serve if nobody will do it twice.
    """
    plan = current(network)
    told = [part for part in network.module.modules() if hasattr(type(part), "differentiated_once")]
    try:
        apply(network, ["fp32"] * len(plan))
        for part in told:
            part.differentiated_once = differentiated_once
        with tf32_allowed(False):
            yield
    finally:
        for part in told:
            part.__dict__.pop("differentiated_once", None)
        apply(network, plan)


@contextmanager
def tf32_allowed(allowed: bool) -> Iterator[None]:
    """``allow_tf32`` for a while; what was allowed before comes back."""
    flags = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    try:
        allow_tf32(allowed)
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = flags


def allow_tf32(allowed: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


def reduce_in_fp32() -> None:
    """Let products of 16-bit matrices add up their parts in FP32, as convolutions do that run as such a product."""
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


class WeightCopies:
    """The 16-bit copies of weights and biases of a network's layers, lent to the layers that run in 16 bit.

    A copy is the leaf that autograd differentiates by, so its gradient arrives in 16 bit. FP16 and
    BF16 share a layer's memory, which keeps its address while the layer stays in 16 bit; an FP32
    layer has none. Copies follow a plan through ``follow`` and the parameters through whoever
    updates them. Of a convolution whose images are known, taps that only ever meet padding are not
    copied: of a 3x3 kernel over one pixel eight of nine.

    Args:
        network: prepared by ``prepare``.
        parameters: every trainable parameter, in the update's order.
        image_sizes: height and width of what layers read, by name; those that are not there keep all taps.
    """

    def __init__(
        self, network: Network, parameters: Sequence[Tensor], image_sizes: Mapping[str, tuple[int, int]] | None = None
    ) -> None:
        self._parameters = list(parameters)
        self._owners = {}
        windows = {}
        for layer_name, layer in network.layers.items():
            if not isinstance(layer, _Cast):
                continue
            layer.copies = {}
            for name, parameter in layer.named_parameters(recurse=False):
                self._owners[id(parameter)] = layer, name
            if isinstance(layer, _CastConv2d) and not keeps_torchs_sums(layer.weight):
                size = (image_sizes or {}).get(layer_name)
                windows[id(layer.weight)] = None if size is None else layer.live_window(size)
        self.windows = [windows.get(id(parameter)) for parameter in self._parameters]
        """For each parameter the index of what its copy holds; None: all of it."""
        self._copies: list[Tensor | None] = [None] * len(self._parameters)

    def follow(self) -> None:
        """Make copies for the plan in force; values come from ``refresh``, or from the update they are given to."""
        for index, parameter in enumerate(self._parameters):
            layer, name = self._owners.get(id(parameter), (None, None))
            if layer is None:
                continue
            if layer.compute_dtype == torch.float32:
                self._copies[index] = None
                layer.copies.pop(name, None)
                continue
            copy = self._copies[index]
            if copy is None:
                copy = _empty_like(parameter, self.windows[index], layer.compute_dtype)
            elif copy.dtype != layer.compute_dtype:
                copy = copy.detach().view(layer.compute_dtype)
            self._copies[index] = layer.copies[name] = copy.detach().requires_grad_()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the parameters' values, where no update does."""
        pairs = [
            (copy.detach(), parameter if window is None else parameter[window])
            for copy, parameter, window in zip(self._copies, self._parameters, self.windows)
            if copy is not None
        ]
        if pairs:
            torch._foreach_copy_(*map(list, zip(*pairs)))

    @property
    def of_parameters(self) -> list[Tensor | None]:
        """For each parameter its copy, or None."""
        return self._copies

    @property
    def leaves(self) -> list[Tensor]:
        """For each parameter the tensor that its gradient arrives at: the copy, or itself."""
        return [p if copy is None else copy for copy, p in zip(self._copies, self._parameters)]


def _empty_like(parameter: Tensor, window: Window | None, dtype: torch.dtype) -> Tensor:
    if window is None:
        return torch.empty_like(parameter, dtype=dtype)
    last = parameter.is_contiguous(memory_format=torch.channels_last)
    layout = torch.channels_last if last else torch.contiguous_format
    return torch.empty(parameter[window].shape, dtype=dtype, device=parameter.device, memory_format=layout)
