"""First convolution of an image model: each backend and its gradients against FP64 truth and torch's own error."""

from __future__ import annotations

import pytest
import torch
from places import assert_passes_in_the_interpreter, gpu, needs_card, on_every_backend, once, variants
from torch.nn.functional import conv2d

from triaccel_bench.kernels import stem
from triaccel_bench.kernels.backend import INTERPRETED, triton
from triaccel_bench.kernels.stem import stem_conv2d

# The interpreter keeps bf16 as integers, which its matrix product then multiplies as such.
HALVES = [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16]

# N, C, H, W, O, kernel, stride, padding
CASES = [
    (3, 3, 8, 8, 16, 3, 1, 1),
    (1, 3, 7, 9, 33, 7, 2, 3),
    (7, 3, 5, 6, 1, 3, 2, 1),
    (2, 1, 6, 5, 7, 5, 1, 2),
    (2, 4, 7, 7, 5, 7, 1, 3),
    (3, 3, 5, 7, 70, 5, 2, 0),
    (33, 2, 2, 3, 3, 1, 1, 0),
    (2, 3, 1, 1, 4, 3, 2, 4),
]


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Deterministic mode fills new uninitialised tensors with NaN or the largest integer; FP32 stays FP32."""
    torch.use_deterministic_algorithms(True)
    allowed, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    yield
    torch.backends.cudnn.allow_tf32 = allowed
    torch.use_deterministic_algorithms(False)


def operands(case, dtype=torch.float16, device="cpu", x_gradient=False) -> tuple[torch.Tensor, torch.Tensor]:
    images, channels, height, width, out_channels, kernel = case[:6]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((images, channels, height, width), generator=generator).to(dtype)
    weight = torch.randn((out_channels, channels, kernel, kernel), generator=generator).to(dtype)
    x, weight = (tensor.to(device, memory_format=torch.channels_last) for tensor in (x, weight))
    return x.requires_grad_(x_gradient), weight.requires_grad_()


def upstream(out: torch.Tensor) -> torch.Tensor:
    """The gradient handed back, the same on every device."""
    values = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    return values.to(out.device, out.dtype)


def results(case, place, dtype=torch.float16) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and gradient of the weight."""
    x, weight = operands(case, dtype, place[1])
    out = stem_conv2d(x, weight, *case[6:], backend=place[0])
    return out.detach(), *torch.autograd.grad(out, weight, upstream(out))


def torch_results(case, dtype, as_double=False) -> tuple[torch.Tensor, torch.Tensor]:
    x, weight = operands(case, dtype)
    if as_double:
        x, weight = x.double(), weight.detach().double().requires_grad_()
    out = conv2d(x, weight, None, *case[6:])
    return out.detach(), *torch.autograd.grad(out, weight, upstream(out).to(dtype).to(out.dtype))


def assert_as_close_as_torch(case, measured, dtype=torch.float16) -> None:
    for name, got, own, truth in zip(
        ("out", "dweight"), measured, torch_results(case, dtype), torch_results(case, dtype, True), strict=True
    ):
        assert got.shape == truth.shape and got.dtype == dtype, name
        torch_error = (own.double() - truth).abs().max().item()
        rounding = torch.finfo(dtype).eps * truth.abs().max().item()
        # A NaN fails this comparison, so that nothing unwritten passes.
        assert (got.cpu().double() - truth).abs().max().item() <= 2 * torch_error + rounding, name


@on_every_backend
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_and_gradient_are_as_close_to_the_truth_as_torch_is(place, case, dtype):
    assert_as_close_as_torch(case, results(case, place, dtype), dtype)


@on_every_backend
@pytest.mark.parametrize("case", CASES, ids=str)
def test_where_tf32_is_allowed_operands_keep_ten_bits(place, case, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    kernels = []
    monkeypatch.setattr(stem, "_forward", lambda *given, own=stem._forward: kernels.append("forward") or own(*given))
    monkeypatch.setattr(stem, "_dweight", lambda *given, own=stem._dweight: kernels.append("dweight") or own(*given))
    out, dweight = results(case, place, torch.float32)
    assert kernels == (["forward", "dweight"] if place[0] == "triton" else [])
    x, weight = (tensor.detach().double() for tensor in operands(case, torch.float32))
    dy = upstream(out).cpu().double()
    truth = torch_results(case, torch.float32, as_double=True)
    # Two operands, each cut off after its tenth bit.
    most = conv2d(x.abs(), weight.abs(), None, *case[6:]) * 2**-9
    most_dweight = torch.nn.grad.conv2d_weight(x.abs(), weight.shape, dy.abs(), *case[6:]) * 2**-9
    for got, exact, bound in zip((out, dweight), truth, (most, most_dweight), strict=True):
        assert got.dtype == torch.float32 and ((got.cpu().double() - exact).abs() <= bound + 1e-6).all()


@on_every_backend
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_sums_are_kept_in_fp32(place, dtype):
    """Each rounding to half precision of a sum of many ones would lose the next ones."""
    x = torch.ones((9, 4, 16, 16), dtype=dtype, device=place[1]).contiguous(memory_format=torch.channels_last)
    weight = torch.zeros((2, 4, 1, 1), dtype=dtype, device=place[1], requires_grad=True)
    (dweight,) = torch.autograd.grad(stem_conv2d(x, weight, 1, 0, backend=place[0]).sum(), weight)
    assert torch.equal(dweight.cpu(), torch.full((2, 4, 1, 1), 9 * 256, dtype=dtype))


@on_every_backend
@pytest.mark.parametrize(
    "constants",
    [
        {"PROGRAMS": 1},
        {"INT32_ELEMENTS": 0},
        {"BLOCK_PIXELS": 16},
        {"BLOCK_PIXELS": 16, "PROGRAMS": 3, "INT32_ELEMENTS": 0},
        {"BLOCK_COLUMNS": 9},
        {"BLOCK_COLUMNS": 30, "BLOCK_OUT": 16},
    ],
    ids=["one-program", "int64-offsets", "small-tiles", "several-tiles-each", "single-rows", "small-blocks"],
)
@pytest.mark.parametrize("case", [(20, 3, 6, 5, 20, 3, 1, 1), (2, 3, 5, 7, 33, 5, 1, 2)], ids=str)
def test_every_way_to_cut_the_work_gives_the_same_sums(place, constants, case, monkeypatch):
    for name, value in constants.items():
        monkeypatch.setattr(stem, name, value)
    assert_as_close_as_torch(case, results(case, place))


@on_every_backend
def test_more_shares_than_one_load_of_the_second_stage(place, monkeypatch):
    for name, value in {"BLOCK_PIXELS": 16, "SUM_SHARES": 4}.items():
        monkeypatch.setattr(stem, name, value)
    case = (33, 3, 4, 5, 9, 1, 1, 0)
    if place[0] == "triton":
        assert stem._shares(42, 1, 16) == 11
    assert_as_close_as_torch(case, results(case, place))


@on_every_backend
def test_an_output_that_is_all_padding_is_zero(place):
    for got, truth in zip(
        results((2, 3, 1, 1, 5, 1, 2, 1), place), torch_results((2, 3, 1, 1, 5, 1, 2, 1), torch.half)
    ):
        assert torch.equal(got.cpu(), truth) and not got.any()


@on_every_backend
def test_an_empty_batch_gives_an_empty_output_and_no_gradient(place):
    out, dweight = results((0, 3, 4, 4, 8, 3, 1, 1), place)
    assert out.shape == (0, 8, 4, 4) and dweight.shape == (8, 3, 3, 3) and not dweight.any()


@on_every_backend
def test_layouts(place):
    x, weight = operands((2, 3, 5, 4, 6, 3), device=place[1])
    out = stem_conv2d(x, weight, 1, 1, backend=place[0])
    # The gradient of a sum is one number with strides of zero.
    (dweight,) = torch.autograd.grad(out.sum(), weight)
    assert out.is_contiguous(memory_format=torch.channels_last)
    odd = weight.detach().permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0)
    for other in (weight.detach().contiguous(), odd):
        other.requires_grad_()
        again = stem_conv2d(x.contiguous(), other, 1, 1, backend=place[0])
        (gradient,) = torch.autograd.grad(again.sum(), other)
        assert again.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close((again, gradient), (out, dweight), rtol=2e-3, atol=2e-3)
        if place[0] == "triton":
            assert torch.equal(again, out) and torch.equal(gradient, dweight)
            assert gradient.stride() == other.stride()


@on_every_backend
def test_the_gradient_of_the_input_is_torchs(place):
    case = (2, 3, 7, 6, 5, 3, 2, 1)
    x, weight = operands(case, device=place[1], x_gradient=True)
    out = stem_conv2d(x, weight, *case[6:], backend=place[0])
    dx, dweight = torch.autograd.grad(out, (x, weight), upstream(out))
    truth_x = x.detach().double().requires_grad_()
    truth = conv2d(truth_x, weight.detach().double(), None, *case[6:])
    (expected,) = torch.autograd.grad(truth, truth_x, upstream(out).double())
    torch.testing.assert_close(dx.double(), expected, rtol=2e-3, atol=4e-3)
    assert dx.dtype == x.dtype and torch.equal(dweight, results(case, place)[1])


@on_every_backend
def test_the_gradient_of_a_frozen_weight_is_not_computed(place, monkeypatch):
    monkeypatch.setattr(stem, "_dweight", lambda *_: pytest.fail("computed without need"))
    x, weight = operands(CASES[2], device=place[1], x_gradient=True)
    out = stem_conv2d(x, weight.detach(), *CASES[2][6:], backend=place[0])
    assert torch.autograd.grad(out.sum(), x)[0].shape == x.shape


@on_every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_wide_dtypes_take_the_reference(place, dtype, monkeypatch):
    monkeypatch.setattr(stem, "_forward", lambda *_: pytest.fail("rounded products"))
    assert results(CASES[0], place, dtype)[0].dtype == dtype


@on_every_backend
def test_fp64_has_second_derivatives(place):
    case = (1, 2, 3, 3, 2, 3, 2, 1)
    x, weight = operands(case, torch.float64, place[1], x_gradient=True)
    assert torch.autograd.gradgradcheck(lambda *pair: stem_conv2d(*pair, *case[6:], backend=place[0]), (x, weight))


@on_every_backend
def test_second_derivatives_are_refused_where_there_are_none(place):
    x, weight = operands(CASES[2], device=place[1])
    out = stem_conv2d(x, weight, *CASES[2][6:], backend=place[0])
    (dweight,) = torch.autograd.grad(out.square().sum(), weight, create_graph=True)
    if place[0] == "torch":
        assert torch.autograd.grad(dweight.sum(), weight)[0].shape == weight.shape
    else:
        with pytest.raises(RuntimeError, match="once_differentiable"):
            dweight.sum().backward()


X, WEIGHT = torch.zeros(2, 3, 5, 5), torch.zeros(4, 3, 3, 3)


@once
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((X[0], WEIGHT, 1, 1), r"x: expected .*\[N, C, H, W\], got torch.float32 \[3, 5, 5\]"),
        ((X.int(), WEIGHT.int(), 1, 1), "x: expected fp16.* got torch.int32"),
        ((X.repeat(1, 2, 1, 1), WEIGHT.repeat(1, 2, 1, 1), 1, 1), "x: expected 1 to 4 channels, got 6"),
        ((X, WEIGHT[:, :1], 1, 1), r"weight: expected \[O, 3, k, k\], got \[4, 1, 3, 3\]"),
        ((X, WEIGHT[..., :2], 1, 1), r"weight: expected \[O, 3, k, k\], got \[4, 3, 3, 2\]"),
        ((X, WEIGHT[:0], 1, 1), r"weight: expected \[O, 3, k, k\], got \[0, 3, 3, 3\]"),
        ((X, WEIGHT[..., :2, :2], 1, 1), "weight: expected an odd k of at most 7, got 2"),
        ((X, torch.zeros(4, 3, 9, 9), 1, 4), "weight: expected an odd k of at most 7, got 9"),
        ((X, WEIGHT.half(), 1, 1), "weight: expected torch.float32 on cpu like x, got torch.float16"),
        ((X, WEIGHT, 0, 1), "stride=0, padding=1: expected at least 1 and 0"),
        ((X, WEIGHT, 1, -1), "stride=1, padding=-1: expected at least 1 and 0"),
        ((X[:, :, :2], WEIGHT, 1, 0), r"x: expected at least 3 pixels .* padding 0 .* got \[2, 5\]"),
    ],
    ids=[
        "no-batch",
        "integers",
        "many-channels",
        "other-channels",
        "not-square",
        "no-output",
        "even",
        "large",
        "mixed",
        "stride",
        "padding",
        "small",
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        stem_conv2d(*arguments, backend="torch")


@once
@pytest.mark.skipif(triton is None, reason="needs Triton")
@pytest.mark.parametrize(
    ("channels", "kernel", "out_channels", "blocks"),
    [
        (3, 3, 64, (3, 32, 64)),
        (3, 7, 64, (3, 64, 64)),
        (3, 3, 32, (3, 32, 32)),
        (3, 5, 96, (3, 64, 64)),
        (4, 7, 7, (2, 64, 16)),
        (1, 1, 1, (1, 16, 16)),
    ],
)
def test_blocks_hold_whole_kernel_rows(channels, kernel, out_channels, blocks):
    assert stem._blocks(channels, kernel, out_channels) == blocks


@once
@pytest.mark.skipif(triton is None, reason="needs Triton")
@pytest.mark.parametrize(
    ("tiles", "groups", "block_k", "shares"), [(6144, 1, 32, 512), (192, 3, 64, 96), (192, 1, 32, 192), (1, 3, 64, 1)]
)
def test_few_pixels_are_summed_in_few_shares(tiles, groups, block_k, shares):
    assert stem._shares(tiles, groups, block_k) == shares


@once
@pytest.mark.skipif(triton is None, reason="needs Triton")
def test_triton_kernels_pass_this_file_in_the_interpreter():
    assert_passes_in_the_interpreter(__file__)


@gpu
@needs_card
def test_another_batch_size_compiles_nothing():
    def run(images: int) -> list[int]:
        results((images, 3, 16, 16, 64, 3, 1, 1), ("triton", "cuda"))
        return [variants(getattr(stem, name)) for name in ("_forward_kernel", "_dweight_kernel", "_dweight_sum_kernel")]

    first = run(96)
    assert all(first) and all(run(images) == first for images in (1, 97, 112, 128))


@gpu
@needs_card
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_graph_replays_equal_eager_runs(backend):
    case = (96, 3, 32, 32, 64, 3, 1, 1)
    x, weight = operands(case, device="cuda")
    dy = upstream(stem_conv2d(x, weight, *case[6:], backend=backend))

    def run() -> tuple[torch.Tensor, ...]:
        out = stem_conv2d(x, weight, *case[6:], backend=backend)
        return out.detach(), *torch.autograd.grad(out, weight, dy)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    x.mul_(-0.5)
    graph.replay()
    for replayed, eager in zip(captured, run(), strict=True):
        torch.testing.assert_close(replayed, eager, rtol=2e-3, atol=2e-3)


@gpu
@needs_card
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    "case",
    [(96, 3, 32, 32, 64, 3, 1, 1), (96, 3, 32, 32, 64, 7, 2, 3), (96, 3, 32, 32, 32, 3, 2, 1)]
    + [(2, 3, 224, 224, 64, 7, 2, 3)],
    ids=str,
)
def test_training_sizes_on_the_card_are_right_and_the_same_from_launch_to_launch(case, dtype):
    first = results(case, ("triton", "cuda"), dtype)
    assert_as_close_as_torch(case, first, dtype)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, results(case, ("triton", "cuda"), dtype)))


@gpu
@needs_card
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_nothing_waits_for_the_device(backend):
    x, weight = operands(CASES[0], device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = stem_conv2d(x, weight, *CASES[0][6:], backend=backend)
        torch.autograd.grad(out.sum(), weight)
    finally:
        torch.cuda.set_sync_debug_mode("default")
