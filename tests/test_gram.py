"""Gram matrices of per-sample gradients: truth from torch.func in float64, choices and memory by name."""

from __future__ import annotations

import copy

import pytest
import torch
import torchvision
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from triaccel_bench import gram as module
from triaccel_bench.gram import gram, plan
from triaccel_bench.graphs import Graph
from triaccel_bench.probe import leading

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CASES = {
    "plain": (lambda: nn.Conv2d(4, 6, 3, padding=1, bias=False), (5, 4, 6, 5)),
    "bias": (lambda: nn.Conv2d(4, 6, 3), (5, 4, 6, 5)),
    "strided": (lambda: nn.Conv2d(3, 6, (3, 5), stride=(2, 3), padding=(1, 2)), (5, 3, 7, 9)),
    "stem": (lambda: nn.Conv2d(3, 4, 7, stride=2, padding=3, bias=False), (3, 3, 8, 8)),
    "dilated": (lambda: nn.Conv2d(4, 3, 3, padding=2, dilation=2), (5, 4, 6, 5)),
    "same": (lambda: nn.Conv2d(4, 3, (4, 2), padding="same", dilation=(1, 2)), (5, 4, 6, 5)),
    "valid": (lambda: nn.Conv2d(4, 3, 3, padding="valid"), (5, 4, 6, 5)),
    "groups": (lambda: nn.Conv2d(4, 6, 3, padding=1, groups=2), (5, 4, 5, 4)),
    "groups of a point": (lambda: nn.Conv2d(6, 9, 1, groups=3), (5, 6, 3, 2)),
    "depthwise": (lambda: nn.Conv2d(4, 4, 3, padding=1, groups=4, bias=False), (5, 4, 5, 4)),
    "strided depthwise": (lambda: nn.Conv2d(4, 4, 5, stride=2, padding=2, groups=4), (5, 4, 5, 4)),
    "multiplied depthwise": (lambda: nn.Conv2d(4, 12, 3, padding=1, groups=4), (5, 4, 5, 4)),
    "depthwise on a pixel": (lambda: nn.Conv2d(4, 4, 5, padding=2, groups=4), (5, 4, 1, 1)),
    "point": (lambda: nn.Conv2d(4, 6, 1, bias=False), (5, 4, 3, 4)),
    "strided point": (lambda: nn.Conv2d(4, 6, 1, stride=2, bias=False), (5, 4, 5, 4)),
    "pixel": (lambda: nn.Conv2d(4, 6, 3, padding=1), (5, 4, 1, 1)),
    "whole image": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1), (5, 4, 2, 2)),
    "padding alone": (lambda: nn.Conv2d(4, 6, 2, padding=1, dilation=2), (5, 4, 1, 1)),
    "one channel": (lambda: nn.Conv2d(1, 6, 3, padding=1), (5, 1, 4, 4)),
    "one sample": (lambda: nn.Conv2d(4, 6, 3, padding=1), (1, 4, 4, 3)),
    "linear": (lambda: nn.Linear(7, 4), (5, 7)),
    "linear of sequences": (lambda: nn.Linear(7, 4), (5, 3, 7)),
    "linear of images": (lambda: nn.Linear(7, 4, bias=False), (5, 3, 2, 7)),
}  # fmt: skip

on_every_case = pytest.mark.parametrize("name", CASES)
both_ways = pytest.mark.parametrize("way", ["positions", "direct"])


def operands(name, dtype=torch.float64, channels_last=False):
    torch.manual_seed(0)
    build, shape = CASES[name]
    layer = build().to(dtype)
    x = torch.randn(shape, dtype=dtype)
    dy = torch.randn_like(layer(x))
    if channels_last and isinstance(layer, nn.Conv2d):
        x, dy = (value.contiguous(memory_format=torch.channels_last) for value in (x, dy))
    return layer, x, dy.detach()


def truth(layer, x, dy) -> torch.Tensor:
    """In float64, from one gradient a sample."""
    layer = copy.deepcopy(layer).double()

    def objective(weight, x, dy):
        y = torch.func.functional_call(layer, {"weight": weight}, (x.unsqueeze(0),))
        return (y.squeeze(0) * dy).sum()

    gradients = torch.func.vmap(torch.func.grad(objective), (None, 0, 0))(
        layer.weight.detach(), x.double(), dy.double()
    )
    return gradients.flatten(1) @ gradients.flatten(1).T


def assert_close(found, expected, tolerance):
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


@on_every_case
@both_ways
@pytest.mark.parametrize("channels_last", [False, True])
def test_inner_products_of_per_sample_gradients(name, way, channels_last):
    layer, x, dy = operands(name, channels_last=channels_last)
    found = gram(layer, x, dy, way)
    assert found.dtype == torch.float64 and not found.requires_grad
    assert_close(found, truth(layer, x, dy), 1e-10)


@on_every_case
@both_ways
@pytest.mark.parametrize("limit", [0, 1500, 5000])
def test_chunks_add_up(name, way, limit, monkeypatch):
    layer, x, dy = operands(name, channels_last=limit == 1500)
    monkeypatch.setattr(module, "PARTIAL_ELEMENTS", 16)
    monkeypatch.setattr(module, "SHORTEST_PART", 5)
    if limit == 0 and (layer_units(layer, way) > 1) and name != "padding alone":
        chosen = plan(layer, x.shape, dy.shape, 8, way, limit)
        assert chosen.chunk == 1 and (way == "positions" or chosen.samples == 1)
    assert_close(gram(layer, x, dy, way, limit), truth(layer, x, dy), 1e-10)


@on_every_case
@both_ways
@pytest.mark.parametrize("channels_last, limit", [(False, 5000), (True, 0), (True, 2**25)])
def test_several_gradients_of_each_sample_are_as_of_samples_of_their_own(name, way, channels_last, limit):
    layer, x, dy = operands(name, channels_last=channels_last)
    several = torch.cat([dy, dy.flip(0), dy**2]).unflatten(0, (3, -1)).transpose(0, 1).flatten(0, 1)
    if channels_last and dy.dim() == 4:
        several = several.contiguous(memory_format=torch.channels_last)
    expected = truth(layer, x.repeat_interleave(3, 0), several)
    assert_close(gram(layer, x, several, way, limit), expected, 1e-10)


def layer_units(layer, way) -> int:
    groups = getattr(layer, "groups", 1)
    return layer.weight.shape[1] if way == "direct" and groups == 1 else groups


@pytest.mark.parametrize("name", ["strided", "groups", "depthwise", "multiplied depthwise", "point", "pixel", "linear"])
@both_ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_operands_are_multiplied_in_float32(name, way, dtype):
    layer, x, dy = operands(name, torch.float32, channels_last=dtype == torch.bfloat16)
    x, dy = x.to(dtype), dy.to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        found = gram(layer, x, dy, way)
    assert found.dtype == torch.float32
    # Also where only one of both is narrow.
    assert torch.equal(gram(layer, x, dy.float(), way), found)
    assert_close(found, truth(layer, x, dy), 1e-5)


@on_every_case
def test_symmetric_positive_and_equivariant(name):
    layer, x, dy = operands(name)
    found = gram(layer, x, dy)
    assert_close(found, found.T, 1e-14)
    assert torch.linalg.eigvalsh(found)[0] >= -1e-12 * found.abs().max()
    order = torch.randperm(len(x))
    assert_close(gram(layer, x[order], dy[order]), found[order][:, order], 1e-12)
    assert torch.equal(gram(layer, x, dy), found)


def test_eigenvalues_are_those_of_the_fisher_block():
    layer, x, dy = operands("plain")
    per_sample = []
    for i in range(len(x)):
        (gradient,) = torch.autograd.grad((layer(x[i : i + 1]) * dy[i : i + 1]).sum(), layer.weight)
        per_sample.append(gradient.flatten())
    rows = torch.stack(per_sample)
    fisher = torch.linalg.eigvalsh(rows.T @ rows / len(x))[-len(x) :]
    torch.testing.assert_close(torch.linalg.eigvalsh(gram(layer, x, dy) / len(x)), fisher, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", ["plain", "groups", "depthwise", "point", "linear of sequences"])
@both_ways
def test_memory_that_is_neither_of_the_two_layouts(name, way):
    layer, x, dy = operands(name)
    expected = truth(layer, x, dy)
    strided = torch.empty(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)[..., ::2].copy_(x)
    assert_close(gram(layer, strided, dy, way), expected, 1e-10)
    turned = dy.transpose(0, -1).contiguous().transpose(0, -1)
    assert_close(gram(layer, x, turned, way), expected, 1e-10)
    flat = torch.ones((), dtype=dy.dtype).expand(dy.shape)
    assert_close(gram(layer, x, flat, way), truth(layer, x, flat.contiguous()), 1e-10)


def choices(net: nn.Module, size: int = 32, samples: int = 32) -> dict[str, module.Plan]:
    found = {}

    def note(name):
        return lambda layer, inputs, y: found.update({name: plan(layer, inputs[0].shape, y.shape)})

    for name, layer in net.named_modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            layer.register_forward_hook(note(name))
    net.eval()(torch.empty(samples, 3, size, size, device="meta"))
    return found


def by_way(plans, way) -> set[str]:
    return {name for name, chosen in plans.items() if chosen.way == way}


def test_choices_for_resnet18():
    with torch.device("meta"):
        plans = choices(torchvision.models.resnet18())
    direct = {"conv1", "layer2.0.downsample.0"}
    direct |= {f"layer{i}.{j}.conv{k}" for i in (1, 2) for j in (0, 1) for k in (1, 2)}
    assert by_way(plans, "direct") == direct
    assert all(chosen.samples == 32 and chosen.bytes < 24 * 2**20 for chosen in plans.values())
    assert sum(chosen.multiply_adds for chosen in plans.values()) < 2e9


def test_choices_for_resnet18_of_small_images():
    with torch.device("meta"):
        net = torchvision.models.resnet18()
        net.conv1, net.maxpool = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.Identity()
        plans = choices(net)
    assert by_way(plans, "positions") == {
        "layer4.0.conv1", "layer4.0.conv2", "layer4.1.conv1", "layer4.1.conv2", "fc",
    }  # fmt: skip
    assert plans["layer1.0.conv1"].chunk == 11 and plans["layer3.0.conv2"].chunk == 37
    assert max(chosen.bytes for chosen in plans.values()) <= module.LIMIT_BYTES + 4 * 32 * 64 * 32 * 32


def test_choices_for_efficientnet_b0():
    with torch.device("meta"):
        plans = choices(torchvision.models.efficientnet_b0())
    positions = {"features.8.0", "classifier.1", "features.4.0.block.3.0"}
    for stage, blocks in enumerate((1, 2, 2, 3, 3, 4, 1), start=1):
        for block in range(blocks):
            first = 1 if stage == 1 else 2
            positions |= {f"features.{stage}.{block}.block.{first}.fc{i}" for i in (1, 2)}
            if stage > 4 or (stage, block) > (4, 0):
                positions |= {f"features.{stage}.{block}.block.{i}.0" for i in (0, 3)}
    assert by_way(plans, "positions") == positions
    assert all(chosen.samples == 32 and chosen.bytes < 24 * 2**20 for chosen in plans.values())


def test_positions_give_way_where_their_memory_is_short():
    shapes = nn.Conv2d(256, 256, 3, padding=1), (32, 256, 2, 2), (32, 256, 2, 2)
    assert plan(*shapes).way == "positions"
    assert plan(*shapes, limit=2**20).way == "direct" and plan(*shapes, limit=2**20).chunk < 256
    large = nn.Conv2d(3, 64, 7, stride=2, padding=3), (32, 3, 224, 224), (32, 64, 112, 112)
    assert plan(*large).chunk == 1 and plan(*large).samples < 32


class Peak(TorchDispatchMode):
    """Bytes of the tensors made inside that live at a time."""

    def __init__(self):
        super().__init__()
        self.alive, self.bytes = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {
            leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        }
        results = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(results):
            storage = leaf.untyped_storage() if isinstance(leaf, torch.Tensor) else None
            if storage is not None and storage._cdata not in given:
                self.alive[StorageWeakRef(storage)] = storage.nbytes()
        self.alive = {reference: size for reference, size in self.alive.items() if not reference.expired()}
        self.bytes = max(self.bytes, sum(self.alive.values()))
        return results


@on_every_case
@both_ways
@pytest.mark.parametrize("limit", [0, 5000, 2**25])
@pytest.mark.parametrize("repeats", [1, 3])
def test_memory_is_what_the_plan_says_at_most(name, way, limit, repeats, monkeypatch):
    monkeypatch.setattr(module, "PARTIAL_ELEMENTS", 16)
    layer, x, dy = operands(name, torch.float32, channels_last=limit == 0)
    x, dy = x.bfloat16(), dy.bfloat16().repeat_interleave(repeats, 0)
    with Peak() as peak:
        gram(layer, x, dy, way, limit)
    assert 0 < peak.bytes <= plan(layer, x.shape, dy.shape, way=way, limit=limit).bytes


@pytest.mark.parametrize(
    "layer,x,dy,message",
    [
        (nn.Conv3d(2, 3, 1), (2, 2, 3, 3, 3), (2, 3, 3, 3, 3), "expected nn.Conv2d or nn.Linear, got Conv3d; leave"),
        (nn.ConvTranspose2d(2, 3, 1), (2, 2, 3, 3), (2, 3, 3, 3), "got ConvTranspose2d; leave it out"),
        (nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), (2, 2, 3, 3), (2, 3, 3, 3), "got 'reflect'; pad"),
        (nn.Conv2d(2, 3, 1), (2, 2, 3), (2, 3, 3), r"x: expected \[N, 2, H, W\], got \[2, 2, 3\]; pass"),
        (nn.Conv2d(2, 3, 1), (2, 4, 3, 3), (2, 3, 3, 3), r"x: expected \[N, 2, H, W\], got \[2, 4, 3, 3\]; pass"),
        (nn.Conv2d(2, 3, 1), (0, 2, 3, 3), (0, 3, 3, 3), r"x: expected \[N, 2, H, W\], got \[0, 2, 3, 3\]; pass"),
        (nn.Conv2d(2, 3, 3), (2, 2, 2, 2), (2, 3, 0, 0), r"images as large as the kernel, got \[2, 2, 2, 2\]; pass"),
        (nn.Conv2d(2, 3, 2), (2, 2, 3, 3), (2, 3, 3, 3), r"dy: expected \[2, 3, 2, 2\] for x .* got \[2, 3, 3, 3\]"),
        (nn.Linear(4, 3), (2, 5), (2, 3), r"x: expected \[N, ..., 4\], got \[2, 5\]; pass"),
        (nn.Linear(4, 3), (4,), (3,), r"x: expected \[N, ..., 4\], got \[4\]; pass"),
        (nn.Linear(4, 3), (2, 4), (2, 4), r"dy: expected \[2, 3\] for x \[2, 4\], or .*, got \[2, 4\]; pass"),
    ],
)
def test_poor_input_is_named(layer, x, dy, message):
    with pytest.raises(ValueError, match=message):
        gram(layer, torch.ones(x), torch.ones(dy))


def test_poor_types_and_ways_are_named():
    layer, x, dy = nn.Linear(4, 3), torch.ones(2, 4), torch.ones(2, 3)
    with pytest.raises(ValueError, match="dy: expected .* got torch.int64; convert"):
        gram(layer, x, dy.long())
    with pytest.raises(ValueError, match="dy: expected a tensor on cpu like x, got one on meta; move"):
        gram(layer, x, dy.to("meta"))
    with pytest.raises(ValueError, match="way: expected .* got 'fast'; name"):
        gram(layer, x, dy, "fast")


class TestOnACard:
    pytestmark = gpu

    @on_every_case
    @both_ways
    @pytest.mark.parametrize("limit", [0, 2**25])
    def test_a_captured_call_is_the_truth_and_repeats(self, name, way, limit):
        layer, x, dy = operands(name, torch.float32, channels_last=True)
        x, dy = x.bfloat16(), dy.bfloat16()
        on_card = x.cuda(), dy.cuda()
        graph = Graph(lambda: gram(layer, *on_card, way, limit))
        try:
            for scale in (1, 2):
                on_card[0].copy_(scale * x)
                found = graph.replay().clone()
                assert torch.equal(graph.replay(), found)
                assert_close(found.cpu(), truth(layer, scale * x, dy), 1e-4)
        finally:
            graph.release()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_leading_eigenvalues_of_tiny_huge_empty_and_broken_matrices(dtype):
    torch.manual_seed(0)
    rows = torch.randn(6, 40, dtype=torch.float64)
    matrix = rows @ rows.T
    truth = torch.linalg.eigvalsh(matrix).flip(0)
    broken = torch.full((6, 6), float("nan"), dtype=torch.float64)
    matrices = torch.stack([matrix, 1e-30 * matrix, 1e30 * matrix, 0 * matrix, broken]).to(dtype)
    found = leading(matrices, [40, 40, 40, 3, 40], 8)
    for factor, spectrum in zip((1.0, 1e-30, 1e30), found[:3], strict=True):
        expected = [*(factor * truth).tolist(), 0.0, 0.0]
        assert spectrum.eigenvalues == pytest.approx(expected, rel=1e-4) and spectrum.converged
    assert found[3].eigenvalues == (0.0,) * 3 and found[3].converged
    assert found[4].eigenvalues == () and not found[4].converged
