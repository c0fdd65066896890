"""Squeeze and excitation without its small layers: the pooling and the gated product, one launch in each direction."""

# Without the postponed annotations of other files: Triton 3.2's interpreter needs `tl.constexpr` itself, not its name.

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from triaccel_bench.kernels.backend import require_backend, tl, triton

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def squeeze_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """What ``squeeze`` computes, by torch; autograd adds the two gradients."""
    return functional.adaptive_avg_pool2d(x, 1), x


def excite_reference(x: Tensor, gate: Tensor, out_dtype: torch.dtype) -> Tensor:
    """What ``excite`` computes, by torch, which rounds the sigmoid and the product on the way."""
    return (x * gate.reshape(*x.shape[:2], 1, 1).sigmoid()).to(out_dtype)


if triton is not None:

    @triton.jit
    def _rows(samples, channels, BLOCK_SAMPLES: tl.constexpr, BLOCK_CHANNELS: tl.constexpr):
        """This program's samples and channels, [samples, channels] in a matrix of one value for each, and its mask."""
        blocks = (channels + BLOCK_CHANNELS - 1) // BLOCK_CHANNELS
        program = tl.program_id(0)
        sample = (program // blocks) * BLOCK_SAMPLES + tl.arange(0, BLOCK_SAMPLES)
        channel = (program % blocks) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
        row = sample.to(tl.int64)[:, None] * channels + channel[None, :]
        return sample, channel, row, (sample < samples)[:, None] & (channel < channels)[None, :]

    @triton.jit
    def _elements(
        sample,
        channel,
        live_rows,
        start,
        channels,
        pixels,
        CHANNELS_LAST: tl.constexpr,
        BLOCK_PIXELS: tl.constexpr,
    ):
        """Offsets [samples, pixels, channels] of the program's elements from pixel ``start`` on, and their mask."""
        pixel = start + tl.arange(0, BLOCK_PIXELS)
        if CHANNELS_LAST:
            inner = pixel[:, None] * channels + channel[None, :]
        else:
            inner = pixel[:, None] + channel[None, :] * pixels
        place = sample.to(tl.int64)[:, None, None] * (channels * pixels) + inner[None, :, :]
        return place, live_rows[:, None, :] & (pixel < pixels)[None, :, None]

    @triton.jit(do_not_specialize=["samples", "pixels"])
    def _squeeze_kernel(
        x,
        pooled,
        samples,
        channels,
        pixels,
        CHANNELS_LAST: tl.constexpr,
        BLOCK_SAMPLES: tl.constexpr,
        BLOCK_PIXELS: tl.constexpr,
        BLOCK_CHANNELS: tl.constexpr,
    ):
        """Each program averages all pixels of some channels of some samples."""
        sample, channel, row, live_rows = _rows(samples, channels, BLOCK_SAMPLES, BLOCK_CHANNELS)
        total = tl.zeros((BLOCK_SAMPLES, BLOCK_PIXELS, BLOCK_CHANNELS), tl.float32)
        start = 0
        while start < pixels:
            place, live = _elements(sample, channel, live_rows, start, channels, pixels, CHANNELS_LAST, BLOCK_PIXELS)
            total += tl.load(x + place, mask=live, other=0.0).to(tl.float32)
            start += BLOCK_PIXELS
        mean = tl.sum(total, axis=1) / pixels
        tl.store(pooled + row, mean.to(pooled.dtype.element_ty), mask=live_rows)

    @triton.jit(do_not_specialize=["samples", "pixels"])
    def _squeeze_backward_kernel(
        d_pooled,
        d_through,
        dx,
        samples,
        channels,
        pixels,
        ADD: tl.constexpr,
        CHANNELS_LAST: tl.constexpr,
        BLOCK_SAMPLES: tl.constexpr,
        BLOCK_PIXELS: tl.constexpr,
        BLOCK_CHANNELS: tl.constexpr,
    ):
        """Each program writes one tile."""
        sample, channel, row, live_rows = _rows(samples, channels, BLOCK_SAMPLES, BLOCK_CHANNELS)
        place, live = _elements(
            sample, channel, live_rows, tl.program_id(1) * BLOCK_PIXELS, channels, pixels, CHANNELS_LAST, BLOCK_PIXELS
        )
        share = tl.load(d_pooled + row, mask=live_rows, other=0.0).to(tl.float32) / pixels
        grad = tl.zeros((BLOCK_SAMPLES, BLOCK_PIXELS, BLOCK_CHANNELS), tl.float32) + share[:, None, :]
        if ADD:
            grad += tl.load(d_through + place, mask=live, other=0.0).to(tl.float32)
        tl.store(dx + place, grad.to(dx.dtype.element_ty), mask=live)

    @triton.jit(do_not_specialize=["samples", "pixels"])
    def _excite_kernel(
        x,
        gate,
        y,
        samples,
        channels,
        pixels,
        CHANNELS_LAST: tl.constexpr,
        BLOCK_SAMPLES: tl.constexpr,
        BLOCK_PIXELS: tl.constexpr,
        BLOCK_CHANNELS: tl.constexpr,
    ):
        """Each program scales one tile."""
        sample, channel, row, live_rows = _rows(samples, channels, BLOCK_SAMPLES, BLOCK_CHANNELS)
        place, live = _elements(
            sample, channel, live_rows, tl.program_id(1) * BLOCK_PIXELS, channels, pixels, CHANNELS_LAST, BLOCK_PIXELS
        )
        scale = tl.sigmoid(tl.load(gate + row, mask=live_rows, other=0.0).to(tl.float32))
        product = tl.load(x + place, mask=live, other=0.0).to(tl.float32) * scale[:, None, :]
        tl.store(y + place, product.to(y.dtype.element_ty), mask=live)

    @triton.jit(do_not_specialize=["samples", "pixels"])
    def _excite_backward_kernel(
        dy,
        x,
        gate,
        dx,
        d_gate,
        samples,
        channels,
        pixels,
        CHANNELS_LAST: tl.constexpr,
        BLOCK_SAMPLES: tl.constexpr,
        BLOCK_PIXELS: tl.constexpr,
        BLOCK_CHANNELS: tl.constexpr,
    ):
        """Each program handles all pixels of some channels of some samples, and reads each element once."""
        sample, channel, row, live_rows = _rows(samples, channels, BLOCK_SAMPLES, BLOCK_CHANNELS)
        logit = tl.load(gate + row, mask=live_rows, other=0.0).to(tl.float32)
        scale = tl.sigmoid(logit)
        total = tl.zeros((BLOCK_SAMPLES, BLOCK_PIXELS, BLOCK_CHANNELS), tl.float32)
        start = 0
        while start < pixels:
            place, live = _elements(sample, channel, live_rows, start, channels, pixels, CHANNELS_LAST, BLOCK_PIXELS)
            grad = tl.load(dy + place, mask=live, other=0.0).to(tl.float32)
            total += grad * tl.load(x + place, mask=live, other=0.0).to(tl.float32)
            tl.store(dx + place, (grad * scale[:, None, :]).to(dx.dtype.element_ty), mask=live)
            start += BLOCK_PIXELS
        # sigmoid(-g) is 1 - sigmoid(g) without the cancellation of a large g.
        slope = scale * tl.sigmoid(-logit)
        tl.store(d_gate + row, (tl.sum(total, axis=1) * slope).to(d_gate.dtype.element_ty), mask=live_rows)


def squeeze(x: Tensor, *, backend: str) -> tuple[Tensor, Tensor]:
    """Mean over the pixels, and ``x`` once more for the product that follows, so that one kernel ends both backwards.

    pooled = mean(x, (2, 3)), summed in FP32;  dx = d_x_through + d_pooled / (H W).

    Args:
        x: FP16, BF16 or FP32 ``[N, C, H, W]``, channels-last or contiguous; another layout is copied. FP64 takes the
            reference.
        backend: ``"triton"`` (differentiable once) or ``"torch"`` (the reference).

    Returns:
        ``pooled [N, C, 1, 1]`` and ``x_through [N, C, H, W]``, which shares the memory of ``x``; both of its dtype.

    Raises:
        ValueError: ``x`` is not of these dtypes and shape, or the backend cannot run on its device.
    """
    _check_images(x)
    require_backend(backend, x.device)
    if backend == "torch" or x.dtype == torch.float64 or not x.numel():
        return squeeze_reference(x)
    return _Squeeze.apply(_laid_out(x))


def excite(x: Tensor, gate: Tensor, *, out_dtype: torch.dtype | None = None, backend: str) -> Tensor:
    """The product with a gate for every sample and channel: y = x sigmoid(gate), computed in FP32 and rounded once.

    dx = dy sigmoid(gate);  d_gate = sum(dy x, (2, 3)) sigmoid(gate) (1 - sigmoid(gate)), summed in FP32. Each
    gradient has dtype and shape of its input; ``x`` and ``gate`` are all that is kept for them.

    Args:
        x: FP16, BF16 or FP32 ``[N, C, H, W]``, channels-last or contiguous; another layout is copied.
        gate: logits, FP16, BF16 or FP32, ``[N, C, 1, 1]`` or ``[N, C]``.
        out_dtype: dtype of y; None is the one to which torch promotes ``x`` and ``gate``.
        backend: ``"triton"`` (differentiable once) or ``"torch"`` (the reference, which also takes any FP64).

    Returns:
        y ``[N, C, H, W]`` in the layout of ``x``.

    Raises:
        ValueError: a dtype or shape is not one of these, the tensors lie on two devices, or the backend cannot run
            there.
    """
    _check_images(x)
    rows = tuple(x.shape[:2])
    if tuple(gate.shape) not in (rows, (*rows, 1, 1)) or gate.dtype not in DTYPES or gate.device != x.device:
        raise ValueError(
            f"gate: expected floating-point logits of shape {(*rows, 1, 1)} or {rows} on {x.device}, got {gate.dtype} "
            f"of shape {tuple(gate.shape)} on {gate.device}; pass one logit for each sample and channel of x"
        )
    out_dtype = torch.promote_types(x.dtype, gate.dtype) if out_dtype is None else out_dtype
    if out_dtype not in DTYPES:
        raise ValueError(f"out_dtype: expected one of {DTYPES}, got {out_dtype}; pass a floating-point dtype")
    require_backend(backend, x.device)
    if backend == "torch" or torch.float64 in (x.dtype, gate.dtype, out_dtype) or not x.numel():
        return excite_reference(x, gate, out_dtype)
    return _Excite.apply(_laid_out(x), gate.contiguous(), out_dtype)


class _Squeeze(Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.dtype, ctx.device, ctx.layout = x.shape, x.dtype, x.device, _layout_of(x)
        pooled = torch.empty((*x.shape[:2], 1, 1), dtype=x.dtype, device=x.device, memory_format=ctx.layout)
        tile, warps = _tile(x.shape)
        with torch.cuda.device_of(x):
            _squeeze_kernel[_grid(x.shape, tile, split_pixels=False)](
                x, pooled, *_sizes(x.shape), CHANNELS_LAST=ctx.layout == torch.channels_last, **tile, num_warps=warps
            )
        return pooled, x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_pooled: Tensor | None, d_through: Tensor | None) -> Tensor | None:
        if d_pooled is None:
            return d_through
        if d_through is not None:
            d_through = d_through.contiguous(memory_format=ctx.layout)
        dx = torch.empty(ctx.shape, dtype=ctx.dtype, device=ctx.device, memory_format=ctx.layout)
        tile, warps = _tile(ctx.shape)
        with torch.cuda.device_of(dx):
            _squeeze_backward_kernel[_grid(ctx.shape, tile, split_pixels=True)](
                d_pooled.contiguous(),
                dx if d_through is None else d_through,
                dx,
                *_sizes(ctx.shape),
                ADD=d_through is not None,
                CHANNELS_LAST=ctx.layout == torch.channels_last,
                **tile,
                num_warps=warps,
            )
        return dx


class _Excite(Function):
    @staticmethod
    def forward(ctx, x: Tensor, gate: Tensor, out_dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, gate)
        y = torch.empty_like(x, dtype=out_dtype)
        tile, warps = _tile(x.shape)
        with torch.cuda.device_of(x):
            _excite_kernel[_grid(x.shape, tile, split_pixels=True)](
                x,
                gate,
                y,
                *_sizes(x.shape),
                CHANNELS_LAST=_layout_of(x) == torch.channels_last,
                **tile,
                num_warps=warps,
            )
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, gate = ctx.saved_tensors
        layout = _layout_of(x)
        dx, d_gate = torch.empty_like(x), torch.empty_like(gate)
        tile, warps = _tile(x.shape)
        with torch.cuda.device_of(x):
            _excite_backward_kernel[_grid(x.shape, tile, split_pixels=False)](
                dy.contiguous(memory_format=layout),
                x,
                gate,
                dx,
                d_gate,
                *_sizes(x.shape),
                CHANNELS_LAST=layout == torch.channels_last,
                **tile,
                num_warps=warps,
            )
        return dx, d_gate, None


def _tile(shape: torch.Size) -> tuple[dict[str, int], int]:
    """Block sizes and warps, not chosen by the batch size: each choice compiles a kernel of its own."""
    channels, pixels = shape[1], shape[2] * shape[3]
    # A wide image has few channels, and needs them split into enough programs for all multiprocessors.
    widest = 64 if pixels < 16 else 32 if channels > 32 else 16
    block_channels = min(triton.next_power_of_2(channels), widest)
    block_pixels = min(triton.next_power_of_2(pixels), 8192 // block_channels)
    block_samples = max(1, 512 // (block_channels * block_pixels))
    tile = {
        "BLOCK_SAMPLES": block_samples,
        "BLOCK_PIXELS": block_pixels,
        "BLOCK_CHANNELS": block_channels,
    }
    return tile, min(8, block_samples * block_pixels * block_channels // 256)


def _sizes(shape: torch.Size) -> tuple[int, int, int]:
    """What the kernels learn of a shape at run time: samples, channels, pixels."""
    return shape[0], shape[1], shape[2] * shape[3]


def _grid(shape: torch.Size, tile: dict[str, int], *, split_pixels: bool) -> tuple[int, int]:
    rows = triton.cdiv(shape[0], tile["BLOCK_SAMPLES"]) * triton.cdiv(shape[1], tile["BLOCK_CHANNELS"])
    return rows, triton.cdiv(shape[2] * shape[3], tile["BLOCK_PIXELS"]) if split_pixels else 1


def _check_images(x: Tensor) -> None:
    if x.dim() != 4 or x.dtype not in DTYPES:
        raise ValueError(
            f"x: expected floating point of shape [N, C, H, W], got {x.dtype} of shape {tuple(x.shape)}; "
            "pass a batch of images"
        )


def _layout_of(x: Tensor) -> torch.memory_format:
    # Channels-last first: where an image is one pixel both are true, and its channels are what lies side by side.
    return torch.channels_last if x.is_contiguous(memory_format=torch.channels_last) else torch.contiguous_format


def _laid_out(x: Tensor) -> Tensor:
    return x if _layout_of(x) == torch.channels_last else x.contiguous()
