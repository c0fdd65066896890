"""Taps that only meet padding are left out, and what remains is the same convolution."""

import itertools

import pytest
import torch
from torch.nn import functional

from triaccel_bench.convolution import Taps, WeightGradients, _Forked, conv2d, live_taps
from triaccel_bench.graphs import Graph

CASES = [
    # size, kernel, stride, padding, dilation
    (1, 3, 1, 1, 1), (2, 3, 2, 1, 1), (2, 3, 1, 1, 1), (1, 5, 1, 2, 1), (2, 5, 2, 2, 1), (3, 3, 1, 0, 1), (4, 1, 1, 0, 1),
    (4, 1, 2, 0, 1), (1, 1, 1, 0, 1), (5, 3, 2, 1, 1), (2, 3, 1, 2, 2), (1, 3, 1, 2, 2), (7, 7, 2, 3, 1), (1, 7, 2, 3, 1),
]  # fmt: skip


def operands(size: int, kernel: int, groups: int = 1, channels_last: bool = True):
    generator = torch.Generator().manual_seed(0)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    x = torch.randn(3, 4, size, size, generator=generator, dtype=torch.float64).contiguous(memory_format=layout)
    weight = torch.randn(6 if groups == 1 else 4, 4 // groups, kernel, kernel, generator=generator, dtype=torch.float64)
    bias = torch.randn(weight.shape[0], generator=generator, dtype=torch.float64)
    return x.requires_grad_(), weight.contiguous(memory_format=layout).requires_grad_(), bias.requires_grad_()


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("size, kernel, stride, padding, dilation", CASES)
def test_values_and_gradients_are_the_convolutions(size, kernel, stride, padding, dilation, channels_last, groups):
    found, expected = [], []
    for convolve, results in ((conv2d, found), (functional.conv2d, expected)):
        x, weight, bias = operands(size, kernel, groups, channels_last)
        y = convolve(x, weight, bias, (stride,) * 2, (padding,) * 2, (dilation,) * 2, groups)
        y.square().sum().backward()
        results += [y.detach(), x.grad, weight.grad, bias.grad]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert found[2].stride() == operands(size, kernel, groups, channels_last)[1].stride()


def test_second_derivatives_pass_through_left_out_taps():
    x, weight, bias = operands(1, 3)
    assert torch.autograd.gradgradcheck(lambda x, w, b: conv2d(x, w, b, (1, 1), (1, 1), (1, 1), 1), (x, weight, bias))


@pytest.mark.parametrize("size, kernel, stride, padding, dilation", CASES)
def test_every_tap_left_out_is_dead_and_the_ends_are_live(size, kernel, stride, padding, dilation):
    taps = live_taps(size, kernel, stride, padding, dilation)
    outputs = (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    meets = {
        tap
        for tap, output in itertools.product(range(kernel), range(outputs))
        if 0 <= output * stride - padding + tap * dilation < size
    }
    assert meets <= set(range(taps.first, taps.last))
    if taps != Taps(0, kernel, padding):
        assert {taps.first, taps.last - 1} <= meets


def test_a_three_by_three_kernel_on_one_pixel_is_its_centre():
    assert live_taps(1, 3, 1, 1, 1) == Taps(1, 2, 0)
    assert live_taps(2, 3, 2, 1, 1) == Taps(1, 3, 0)
    assert live_taps(8, 3, 1, 1, 1) == Taps(0, 3, 1)


def test_image_channels_filled_up_change_nothing():
    generator = torch.Generator().manual_seed(0)
    results = []
    for convolve in (conv2d, functional.conv2d):
        x = torch.randn(2, 3, 9, 9, generator=generator.manual_seed(0)).bfloat16()
        weight = torch.randn(5, 3, 3, 3, generator=generator).bfloat16().requires_grad_()
        y = convolve(x.contiguous(memory_format=torch.channels_last), weight, None, (2, 2), (1, 1), (1, 1), 1)
        y.float().square().sum().backward()
        results.append((y.detach(), weight.grad))
    for ours, theirs in zip(*results, strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("stride", [(2, 2), (2, 1)])
def test_a_strided_point_convolution_in_16_bit_is_the_convolution(stride):
    results = []
    for options in ({"differentiable_once": True}, {}):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(3, 8, 5, 4, generator=generator).bfloat16().contiguous(memory_format=torch.channels_last)
        weight = torch.randn(6, 8, 1, 1, generator=generator).bfloat16()
        x.requires_grad_(), weight.requires_grad_()
        y = conv2d(x, weight, None, stride, (0, 0), (1, 1), 1, **options)
        assert ("SparsePoints" in type(y.grad_fn).__name__) == bool(options)
        y.float().square().sum().backward()
        results.append((y.detach(), x.grad, weight.grad))
    for ours, theirs in zip(*results, strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=5e-2)


def test_a_forked_convolution_is_the_convolution():
    results = []
    for convolve in (_Forked.apply, lambda x, weight, *shape: functional.conv2d(x, weight, None, *shape)):
        x, weight, _ = operands(5, 3)
        y = convolve(x, weight, (2, 2), (1, 1), (1, 1))
        y.square().sum().backward()
        results.append((y.detach(), x.grad, weight.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_weight_gradients_run_apart_only_where_they_are_captured():
    assert not WeightGradients.apart()
    with WeightGradients():
        assert not WeightGradients.apart()  # nothing is being captured
        x, weight, _ = operands(5, 3)
        y = conv2d(x, weight, None, (1, 1), (1, 1), (1, 1), 1, differentiable_once=True)
        assert "Forked" not in type(y.grad_fn).__name__
    assert WeightGradients._active is None


def test_an_error_in_a_pass_is_not_covered_up():
    with pytest.raises(torch.OutOfMemoryError, match="its own"), WeightGradients() as _:
        WeightGradients._active._formed.append((torch.zeros(1, requires_grad=True), torch.ones(1)))
        raise torch.OutOfMemoryError("its own")
    assert WeightGradients._active is None


def test_a_weight_that_others_read_too_gets_the_sum_of_all_gradients():
    weight, fresh = torch.zeros(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    weight.grad = torch.ones(2)
    with WeightGradients():
        outer = WeightGradients._active
        with WeightGradients():
            assert WeightGradients._active is not outer
        assert WeightGradients._active is outer
        outer._formed += [(weight, torch.full((2,), 2.0)), (fresh, torch.full((2,), 4.0))]
    assert weight.grad.tolist() == [3.0, 3.0] and fresh.grad.tolist() == [4.0, 4.0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("channels_last", [True, False])
def test_captured_weight_gradients_beside_the_rest_are_the_same(channels_last, monkeypatch):
    layout = torch.channels_last if channels_last else torch.contiguous_format
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(16, 16, 3, 3, generator=generator).mul(0.1) for _ in range(6)]
    x = torch.randn(8, 16, 9, 9, generator=generator).cuda().contiguous(memory_format=layout)
    found = []
    for apart in (True, False):
        if apart:
            # Late: who does not wait for them, or hands their operands' memory on too early, shows.
            add = WeightGradients.add

            def late(self, form, *rest, add=add):
                def after_a_while():
                    torch.cuda._sleep(200_000)
                    return form()

                add(self, after_a_while, *rest)

            monkeypatch.setattr(WeightGradients, "add", late)
        else:
            monkeypatch.setattr(WeightGradients, "apart", classmethod(lambda cls: False))
        leaves = [weight.cuda().contiguous(memory_format=layout).requires_grad_() for weight in weights]
        formed = []

        def step(leaves=leaves, formed=formed):
            for leaf in leaves:
                leaf.grad = None
            with WeightGradients():
                y = x.clone().requires_grad_()
                for leaf in leaves:
                    y = conv2d(y, leaf, None, (1, 1), (1, 1), (1, 1), 1, differentiable_once=True).relu()
                # A second reader of a leaf, whose gradient autograd adds.
                (y.square().sum() + leaves[0].square().sum()).backward()
                formed.append(len(WeightGradients._active._formed))
            return [leaf.grad for leaf in leaves]

        graph = Graph(step)
        for _ in range(20):
            results = [gradient.clone() for gradient in graph.replay()]
        assert formed == [0, 6 if apart else 0]  # the warm-up is no capture
        found.append(results)
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))
