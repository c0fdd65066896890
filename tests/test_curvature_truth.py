"""Our largest eigenvalues of Hessian blocks beside those of curvlinops, a library of others (the extra
``curvature-truth``), on a small network in evaluation mode."""

import copy
import sys
from pathlib import Path

import pytest
import torch
from test_hessian import settings
from torch import nn

from triaccel_bench import curvature
from triaccel_bench.models import ResNet8

pytest.importorskip("curvlinops", reason="needs the extra curvature-truth")

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
import curvature_truth  # noqa: E402

LAYERS = ("conv1", "layer1.conv2", "layer2.downsample.0", "layer3.conv1", "fc")


def smooth() -> nn.Module:
    """A ReLU that switches between two points is no part of the Hessian: differences are for smooth networks."""

    def block(inputs: int, outputs: int, **shape) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, bias=False, **shape), nn.BatchNorm2d(outputs), nn.SiLU()]

    return nn.Sequential(
        *block(3, 16, kernel_size=3, padding=1), *block(16, 32, kernel_size=1),
        *block(32, 32, kernel_size=3, padding=1, groups=32), *block(32, 64, kernel_size=3, stride=2, padding=1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def trained(network: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Move statistics and weights away from their start; returns a probe batch."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(64) % 10
    images = torch.randn(64, 3, 8, 8, generator=generator) + 0.4 * labels[:, None, None, None]
    optimizer = torch.optim.SGD(network.parameters(), 0.05, momentum=0.9)
    for _ in range(10):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(images), labels).backward()
        optimizer.step()
    return images[:8], labels[:8]


def hold_against_curvlinops(network, names, limits):
    torch.manual_seed(0)
    network = network()
    images, labels = trained(network)
    layers = {name: network.get_submodule(name) for name in names}
    plain = curvature_truth.with_other_silu(copy.deepcopy(network)).eval()
    truth = [curvature_truth.curvlinops_largest(plain, f"{name}.weight", images, labels) for name in names]
    for product, limit in limits.items():
        chosen = settings(product=product, k=1, iterations=60, tolerance=1e-3)
        found = curvature.eigenvalues(network, layers, images, labels, chosen)
        assert found.converged.all(), product
        assert found.values[:, 0].tolist() == pytest.approx(truth, rel=limit), product


def test_a_piecewise_linear_network():
    hold_against_curvlinops(lambda: ResNet8(10), LAYERS, {"jacobian": 0.02, "exact": 0.02})


def test_a_layer_without_curvature():
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 3))
    with torch.no_grad():
        network[1].bias.fill_(-100.0)
    images, labels = torch.randn(5, 3, 2, 2), torch.arange(5) % 3
    assert curvature_truth.curvlinops_largest(network, "1.weight", images, labels) == 0.0


def test_a_smooth_network():
    hold_against_curvlinops(smooth, ("0", "3", "6", "9", "14"), {"exact": 0.02, "difference": 0.10})
