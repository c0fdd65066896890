"""A two-dimensional convolution by the cheapest route that computes the same.

Images of 32 pixels shrink to 2x2 and 1x1 inside these models, where most taps of a kernel only
ever meet zero padding. Those taps are left out of the arithmetic: they contribute exact zeros.
What is then a 1x1 convolution, or one whose window is the whole image, is a matrix product. The
three channels of an image are filled up with zeros to what the 16-bit matrix units take.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from triaccel_bench.kernels import depthwise

MATRIX_CHANNELS = 8
"""Channels (16 bytes) that the 16-bit matrix units take at a time; with fewer a library falls back to slow kernels."""


SMALL = 2**31
"""Multiply-adds of a convolution up to which its gradients leave multiprocessors idle: then two run at a time."""

HALVES_AT_ONCE = 4
"""16-bit elements that are copied as one of 64 bits."""


class Taps(NamedTuple):
    """The taps of one dimension that meet the image: ``weight[first:last]``, under ``padding``."""

    first: int
    last: int
    padding: int


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    groups: int,
    differentiable_once: bool = False,
    kernel: tuple[int, int] | None = None,
) -> Tensor:
    """What ``torch.nn.functional.conv2d`` computes; the order of a sum's terms may differ.

    Args:
        x: [N, C, H, W]; products are taken where its memory is channels-last.
        weight: [O, C / groups, kH, kW], of ``x``'s dtype.
        differentiable_once: allow routes whose gradient cannot be differentiated again.
        kernel: (kH, kW) where ``weight`` may hold its live taps alone.

    Raises:
        ValueError: it holds neither all taps nor those alone.
    """
    kernel, held = kernel or tuple(weight.shape[2:]), tuple(weight.shape[2:])
    rows, columns = (live_taps(x.shape[2 + d], kernel[d], stride[d], padding[d], dilation[d]) for d in (0, 1))
    live = rows.last - rows.first, columns.last - columns.first
    if held not in (kernel, live):
        raise ValueError(
            f"weight: expected all taps, {kernel}, or those that meet an image of {tuple(x.shape[2:])} pixels, {live}, "
            f"got {held}; pass all of them"
        )
    if live != held:
        weight = _LiveTaps.apply(weight, rows, columns)
    padding = rows.padding, columns.padding
    missing = MATRIX_CHANNELS - x.shape[1]
    if groups == 1 and missing > 0 and x.dtype in (torch.float16, torch.bfloat16):
        x, weight = (functional.pad(operand, (0, 0, 0, 0, 0, missing)) for operand in (x, weight))
    if groups == 1 and padding == (0, 0) and x.is_contiguous(memory_format=torch.channels_last) and _may_multiply(x):
        window = tuple(weight.shape[2:])
        if window == (1, 1) and stride == (1, 1):
            return functional.linear(x.permute(0, 2, 3, 1), weight.flatten(1), bias).permute(0, 3, 1, 2)
        if window == tuple(x.shape[2:]) and dilation == (1, 1):
            pixels = x.permute(0, 2, 3, 1).flatten(1)
            return functional.linear(pixels, weight.permute(0, 2, 3, 1).flatten(1), bias)[:, :, None, None]
        wide = x.element_size() == 2 and x.shape[1] % HALVES_AT_ONCE == 0
        if window == (1, 1) and bias is None and wide and differentiable_once:
            return _SparsePoints.apply(x, weight, stride)
    if differentiable_once and groups == 1 and bias is None and weight.is_leaf and WeightGradients.apart():
        positions = x.shape[0] * x.shape[2] * x.shape[3] // (stride[0] * stride[1])
        if positions * weight.numel() <= SMALL:
            return _Forked.apply(x, weight, stride, padding, dilation)
    return functional.conv2d(x, weight, bias, stride, padding, dilation, groups)


def _may_multiply(x: Tensor) -> bool:
    """Not where a product would round FP32 values otherwise than a convolution does."""
    return x.dtype != torch.float32 or torch.backends.cuda.matmul.allow_tf32 == torch.backends.cudnn.allow_tf32


def live_taps(size: int, kernel: int, stride: int, padding: int, dilation: int) -> Taps:
    """The taps of one dimension that meet a pixel of an image of ``size`` at any output position."""
    whole = Taps(0, kernel, padding)
    outputs = (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    first, last = depthwise.live_taps(size, outputs, kernel, stride, padding, dilation)
    if last - first in (0, kernel):
        return whole
    left = padding - first * dilation
    # Padding is the same on both sides; where the rest would not give the same outputs, nothing is left out.
    if left < 0 or (size + 2 * left - dilation * (last - first - 1) - 1) // stride + 1 != outputs:
        return whole
    return Taps(first, last, left)


class _LiveTaps(torch.autograd.Function):
    """A view of some taps; its gradient is written into zeros once, where two slices would each copy the whole."""

    @staticmethod
    def forward(ctx, weight: Tensor, rows: Taps, columns: Taps) -> Tensor:
        ctx.rows, ctx.columns = rows, columns
        ctx.shape, ctx.strides = weight.shape, weight.stride()
        return weight[:, :, rows.first : rows.last, columns.first : columns.last]

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        whole = gradient.new_empty_strided(ctx.shape, ctx.strides).zero_()
        whole[:, :, ctx.rows.first : ctx.rows.last, ctx.columns.first : ctx.columns.last] = gradient
        return whole, None, None


class WeightGradients:
    """Runs captured convolutions' weight gradients beside the rest of a backward pass, which does not read them.

    One convolution's may lag behind what follows it, no more, so that little memory is held for it.
    As a context it stands around a forward and a backward pass; when it is left, all gradients are there.
    Within it ``settle`` hands over those of weights that are wanted earlier.
    """

    _active: WeightGradients | None = None
    """Not a context variable: torch runs backward passes on a thread of its own."""

    @classmethod
    def apart(cls) -> bool:
        """Whether a convolution that is called now shall leave its weight's gradient to us."""
        return cls._active is not None and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()

    def __init__(self) -> None:
        self._lagging: list[tuple[torch.cuda.Event, tuple[Tensor, ...]]] = []
        self._formed: list[tuple[Tensor, Tensor]] = []
        self._outer: WeightGradients | None = None

    def __enter__(self) -> WeightGradients:
        self._outer, WeightGradients._active = WeightGradients._active, self
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        WeightGradients._active = self._outer
        if kind is None:
            self.settle()

    def add(self, form: Callable[[], Tensor], weight: Tensor, *operands: Tensor) -> None:
        """Add ``form()`` to ``weight.grad``, from the second stream; ``operands`` are what it reads."""
        current, second = torch.cuda.current_stream(), _second_stream(weight.device)
        second.wait_stream(current)
        with torch.cuda.stream(second):
            self._formed.append((weight, form()))
            done = torch.cuda.Event()
            done.record()
        self._lagging.append((done, operands))
        self._wait(1)

    def settle(self, weights: Sequence[Tensor] | None = None) -> None:
        """Let the current stream wait for what was formed, and add that of ``weights`` (``None``: all) to ``.grad``."""
        wanted = None if weights is None else {id(weight) for weight in weights}
        due = [pair for pair in self._formed if wanted is None or id(pair[0]) in wanted]
        if not due:
            return
        self._wait(0)
        self._formed = [pair for pair in self._formed if wanted is not None and id(pair[0]) not in wanted]
        for weight, gradient in due:
            weight.grad = gradient if weight.grad is None else weight.grad + gradient

    def _wait(self, most: int) -> None:
        while len(self._lagging) > most:
            done, _ = self._lagging.pop(0)
            torch.cuda.current_stream().wait_event(done)


@functools.cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class _Forked(torch.autograd.Function):
    """A convolution whose weight gradient may run beside what follows it."""

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, stride: tuple[int, int], padding: tuple[int, int], dilation: tuple[int, int]
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        # What saved tensors' hooks give back in its place would be no leaf.
        ctx.leaf = weight
        ctx.shape = stride, padding, dilation
        return functional.conv2d(x, weight, None, stride, padding, dilation)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors

        def formed(*wanted: bool) -> tuple[Tensor | None, ...]:
            return torch.ops.aten.convolution_backward(
                gradient, x, weight, None, *ctx.shape, False, (0, 0), 1, (*wanted, False)
            )

        beside = WeightGradients._active
        if beside is None or not (ctx.needs_input_grad[0] and ctx.needs_input_grad[1]):
            return *formed(*ctx.needs_input_grad[:2])[:2], None, None, None
        # Not returned: autograd would read it at once, if only to add another gradient of the same weight.
        beside.add(lambda: formed(False, True)[1], ctx.leaf, x, gradient)
        return formed(True, False)[0], None, None, None, None


class _SparsePoints(torch.autograd.Function):
    """A 1x1 convolution with a stride, in 16 bit: a product of the pixels that it reads.

    Libraries go back to channels-first memory for it. Their gradients are better and stay.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, stride: tuple[int, int]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.stride = stride
        pixels = x.permute(0, 2, 3, 1)[:, :: stride[0], :: stride[1]]
        read = pixels.view(torch.int64).contiguous().view(x.dtype)
        return functional.linear(read, weight.flatten(1)).permute(0, 3, 1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        wanted = [*ctx.needs_input_grad[:2], False]
        dx, dweight, _ = torch.ops.aten.convolution_backward(
            gradient, x, weight, None, ctx.stride, (0, 0), (1, 1), False, (0, 0), 1, wanted
        )
        return dx, dweight, None
