"""Gradient moments and the fused update: each backend against FP64 truth, torch's optimizer and each other."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch
from places import (  # noqa: F401
    assert_passes_in_the_interpreter,
    gpu,
    needs_card,
    on_every_backend,
    once,
    poisoned_memory,
)

from triaccel_bench.kernels import moments as moments_module
from triaccel_bench.kernels import segments
from triaccel_bench.kernels.backend import require_backend, triton
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


def state_of(moments: GradientMoments) -> list[torch.Tensor]:
    return [moments.variance.clone(), moments.ema.clone(), moments.updates.clone()]


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


@on_every_backend
@pytest.mark.parametrize("mean", [0.0, 10.0])
def test_variance_is_as_close_to_the_truth_as_torch_is(place, mean):
    device = place[1]
    moments = new_moments(place)
    grads = gradients(0, device, mean=mean)
    moments.update(grads, scalar(1.0, device), scalar(1.0, device))
    for measured, grad in zip(moments.variance.tolist(), grads):
        truth = variance_truth(grad)
        torch_error = abs(grad.var(correction=0).item() - truth) if grad.numel() else 0.0
        rounding = 8 * torch.finfo(torch.float32).eps * truth
        assert abs(measured - truth) <= max(2 * torch_error, rounding)
    assert moments.nonfinite.tolist() == [0.0] and moments.updates.tolist() == [1]


@on_every_backend
def test_many_chunks_merge_into_the_variance_of_the_whole(place, monkeypatch):
    monkeypatch.setattr(segments, "CHUNK_ELEMENTS", 32)
    monkeypatch.setattr(moments_module, "CHUNKS_AT_ONCE", 8)
    shapes = [(1999,), (32,), (33,), (256,)]
    moments = new_moments(place, shapes, layers=4)
    grads = [torch.linspace(100.0, 101.0 + index, *shape).to(place[1]) for index, shape in enumerate(shapes)]
    moments.update(grads, scalar(1.0, place[1]), scalar(1.0, place[1]))
    truth = torch.tensor([variance_truth(grad) for grad in grads])
    # The mean is 350 standard deviations: E[x^2] - E[x]^2 would be off by half a percent.
    torch.testing.assert_close(moments.variance.cpu(), truth, rtol=5e-5, atol=0.0)
    grads[0][40] = math.nan
    moments.update(grads, scalar(1.0, place[1]), scalar(1.0, place[1]))
    assert moments.nonfinite.tolist() == [1.0]


@on_every_backend
def test_moving_average_starts_at_the_first_variance_and_follows_the_formula(place):
    device, beta = place[1], 0.8
    moments = new_moments(place, beta=beta)
    expected = None
    for step, factor in enumerate([1.0, 1.0, 2.0, 0.5]):
        grads = gradients(step, device)
        moments.update(grads, scalar(0.25, device), scalar(factor, device))
        measured = torch.tensor([variance_truth(grad) for grad in grads[:LAYERS]], dtype=torch.float64) * factor / 16
        expected = measured if expected is None else beta * expected + (1 - beta) * measured
        torch.testing.assert_close(moments.variance.double().cpu(), measured, rtol=1e-5, atol=0.0)
        torch.testing.assert_close(moments.ema.double().cpu(), expected, rtol=1e-5, atol=0.0)
    assert moments.updates.tolist() == [4]


@on_every_backend
@pytest.mark.parametrize(
    ("value", "where"),
    [(math.nan, (0, 0)), (math.inf, (5, 17)), (math.nan, (5, 4096)), (-math.inf, (6, 2)), (math.nan, (8, 6))],
    ids=["nan-only-element", "inf-first-chunk", "nan-last-chunk", "minus-inf-bias", "nan-last-tensor"],
)
def test_a_step_with_a_non_finite_element_changes_no_statistic(place, value, where):
    device = place[1]
    one = scalar(1.0, device)
    moments = new_moments(place)
    moments.update(gradients(0, device), one, one)
    before = state_of(moments)
    grads = gradients(1, device)
    grads[where[0]].view(-1)[where[1]] = value
    moments.update(grads, one, one)
    assert moments.nonfinite.tolist() == [1.0]
    assert bits_equal(state_of(moments), before)
    moments.update(gradients(2, device), one, one)
    assert moments.nonfinite.tolist() == [0.0] and moments.updates.tolist() == [2]
    assert not torch.equal(moments.ema, before[1])


@on_every_backend
def test_non_finite_first_steps_leave_the_statistics_unmeasured(place):
    device = place[1]
    one = scalar(1.0, device)
    moments = new_moments(place)
    for _ in range(2):
        moments.update([grad.fill_(math.nan) for grad in gradients(0, device)], one, one)
        assert moments.ema.isnan().all() and moments.variance.isnan().all() and moments.updates.tolist() == [0]
    moments.update(gradients(1, device), one, one)
    assert torch.equal(moments.ema, moments.variance) and moments.ema.isfinite().all()


@on_every_backend
def test_finite_gradients_beyond_the_range_of_a_variance_saturate(place):
    device = place[1]
    one = scalar(1.0, device)
    moments = new_moments(place, [(4,), (2,)], layers=2)
    largest = torch.finfo(torch.float32).max
    for _ in range(2):
        moments.update([torch.tensor([largest, -largest, 1.0, largest]).to(device), torch.ones(2).to(device)], one, one)
    assert moments.nonfinite.tolist() == [0.0]
    assert moments.variance.tolist() == [largest, 0.0] and moments.ema.tolist() == [largest, 0.0]


@on_every_backend
def test_statistics_do_not_depend_on_the_loss_scale(place):
    device = place[1]
    one = scalar(1.0, device)
    shapes = [(63,), (10, 100), (3,)]
    plain, scaled = new_moments(place, shapes, layers=2), new_moments(place, shapes, layers=2)
    for step in range(20):
        grads = gradients(step, device, shapes, mean=0.01)
        plain.update(grads, one, one)
        scaled.update([grad * 65536 for grad in grads], scalar(1 / 65536, device), one)
        if step == 10:
            scaled.update([grad * math.inf for grad in grads], scalar(1 / 65536, device), one)
    torch.testing.assert_close(scaled.ema, plain.ema, rtol=1e-3, atol=0.0)


@on_every_backend
def test_any_memory_layout_gives_the_same_moments(place):
    device = place[1]
    dense = torch.randn(6, 5, 4, 3, generator=torch.Generator().manual_seed(3)).to(device)
    layouts = [
        dense,
        dense.contiguous(memory_format=torch.channels_last),
        dense.permute(3, 1, 0, 2),
        torch.stack([dense, dense.neg()], dim=-1)[..., 0],
        torch.cat([torch.full_like(dense, math.nan), dense])[6:],
        dense[:1].expand(9, -1, -1, -1),
    ]
    moments = new_moments(place, [layout.shape for layout in layouts], layers=len(layouts))
    moments.update(layouts, scalar(1.0, device), scalar(1.0, device))
    truth = torch.tensor([variance_truth(layout) for layout in layouts])
    torch.testing.assert_close(moments.variance.cpu(), truth, rtol=2e-6, atol=0.0)
    assert moments.nonfinite.tolist() == [0.0]


@on_every_backend
def test_gradients_of_16_bits_are_measured_in_fp32(place):
    device = place[1]
    one = scalar(1.0, device)
    moments = new_moments(place)
    for shift in range(3):
        # A variance of a million is beyond FP16.
        grads = in_dtypes([grad * 1000 for grad in gradients(shift, device)], shift)
        moments.update(grads, one, one)
        truth = torch.tensor([variance_truth(grad) for grad in grads[:LAYERS]])
        torch.testing.assert_close(moments.variance.cpu(), truth, rtol=2e-6, atol=0.0)
    assert moments.nonfinite.tolist() == [0.0] and moments.updates.tolist() == [3]
    before = state_of(moments)
    for index, value in [(3, math.inf), (4, math.nan), (6, -math.inf), (7, math.nan), (8, math.inf)]:
        grads = in_dtypes(gradients(4, device), shift=0)
        if grads[index].numel():
            grads[index].view(-1)[-1] = value
            moments.update(grads, one, one)
            assert moments.nonfinite.tolist() == [1.0]
    assert bits_equal(state_of(moments), before)


@on_every_backend
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_at_any_address_and_layout_give_the_same_results(place, dtype):
    device = place[1]
    shapes = [(4099,), (6, 5, 4, 3), (6, 5, 4, 3), (1,)]
    plain = [grad.to(dtype) for grad in gradients(0, device, shapes)]
    moved = [off_by_one(grad) for grad in plain]
    moved[1] = moved[1].contiguous(memory_format=torch.channels_last)
    moved[2] = torch.stack([plain[2], plain[2]], dim=-1)[..., 1]
    one, flag = scalar(1.0, device), torch.zeros(1, device=device)
    results, variances = [], []
    for grads in (plain, moved):
        moments = new_moments(place, shapes, layers=4)
        moments.update(grads, one, one)
        variances.append(moments.variance)
        params = gradients(1, device, shapes)
        sgd = new_sgd(place, params, [-1] * 4)
        sgd.step([grad.clone() if grad.is_contiguous() else grad for grad in grads], one, one[None], one, flag)
        sgd.step(list(map(off_by_one, grads)), one, one[None], one, flag)
        results.append([*params, *sgd.momenta])
    torch.testing.assert_close(variances[1], variances[0], rtol=2e-6, atol=0.0)
    assert relative_difference(*results) < 1e-6


@on_every_backend
def test_without_statistics_only_the_flag_and_the_count_move(place):
    device = place[1]
    one = scalar(1.0, device)
    moments = new_moments(place, statistics=False)
    grads = gradients(0, device)
    moments.update(grads, one, one)
    assert moments.nonfinite.tolist() == [0.0] and moments.updates.tolist() == [1]
    grads[5][4096] = math.inf
    moments.update(grads, one, one)
    assert moments.nonfinite.tolist() == [1.0] and moments.updates.tolist() == [1]
    assert moments.ema.isnan().all() and moments.variance.isnan().all()


@on_every_backend
def test_wrong_gradients_are_refused_before_anything_is_read(place):
    device = place[1]
    one = scalar(1.0, device)
    moments = new_moments(place)
    grads = gradients(0, device)
    with pytest.raises(ValueError, match="expected 9 gradients, got 8; pass one"):
        moments.update(grads[:-1], one, one)
    for wrong, got in [(None, "None"), (grads[1].double(), "torch.float64"), (grads[1][:62], "with 62 elements")]:
        with pytest.raises(ValueError, match=f"gradient 1: expected torch.float32 with 63 elements.*got.*{got}"):
            moments.update([grads[0], wrong, *grads[2:]], one, one)
    with pytest.raises(ValueError, match="batch_factor: expected torch.float32 on .*, got torch.float64"):
        moments.update(grads, one, one.double())
    with pytest.raises(ValueError, match="at least one element"):
        new_moments(place, [(0,), (0, 3)], layers=1)
    with pytest.raises(ValueError, match="layers=3: expected 0 to 2"):
        new_moments(place, [(2,), (1,)], layers=3)


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


@on_every_backend
@pytest.mark.parametrize(("momentum", "steps"), [(0.9, 200), (0.0, 10)])
def test_updates_equal_torch_sgd_on_the_same_gradients(place, momentum, steps):
    device = place[1]
    shapes, layer_of = [(8, 4, 3, 3), (1000,), (63,), (1,)], [0, -1, 1, 2]
    params = gradients(100, device, shapes, mean=0.1)
    params[0] = params[0].contiguous(memory_format=torch.channels_last)
    theirs = [param.clone().requires_grad_() for param in params]
    exact = [param.double().requires_grad_() for param in params]
    options = {"lr": 0.05, "momentum": momentum, "weight_decay": 5e-4, "foreach": False}
    optimizers = [torch.optim.SGD(group, **options) for group in (theirs, exact)]
    sgd = new_sgd(place, params, layer_of, momentum)
    lr, rates, one = scalar(0.05, device), torch.ones(3, device=device), scalar(1.0, device)
    flag = torch.zeros(1, device=device)
    recorded = [gradients(seed, device, shapes, mean=0.0) for seed in range(10)]
    for step in range(steps):
        grads = recorded[step % 10]
        for group, optimizer in zip((theirs, exact), optimizers):
            for param, grad in zip(group, grads):
                param.grad = grad.to(param.dtype)
            optimizer.step()
        sgd.step([grad.clone() for grad in grads], lr, rates, one, flag)
    for ours, other in zip(params, theirs):
        assert relative_difference([ours], [other]) < 1e-6
    assert relative_difference(params, exact) <= 2 * relative_difference(theirs, exact) + 1e-7


@on_every_backend
def test_rates_weight_decay_and_loss_scale_follow_the_formula(place):
    device = place[1]
    shapes, params, layer_of = update_case(device)
    weights = [param.double().cpu() for param in params]
    buffers = [torch.zeros_like(weight) for weight in weights]
    sgd = new_sgd(place, params, layer_of, momentum=0.5, weight_decay=0.1)
    rates = torch.tensor([0.25, 0.5, 0.125], device=device)
    # The scalars are views at odd offsets, as when a caller keeps them in one tensor.
    shared = torch.tensor([0.0, 0.2, 1 / 1024], device=device)
    for step in range(3):
        grads = gradients(step, device, shapes)
        sgd.step([grad * 1024 for grad in grads], shared[1], rates, shared[2], torch.zeros(1, device=device))
        for weight, buffer, grad, layer in zip(weights, buffers, grads, layer_of):
            buffer.mul_(0.5).add_(grad.double().cpu() + 0.1 * weight)
            weight.sub_(0.2 * (1.0 if layer < 0 else rates[layer].item()) * buffer)
    assert relative_difference(params, weights) < 1e-6
    assert relative_difference(sgd.momenta, buffers) < 1e-6


@on_every_backend
def test_a_bad_step_leaves_weights_and_momenta_bit_for_bit(place):
    device = place[1]
    shapes, params, layer_of = update_case(device)
    sgd = new_sgd(place, params, layer_of)
    lr, rates, one = scalar(0.05, device), torch.ones(3, device=device), scalar(1.0, device)
    sgd.step(gradients(0, device, shapes), lr, rates, one, torch.zeros(1, device=device))
    before = [tensor.clone() for tensor in [*params, *sgd.momenta]]
    for value in (math.nan, math.inf):
        grads = [torch.full_like(grad, value) for grad in gradients(1, device, shapes)]
        sgd.step(grads, lr, rates, one, torch.ones(1, device=device))
    assert bits_equal([*params, *sgd.momenta], before)


def copies_of(params: list[torch.Tensor], shift: int = 0) -> list[torch.Tensor | None]:
    dtypes = [DTYPES[(index + shift) % 3] for index in range(len(params))]
    return [None if d == torch.float32 else torch.empty_like(p, dtype=d) for p, d in zip(params, dtypes)]


def in_step(copies: list[torch.Tensor | None], params: list[torch.Tensor]) -> bool:
    pairs = [(copy, param.to(copy.dtype)) for copy, param in zip(copies, params) if copy is not None]
    return bits_equal(*zip(*pairs))


@on_every_backend
def test_gradients_of_16_bits_update_as_their_values_in_fp32_do(place):
    device = place[1]
    shapes, params, layer_of = update_case(device)
    twins = [param.clone() for param in params]
    narrow, wide = new_sgd(place, params, layer_of), new_sgd(place, twins, layer_of)
    rest = [scalar(0.05, device), torch.full((3,), 0.5, device=device), scalar(1 / 1024, device)]
    flag = torch.zeros(1, device=device)
    for step in range(3):
        grads = in_dtypes([grad * 1024 for grad in gradients(step, device, shapes)], step)
        wide.step([grad.clone().float() for grad in grads], *rest, flag)
        narrow.step(grads, *rest, flag)
    assert bits_equal([*params, *narrow.momenta], [*twins, *wide.momenta])


@on_every_backend
def test_copies_follow_their_parameters_and_stay_through_a_bad_step(place):
    device = place[1]
    shapes, params, layer_of = update_case(device)
    first, second = copies_of(params), copies_of(params, shift=1)
    # As layers hold them: leaves of autograd, and one that begins anywhere.
    first[0] = first[0].requires_grad_()
    second[5] = off_by_one(second[5])
    sgd = new_sgd(place, params, layer_of, copies=first)
    assert in_step(first, params)
    rest = [scalar(0.05, device), torch.ones(3, device=device), scalar(1.0, device)]
    good, bad = torch.zeros(1, device=device), torch.ones(1, device=device)
    sgd.step(in_dtypes(gradients(0, device, shapes), 1), *rest, good)
    assert in_step(first, params)
    held = [copy.detach().clone() for copy in first if copy is not None]
    sgd.step([torch.full_like(grad, math.nan) for grad in in_dtypes(params)], *rest, bad)
    left = [copy.detach() for copy in first if copy is not None]
    assert bits_equal(left, held)
    sgd.set_copies(second)
    assert in_step(second, params)
    sgd.step(gradients(1, device, shapes), *rest, good)
    assert in_step(second, params) and bits_equal(left, held)
    before = [copy.clone() for copy in second if copy is not None]
    sgd.set_copies([None] * len(params))
    sgd.step(gradients(2, device, shapes), *rest, good)
    assert bits_equal([copy for copy in second if copy is not None], before)


CENTRE = (slice(None), slice(None), slice(1, 2), slice(0, 2))


@on_every_backend
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_copy_of_a_part_takes_that_parts_gradient_and_all_of_its_parameter_moves(place, dtype):
    device = place[1]
    shapes = [(5, 4, 3, 3), (7,)]
    params = gradients(0, device, shapes)
    params[0] = params[0].contiguous(memory_format=torch.channels_last)
    twins = [param.clone() for param in params]
    part = torch.full((5, 4, 1, 2), math.nan, dtype=dtype, device=device)
    made, plain = new_sgd(place, params, [0, -1]), new_sgd(place, twins, [0, -1])
    made.set_copies([part.requires_grad_(), None], [CENTRE, None])
    assert bits_equal([part.detach()], [params[0][CENTRE].to(dtype)])
    rest = [scalar(0.05, device), torch.full((1,), 0.5, device=device), scalar(1 / 64, device)]
    good, bad = torch.zeros(1, device=device), torch.ones(1, device=device)
    for step in range(3):
        gradient = [torch.randn(5, 4, 1, 2, generator=torch.Generator().manual_seed(step)).to(device, dtype)]
        gradient += gradients(step, device, shapes[1:])
        whole = [torch.zeros_like(params[0], dtype=dtype), gradient[1].clone()]
        whole[0][CENTRE] = gradient[0]
        plain.step(whole, *rest, good)
        made.step(gradient, *rest, good)
        assert bits_equal([*params, *made.momenta], [*twins, *plain.momenta])
        assert bits_equal([part.detach()], [params[0][CENTRE].to(dtype)])
    before = [tensor.clone() for tensor in (*params, part.detach())]
    made.step([torch.full_like(part.detach(), math.nan), torch.zeros_like(params[1])], *rest, bad)
    assert bits_equal([*params, part.detach()], before)
    # All of the gradient will do as well.
    made.step([torch.zeros_like(params[0]), torch.zeros_like(params[1])], *rest, good)
    assert bits_equal([part.detach()], [params[0][CENTRE].to(dtype)]) and not bits_equal([part.detach()], before[2:])
    made.set_copies([None, None])
    with pytest.raises(ValueError, match="gradient 0: expected torch.float32 with 180 elements"):
        made.step([torch.zeros_like(part.detach()), torch.zeros_like(params[1])], *rest, good)
    made.set_copies([part, None], [CENTRE, None])
    asked = r"copy 0: expected torch.float16 or .* shape \(5, 4, 1, 2\) with strides of any layout .*param\[window\].to"
    with pytest.raises(ValueError, match=asked):
        made.set_copies([params[0].to(dtype), None], [CENTRE, None])
    with pytest.raises(ValueError, match="copies and windows: expected 2, got 2 and 1"):
        made.set_copies([None, None], [None])
    # What is refused changes nothing.
    made.step([torch.zeros_like(part.detach()), torch.zeros_like(params[1])], *rest, good)


@on_every_backend
def test_copies_are_rounded_as_torch_rounds(place):
    device = place[1]
    generator = torch.Generator().manual_seed(5)
    noise = torch.randint(-(2**31), 2**31, (3000,), generator=generator).to(torch.int32)
    ties = [(noise[:1000] & -(2**16)) | 2**15, (noise[1000:2000] & -(2**13)) | 2**12]
    values = torch.cat([*ties, noise[2000:]]).view(torch.float32)
    half_ties = (torch.rand(1000, generator=generator) * 100).view(torch.int32) & -(2**13) | 2**12
    edges = torch.tensor([0.0, -0.0, 65519.0, 65520.0, -65536.0, 2.0**-25, 1.5 * 2.0**-25, 3.3961e38, 1e-45])
    values = torch.cat([values[values.isfinite()], half_ties.view(torch.float32), edges])
    params = [values.clone().to(device) for _ in range(2)]
    copies = [torch.empty_like(param, dtype=dtype) for param, dtype in zip(params, DTYPES)]
    sgd = new_sgd(place, params, [-1, -1], momentum=0.0, weight_decay=0.0, copies=copies)
    for copy in copies:
        copy.fill_(math.nan)
    zero, one = torch.zeros(1, device=device), scalar(1.0, device)
    sgd.step([torch.zeros_like(param) for param in params], one, zero, one, zero)
    assert bits_equal(params, [values.to(device)] * 2) and in_step(copies, params)
    params[1][0] = math.nan
    sgd.step([torch.zeros_like(param) for param in params], one, zero, one, zero)
    assert copies[1][0].isnan()


@on_every_backend
def test_gathered_gradients_serve_both_passes_and_are_uploaded_once(place, monkeypatch):
    device = place[1]
    shapes, params, layer_of = update_case(device)
    twins = [param.clone() for param in params]
    gathering, plain = new_sgd(place, params, layer_of), new_sgd(place, twins, layer_of)
    moments, expected = (new_moments(place, shapes, layers=3) for _ in range(2))
    rest = [scalar(0.05, device), torch.ones(3, device=device), scalar(1.0, device)]
    one = rest[-1]
    uploads = []
    upload = segments._uploaded
    for step in range(2):
        grads = in_dtypes(gradients(step, device, shapes), step)
        expected.update(grads, one, one)
        plain.step([grad.clone() for grad in grads], *rest, expected.nonfinite)
        with monkeypatch.context() as count:
            count.setattr(segments, "_uploaded", lambda *given: uploads.append(1) or upload(*given))
            gathered = gathering.gather(grads)
            moments.update(gathered, one, one)
            gathering.step(gathered, *rest, moments.nonfinite)
    assert len(uploads) == (2 if place[0] == "triton" else 0)
    torch.testing.assert_close(moments.ema, expected.ema, rtol=1e-6, atol=0.0)
    assert bits_equal([*params, *gathering.momenta], [*twins, *plain.momenta])
    with pytest.raises(ValueError, match="another's; call gather"):
        plain.step(gathered, *rest, moments.nonfinite)
    with pytest.raises(ValueError, match="gathered gradients: expected 9 tensors"):
        new_moments(place).update(gathered, one, one)


@on_every_backend
def test_gradients_may_lie_otherwise_than_their_parameters(place):
    device = place[1]
    shape = (6, 5, 4, 3)
    start = gradients(0, device, [shape])[0]
    grad = gradients(1, device, [shape])[0]
    channels_last = torch.channels_last
    lr, no_rates, one = scalar(0.5, device), torch.ones(0, device=device), scalar(1.0, device)
    flag = torch.zeros(1, device=device)
    results = []
    for param, given in [
        (start, grad),
        (start, grad.contiguous(memory_format=channels_last)),
        (start.contiguous(memory_format=channels_last), grad),
        (start, torch.stack([grad, grad], dim=-1)[..., 1]),
        (start[:, :, :1, :1], grad[:, :, :1, :1].contiguous(memory_format=channels_last)),
    ]:
        param = param.clone()
        if not segments.is_dense(param):
            param = param.contiguous()
        sgd = new_sgd(place, [param], [-1], weight_decay=0.0)
        sgd.step([given.clone()], lr, no_rates, one, flag)
        assert sgd.momenta[0].stride() == param.stride()
        results.append(param)
    for result in results:
        rows, columns = result.shape[2:]
        torch.testing.assert_close(result, (start - 0.5 * grad)[:, :, :rows, :columns], rtol=1e-6, atol=1e-6)


@on_every_backend
def test_wrong_arguments_of_the_update_are_refused(place):
    device = place[1]
    weight = torch.ones(4, 6, device=device)
    with pytest.raises(ValueError, match="expected an index or -1 for each of 1 parameters"):
        new_sgd(place, [weight], [0, 1])
    with pytest.raises(ValueError, match="parameter 0: expected dense torch.float32"):
        new_sgd(place, [weight[:, ::2]], [0])
    sgd = new_sgd(place, [weight], [1])
    arguments = [scalar(0.1, device), torch.ones(2, device=device), scalar(1.0, device), torch.zeros(1, device=device)]
    with pytest.raises(ValueError, match=r"gradient 0: expected shape \(4, 6\), got \(6, 4\)"):
        sgd.step([torch.ones(6, 4, device=device)], *arguments)
    with pytest.raises(ValueError, match="lr: expected torch.float32 on .*, got torch.float64"):
        sgd.step([weight.clone()], arguments[0].double(), *arguments[1:])
    with pytest.raises(ValueError, match="copies and windows: expected 1, got 2"):
        sgd.set_copies([None, None])
    half = weight.half()
    for wrong in (weight.clone(), half.double(), half[:2], half.t().contiguous().t(), half.to("meta")):
        with pytest.raises(
            ValueError, match=r"copy 0: expected torch.float16 or .* shape \(4, 6\) with strides \(6, 1\)"
        ):
            sgd.set_copies([wrong])
    arguments[1] = torch.ones(1, device=device)
    with pytest.raises(ValueError, match="rates: expected at least 2 elements, got 1"):
        sgd.step([weight.clone()], *arguments)


def test_a_dense_layout_is_told_from_one_with_gaps_or_overlap():
    tensor = torch.zeros(4, 3, 2, 5)
    dense = [tensor, tensor.permute(2, 0, 3, 1), tensor[:2], tensor[:1, :1, :1].mT, torch.zeros(0, 4)]
    loose = [tensor[:, :2], tensor[::2], tensor[:1].expand(2, -1, -1, -1), tensor[..., 1]]
    assert all(map(segments.is_dense, dense)) and not any(map(segments.is_dense, loose))


def test_a_captured_address_table_is_filled_by_flush_and_never_rewritten(monkeypatch):
    table = segments.AddressTable(2, torch.device("cpu"))
    pairs = [[torch.zeros(1), torch.zeros(1)] for _ in range(4)]
    addresses = [[tensor.data_ptr() for tensor in pair] for pair in pairs]
    eager = table.of(pairs[0])
    table.bind(pairs[3])
    with monkeypatch.context() as capture:
        capture.setattr(segments, "_capturing", lambda device: True)
        first = table.of(pairs[1])
        assert table.of(pairs[1]) is first and first.tolist() != addresses[1]
        assert table.of(pairs[3]).tolist() == addresses[3]
        with pytest.raises(RuntimeError, match="flush"):
            table.of(pairs[2])
    table.flush()
    with monkeypatch.context() as capture:
        capture.setattr(segments, "_capturing", lambda device: True)
        second = table.of(pairs[2])
    table.flush()
    assert table.of(pairs[3]) is eager
    assert [first.tolist(), second.tolist(), eager.tolist()] == [addresses[1], addresses[2], addresses[3]]


def test_a_captured_table_keeps_the_dtypes_of_its_capture(monkeypatch):
    table = segments.AddressTable(3, torch.device("cpu"))
    memory = torch.zeros(4)
    tables = {}
    for dtype in DTYPES:
        with monkeypatch.context() as capture:
            capture.setattr(segments, "_capturing", lambda device: True)
            tables[dtype] = table.of([memory, memory.view(dtype), memory])
        table.flush()
    table.of([memory] * 3)
    address = memory.data_ptr()
    for dtype, captured in tables.items():
        assert captured.tolist() == [address, address | segments.CODES[dtype] << segments.CODE_SHIFT, address]
    assert segments.entries([None, memory]) == (0, address)


@once
@pytest.mark.skipif(triton is None, reason="needs Triton")
def test_backends_that_cannot_run_are_refused_with_a_way_out():
    with pytest.raises(ValueError, match="backend='cuda': expected 'triton' or 'torch'"):
        require_backend("cuda", torch.device("cpu"))
    with pytest.raises(ValueError, match="expected tensors on cuda, got cpu; move them or pass backend='torch'"):
        GradientMoments([3], 1, "cpu", "triton", 0.9)


IMPORT_AND_USE = """
import torch
from triaccel_bench.kernels import backend, moments, segments, update
one = torch.tensor(1.0)
m = moments.GradientMoments([2], 1, "cpu", "torch", 0.9)
m.update([torch.tensor([1.0, 3.0])], one, one)
w = torch.ones(2)
update.FusedSGD([w], [-1], "torch", 0.9, 0.0).step([torch.ones(2)], one, torch.ones(0), one, m.nonfinite)
assert m.ema.tolist() == [1.0] and w.tolist() == [0.0, 0.0]
try:
    update.FusedSGD([w], [-1], "triton", 0.9, 0.0)
except ValueError as error:
    assert "pass backend='torch'" in str(error), error
else:
    raise AssertionError("the triton backend was accepted")
"""


def run_python(arguments: list[str], **environment: str) -> str:
    inherited = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *arguments], env=inherited | environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@once
def test_kernels_import_and_run_where_triton_is_absent():
    run_python(["-c", "import sys; sys.modules['triton'] = None\n" + IMPORT_AND_USE + "assert backend.triton is None"])


@once
def test_kernels_import_and_run_where_triton_is_broken(tmp_path):
    """A half-installed Triton raises what it likes; ``hardware`` then chooses torch, and its kernels must be there."""
    (tmp_path / "triton.py").write_text("raise OSError('libtriton.so: undefined symbol')")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n" + IMPORT_AND_USE + "assert backend.triton is None"
    run_python(["-c", code])


@once
@pytest.mark.skipif(triton is None, reason="needs Triton")
def test_kernels_import_and_run_where_triton_finds_no_gpu():
    run_python(["-c", IMPORT_AND_USE + "assert backend.triton is not None"], CUDA_VISIBLE_DEVICES="")


@once
@pytest.mark.skipif(triton is None, reason="needs Triton")
def test_triton_kernels_pass_this_file_in_the_interpreter():
    assert_passes_in_the_interpreter(__file__)


def card_case(backend: str):
    """A step on the card: gradients are computed (2 x input x weight), measured and applied."""
    shapes = [(512, 256, 3, 3), (64, 32, 1, 1), (1000,), (63,), (1,)]
    params = gradients(7, "cuda", shapes)
    moments = GradientMoments([param.numel() for param in params], 2, "cuda", backend, 0.9)
    sgd = FusedSGD(params, [0, 1, -1, -1, -1], backend, 0.9, 5e-4)
    factor, scale = scalar(1.0, "cuda"), scalar(1 / 1024, "cuda")
    lr, rates = scalar(0.01, "cuda"), torch.tensor([1.0, 0.5], device="cuda")

    def step(inputs: torch.Tensor) -> None:
        grads = [inputs * param for param in params]
        moments.update(grads, scale, factor)
        sgd.step(grads, lr, rates, scale, moments.nonfinite)

    return params, moments, sgd, step


INPUTS = [1024.0, 2048.0, math.inf, 512.0, math.nan, 1024.0]


@gpu
@needs_card
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_graph_replays_equal_eager_steps(backend):
    params, moments, sgd, step = card_case(backend)
    fixed = scalar(math.inf, "cuda")
    graphs = []
    for _ in range(2):
        # The warm-up compiles what a capture cannot; its inf leaves the state as it was.
        step(fixed)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step(fixed)
        moments.flush()
        sgd.flush()
        graphs.append(graph)
    for index, value in enumerate(INPUTS):
        fixed.fill_(value)
        graphs[index % 2].replay()
    expected_params, expected, expected_sgd, eager_step = card_case("torch")
    for value in INPUTS:
        eager_step(scalar(value, "cuda"))
    assert moments.updates.tolist() == expected.updates.tolist() == [4]
    assert moments.nonfinite.tolist() == [0.0]
    torch.testing.assert_close(moments.ema, expected.ema, rtol=1e-5, atol=0.0)
    assert relative_difference(params, expected_params) < 1e-6
    assert relative_difference(sgd.momenta, expected_sgd.momenta) < 1e-6


@gpu
@needs_card
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_graph_keeps_the_copies_and_dtypes_of_its_capture(backend):
    params = gradients(7, "cuda", [(64, 32, 3, 3), (1000,), (63,)])
    sizes = [param.numel() for param in params]
    moments = GradientMoments(sizes, 3, "cuda", backend, 0.9)
    copies = [copies_of(params), copies_of(params, shift=1)]
    sgd = FusedSGD(params, [0, -1, -1], backend, 0.9, 5e-4, copies[0])
    rest = [scalar(0.05, "cuda"), torch.ones(1, device="cuda"), scalar(1.0, "cuda")]
    factor = scalar(math.nan, "cuda")

    def step(shift: int) -> None:
        gathered = sgd.gather([grad * factor.to(grad.dtype) for grad in in_dtypes(params, shift)])
        moments.update(gathered, rest[-1], rest[-1])
        sgd.step(gathered, *rest, moments.nonfinite)

    graphs = []
    for shift in range(2):
        sgd.set_copies(copies[shift])
        step(shift)
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            step(shift)
        sgd.flush()
    twins = [param.clone() for param in params]
    reference = FusedSGD(twins, [0, -1, -1], "torch", 0.9, 5e-4)
    factor.fill_(0.5)
    for shift in (0, 1, 0):
        others = [copy.clone() for copy in copies[1 - shift] if copy is not None]
        graphs[shift].replay()
        assert in_step(copies[shift], params)
        assert bits_equal([copy for copy in copies[1 - shift] if copy is not None], others)
        grads = [grad * 0.5 for grad in in_dtypes(twins, shift)]
        truth = [variance_truth(grad) for grad in grads]
        torch.testing.assert_close(moments.variance.cpu(), torch.tensor(truth), rtol=1e-5, atol=0.0)
        reference.step(grads, *rest, moments.nonfinite)
        torch._foreach_copy_(twins, params)
    assert relative_difference(sgd.momenta, reference.momenta) < 1e-6
    graphs[1].replay()
    assert in_step(copies[1], params) and moments.updates.tolist() == [4]


@gpu
@needs_card
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_steps_never_wait_for_the_device(backend):
    params, moments, sgd, step = card_case(backend)
    inputs = [scalar(value, "cuda") for value in INPUTS]
    before = [param.clone() for param in params]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for value in inputs:
            step(value)
        moments.flush()
        sgd.set_copies(copies_of(params))
        sgd.step(
            in_dtypes([param * 1 for param in params]),
            inputs[0],
            torch.ones(2, device="cuda"),
            inputs[0],
            moments.nonfinite,
        )
        sgd.flush()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert moments.updates.tolist() == [4] and not torch.equal(params[0], before[0])


@gpu
@needs_card
def test_triton_moments_are_the_same_from_launch_to_launch():
    grads = gradients(9, "cuda", [(512, 512, 3, 3), (1000, 512), (63,)])
    one = scalar(1.0, "cuda")
    seen = set()
    for _ in range(20):
        moments = GradientMoments([grad.numel() for grad in grads], 2, "cuda", "triton", 0.9)
        moments.update(grads, one, one)
        seen.add(tuple(moments.ema.tolist()))
    assert len(seen) == 1
    torch.testing.assert_close(
        torch.tensor(seen.pop()), torch.tensor([variance_truth(grad) for grad in grads[:2]]), rtol=2e-6, atol=0.0
    )
