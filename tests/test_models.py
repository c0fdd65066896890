"""Architectures, their named layers, and joins that follow their consumer."""

import copy

import pytest
import torch
import torchvision
from torch import nn

from triaccel_bench import models
from triaccel_bench.configuration import compose
from triaccel_bench.kernels.norm import join_sum
from triaccel_bench.weights import WeightsError


def build(name: str, *overrides: str, classes: int = 10):
    torch.manual_seed(0)
    return models.build(compose([f"model={name}", *overrides]).model, classes)


@pytest.mark.parametrize("name, layers, joins, parameters", [
    ("resnet18", 21, 8, 11_181_642), ("resnet18_cifar", 21, 8, 11_173_962),
    ("efficientnet_b0", 82, 25, 4_020_358), ("resnet8", 10, 3, 78_042),
])  # fmt: skip
def test_sizes(name, layers, joins, parameters):
    network = build(name)
    assert len(network.layers) == layers
    assert len(network.joins) == joins
    assert sum(p.numel() for p in network.module.parameters()) == parameters


def test_consumer_of_a_join_is_the_next_layer():
    consumers = [consumer for _, consumer in build("resnet18").joins]
    assert consumers == [
        "layer1.1.conv1", "layer2.0.conv1", "layer2.1.conv1", "layer3.0.conv1",
        "layer3.1.conv1", "layer4.0.conv1", "layer4.1.conv1", "fc",
    ]  # fmt: skip


def test_consumers_follow_the_data_not_the_order_of_definition():
    resnet = build("resnet18").consumers
    assert resnet["conv1"] == "layer1.0.conv1"
    assert resnet["layer2.0.conv2"] == resnet["layer2.0.downsample.0"] == "layer2.1.conv1"
    assert resnet["layer4.1.conv2"] == resnet["fc"] == "fc"
    efficientnet = build("efficientnet_b0").consumers
    block = "features.2.0.block"
    assert efficientnet[f"{block}.0.0"] == f"{block}.1.0"
    assert efficientnet[f"{block}.1.0"] == efficientnet[f"{block}.2.fc2"] == f"{block}.3.0"
    assert efficientnet[f"{block}.2.fc1"] == f"{block}.2.fc2"


@pytest.mark.parametrize("name, build_original", [
    ("resnet18", torchvision.models.resnet18), ("efficientnet_b0", torchvision.models.efficientnet_b0),
])  # fmt: skip
def test_forward_equals_torchvisions(name, build_original):
    ours = build(name).module.eval()
    torch.manual_seed(0)
    original = build_original(num_classes=10).eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(ours(images), original(images))


def test_join_sum_hands_on_the_consumers_dtype():
    left, right = torch.randn(5, dtype=torch.bfloat16), torch.randn(5)
    assert join_sum(left, right, torch.bfloat16).dtype == torch.bfloat16
    assert join_sum(left, right, None).dtype == torch.float32
    expected = (left.float() + right).to(torch.float16)
    assert torch.equal(join_sum(left, right, torch.float16), expected)


def test_weights_from_a_file_keep_all_but_an_unlike_classifier(tmp_path):
    path = tmp_path / "weights.pt"
    source = build("resnet8", classes=7).module
    torch.save(source.state_dict(), path)
    loaded = build("resnet8", f"model.weights={path}").module
    assert torch.equal(loaded.conv1.weight, source.conv1.weight)
    assert loaded.fc.out_features == 10


@pytest.mark.parametrize(
    "content, word", [(b"not a checkpoint", "expected a state dict"), ({"other": torch.ones(1)}, "missing")]
)
def test_weights_that_do_not_fit_are_named(tmp_path, content, word):
    path = tmp_path / "weights.pt"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    with pytest.raises(WeightsError, match=word) as caught:
        build("resnet8", f"model.weights={path}")
    assert str(path) in str(caught.value)


def described(model):
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return copy.deepcopy(model), models.describe(model).module


@pytest.mark.parametrize("activation", [nn.SiLU, nn.Identity, nn.ReLU])
def test_a_block_keeps_an_activation_of_its_own(activation):
    model = torchvision.models.resnet18(num_classes=10)
    for part in model.modules():
        if type(part).__name__ == "BasicBlock":
            part.relu = activation()
    plain, ours = described(model)
    images = torch.randn(4, 3, 32, 32)
    torch.testing.assert_close(ours(images), plain(images))


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm2d, lambda n: nn.BatchNorm2d(n, momentum=None), lambda n: nn.GroupNorm(2, n)]
)
def test_batches_are_counted_as_in_the_plain_model(norm):
    plain, ours = described(torchvision.models.resnet18(num_classes=10, norm_layer=norm))
    for model in (plain, ours):
        model.layer1.eval()
        model(torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0)))
        model.layer2(torch.randn(4, 64, 8, 8, generator=torch.Generator().manual_seed(0)))
        model.eval()
        model.layer3.train()
        model(torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1)))
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(ours.get_buffer(name), buffer, msg=name)


def test_an_engines_network_counts_once_whatever_the_kernels():
    network = build("resnet8")
    models.use_kernels(network, "torch")
    for _ in range(3):
        network.module(torch.randn(2, 3, 8, 8))
    network.module.eval()(torch.randn(2, 3, 8, 8))
    assert {int(norm.num_batches_tracked) for norm in network.module.modules() if isinstance(norm, models.Norm)} == {3}


def test_statistics_of_an_averaged_model_can_be_made_anew():
    plain, ours = described(torchvision.models.resnet18(num_classes=10))
    batches = [torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    for model in (plain, ours):
        torch.optim.swa_utils.update_bn(batches, model)
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(ours.get_buffer(name), buffer, msg=name)


def test_stochastic_depth_stays_on_where_norms_are_frozen():
    model = torchvision.models.efficientnet_b0(num_classes=10, stochastic_depth_prob=0.9)
    network = models.describe(model)
    for part in network.module.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.eval()
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        outputs = torch.stack([network.module(images) for _ in range(4)])
    assert outputs.std(0).max() > 0


def test_norms_made_something_else_later_still_run():
    model = models.describe(torchvision.models.resnet18(num_classes=10)).module
    for name, part in list(model.named_modules()):
        if isinstance(part, models.Norm):
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, nn.GroupNorm(2, part.num_features))
    assert torch.isfinite(model(torch.randn(2, 3, 32, 32))).all()


def test_only_plain_pooling_is_replaced_and_a_cpu_keeps_torchs(monkeypatch):
    module = torchvision.models.resnet18()
    models.describe(module)
    assert type(module.maxpool) is models.MaxPool
    odd = torchvision.models.resnet18()
    odd.maxpool = nn.MaxPool2d(3, stride=2, padding=1, ceil_mode=True)
    models.describe(odd)
    assert type(odd.maxpool) is nn.MaxPool2d
    asked = []
    monkeypatch.setattr(models, "max_pool2d", lambda *arguments, backend: asked.append(backend))
    module.maxpool.kernels = "triton"
    module.maxpool(torch.zeros(1, 1, 8, 8))
    assert asked == ["torch"]


def test_parameters_come_in_the_order_in_which_layers_are_called():
    called = []
    for name in ("resnet18", "efficientnet_b0", "resnet8"):
        network = build(name)
        for part in network.module.modules():
            if not list(part.children()):
                part.register_forward_hook(lambda part, *_: called.extend(map(id, part.parameters())))
        network.module.eval()(torch.zeros(1, 3, 32, 32))
        assert [id(p) for p in models.parameters_in_order_of_use(network.module)] == called
        called.clear()
