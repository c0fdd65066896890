"""Squeeze and excitation: each backend against FP64 truth, in every layout; who may overwrite which gradient."""

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

from triaccel_bench.kernels import excite as excite_module
from triaccel_bench.kernels.backend import triton
from triaccel_bench.kernels.excite import excite, squeeze

# One pixel and many samples a program, a few pixels, several channel blocks, several pixel blocks.
SHAPES = [(33, 7, 1, 1), (1, 1, 1, 1), (3, 65, 2, 2), (3, 33, 7, 7), (2, 17, 23, 23)]
LAYOUTS = {"channels_last": torch.channels_last, "contiguous": torch.contiguous_format}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
in_every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
in_every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "fp16", "bf16"])


def images(shape, dtype=torch.float32, layout=torch.channels_last, device="cpu", seed=0) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + 0.5
    return values.to(device, dtype).contiguous(memory_format=layout)


def leaf(*arguments, **more) -> torch.Tensor:
    return images(*arguments, **more).requires_grad_()


def block(x, gate, d_pooled, dy, backend, out_dtype=None) -> dict[str, torch.Tensor]:
    """Values and gradients of a squeeze and of the product with gates that do not depend on it."""
    x, gate = x.detach().requires_grad_(), gate.detach().requires_grad_()
    pooled, through = squeeze(x, backend=backend)
    y = excite(through, gate, out_dtype=out_dtype, backend=backend)
    dx, d_gate = torch.autograd.grad([pooled, y], [x, gate], [d_pooled.to(pooled.dtype), dy.to(y.dtype)])
    return {"pooled": pooled.detach(), "y": y.detach(), "dx": dx, "d_gate": d_gate}


def case(shape, dtype, gate_dtype, layout, device) -> list[torch.Tensor]:
    pooled = (*shape[:2], 1, 1)
    return [
        images(shape, dtype, layout, device, seed=1),
        images(pooled, gate_dtype, torch.channels_last, device, seed=2),
        images(pooled, dtype, torch.channels_last, device, seed=3),
        images(shape, dtype, layout, device, seed=4),
    ]


def assert_as_close_as_torch(measured, reference, truth):
    for name, exact in truth.items():
        error, torch_error = ((values[name].double() - exact).abs().max().item() for values in (measured, reference))
        # Half precision is rounded once at the end; FP32 sums differ by their order, which torch does not prescribe.
        eps = max(torch.finfo(measured[name].dtype).eps, 8 * torch.finfo(torch.float32).eps)
        assert error <= 2 * torch_error + eps * exact.abs().max().item(), name


@on_every_backend
@in_every_dtype
@in_every_layout
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients_are_as_close_to_the_truth_as_torch_is(place, dtype, layout, shape):
    backend, device = place
    inputs = case(shape, dtype, dtype, layout, device)
    truth = block(*(tensor.double() for tensor in inputs), "torch")
    measured, reference = block(*inputs, backend), block(*inputs, "torch")
    assert_as_close_as_torch(measured, reference, truth)
    for name, like in zip(("y", "dx", "pooled", "d_gate"), (inputs[0], inputs[0], inputs[2], inputs[1])):
        assert measured[name].dtype == dtype and measured[name].shape == like.shape
    for name in ("y", "dx"):
        assert measured[name].is_contiguous(memory_format=layout)


@on_every_backend
@pytest.mark.parametrize("out_dtype", [None, torch.float16, torch.float32])
@pytest.mark.parametrize("dtypes", [(torch.float16, torch.float32), (torch.bfloat16, torch.float16)], ids=str)
def test_gates_of_another_dtype_promote_as_in_torch(place, dtypes, out_dtype):
    backend, device = place
    inputs = case((3, 33, 2, 3), *dtypes, torch.channels_last, device)
    measured, reference = (block(*inputs, each, out_dtype) for each in (backend, "torch"))
    truth = block(*(tensor.double() for tensor in inputs), "torch")
    assert_as_close_as_torch(measured, reference, truth)
    assert measured["y"].dtype == (out_dtype or (inputs[0] * inputs[1]).dtype)
    assert (measured["dx"].dtype, measured["d_gate"].dtype) == dtypes


@on_every_backend
def test_gates_may_be_a_matrix_of_any_strides(place):
    backend, device = place
    x, gate, d_pooled, dy = case((3, 5, 2, 2), torch.float32, torch.float32, torch.channels_last, device)
    expected = block(x, gate, d_pooled, dy, backend)
    matrix = gate.flatten(1).t().contiguous().t()
    measured = block(x, matrix, d_pooled, dy, backend)
    assert measured["d_gate"].shape == (3, 5)
    assert torch.equal(measured["y"], expected["y"])
    torch.testing.assert_close(measured["d_gate"], expected["d_gate"].flatten(1))


@on_every_backend
@in_every_layout
def test_other_layouts_are_copied(place, layout):
    """Images, and gradients of them, that are cut from larger ones, transposed, or spread from one number."""
    backend, device = place
    inputs = case((3, 5, 4, 3), torch.float32, torch.float32, layout, device)
    expected = block(*inputs, backend)
    x, gate, d_pooled, dy = inputs
    padded = torch.nn.functional.pad(x, (1, 1))[..., 1:-1]
    turned = dy.transpose(2, 3).contiguous().transpose(2, 3)
    measured = block(padded, gate, d_pooled.expand(3, 5, 1, 1), turned, backend)
    for name, value in expected.items():
        torch.testing.assert_close(measured[name], value)
    one = torch.ones(1, device=device)
    spread = block(x, gate, one.expand(d_pooled.shape), one.expand(dy.shape), backend)
    filled = block(x, gate, torch.ones_like(d_pooled), torch.ones_like(dy), backend)
    assert all(torch.equal(spread[name], filled[name]) for name in spread)


@on_every_backend
def test_sums_are_fp32_inside_and_saturated_gates_keep_their_slope(place):
    backend, device = place
    x = torch.full((1, 4, 32, 32), 100.0, dtype=torch.float16, device=device)
    gate = torch.tensor([[-100.0, -12.0, 12.0, 100.0]], device=device, requires_grad=True)
    # In FP16 both sums overflow.
    assert squeeze(x, backend=backend)[0].flatten().tolist() == [100.0] * 4
    excite(x, gate, out_dtype=torch.float16, backend=backend).backward(torch.ones_like(x))
    slope = gate.detach().double().sigmoid() * (-gate.detach().double()).sigmoid()
    torch.testing.assert_close(
        gate.grad.double(), slope * 102400, rtol=1e-5 if backend == "triton" else 0.02, atol=1e-30
    )


@on_every_backend
@in_every_layout
def test_each_output_of_squeeze_may_go_without_a_gradient(place, layout):
    backend, device = place
    x = leaf((2, 3, 5, 3), layout=layout, device=device)
    pooled, through = squeeze(x, backend=backend)
    assert through.data_ptr() == x.data_ptr() and torch.equal(through, x)
    given = images(through.shape, layout=layout, device=device, seed=1)
    assert torch.equal(torch.autograd.grad(through, x, given, retain_graph=True)[0], given)
    d_pooled = images(pooled.shape, device=device, seed=2)
    spread = torch.autograd.grad(pooled, x, d_pooled)[0]
    torch.testing.assert_close(spread, (d_pooled / 15).expand_as(x))
    assert backend == "torch" or spread.is_contiguous(memory_format=layout)


def chain(x, gate, backend, between=lambda through: through):
    pooled, through = squeeze(x, backend=backend)
    through = between(through)
    return pooled, through, excite(through, gate, backend=backend)


def by_hook(chained, x, kept):
    chained[1].register_hook(kept.append)
    (chained[0].sum() + chained[2].sum()).backward()


def by_view(chained, x, kept):
    chained[1].register_hook(lambda grad: kept.append(grad.detach()))
    (chained[0].sum() + chained[2].sum()).backward()


def by_retaining(chained, x, kept):
    chained[1].retain_grad()
    (chained[0].sum() + chained[2].sum()).backward()
    kept.append(chained[1].grad)


def by_asking(chained, x, kept):
    kept.append(torch.autograd.grad(chained[0].sum() + chained[2].sum(), [x, chained[1]])[1])


@on_kernels
@pytest.mark.parametrize("keep", [by_hook, by_view, by_retaining, by_asking])
def test_a_gradient_that_somebody_keeps_is_left_alone(place, keep):
    x, gate = leaf((2, 3, 2, 2), device=place[1]), leaf((2, 3, 1, 1), device=place[1], seed=1)
    kept = []
    keep(chain(x, gate, place[0]), x, kept)
    expected = gate.detach().sigmoid().expand_as(x)
    torch.testing.assert_close(kept[0], expected.contiguous(memory_format=torch.channels_last))


@on_kernels
def test_a_gradient_shared_with_another_branch_is_left_alone(place):
    """The backward of an addition hands one tensor to both terms, and the older one reads it after squeeze has."""
    x, start = leaf((2, 3, 2, 2), device=place[1]), leaf((2, 3, 2, 2), device=place[1], seed=1)
    gate = images((2, 3, 1, 1), device=place[1], seed=2)
    expected = gate.sigmoid().expand_as(x).contiguous(memory_format=torch.channels_last)
    for swapped in (False, True):
        x.grad = start.grad = None
        older = start * 2
        pooled, _, y = chain(x, gate, place[0], lambda t, o=older, s=swapped: o + t if s else t + o)
        (pooled.sum() + y.sum()).backward()
        torch.testing.assert_close(start.grad, 2 * expected)
        torch.testing.assert_close(x.grad, expected + 0.25)


@on_kernels
def test_gradients_given_by_the_caller_are_left_alone(place):
    x = leaf((2, 3, 2, 2), device=place[1])
    given = [images(shape, device=place[1], seed=1) for shape in ((2, 3, 1, 1), (2, 3, 2, 2))]
    before = [grad.clone() for grad in given]
    for _ in range(2):
        dx = torch.autograd.grad(squeeze(x, backend=place[0]), x, given)[0]
        torch.testing.assert_close(dx, before[1] + before[0] / 4)
    assert all(torch.equal(grad, old) for grad, old in zip(given, before))


@on_every_backend
def test_fp64_and_the_reference_are_differentiable_twice(place):
    backend, device = place
    x = leaf((2, 3, 2, 2), torch.float64, device=device)
    gate = leaf((2, 3, 1, 1), torch.float64, device=device, seed=1)

    def function(x, gate):
        pooled, through = squeeze(x, backend=backend)
        return pooled, excite(through, gate, backend=backend), excite(x.float(), gate, backend=backend)

    assert torch.autograd.gradgradcheck(lambda *inputs: function(*inputs)[:2], (x, gate))
    assert function(x, gate)[2].dtype == torch.float64


@on_kernels
def test_kernels_say_that_they_are_differentiable_once(place):
    x, gate = leaf((2, 3, 2, 2), device=place[1]), leaf((2, 3, 1, 1), device=place[1], seed=1)
    pooled, _, y = chain(x, gate, place[0])
    first = torch.autograd.grad(pooled.square().sum() + y.square().sum(), x, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@on_every_backend
def test_an_empty_batch_is_nothing_to_do(place):
    backend, device = place
    x, gate = leaf((0, 3, 2, 2), device=device), leaf((0, 3, 1, 1), device=device)
    pooled, _, y = chain(x, gate, backend)
    (pooled.sum() + y.sum()).backward()
    assert pooled.shape == (0, 3, 1, 1) and y.shape == x.grad.shape == (0, 3, 2, 2)


@once
def test_wrong_inputs_are_refused_with_a_way_out():
    x, gate = images((2, 3, 2, 2)), images((2, 3, 1, 1))
    with pytest.raises(ValueError, match=r"x: expected floating point of shape \[N, C, H, W\].*got torch.float32"):
        squeeze(x[0], backend="torch")
    with pytest.raises(ValueError, match="x: expected floating point"):
        excite(x.int(), gate, backend="torch")
    for wrong in (gate[:1], gate[:, :, 0], gate.int(), gate.to("meta")):
        with pytest.raises(ValueError, match="gate: expected floating-point logits.*pass one logit"):
            excite(x, wrong, backend="torch")
    with pytest.raises(ValueError, match="out_dtype: expected one of"):
        excite(x, gate, out_dtype=torch.int8, backend="torch")
    for call in (lambda: squeeze(x, backend="cuda"), lambda: excite(x, gate, backend="cuda")):
        with pytest.raises(ValueError, match="backend='cuda': expected 'triton' or 'torch'"):
            call()


@once
@pytest.mark.skipif(triton is None, reason="needs Triton")
def test_launches_are_neither_too_few_nor_too_many_and_do_not_change_with_the_batch():
    """At the 16 blocks of EfficientNet-B0 on images of 32 pixels, for 96 of them."""
    for channels, side in [(32, 16), (96, 8), (144, 8), (144, 4), (240, 4), (240, 2), (480, 2), (672, 1), (1152, 1)]:
        tile, warps = excite_module._tile(torch.Size((96, channels, side, side)))
        programs = excite_module._grid(torch.Size((96, channels, side, side)), tile, split_pixels=False)[0]
        assert 132 <= programs <= 1000 and 1 <= warps <= 8
        assert (tile, warps) == excite_module._tile(torch.Size((7, channels, side, side)))


@once
@pytest.mark.skipif(triton is None, reason="needs Triton")
def test_triton_kernels_pass_this_file_in_the_interpreter():
    assert_passes_in_the_interpreter(__file__)


@gpu
@needs_card
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_captured_block_replays_without_waiting_and_to_the_same_bits(backend):
    inputs = case((96, 144, 4, 4), torch.float16, torch.float16, torch.channels_last, "cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream):
            expected = block(*inputs, backend)
        torch.cuda.current_stream().wait_stream(stream)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = block(*inputs, backend)
    for _ in range(3):
        for value in captured.values():
            value.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(captured[name], expected[name]) for name in expected)
