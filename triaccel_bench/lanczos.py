"""Largest eigenvalues of a symmetric operator that is known by its products alone. Knows nothing of training."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from triaccel_bench import life

Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Spectrum:
    """The algebraically largest eigenvalues of an operator on ``n`` coordinates, as far as a run of Lanczos found them.

    ``eigenvalues`` descend, ``min(k, n)`` of them; each is a lower bound up to rounding, and the
    largest, tight first, alone decides ``converged``. ``iterations`` counts products.
    Empty and not converged if a product was not finite.
    """

    eigenvalues: tuple[float, ...]
    iterations: int
    converged: bool


def most_products(size: int, k: int, iterations: int) -> int:
    """Products that ``lanczos`` takes at most on ``size`` coordinates."""
    return min(size, max(iterations, k))


def lanczos(
    product: Product, start: Tensor, k: int, iterations: int, tolerance: float, random_unit: Callable[[], Tensor]
) -> tuple[Spectrum, Tensor]:
    """Lanczos with full reorthogonalisation.

    Stops after ``min(k, n)`` or more products once the top Ritz pair ``(theta, y)`` has
    ``|H y - theta y| <= tolerance |theta|``, after ``most_products`` at the latest. Where the
    Krylov space is exhausted before (a zero or low-rank operator, repeated eigenvalues) it goes
    on from fresh random directions up to that limit, since what it has seen bounds neither the
    unseen eigenvalues nor their multiplicity. One host read per product.

    Args:
        product: unit vector (n,) -> operator times vector (n,).
        start: first direction (n,), not zero; its dtype and device are the computation's.
        random_unit: draws a unit vector (n,).

    Returns:
        The spectrum, and the top Ritz vector (n,) of unit norm (``start`` if a product was not finite).
    """
    size = start.numel()
    wanted, limit = min(k, size), most_products(size, k, iterations)
    # Separate vectors, because few runs need the limit and each is as large as the layer.
    basis = [unit(start)]
    # Rows and columns as the basis: the operator seen from the Krylov space.
    projection = torch.zeros(limit, limit, dtype=torch.float64)
    restarted = False
    for count in range(1, limit + 1):
        life.sign()
        coefficients, rest = _orthogonalised(product(basis[-1]), basis)
        *column, beta = torch.cat((coefficients, torch.linalg.vector_norm(rest).view(1))).tolist()
        if not all(math.isfinite(value) for value in (*column, beta)):
            return Spectrum((), count, False), start
        projection[:count, count - 1] = torch.tensor(column, dtype=torch.float64)
        block = projection[:count, :count]
        # Rounding, or a product by differences, leaves it slightly unsymmetric.
        values, vectors = torch.linalg.eigh((block + block.T) / 2)
        exhausted = count == size or beta <= torch.finfo(start.dtype).eps ** 0.5 * float(values.abs().max())
        residual = 0.0 if exhausted else beta * abs(float(vectors[-1, -1]))
        converged = residual <= tolerance * abs(float(values[-1]))
        restarted |= exhausted
        if count == limit or (converged and count >= wanted and not restarted):
            break
        if exhausted:
            basis.append(unit(_orthogonalised(random_unit(), basis)[1]))
        else:
            projection[count, count - 1] = beta
            basis.append(rest.div_(beta))
    top = torch.zeros_like(start)
    for weight, vector in zip(vectors[:, -1].tolist(), basis, strict=True):
        top.add_(vector, alpha=weight)
    return Spectrum(tuple(values.flip(0)[:wanted].tolist()), count, converged), top


def projections(matrices: Tensor, steps: int) -> Tensor:
    """Symmetric matrices (L, M, M) seen from Krylov spaces of ``steps`` dimensions: (L, steps, steps).

    The largest eigenvalues of a projection approach those of its matrix from below, the top one
    first, as with ``lanczos``, but for all matrices in step, without a host read and with a fixed
    start, so that a CUDA graph can hold it. The whole matrices are returned if they are no larger.
    """
    count, size, _ = matrices.shape
    if size <= steps:
        return matrices
    place = torch.arange(1, size + 1, dtype=matrices.dtype, device=matrices.device)
    eps = torch.finfo(matrices.dtype).eps
    scale = matrices.abs().amax((1, 2), keepdim=True).clamp(min=torch.finfo(matrices.dtype).tiny)
    matrices = matrices / scale
    basis = matrices.new_zeros(count, steps, size)
    images = torch.empty_like(basis)
    rest = torch.zeros_like(basis[:, 0])
    length = 1.0
    for step in range(steps):
        # As good as random, and no more than rounding: the direction to go on from where nothing else is left.
        rest = rest + (eps * length) * (place * (2.399963 + step)).cos()
        for _ in range(2):
            rest = _without(normalize(rest, dim=1, eps=0.0), basis[:, :step])
        basis[:, step] = normalize(rest, dim=1, eps=0.0)
        image = torch.bmm(matrices, basis[:, step, :, None])[..., 0]
        images[:, step] = image
        length = image.norm(dim=1, keepdim=True).clamp(min=eps)
        rest = _without(image, basis[:, : step + 1])
    projected = torch.bmm(basis, images.mT)
    return (projected + projected.mT) * (scale / 2)


def _without(vectors: Tensor, basis: Tensor) -> Tensor:
    """What is left of (L, M) beside the (L, m, M) orthonormal ones."""
    if not basis.shape[1]:
        return vectors
    coefficients = torch.bmm(basis, vectors[..., None])
    return torch.baddbmm(vectors[..., None], basis.mT, coefficients, alpha=-1)[..., 0]


def unit(vector: Tensor) -> Tensor:
    """``vector`` at norm 1."""
    return vector / torch.linalg.vector_norm(vector)


def _orthogonalised(vector: Tensor, basis: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Coefficients (m,) of ``vector`` (n,) in m orthonormal vectors, and what is left of it. Two passes are enough."""
    rest = vector.clone()
    coefficients = torch.zeros(len(basis), dtype=vector.dtype, device=vector.device)
    for _ in range(2):
        found = torch.stack([direction @ rest for direction in basis])
        for share, direction in zip(found, basis, strict=True):
            rest.addcmul_(share, direction, value=-1)
        coefficients += found
    return coefficients, rest
