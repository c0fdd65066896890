"""Cross-entropy of a batch with its gradient and the right answers, or at labels drawn from it, in one launch."""

# Without the postponed annotations of other files: Triton 3.2's interpreter needs `tl.constexpr` itself, not its name.

import torch
from torch import Tensor

from triaccel_bench.kernels.backend import require_backend, tl, triton

MAX_CLASSES = 16384
"""A row is held by one program whole; a longer one would not fit its registers."""
TILE_ELEMENTS = 128
"""Logits that one program takes at least: four a thread of one warp, so that a small batch still fills the card."""


@torch.no_grad()
def cross_entropy_reference(logits: Tensor, labels: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What ``cross_entropy`` computes, in torch operations that can be captured."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    log_probabilities = torch.log_softmax(wide, 1)
    losses = -log_probabilities.gather(1, labels[:, None])[:, 0]
    correct = (logits.argmax(1) == labels).int()
    one_hot = torch.arange(logits.shape[1], device=logits.device) == labels[:, None]
    gradient = (log_probabilities.exp() - one_hot.to(wide.dtype)) * (scale / logits.shape[0])
    return losses, correct, gradient.to(logits.dtype)


@torch.no_grad()
def sampled_gradient_reference(logits: Tensor, draws: Tensor) -> Tensor:
    """What ``sampled_gradient`` computes, in torch operations that can be captured."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    probabilities = wide.softmax(1)
    sums = probabilities.cumsum(1)
    # Of what the sums come to, which rounding may leave short of 1.
    label = (sums <= draws[:, None] * sums[:, -1:]).sum(1).clamp(max=logits.shape[1] - 1)
    drawn = torch.arange(logits.shape[1], device=logits.device) == label[:, None]
    # p - 1 of a class that is all but certain would be rounding: the others' sum is not.
    others = torch.where(drawn, 0.0, probabilities)
    return torch.where(drawn, -others.sum(1, keepdim=True), probabilities).to(logits.dtype)


if triton is not None:

    @triton.jit
    def _rows_of_logits(
        logits,
        batch,
        row_stride,
        column_stride,
        CLASSES: tl.constexpr,
        ROWS: tl.constexpr,
        COLUMNS: tl.constexpr,
    ):
        """The ``ROWS`` whole rows of ``COLUMNS`` (padded) logits that a program takes, and where they lie."""
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        inside = row < batch
        column = tl.arange(0, COLUMNS)[None, :]
        live = inside[:, None] & (column < CLASSES)
        wide_row = row.to(tl.int64)[:, None]
        # Rows past the batch are zeros, so that they compute nothing odd; columns past the classes weigh nothing.
        padding = tl.where(column < CLASSES, 0.0, -float("inf"))
        logit = tl.load(logits + wide_row * row_stride + column * column_stride, mask=live, other=0.0)
        logit = logit.to(tl.float32) + padding
        return row, inside, column, live, wide_row, logit

    @triton.jit(do_not_specialize=["labels", "scale", "batch"])
    def _cross_entropy_kernel(
        logits,
        labels,
        scale,
        losses,
        correct,
        gradient,
        batch,
        row_stride,
        column_stride,
        CLASSES: tl.constexpr,
        ROWS: tl.constexpr,
        COLUMNS: tl.constexpr,
    ):
        row, inside, column, live, wide_row, logit = _rows_of_logits(
            logits, batch, row_stride, column_stride, CLASSES, ROWS, COLUMNS
        )
        label = tl.load(labels + row, mask=inside, other=0)
        known = (label >= 0) & (label < CLASSES)
        mine = column == label[:, None]
        own = tl.sum(tl.where(mine, logit, 0.0), axis=1)
        own = tl.where(known, own, float("nan"))

        largest = tl.max(logit, axis=1)
        exponential = tl.exp(logit - largest[:, None])
        total = tl.sum(exponential, axis=1)
        # A NaN or +inf reaches the sum, and own is NaN where the label names no class.
        loss = tl.log(total) - (own - largest)
        tl.store(losses + row, loss, mask=inside)

        # torch.argmax: NaN lies above every number, and the first of equals is taken.
        answer = own[:, None]
        earlier = column < label[:, None]
        is_nan = logit != logit
        above = is_nan | (logit > answer) | ((logit == answer) & earlier)
        ahead = tl.where(answer != answer, is_nan & earlier, above)
        beaten = tl.max(tl.where(ahead, 1, 0), axis=1)
        tl.store(correct + row, tl.where(known, 1 - beaten, 0), mask=inside)

        factor = tl.load(scale) / batch.to(tl.float32)
        probability = exponential / total[:, None]
        slope = (probability - tl.where(mine, 1.0, 0.0)) * factor
        slope = tl.where(known[:, None], slope, float("nan"))
        tl.store(gradient + wide_row * CLASSES + column, slope.to(gradient.dtype.element_ty), mask=live)

    @triton.jit(do_not_specialize=["batch"])
    def _sampled_gradient_kernel(
        logits,
        draws,
        gradient,
        batch,
        row_stride,
        column_stride,
        CLASSES: tl.constexpr,
        ROWS: tl.constexpr,
        COLUMNS: tl.constexpr,
    ):
        row, inside, column, live, wide_row, logit = _rows_of_logits(
            logits, batch, row_stride, column_stride, CLASSES, ROWS, COLUMNS
        )
        exponential = tl.exp(logit - tl.max(logit, axis=1)[:, None])
        probability = exponential / tl.sum(exponential, axis=1)[:, None]
        draw = tl.load(draws + row, mask=inside, other=0.0)
        sums = tl.cumsum(probability, axis=1)
        # Of what the sums come to, which rounding may leave short of 1.
        below = sums <= draw[:, None] * tl.max(sums, axis=1)[:, None]
        label = tl.minimum(tl.sum(tl.where(below & (column < CLASSES), 1, 0), axis=1), CLASSES - 1)
        drawn = column == label[:, None]
        others = tl.sum(tl.where(drawn, 0.0, probability), axis=1)
        tl.store(gradient + wide_row * CLASSES + column, tl.where(drawn, -others[:, None], probability), mask=live)


@torch.no_grad()
def sampled_gradient(logits: Tensor, draws: Tensor, *, backend: str) -> Tensor:
    """Gradient of ``-log softmax(logits)[label]`` for a label drawn from that very distribution.

    ``softmax(z) - onehot(y)``, ``y`` the first class whose distribution function exceeds the row's draw.

    Args:
        logits: ``[B, K]``, FP16, BF16, FP32 or FP64, any strides.
        draws: f32 ``[B]`` on the logits' device, uniform in [0, 1).
        backend: ``"triton"`` (one launch) or ``"torch"`` (the reference).

    Returns:
        ``[B, K]`` in the logits' dtype, each row of its own loss: not divided by B.

    Raises:
        ValueError: a shape, dtype or device does not fit, a row is too long, or the backend cannot
            run on the device.
    """
    _check_logits(logits)
    if draws.shape != logits.shape[:1] or draws.dtype != torch.float32:
        raise ValueError(
            f"draws: expected torch.float32 [{logits.shape[0]}], got {draws.dtype} {list(draws.shape)}; "
            "pass one number in [0, 1) for each row of logits"
        )
    if draws.device != logits.device or not draws.is_contiguous():
        raise ValueError(
            f"draws: expected a contiguous tensor on {logits.device}, got stride {draws.stride(0)} on {draws.device}; "
            "move and pack it"
        )
    require_backend(backend, logits.device)
    if backend == "torch" or logits.dtype == torch.float64:
        return sampled_gradient_reference(logits, draws)
    logits = logits.detach()
    gradient = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    with torch.cuda.device_of(logits):
        _sampled_gradient_kernel[_grid(logits)](
            logits, draws, gradient, logits.shape[0], logits.stride(0), logits.stride(1), **_blocks(logits)
        )
    return gradient


def cross_entropy(logits: Tensor, labels: Tensor, scale: Tensor, *, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    """Loss of every sample, whether its answer is right, and the gradient of the scaled mean loss.

    losses_b = log sum_k exp(x_bk) - x_by,  correct_b = [argmax_k x_bk = y],
    gradient_bk = (softmax(x_b)_k - [k = y]) scale / B,

    in FP32 whatever the dtype of the logits. ``logits.backward(gradient)`` leaves the gradients of
    scale times the mean loss; this function itself is outside of autograd. ``correct`` follows
    ``torch.argmax``: the first of equal logits counts, and a NaN lies above every number. A row
    with +inf or NaN, or with nothing but -inf, has the loss NaN and a gradient of NaN. The gradient
    of half-precision logits overflows to inf as a conversion does. May be captured in a CUDA graph.

    Args:
        logits: FP32, FP16 or BF16 ``[B, K]``, with any strides. FP64 takes the reference path
            on either backend, and its losses are FP64.
        labels: int64 ``[B]``, in [0, K). One outside has the loss NaN and a gradient of NaN with
            ``"triton"``; ``"torch"`` raises as ``torch.gather`` does.
        scale: f32 scalar on the device, the loss scale (1 for none).
        backend: ``"triton"`` (one launch) or ``"torch"`` (the reference).

    Returns:
        Losses f32 ``[B]``, correct int32 ``[B]`` (1 or 0), gradient ``[B, K]`` in the logits' dtype.

    Raises:
        ValueError: a shape, dtype or device does not fit, a row is too long, or the backend cannot
            run on the device.
    """
    _check(logits, labels, scale)
    require_backend(backend, logits.device)
    if backend == "torch" or logits.dtype == torch.float64:
        return cross_entropy_reference(logits, labels, scale)
    logits = logits.detach()
    batch = logits.shape[0]
    losses = torch.empty(batch, dtype=torch.float32, device=logits.device)
    correct = torch.empty(batch, dtype=torch.int32, device=logits.device)
    gradient = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    with torch.cuda.device_of(logits):
        _cross_entropy_kernel[_grid(logits)](
            logits,
            labels,
            scale,
            losses,
            correct,
            gradient,
            batch,
            logits.stride(0),
            logits.stride(1),
            **_blocks(logits),
        )
    return losses, correct, gradient


def _blocks(logits: Tensor) -> dict[str, int]:
    """How rows are dealt out to programs."""
    classes = logits.shape[1]
    if classes > MAX_CLASSES:
        raise ValueError(
            f"logits: expected at most {MAX_CLASSES} classes with backend='triton', got {classes}; pass backend='torch'"
        )
    columns = triton.next_power_of_2(classes)
    rows = max(1, TILE_ELEMENTS // columns)
    return dict(CLASSES=classes, ROWS=rows, COLUMNS=columns, num_warps=min(16, max(1, rows * columns // 256)))


def _grid(logits: Tensor) -> tuple[int]:
    return (triton.cdiv(logits.shape[0], _blocks(logits)["ROWS"]),)


def _check(logits: Tensor, labels: Tensor, scale: Tensor) -> None:
    _check_logits(logits)
    if labels.shape != logits.shape[:1] or labels.dtype != torch.int64 or labels.device != logits.device:
        raise ValueError(
            f"labels: expected torch.int64 [{logits.shape[0]}] on {logits.device}, got {labels.dtype} "
            f"{list(labels.shape)} on {labels.device}; pass one class index for each row of logits"
        )
    if not labels.is_contiguous():
        raise ValueError(f"labels: expected stride 1, got {labels.stride(0)}; call .contiguous()")
    if scale.dtype != torch.float32 or scale.ndim != 0 or scale.device != logits.device:
        raise ValueError(
            f"scale: expected a torch.float32 scalar on {logits.device}, got {scale.dtype} {list(scale.shape)} "
            f"on {scale.device}; pass the loss scale as a 0-dim tensor"
        )


def _check_logits(logits: Tensor) -> None:
    if logits.ndim != 2 or logits.numel() == 0 or not logits.is_floating_point():
        raise ValueError(
            f"logits: expected floating point [B, K] with elements, got {logits.dtype} {list(logits.shape)}; "
            "pass one row of class scores for each sample"
        )
