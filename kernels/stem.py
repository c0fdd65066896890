"""First convolution of an image model: few input channels, many pixels; its forward and its gradient of the weight.

A convolution is a matrix product of the filters and of patches, the columns (i, j, c) of an image
under each position of the kernel. Patches are gathered from the image as they are needed. Filled
up to 32 or 64 columns they suit the matrix units, for which three channels alone are too few.
"""

# Without the postponed annotations of other files: Triton 3.2's interpreter needs `tl.constexpr` itself, not its name.

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from triaccel_bench.kernels.backend import require_backend, tl, triton

MAX_CHANNELS = 4
MAX_KERNEL = 7
MIN_DOT = 16
"""Least size of each dimension of a matrix product."""
BLOCK_COLUMNS = 64
"""Columns of a patch that are gathered together; a thread has as many loads under way."""
BLOCK_OUT = 64
"""Output channels of a tile; with more of them the FP32 sums would take too many registers."""
BLOCK_PIXELS = 128
"""Output pixels of a tile, one for each thread: what is computed for a pixel then serves all of its columns."""
PROGRAMS = 528
"""Programs that fill a large card: four for each of its multiprocessors."""
STAGES = {2: 3, 4: 2}
"""By bytes an element: tiles that are being copied or used at once; shared memory of small cards holds no more."""
SUM_SHARES = 128
SUM_ELEMENTS = 16
"""Shares and elements that a program of the second stage adds at once; few elements, so that many programs do."""
INT32_ELEMENTS = 2**31 - 2**24
"""Tensors up to this size have offsets in int32, with room for the masked ones around the image."""


def stem_reference(x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    """What ``stem_conv2d`` computes, by torch's own convolution; any gradient order, can be captured."""
    x = x.contiguous(memory_format=torch.channels_last)
    out = torch.nn.functional.conv2d(x, weight, None, stride, padding)
    return out.contiguous(memory_format=torch.channels_last)


if triton is not None:

    @triton.jit
    def _patches(
        x,
        pixel,
        live,
        first_row,
        C: tl.constexpr,
        H: tl.constexpr,
        W: tl.constexpr,
        OUT_H: tl.constexpr,
        OUT_W: tl.constexpr,
        KERNEL: tl.constexpr,
        STRIDE: tl.constexpr,
        PADDING: tl.constexpr,
        ROWS: tl.constexpr,
        BLOCK_K: tl.constexpr,
    ):
        """[BLOCK_K, pixels]: kernel rows ``first_row`` to ``first_row + ROWS`` of the patch of each pixel, then zeros.

        Lanes lie along the pixels, so that row, column and channel are constants of each load.
        """
        column = tl.arange(0, BLOCK_K)
        row = column // (KERNEL * C)
        j = column // C % KERNEL
        exists = (row < ROWS) & (first_row + row < KERNEL)
        top = pixel // OUT_W % OUT_H * STRIDE - PADDING + first_row
        left = pixel % OUT_W * STRIDE - PADDING
        corner = x + ((pixel // (OUT_H * OUT_W) * H + top) * W + left) * C
        y = top[None, :] + row[:, None]
        z = left[None, :] + j[:, None]
        inside = live[None, :] & exists[:, None] & (y >= 0) & (y < H) & (z >= 0) & (z < W)
        return tl.load(corner[None, :] + ((row * W + j) * C + column % C)[:, None], mask=inside, other=0.0)

    @triton.jit
    def _filters(
        weight,
        stride_o,
        stride_c,
        stride_i,
        stride_j,
        out_channel,
        first_row,
        C: tl.constexpr,
        OUT: tl.constexpr,
        KERNEL: tl.constexpr,
        ROWS: tl.constexpr,
        BLOCK_K: tl.constexpr,
    ):
        """[out channels, BLOCK_K]: the same columns of the filters, with zeros past them."""
        column = tl.arange(0, BLOCK_K)
        row = column // (KERNEL * C)
        i = first_row + row
        place = i * stride_i + column // C % KERNEL * stride_j + column % C * stride_c
        mask = (out_channel < OUT)[:, None] & ((row < ROWS) & (i < KERNEL))[None, :]
        return tl.load(weight + (out_channel * stride_o)[:, None] + place[None, :], mask=mask, other=0.0)

    @triton.jit(do_not_specialize=["pixels"])
    def _forward_kernel(
        x,
        weight,
        out,
        stride_o,
        stride_c,
        stride_i,
        stride_j,
        pixels,
        C: tl.constexpr,
        H: tl.constexpr,
        W: tl.constexpr,
        OUT_H: tl.constexpr,
        OUT_W: tl.constexpr,
        KERNEL: tl.constexpr,
        STRIDE: tl.constexpr,
        PADDING: tl.constexpr,
        OUT: tl.constexpr,
        ROWS: tl.constexpr,
        BLOCK_K: tl.constexpr,
        BLOCK_M: tl.constexpr,
        BLOCK_O: tl.constexpr,
        WIDE: tl.constexpr,
    ):
        """Each program computes BLOCK_O channels of every so many-th tile of BLOCK_M output pixels."""
        out_channel = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
        if ROWS == KERNEL:
            every = _filters(
                weight, stride_o, stride_c, stride_i, stride_j, out_channel, 0, C, OUT, KERNEL, ROWS, BLOCK_K
            )
        for tile in range(tl.program_id(1), (pixels + BLOCK_M - 1) // BLOCK_M, tl.num_programs(1)):
            pixel = tile * BLOCK_M + tl.arange(0, BLOCK_M)
            if WIDE:
                pixel = pixel.to(tl.int64)
            live = pixel < pixels
            acc = tl.zeros([BLOCK_M, BLOCK_O], tl.float32)
            for first_row in range(0, KERNEL, ROWS):
                patches = _patches(
                    x, pixel, live, first_row, C, H, W, OUT_H, OUT_W, KERNEL, STRIDE, PADDING, ROWS, BLOCK_K
                )
                if ROWS == KERNEL:
                    acc = tl.dot(tl.trans(patches), tl.trans(every), acc, input_precision="tf32")
                else:
                    filters = _filters(
                        weight,
                        stride_o,
                        stride_c,
                        stride_i,
                        stride_j,
                        out_channel,
                        first_row,
                        C,
                        OUT,
                        KERNEL,
                        ROWS,
                        BLOCK_K,
                    )
                    acc = tl.dot(tl.trans(patches), tl.trans(filters), acc, input_precision="tf32")
            place = (pixel * OUT)[:, None] + out_channel[None, :]
            mask = live[:, None] & (out_channel < OUT)[None, :]
            tl.store(out + place, acc.to(out.dtype.element_ty), mask=mask)

    @triton.jit(do_not_specialize=["pixels"])
    def _dweight_kernel(
        x,
        dy,
        partial,
        pixels,
        C: tl.constexpr,
        H: tl.constexpr,
        W: tl.constexpr,
        OUT_H: tl.constexpr,
        OUT_W: tl.constexpr,
        KERNEL: tl.constexpr,
        STRIDE: tl.constexpr,
        PADDING: tl.constexpr,
        OUT: tl.constexpr,
        ROWS: tl.constexpr,
        BLOCK_K: tl.constexpr,
        BLOCK_M: tl.constexpr,
        BLOCK_O: tl.constexpr,
        WIDE: tl.constexpr,
    ):
        """Each program sums ROWS kernel rows of BLOCK_O channels over every so many-th tile of BLOCK_M output pixels.

        ``partial`` is FP32 [shares, KERNEL * KERNEL * C, OUT]. Programs of the same tiles are neighbours, so that
        the cache serves all but the first of them.
        """
        first_row = tl.program_id(0) * ROWS
        out_channel = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
        real = out_channel < OUT
        acc = tl.zeros([BLOCK_K, BLOCK_O], tl.float32)
        for tile in range(tl.program_id(2), (pixels + BLOCK_M - 1) // BLOCK_M, tl.num_programs(2)):
            pixel = tile * BLOCK_M + tl.arange(0, BLOCK_M)
            if WIDE:
                pixel = pixel.to(tl.int64)
            live = pixel < pixels
            place = (pixel * OUT)[:, None] + out_channel[None, :]
            gradient = tl.load(dy + place, mask=live[:, None] & real[None, :], other=0.0)
            patches = _patches(x, pixel, live, first_row, C, H, W, OUT_H, OUT_W, KERNEL, STRIDE, PADDING, ROWS, BLOCK_K)
            acc = tl.dot(patches, gradient, acc, input_precision="tf32")
        columns: tl.constexpr = KERNEL * KERNEL * C
        column = tl.arange(0, BLOCK_K)
        whole = first_row * (KERNEL * C) + column
        known = (column < ROWS * KERNEL * C) & (whole < columns)
        place = ((tl.program_id(2) * columns + whole) * OUT)[:, None] + out_channel[None, :]
        tl.store(partial + place, acc, mask=known[:, None] & real[None, :])

    @triton.jit(do_not_specialize=["shares"])
    def _dweight_sum_kernel(
        partial,
        dweight,
        stride_o,
        stride_c,
        stride_i,
        stride_j,
        shares,
        C: tl.constexpr,
        KERNEL: tl.constexpr,
        OUT: tl.constexpr,
        BLOCK_S: tl.constexpr,
        BLOCK_E: tl.constexpr,
    ):
        """Each program adds the shares of BLOCK_E elements, in an order that never changes."""
        columns: tl.constexpr = KERNEL * KERNEL * C
        element = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
        real = element < OUT * columns
        acc = tl.zeros([BLOCK_S, BLOCK_E], tl.float32)
        begin = 0
        while begin < shares:
            share = begin + tl.arange(0, BLOCK_S)
            place = (share * (OUT * columns))[:, None] + element[None, :]
            acc += tl.load(partial + place, mask=(share < shares)[:, None] & real[None, :], other=0.0)
            begin += BLOCK_S
        total = tl.sum(acc, axis=0)
        column = element // OUT
        place = element % OUT * stride_o + column % C * stride_c
        place += column // (KERNEL * C) * stride_i + column // C % KERNEL * stride_j
        tl.store(dweight + place, total.to(dweight.dtype.element_ty), mask=real)


def stem_conv2d(x: Tensor, weight: Tensor, stride: int, padding: int, *, backend: str) -> Tensor:
    """Convolution of an image of few channels; may be captured, never waits for the device.

    out[n, o, y, z] = sum_cij x[n, c, y stride + i - padding, z stride + j - padding] weight[o, c, i, j],
    with zeros around the image, accumulated in FP32. The gradient of ``weight`` is deterministic and comes
    in its dtype and strides; that of ``x``, which a first layer does not need, is torch's own.
    Through ``backend="triton"`` gradients can be taken once.

    Args:
        x: fp16, bf16, fp32 or fp64 ``[N, C, H, W]``, C at most 4; copied into channels_last memory unless it
            lies there.
        weight: ``[O, C, k, k]`` in the dtype of ``x``, k odd and at most 7; any strides.
        stride: step between output pixels, at least 1.
        padding: zeros on each side, at least 0.
        backend: ``"triton"`` or ``"torch"`` (the reference). fp64, and fp32 unless
            ``torch.backends.cudnn.allow_tf32`` lets products round their operands, always take the reference;
            so do cards older than sm_80, for which Triton computes products without matrix units.

    Returns:
        channels_last ``[N, O, (H + 2 padding - k) // stride + 1, (W + 2 padding - k) // stride + 1]`` in x's dtype.

    Raises:
        ValueError: a shape, dtype, device, stride or padding other than that, an image smaller than the
            kernel, or a backend that cannot run on the device.
    """
    require_backend(backend, x.device)
    _check(x, weight, stride, padding)
    if backend == "torch" or not has_matrix_units(x):
        return stem_reference(x, weight, stride, padding)
    return _Stem.apply(x, weight, stride, padding)


class _Stem(torch.autograd.Function):
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
        dx = dweight = None
        if ctx.needed[0]:
            dx = torch.nn.grad.conv2d_input(ctx.like, weight, dy, ctx.stride, ctx.padding)
        if ctx.needed[1]:
            dweight = _dweight(x, dy, weight, ctx.stride, ctx.padding)
        return dx, dweight, None, None


def _forward(x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    images, channels, height, width = x.shape
    out_channels, kernel = weight.shape[0], weight.shape[-1]
    out_height, out_width = ((size + 2 * padding - kernel) // stride + 1 for size in (height, width))
    out = torch.empty(
        (images, out_channels, out_height, out_width),
        dtype=x.dtype,
        device=x.device,
        memory_format=torch.channels_last,
    )
    if not out.numel():
        return out
    pixels = images * out_height * out_width
    rows, block_k, block_o = _blocks(channels, kernel, out_channels)
    with torch.cuda.device_of(x):
        _forward_kernel[(triton.cdiv(out_channels, block_o), min(PROGRAMS, triton.cdiv(pixels, BLOCK_PIXELS)))](
            x,
            weight,
            out,
            *weight.stride(),
            pixels,
            *(channels, height, width, out_height, out_width, kernel, stride, padding, out_channels),
            ROWS=rows,
            BLOCK_K=block_k,
            BLOCK_M=BLOCK_PIXELS,
            BLOCK_O=block_o,
            WIDE=max(x.numel(), out.numel()) > INT32_ELEMENTS,
            num_warps=max(1, BLOCK_PIXELS // 32),
            num_stages=STAGES[x.element_size()],
        )
    return out


def _dweight(x: Tensor, dy: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    channels, height, width = x.shape[1:]
    images, out_channels, out_height, out_width = dy.shape
    kernel = weight.shape[-1]
    dweight = torch.empty_like(weight)
    if not dy.numel():
        return dweight.zero_()
    pixels = images * out_height * out_width
    rows, block_k, block_o = _blocks(channels, kernel, out_channels)
    groups = triton.cdiv(kernel, rows), triton.cdiv(out_channels, block_o)
    shares = _shares(triton.cdiv(pixels, BLOCK_PIXELS), groups[0] * groups[1], block_k)
    partial = torch.empty((shares, weight.numel()), dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        _dweight_kernel[(*groups, shares)](
            x,
            dy,
            partial,
            pixels,
            *(channels, height, width, out_height, out_width, kernel, stride, padding, out_channels),
            ROWS=rows,
            BLOCK_K=block_k,
            BLOCK_M=BLOCK_PIXELS,
            BLOCK_O=block_o,
            WIDE=max(x.numel(), dy.numel()) > INT32_ELEMENTS,
            num_warps=max(1, BLOCK_PIXELS // 32),
            num_stages=STAGES[dy.element_size()],
        )
        _dweight_sum_kernel[(triton.cdiv(weight.numel(), SUM_ELEMENTS),)](
            partial,
            dweight,
            *dweight.stride(),
            shares,
            *(channels, kernel, out_channels),
            BLOCK_S=SUM_SHARES,
            BLOCK_E=SUM_ELEMENTS,
            num_warps=4,
        )
    return dweight


def _blocks(channels: int, kernel: int, out_channels: int) -> tuple[int, int, int]:
    """Kernel rows of a block, as many as fit it and about as many in each, its columns and its output channels."""
    blocks = triton.cdiv(kernel, max(1, BLOCK_COLUMNS // (kernel * channels)))
    rows = triton.cdiv(kernel, blocks)
    block_k = max(MIN_DOT, triton.next_power_of_2(rows * kernel * channels))
    return rows, block_k, max(MIN_DOT, min(BLOCK_OUT, triton.next_power_of_2(out_channels)))


def _shares(tiles: int, groups: int, block_k: int) -> int:
    """Parts that the pixels are summed in: enough to fill the card, of tiles enough to be worth a partial sum."""
    # Writing and reading an FP32 partial sum moves no more bytes than reading dy for it.
    least = max(1, 4 * block_k // BLOCK_PIXELS)
    return triton.cdiv(tiles, max(least, triton.cdiv(tiles, max(1, PROGRAMS // groups))))


def has_matrix_units(x: Tensor) -> bool:
    """Whether the kernels take this tensor: 16-bit or TF32, on a card for which Triton uses matrix units."""
    rounded = torch.backends.cudnn.allow_tf32 if x.dtype == torch.float32 else x.dtype != torch.float64
    return rounded and not (x.is_cuda and torch.cuda.get_device_capability(x.device) < (8, 0))


def _check(x: Tensor, weight: Tensor, stride: int, padding: int) -> None:
    if x.dim() != 4 or x.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(
            f"x: expected fp16, bf16, fp32 or fp64 [N, C, H, W], got {x.dtype} {list(x.shape)}; pass a batch of images"
        )
    channels, kernel = x.shape[1], weight.shape[-1] if weight.dim() else 0
    if not 1 <= channels <= MAX_CHANNELS:
        raise ValueError(f"x: expected 1 to {MAX_CHANNELS} channels, got {channels}; use torch's convolution for more")
    if weight.dim() != 4 or not weight.shape[0] or weight.shape[1:] != (channels, kernel, kernel):
        raise ValueError(
            f"weight: expected [O, {channels}, k, k], got {list(weight.shape)}; pass square filters of every channel"
        )
    if kernel % 2 == 0 or kernel > MAX_KERNEL:
        raise ValueError(
            f"weight: expected an odd k of at most {MAX_KERNEL}, got {kernel}; use torch's convolution for others"
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
