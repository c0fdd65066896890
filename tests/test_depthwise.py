"""Depthwise convolution: each backend and its gradients against FP64 truth and torch's own error."""

from __future__ import annotations

import pytest
import torch
from places import (  # noqa: F401
    assert_passes_in_the_interpreter,
    gpu,
    needs_card,
    on_every_backend,
    once,
    poisoned_memory,
    variants,
)
from torch.nn.functional import conv2d

from triaccel_bench.kernels import depthwise
from triaccel_bench.kernels.backend import triton
from triaccel_bench.kernels.depthwise import depthwise_conv2d

# N, C, H, W, kernel, stride, padding
CASES = [
    (2, 7, 5, 5, 3, 1, 1),
    (1, 33, 3, 4, 3, 2, 1),
    (1, 1, 7, 6, 3, 2, 1),
    (2, 5, 7, 7, 3, 2, 0),
    (2, 3, 4, 4, 5, 2, 2),
    (3, 8, 1, 1, 5, 1, 2),
    (2, 40, 2, 2, 5, 2, 2),
    (1, 3, 5, 5, 1, 1, 0),
    (1, 3, 6, 6, 7, 3, 1),
    (2, 3, 1, 1, 3, 2, 4),
]


def operands(case, dtype=torch.float32, device="cpu", seed=0) -> tuple[torch.Tensor, torch.Tensor]:
    images, channels, height, width, kernel = case[:5]
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((images, channels, height, width), generator=generator).to(dtype)
    weight = torch.randn((channels, 1, kernel, kernel), generator=generator).to(dtype)
    x = x.to(memory_format=torch.channels_last)
    return x.to(device).requires_grad_(), weight.to(device).requires_grad_()


def upstream(out: torch.Tensor) -> torch.Tensor:
    """The gradient handed back, the same on every device."""
    values = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    return values.to(out.device, out.dtype)


def results(case, place, dtype=torch.float32) -> tuple[torch.Tensor, ...]:
    """Output, gradient of the input and gradient of the weight."""
    x, weight = operands(case, dtype, place[1])
    out = depthwise_conv2d(x, weight, *case[5:], backend=place[0])
    return out.detach(), *torch.autograd.grad(out, (x, weight), upstream(out))


def torch_results(case, dtype, as_double=False) -> tuple[torch.Tensor, ...]:
    x, weight = operands(case, dtype)
    if as_double:
        x, weight = (tensor.detach().double().requires_grad_() for tensor in (x, weight))
    out = conv2d(x, weight, None, *case[5:], 1, case[1])
    return out.detach(), *torch.autograd.grad(out, (x, weight), upstream(out).to(dtype).to(out.dtype))


def assert_as_close_as_torch(case, measured, dtype=torch.float32) -> None:
    for name, got, own, truth in zip(
        ("out", "dx", "dweight"), measured, torch_results(case, dtype), torch_results(case, dtype, True), strict=True
    ):
        assert got.shape == truth.shape and got.dtype == dtype, name
        torch_error = (own.double() - truth).abs().max().item()
        rounding = torch.finfo(dtype).eps * truth.abs().max().item()
        # A NaN fails this comparison, so that nothing unwritten passes.
        assert (got.cpu().double() - truth).abs().max().item() <= 2 * torch_error + rounding, name


@on_every_backend
@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_and_gradients_are_as_close_to_the_truth_as_torch_is(place, case):
    assert_as_close_as_torch(case, results(case, place))


@on_every_backend
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [CASES[0], CASES[4], CASES[5], CASES[6]], ids=str)
def test_half_precision_is_summed_in_fp32(place, case, dtype):
    assert_as_close_as_torch(case, results(case, place, dtype), dtype)


@on_every_backend
@pytest.mark.parametrize(
    "constants",
    [
        {"PROGRAMS": 1},
        {"INT32_ELEMENTS": 0},
        {"DWEIGHT_TAPS": 1, "DWEIGHT_TURN": 1},
        {"ONE_STAGE_PIXELS": 0, "DWEIGHT_TILE": 64},
        {"ONE_STAGE_PIXELS": 0, "DWEIGHT_TILE": 64, "INT32_ELEMENTS": 0},
    ],
    ids=["largest-tiles", "int64-offsets", "smallest-programs", "two-stages", "two-stages-int64"],
)
@pytest.mark.parametrize("case", [(3, 5, 5, 5, 3, 2, 1), (20, 9, 2, 2, 5, 1, 2)], ids=str)
def test_every_way_to_cut_the_work_gives_the_same_sums(place, constants, case, monkeypatch):
    for name, value in constants.items():
        monkeypatch.setattr(depthwise, name, value)
    assert_as_close_as_torch(case, results(case, place))


@on_every_backend
def test_more_shares_than_one_load_of_the_second_stage(place, monkeypatch):
    for name, value in {"ONE_STAGE_PIXELS": 0, "DWEIGHT_TILE": 8, "DWEIGHT_TURN": 1}.items():
        monkeypatch.setattr(depthwise, name, value)
    case = (3, 8, 5, 5, 3, 1, 1)
    assert_as_close_as_torch(case, results(case, place))


@on_every_backend
@pytest.mark.parametrize("one_stage", [True, False])
def test_taps_that_only_meet_padding_get_a_gradient_of_zero(place, one_stage, monkeypatch):
    if not one_stage:
        monkeypatch.setattr(depthwise, "ONE_STAGE_PIXELS", 0)
        monkeypatch.setattr(depthwise, "DWEIGHT_TILE", 8)
    dweight = results((17, 8, 1, 1, 5, 1, 2), place)[2]
    dead = torch.ones(5, 5, dtype=torch.bool)
    dead[2, 2] = False
    assert not dweight[:, 0, dead].any() and dweight[:, 0, 2, 2].all()


@on_every_backend
def test_an_output_that_is_all_padding_is_zero(place):
    case = (2, 3, 1, 1, 1, 2, 1)
    for got, truth in zip(results(case, place), torch_results(case, torch.float32), strict=True):
        assert torch.equal(got.cpu(), truth) and not got.any()


@on_every_backend
def test_an_empty_batch_gives_an_empty_output_and_no_gradient(place):
    out, dx, dweight = results((0, 3, 4, 4, 3, 1, 1), place)
    assert out.shape == dx.shape == (0, 3, 4, 4) and dweight.shape == (3, 1, 3, 3) and not dweight.any()


@on_every_backend
def test_layouts(place):
    x, weight = operands((2, 6, 5, 4, 3), device=place[1])
    plain = x.detach().contiguous().requires_grad_()
    out = depthwise_conv2d(plain, weight, 1, 1, backend=place[0])
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(out, depthwise_conv2d(x, weight, 1, 1, backend=place[0]))
    # The gradient of a sum is one number with strides of zero.
    dx, dweight = torch.autograd.grad(out.sum(), (plain, weight))
    truth_x, truth_weight = plain.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    truth = torch.autograd.grad(conv2d(truth_x, truth_weight, None, 1, 1, 1, 6).sum(), (truth_x, truth_weight))
    torch.testing.assert_close((dx.double(), dweight.double()), truth, rtol=1e-5, atol=1e-5)
    assert dweight.is_contiguous()
    if place[0] == "triton":
        assert dx.is_contiguous(memory_format=torch.channels_last)


@on_every_backend
@pytest.mark.parametrize(("wanted", "unneeded"), [(0, "_dweight"), (1, "_dx")], ids=["input-only", "weight-only"])
def test_a_gradient_that_is_not_needed_is_not_computed(place, wanted, unneeded, monkeypatch):
    case = CASES[0]
    expected = results(case, place)[1 + wanted]
    monkeypatch.setattr(depthwise, unneeded, lambda *_: pytest.fail("computed without need"))
    pair = operands(case, device=place[1])
    pair[1 - wanted].requires_grad_(False)
    out = depthwise_conv2d(*pair, *case[5:], backend=place[0])
    assert torch.equal(torch.autograd.grad(out, pair[wanted], upstream(out))[0], expected)


@on_every_backend
def test_fp64_takes_the_reference_and_has_second_derivatives(place):
    case = (1, 2, 3, 3, 3, 2, 1)
    x, weight = operands(case, torch.float64, place[1])
    assert torch.autograd.gradgradcheck(lambda *pair: depthwise_conv2d(*pair, *case[5:], backend=place[0]), (x, weight))


@on_every_backend
def test_second_derivatives_are_refused_where_there_are_none(place):
    x, weight = operands(CASES[5], device=place[1])
    out = depthwise_conv2d(x, weight, *CASES[5][5:], backend=place[0])
    (dx,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    if place[0] == "torch":
        assert torch.autograd.grad(dx.sum(), x)[0].shape == x.shape
    else:
        with pytest.raises(RuntimeError, match="once_differentiable"):
            dx.sum().backward()


X, WEIGHT = torch.zeros(2, 4, 3, 3), torch.zeros(4, 1, 3, 3)


@once
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((X[0], WEIGHT, 1, 1), r"x: expected .*\[N, C, H, W\], got torch.float32 \[4, 3, 3\]"),
        ((X.int(), WEIGHT.int(), 1, 1), "x: expected fp16.* got torch.int32"),
        ((X, WEIGHT[:3], 1, 1), r"weight: expected contiguous \[4, 1, k, k\], got \[3, 1, 3, 3\]"),
        ((X, WEIGHT[..., :2], 1, 1), r"weight: expected contiguous \[4, 1, k, k\], got \[4, 1, 3, 2\]"),
        ((X, WEIGHT.mT, 1, 1), r"weight: expected contiguous .* strides \(9, 9, 1, 3\)"),
        ((X, WEIGHT.half(), 1, 1), "weight: expected torch.float32 on cpu like x, got torch.float16"),
        ((X, WEIGHT, 0, 1), "stride=0, padding=1: expected at least 1 and 0"),
        ((X, WEIGHT, 1, -1), "stride=1, padding=-1: expected at least 1 and 0"),
        ((X[:, :, :2], WEIGHT, 1, 0), r"x: expected at least 3 pixels .* padding 0 .* got \[2, 3\]"),
    ],
    ids=["no-batch", "integers", "other-channels", "not-square", "transposed", "mixed", "stride", "padding", "small"],
)
def test_arguments_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        depthwise_conv2d(*arguments, backend="torch")


@once
@pytest.mark.parametrize(
    ("size", "out", "kernel", "stride", "padding", "taps", "steps"),
    [
        (1, 1, 5, 1, 2, (2, 3), (2, 3)),
        (2, 2, 5, 1, 2, (1, 4), (1, 4)),
        (2, 1, 5, 2, 2, (2, 4), (1, 2)),
        (4, 4, 5, 1, 2, (0, 5), (0, 5)),
        (4, 2, 3, 2, 1, (0, 3), (0, 2)),
        (1, 2, 1, 2, 1, (0, 0), (0, 0)),
    ],
)
def test_only_taps_that_meet_the_image_are_computed(size, out, kernel, stride, padding, taps, steps):
    assert depthwise.live_taps(size, out, kernel, stride, padding) == taps
    assert depthwise._live_steps(size, out, kernel, stride, padding) == steps


@once
@pytest.mark.skipif(triton is None, reason="needs Triton")
def test_triton_kernels_pass_this_file_in_the_interpreter():
    assert_passes_in_the_interpreter(__file__)


KERNELS = ("_forward_kernel", "_dx_kernel", "_dweight_kernel", "_dweight_sum_kernel")


@gpu
@needs_card
def test_another_batch_size_compiles_nothing():
    def run(images: int) -> list[int]:
        results((images, 32, 16, 16, 3, 1, 1), ("triton", "cuda"), torch.float16)
        return [variants(getattr(depthwise, name)) for name in KERNELS]

    first = run(96)
    assert all(first) and all(run(images) == first for images in (97, 112, 128))


@gpu
@needs_card
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_graph_replays_equal_eager_runs(backend):
    case = (96, 144, 8, 8, 5, 2, 2)
    x, weight = operands(case, torch.float16, "cuda")
    dy = upstream(depthwise_conv2d(x, weight, *case[5:], backend=backend))

    def run() -> tuple[torch.Tensor, ...]:
        out = depthwise_conv2d(x, weight, *case[5:], backend=backend)
        return out.detach(), *torch.autograd.grad(out, (x, weight), dy)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    with torch.no_grad():
        x.mul_(-0.5)
    graph.replay()
    for replayed, eager in zip(captured, run(), strict=True):
        torch.testing.assert_close(replayed, eager, rtol=2e-3, atol=2e-3)


@gpu
@needs_card
@pytest.mark.parametrize(
    "case",
    [(96, 32, 16, 16, 3, 1, 1), (96, 240, 4, 4, 5, 1, 2), (96, 672, 2, 2, 5, 2, 2), (96, 1152, 1, 1, 5, 1, 2)],
    ids=str,
)
def test_training_sizes_on_the_card_are_right_and_the_same_from_launch_to_launch(case):
    first = results(case, ("triton", "cuda"), torch.bfloat16)
    assert_as_close_as_torch(case, first, torch.bfloat16)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, results(case, ("triton", "cuda"), torch.bfloat16)))


@gpu
@needs_card
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_nothing_waits_for_the_device(backend):
    case = CASES[0]
    x, weight = operands(case, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = depthwise_conv2d(x, weight, *case[5:], backend=backend)
        torch.autograd.grad(out.sum(), (x, weight))
    finally:
        torch.cuda.set_sync_debug_mode("default")
