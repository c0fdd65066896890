"""Layers run in their assigned dtype, meet without a mismatch, and a uniform plan is autocast."""

import itertools

import pytest
import tiny
import torch
from torch.nn import functional

from triaccel_bench import models, precision
from triaccel_bench.assembly import image_sizes
from triaccel_bench.configuration import compose
from triaccel_bench.precision import WeightCopies

ARCHITECTURES = ["resnet8", "resnet18", "resnet18_cifar", "efficientnet_b0"]


def prepared(name: str):
    torch.manual_seed(0)
    network = models.build(compose([f"model={name}"]).model, 10)
    precision.prepare(network)
    return network


def side(name: str) -> int:
    return 8 if name == "resnet8" else 32


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_alternating_dtypes_train_and_evaluate(name):
    network = prepared(name)
    levels = itertools.cycle(("bf16", "fp32", "fp16"))
    plan = [next(levels) for _ in network.layers]
    precision.apply(network, plan)
    assert list(precision.current(network)) == plan
    images, labels = torch.randn(2, 3, side(name), side(name)), torch.tensor([1, 2])
    logits = network.module(images)
    loss = functional.cross_entropy(logits, labels)
    loss.backward()
    assert logits.dtype == torch.float32 and torch.isfinite(loss)
    assert all(p.dtype == torch.float32 and p.grad.dtype == torch.float32 for p in network.module.parameters())
    with torch.no_grad():
        assert network.module.eval()(images).dtype == torch.float32


def test_evaluation_uses_the_same_casts():
    network = prepared("resnet8")
    precision.apply(network, ["bf16"] * len(network.layers))
    seen = {"train": [], "eval": []}
    network.layers["layer2.conv2"].register_forward_hook(
        lambda module, inputs, output: seen["train" if network.module.training else "eval"].append(output.dtype)
    )
    images = torch.randn(2, 3, 8, 8)
    network.module.train()(images)
    network.module.eval()(images)
    assert seen["train"] == seen["eval"] == [torch.bfloat16]


@pytest.mark.parametrize("name", ["resnet8", "efficientnet_b0"])
def test_uniform_plan_computes_what_autocast_computes(name):
    network = prepared(name)
    network.module.eval()  # no random depth or dropout, so that both see the same computation
    torch.manual_seed(0)
    plain = models.build(compose([f"model={name}"]).model, 10).module.eval()
    precision.apply(network, ["bf16"] * len(network.layers))
    images, labels = torch.randn(2, 3, side(name), side(name)), torch.tensor([3, 4])
    ours = network.module(images)
    functional.cross_entropy(ours, labels).backward()
    with torch.autocast("cpu", torch.bfloat16):
        reference = plain(images)
    functional.cross_entropy(reference.float(), labels).backward()
    assert torch.equal(ours, reference.float())
    for mine, theirs in zip(network.module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=0)


def test_fp32_plan_is_the_plain_model():
    network = prepared("resnet8")
    torch.manual_seed(0)
    plain = models.build(compose(["model=resnet8"]).model, 10).module
    images = torch.randn(3, 3, 8, 8)
    assert torch.equal(network.module(images), plain(images))
    assert network.module.state_dict().keys() == plain.state_dict().keys()


def test_join_is_stored_in_the_consumers_dtype():
    network = prepared("resnet8")
    plan = dict.fromkeys(network.layers, "fp32") | {"layer1.conv2": "bf16", "layer2.conv1": "bf16"}
    precision.apply(network, list(plan.values()))
    seen = []
    network.module.layer1.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    network.module(torch.randn(2, 3, 8, 8))
    assert seen == [torch.bfloat16]


def saved_bytes(network, images) -> int:
    """Bytes kept for the backward pass, each storage once, parameters not counted."""
    parameters = {p.untyped_storage().data_ptr() for p in network.module.parameters()}
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = (tensor, storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        network.module(images).sum()
    return sum(size for _, size in storages.values())


@pytest.mark.parametrize("name", ["resnet8", "efficientnet_b0"])
def test_a_mixed_plan_keeps_no_second_copies(name):
    """Changing dtype at every layer must not need more memory than running every layer in FP32."""
    network = prepared(name)
    images = torch.randn(16, 3, 32, 32)
    kept = {}
    for label, levels in {"fp32": ["fp32"], "bf16": ["bf16"], "mixed": ["fp16", "bf16"]}.items():
        plan = list(itertools.islice(itertools.cycle(levels), len(network.layers)))
        precision.apply(network, plan)
        kept[label] = saved_bytes(network, images)
    assert kept["bf16"] <= kept["mixed"] <= 1.1 * kept["bf16"] < kept["fp32"]


@pytest.mark.parametrize("plan", [["fp32"], ["fp64"] * 10])
def test_wrong_plans_are_refused(plan):
    with pytest.raises(ValueError, match="expected 10 of"):
        precision.apply(prepared("resnet8"), plan)


def test_strict_fp32_restores_plan_and_flags_even_after_an_error():
    network = prepared("resnet8")
    plan = ["bf16"] * 9 + ["fp16"]
    precision.apply(network, plan)
    precision.allow_tf32(True)
    try:
        with pytest.raises(RuntimeError), precision.strict_fp32(network):
            assert set(precision.current(network)) == {"fp32"}
            assert not torch.backends.cudnn.allow_tf32 and not torch.backends.cuda.matmul.allow_tf32
            raise RuntimeError
        assert list(precision.current(network)) == plan
        assert torch.backends.cudnn.allow_tf32 and torch.backends.cuda.matmul.allow_tf32
    finally:
        precision.allow_tf32(False)


def test_convolutions_and_norms_know_within_strict_fp32_alone_how_often_they_are_differentiated():
    network = prepared("efficientnet_b0")
    told = [part for part in network.module.modules() if isinstance(part, (torch.nn.Conv2d, models.Norm))]
    assert not any(part.differentiated_once for part in told)
    with precision.strict_fp32(network, differentiated_once=True):
        assert all(part.differentiated_once for part in told)
        with precision.strict_fp32(network):
            assert not any(part.differentiated_once for part in told)
        assert not any(part.differentiated_once for part in told), "the safe answer, which is the slower one"
    assert not any(part.differentiated_once for part in told)


def test_copies_take_the_gradient_and_follow_the_plan():
    network = prepared("resnet8")
    parameters = list(network.module.parameters())
    copies = WeightCopies(network, parameters)
    plan = ["fp16", "bf16", "fp32"] * 3 + ["bf16"]
    precision.apply(network, plan)
    copies.follow()
    copies.refresh()
    images, labels = torch.randn(4, 3, 8, 8), torch.tensor([1, 2, 3, 4])
    functional.cross_entropy(network.module(images), labels).backward()
    dtype_of = {id(layer.weight): precision.DTYPES[level] for layer, level in zip(network.layers.values(), plan)}
    for parameter, leaf in zip(parameters, copies.leaves, strict=True):
        expected = dtype_of.get(id(parameter), leaf.dtype)
        assert leaf.dtype == expected and leaf.grad is not None and leaf.grad.dtype == expected
        assert (leaf is parameter) == (expected == torch.float32)
        assert torch.equal(leaf.detach(), parameter.detach().to(expected))
        assert leaf is parameter or parameter.grad is None
    addresses = [copy.data_ptr() for copy in copies.of_parameters if copy is not None]
    precision.apply(network, ["bf16" if level == "fp16" else "fp16" if level == "bf16" else level for level in plan])
    copies.follow()
    assert [copy.data_ptr() for copy in copies.of_parameters if copy is not None] == addresses
    precision.apply(network, ["fp32"] * 10)
    copies.follow()
    assert all(leaf is parameter for leaf, parameter in zip(copies.leaves, parameters, strict=True))


def test_an_fp32_probe_of_a_16_bit_layer_reads_its_weight_and_not_its_copy():
    network = prepared("resnet8")
    copies = WeightCopies(network, list(network.module.parameters()))
    precision.apply(network, ["bf16"] * 10)
    copies.follow()
    copies.refresh()
    torch.manual_seed(0)
    plain = models.build(compose(["model=resnet8"]).model, 10).module.eval()
    images = torch.randn(2, 3, 8, 8)
    network.module.eval()
    with precision.strict_fp32(network):
        assert torch.equal(network.module(images), plain(images))
    assert not torch.equal(network.module(images), plain(images))


def differentiated(network, image_sizes, dtype: str):
    """Logits and the gradient of each layer's weight, all of it, of a network that runs as on a card."""
    copies = WeightCopies(network, list(network.module.parameters()), image_sizes)
    precision.apply(network, [dtype] * len(network.layers))
    copies.follow()
    copies.refresh()
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    logits = network.module(images.contiguous(memory_format=torch.channels_last))
    functional.cross_entropy(logits, torch.tensor([1, 2])).backward()
    gradients = {}
    for parameter, leaf, window in zip(network.module.parameters(), copies.leaves, copies.windows, strict=True):
        whole = leaf.grad
        if window is not None:
            whole = torch.zeros_like(parameter, dtype=leaf.dtype)
            whole[window] = leaf.grad
        gradients[id(parameter)] = whole
    return copies, logits.detach(), [gradients[id(layer.weight)] for layer in network.layers.values()]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_copies_leave_out_the_taps_that_only_meet_padding_and_nothing_changes(dtype, monkeypatch):
    monkeypatch.setattr(precision, "keeps_torchs_sums", lambda tensor: False)
    networks = [prepared("resnet18") for _ in range(2)]
    for network in networks:
        network.module.to(memory_format=torch.channels_last)
    sizes = image_sizes(compose(["model=resnet18"]).model)
    (copies, logits, gradients), (all_taps, *expected) = (
        differentiated(network, given, dtype) for network, given in zip(networks, (sizes, None))
    )
    assert torch.equal(logits, expected[0])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(gradients, expected[1], strict=True))
    held, whole = (sum(copy.nbytes for copy in each.of_parameters if copy is not None) for each in (copies, all_taps))
    # Three layers of 512 x 512 read one pixel, eight of nine taps each; one of 512 x 256 reads four, five of nine.
    assert whole - held == 2 * (3 * 8 * 512 * 512 + 5 * 512 * 256)
    assert not any(all_taps.windows) and sum(window is not None for window in copies.windows) == 4
    # In evaluation, and in FP32 for a probe, which reads all of the weight.
    for network in networks:
        network.module.eval()
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(*(network.module(images) for network in networks))
    with precision.strict_fp32(networks[0]), precision.strict_fp32(networks[1]):
        assert torch.equal(*(network.module(images) for network in networks))


def test_copies_of_a_cpu_and_of_images_that_are_not_known_hold_all_taps(monkeypatch):
    network = prepared("resnet18")
    parameters = list(network.module.parameters())
    assert not any(WeightCopies(network, parameters, image_sizes(compose(["model=resnet18"]).model)).windows)
    monkeypatch.setattr(precision, "keeps_torchs_sums", lambda tensor: False)
    assert not any(WeightCopies(network, parameters).windows)


@pytest.mark.parametrize("name, layers", [("resnet18", 4), ("efficientnet_b0", 0)])
def test_a_run_of_16_bit_leaves_them_out_of_its_copies(name, layers, monkeypatch):
    """EfficientNet's kernels over one pixel are depthwise."""
    monkeypatch.setattr(precision, "keeps_torchs_sums", lambda tensor: False)
    chosen = tiny.settings(f"model={name}", "model.input_size=32", "dataset.image_size=32", "method=amp")
    made, _ = tiny.trainer(chosen, tiny.images(side=32))
    assert sum(window is not None for window in made.engine._copies.windows) == layers


def test_a_convolution_with_some_taps_refuses_an_image_that_meets_others(monkeypatch):
    monkeypatch.setattr(precision, "keeps_torchs_sums", lambda tensor: False)
    network = prepared("resnet18")
    copies = WeightCopies(network, list(network.module.parameters()), image_sizes(compose(["model=resnet18"]).model))
    precision.apply(network, ["bf16"] * len(network.layers))
    copies.follow()
    with pytest.raises(ValueError, match=r"weight: expected all taps, \(3, 3\), .* got \(2, 2\); pass all of them"):
        network.module(torch.randn(2, 3, 96, 96))


def test_copies_can_be_brought_up_to_date():
    network = prepared("resnet8")
    parameters = list(network.module.parameters())
    copies = WeightCopies(network, parameters)
    precision.apply(network, ["fp16"] * 10)
    copies.follow()
    copies.refresh()
    with torch.no_grad():
        parameters[0].add_(1.0)
    assert not torch.equal(copies.leaves[0], parameters[0].half())
    copies.refresh()
    assert torch.equal(copies.leaves[0], parameters[0].half())
