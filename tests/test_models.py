"""Architectures, their named layers, and joins that follow their consumer."""

import pytest
import torch
import torchvision

from triaccel_bench import models
from triaccel_bench.configuration import compose
from triaccel_bench.models import WeightsError


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
    assert models.join_sum(left, right, torch.bfloat16).dtype == torch.bfloat16
    assert models.join_sum(left, right, None).dtype == torch.float32
    expected = (left.float() + right).to(torch.float16)
    assert torch.equal(models.join_sum(left, right, torch.float16), expected)


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
