"""Training-mode BatchNorm2d with per-sample scale, residual addition and activation, in two launches a direction."""

# Without the postponed annotations of other files: Triton 3.2's interpreter needs `tl.constexpr` itself, not its name.

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from triaccel_bench.kernels.backend import require_backend, tl, triton

ACTIVATIONS = ("none", "relu", "silu")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MULTIPROCESSORS = 132
MAX_CHUNKS = 128
"""Chunks of rows whose partial results every program of the second launch merges as one tile."""
SECOND_WAVE = 2 * MULTIPROCESSORS
"""Programs of a second launch over large tensors: two of eight warps a multiprocessor."""
ONE_LAUNCH_AREA = 8
"""Pixels of an image up to which a program reads all rows of its channels twice: cheaper than a second launch."""
NARROW_IMAGE = 5632
"""Elements of an image below which a hundred of them leave multiprocessors without one of the wide tiles."""
WIDE_TILE, NARROW_TILE = 4096, 2048
"""Elements a tile of 8 and of 4 warps."""
WIDE_CHANNELS, CHANNELS_A_PROGRAM = 64, 32
"""Channels a program if they are adjacent in memory (128 and 64 bytes in 16 bits); the more in wide tiles they fill."""


def batch_norm_act_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
    *,
    activation: str = "none",
    residual: Tensor | None = None,
    sample_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """What ``batch_norm_act`` computes, in torch operations with plain autograd; the running statistics are written."""
    y = functional.batch_norm(x, running_mean, running_var, weight, bias, True, momentum, eps)
    return finished(y, activation, residual, sample_scale, out_dtype or x.dtype)


def finished(
    y: Tensor, activation: str, residual: Tensor | None, sample_scale: Tensor | None, out_dtype: torch.dtype | None
) -> Tensor:
    """What follows a normalisation: ``activation(y * sample_scale + residual)`` in ``out_dtype``; ``y`` is used up."""
    if sample_scale is not None:
        y = y * sample_scale.view(-1, 1, 1, 1)
    if residual is not None:
        y = join_sum(y, residual, out_dtype)
    # In place, because no operation keeps what is overwritten for backward.
    if activation == "relu":
        y = functional.relu(y, inplace=True)
    elif activation == "silu":
        y = functional.silu(y)
    return y if out_dtype is None else y.to(out_dtype)


def join_sum(left: Tensor, right: Tensor, dtype: torch.dtype | None) -> Tensor:
    """left + right, summed in the wider of the two dtypes and handed on in ``dtype`` (None: the promoted one)."""
    if left.dtype == right.dtype and dtype in (None, left.dtype):
        return left.add_(right)
    total = left + right
    return total if dtype is None else total.to(dtype)


if triton is not None:

    @triton.jit
    def _channels(channels, BLOCK_C: tl.constexpr):
        channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
        return channel, channel < channels

    @triton.jit
    def _places(
        row,
        batch,
        channels,
        area,
        CHANNELS_LAST: tl.constexpr,
        BLOCK_C: tl.constexpr,
    ):
        """Where this program's channels of some rows lie, and which of them exist."""
        channel, exists = _channels(channels, BLOCK_C)
        if CHANNELS_LAST:
            offset = row[:, None] * channels + channel[None, :]
        else:
            offset = (row // area * (channels * area) + row % area)[:, None] + channel[None, :] * area
        return offset, (row < batch * area)[:, None] & exists[None, :]

    @triton.jit
    def _tile(
        x,
        tile,
        end,
        batch,
        channels,
        area,
        CHANNELS_LAST: tl.constexpr,
        BLOCK_R: tl.constexpr,
        BLOCK_C: tl.constexpr,
    ):
        """One tile as it lies in memory, and its mask; nothing of a tile at ``end`` or beyond."""
        row = tile * BLOCK_R + tl.arange(0, BLOCK_R)
        offset, live = _places(row, batch, channels, area, CHANNELS_LAST, BLOCK_C)
        live = live & (tile < end)
        return tl.load(x + offset, mask=live, other=0.0), live

    @triton.jit
    def _chunk_moments(
        x,
        batch,
        first_tile,
        tiles,
        channels,
        area,
        CHANNELS_LAST: tl.constexpr,
        BLOCK_R: tl.constexpr,
        BLOCK_C: tl.constexpr,
    ):
        """Mean and sum of squares around it of each channel over some tiles.

        Sums are of differences from the first tile's mean, so that nothing cancels; threads meet after the loop.
        """
        row = first_tile * BLOCK_R + tl.arange(0, BLOCK_R)
        offset, live = _places(row, batch, channels, area, CHANNELS_LAST, BLOCK_C)
        value = tl.load(x + offset, mask=live, other=0.0).to(tl.float32)
        rows = batch * area - first_tile * BLOCK_R
        pivot = tl.sum(value, axis=0) / tl.minimum(rows, BLOCK_R).to(tl.float32)
        total = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
        squares = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
        end = first_tile + tiles
        tile = first_tile
        while tile < end:
            # Four tiles a turn, all loaded before the first is used: their loads do not wait for each other.
            value0, live0 = _tile(x, tile, end, batch, channels, area, CHANNELS_LAST, BLOCK_R, BLOCK_C)
            value1, live1 = _tile(x, tile + 1, end, batch, channels, area, CHANNELS_LAST, BLOCK_R, BLOCK_C)
            value2, live2 = _tile(x, tile + 2, end, batch, channels, area, CHANNELS_LAST, BLOCK_R, BLOCK_C)
            value3, live3 = _tile(x, tile + 3, end, batch, channels, area, CHANNELS_LAST, BLOCK_R, BLOCK_C)
            off0 = tl.where(live0, value0.to(tl.float32) - pivot[None, :], 0.0)
            off1 = tl.where(live1, value1.to(tl.float32) - pivot[None, :], 0.0)
            off2 = tl.where(live2, value2.to(tl.float32) - pivot[None, :], 0.0)
            off3 = tl.where(live3, value3.to(tl.float32) - pivot[None, :], 0.0)
            total += (off0 + off1) + (off2 + off3)
            squares += (off0 * off0 + off1 * off1) + (off2 * off2 + off3 * off3)
            tile += 4
        count = tl.minimum(rows, tiles * BLOCK_R).to(tl.float32)
        whole = tl.sum(total, axis=0)
        shift = whole / count
        return pivot + shift, tl.maximum(tl.sum(squares, axis=0) - whole * shift, 0.0)

    @triton.jit
    def _merged_moments(
        partials,
        rows,
        chunks,
        chunk_rows,
        channels,
        BLOCK_C: tl.constexpr,
        CHUNKS: tl.constexpr,
    ):
        """Mean and sum of squares of all rows from those of the chunks, by Chan's formula."""
        channel, exists = _channels(channels, BLOCK_C)
        chunk = tl.arange(0, CHUNKS)
        place = chunk[:, None] * channels + channel[None, :]
        live = (chunk < chunks)[:, None] & exists[None, :]
        means = tl.load(partials + place, mask=live, other=0.0)
        m2s = tl.load(partials + chunks * channels + place, mask=live, other=0.0)
        count = tl.minimum(tl.maximum(rows - chunk * chunk_rows, 0), chunk_rows).to(tl.float32)
        mean = tl.sum(count[:, None] * means, axis=0) / rows
        off = means - mean[None, :]
        return mean, tl.sum(m2s + count[:, None] * off * off, axis=0)

    @triton.jit(do_not_specialize=["batch", "tiles", "area"])
    def _moments_kernel(
        x,
        partials,
        batch,
        tiles,
        channels,
        area,
        CHANNELS_LAST: tl.constexpr,
        BLOCK_R: tl.constexpr,
        BLOCK_C: tl.constexpr,
    ):
        """First launch forward: each program measures one chunk of rows of its channels."""
        chunk = tl.program_id(1)
        mean, m2 = _chunk_moments(x, batch, chunk * tiles, tiles, channels, area, CHANNELS_LAST, BLOCK_R, BLOCK_C)
        channel, exists = _channels(channels, BLOCK_C)
        tl.store(partials + chunk * channels + channel, mean, mask=exists)
        tl.store(partials + (tl.num_programs(1) + chunk) * channels + channel, m2, mask=exists)

    @triton.jit(do_not_specialize=["chunks", "chunk_rows", "batch", "tiles", "area"])
    def _normalise_kernel(
        x,
        weight,
        bias,
        running_mean,
        running_var,
        residual,
        sample_scale,
        partials,
        statistics,
        y,
        chunks,
        chunk_rows,
        batch,
        tiles,
        momentum,
        eps,
        channels,
        area,
        CHANNELS_LAST: tl.constexpr,
        ACTIVATION: tl.constexpr,
        BLOCK_R: tl.constexpr,
        BLOCK_C: tl.constexpr,
        CHUNKS: tl.constexpr,
    ):
        """Second launch forward, or the only one if there are no ``partials``: each program writes its rows of y."""
        channel, exists = _channels(channels, BLOCK_C)
        chunk = tl.program_id(1)
        rows = batch * area
        if partials is None:
            mean, m2 = _chunk_moments(x, batch, 0, tiles, channels, area, CHANNELS_LAST, BLOCK_R, BLOCK_C)
        else:
            mean, m2 = _merged_moments(partials, rows, chunks, chunk_rows, channels, BLOCK_C, CHUNKS)
        inverse_deviation = tl.rsqrt(m2 / rows + eps)
        if chunk == 0:
            tl.store(statistics + channel, mean, mask=exists)
            tl.store(statistics + channels + channel, inverse_deviation, mask=exists)
            old_mean = tl.load(running_mean + channel, mask=exists, other=0.0)
            old_var = tl.load(running_var + channel, mask=exists, other=0.0)
            tl.store(running_mean + channel, (1.0 - momentum) * old_mean + momentum * mean, mask=exists)
            tl.store(running_var + channel, (1.0 - momentum) * old_var + momentum * (m2 / (rows - 1)), mask=exists)
        slope = inverse_deviation * tl.load(weight + channel, mask=exists, other=0.0)
        intercept = tl.load(bias + channel, mask=exists, other=0.0)
        # Backwards: what the first launch read last is what the L2 cache still holds.
        tile = tiles - 1
        while tile >= 0:
            row = (chunk * tiles + tile) * BLOCK_R + tl.arange(0, BLOCK_R)
            offset, live = _places(row, batch, channels, area, CHANNELS_LAST, BLOCK_C)
            value = tl.load(x + offset, mask=live, other=0.0).to(tl.float32)
            z = (value - mean[None, :]) * slope[None, :] + intercept[None, :]
            if sample_scale is not None:
                z = z * tl.load(sample_scale + row // area, mask=row < rows, other=0.0)[:, None]
            if residual is not None:
                z += tl.load(residual + offset, mask=live, other=0.0).to(tl.float32)
            if ACTIVATION == "relu":
                # Not a maximum, which would turn NaN into 0 and hide it from the search for non-finite gradients.
                z = tl.where(z < 0.0, 0.0, z)
            if ACTIVATION == "silu":
                z = z / (1.0 + tl.exp(-z))
            tl.store(y + offset, z, mask=live)
            tile -= 1

    @triton.jit
    def _loaded(
        x,
        dy,
        dy_side,
        y,
        row,
        batch,
        channels,
        area,
        CHANNELS_LAST: tl.constexpr,
        BLOCK_C: tl.constexpr,
    ):
        """What lies in memory of a tile, not yet used: so the loads of several tiles need not wait for each other."""
        offset, live = _places(row, batch, channels, area, CHANNELS_LAST, BLOCK_C)
        value = tl.load(x + offset, mask=live, other=0.0)
        upstream = tl.load(dy + offset, mask=live, other=0.0)
        side = upstream
        if dy_side is not None:
            side = tl.load(dy_side + offset, mask=live, other=0.0)
        kept = value
        if y is not None:
            kept = tl.load(y + offset, mask=live, other=0.0)
        return offset, live, value, upstream, side, kept

    @triton.jit
    def _tile_gradients(
        value,
        upstream,
        side,
        kept,
        dy_side,
        y,
        sample_scale,
        mean,
        inverse_deviation,
        slope,
        intercept,
        row,
        batch,
        area,
        ACTIVATION: tl.constexpr,
    ):
        """Gradients of z and of the normalised tile, and the normalised tile itself; gradients are 0 where not live."""
        dz = upstream.to(tl.float32)
        if dy_side is not None:
            dz += side.to(tl.float32)
        centred = value.to(tl.float32) - mean[None, :]
        z = centred * slope[None, :] + intercept[None, :]
        if sample_scale is not None:
            scale = tl.load(sample_scale + row // area, mask=row < batch * area, other=0.0)[:, None]
            z = z * scale
        if y is not None:
            z = kept.to(tl.float32)
        if ACTIVATION == "relu":
            dz = tl.where(z <= 0.0, 0.0, dz)
        if ACTIVATION == "silu":
            gate = 1.0 / (1.0 + tl.exp(-z))
            dz = dz * gate * (1.0 + z * (1.0 - gate))
        dbn = dz
        if sample_scale is not None:
            dbn = dz * scale
        return dz, dbn, centred * inverse_deviation[None, :]

    @triton.jit
    def _channel_values(statistics, weight, bias, channels, BLOCK_C: tl.constexpr):
        channel, exists = _channels(channels, BLOCK_C)
        mean = tl.load(statistics + channel, mask=exists, other=0.0)
        inverse_deviation = tl.load(statistics + channels + channel, mask=exists, other=0.0)
        slope = inverse_deviation * tl.load(weight + channel, mask=exists, other=0.0)
        return mean, inverse_deviation, slope, tl.load(bias + channel, mask=exists, other=0.0)

    @triton.jit
    def _chunk_sums(
        x,
        dy,
        dy_side,
        y,
        sample_scale,
        statistics,
        weight,
        bias,
        dz_out,
        batch,
        first_tile,
        tiles,
        channels,
        area,
        CHANNELS_LAST: tl.constexpr,
        ACTIVATION: tl.constexpr,
        BLOCK_R: tl.constexpr,
        BLOCK_C: tl.constexpr,
    ):
        """Sums over some tiles of the gradient of the normalised values, and of its product with them."""
        mean, inverse_deviation, slope, intercept = _channel_values(statistics, weight, bias, channels, BLOCK_C)
        total = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
        product = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
        # A second tile beyond the chunk is moved beyond the last row, where nothing is live.
        beyond = tl.cdiv(batch * area, BLOCK_R)
        tile = 0
        while tile < tiles:
            row0 = (first_tile + tile) * BLOCK_R + tl.arange(0, BLOCK_R)
            row1 = tl.where(tile + 1 < tiles, first_tile + tile + 1, beyond) * BLOCK_R + tl.arange(0, BLOCK_R)
            offset0, live0, value0, upstream0, side0, kept0 = _loaded(
                x, dy, dy_side, y, row0, batch, channels, area, CHANNELS_LAST, BLOCK_C
            )
            offset1, live1, value1, upstream1, side1, kept1 = _loaded(
                x, dy, dy_side, y, row1, batch, channels, area, CHANNELS_LAST, BLOCK_C
            )
            dz0, dbn0, normal0 = _tile_gradients(
                value0, upstream0, side0, kept0, dy_side, y, sample_scale, mean, inverse_deviation, slope, intercept,
                row0, batch, area, ACTIVATION,
            )  # fmt: skip
            dz1, dbn1, normal1 = _tile_gradients(
                value1, upstream1, side1, kept1, dy_side, y, sample_scale, mean, inverse_deviation, slope, intercept,
                row1, batch, area, ACTIVATION,
            )  # fmt: skip
            if dz_out is not None:
                tl.store(dz_out + offset0, dz0, mask=live0)
                tl.store(dz_out + offset1, dz1, mask=live1)
            total += dbn0 + dbn1
            product += dbn0 * normal0 + dbn1 * normal1
            tile += 2
        return tl.sum(total, axis=0), tl.sum(product, axis=0)

    @triton.jit(do_not_specialize=["batch", "tiles", "area"])
    def _sums_kernel(
        x,
        dy,
        dy_side,
        y,
        sample_scale,
        statistics,
        weight,
        bias,
        dz_out,
        partials,
        batch,
        tiles,
        channels,
        area,
        CHANNELS_LAST: tl.constexpr,
        ACTIVATION: tl.constexpr,
        BLOCK_R: tl.constexpr,
        BLOCK_C: tl.constexpr,
    ):
        """First launch backward: each program sums one chunk of rows of its channels, and may write their dz."""
        chunk = tl.program_id(1)
        total, product = _chunk_sums(
            x, dy, dy_side, y, sample_scale, statistics, weight, bias, dz_out, batch, chunk * tiles, tiles,
            channels, area, CHANNELS_LAST, ACTIVATION, BLOCK_R, BLOCK_C,
        )  # fmt: skip
        channel, exists = _channels(channels, BLOCK_C)
        tl.store(partials + chunk * channels + channel, total, mask=exists)
        tl.store(partials + (tl.num_programs(1) + chunk) * channels + channel, product, mask=exists)

    @triton.jit(do_not_specialize=["chunks", "batch", "tiles", "area"])
    def _gradient_kernel(
        x,
        dy,
        dy_side,
        y,
        sample_scale,
        statistics,
        weight,
        bias,
        partials,
        dx,
        dresidual,
        dweight,
        dbias,
        chunks,
        batch,
        tiles,
        channels,
        area,
        CHANNELS_LAST: tl.constexpr,
        ACTIVATION: tl.constexpr,
        BLOCK_R: tl.constexpr,
        BLOCK_C: tl.constexpr,
        CHUNKS: tl.constexpr,
    ):
        """Second launch backward, or the only one if there are no ``partials``: each program writes its rows of dx."""
        channel, exists = _channels(channels, BLOCK_C)
        chunk = tl.program_id(1)
        rows = batch * area
        if partials is None:
            total, product = _chunk_sums(
                x, dy, dy_side, y, sample_scale, statistics, weight, bias, None, batch, 0, tiles,
                channels, area, CHANNELS_LAST, ACTIVATION, BLOCK_R, BLOCK_C,
            )  # fmt: skip
        else:
            each = tl.arange(0, CHUNKS)
            place = each[:, None] * channels + channel[None, :]
            written = (each < chunks)[:, None] & exists[None, :]
            total = tl.sum(tl.load(partials + place, mask=written, other=0.0), axis=0)
            products = partials + chunks * channels
            product = tl.sum(tl.load(products + place, mask=written, other=0.0), axis=0)
        if chunk == 0:
            tl.store(dbias + channel, total, mask=exists)
            tl.store(dweight + channel, product, mask=exists)
        mean, inverse_deviation, slope, intercept = _channel_values(statistics, weight, bias, channels, BLOCK_C)
        total_mean = total / rows
        product_mean = product / rows
        tile = tiles - 1
        while tile >= 0:
            row = (chunk * tiles + tile) * BLOCK_R + tl.arange(0, BLOCK_R)
            offset, live, value, upstream, side, kept = _loaded(
                x, dy, dy_side, y, row, batch, channels, area, CHANNELS_LAST, BLOCK_C
            )
            dz, dbn, normal = _tile_gradients(
                value, upstream, side, kept, dy_side, y, sample_scale, mean, inverse_deviation, slope, intercept,
                row, batch, area, ACTIVATION,
            )  # fmt: skip
            gradient = slope[None, :] * (dbn - total_mean[None, :] - normal * product_mean[None, :])
            tl.store(dx + offset, gradient, mask=live)
            if dresidual is not None:
                tl.store(dresidual + offset, dz, mask=live)
            tile -= 1


class _Plan:
    """How a tensor is cut: rows (samples x positions) into chunks of tiles, channels into blocks; one grid for all."""

    def __init__(self, x: Tensor, channels_last: bool) -> None:
        batch, channels, height, width = x.shape
        area = height * width
        rows = batch * area
        # By the size of an image and not of the batch: another choice is another kernel to compile.
        self.one_launch = area <= ONE_LAUNCH_AREA
        if self.one_launch:
            # Eight channels fill a 16-byte load and leave more programs than a whole sector would.
            block_c = min(8, triton.next_power_of_2(channels))
            block_r, warps = (128, 4) if area == 1 else (512, 8)
        else:
            narrow = area * channels < NARROW_IMAGE
            widest = CHANNELS_A_PROGRAM if narrow or channels % WIDE_CHANNELS else WIDE_CHANNELS
            block_c = min(widest if channels_last or area < 16 else 8, triton.next_power_of_2(channels))
            block_r, warps = (NARROW_TILE // block_c, 4) if narrow else (WIDE_TILE // block_c, 8)
        blocks = triton.cdiv(channels, block_c)
        all_tiles = triton.cdiv(rows, block_r)
        # One wave of two programs of eight warps, or four of four, on each multiprocessor.
        chunks = 1 if self.one_launch else min(MAX_CHUNKS, max(1, MULTIPROCESSORS * 16 // warps // blocks))
        self.batch, self.channels = batch, channels
        self.tiles, self.chunks = _shares(all_tiles, chunks)
        self.chunk_rows = self.tiles * block_r
        self.grid = (blocks, self.chunks)
        self.fixed = dict(
            channels=channels, area=area, CHANNELS_LAST=channels_last, BLOCK_R=block_r, BLOCK_C=block_c, num_warps=warps
        )
        # The second launch writes no partial results, and so may have more programs.
        self.second_tiles, self.second_grid = self.tiles, self.grid
        if not self.one_launch and warps == 8:
            self.second_tiles, chunks = _shares(all_tiles, SECOND_WAVE // blocks)
            self.second_grid = (blocks, chunks)

    def partials(self, x: Tensor) -> Tensor | None:
        if self.one_launch:
            return None
        return torch.empty(2, self.chunks, self.channels, dtype=torch.float32, device=x.device)


def _shares(tiles: int, most: int) -> tuple[int, int]:
    """Tiles a chunk, and chunks, for at most ``most`` equal chunks."""
    each = triton.cdiv(tiles, max(1, min(most, tiles)))
    return each, triton.cdiv(tiles, each)


class _BatchNormAct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x, weight, bias, residual, running_mean, running_var, momentum, eps, activation, sample_scale, out_dtype,
        branches,
    ):  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.format = memory_format_of(x)
        x = x.contiguous(memory_format=ctx.format)
        ctx.residual_dtype = None if residual is None else residual.dtype
        if residual is not None:
            residual = residual.contiguous(memory_format=ctx.format)
        if sample_scale is not None:
            sample_scale = sample_scale.contiguous()
        ctx.activation, ctx.plan = activation, _Plan(x, ctx.format == torch.channels_last)
        plan = ctx.plan
        y = torch.empty_like(x, dtype=out_dtype)
        statistics = torch.empty(2, plan.channels, dtype=torch.float32, device=x.device)
        partials = plan.partials(x)
        with torch.cuda.device_of(x):
            if partials is not None:
                _moments_kernel[plan.grid](x, partials, plan.batch, plan.tiles, **plan.fixed)
            _normalise_kernel[plan.second_grid](
                x,
                weight,
                bias,
                running_mean,
                running_var,
                residual,
                sample_scale,
                partials,
                statistics,
                y,
                plan.chunks,
                plan.chunk_rows,
                plan.batch,
                plan.second_tiles,
                momentum,
                eps,
                ACTIVATION=activation,
                CHUNKS=MAX_CHUNKS,
                **plan.fixed,
            )
        mask = y if activation == "relu" and residual is not None else None
        ctx.save_for_backward(x, mask, sample_scale, statistics, weight, bias)
        return y if branches == 1 else (y, y.view_as(y))

    @staticmethod
    @once_differentiable
    def backward(ctx, *upstream):
        upstream = [dy.contiguous(memory_format=ctx.format) for dy in upstream if dy is not None]
        if not upstream:
            return (None,) * 12
        if len(upstream) == 2 and ctx.activation == "none":
            upstream = [upstream[0] + upstream[1]]
        dy, dy_side = (*upstream, None)[:2]
        x, mask, sample_scale, statistics, weight, bias = ctx.saved_tensors
        plan = ctx.plan
        dx = torch.empty_like(x)
        dweight, dbias = torch.empty_like(weight), torch.empty_like(bias)
        dresidual, written = None, None
        if ctx.residual_dtype is not None and ctx.needs_input_grad[3]:
            if ctx.activation == "none":
                dresidual = dy.to(ctx.residual_dtype)
            else:
                dresidual = written = torch.empty_like(x, dtype=ctx.residual_dtype)
        activation, known = ctx.activation, (sample_scale, statistics, weight, bias)
        partials = plan.partials(x)
        with torch.cuda.device_of(x):
            if partials is not None:
                # dz is the residual's gradient: once it lies there, the second launch needs neither y nor dy.
                dz = written if ctx.residual_dtype == dy.dtype else None
                _sums_kernel[plan.grid](
                    *(x, dy, dy_side, mask, *known, dz, partials),
                    plan.batch,
                    plan.tiles,
                    ACTIVATION=activation,
                    **plan.fixed,
                )
                if dz is not None:
                    dy, dy_side, mask, activation, written = dz, None, None, "none", None
            _gradient_kernel[plan.second_grid](
                *(x, dy, dy_side, mask, *known),
                partials,
                dx,
                written,
                dweight,
                dbias,
                plan.chunks,
                plan.batch,
                plan.second_tiles,
                ACTIVATION=activation,
                CHUNKS=MAX_CHUNKS,
                **plan.fixed,
            )
        return dx, dweight, dbias, dresidual, *(None,) * 8


def batch_norm_act(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
    *,
    activation: str = "none",
    residual: Tensor | None = None,
    sample_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    branches: int = 1,
    backend: str,
) -> Tensor | tuple[Tensor, Tensor]:
    """Normalise by the statistics of this batch, then scale, add and activate, as one differentiable operation.

    z = ((x - mean) / sqrt(var + eps) * weight + bias) * sample_scale[n] + residual;  y = act(z), with mean
    and population variance of each channel over samples and positions. In place,
    running_mean = (1 - momentum) running_mean + momentum mean, and running_var likewise with the unbiased
    variance. Triton computes in FP32 and rounds once, keeps x, two numbers a channel and, for a ReLU after
    a residual, y; its backward cannot be differentiated again, and results are the same bit for bit from
    launch to launch. FP64 tensors are given to the reference.

    Args:
        x: ``[N, C, H, W]``, FP16, BF16 or FP32, channels_last or contiguous; with other strides it is copied first.
        weight, bias, running_mean, running_var: FP32 ``[C]``; gradients of the first two are FP32.
        momentum: share of this batch in the running statistics.
        eps: added to the variance.
        activation: ``"none"``, ``"relu"`` or ``"silu"``.
        residual: shape of x, FP16, BF16 or FP32; its gradient has its dtype.
        sample_scale: FP32 ``[N]``, without gradient: stochastic depth.
        out_dtype: dtype of y; None is that of x.
        branches: 2 for a y with two readers: their gradients are then added where they are used, and not before.
        backend: ``"triton"`` or ``"torch"`` (the reference).

    Returns:
        y ``[N, C, H, W]``, in the memory layout of x; with two branches one for each, of the same memory.

    Raises:
        ValueError: one value a channel, an unknown activation, ``"silu"`` with a residual (its backward would
            have to keep z), a shape, dtype or device that does not fit, or a backend that cannot run there.
    """
    _check(x, activation, branches, residual, sample_scale, weight, bias, running_mean, running_var)
    require_backend(backend, x.device)
    if backend == "torch" or x.dtype == torch.float64:
        y = batch_norm_act_reference(
            x, weight, bias, running_mean, running_var, momentum, eps,
            activation=activation, residual=residual, sample_scale=sample_scale, out_dtype=out_dtype,
        )  # fmt: skip
        return y if branches == 1 else (y, y)
    out_dtype = out_dtype or x.dtype
    _check_for_triton(x, residual, sample_scale, out_dtype, (weight, bias, running_mean, running_var))
    return _BatchNormAct.apply(
        x, weight, bias, residual, running_mean, running_var, float(momentum), float(eps),
        activation, sample_scale, out_dtype, branches,
    )  # fmt: skip


def memory_format_of(x: Tensor) -> torch.memory_format:
    """The one of both layouts that ``x`` has, or takes the cheaper copy to."""
    if x.is_contiguous(memory_format=torch.channels_last):
        return torch.channels_last
    if x.is_contiguous() or x.stride(1) != 1:
        return torch.contiguous_format
    return torch.channels_last


def _check(
    x: Tensor,
    activation: str,
    branches: int,
    residual: Tensor | None,
    sample_scale: Tensor | None,
    *per_channel: Tensor,
) -> None:
    if x.dim() != 4:
        raise ValueError(f"x: expected [N, C, H, W], got shape {tuple(x.shape)}; pass four dimensions")
    if x.shape[0] * x.shape[2] * x.shape[3] == 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {x.shape}; pass more samples"
        )
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r}: expected one of {ACTIVATIONS}, got another; pass one of them")
    if branches not in (1, 2):
        raise ValueError(f"branches={branches}: expected 1 or 2 readers of the result; pass one of them")
    if activation == "silu" and residual is not None:
        raise ValueError("residual: expected None with activation='silu', got a tensor; add it after the activation")
    for name, tensor, shape in [
        ("residual", residual, x.shape),
        ("sample_scale", sample_scale, x.shape[:1]),
        *zip(("weight", "bias", "running_mean", "running_var"), per_channel, [x.shape[1:2]] * 4),
    ]:
        if tensor is not None and (tensor.shape != shape or tensor.device != x.device):
            raise ValueError(
                f"{name}: expected shape {tuple(shape)} on {x.device}, got {tuple(tensor.shape)} on {tensor.device}; "
                "pass one that fits x"
            )


def _check_for_triton(
    x: Tensor,
    residual: Tensor | None,
    sample_scale: Tensor | None,
    out_dtype: torch.dtype,
    per_channel: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    dtypes = [("x", x.dtype), ("out_dtype", out_dtype)] + (
        [("residual", residual.dtype)] if residual is not None else []
    )
    for name, dtype in dtypes:
        if dtype not in DTYPES:
            raise ValueError(f"{name}: expected FP16, BF16 or FP32, got {dtype}; convert it or pass backend='torch'")
    if not 0 < x.numel() < 2**31:
        raise ValueError(f"x: expected 1 to 2^31 - 1 elements, got {x.numel()}; change the batch")
    for name, tensor in zip(("weight", "bias", "running_mean", "running_var"), per_channel):
        if tensor.dtype != torch.float32 or not tensor.is_contiguous():
            raise ValueError(f"{name}: expected contiguous torch.float32, got {tensor.dtype}; convert it")
    if sample_scale is not None and sample_scale.dtype != torch.float32:
        raise ValueError(f"sample_scale: expected torch.float32, got {sample_scale.dtype}; convert it")
