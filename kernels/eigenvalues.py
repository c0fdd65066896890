"""Largest eigenvalues of many small symmetric matrices, in one launch."""

# Without the postponed annotations of other files: Triton 3.2's interpreter needs `tl.constexpr` itself, not its name.

import torch
from torch import Tensor

from triaccel_bench.kernels.backend import require_backend, tl, triton

MAX_SIZE = 64
"""A matrix is held by one program whole; a larger one would not fit its registers."""
SECTIONS = 32
"""Parts that one look at a matrix divides each interval into."""


@torch.no_grad()
def largest_eigenvalues_reference(matrices: Tensor, count: int) -> Tensor:
    """What ``largest_eigenvalues`` computes, on the host: CUDA's solver has a library to load, and waits as well."""
    matrices = matrices.cpu()
    finite = matrices.isfinite().all(2).all(1)[:, None]
    matrices = torch.where(finite[..., None], matrices, 0.0)
    # Solvers fail on numbers whose squares underflow.
    scale = matrices.abs().amax((1, 2)).clamp(min=torch.finfo(matrices.dtype).tiny)[:, None]
    values = torch.linalg.eigvalsh(matrices / scale[..., None]).flip(1)[:, :count] * scale
    return torch.where(finite, values, float("nan"))


if triton is not None:

    @triton.jit(do_not_specialize=["N"])
    def _largest_eigenvalues_kernel(
        matrices,
        values,
        N,
        COUNT: tl.constexpr,
        BLOCK: tl.constexpr,
        COUNT_BLOCK: tl.constexpr,
        SECTIONS: tl.constexpr,
        ROUNDS: tl.constexpr,
    ):
        which = tl.program_id(0).to(tl.int64)
        row, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
        inside = (row < N) & (column < N)
        a = tl.load(matrices + which * N * N + row * N + column, mask=inside, other=0.0)
        # A product with zero is NaN where a number is not finite.
        broken = tl.sum(tl.sum(a * 0.0, axis=1), axis=0)
        scale = tl.max(tl.max(tl.abs(a), axis=1), axis=0)
        # Divided, and not multiplied by its inverse, which is infinite for the smallest of numbers.
        a = a / tl.where(scale > 0.0, scale, 1.0)

        # Householder: I - beta v v^T on both sides makes zeros of what lies below the first subdiagonal of column j.
        # A vector is needed along rows and along columns, as the same numbers: two sums would differ in rounding, which
        # is all there is to a column of a matrix of low rank, and the reflection would not be one.
        for j in range(0, N - 2):
            down = tl.where(row > j, tl.sum(tl.where(column == j, a, 0.0), axis=1)[:, None], 0.0)
            first = tl.sum(tl.sum(tl.where(row == j + 1, down, 0.0), axis=1), axis=0)
            length = tl.sqrt(tl.sum(tl.sum(down * down, axis=1), axis=0))
            alpha = tl.where(first > 0.0, -length, length)
            down = tl.where(row == j + 1, down - alpha, down)
            across = tl.trans(down)
            square = tl.sum(tl.sum(down * down, axis=1), axis=0)
            beta = tl.where(square > 0.0, 2.0 / tl.where(square > 0.0, square, 1.0), 0.0)
            product_down = beta * tl.sum(a * across, axis=1)[:, None]
            half = 0.5 * beta * tl.sum(tl.sum(down * product_down, axis=1), axis=0)
            product_down = product_down - half * down
            a = a - down * tl.trans(product_down) - product_down * across

        place = tl.arange(0, BLOCK)
        diagonal = tl.sum(tl.where(row == column, a, 0.0), axis=1)
        before = tl.sum(tl.where((row == column + 1) & inside, a, 0.0), axis=1)
        after = tl.sum(tl.where((row == column - 1) & inside, a, 0.0), axis=1)
        reach = tl.abs(before) + tl.abs(after)
        # Gershgorin's bounds.
        lowest = tl.min(tl.where(place < N, diagonal - reach, float("inf")), axis=0)
        highest = tl.max(tl.where(place < N, diagonal + reach, -float("inf")), axis=0)

        # Each of the eigenvalues has an interval; the signs of Sturm's sequence at points in it tell where it lies.
        number = tl.arange(0, COUNT_BLOCK)
        low = tl.zeros([COUNT_BLOCK], tl.float32) + lowest
        width = tl.zeros([COUNT_BLOCK], tl.float32) + (highest - lowest)
        part = (tl.arange(0, SECTIONS) + 1).to(tl.float32)
        for _ in range(ROUNDS):
            width = width / (SECTIONS + 1)
            point = low[:, None] + part[None, :] * width[:, None]
            below = tl.zeros([COUNT_BLOCK, SECTIONS], tl.int32)
            quotient = tl.zeros([COUNT_BLOCK, SECTIONS], tl.float32) + 1.0
            for i in range(0, N):
                own = tl.sum(tl.where(place == i, diagonal, 0.0), axis=0)
                coupling = tl.sum(tl.where(place == i, before, 0.0), axis=0)
                quotient = own - point - coupling * coupling / quotient
                # Of no use as a divisor; the sign is a matter of rounding.
                quotient = tl.where(tl.abs(quotient) < 1e-30, -1e-30, quotient)
                below += (quotient < 0.0).to(tl.int32)
            beyond = (N - below) > number[:, None]
            low = low + tl.sum(beyond.to(tl.float32), axis=1) * width
        found = (low + 0.5 * width) * scale + broken
        tl.store(values + which * COUNT + number, found, mask=number < COUNT)


@torch.no_grad()
def largest_eigenvalues(matrices: Tensor, count: int, *, backend: str) -> Tensor:
    """The ``count`` algebraically largest eigenvalues of each matrix, descending.

    Householder's reduction to a tridiagonal matrix, then intervals narrowed by Sturm's sequences
    (Golub and Van Loan, Matrix Computations, section 8.3.1 and 8.4.1), in FP32: an error of a few
    roundings of the matrix's norm, so that eigenvalues far below the largest are not known.

    Args:
        matrices: ``[L, N, N]`` symmetric, FP32 or FP64, contiguous. FP64, and N above 64, take the
            reference path on either backend.
        count: in 1 .. N.
        backend: ``"triton"`` (one launch, no wait) or ``"torch"`` (the reference: waits, and answers on the host).

    Returns:
        ``[L, count]``, NaN for a matrix with an element that is not finite.

    Raises:
        ValueError: a shape, dtype or count does not fit, or the backend cannot run on the device.
    """
    if matrices.ndim != 3 or matrices.shape[1] != matrices.shape[2] or matrices.numel() == 0:
        raise ValueError(f"matrices: expected [L, N, N], got {list(matrices.shape)}; stack square matrices")
    if matrices.dtype not in (torch.float32, torch.float64) or not matrices.is_contiguous():
        raise ValueError(
            f"matrices: expected contiguous fp32 or fp64, got {matrices.dtype} of strides {matrices.stride()}; "
            "convert them"
        )
    number, size = matrices.shape[:2]
    if not 1 <= count <= size:
        raise ValueError(f"count: expected 1 .. {size}, got {count}; a matrix has as many eigenvalues as rows")
    require_backend(backend, matrices.device)
    if backend == "torch" or matrices.dtype == torch.float64 or size > MAX_SIZE:
        return largest_eigenvalues_reference(matrices, count)
    values = torch.empty(number, count, dtype=torch.float32, device=matrices.device)
    block = max(16, triton.next_power_of_2(size))
    with torch.cuda.device_of(matrices):
        _largest_eigenvalues_kernel[(number,)](
            matrices,
            values,
            size,
            COUNT=count,
            BLOCK=block,
            COUNT_BLOCK=triton.next_power_of_2(count),
            SECTIONS=SECTIONS,
            # 33^5 parts are finer than FP32; one more for bounds wider than the spectrum.
            ROUNDS=6,
            num_warps=4 if block <= 32 else 8,
        )
    return values
