"""Lanczos against dense eigenvalues: sign, multiplicity, exhaustion, convergence."""

import pytest
import torch

from triaccel_bench.lanczos import Spectrum, lanczos, most_products, projections, unit


def run(matrix, k=5, iterations=8, tolerance=1e-9, start=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    calls = []

    def random_unit():
        return unit(torch.randn(len(matrix), generator=generator, dtype=matrix.dtype))

    def product(vector):
        assert abs(float(vector.norm()) - 1) < 1e-5
        calls.append(vector.clone())
        return matrix @ vector

    spectrum, top = lanczos(product, random_unit() if start is None else start, k, iterations, tolerance, random_unit)
    assert spectrum.iterations == len(calls) <= most_products(len(matrix), k, iterations)
    return spectrum, top, torch.stack(calls)


def symmetric(values, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(len(values), len(values), generator=generator, dtype=torch.float64))[0]
    return (basis @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ basis.T).to(dtype)


def test_largest_is_algebraic_not_by_magnitude():
    spectrum, top, _ = run(symmetric([3.0, -10.0, 1.0]), k=2)
    assert spectrum.eigenvalues == pytest.approx((3, 1))
    assert spectrum.converged and spectrum.iterations == 3
    matrix = symmetric([3.0, -10.0, 1.0])
    assert torch.allclose(matrix @ top, 3 * top)


def test_all_negative_operator_reports_its_largest():
    assert run(symmetric([-4.0, -2.0, -9.0]), k=1)[0].eigenvalues == pytest.approx((-2,))


@pytest.mark.parametrize("values", [[3.0, 3.0, 1.0], [3.0, 3.0, 3.0, 1.0, 1.0, -2.0], [2.0] * 7])
def test_repeated_eigenvalues_count_as_often_as_they_occur(values):
    spectrum, _, calls = run(symmetric(values), k=3)
    assert spectrum.eigenvalues == pytest.approx(sorted(values, reverse=True)[:3])
    assert spectrum.converged
    assert torch.allclose(calls @ calls.T, torch.eye(len(calls), dtype=calls.dtype), atol=1e-12)


def test_more_eigenvalues_asked_for_than_there_are():
    assert run(symmetric([2.0, 1.0]), k=5)[0] == Spectrum(pytest.approx((2, 1)), 2, True)
    assert run(symmetric([-7.0]), k=5)[0] == Spectrum((-7.0,), 1, True)


@pytest.mark.parametrize("size", [1, 3, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero_operator_is_zero_and_converged(size, dtype):
    spectrum = run(torch.zeros(size, size, dtype=dtype))[0]
    assert spectrum == Spectrum((0.0,) * min(5, size), min(8, size), True)


def test_fewer_iterations_than_eigenvalues_still_gives_k():
    assert len(run(symmetric(list(range(20))), k=5, iterations=1)[0].eigenvalues) == 5


@pytest.mark.parametrize("dtype,rel", [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_dense_truth_with_a_long_tail(dtype, rel):
    values = [40.0, 25.0, 12.0, 6.0, 3.0, *(0.01 * i - 0.5 for i in range(95))]
    spectrum, _, calls = run(symmetric(values, dtype=dtype), iterations=45, tolerance=0.0)
    assert spectrum.eigenvalues == pytest.approx(sorted(values, reverse=True)[:5], rel=rel)
    gram = calls @ calls.T
    assert torch.allclose(gram, torch.eye(len(gram), dtype=dtype), atol=1e3 * torch.finfo(dtype).eps)


def test_convergence_flag_tells_a_short_run_from_a_long_one():
    close = symmetric([1 + 0.001 * i for i in range(200)])
    short, long = run(close, k=1, iterations=3, tolerance=1e-4)[0], run(close, k=1, iterations=200, tolerance=1e-4)[0]
    assert not short.converged and short.iterations == 3
    assert long.converged and long.iterations < 200
    assert long.eigenvalues[0] == pytest.approx(1.199, rel=1e-3)


def test_values_never_exceed_the_true_ones():
    values = sorted((float(i) ** 2 for i in range(50)), reverse=True)
    spectrum = run(symmetric(values), k=5, iterations=8)[0]
    assert all(got <= true * (1 + 1e-12) for got, true in zip(spectrum.eigenvalues, values))


def test_start_from_an_eigenvector_goes_on_to_the_others():
    matrix = torch.diag(torch.tensor([1.0, 5.0, 4.0, 3.0], dtype=torch.float64))
    spectrum = run(matrix, k=3, start=torch.eye(4, dtype=torch.float64)[0])[0]
    assert spectrum.eigenvalues == pytest.approx((5, 4, 3))


def test_unsymmetric_noise_gives_the_symmetric_part():
    matrix = symmetric([5.0, 2.0, 1.0])
    skew = torch.tensor([[0, 0.3, 0], [-0.3, 0, 0.1], [0, -0.1, 0]], dtype=torch.float64)
    assert run(matrix + skew, k=3)[0].eigenvalues == pytest.approx((5, 2, 1))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_product_ends_at_once_without_values(bad):
    matrix = symmetric([5.0, 2.0, 1.0])
    matrix[0, 0] = bad
    assert run(matrix)[0] == Spectrum((), 1, False)


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e12])
@pytest.mark.parametrize(
    "values",
    [
        [5.0, 5.0, 3.0, 1.0, 1.0] + [0.0] * 95,
        [0.0] * 40,
        [1.0] * 40,
        [3.0, -10.0, 1.0] + [0.0] * 60,
        [2.0**-i for i in range(100)],
        [10.0 / (1 + i) for i in range(320)],
        [4.0, 2.0],
    ],
    ids=["repeated", "zero", "identity", "indefinite", "geometric", "long", "small"],
)
def test_projections_of_many_matrices_keep_their_largest_eigenvalues(values, scale, dtype, tolerance):
    size = len(values)
    basis = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))[0]
    matrix = scale * (basis * torch.tensor(values, dtype=torch.float64)) @ basis.T
    found = projections(torch.stack([matrix, -matrix, 3 * matrix]).to(dtype), 32)
    assert found.shape == (3, min(size, 32), min(size, 32)) and found.dtype == dtype
    for factor, projection in zip((1, -1, 3), found, strict=True):
        expected = torch.tensor(sorted((factor * scale * value for value in values), reverse=True)[:5])
        top = torch.linalg.eigvalsh(projection.double()).flip(0)[:5].float()
        bound = tolerance * 3 * scale * max(map(abs, values))
        if factor > 0:
            assert (top - expected).abs().max() <= bound
        else:
            assert (top <= expected + bound).all()
