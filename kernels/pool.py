"""Max pooling whose backward pass needs one byte for each result, where torch's keeps eight and the whole input."""

# Without the postponed annotations of other files: Triton 3.2's interpreter needs `tl.constexpr` itself, not its name.

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from triaccel_bench.kernels.backend import require_backend, tl, triton
from triaccel_bench.kernels.norm import DTYPES, memory_format_of

MAX_KERNEL = 15
"""A tap's number must fit into a byte."""
BLOCK = 1024


def max_pool2d_reference(x: Tensor, kernel: int, stride: int, padding: int) -> Tensor:
    """What ``max_pool2d`` computes, by torch, which can differentiate it twice."""
    return functional.max_pool2d(x, kernel, stride, padding)


if triton is not None:

    @triton.jit
    def _place(offset, CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS_LAST: tl.constexpr):
        """Row, column, and what remains of an element's place: its sample and channel."""
        if CHANNELS_LAST:
            channel = offset % CHANNELS
            pixel = offset // CHANNELS
        else:
            channel = tl.zeros_like(offset)
            pixel = offset
        return pixel // WIDTH % HEIGHT, pixel % WIDTH, pixel // (WIDTH * HEIGHT), channel

    @triton.jit
    def _start(
        plane, channel, CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS_LAST: tl.constexpr
    ):
        """The first pixel of a sample's channel in an image of that size."""
        together: tl.constexpr = CHANNELS if CHANNELS_LAST else 1
        return plane * (HEIGHT * WIDTH * together) + channel

    @triton.jit(do_not_specialize=["elements"])
    def _forward_kernel(
        x,
        y,
        taps,
        elements,
        CHANNELS: tl.constexpr,
        HEIGHT: tl.constexpr,
        WIDTH: tl.constexpr,
        OUT_HEIGHT: tl.constexpr,
        OUT_WIDTH: tl.constexpr,
        KERNEL: tl.constexpr,
        STRIDE: tl.constexpr,
        PADDING: tl.constexpr,
        CHANNELS_LAST: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        live = offset < elements
        row, column, plane, channel = _place(offset, CHANNELS, OUT_HEIGHT, OUT_WIDTH, CHANNELS_LAST)
        start = _start(plane, channel, CHANNELS, HEIGHT, WIDTH, CHANNELS_LAST)
        pixel: tl.constexpr = CHANNELS if CHANNELS_LAST else 1
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        chosen = tl.full([BLOCK], -1, tl.int32)
        for tap in tl.static_range(KERNEL * KERNEL):
            h = row * STRIDE - PADDING + tap // KERNEL
            w = column * STRIDE - PADDING + tap % KERNEL
            inside = live & (h >= 0) & (h < HEIGHT) & (w >= 0) & (w < WIDTH)
            value = tl.load(x + start + (h * WIDTH + w) * pixel, mask=inside, other=float("-inf")).to(tl.float32)
            # The first of equals, and NaN before all else: whoever looks for one finds it.
            better = inside & ((value > best) | (value != value) | (chosen < 0))
            best = tl.where(better, value, best)
            chosen = tl.where(better, tap, chosen)
        tl.store(y + offset, best.to(y.dtype.element_ty), mask=live)
        if taps is not None:
            tl.store(taps + offset, chosen.to(tl.uint8), mask=live)

    @triton.jit(do_not_specialize=["elements"])
    def _backward_kernel(
        dy,
        taps,
        dx,
        elements,
        CHANNELS: tl.constexpr,
        HEIGHT: tl.constexpr,
        WIDTH: tl.constexpr,
        OUT_HEIGHT: tl.constexpr,
        OUT_WIDTH: tl.constexpr,
        KERNEL: tl.constexpr,
        STRIDE: tl.constexpr,
        PADDING: tl.constexpr,
        CHANNELS_LAST: tl.constexpr,
        BLOCK: tl.constexpr,
        WINDOWS: tl.constexpr,
    ):
        """Each element of dx collects from the windows that it lies in: no two programs write to one place."""
        offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        live = offset < elements
        row, column, plane, channel = _place(offset, CHANNELS, HEIGHT, WIDTH, CHANNELS_LAST)
        start = _start(plane, channel, CHANNELS, OUT_HEIGHT, OUT_WIDTH, CHANNELS_LAST)
        pixel: tl.constexpr = CHANNELS if CHANNELS_LAST else 1
        total = tl.zeros([BLOCK], tl.float32)
        for window in tl.static_range(WINDOWS * WINDOWS):
            h = (row + PADDING) // STRIDE - window // WINDOWS
            w = (column + PADDING) // STRIDE - window % WINDOWS
            down, right = row + PADDING - h * STRIDE, column + PADDING - w * STRIDE
            inside = live & (h >= 0) & (h < OUT_HEIGHT) & (w >= 0) & (w < OUT_WIDTH)
            inside = inside & (down < KERNEL) & (right < KERNEL)
            place = start + (h * OUT_WIDTH + w) * pixel
            mine = tl.load(taps + place, mask=inside, other=255).to(tl.int32) == down * KERNEL + right
            total += tl.load(dy + place, mask=inside & mine, other=0.0).to(tl.float32)
        tl.store(dx + offset, total.to(dx.dtype.element_ty), mask=live)


class _MaxPool2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, kernel: int, stride: int, padding: int) -> Tensor:
        layout = memory_format_of(x)
        x = x.contiguous(memory_format=layout)
        batch, channels, *size = x.shape
        outputs = [(side + 2 * padding - kernel) // stride + 1 for side in size]
        y = torch.empty((batch, channels, *outputs), dtype=x.dtype, device=x.device, memory_format=layout)
        taps = torch.empty_like(y, dtype=torch.uint8) if ctx.needs_input_grad[0] else None
        ctx.fixed = dict(
            CHANNELS=channels,
            HEIGHT=size[0],
            WIDTH=size[1],
            OUT_HEIGHT=outputs[0],
            OUT_WIDTH=outputs[1],
            KERNEL=kernel,
            STRIDE=stride,
            PADDING=padding,
            CHANNELS_LAST=layout == torch.channels_last,
            BLOCK=BLOCK,
        )
        with torch.cuda.device_of(x):
            _forward_kernel[(triton.cdiv(y.numel(), BLOCK),)](x, y, taps, y.numel(), **ctx.fixed)
        ctx.layout, ctx.shape, ctx.windows = layout, x.shape, triton.cdiv(kernel, stride)
        ctx.save_for_backward(taps)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None, None, None]:
        (taps,) = ctx.saved_tensors
        dy = dy.contiguous(memory_format=ctx.layout)
        dx = torch.empty(ctx.shape, dtype=dy.dtype, device=dy.device, memory_format=ctx.layout)
        with torch.cuda.device_of(dy):
            grid = (triton.cdiv(dx.numel(), BLOCK),)
            _backward_kernel[grid](dy, taps, dx, dx.numel(), WINDOWS=ctx.windows, **ctx.fixed)
        return dx, None, None, None


def max_pool2d(x: Tensor, kernel: int, stride: int, padding: int, *, backend: str) -> Tensor:
    """The largest value of each square window; its gradient goes to the first place in the window that holds it.

    y[n, c, h, w] = max over 0 <= i, j < kernel of x[n, c, h stride - padding + i, w stride - padding + j], which
    is minus infinity outside of x; NaN where the window has one. Triton keeps the number of the chosen tap, one
    byte a result; its backward adds in FP32 in a fixed order, and cannot be differentiated again. FP64 and empty
    tensors are given to the reference.

    Args:
        x: ``[N, C, H, W]``, FP16, BF16 or FP32, channels_last or contiguous; with other strides it is copied first.
        kernel, stride, padding: in pixels, the same in both dimensions.
        backend: ``"triton"`` or ``"torch"`` (the reference).

    Returns:
        y in the dtype and memory layout of x.

    Raises:
        ValueError: a shape, dtype, window or device that does not fit, or a backend that cannot run there.
    """
    if x.dim() != 4:
        raise ValueError(f"x: expected [N, C, H, W], got shape {tuple(x.shape)}; pass four dimensions")
    if not (1 <= kernel <= MAX_KERNEL and 1 <= stride and 0 <= 2 * padding <= kernel):
        raise ValueError(
            f"kernel={kernel}, stride={stride}, padding={padding}: expected a kernel of 1 to {MAX_KERNEL} pixels and "
            "padding of at most half of it; use torch.nn.functional.max_pool2d"
        )
    if min(x.shape[2:]) + 2 * padding < kernel:
        raise ValueError(f"x: expected images as large as the window of {kernel}, got {tuple(x.shape)}; pad them")
    require_backend(backend, x.device)
    if backend == "torch" or x.dtype == torch.float64 or not x.numel():
        return max_pool2d_reference(x, kernel, stride, padding)
    if x.dtype not in DTYPES:
        raise ValueError(f"x: expected FP16, BF16 or FP32, got {x.dtype}; convert it or pass backend='torch'")
    if x.numel() >= 2**31:
        raise ValueError(f"x: expected less than 2^31 elements, got {x.numel()}; change the batch")
    return _MaxPool2d.apply(x, kernel, stride, padding)
