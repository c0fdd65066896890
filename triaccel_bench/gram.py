"""Inner products of the per-sample gradients of one layer's weight, from what the layer read and what came back.

With ``g_i`` the gradient of sample ``i`` alone, flattened, the Fisher block ``F = (1/N) sum_i g_i g_i^T`` is of
shape ``(n, n)``, ``n = weight.numel()``, but has at most ``N`` eigenvalues other than zero: those of ``G / N``,
``G[i, j] = <g_i, g_j>``. One backward pass of the whole batch holds all that ``G`` takes.

Per group of channels, with ``u_i`` (``C/g * taps``, ``P``) the windows that the kernel saw of sample ``i`` at its
``P`` output positions, and ``dy_i`` (``O/g``, ``P``), the gradient is ``g_i = dy_i u_i^T``. Two ways lead to ``G``:

* ``positions``: ``G[i, j] = sum_{p, q} (dy_i[:, p] . dy_j[:, q]) (u_i[:, p] . u_j[:, q])``. No gradient is ever
  formed; two ``NP x NP`` matrices are. For few positions.
* ``direct``: the gradients, and their products. For many positions.

``plan`` takes the one of fewer multiply-adds, ``positions`` only where it fits into ``LIMIT_BYTES``; what is
larger goes in chunks, of groups or (``direct``, one group) of input channels, over which ``G`` is a sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from triaccel_bench.kernels.depthwise import live_taps
from triaccel_bench.kernels.stem import MAX_CHANNELS

__all__ = ["Plan", "check_layers", "gradients", "gram", "plan", "products"]

Way = Literal["positions", "direct"]

LIMIT_BYTES = 16 * 2**20
"""Temporary memory of one layer, beside a copy of ``dy``: small beside the activations of a training step."""

SHORTEST_PART, PARTIAL_ELEMENTS = 256, 2**18
"""Long rows are multiplied in parts, at least so long and of so many results in all: an N x N result is one tile."""


@dataclass(frozen=True)
class Plan:
    """How ``gram`` goes about one layer.

    Attributes:
        chunk: groups, or input channels where there is one group and the way is ``direct``, at a time.
        samples: of which windows are unfolded at a time; fewer than all only where one channel's are too large.
        multiply_adds: of all matrix products.
        bytes: temporary memory at most, with a copy of ``dy`` in the dtype of the result; operands of
            ``nn.Linear`` that are not contiguous take a copy more.
    """

    way: Way
    chunk: int
    samples: int
    multiply_adds: int
    bytes: int


@torch.no_grad()
def gram(layer: nn.Module, x: Tensor, dy: Tensor, way: Way | None = None, limit: int = LIMIT_BYTES) -> Tensor:
    """``G[i, j] = <g_i, g_j>``, ``g_i`` the gradient of ``sum(y_i * dy_i)`` for the weight of ``layer``.

    Waits for nothing, and can be captured in a CUDA graph. Products round as ``torch.matmul`` does in the
    dtype of the result (TF32 where that is allowed), also under autocast; ``G`` is symmetric up to rounding.

    Args:
        layer: ``nn.Conv2d`` (any groups, stride, dilation and zero padding) or ``nn.Linear``.
        x: what it read: (N, C, H, W) in any memory layout, or (N, ..., F); FP16, BF16, FP32 or FP64.
        dy: gradient of the samples' summed losses for its output, of the output's shape; of those dtypes. Or
            (N R, ...), R gradients of each sample one after another, which count as samples of their own.
        way: ``plan`` chooses where ``None``.
        limit: bytes of temporary memory, where a single chunk needs no more.

    Returns:
        (N, N), or (N R, N R), in FP32, or in FP64 where ``x`` is.

    Raises:
        ValueError: another layer, padding that is not zeros, or tensors that are not its input and output gradient.
    """
    case = _case(layer, tuple(x.shape), tuple(dy.shape))
    for name, value in (("x", x), ("dy", dy)):
        if value.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            raise ValueError(f"{name}: expected fp16, bf16, fp32 or fp64, got {value.dtype}; convert it")
    if x.device != dy.device:
        raise ValueError(f"dy: expected a tensor on {x.device} like x, got one on {dy.device}; move it there")
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    chosen = _plan(case, dtype.itemsize, way, limit)
    if not case.taps:
        return torch.zeros(case.samples, case.samples, dtype=dtype, device=x.device)
    if isinstance(layer, nn.Linear):
        x, dy = _as_images(x), _as_images(dy)
    if not case.by_channel(chosen.way):
        x = x if case.repeats == 1 else _repeated(x, case.repeats)
    elif not case.sent_in_parts(dtype.itemsize, limit):
        # Once for all chunks. Of several gradients a sample, channels are to lie beside one another in every chunk.
        dy = dy.to(dtype, memory_format=torch.preserve_format if case.repeats == 1 else torch.contiguous_format)
    total = None
    with torch.autocast(x.device.type, enabled=False):
        for x_part, dy_part in _chunks(x, dy, case, chosen):
            if chosen.way == "positions":
                value = _by_positions(x_part, dy_part, case, dtype)
            else:
                value = _by_gradients(x_part, dy_part, case, dtype, chosen.samples)
            total = value if total is None else total.add_(value)
    return total


@torch.no_grad()
def gradients(layer: nn.Module, x: Tensor, dy: Tensor) -> Tensor:
    """The ``g_i`` of ``gram`` themselves: (N, n), elements of the weight in an order of their own, the same for all."""
    case = _case(layer, tuple(x.shape), tuple(dy.shape))
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    if not case.taps:
        return torch.zeros(case.samples, 0, dtype=dtype, device=x.device)
    if isinstance(layer, nn.Linear):
        x, dy = _as_images(x), _as_images(dy)
    with torch.autocast(x.device.type, enabled=False):
        return (_depthwise_gradients if case.depthwise else _gradients)(x, dy, case, dtype)


def products(rows: Tensor) -> Tensor:
    """Inner products (N, N) of rows (N, n)."""
    count, length = rows.shape
    if not length:
        return rows.new_zeros(count, count)
    most = max(1, min(length // SHORTEST_PART, PARTIAL_ELEMENTS // count**2))
    parts = next(number for number in range(most, 0, -1) if length % number == 0)
    rows = rows.view(count, parts, -1).transpose(0, 1)
    return torch.bmm(rows, rows.mT).sum(0)


def plan(
    layer: nn.Module,
    x_shape: tuple[int, ...],
    dy_shape: tuple[int, ...],
    itemsize: int = 4,
    way: Way | None = None,
    limit: int = LIMIT_BYTES,
) -> Plan:
    """How ``gram`` computes tensors of these shapes, in elements of ``itemsize`` bytes; raises what it raises."""
    return _plan(_case(layer, tuple(x_shape), tuple(dy_shape)), itemsize, way, limit)


def check_layers(layers: Mapping[str, nn.Module]) -> None:
    """Raise a ValueError that names the first layer ``gram`` cannot read."""
    for name, layer in layers.items():
        kind = type(layer).__name__.removeprefix("_Cast")
        if isinstance(layer, nn.Conv2d):
            if layer.padding_mode == "zeros":
                continue
            kind += f" with padding_mode={layer.padding_mode!r}"
        elif isinstance(layer, nn.Linear):
            continue
        raise ValueError(
            f"layer {name}: expected nn.Linear, or nn.Conv2d with zero padding, got {kind}; "
            "take method.curvature.estimator=hessian and product=exact"
        )


@dataclass(frozen=True)
class _Axis:
    """What live taps read along one dimension; ``before``, ``after``: zeros around it, or, negative, unread pixels."""

    size: int
    outputs: int
    taps: int
    stride: int
    dilation: int
    before: int
    after: int

    @property
    def extent(self) -> int:
        return self.size + self.before + self.after

    @property
    def window(self) -> int:
        return self.dilation * (self.taps - 1) + 1


@dataclass(frozen=True)
class _Case:
    """Sizes of one layer's call; ``inputs`` and ``outputs`` are channels of one group.

    ``samples`` are those of the output's gradient, ``repeats`` of them for each sample that was read.
    """

    samples: int
    repeats: int
    groups: int
    inputs: int
    outputs: int
    rows: _Axis
    columns: _Axis

    @property
    def positions(self) -> int:
        return self.rows.outputs * self.columns.outputs

    @property
    def taps(self) -> int:
        return self.rows.taps * self.columns.taps

    @property
    def padded(self) -> bool:
        return any(zeros > 0 for axis in (self.rows, self.columns) for zeros in (axis.before, axis.after))

    @property
    def depthwise(self) -> bool:
        return self.inputs == 1 < self.groups

    def sent(self, itemsize: int) -> int:
        """Bytes of one group's ``dy``."""
        return itemsize * self.samples * self.outputs * self.positions

    def sent_in_parts(self, itemsize: int, limit: int) -> bool:
        """Whether ``dy`` is converted a few samples at a time, and so for every channel anew: of the stem alone."""
        return self.inputs <= MAX_CHANNELS and self.sent(itemsize) > limit

    def by_channel(self, way: Way) -> bool:
        """Whether chunks are of input channels, all under one ``dy``, and not of groups."""
        return way == "direct" and self.groups == 1


def _axis(size: int, kernel: int, stride: int, dilation: int, padding: int | str) -> _Axis:
    both = {"valid": 0, "same": dilation * (kernel - 1)}[padding] if isinstance(padding, str) else 2 * padding
    left = both // 2
    outputs = (size + both - dilation * (kernel - 1) - 1) // stride + 1
    first, last = live_taps(size, outputs, kernel, stride, left, dilation)
    end = (outputs - 1) * stride + (last - 1) * dilation - left
    return _Axis(size, outputs, last - first, stride, dilation, left - first * dilation, end - size + 1)


def _case(layer: nn.Module, x_shape: tuple[int, ...], dy_shape: tuple[int, ...]) -> _Case:
    if isinstance(layer, nn.Conv2d):
        if layer.padding_mode != "zeros":
            raise ValueError(
                f"layer: expected padding_mode='zeros', got {layer.padding_mode!r}; pad before a layer of padding 0"
            )
        channels, features = layer.in_channels, layer.out_channels
        if len(x_shape) != 4 or x_shape[1] != channels or 0 in x_shape:
            raise ValueError(f"x: expected [N, {channels}, H, W], got {list(x_shape)}; pass what the layer read")
        padding = (layer.padding,) * 2 if isinstance(layer.padding, str) else layer.padding
        rows, columns = (
            _axis(x_shape[2 + d], layer.kernel_size[d], layer.stride[d], layer.dilation[d], padding[d]) for d in (0, 1)
        )
        if min(rows.outputs, columns.outputs) < 1:
            raise ValueError(
                f"x: expected images as large as the kernel, got {list(x_shape)}; pass what the layer read"
            )
        expected = (features, rows.outputs, columns.outputs)
        groups = layer.groups
    elif isinstance(layer, nn.Linear):
        channels, features, groups = layer.in_features, layer.out_features, 1
        if len(x_shape) < 2 or x_shape[-1] != channels or 0 in x_shape:
            raise ValueError(f"x: expected [N, ..., {channels}], got {list(x_shape)}; pass what the layer read")
        expected = (*x_shape[1:-1], features)
        rows, columns = (_axis(size, 1, 1, 1, 0) for size in (torch.Size(x_shape[1:-1]).numel(), 1))
    else:
        raise ValueError(f"layer: expected nn.Conv2d or nn.Linear, got {type(layer).__name__}; leave it out")
    count = dy_shape[0] if dy_shape else 0
    if dy_shape[1:] != expected or not count or count % x_shape[0]:
        raise ValueError(
            f"dy: expected {[x_shape[0], *expected]} for x {list(x_shape)}, or several of each sample, got "
            f"{list(dy_shape)}; pass the output's gradient"
        )
    return _Case(count, count // x_shape[0], groups, channels // groups, features // groups, rows, columns)


def _plan(case: _Case, itemsize: int, way: Way | None, limit: int) -> Plan:
    if way not in ("positions", "direct", None):
        raise ValueError(f"way: expected 'positions', 'direct' or None, got {way!r}; name one of them")
    n, spots, inputs, outputs = case.samples, case.positions, case.inputs, case.outputs
    result = itemsize * n * n
    if not case.taps:
        return Plan(way or "positions", case.groups, n, 0, result)
    weights = case.groups * outputs * inputs * case.taps
    positions_cost = case.groups * (n * spots) ** 2 * (inputs * case.taps + outputs + 1)
    direct_cost = (n * spots + n * n) * weights
    image = case.rows.extent * case.columns.extent if case.padded else 0
    channel = itemsize * (image + spots * case.taps)
    sent = case.sent(itemsize)
    group = n * inputs * channel + sent + 2 * itemsize * (n * spots) ** 2
    if way is None:
        way = "positions" if positions_cost < direct_cost and group <= limit else "direct"
    shared = case.repeats if case.by_channel(way) else 1
    read = itemsize * n * case.groups * inputs * case.rows.size * case.columns.size
    repeated = read if shared < case.repeats else 0
    if way == "positions":
        chunk = _even(case.groups, limit // group)
        return Plan(way, chunk, n, positions_cost, chunk * group + 3 * result + repeated)
    units, width = (inputs, 1) if case.by_channel(way) else (case.groups, inputs)
    windows = itemsize * (image + outputs * spots * case.taps) if case.depthwise else width * channel
    windows = -(-windows // shared)
    whole = case.groups * sent
    if case.by_channel(way) and case.sent_in_parts(itemsize, limit):
        windows, whole = windows + itemsize * outputs * spots, 0
    gradient = itemsize * outputs * width * case.taps
    fixed = itemsize * max(PARTIAL_ELEMENTS, n * n) + 3 * result
    chunk, samples = _even(units, (limit - fixed) // (n * (windows + gradient))), n
    if n * (windows + gradient) + fixed > limit:
        # Gradients exist twice while those of a few samples are joined.
        gradient *= 2
        samples = shared * _even(n // shared, (limit - fixed - n * gradient) // (shared * windows))
    temporary = chunk * (samples * windows + n * gradient) + whole + fixed + repeated
    return Plan(way, chunk, samples, direct_cost, temporary)


def _even(count: int, most: int) -> int:
    """The size of equal chunks of at most ``most``, but of one at least."""
    chunks = -(-count // max(1, min(most, count)))
    return -(-count // chunks)


def _as_images(value: Tensor) -> Tensor:
    """(N, ..., F) as (N, F, P, 1), a view of the same memory."""
    return value.reshape(value.shape[0], -1, 1, value.shape[-1]).permute(0, 3, 1, 2)


def _repeated(x: Tensor, times: int) -> Tensor:
    if _channels_last(x):
        return x.movedim(1, -1).repeat_interleave(times, 0).movedim(-1, 1)
    return x.repeat_interleave(times, 0)


def _chunks(x: Tensor, dy: Tensor, case: _Case, chosen: Plan) -> Iterator[tuple[Tensor, Tensor]]:
    if case.by_channel(chosen.way):
        yield from ((part, dy) for part in x.split(chosen.chunk, 1))
    else:
        yield from zip(x.split(chosen.chunk * case.inputs, 1), dy.split(chosen.chunk * case.outputs, 1))


def _windows(x: Tensor, case: _Case) -> Tensor:
    """(N, groups, C/g, Ho, Wo, taps, taps) of the padded image, a view in which windows overlap."""
    rows, columns = case.rows, case.columns
    x = x[:, :, max(0, -rows.before) : rows.size + min(0, rows.after)]
    x = x[..., max(0, -columns.before) : columns.size + min(0, columns.after)]
    if case.padded:
        x = functional.pad(x, [max(0, zeros) for axis in (columns, rows) for zeros in (axis.before, axis.after)])
    windows = x.unfold(2, rows.window, rows.stride).unfold(3, columns.window, columns.stride)
    windows = windows[..., :: rows.dilation, :: columns.dilation]
    return windows.unflatten(1, (1, -1) if case.groups == 1 else (-1, case.inputs))


def _matrices(view: Tensor, dtype: torch.dtype, *shape: int) -> Tensor:
    """``view`` in that dtype and shape, by one copy at most."""
    if view.dtype == dtype:
        return view.reshape(shape)
    return torch.empty(view.shape, dtype=dtype, device=view.device).copy_(view).view(shape)


def _channels_last(x: Tensor) -> bool:
    """Whether channels are innermost in memory; copies are fast where they stay innermost."""
    return x.stride(1) == 1


def _by_positions(x: Tensor, dy: Tensor, case: _Case, dtype: torch.dtype) -> Tensor:
    windows = _windows(x, case)
    groups, spots = windows.shape[1], case.samples * case.positions
    if _channels_last(x):
        seen = _matrices(windows.permute(1, 0, 3, 4, 5, 6, 2), dtype, groups, spots, -1)
    else:
        seen = _matrices(windows.permute(1, 2, 5, 6, 0, 3, 4), dtype, groups, -1, spots).mT
    sent = _matrices(dy.unflatten(1, (groups, -1)).permute(1, 0, 3, 4, 2), dtype, groups, spots, -1)
    products = torch.bmm(seen, seen.mT).mul_(torch.bmm(sent, sent.mT))
    if groups == case.positions == 1:
        return products[0]
    return products.view(groups, case.samples, case.positions, case.samples, case.positions).sum((0, 2, 4))


def _by_gradients(x: Tensor, dy: Tensor, case: _Case, dtype: torch.dtype, samples: int) -> Tensor:
    one_each = _depthwise_gradients if case.depthwise else _gradients
    read = samples * len(x) // len(dy)
    few = [one_each(*pair, case, dtype) for pair in zip(x.split(read), dy.split(samples))]
    return products(few[0] if len(few) == 1 else torch.cat(few))


def _gradients(x: Tensor, dy: Tensor, case: _Case, dtype: torch.dtype) -> Tensor:
    """(samples, weights), in an order of the weights that the memory layout of ``x`` decides."""
    windows = _windows(x, case)
    matrices = windows.shape[0] * windows.shape[1]
    if _channels_last(x):
        seen = _matrices(windows.permute(0, 1, 3, 4, 5, 6, 2), dtype, matrices, case.positions, -1)
    else:
        seen = _matrices(windows.permute(0, 1, 2, 5, 6, 3, 4), dtype, matrices, -1, case.positions).mT
    return torch.bmm(_matrices(dy, dtype, matrices, -1, case.positions), seen).view(len(dy), -1)


def _depthwise_gradients(x: Tensor, dy: Tensor, case: _Case, dtype: torch.dtype) -> Tensor:
    """As ``_gradients``, element by element: matrix products would be one a channel, of a row or two."""
    last = _channels_last(x)
    order = (0, 3, 4, 5, 6, 1, 2) if last else (0, 1, 2, 5, 6, 3, 4)
    windows = _windows(x, case).permute(order)
    dy = dy.to(dtype).unflatten(1, (-1, case.outputs))[..., None, None].permute(order)
    # Into memory of our own: torch would choose its order by the strides of overlapping windows.
    products = torch.empty(torch.broadcast_shapes(windows.shape, dy.shape), dtype=dtype, device=dy.device)
    torch.mul(windows, dy, out=products)
    return products.sum((1, 2) if last else (5, 6)).view(len(products), -1)
