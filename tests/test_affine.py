"""Batch normalisation by running statistics: each backend against FP64 truth, and which networks evaluate on it."""

from __future__ import annotations

import pytest
import torch
from places import assert_passes_in_the_interpreter, gpu, needs_card, on_every_backend, on_kernels, once, variants
from places import poisoned_memory as poisoned_memory

from triaccel_bench import models
from triaccel_bench.kernels import affine
from triaccel_bench.kernels.affine import affine_norm_act, affine_norm_act_reference
from triaccel_bench.kernels.backend import triton
from triaccel_bench.models import Norm

HALF, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
EPS = 1e-3
VECTORS = ("weight", "bias", "running_mean", "running_var")
LAYOUTS = {"channels-last": torch.channels_last, "contiguous": torch.contiguous_format}
in_every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
CASES = [
    dict(activation="none", dtype=HALF),
    dict(activation="none", dtype=BF16, residual=FP32, out_dtype=HALF),
    dict(activation="relu", dtype=FP32),
    dict(activation="relu", dtype=HALF, out_dtype=BF16),
    dict(activation="relu", dtype=HALF, residual=HALF),
    dict(activation="relu", dtype=FP32, residual=BF16, out_dtype=HALF),
    dict(activation="silu", dtype=BF16, out_dtype=FP32),
    dict(activation="silu", dtype=HALF, residual=FP32),
    dict(activation="silu", dtype=FP32, residual=FP32),
]
SHAPES = [(1, 1, 1, 1), (7, 33, 1, 1), (1, 7, 3, 5), (5, 24, 2, 4), (3, 1, 7, 3)]


@pytest.fixture(params=["one-row", "four-rows", "wide"])
def tiles(request, monkeypatch):
    """Many programs, of one row or several, with the last of both not full; or offsets in 64 bit."""
    monkeypatch.setattr(affine, "TILES", ((1, 32),) if request.param == "one-row" else ((4, 16),))
    if request.param == "wide":
        monkeypatch.setattr(affine, "INT32_MAX", 0)


def inputs(shape, dtype=FP32, residual=None, seed=0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    channels = shape[1]
    tensors = dict(
        x=(torch.randn(shape, generator=draw) * 2 + 1).to(dtype),
        weight=torch.randn(channels, generator=draw) + 0.5,
        bias=torch.randn(channels, generator=draw),
        running_mean=torch.randn(channels, generator=draw) + 1,
        running_var=torch.rand(channels, generator=draw) * 3 + 0.1,
        dy=torch.randn(shape, generator=draw),
    )
    if residual is not None:
        tensors["residual"] = torch.randn(shape, generator=draw).to(residual)
    return tensors


def computed(tensors, place, activation, out_dtype=None, dtype=None, layout=torch.channels_last) -> dict:
    """y and the gradients; ``dtype`` computes all of it in that dtype."""
    backend, device = place
    own = {name: tensor.to(device, dtype, copy=True) for name, tensor in tensors.items()}
    leaves = {name: own[name].contiguous(memory_format=layout) for name in ("x", "residual") if name in own}
    for leaf in leaves.values():
        leaf.requires_grad_()
    y = affine_norm_act(
        leaves["x"], *(own[name] for name in VECTORS), EPS, activation=activation, residual=leaves.get("residual"),
        out_dtype=dtype or out_dtype, backend=backend,
    )  # fmt: skip
    assert y.dtype == (dtype or out_dtype or own["x"].dtype) and y.stride() == leaves["x"].stride()
    # What comes from above has y's dtype, for the truth as well.
    y.backward(tensors["dy"].to(out_dtype or tensors["x"].dtype).to(device, y.dtype))
    for leaf in leaves.values():
        assert leaf.grad.dtype == leaf.dtype and leaf.grad.is_contiguous(memory_format=layout)
    return {"y": y.detach()} | {f"d{name}": leaf.grad for name, leaf in leaves.items()}


def assert_as_close_as_torch(measured, torch_result, truth):
    assert measured.keys() == truth.keys()
    for name, ours in measured.items():
        true = truth[name].cpu()
        error, torch_error = (
            (result.double().cpu() - true).abs().max().item() for result in (ours, torch_result[name])
        )
        rounding = 2 * torch.finfo(ours.dtype).eps * true.abs().max().clamp(min=1.0).item()
        assert error <= 2 * torch_error + rounding, (name, error, torch_error, rounding)


@on_every_backend
@in_every_layout
@pytest.mark.parametrize("index", range(len(CASES)))
def test_results_and_gradients_are_as_close_to_the_truth_as_torch_is(place, tiles, layout, index):
    case = dict(CASES[index])
    activation, out_dtype = case.pop("activation"), case.pop("out_dtype", None)
    tensors = inputs(SHAPES[-1 - index % len(SHAPES)], **case)
    measured = computed(tensors, place, activation, out_dtype, layout=layout)
    torch_result = computed(tensors, ("torch", "cpu"), activation, out_dtype, layout=layout)
    truth = computed(tensors, ("torch", "cpu"), activation, out_dtype, FP64, layout)
    assert_as_close_as_torch(measured, torch_result, truth)


@on_every_backend
@in_every_layout
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_in_every_layout(place, tiles, layout, shape):
    for activation in ("relu", "silu"):
        tensors = inputs(shape, residual=FP32, seed=1)
        truth = computed(tensors, ("torch", "cpu"), activation, dtype=FP64, layout=layout)
        torch_result = computed(tensors, ("torch", "cpu"), activation, layout=layout)
        assert_as_close_as_torch(computed(tensors, place, activation, layout=layout), torch_result, truth)


@on_every_backend
@pytest.mark.parametrize("shape", [(1, 40, 1, 1), (3, 33, 4, 4)])
def test_tiles_of_real_sizes(place, shape):
    tensors = inputs(shape, HALF)
    results = [computed(tensors, where, "relu", dtype=dtype) for where, dtype in (
        (place, None), (("torch", "cpu"), None), (("torch", "cpu"), FP64))]  # fmt: skip
    assert_as_close_as_torch(*results)


@on_every_backend
def test_a_mean_of_a_thousand_deviations_cancels_before_it_is_scaled(place):
    tensors = inputs((2, 5, 3, 3))
    tensors["x"] += 2000.0
    tensors["running_mean"] += 2000.0
    tensors["weight"].fill_(1.0)
    truth = computed(tensors, ("torch", "cpu"), "none", dtype=FP64)
    atol = 1e-4 if place[0] == "triton" else 5e-3
    torch.testing.assert_close(computed(tensors, place, "none")["y"].double().cpu(), truth["y"], rtol=0.0, atol=atol)


@on_every_backend
@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
@pytest.mark.parametrize("residual", [None, FP32])
def test_nan_and_inf_go_where_torch_lets_them_go(place, activation, residual):
    tensors = inputs((4, 3, 2, 2), residual=residual)
    tensors["weight"].abs_()
    tensors["x"][1, 0, 0, 0], tensors["x"][2, 2, 1, 1], tensors["x"][3, 1, 0, 1] = map(float, ("nan", "inf", "-inf"))
    tensors["dy"][0, 1, 0, 0] = float("nan")
    measured = computed(tensors, place, activation)
    for name, expected in computed(tensors, ("torch", "cpu"), activation).items():
        torch.testing.assert_close(measured[name].cpu(), expected, equal_nan=True, rtol=1e-4, atol=1e-5)
    assert measured["y"][1, 0, 0, 0].isnan()


@on_every_backend
@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
@pytest.mark.parametrize("needed", [("x",), ("residual",), ()])
def test_gradients_come_only_where_they_are_needed(place, activation, needed):
    tensors = inputs((3, 7, 2, 2), residual=FP32)
    expected = computed(tensors, ("torch", "cpu"), activation)
    own = {name: tensor.to(place[1]) for name, tensor in tensors.items()}
    for name in needed:
        own[name].requires_grad_()
    y = affine_norm_act(
        own["x"], *(own[name] for name in VECTORS), EPS,
        activation=activation, residual=own["residual"], backend=place[0],
    )  # fmt: skip
    torch.testing.assert_close(y.detach().cpu(), expected["y"])
    assert y.requires_grad == bool(needed)
    if needed:
        y.backward(own["dy"])
    for name in ("x", "residual"):
        if name in needed:
            torch.testing.assert_close(own[name].grad.cpu(), expected[f"d{name}"], rtol=1e-4, atol=1e-5)
        else:
            assert own[name].grad is None


@on_kernels
@pytest.mark.parametrize(
    ("activation", "residual", "kept"),
    [("none", True, []), ("relu", True, ["y"]), ("silu", False, ["x"]), ("silu", True, ["residual", "x"])],
)
def test_what_is_kept_for_backward(place, activation, residual, kept):
    own = {name: tensor.to(place[1]) for name, tensor in inputs((3, 7, 2, 2), residual=FP32).items()}
    own["x"].requires_grad_()
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: seen.append(tensor.data_ptr()) or tensor, lambda t: t):
        own["y"] = affine_norm_act(
            own["x"].contiguous(memory_format=torch.channels_last), *(own[name] for name in VECTORS), EPS,
            activation=activation, residual=own["residual"] if residual else None, backend=place[0],
        )  # fmt: skip
    vectors = {own[name].data_ptr() for name in VECTORS}
    assert len([each for each in seen if each not in vectors]) == len(kept)
    assert (own["y"].data_ptr() in seen) == ("y" in kept)


@on_every_backend
def test_other_strides_are_copied_and_results_do_not_change(place):
    tensors = inputs((3, 8, 4, 6), residual=FP32)
    expected = computed(tensors, place, "silu")
    own = {name: tensor.to(place[1]) for name, tensor in tensors.items()}
    wide = torch.cat([own["x"], own["x"]], dim=3)[..., :6].requires_grad_()
    residual = own["residual"].transpose(2, 3).contiguous().transpose(2, 3)
    y = affine_norm_act(
        wide, *(own[name] for name in VECTORS), EPS, activation="silu", residual=residual, backend=place[0]
    )
    # A gradient without strides of its own, as a sum sends it.
    (dx,) = torch.autograd.grad(y.sum(), wide, retain_graph=True)
    assert dx.isfinite().all()
    (dx,) = torch.autograd.grad(y, wide, own["dy"])
    torch.testing.assert_close(y, expected["y"])
    torch.testing.assert_close(dx, expected["dx"], rtol=1e-4, atol=1e-5)


@on_every_backend
def test_a_batch_without_images_is_given_back_empty(place):
    vectors = [torch.ones(3, device=place[1]) for _ in VECTORS]
    x = torch.empty(0, 3, 2, 2, device=place[1], requires_grad=True)
    y = affine_norm_act(x, *vectors, EPS, activation="relu", residual=x, out_dtype=HALF, backend=place[0])
    y.sum().backward()
    assert y.shape == x.grad.shape == x.shape and y.dtype == HALF


@once
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
def test_the_reference_can_be_differentiated_twice_by_everything(activation, residual):
    tensors = inputs((3, 2, 2, 2), FP64, residual=FP64 if residual else None)
    leaves = [
        tensors[name].double().requires_grad_() for name in ("x", "weight", "bias", "residual") if name in tensors
    ]

    def function(x, weight, bias, added=None):
        mean, var = tensors["running_mean"].double(), tensors["running_var"].double()
        return affine_norm_act_reference(x, weight, bias, mean, var, EPS, activation=activation, residual=added)

    assert torch.autograd.gradcheck(function, leaves) and torch.autograd.gradgradcheck(function, leaves)


@on_every_backend
def test_double_precision_takes_the_reference(place):
    tensors = inputs((3, 4, 2, 2), FP64)
    truth = computed(tensors, ("torch", place[1]), "relu", dtype=FP64)
    for name, ours in computed(tensors, place, "relu", dtype=FP64).items():
        assert torch.equal(ours, truth[name])


@on_every_backend
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(x=torch.zeros(4, 3)), "x: expected"),
        (dict(activation="gelu"), "activation='gelu'"),
        (dict(residual=torch.zeros(2, 3, 2, 1)), "residual: expected shape"),
        (dict(running_var=torch.zeros(4)), "running_var: expected shape"),
        (dict(backend="numpy"), "backend='numpy'"),
    ],
)
def test_what_does_not_fit_is_refused(place, changes, message):
    vectors = {name: torch.ones(3) for name in VECTORS}
    arguments = dict(x=torch.zeros(2, 3, 2, 2), eps=EPS, backend=place[0]) | vectors | changes
    arguments = {name: value.to(place[1]) if torch.is_tensor(value) else value for name, value in arguments.items()}
    with pytest.raises(ValueError, match=message):
        affine_norm_act(**arguments)


@on_kernels
@pytest.mark.parametrize("name", VECTORS)
def test_what_the_kernel_would_not_differentiate_by_may_need_no_gradient(place, name):
    own = {each: torch.ones(3, device=place[1]) for each in VECTORS} | {"x": torch.ones(2, 3, 1, 1, device=place[1])}
    own[name].requires_grad_()
    with pytest.raises(ValueError, match=f"{name}: expected weight and bias that need no gradient"):
        affine_norm_act(**own, eps=EPS, backend=place[0])
    with torch.no_grad():
        assert affine_norm_act(**own, eps=EPS, backend=place[0]).isfinite().all()


@on_kernels
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(x=torch.ones(2, 3, 1, 1, dtype=torch.int32)), "x: expected FP16"),
        (dict(residual=torch.ones(2, 3, 1, 1, dtype=FP64)), "residual: expected FP16"),
        (dict(out_dtype=FP64), "out_dtype: expected FP16"),
        (dict(bias=torch.ones(3, dtype=HALF)), "bias: expected contiguous torch.float32"),
    ],
)
def test_dtypes_that_the_kernel_cannot_read_are_refused(place, changes, message):
    own = {name: torch.ones(3) for name in VECTORS} | {"x": torch.ones(2, 3, 1, 1)} | changes
    own = {name: value.to(place[1]) if torch.is_tensor(value) else value for name, value in own.items()}
    with pytest.raises(ValueError, match=message):
        affine_norm_act(**own, eps=EPS, backend=place[0])


class OnCard(torch.Tensor):
    """Says that it lies on a card, for the choice of a path where there is none."""

    is_cuda = True


@once
@pytest.mark.parametrize(
    ("changes", "fused"),
    [
        (dict(grad=False), True),
        (dict(grad=False, learnable=True), True),
        (dict(once=True), True),
        (dict(once=True, learnable=True), False),
        (dict(), False),
        (dict(grad=False, kernels="torch"), False),
        (dict(grad=False, on_card=False), False),
        (dict(grad=False, scaled=True), False),
    ],
)
def test_a_norm_evaluates_in_one_launch_where_it_is_differentiated_at_most_once(monkeypatch, changes, fused):
    case = dict(grad=True, learnable=False, once=False, kernels="triton", on_card=True, scaled=False) | changes
    calls = []

    def recorded(*arguments, backend, **options):
        calls.append(backend)
        return affine_norm_act(*arguments, backend="torch", **options)

    monkeypatch.setattr(models, "affine_norm_act", recorded)
    norm, plain = Norm(3).eval(), torch.nn.BatchNorm2d(3).eval()
    for each in (norm, plain):
        each.running_mean.fill_(0.5)
        each.requires_grad_(case["learnable"])
    norm.kernels, norm.differentiated_once = case["kernels"], case["once"]
    x, residual = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4).to(BF16)
    scale = torch.full((2,), 2.0) if case["scaled"] else None
    with torch.set_grad_enabled(case["grad"]):
        given = x.as_subclass(OnCard) if case["on_card"] else x
        y, again = norm(given, "relu", residual, scale, FP32, branches=2)
        expected = torch.relu((plain(x) * (2.0 if case["scaled"] else 1.0)) + (residual.float()))
    assert y is again and calls == ["triton"] * fused
    torch.testing.assert_close(y.as_subclass(torch.Tensor), expected)


@once
@pytest.mark.skipif(triton is None, reason="needs Triton")
@pytest.mark.parametrize("batch", [1, 32, 96, 768, 5000])
@pytest.mark.parametrize("channels", [1, 24, 64, 512, 1280])
@pytest.mark.parametrize("side", [1, 2, 7, 32])
@in_every_layout
def test_rows_cover_every_element_and_start_with_the_first_channel(batch, channels, side, layout):
    shape, usual = (torch.Size((images, channels, side, side)) for images in (batch, 96))
    (programs,), (units, units_a_row), fixed = affine._cut(shape, layout)
    unit = channels * fixed["AREA"]
    row_length = units_a_row * unit
    assert units * unit == shape.numel() <= fixed["ROWS"] * row_length < (units + fixed["ROWS"]) * unit
    assert (programs - 1) * fixed["TILE"] < row_length <= programs * fixed["TILE"]
    assert fixed["num_warps"] * 32 * affine.ELEMENTS_A_THREAD == fixed["TILE"]
    # Nothing that is compiled in goes by the batch, but offsets in 64 bit.
    assert fixed.pop("WIDE") == (fixed["ROWS"] * row_length + fixed["TILE"] >= 2**31)
    assert fixed | {"WIDE": False} == affine._cut(usual, layout)[2]


@once
@pytest.mark.skipif(triton is None, reason="needs Triton")
def test_triton_kernels_pass_this_file_in_the_interpreter():
    assert_passes_in_the_interpreter(__file__)


CARD_SHAPES = [(32, 512, 1, 1), (96, 144, 8, 8), (33, 24, 16, 16), (192, 64, 32, 32), (5, 33, 7, 7)]


@gpu
@needs_card
@in_every_layout
@pytest.mark.parametrize("shape", CARD_SHAPES)
@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
def test_real_sizes_agree_with_the_truth_and_are_the_same_from_launch_to_launch(shape, layout, activation):
    tensors = inputs(shape, HALF, residual=HALF)
    first = computed(tensors, ("triton", "cuda"), activation, layout=layout)
    truth = computed(tensors, ("torch", "cuda"), activation, None, FP64, layout)
    assert_as_close_as_torch(first, computed(tensors, ("torch", "cuda"), activation, layout=layout), truth)
    for name, again in computed(tensors, ("triton", "cuda"), activation, layout=layout).items():
        assert torch.equal(first[name], again)


@gpu
@needs_card
def test_batch_sizes_share_one_compiled_kernel():
    vectors = [torch.ones(24, device="cuda") for _ in VECTORS]
    kernels = affine._forward_kernel, affine._backward_kernel
    counts = []
    for batch in (3, 1, 2, 16, 33, 257):
        x = torch.randn(batch, 24, 8, 8, device="cuda").to(memory_format=torch.channels_last).requires_grad_()
        affine_norm_act(x, *vectors, EPS, activation="silu", backend="triton").sum().backward()
        counts.append([variants(kernel) for kernel in kernels])
    assert all(count == counts[0] for count in counts)


@gpu
@needs_card
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_graph_replays_equal_eager_calls_without_waiting_for_the_device(backend):
    own = {name: tensor.cuda() for name, tensor in inputs((33, 24, 16, 16), HALF, residual=HALF).items()}
    own["dy"] = own["dy"].half()
    leaves = [own[name].requires_grad_() for name in ("x", "residual")]

    def step():
        y = affine_norm_act(
            own["x"], *(own[name] for name in VECTORS), EPS,
            activation="relu", residual=own["residual"], backend=backend,
        )  # fmt: skip
        return [y.detach(), *torch.autograd.grad(y, leaves, own["dy"])]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    # Other statistics than those captured with: they are read anew at each replay.
    own["running_mean"].add_(0.5)
    graph.replay()
    for one, other in zip(captured, step()):
        torch.testing.assert_close(one, other)
