"""Evaluation-mode BatchNorm2d with residual addition and activation, in one launch a direction."""

# Without the postponed annotations of other files: Triton 3.2's interpreter needs `tl.constexpr` itself, not its name.

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from triaccel_bench.kernels.backend import require_backend, tl, triton
from triaccel_bench.kernels.norm import ACTIVATIONS, DTYPES, finished, memory_format_of

PROGRAMS = 512
"""Programs that fill a large card: four of four warps for each of its multiprocessors."""
NOMINAL_BATCH = 96
"""Images for which tiles are chosen, whatever the batch: another choice is another kernel to compile."""
TILES = ((4, 1024), (2, 1024), (1, 1024), (1, 512), (1, 256))
"""Rows of a program and their elements, largest first. More rows share one reading of the channels' values."""
ELEMENTS_A_THREAD = 8
"""Of each row: a 16-byte load in half precision."""
INT32_MAX = 2**31 - 1


def affine_norm_act_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    eps: float,
    *,
    activation: str = "none",
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """What ``affine_norm_act`` computes, in torch operations with plain autograd, also of weight and bias."""
    y = functional.batch_norm(x, running_mean, running_var, weight, bias, False, 0.0, eps)
    return finished(y, activation, residual, None, out_dtype or x.dtype)


if triton is not None:

    @triton.jit
    def _places(units, units_a_row, C: tl.constexpr, AREA: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr):
        """Elements of the tensor and of a row, and where this program's lie in the first row.

        A unit has all channels once, so that a program meets the same channels in every row. Sizes are products with
        what is compiled in, so that loads are known to be aligned.
        """
        program = tl.program_id(0)
        if WIDE:
            program = program.to(tl.int64)
            units = units.to(tl.int64)
            units_a_row = units_a_row.to(tl.int64)
        return units * (C * AREA), units_a_row * (C * AREA), program * TILE + tl.arange(0, TILE)

    @triton.jit(do_not_specialize=["units", "units_a_row"])
    def _forward_kernel(
        x,
        weight,
        bias,
        running_mean,
        running_var,
        residual,
        y,
        units,
        units_a_row,
        eps,
        C: tl.constexpr,
        AREA: tl.constexpr,
        ACTIVATION: tl.constexpr,
        ROWS: tl.constexpr,
        TILE: tl.constexpr,
        WIDE: tl.constexpr,
    ):
        elements, row, place = _places(units, units_a_row, C, AREA, TILE, WIDE)
        channel = place // AREA % C
        mean = tl.load(running_mean + channel)
        slope = tl.rsqrt(tl.load(running_var + channel) + eps) * tl.load(weight + channel)
        intercept = tl.load(bias + channel)
        offset = place
        for _ in tl.static_range(ROWS):
            live = (place < row) & (offset < elements)
            z = (tl.load(x + offset, mask=live, other=0.0).to(tl.float32) - mean) * slope + intercept
            if residual is not None:
                z += tl.load(residual + offset, mask=live, other=0.0).to(tl.float32)
            if ACTIVATION == "relu":
                # Not a maximum, which would turn NaN into 0.
                z = tl.where(z < 0.0, 0.0, z)
            if ACTIVATION == "silu":
                z = z / (1.0 + tl.exp(-z))
            tl.store(y + offset, z.to(y.dtype.element_ty), mask=live)
            offset += row

    @triton.jit(do_not_specialize=["units", "units_a_row"])
    def _backward_kernel(
        dy,
        kept,
        residual,
        weight,
        bias,
        running_mean,
        running_var,
        dx,
        dresidual,
        units,
        units_a_row,
        eps,
        C: tl.constexpr,
        AREA: tl.constexpr,
        ACTIVATION: tl.constexpr,
        ROWS: tl.constexpr,
        TILE: tl.constexpr,
        WIDE: tl.constexpr,
    ):
        """``kept`` is y for a ReLU and x for a SiLU, whose z is computed anew."""
        elements, row, place = _places(units, units_a_row, C, AREA, TILE, WIDE)
        channel = place // AREA % C
        slope = tl.rsqrt(tl.load(running_var + channel) + eps) * tl.load(weight + channel)
        if ACTIVATION == "silu":
            mean = tl.load(running_mean + channel)
            intercept = tl.load(bias + channel)
        offset = place
        for _ in tl.static_range(ROWS):
            live = (place < row) & (offset < elements)
            dz = tl.load(dy + offset, mask=live, other=0.0).to(tl.float32)
            if ACTIVATION == "relu":
                y = tl.load(kept + offset, mask=live, other=0.0).to(tl.float32)
                dz = tl.where(y <= 0.0, 0.0, dz)
            if ACTIVATION == "silu":
                z = (tl.load(kept + offset, mask=live, other=0.0).to(tl.float32) - mean) * slope + intercept
                if residual is not None:
                    z += tl.load(residual + offset, mask=live, other=0.0).to(tl.float32)
                gate = 1.0 / (1.0 + tl.exp(-z))
                dz = dz * gate * (1.0 + z * (1.0 - gate))
            if dx is not None:
                tl.store(dx + offset, (dz * slope).to(dx.dtype.element_ty), mask=live)
            if dresidual is not None:
                tl.store(dresidual + offset, dz.to(dresidual.dtype.element_ty), mask=live)
            offset += row


def affine_norm_act(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    eps: float,
    *,
    activation: str = "none",
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str,
) -> Tensor:
    """Normalise by the running statistics, add and activate, as one operation differentiable in x and the residual.

    z = (x - running_mean) / sqrt(running_var + eps) * weight + bias + residual;  y = act(z). Triton computes
    in FP32 and rounds once, keeps y for a ReLU, x and the residual for a SiLU and nothing else, and its backward
    cannot be differentiated again. FP64 and empty tensors are given to the reference.

    Args:
        x: ``[N, C, H, W]``, FP16, BF16 or FP32, channels_last or contiguous; with other strides it is copied first.
        weight, bias, running_mean, running_var: FP32 ``[C]``; only the reference differentiates by the first two.
        eps: added to the variance.
        activation: ``"none"``, ``"relu"`` or ``"silu"``.
        residual: shape of x, FP16, BF16 or FP32; its gradient has its dtype.
        out_dtype: dtype of y; None is that of x.
        backend: ``"triton"`` or ``"torch"`` (the reference).

    Returns:
        y ``[N, C, H, W]``, in the memory layout of x.

    Raises:
        ValueError: a weight, bias or statistic that Triton would have to differentiate by, an unknown activation, a
            shape, dtype or device that does not fit, or a backend that cannot run there.
    """
    per_channel = dict(weight=weight, bias=bias, running_mean=running_mean, running_var=running_var)
    _check(x, activation, residual, per_channel)
    require_backend(backend, x.device)
    if backend == "torch" or x.dtype == torch.float64 or not x.numel():
        return affine_norm_act_reference(
            x, **per_channel, eps=eps, activation=activation, residual=residual, out_dtype=out_dtype
        )
    out_dtype = out_dtype or x.dtype
    _check_for_triton(x, residual, out_dtype, per_channel)
    return _AffineNormAct.apply(x, residual, *per_channel.values(), float(eps), activation, out_dtype)


class _AffineNormAct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, bias, running_mean, running_var, eps, activation, out_dtype):
        ctx.set_materialize_grads(False)
        ctx.format, ctx.dtype = memory_format_of(x), x.dtype
        ctx.residual_dtype = None if residual is None else residual.dtype
        ctx.activation, ctx.eps = activation, eps
        x = x.contiguous(memory_format=ctx.format)
        if residual is not None:
            residual = residual.contiguous(memory_format=ctx.format)
        y = torch.empty_like(x, dtype=out_dtype)
        known = weight, bias, running_mean, running_var
        grid, sizes, fixed = _cut(x.shape, ctx.format)
        with torch.cuda.device_of(x):
            _forward_kernel[grid](x, *known, residual, y, *sizes, eps, ACTIVATION=activation, **fixed)
        # A ReLU keeps y, which whoever reads it keeps as well, so that x can go.
        kept = {"none": (None, None), "relu": (y, None), "silu": (x, residual)}[activation]
        ctx.save_for_backward(*kept, *known)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        unneeded = (None,) * 7
        if dy is None:
            return None, None, *unneeded
        dy = dy.contiguous(memory_format=ctx.format)
        of_x, of_residual = ctx.needs_input_grad[:2]
        dx = torch.empty_like(dy, dtype=ctx.dtype) if of_x else None
        dresidual, written = None, None
        if of_residual:
            if ctx.activation == "none":
                dresidual = dy.to(ctx.residual_dtype)
            else:
                dresidual = written = torch.empty_like(dy, dtype=ctx.residual_dtype)
        if dx is not None or written is not None:
            grid, sizes, fixed = _cut(dy.shape, ctx.format)
            with torch.cuda.device_of(dy):
                _backward_kernel[grid](
                    dy, *ctx.saved_tensors, dx, written, *sizes, ctx.eps, ACTIVATION=ctx.activation, **fixed
                )
        return dx, dresidual, *unneeded


def _cut(shape: torch.Size, memory_format: torch.memory_format) -> tuple[tuple[int], tuple[int, int], dict]:
    """Grid, what the kernels learn of a shape at run time, and what is compiled in, which the batch does not change."""
    batch, channels, height, width = shape
    area = height * width
    nominal = NOMINAL_BATCH * channels * area
    rows, tile = next((cut for cut in TILES if nominal >= PROGRAMS * cut[0] * cut[1]), TILES[-1])
    units, together = (batch * area, 1) if memory_format == torch.channels_last else (batch, area)
    units_a_row = triton.cdiv(units, rows)
    row_length = units_a_row * channels * together
    fixed = dict(
        C=channels,
        AREA=together,
        ROWS=rows,
        TILE=tile,
        WIDE=rows * row_length + tile > INT32_MAX,
        num_warps=max(1, tile // (32 * ELEMENTS_A_THREAD)),
    )
    return (triton.cdiv(row_length, tile),), (units, units_a_row), fixed


def _check(x: Tensor, activation: str, residual: Tensor | None, per_channel: dict[str, Tensor]) -> None:
    if x.dim() != 4:
        raise ValueError(f"x: expected [N, C, H, W], got shape {tuple(x.shape)}; pass four dimensions")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r}: expected one of {ACTIVATIONS}, got another; pass one of them")
    shapes = {"residual": (residual, x.shape)} | {name: (each, x.shape[1:2]) for name, each in per_channel.items()}
    for name, (tensor, shape) in shapes.items():
        if tensor is not None and (tensor.shape != shape or tensor.device != x.device):
            raise ValueError(
                f"{name}: expected shape {tuple(shape)} on {x.device}, got {tuple(tensor.shape)} on {tensor.device}; "
                "pass one that fits x"
            )


def _check_for_triton(
    x: Tensor, residual: Tensor | None, out_dtype: torch.dtype, per_channel: dict[str, Tensor]
) -> None:
    dtypes = {"x": x.dtype, "residual": x.dtype if residual is None else residual.dtype, "out_dtype": out_dtype}
    for name, dtype in dtypes.items():
        if dtype not in DTYPES:
            raise ValueError(f"{name}: expected FP16, BF16 or FP32, got {dtype}; convert it or pass backend='torch'")
    for name, tensor in per_channel.items():
        if tensor.dtype != torch.float32 or not tensor.is_contiguous():
            raise ValueError(f"{name}: expected contiguous torch.float32, got {tensor.dtype}; convert it")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name}: expected weight and bias that need no gradient under the triton backend, got one that "
                "requires it; freeze it, run without gradients, or pass backend='torch'"
            )
