"""Gradient moments: each backend against FP64 truth."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_cases import (
    DTYPES,
    LAYERS,
    bits_equal,
    gradients,
    in_dtypes,
    new_moments,
    new_sgd,
    off_by_one,
    relative_difference,
    scalar,
    variance_truth,
)
from places import assert_passes_in_the_interpreter, gpu, needs_card, on_every_backend, once, poisoned_memory  # noqa: F401

from triaccel_bench.kernels import moments as moments_module
from triaccel_bench.kernels import segments
from triaccel_bench.kernels.backend import triton
from triaccel_bench.kernels.moments import GradientMoments


def state_of(moments: GradientMoments) -> list[torch.Tensor]:
    return [moments.variance.clone(), moments.ema.clone(), moments.updates.clone()]


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


@once
@pytest.mark.skipif(triton is None, reason="needs Triton")
def test_triton_kernels_pass_this_file_in_the_interpreter():
    assert_passes_in_the_interpreter(__file__)
