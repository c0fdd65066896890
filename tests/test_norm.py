"""Batch normalisation with scale, residual and activation: each backend against FP64 truth and torch's own error."""

from __future__ import annotations

import pytest
import torch
from places import assert_passes_in_the_interpreter, gpu, needs_card, on_every_backend, once
from torch.nn import functional

from triaccel_bench.kernels import norm
from triaccel_bench.kernels.backend import triton
from triaccel_bench.kernels.norm import batch_norm_act, batch_norm_act_reference

HALF, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
MOMENTUM, EPS = 0.1, 1e-5
CASES = [
    dict(activation="none", dtype=HALF),
    dict(activation="relu", dtype=FP32, scaled=True),
    dict(activation="relu", dtype=HALF, residual=FP32, scaled=True),
    dict(activation="relu", dtype=FP32, residual=HALF, out_dtype=BF16),
    dict(activation="silu", dtype=HALF, out_dtype=FP32),
    dict(activation="silu", dtype=BF16, scaled=True),
    dict(activation="none", dtype=HALF, residual=BF16, scaled=True),
]
SHAPES = [(2, 1, 1, 1), (7, 33, 1, 1), (3, 7, 5, 7), (9, 24, 2, 4)]
NAMES = ("y", "dx", "dweight", "dbias", "running_mean", "running_var", "dresidual")


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Deterministic mode fills new uninitialised tensors with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["one-launch", "two-launches"])
def launches(request, monkeypatch):
    """Tiny tensors through both paths, the second with many chunks of several tiles."""
    if request.param == "two-launches":
        monkeypatch.setattr(norm, "ONE_LAUNCH_AREA", 0)
        monkeypatch.setattr(norm, "MAX_CHUNKS", 4)
        monkeypatch.setattr(norm, "MULTIPROCESSORS", 2)
        monkeypatch.setattr(norm, "WIDE_TILE", 64)
        monkeypatch.setattr(norm, "NARROW_TILE", 64)


def inputs(shape, dtype=HALF, residual=None, scaled=False, mean=3.0, seed=0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    channels = shape[1]
    tensors = dict(
        x=(torch.randn(shape, generator=draw) * 2 + mean).to(dtype),
        weight=torch.rand(channels, generator=draw) + 0.5,
        bias=torch.randn(channels, generator=draw),
        running_mean=torch.randn(channels, generator=draw),
        running_var=torch.rand(channels, generator=draw) + 0.5,
        dy=torch.randn(shape, generator=draw),
    )
    if residual is not None:
        tensors["residual"] = torch.randn(shape, generator=draw).to(residual)
    if scaled:
        tensors["sample_scale"] = torch.where(torch.rand(shape[0], generator=draw) < 0.3, 0.0, 1.25)
        tensors["sample_scale"][0] = 1.25
    return tensors


def computed(tensors, place, activation, out_dtype=None, dtype=None, layout=torch.channels_last) -> list[torch.Tensor]:
    """y, the gradients and the running statistics; ``dtype`` computes all of it in that dtype."""
    backend, device = place
    own = {name: tensor.to(device, dtype, copy=True) for name, tensor in tensors.items()}
    for name in ("x", "weight", "bias", "residual"):
        if name in own:
            own[name] = own[name].contiguous(memory_format=layout) if own[name].dim() == 4 else own[name]
            own[name].requires_grad_()
    y = batch_norm_act(
        own["x"], own["weight"], own["bias"], own["running_mean"], own["running_var"], MOMENTUM, EPS,
        activation=activation, residual=own.get("residual"), sample_scale=own.get("sample_scale"),
        out_dtype=dtype or out_dtype, backend=backend,
    )  # fmt: skip
    assert y.dtype == (dtype or out_dtype or own["x"].dtype) and y.stride() == own["x"].stride()
    # What comes from above has y's dtype, for the truth as well.
    y.backward(tensors["dy"].to(out_dtype or tensors["x"].dtype).to(device, y.dtype))
    grads = [own["x"].grad, own["weight"].grad, own["bias"].grad]
    last = [own["residual"].grad] if "residual" in own else []
    for tensor, of in zip([*grads, *last], [own["x"], own["weight"], own["bias"], own.get("residual")]):
        assert tensor.dtype == of.dtype
    return [tensor.detach() for tensor in [y, *grads, own["running_mean"], own["running_var"], *last]]


def assert_as_close_as_torch(measured, torch_result, truth):
    for name, ours, theirs, true in zip(NAMES, measured, torch_result, truth):
        true = true.cpu()
        error, torch_error = ((result.double().cpu() - true).abs().max().item() for result in (ours, theirs))
        rounding = 2 * torch.finfo(ours.dtype).eps * true.abs().max().clamp(min=1.0).item()
        assert error <= 2 * torch_error + rounding, (name, error, torch_error, rounding)


@on_every_backend
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format], ids=["channels-last", "contiguous"])
@pytest.mark.parametrize("index", range(len(CASES)))
def test_results_and_gradients_are_as_close_to_the_truth_as_torch_is(place, launches, layout, index):
    case = dict(CASES[index])
    activation, out_dtype = case.pop("activation"), case.pop("out_dtype", None)
    tensors = inputs(SHAPES[index % len(SHAPES)], **case)
    measured = computed(tensors, place, activation, out_dtype, layout=layout)
    torch_result = computed(tensors, ("torch", "cpu"), activation, out_dtype, layout=layout)
    truth = computed(tensors, ("torch", "cpu"), activation, out_dtype, torch.float64, layout)
    assert_as_close_as_torch(measured, torch_result, truth)


@on_every_backend
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_in_both_paths(place, launches, shape):
    tensors = inputs(shape, FP32, residual=FP32, seed=1)
    truth = computed(tensors, ("torch", "cpu"), "relu", dtype=torch.float64)
    assert_as_close_as_torch(computed(tensors, place, "relu"), computed(tensors, ("torch", "cpu"), "relu"), truth)


@on_every_backend
def test_variance_survives_a_mean_of_a_thousand_deviations(place, launches):
    tensors = inputs((9, 5, 3, 3), FP32, mean=2000.0)
    measured = computed(tensors, place, "none")
    truth = computed(tensors, ("torch", "cpu"), "none", dtype=torch.float64)
    torch.testing.assert_close(measured[5].double().cpu(), truth[5], rtol=1e-5, atol=0.0)
    torch.testing.assert_close(measured[0].double().cpu(), truth[0], rtol=0.0, atol=5e-4)


@on_every_backend
def test_nan_and_inf_reach_the_output_and_the_gradients(place, launches):
    tensors = inputs((4, 3, 2, 2), FP32)
    tensors["x"][1, 0, 0, 0], tensors["x"][2, 2, 1, 1] = float("nan"), float("inf")
    y, dx, dweight, *_ = computed(tensors, place, "relu")
    assert y[:, [0, 2]].isnan().all() and y[:, 1].isfinite().all()
    assert dx[:, [0, 2]].isnan().all() and dx[:, 1].isfinite().all() and dweight.isnan().tolist() == [True, False, True]


@on_every_backend
def test_other_strides_are_copied_and_results_do_not_change(place):
    tensors = inputs((3, 8, 4, 6), FP32, residual=FP32)
    expected = computed(tensors, place, "relu")
    own = {name: tensor.to(place[1]) for name, tensor in tensors.items()}
    wide = torch.cat([own["x"], own["x"]], dim=3)[..., :6].requires_grad_()
    residual = own["residual"].transpose(2, 3).contiguous().transpose(2, 3)
    y = batch_norm_act(
        wide, own["weight"], own["bias"], own["running_mean"], own["running_var"], MOMENTUM, EPS,
        activation="relu", residual=residual, backend=place[0],
    )  # fmt: skip
    # A gradient without strides of its own, as a sum sends it.
    (dx,) = torch.autograd.grad(y.sum(), wide, retain_graph=True)
    assert dx.isfinite().all()
    (dx,) = torch.autograd.grad(y, wide, own["dy"])
    torch.testing.assert_close(y, expected[0])
    torch.testing.assert_close(dx, expected[1], rtol=1e-4, atol=1e-5)


@on_every_backend
@pytest.mark.parametrize("used", ["both", "first", "second"])
@pytest.mark.parametrize("activation", ["relu", "none"])
def test_gradients_of_two_branches_add_up(place, activation, used, launches):
    """As much as one reader that weighs the result by the sum of what both weigh it by."""
    backend, device = place
    generator = torch.Generator().manual_seed(0)
    x, residual, left, right = (torch.randn(4, 6, 5, 3, generator=generator).to(device) for _ in range(4))
    weighed = {"both": left + right, "first": left, "second": right}[used]
    gradients = []
    for branches in (1, 2):
        inputs = [x.clone().requires_grad_(), residual.clone().requires_grad_()]
        weight, bias = torch.ones(6, device=device, requires_grad=True), torch.zeros(6, device=device)
        y = batch_norm_act(
            inputs[0], weight, bias, torch.zeros(6, device=device), torch.ones(6, device=device), MOMENTUM, EPS,
            activation=activation, residual=inputs[1], branches=branches, backend=backend,
        )  # fmt: skip
        if branches == 1:
            total = (y * weighed).sum()
        else:
            assert y[0].data_ptr() == y[1].data_ptr()
            total = sum(
                (each * by).sum()
                for each, by, name in zip(y, (left, right), ("first", "second"))
                if used in ("both", name)
            )
        total.backward()
        gradients.append([inputs[0].grad, inputs[1].grad, weight.grad])
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)


@once
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_on_the_cpu_torch_gives_exactly_batch_norm_and_relu(layout):
    tensors = inputs((5, 6, 3, 3), FP32)
    y, dx, *_, mean, var = computed(tensors, ("torch", "cpu"), "relu", layout=layout)
    x = tensors["x"].contiguous(memory_format=layout).requires_grad_()
    running = tensors["running_mean"].clone(), tensors["running_var"].clone()
    plain = functional.relu(functional.batch_norm(x, *running, tensors["weight"], tensors["bias"], True, MOMENTUM, EPS))
    plain.backward(tensors["dy"])
    assert torch.equal(y, plain) and torch.equal(dx, x.grad)
    assert torch.equal(mean, running[0]) and torch.equal(var, running[1])


@once
@pytest.mark.parametrize(("activation", "residual"), [("relu", True), ("silu", False), ("none", True)])
def test_the_reference_can_be_differentiated_twice(activation, residual):
    tensors = inputs((3, 2, 2, 2), torch.float64, residual=torch.float64 if residual else None)
    names = ["x", "weight", "bias"] + ["residual"] * residual
    leaves = [tensors[name].double().requires_grad_() for name in names]

    def function(x, weight, bias, added=None):
        # The running statistics would change between the evaluations of a finite difference.
        mean, var = tensors["running_mean"].double(), tensors["running_var"].double()
        return batch_norm_act_reference(x, weight, bias, mean, var, 0.1, EPS, activation=activation, residual=added)

    assert torch.autograd.gradcheck(function, leaves) and torch.autograd.gradgradcheck(function, leaves)


@on_every_backend
def test_double_precision_takes_the_reference(place):
    tensors = inputs((3, 4, 2, 2), torch.float64)
    truth = computed(tensors, ("torch", place[1]), "relu", dtype=torch.float64)
    for ours, true in zip(computed(tensors, place, "relu", dtype=torch.float64), truth):
        assert torch.equal(ours, true)


@on_every_backend
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(x=torch.zeros(1, 3, 1, 1)), "Expected more than 1 value per channel"),
        (dict(x=torch.zeros(4, 3)), "x: expected"),
        (dict(activation="gelu"), "activation='gelu'"),
        (dict(activation="silu", residual=torch.zeros(2, 3, 2, 2)), "residual: expected None"),
        (dict(residual=torch.zeros(2, 3, 2, 1)), "residual: expected shape"),
        (dict(sample_scale=torch.zeros(3)), "sample_scale: expected shape"),
        (dict(bias=torch.zeros(4)), "bias: expected shape"),
        (dict(backend="numpy"), "backend='numpy'"),
    ],
)
def test_what_does_not_fit_is_refused(place, changes, message):
    vectors = {name: torch.ones(3) for name in ("weight", "bias", "running_mean", "running_var")}
    arguments = dict(x=torch.zeros(2, 3, 2, 2), momentum=MOMENTUM, eps=EPS, backend=place[0]) | vectors | changes
    arguments = {name: value.to(place[1]) if torch.is_tensor(value) else value for name, value in arguments.items()}
    with pytest.raises(ValueError, match=message):
        batch_norm_act(**arguments)


@once
@pytest.mark.skipif(triton is None, reason="needs Triton")
@pytest.mark.parametrize("samples", [2, 96, 768, 5000])
@pytest.mark.parametrize("channels", [1, 24, 64, 144, 1152])
@pytest.mark.parametrize(("side", "channels_last"), [(32, True), (4, True), (1, True), (7, False), (1, False)])
def test_chunks_cover_all_rows_and_none_is_empty(samples, channels, side, channels_last):
    plan = norm._Plan(torch.empty(samples, channels, side, side, device="meta"), channels_last)
    rows, chunk_rows = samples * side * side, plan.tiles * plan.fixed["BLOCK_R"]
    assert (plan.chunks - 1) * chunk_rows < rows <= plan.chunks * chunk_rows
    assert plan.chunks <= norm.MAX_CHUNKS and plan.grid[0] * plan.fixed["BLOCK_C"] >= channels


@once
@pytest.mark.skipif(triton is None, reason="needs Triton")
def test_triton_kernels_pass_this_file_in_the_interpreter():
    assert_passes_in_the_interpreter(__file__)


CARD_SHAPES = [(96, 64, 16, 16), (96, 144, 8, 8), (96, 256, 2, 2), (96, 512, 1, 1), (33, 24, 16, 16), (768, 64, 8, 8)]


@gpu
@needs_card
@pytest.mark.parametrize("shape", CARD_SHAPES)
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format], ids=["channels-last", "contiguous"])
def test_real_sizes_agree_with_the_truth_and_are_the_same_from_launch_to_launch(shape, layout):
    tensors = inputs(shape, HALF, residual=HALF, scaled=True)
    first = computed(tensors, ("triton", "cuda"), "relu", layout=layout)
    truth = computed(tensors, ("torch", "cuda"), "relu", None, torch.float64, layout)
    assert_as_close_as_torch(first, computed(tensors, ("torch", "cuda"), "relu", layout=layout), truth)
    for _ in range(5):
        for one, again in zip(first, computed(tensors, ("triton", "cuda"), "relu", layout=layout)):
            assert torch.equal(one, again)


@gpu
@needs_card
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_graph_replays_equal_eager_steps_without_waiting_for_the_device(backend):
    own = {name: tensor.cuda() for name, tensor in inputs((33, 24, 16, 16), HALF, residual=HALF).items()}
    own["dy"] = own["dy"].half()
    start = [own[name].clone() for name in ("running_mean", "running_var")]
    leaves = [own[name].requires_grad_() for name in ("x", "weight", "bias", "residual")]

    def step():
        y = batch_norm_act(
            own["x"], own["weight"], own["bias"], own["running_mean"], own["running_var"], MOMENTUM, EPS,
            activation="relu", residual=own["residual"], backend=backend,
        )  # fmt: skip
        return [y.detach(), *torch.autograd.grad(y, leaves, own["dy"])]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            expected = step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for name, value in zip(("running_mean", "running_var"), start):
        own[name].copy_(value)
    graph.replay()
    graph.replay()
    for one, other in zip(captured, expected):
        torch.testing.assert_close(one, other)
    blend = (1 - MOMENTUM) ** 2
    mean = own["x"].detach().float().mean((0, 2, 3))
    torch.testing.assert_close(own["running_mean"], blend * start[0] + (1 - blend) * mean, rtol=1e-4, atol=1e-5)
