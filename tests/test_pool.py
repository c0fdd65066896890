"""Max pooling: values and gradients are torch's, bit for bit; what is kept for the backward pass is small."""

from __future__ import annotations

import pytest
import torch
from places import (  # noqa: F401
    assert_passes_in_the_interpreter,
    gpu,
    needs_card,
    on_every_backend,
    on_kernels,
    once,
    poisoned_memory,
)
from torch.nn import functional

from triaccel_bench.kernels.backend import triton
from triaccel_bench.kernels.pool import MAX_KERNEL, max_pool2d

LAYOUTS = {"channels_last": torch.channels_last, "contiguous": torch.contiguous_format}
in_every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
# shape, kernel, stride, padding: that of ResNet; windows that overlap twice, touch, or leave pixels out.
CASES = [
    ((3, 5, 16, 16), 3, 2, 1),
    ((1, 33, 7, 9), 3, 1, 1),
    ((2, 4, 8, 6), 2, 2, 0),
    ((2, 3, 11, 8), 2, 3, 1),
    ((1, 1, 1, 1), 1, 1, 0),
    ((2, 3, 9, 9), 5, 2, 2),
]


def integers(shape, dtype, layout, device, seed=0) -> torch.Tensor:
    """Few different values: most windows have several that are largest, and sums of gradients are exact."""
    values = torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed))
    return values.to(device, dtype).contiguous(memory_format=layout)


def both(x: torch.Tensor, dy: torch.Tensor, pool) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.detach().requires_grad_()
    y = pool(x)
    return y.detach(), torch.autograd.grad(y, x, dy)[0]


@on_every_backend
@in_every_layout
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("shape, kernel, stride, padding", CASES, ids=str)
def test_values_and_gradients_are_torchs(place, layout, dtype, shape, kernel, stride, padding):
    backend, device = place
    if backend == "torch" and device == "cuda":
        torch.use_deterministic_algorithms(False)
    x = integers(shape, dtype, layout, device)
    expected_y = functional.max_pool2d(x.cpu(), kernel, stride, padding)
    dy = integers(expected_y.shape, dtype, layout, device, seed=1)
    expected = both(x.cpu(), dy.cpu(), lambda x: functional.max_pool2d(x, kernel, stride, padding))
    measured = both(x, dy, lambda x: max_pool2d(x, kernel, stride, padding, backend=backend))
    for got, right in zip(measured, expected, strict=True):
        assert got.dtype == dtype and torch.equal(got.cpu(), right)
    assert measured[0].is_contiguous(memory_format=layout) and measured[1].is_contiguous(memory_format=layout)


@on_every_backend
def test_nan_and_infinities_come_through(place):
    backend, device = place
    x = torch.zeros(1, 1, 4, 12)
    x[0, 0, :, :4] = float("-inf")
    x[0, 0, 1, 5], x[0, 0, 2, 6] = float("nan"), 7.0
    x[0, 0, 3, 9] = float("inf")
    y = max_pool2d(x.to(device), 4, 4, 0, backend=backend).cpu().flatten()
    assert y[0] == float("-inf") and y[1].isnan() and y[2] == float("inf")
    dx = both(x.to(device), torch.ones(1, 1, 1, 3, device=device), lambda x: max_pool2d(x, 4, 4, 0, backend=backend))[1]
    assert [index.tolist() for index in dx.cpu().nonzero()[:, 2:]] == [[0, 0], [1, 5], [3, 9]]


@on_kernels
def test_a_byte_a_result_is_kept_and_nothing_without_gradients(place):
    backend, device = place
    kept = []
    x = integers((2, 4, 8, 8), torch.float16, torch.channels_last, device)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        y = max_pool2d(x.requires_grad_(), 3, 2, 1, backend=backend)
        max_pool2d(x.detach(), 3, 2, 1, backend=backend)
    assert [(tensor.dtype, tensor.shape) for tensor in kept] == [(torch.uint8, y.shape)]


@on_kernels
def test_it_refuses_a_second_derivative(place):
    backend, device = place
    x = torch.randn(1, 1, 4, 4, device=device, requires_grad=True)
    y = max_pool2d(x.square(), 2, 2, 0, backend=backend)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


@on_every_backend
def test_what_it_cannot_do_it_says(place):
    backend, device = place
    x = torch.zeros(1, 1, 4, 4, device=device)
    for wrong, told in [
        ((x[0], 2, 2, 0), r"x: expected \[N, C, H, W\]"),
        ((x, MAX_KERNEL + 1, 1, 0), "kernel=16.*expected"),
        ((x, 2, 0, 0), "stride=0.*expected"),
        ((x, 2, 1, 2), "padding=2.*at most half"),
        ((x, 5, 1, 0), "images as large as the window"),
    ]:
        with pytest.raises(ValueError, match=told):
            max_pool2d(*wrong, backend=backend)
    with pytest.raises(ValueError, match="backend='fast'"):
        max_pool2d(x, 2, 2, 0, backend="fast")
    if backend == "triton":
        with pytest.raises(ValueError, match="x: expected FP16"):
            max_pool2d(x.int(), 2, 2, 0, backend=backend)
    wide = torch.zeros(1, 1, 4, 4, device=device, dtype=torch.float64)
    assert max_pool2d(wide, 2, 2, 0, backend=backend).dtype == torch.float64
    assert max_pool2d(x[:0], 2, 2, 0, backend=backend).shape == (0, 1, 2, 2)


@once
@pytest.mark.skipif(triton is None, reason="needs Triton")
def test_triton_kernels_pass_this_file_in_the_interpreter():
    assert_passes_in_the_interpreter(__file__)


@gpu
@needs_card
def test_a_captured_pooling_replays_without_waiting_and_to_the_same_bits():
    x = integers((96, 64, 16, 16), torch.bfloat16, torch.channels_last, "cuda")
    dy = integers((96, 64, 8, 8), torch.bfloat16, torch.channels_last, "cuda", seed=1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream):
            expected = both(x, dy, lambda x: max_pool2d(x, 3, 2, 1, backend="triton"))
        torch.cuda.current_stream().wait_stream(stream)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both(x, dy, lambda x: max_pool2d(x, 3, 2, 1, backend="triton"))
    for _ in range(3):
        for value in captured:
            value.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(got, right) for got, right in zip(captured, expected, strict=True))
