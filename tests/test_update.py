"""The fused update: each backend against torch's optimizer, and copies in step with their parameters."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_cases import (
    DTYPES,
    bits_equal,
    copies_of,
    gradients,
    in_dtypes,
    in_step,
    new_moments,
    new_sgd,
    off_by_one,
    relative_difference,
    scalar,
    update_case,
)
from places import assert_passes_in_the_interpreter, on_every_backend, once, poisoned_memory  # noqa: F401

from triaccel_bench.kernels import segments
from triaccel_bench.kernels.backend import triton


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


@once
@pytest.mark.skipif(triton is None, reason="needs Triton")
def test_triton_kernels_pass_this_file_in_the_interpreter():
    assert_passes_in_the_interpreter(__file__)
