"""Small networks with curvature for the tests, their dense truth, and everything that a probe must leave alone."""

from __future__ import annotations

import copy
import warnings

import torch
from torch import nn

from triaccel_bench.settings import CurvatureSettings


def settings(**changes) -> CurvatureSettings:
    values = dict(rates=True, promotion=True, estimator="hessian", product="auto", k=5, every=200, batch=32)
    values |= dict(iterations=8, tolerance=0.01, max_overhead=0.1, alpha=0.05, tau_curv="auto")
    return CurvatureSettings(**(values | changes))


def loss(module, images, labels):
    """Mean cross-entropy in the module's own dtype, so that float64 stays float64."""
    return nn.functional.cross_entropy(module(images), labels)


def network(kind="plain", activation=nn.ReLU, dtype=torch.float32, seed=0) -> nn.Sequential:
    torch.manual_seed(seed)
    middle = {
        "plain": nn.Conv2d(4, 4, 3, bias=False),
        "strided": nn.Conv2d(4, 4, 3, stride=2, padding=1),
        "dilated": nn.Conv2d(4, 4, 2, dilation=2),
        "grouped": nn.Conv2d(4, 4, 3, groups=2),
        "depthwise": nn.Conv2d(4, 8, 3, groups=4, bias=False),
    }[kind]
    module = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), activation(),
        middle, nn.BatchNorm2d(middle.out_channels), activation(), nn.Dropout(0.5),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * middle.out_channels, 3),
    ).to(dtype)  # fmt: skip
    with torch.no_grad():
        for _ in range(5):
            module(torch.randn(32, 2, 6, 6, dtype=dtype))
    return module


def layers_of(module) -> dict[str, nn.Module]:
    return {name: part for name, part in module.named_modules() if isinstance(part, (nn.Conv2d, nn.Linear))}


def batch(dtype=torch.float32, device="cpu", count=12):
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(count, 2, 6, 6, generator=generator)
    return images.to(device, dtype), torch.randint(0, 3, (count,), generator=generator).to(device)


def dense_eigenvalues(module, name, images, labels, k=5) -> list[float]:
    """Truth: the dense block in float64, of a copy in evaluation mode."""
    model = copy.deepcopy(module).double().eval()

    def of_weight(weight):
        replaced = {f"{name}.weight": weight}
        return loss(lambda x: torch.func.functional_call(model, replaced, (x,)), images.double(), labels)

    weight = model.get_parameter(f"{name}.weight").detach()
    hessian = torch.func.hessian(of_weight)(weight).reshape(weight.numel(), weight.numel())
    return torch.linalg.eigvalsh(hessian).flip(0)[:k].tolist()


def snapshot(module, device="cpu"):
    return {
        "state": {key: value.clone() for key, value in module.state_dict().items()},
        "parameters": {key: (id(value), value.requires_grad) for key, value in module.named_parameters()},
        "grads": {key: None if value.grad is None else value.grad.clone() for key, value in module.named_parameters()},
        "training": {key: part.training for key, part in module.named_modules()},
        "rng": [torch.get_rng_state()] + ([torch.cuda.get_rng_state()] if device == "cuda" else []),
        "grad mode": torch.is_grad_enabled(),
        "contents": {key: sorted(part.__dict__) for key, part in module.named_modules()},
    }


def assert_same(before, after):
    for key in before["state"]:
        assert torch.equal(before["state"][key], after["state"][key]), key
    for key, grad in before["grads"].items():
        assert (grad is None) == (after["grads"][key] is None), key
        assert grad is None or torch.equal(grad, after["grads"][key]), key
    assert all(torch.equal(a, b) for a, b in zip(before["rng"], after["rng"], strict=True))
    for key in ("parameters", "training", "grad mode", "contents"):
        assert before[key] == after[key], key


def used_network(device="cpu"):
    """Mixed flags, a frozen layer, a gradient here and none there."""
    module = network("grouped").to(device)
    module[1].eval()
    module[3].weight.requires_grad_(False)
    module[0].weight.grad = torch.full_like(module[0].weight, 0.25)
    return module


def assert_no_trace(estimator) -> None:
    """``estimator(module)`` probes without a warning, a change, or a hook left behind."""
    module = used_network()
    before = snapshot(module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        estimator(module).probe(*batch(), None)
    assert_same(before, snapshot(module))
    assert not any(part._forward_hooks for part in module.modules())
