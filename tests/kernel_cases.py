"""What the tests of gradient moments and of the fused update share: gradients of many shapes, and copies."""

from __future__ import annotations

import math

import torch

from triaccel_bench.kernels.moments import GradientMoments
from triaccel_bench.kernels.update import FusedSGD

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
SHAPES = [(1,), (63,), (0,), (10, 100), (8, 4, 3, 3), (4097,), (3,), (0, 5), (7, 1)]
LAYERS = 6


def gradients(seed: int, device: str = "cpu", shapes=SHAPES, mean: float = 0.5) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(shape, generator=generator) * 10.0 ** -(index % 4) + mean).to(device)
        for index, shape in enumerate(shapes)
    ]


def scalar(value: float, device: str) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32, device=device)


def variance_truth(grad: torch.Tensor) -> float:
    return grad.double().var(correction=0).item() if grad.numel() else 0.0


def new_moments(place, shapes=SHAPES, layers=LAYERS, beta=0.9, **more) -> GradientMoments:
    backend, device = place
    return GradientMoments([math.prod(shape) for shape in shapes], layers, device, backend, beta, **more)


def bits_equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    integers = {4: torch.int32, 2: torch.int16}
    return all(
        a.dtype == b.dtype and torch.equal(a.view(integers[a.itemsize]), b.view(integers[b.itemsize]))
        for a, b in zip(left, right, strict=True)
    )


def in_dtypes(tensors: list[torch.Tensor], shift: int = 0) -> list[torch.Tensor]:
    return [tensor.to(DTYPES[(index + shift) % 3]) for index, tensor in enumerate(tensors)]


def off_by_one(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, one element after an aligned address."""
    flat = torch.cat([tensor.new_full((1,), math.nan), tensor.reshape(-1)])
    return flat[1:].view(tensor.shape)


def update_case(device: str):
    shapes = [(8, 4, 3, 3), (8,), (1000,), (0,), (6, 5, 1, 1), (4097,), (1,)]
    params = [param.contiguous() for param in gradients(100, device, shapes, mean=0.1)]
    params[0] = params[0].contiguous(memory_format=torch.channels_last)
    return shapes, params, [0, -1, 1, 2, 2, -1, 0]


def new_sgd(place, params, layer_of, momentum=0.9, weight_decay=5e-4, copies=None) -> FusedSGD:
    return FusedSGD(params, layer_of, place[0], momentum, weight_decay, copies)


def relative_difference(left: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    a, b = (torch.cat([t.double().reshape(-1).cpu() for t in tensors]) for tensors in (left, right))
    return ((a - b).norm() / b.norm()).item()


def copies_of(params: list[torch.Tensor], shift: int = 0) -> list[torch.Tensor | None]:
    dtypes = [DTYPES[(index + shift) % 3] for index in range(len(params))]
    return [None if d == torch.float32 else torch.empty_like(p, dtype=d) for p, d in zip(params, dtypes)]


def in_step(copies: list[torch.Tensor | None], params: list[torch.Tensor]) -> bool:
    pairs = [(copy, param.to(copy.dtype)) for copy, param in zip(copies, params) if copy is not None]
    return bits_equal(*zip(*pairs))
