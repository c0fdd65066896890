"""The loop around a model and an optimizer of one's own."""

import re

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from triaccel_bench import TriAccel
from triaccel_bench import loop as loop_module
from triaccel_bench.meters import MemoryMeter
from triaccel_bench.methods import Method
from triaccel_bench.settings import SettingsError

BATCH = 16


def parts(lr: float = 0.1) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10))
    return model, torch.optim.SGD(model.parameters(), lr=lr)


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, 3, 8, 8, generator=generator), torch.randint(0, 10, (BATCH,), generator=generator)


@pytest.mark.parametrize(
    "override",
    [
        "method.update.in_backward=true",
        "method.update.momentum_dtype=bf16",
        "method.batch.growth=schedule",
        "model.checkpointing=true",
        "optimizer.lr=0.2",
        "+optimizer.momentum=0.5",
    ],
)
def test_what_a_loop_of_ones_own_cannot_do_is_refused(override):
    model, optimizer = parts()
    with pytest.raises(SettingsError, match=f"{re.escape(override.split('=')[0])}.*: expected .*; "):
        TriAccel(model, optimizer, overrides=[override])


@pytest.mark.parametrize("memory_gb", [0, -1.0, 1e-12, float("nan"), float("inf")])
def test_a_budget_that_is_none_is_refused(memory_gb):
    with pytest.raises(SettingsError, match="memory_gb=.*: expected GB"):
        TriAccel(*parts(), memory_gb=memory_gb)


def test_a_ladder_without_fp16_scales_no_loss():
    ladders = {}
    for narrowest in ("fp16", "bf16"):
        model, optimizer = parts()
        chosen = [f"method.precision.narrowest={narrowest}", "method.precision.cpu_executes=requested"]
        ladders[narrowest] = TriAccel(model, optimizer, overrides=chosen)._reachable_levels()
    assert ladders == {"fp16": ("fp16", "bf16", "fp32"), "bf16": ("bf16", "fp32")}


class Meter(MemoryMeter):
    """Every window holds 100 bytes, and whatever a test adds to one."""

    def __init__(self):
        self.peak = 100

    def begin_window(self):
        self.peak = 100

    def window_peak_bytes(self, replayed_bytes=0):
        return self.peak

    def headroom_bytes(self, peak_bytes):
        return 1000 - peak_bytes


def test_a_layers_rate_holds_for_the_step_and_no_longer():
    model, optimizer = parts()
    overrides = [
        "method.control.interval=1", "method.curvature.every=1", "method.curvature.max_overhead=1.0", "method.batch.min=16"
    ]  # fmt: skip
    loop = TriAccel(model, optimizer, batch=BATCH, method="triaccel_curvature", overrides=overrides)
    slowed = False
    for seed in range(3):
        images, labels = batch(seed)
        loss = cross_entropy(model(images), labels)
        gradients = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        rates = loop.rates
        loop.step(loss, images, labels)
        names = [name.rpartition(".")[0] for name, _ in model.named_parameters()]
        for name, old, new, gradient in zip(names, before, model.parameters(), gradients, strict=True):
            torch.testing.assert_close(new, old - 0.1 * rates.get(name, 1.0) * gradient, rtol=1e-5, atol=1e-7)
        assert {group["lr"] for group in optimizer.param_groups} == {0.1}
        slowed |= min(rates.values()) < 1
    assert slowed


@pytest.mark.parametrize("by_the_probe, expected", [(True, BATCH + 32), (False, BATCH)])
def test_a_probes_peak_is_no_usage_of_training(monkeypatch, by_the_probe, expected):
    """900 of 1000 bytes lie in the band and 100 below it: what only the probe needed must not hold B back."""
    meter = Meter()
    monkeypatch.setattr(loop_module, "open_meter", lambda *arguments: meter)

    def probe(self, *arguments):
        meter.peak = 900 if by_the_probe else 100

    monkeypatch.setattr(Method, "probe", probe)
    model, optimizer = parts()
    overrides = ["method.control.interval=2", "method.curvature.every=2", "method.batch.min=16"]
    loop = TriAccel(model, optimizer, batch=BATCH, memory_gb=1e-6, overrides=overrides)
    for seed in range(2):
        images, labels = batch(seed)
        loss = cross_entropy(model(images), labels)
        if not by_the_probe:
            meter.peak = 900
        loop.step(loss, images, labels)
    assert loop.batch_size == expected


def test_a_model_without_batch_normalisation_trains():
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 10), torch.nn.ReLU(), torch.nn.Linear(10, 4))
    loop = TriAccel(model, torch.optim.SGD(model.parameters(), lr=0.01), batch=4, overrides=["method.batch.min=2"])
    images, labels = torch.randn(4, 3, 4, 4), torch.tensor([0, 1, 2, 3])
    loop.step(torch.nn.functional.cross_entropy(model(images), labels), images, labels)
    assert loop.steps == 1


def test_a_layer_without_a_gradient_is_named():
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 10), torch.nn.ReLU(), torch.nn.Linear(10, 4))
    model[1].weight.requires_grad_(False)
    loop = TriAccel(model, torch.optim.SGD(model.parameters(), lr=0.01), batch=4, overrides=["method.batch.min=2"])
    images, labels = torch.randn(4, 3, 4, 4), torch.tensor([0, 1, 2, 3])
    with pytest.raises(ValueError, match="layer 1: expected a gradient of its weight, got none"):
        loop.step(torch.nn.functional.cross_entropy(model(images), labels), images, labels)
