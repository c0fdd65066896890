"""Depthwise 2-D convolution of channels_last tensors: forward, gradient of the input, gradient of the weight."""

# Without the postponed annotations of other files: Triton 3.2's interpreter needs `tl.constexpr` itself, not its name.

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from triaccel_bench.kernels.backend import require_backend, tl, triton

BLOCK_CHANNELS = 32
"""Channels of a tile. Every warp gathers its weights one by one, so that wider tiles would gather more of them."""
PROGRAMS = 256
"""Programs that fill a large card: two for each of its multiprocessors."""
LOADS_AT_ONCE = 50
"""Loads of one thread that may be under way together; with more of them registers spill."""
DWEIGHT_TILE = 1024
"""Elements of a tile of the weight gradient: 16 bytes a thread in half precision."""
DWEIGHT_TURN = 4
"""Tiles of the weight gradient whose loads do not wait for each other."""
DWEIGHT_TAPS = 4
"""Taps whose weight gradient one program accumulates over one reading of dy; 8 would need too many registers."""
ONE_STAGE_PIXELS = 512
"""Up to here one program sums all pixels sooner than a second launch would start."""
NOMINAL_BATCH = 96
"""Images for which tiles are chosen, whatever the batch: another choice is another kernel to compile."""
INT32_ELEMENTS = 2**31 - 2**24
"""Tensors up to this size have offsets in int32, with room for the masked ones around the image."""


def depthwise_reference(x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    """What ``depthwise_conv2d`` computes, by torch's own convolution; any gradient order, can be captured."""
    x = x.contiguous(memory_format=torch.channels_last)
    out = torch.nn.functional.conv2d(x, weight, None, stride, padding, 1, x.shape[1])
    return out.contiguous(memory_format=torch.channels_last)


if triton is not None:

    @triton.jit(do_not_specialize=["pixels"])
    def _forward_kernel(
        x,
        weight,
        out,
        pixels,
        C: tl.constexpr,
        H: tl.constexpr,
        W: tl.constexpr,
        OUT_H: tl.constexpr,
        OUT_W: tl.constexpr,
        KERNEL: tl.constexpr,
        STRIDE: tl.constexpr,
        PADDING: tl.constexpr,
        ROW_FROM: tl.constexpr,
        ROW_TO: tl.constexpr,
        COL_FROM: tl.constexpr,
        COL_TO: tl.constexpr,
        BLOCK_M: tl.constexpr,
        BLOCK_C: tl.constexpr,
        WIDE: tl.constexpr,
    ):
        """Each program computes BLOCK_M consecutive output pixels of BLOCK_C channels."""
        program = tl.program_id(0)
        channel = program % ((C + BLOCK_C - 1) // BLOCK_C) * BLOCK_C + tl.arange(0, BLOCK_C)
        tile = program // ((C + BLOCK_C - 1) // BLOCK_C)
        if WIDE:
            tile = tile.to(tl.int64)
        pixel = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        live = pixel < pixels
        real = channel < C
        top = pixel // OUT_W % OUT_H * STRIDE - PADDING
        left = pixel % OUT_W * STRIDE - PADDING
        corner = (pixel // (OUT_H * OUT_W) * H + top) * W + left
        acc = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
        for i in tl.static_range(ROW_FROM, ROW_TO):
            for j in tl.static_range(COL_FROM, COL_TO):
                inside = live & (top + i >= 0) & (top + i < H) & (left + j >= 0) & (left + j < W)
                place = ((corner + (i * W + j)) * C)[:, None] + channel[None, :]
                value = tl.load(x + place, mask=inside[:, None] & real[None, :], other=0.0)
                tap = tl.load(weight + channel * (KERNEL * KERNEL) + (i * KERNEL + j), mask=real, other=0.0)
                acc += value.to(tl.float32) * tap.to(tl.float32)[None, :]
        place = (pixel * C)[:, None] + channel[None, :]
        tl.store(out + place, acc.to(out.dtype.element_ty), mask=live[:, None] & real[None, :])

    @triton.jit(do_not_specialize=["pixels"])
    def _dx_kernel(
        dy,
        weight,
        dx,
        pixels,
        C: tl.constexpr,
        H: tl.constexpr,
        W: tl.constexpr,
        OUT_H: tl.constexpr,
        OUT_W: tl.constexpr,
        KERNEL: tl.constexpr,
        STRIDE: tl.constexpr,
        PADDING: tl.constexpr,
        ROW_FROM: tl.constexpr,
        ROW_TO: tl.constexpr,
        COL_FROM: tl.constexpr,
        COL_TO: tl.constexpr,
        BLOCK_M: tl.constexpr,
        BLOCK_C: tl.constexpr,
        WIDE: tl.constexpr,
    ):
        """Each program computes BLOCK_M input pixels whose coordinates modulo the stride agree.

        Such pixels are reached by the same taps, every STRIDE-th of the kernel: the others are not even tried.
        """
        program = tl.program_id(0)
        channel = program % ((C + BLOCK_C - 1) // BLOCK_C) * BLOCK_C + tl.arange(0, BLOCK_C)
        program = program // ((C + BLOCK_C - 1) // BLOCK_C)
        down = program % (STRIDE * STRIDE) // STRIDE
        across = program % STRIDE
        tile = program // (STRIDE * STRIDE)
        if WIDE:
            tile = tile.to(tl.int64)
        pixel = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        coarse_w: tl.constexpr = (W + STRIDE - 1) // STRIDE
        coarse_h: tl.constexpr = (H + STRIDE - 1) // STRIDE
        coarse_row = pixel // coarse_w % coarse_h
        coarse_col = pixel % coarse_w
        image = pixel // (coarse_h * coarse_w)
        row = coarse_row * STRIDE + down
        col = coarse_col * STRIDE + across
        live = (pixel < pixels) & (row < H) & (col < W)
        real = channel < C
        # Tap i = first_i + STRIDE * t of this row multiplies the output row bottom - t.
        first_i = (down + PADDING) % STRIDE
        first_j = (across + PADDING) % STRIDE
        bottom = coarse_row + (down + PADDING) // STRIDE
        right = coarse_col + (across + PADDING) // STRIDE
        corner = (image * OUT_H + bottom) * OUT_W + right
        acc = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
        for t in tl.static_range(ROW_FROM, ROW_TO):
            for u in tl.static_range(COL_FROM, COL_TO):
                i = first_i + STRIDE * t
                j = first_j + STRIDE * u
                exists = (i < KERNEL) & (j < KERNEL)
                inside = live & (bottom >= t) & (bottom - t < OUT_H) & (right >= u) & (right - u < OUT_W) & exists
                place = ((corner - (t * OUT_W + u)) * C)[:, None] + channel[None, :]
                value = tl.load(dy + place, mask=inside[:, None] & real[None, :], other=0.0)
                taps = weight + channel * (KERNEL * KERNEL) + (i * KERNEL + j)
                tap = tl.load(taps, mask=real & exists, other=0.0)
                acc += value.to(tl.float32) * tap.to(tl.float32)[None, :]
        place = (((image * H + row) * W + col) * C)[:, None] + channel[None, :]
        tl.store(dx + place, acc.to(dx.dtype.element_ty), mask=live[:, None] & real[None, :])

    @triton.jit(do_not_specialize=["pixels", "pixels_each"])
    def _dweight_kernel(
        x,
        dy,
        out,
        pixels,
        pixels_each,
        C: tl.constexpr,
        H: tl.constexpr,
        W: tl.constexpr,
        OUT_H: tl.constexpr,
        OUT_W: tl.constexpr,
        KERNEL: tl.constexpr,
        STRIDE: tl.constexpr,
        PADDING: tl.constexpr,
        ROW_FROM: tl.constexpr,
        ROW_TO: tl.constexpr,
        COL_FROM: tl.constexpr,
        COL_TO: tl.constexpr,
        TAPS: tl.constexpr,
        TURN: tl.constexpr,
        EVERY_TAP: tl.constexpr,
        BLOCK_M: tl.constexpr,
        BLOCK_C: tl.constexpr,
        ONE_STAGE: tl.constexpr,
        WIDE: tl.constexpr,
    ):
        """Each program sums TAPS taps of BLOCK_C channels over its share of the output pixels.

        In one stage ``out`` is the gradient, else FP32 [shares, live taps, C].
        """
        cols: tl.constexpr = COL_TO - COL_FROM
        count: tl.constexpr = (ROW_TO - ROW_FROM) * cols
        channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
        real = channel < C
        tap = tl.program_id(1) * TAPS + tl.arange(0, TAPS)
        i = ROW_FROM + tap // cols
        j = COL_FROM + tap % cols
        share = tl.program_id(2)
        begin = share * pixels_each
        if WIDE:
            begin = share.to(tl.int64) * pixels_each
        end = begin + tl.minimum(pixels_each, pixels - begin)
        acc = tl.zeros([TAPS, BLOCK_M, BLOCK_C], tl.float32)
        while begin < end:
            # Several tiles a turn: their loads do not wait for each other.
            for turn in tl.static_range(TURN):
                pixel = begin + turn * BLOCK_M + tl.arange(0, BLOCK_M)
                live = pixel < end
                top = pixel // OUT_W % OUT_H * STRIDE - PADDING
                left = pixel % OUT_W * STRIDE - PADDING
                corner = (pixel // (OUT_H * OUT_W) * H + top) * W + left
                place = (pixel * C)[None, :, None] + channel[None, None, :]
                gradient = tl.load(dy + place, mask=live[None, :, None] & real[None, None, :], other=0.0)
                y = top[None, :] + i[:, None]
                z = left[None, :] + j[:, None]
                inside = live[None, :] & (tap < count)[:, None] & (y >= 0) & (y < H) & (z >= 0) & (z < W)
                place = ((corner[None, :] + (i * W + j)[:, None]) * C)[:, :, None] + channel[None, None, :]
                value = tl.load(x + place, mask=inside[:, :, None] & real[None, None, :], other=0.0)
                acc += gradient.to(tl.float32) * value.to(tl.float32)
            begin += TURN * BLOCK_M
        total = tl.sum(acc, axis=1)
        known = (tap < count)[:, None] & real[None, :]
        if ONE_STAGE:
            place = channel[None, :] * (KERNEL * KERNEL) + (i * KERNEL + j)[:, None]
            tl.store(out + place, total.to(out.dtype.element_ty), mask=known)
            if count < KERNEL * KERNEL:
                each = tl.arange(0, EVERY_TAP)
                row = each // KERNEL
                col = each % KERNEL
                dead = (row < ROW_FROM) | (row >= ROW_TO) | (col < COL_FROM) | (col >= COL_TO)
                dead = dead & (each < KERNEL * KERNEL) & (tl.program_id(1) == 0)
                zeros = tl.zeros([EVERY_TAP, BLOCK_C], tl.float32).to(out.dtype.element_ty)
                place = channel[None, :] * (KERNEL * KERNEL) + each[:, None]
                tl.store(out + place, zeros, mask=dead[:, None] & real[None, :])
        else:
            tl.store(out + (share * count + tap)[:, None] * C + channel[None, :], total, mask=known)

    @triton.jit(do_not_specialize=["shares"])
    def _dweight_sum_kernel(
        partial,
        out,
        shares,
        C: tl.constexpr,
        KERNEL: tl.constexpr,
        ROW_FROM: tl.constexpr,
        ROW_TO: tl.constexpr,
        COL_FROM: tl.constexpr,
        COL_TO: tl.constexpr,
        BLOCK_S: tl.constexpr,
        BLOCK_C: tl.constexpr,
    ):
        """Each program adds the shares of one tap of BLOCK_C channels, in an order that never changes."""
        cols: tl.constexpr = COL_TO - COL_FROM
        count: tl.constexpr = (ROW_TO - ROW_FROM) * cols
        channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
        real = channel < C
        i = tl.program_id(1) // KERNEL
        j = tl.program_id(1) % KERNEL
        alive = (i >= ROW_FROM) & (i < ROW_TO) & (j >= COL_FROM) & (j < COL_TO)
        tap = (i - ROW_FROM) * cols + (j - COL_FROM)
        acc = tl.zeros([BLOCK_S, BLOCK_C], tl.float32)
        begin = 0
        while begin < shares:
            share = begin + tl.arange(0, BLOCK_S)
            place = ((share * count + tap) * C)[:, None] + channel[None, :]
            mask = (share < shares)[:, None] & (real & alive)[None, :]
            acc += tl.load(partial + place, mask=mask, other=0.0)
            begin += BLOCK_S
        total = tl.sum(acc, axis=0)
        tl.store(out + channel * (KERNEL * KERNEL) + tl.program_id(1), total.to(out.dtype.element_ty), mask=real)


def depthwise_conv2d(x: Tensor, weight: Tensor, stride: int, padding: int, *, backend: str) -> Tensor:
    """Depthwise convolution, differentiable in ``x`` and ``weight``; may be captured, never waits for the device.

    out[n, c, y, z] = sum_ij x[n, c, y stride + i - padding, z stride + j - padding] weight[c, 0, i, j],
    with zeros around the image, accumulated in FP32. Gradients are deterministic and come in the
    dtype of what they belong to. Through ``backend="triton"`` they can be taken once.

    Args:
        x: fp16, bf16, fp32 or fp64 ``[N, C, H, W]``; copied into channels_last memory unless it lies there.
        weight: contiguous ``[C, 1, k, k]`` in the dtype of ``x``.
        stride: step between output pixels, at least 1.
        padding: zeros on each side, at least 0.
        backend: ``"triton"`` or ``"torch"`` (the reference); fp64 always takes the reference.

    Returns:
        channels_last ``[N, C, (H + 2 padding - k) // stride + 1, (W + 2 padding - k) // stride + 1]`` in x's dtype.

    Raises:
        ValueError: a shape, dtype, device, stride or padding other than that, an image smaller than the
            kernel, or a backend that cannot run on the device.
    """
    require_backend(backend, x.device)
    _check(x, weight, stride, padding)
    if backend == "torch" or x.dtype == torch.float64:
        return depthwise_reference(x, weight, stride, padding)
    return _Depthwise.apply(x, weight, stride, padding)


class _Depthwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        ctx.needed = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if ctx.needed[1] else None, weight if any(ctx.needed) else None)
        ctx.like, ctx.stride, ctx.padding = x.shape, stride, padding
        return _forward(x, weight, stride, padding)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        x, weight = ctx.saved_tensors
        dy = dy.contiguous(memory_format=torch.channels_last)
        dx = _dx(dy, weight, ctx.like, ctx.stride, ctx.padding) if ctx.needed[0] else None
        dweight = _dweight(x, dy, weight, ctx.stride, ctx.padding) if ctx.needed[1] else None
        return dx, dweight, None, None


def _forward(x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    images, channels, height, width = x.shape
    kernel = weight.shape[-1]
    out_height, out_width = _out_size(height, kernel, stride, padding), _out_size(width, kernel, stride, padding)
    out = _empty_like(x, (images, channels, out_height, out_width))
    pixels = images * out_height * out_width
    if not out.numel():
        return out
    rows = live_taps(height, out_height, kernel, stride, padding)
    cols = live_taps(width, out_width, kernel, stride, padding)
    nominal = NOMINAL_BATCH * out_height * out_width
    block_m, block_c, warps = _tile(nominal, channels, _area(rows, cols), x.element_size())
    with torch.cuda.device_of(x):
        _forward_kernel[(triton.cdiv(channels, block_c) * triton.cdiv(pixels, block_m),)](
            x,
            weight,
            out,
            pixels,
            *(channels, height, width, out_height, out_width, kernel, stride, padding, *rows, *cols),
            BLOCK_M=block_m,
            BLOCK_C=block_c,
            WIDE=max(x.numel(), out.numel()) > INT32_ELEMENTS,
            num_warps=warps,
        )
    return out


def _dx(dy: Tensor, weight: Tensor, shape: torch.Size, stride: int, padding: int) -> Tensor:
    images, channels, height, width = shape
    out_height, out_width = dy.shape[2:]
    kernel = weight.shape[-1]
    dx = _empty_like(dy, shape)
    if not dx.numel():
        return dx
    pixels = images * triton.cdiv(height, stride) * triton.cdiv(width, stride)
    rows = _live_steps(height, out_height, kernel, stride, padding)
    cols = _live_steps(width, out_width, kernel, stride, padding)
    nominal = NOMINAL_BATCH * triton.cdiv(height, stride) * triton.cdiv(width, stride) * stride * stride
    block_m, block_c, warps = _tile(nominal, channels, _area(rows, cols), dy.element_size())
    with torch.cuda.device_of(dy):
        _dx_kernel[(triton.cdiv(channels, block_c) * stride * stride * triton.cdiv(pixels, block_m),)](
            dy,
            weight,
            dx,
            pixels,
            *(channels, height, width, out_height, out_width, kernel, stride, padding, *rows, *cols),
            BLOCK_M=block_m,
            BLOCK_C=block_c,
            WIDE=max(dx.numel(), dy.numel()) > INT32_ELEMENTS,
            num_warps=warps,
        )
    return dx


def _dweight(x: Tensor, dy: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    images, channels, height, width = x.shape
    out_height, out_width = dy.shape[2:]
    kernel = weight.shape[-1]
    rows = live_taps(height, out_height, kernel, stride, padding)
    cols = live_taps(width, out_width, kernel, stride, padding)
    live = _area(rows, cols)
    dweight = torch.empty_like(weight)
    if not dy.numel() or not live:
        return dweight.zero_()
    block_c = min(BLOCK_CHANNELS, triton.next_power_of_2(channels))
    block_m = DWEIGHT_TILE // block_c
    blocks = triton.cdiv(channels, block_c)
    pixels = images * out_height * out_width
    one_stage = NOMINAL_BATCH * out_height * out_width <= ONE_STAGE_PIXELS
    taps = _dweight_taps(one_stage, blocks, live)
    groups = triton.cdiv(live, taps)
    each = pixels if one_stage else _dweight_share(pixels, blocks * groups, DWEIGHT_TURN * block_m)
    shares = triton.cdiv(pixels, each)
    out = dweight if one_stage else torch.empty((shares, live, channels), dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        _dweight_kernel[(blocks, groups, shares)](
            x,
            dy,
            out,
            pixels,
            each,
            *(channels, height, width, out_height, out_width, kernel, stride, padding, *rows, *cols),
            TAPS=taps,
            TURN=DWEIGHT_TURN,
            EVERY_TAP=triton.next_power_of_2(kernel * kernel),
            BLOCK_M=block_m,
            BLOCK_C=block_c,
            ONE_STAGE=one_stage,
            WIDE=max(x.numel(), dy.numel()) > INT32_ELEMENTS,
            num_warps=4,
        )
        if not one_stage:
            _dweight_sum_kernel[(blocks, kernel * kernel)](
                out, dweight, shares, channels, kernel, *rows, *cols, BLOCK_S=64, BLOCK_C=block_c, num_warps=4
            )
    return dweight


def _tile(pixels: int, channels: int, taps: int, itemsize: int) -> tuple[int, int, int]:
    """Pixels, channels and warps of a tile: as much work a thread as leaves enough programs to fill the card."""
    block_c = min(BLOCK_CHANNELS, triton.next_power_of_2(channels))
    blocks = triton.cdiv(channels, block_c)
    # A vector is the 16 bytes that a thread loads at once. One warp alone would share its weights by way of barriers.
    for warps, vectors in ((4, 2), (2, 2), (2, 1)):
        block_m = warps * 32 * vectors * (16 // itemsize) // block_c
        if taps * vectors <= LOADS_AT_ONCE and blocks * triton.cdiv(pixels, block_m) >= PROGRAMS:
            break
    return block_m, block_c, warps


def _dweight_taps(one_stage: bool, blocks: int, live: int) -> int:
    """Taps that one program of the weight gradient sums: fewer where all pixels of them leave too few programs."""
    taps = min(DWEIGHT_TAPS, triton.next_power_of_2(live))
    while one_stage and taps > 1 and blocks * triton.cdiv(live, taps) < PROGRAMS // 2:
        taps //= 2
    return taps


def _dweight_share(pixels: int, programs: int, turn: int) -> int:
    """Pixels that one program sums where several share them: all of them, or a multiple of ``turn``."""
    shares = max(1, PROGRAMS // programs)
    return pixels if shares == 1 else triton.cdiv(triton.cdiv(pixels, shares), turn) * turn


def _empty_like(like: Tensor, shape: Sequence[int]) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)


def _out_size(size: int, kernel: int, stride: int, padding: int) -> int:
    return (size + 2 * padding - kernel) // stride + 1


@cache
def live_taps(size: int, out: int, kernel: int, stride: int, padding: int, dilation: int = 1) -> tuple[int, int]:
    """First and one past the last tap of one dimension that meets the image for some output, not only its padding."""
    live = [i for i in range(kernel) if any(0 <= o * stride + i * dilation - padding < size for o in range(out))]
    return (live[0], live[-1] + 1) if live else (0, 0)


@cache
def _live_steps(size: int, out: int, kernel: int, stride: int, padding: int) -> tuple[int, int]:
    """Range of t for which tap (h + padding) % stride + stride t joins some input h to an output."""
    live = {
        (i - (h + padding) % stride) // stride
        for h in range(size)
        for i in range((h + padding) % stride, kernel, stride)
        if 0 <= (h + padding - i) // stride < out
    }
    return (min(live), max(live) + 1) if live else (0, 0)


def _area(rows: tuple[int, int], cols: tuple[int, int]) -> int:
    return (rows[1] - rows[0]) * (cols[1] - cols[0])


def _check(x: Tensor, weight: Tensor, stride: int, padding: int) -> None:
    if x.dim() != 4 or x.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(
            f"x: expected fp16, bf16, fp32 or fp64 [N, C, H, W], got {x.dtype} {list(x.shape)}; pass a batch of images"
        )
    channels, kernel = x.shape[1], weight.shape[-1] if weight.dim() else 0
    if weight.shape != (channels, 1, kernel, kernel) or not kernel or not weight.is_contiguous():
        raise ValueError(
            f"weight: expected contiguous [{channels}, 1, k, k], got {list(weight.shape)} with strides "
            f"{weight.stride()}; pass one square filter for each channel"
        )
    if weight.dtype != x.dtype or weight.device != x.device:
        raise ValueError(
            f"weight: expected {x.dtype} on {x.device} like x, got {weight.dtype} on {weight.device}; convert it"
        )
    if stride < 1 or padding < 0:
        raise ValueError(f"stride={stride}, padding={padding}: expected at least 1 and 0, got less; pass such")
    if min(x.shape[2:]) + 2 * padding < kernel:
        raise ValueError(
            f"x: expected at least {kernel} pixels in height and width with padding {padding} on each side, "
            f"got {list(x.shape[2:])}; pad more"
        )
