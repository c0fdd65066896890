"""Largest eigenvalues of small symmetric matrices: each backend against LAPACK in FP64."""

from __future__ import annotations

import math

import pytest
import torch
from places import (  # noqa: F401
    PLACES,
    assert_passes_in_the_interpreter,
    gpu,
    needs_card,
    on_every_backend,
    once,
    poisoned_memory,
    variants,
)

from triaccel_bench.kernels import eigenvalues as module
from triaccel_bench.kernels.eigenvalues import MAX_SIZE, largest_eigenvalues

ROUNDINGS = 8 * torch.finfo(torch.float32).eps


def symmetric(count: int, size: int, device: str = "cpu") -> torch.Tensor:
    values = torch.randn(count, size, size, generator=torch.Generator().manual_seed(size))
    return (values + values.mT).to(device)


def assert_largest(found: torch.Tensor, matrices: torch.Tensor) -> None:
    truth = torch.linalg.eigvalsh(matrices.double().cpu()).flip(1)[:, : found.shape[1]]
    norm = matrices.double().cpu().abs().sum(2).amax(1, keepdim=True)
    assert ((found.double().cpu() - truth).abs() <= ROUNDINGS * norm).all()


@on_every_backend
@pytest.mark.parametrize("size, count", [(1, 1), (2, 2), (3, 1), (7, 5), (16, 16), (32, 5), (33, 3), (MAX_SIZE + 1, 2)])
def test_the_largest_eigenvalues_descend_and_are_true(place, size, count):
    backend, device = place
    matrices = symmetric(3, size, device)
    before = matrices.clone()
    found = largest_eigenvalues(matrices, count, backend=backend)
    assert found.shape == (3, count) and found.dtype == torch.float32
    assert (found.diff(dim=1) <= 0).all()
    assert_largest(found, matrices)
    assert torch.equal(matrices, before)


@on_every_backend
def test_low_rank_repeated_negative_and_zero_spectra(place):
    backend, device = place
    rows = torch.randn(2, 12, generator=torch.Generator().manual_seed(0))
    basis = torch.linalg.qr(torch.randn(12, 12, generator=torch.Generator().manual_seed(1)))[0]
    diagonals = [[0.0] * 12, [5.0] * 12, [-1.0 - i for i in range(12)], [3.0, -10.0, 1.0] + [0.0] * 9]
    matrices = torch.stack(
        [rows.T @ rows, *(basis @ torch.diag(torch.tensor(values)) @ basis.T for values in diagonals)]
    )
    found = largest_eigenvalues(matrices.to(device), 12, backend=backend)
    assert_largest(found, matrices)
    plain = torch.diag_embed(torch.tensor([[3.0, -10.0, 1.0], [0.0, 0.0, 0.0]])).to(device)
    found = largest_eigenvalues(plain, 3, backend=backend)
    torch.testing.assert_close(found.cpu(), torch.tensor([[3.0, 1.0, -10.0], [0.0, 0.0, 0.0]]), rtol=1e-6, atol=1e-6)


@on_every_backend
@pytest.mark.parametrize("factor", [1e-36, 1e-30, 1e30, 1e36])
def test_numbers_whose_squares_are_no_numbers(place, factor):
    backend, device = place
    matrices = factor * symmetric(2, 9, device)
    assert_largest(largest_eigenvalues(matrices, 4, backend=backend), matrices)


@on_every_backend
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_broken_matrix_is_nan_and_leaves_the_others_alone(place, broken):
    backend, device = place
    matrices = symmetric(3, 5, device)
    matrices[1, 4, 2] = broken
    found = largest_eigenvalues(matrices, 2, backend=backend)
    assert found[1].isnan().all()
    assert_largest(found[::2], matrices[::2])


@on_every_backend
def test_double_precision_is_solved_in_double_precision(place):
    backend, device = place
    matrices = symmetric(2, 6, device).double()
    found = largest_eigenvalues(matrices, 6, backend=backend)
    truth = torch.linalg.eigvalsh(matrices.cpu()).flip(1)
    torch.testing.assert_close(found.cpu(), truth, rtol=1e-12, atol=1e-12)


@gpu
@needs_card
def test_sizes_of_one_block_share_a_kernel_and_nothing_waits():
    before = variants(module._largest_eigenvalues_kernel)
    matrices = {size: symmetric(4, size, "cuda") for size in (20, 27, 32)}
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = {size: largest_eigenvalues(each, 7, backend="triton") for size, each in matrices.items()}
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for size, values in found.items():
        assert_largest(values, matrices[size])
    assert variants(module._largest_eigenvalues_kernel) - before <= 1


@once
@pytest.mark.parametrize(
    "matrices, count, message",
    [
        (torch.ones(2, 3), 1, r"matrices: expected \[L, N, N\], got \[2, 3\]; stack square matrices"),
        (torch.ones(2, 3, 4), 1, r"matrices: expected \[L, N, N\], got \[2, 3, 4\]"),
        (torch.ones(0, 3, 3), 1, r"matrices: expected \[L, N, N\], got \[0, 3, 3\]"),
        (torch.ones(2, 3, 3).half(), 1, "matrices: expected contiguous fp32 or fp64, got torch.float16"),
        (torch.ones(3, 3, 2).permute(2, 0, 1), 1, r"matrices: expected contiguous fp32 or fp64, .* convert them"),
        (torch.ones(2, 3, 3), 0, r"count: expected 1 \.\. 3, got 0"),
        (torch.ones(2, 3, 3), 4, r"count: expected 1 \.\. 3, got 4"),
    ],
)
def test_what_is_no_stack_of_matrices_is_refused(matrices, count, message):
    with pytest.raises(ValueError, match=message):
        largest_eigenvalues(matrices, count, backend="torch")
    with pytest.raises(ValueError, match="backend"):
        largest_eigenvalues(torch.ones(1, 2, 2), 1, backend="numpy")


@once
def test_the_kernels_in_the_interpreter():
    assert_passes_in_the_interpreter(__file__)
