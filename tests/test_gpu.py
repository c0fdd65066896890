"""The whole loop on a real card, and on the same card disguised as a T4 and a P100."""

import pytest
import torch
from tiny import images, settings, trainer

from triaccel_bench import hardware, models, precision
from triaccel_bench.configuration import compose
from triaccel_bench.data import DeviceData, ElasticSampler, draw
from triaccel_bench.engine import Engine
from triaccel_bench.schedule import Schedule

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SMALL = ["device=cuda", "memory.meter=vram", "dataset.image_size=32", "model.input_size=32"]


def small(*overrides: str):
    return settings(*SMALL, *overrides)


def data():
    return images(train=64, evaluation=32, side=32)


def engine(name: str, levels: list[str], kernels: str, lr: float = 0.05):
    chosen = compose([f"model={name}", "method=triaccel"])
    torch.manual_seed(0)
    network = models.build(chosen.model, 10)
    network.module.cuda().train()
    precision.prepare(network)
    plan = [levels[index % len(levels)] for index in range(len(network.layers))]
    return Engine(network, chosen.method, chosen.optimizer, Schedule(lr, 0, 10_000), kernels, plan), chosen


@pytest.mark.parametrize("kernels", ["triton", "torch"])
@pytest.mark.parametrize("name", ["resnet18", "efficientnet_b0"])
def test_steps_never_wait_for_the_device(name, kernels):
    made, chosen = engine(name, ["fp16", "bf16", "fp32"], kernels)
    device = torch.device("cuda")
    resident = DeviceData(data(), chosen.dataset, 32, device)
    draws = draw(64, chosen.dataset, 0, 1, device)
    made.step(*resident.train_batch(torch.arange(32, device=device), draws))
    sampler = ElasticSampler(64, 0, 1, device)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        while sampler.remaining:
            made.step(*resident.train_batch(sampler.take(16), draws))
        made.set_rates([0.5] * len(made.network.layers), 2.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    reading = made.read()
    assert reading.samples == 96 and reading.loss_sum > 0


@pytest.mark.parametrize("name", ["resnet18", "efficientnet_b0"])
def test_uniform_fp16_plan_is_autocast(name):
    made, _ = engine(name, ["fp16"], "torch")
    network = made.network
    network.module.eval()
    torch.manual_seed(0)
    plain = models.build(compose([f"model={name}"]).model, 10).module.cuda().eval()
    batch = torch.randn(16, 3, 32, 32, device="cuda")
    with torch.autocast("cuda", torch.float16):
        reference = plain(batch)
    torch.testing.assert_close(network.module(batch), reference.float(), rtol=2e-3, atol=2e-3)


def test_both_backends_train_alike():
    losses = []
    for kernels in ("triton", "torch"):
        made, _ = engine("resnet18", ["fp32"], kernels, lr=1e-4)
        generator = torch.Generator().manual_seed(0)
        for _ in range(5):
            batch = torch.randn(16, 3, 32, 32, generator=generator).cuda()
            made.step(batch, torch.arange(16, device="cuda") % 10)
        losses.append(made.read().loss_sum)
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_peaks_do_not_depend_on_the_order_of_jobs():
    """A small job after a large one in the same process reports its own peak."""

    def peak(name: str) -> int:
        made, run = trainer(small(f"model={name}", "method=fp32", "epochs=1", "model.input_size=32"), data())
        made.train()
        return run.epochs[0].memory_peak_bytes

    peak("resnet8")  # library workspaces are allocated once a process
    first = {name: peak(name) for name in ("resnet18", "resnet8")}
    second = {name: peak(name) for name in ("resnet8", "resnet18")}
    assert first["resnet18"] > 2 * first["resnet8"]
    for name, value in first.items():
        assert second[name] == pytest.approx(value, rel=0.01)


def test_epoch_seconds_agree_with_device_events():
    made, run = trainer(small("model=resnet18", "method=fp32", "epochs=3"), data())
    events = []
    read = made.clock.read

    def with_event():
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record()
        return read()

    made.clock.read = with_event
    made.train()
    # Each static epoch reads the clock at the start and end of training, then around evaluation.
    for record, start in zip(run.epochs, range(0, len(events), 4), strict=True):
        elapsed = events[start].elapsed_time(events[start + 1]) / 1e3
        assert record.train_seconds == pytest.approx(elapsed, rel=0.02, abs=2e-4)


DISGUISES = {"T4": (7, 5), "P100": (6, 0)}


@pytest.mark.parametrize("card", DISGUISES)
def test_a_card_without_native_bf16_trains_on_its_substitutes(card, monkeypatch):
    """Requested BF16 executes FP16 under loss scaling; a P100 gets the torch kernels."""
    real = hardware.cuda_properties
    major, minor = DISGUISES[card]

    class Disguised:
        def __init__(self, index):
            self._real = real(index)

        def __getattr__(self, name):
            return {"major": major, "minor": minor}.get(name, getattr(self._real, name))

    monkeypatch.setattr(hardware, "cuda_properties", Disguised)
    monkeypatch.setattr(hardware, "cuda_arch_list", lambda: ["sm_60", "sm_75"])
    made, run = trainer(
        small("model=resnet8", "method=triaccel", "epochs=2", "method.curvature.max_overhead=1.0"), data()
    )
    assert not made.hardware.bf16_native and len(made.hardware.warnings) == 1
    if card == "P100":
        assert made.hardware.kernels == "torch"
    trace = made.train()
    assert "bf16" not in {level for d in trace.decisions for level in d.executed}
    assert trace.decisions[0].requested.count("bf16") == len(trace.layers)
    assert run.epochs[-1].loss_scale_last is not None
    assert run.epochs[-1].evaluation_accuracy_percent > 10.0
