"""Where MemMax comes from."""

import dataclasses

from tiny import settings

from triaccel_bench import models
from triaccel_bench.configuration import compose
from triaccel_bench.hardware import Hardware, inspect
from triaccel_bench.methods import Method, resolve_budget


def cpu() -> Hardware:
    return inspect("cpu", "auto")


def resolve(*overrides: str, hardware: Hardware | None = None):
    return resolve_budget(settings(*overrides), hardware or cpu(), lambda: 123)


def test_the_fp32_budget_is_measured():
    assert resolve() == (123, "fp32: 1 FP32 step at B=16")


def test_a_number_is_gigabytes_of_a_thousand_millions():
    assert resolve("memory.budget=0.35") == (350_000_000, "set")


def test_the_papers_budget_is_the_printed_fp32_figure():
    assert resolve("memory.budget=paper", "dataset=cifar10", "model=resnet18")[0] == 350_000_000


def test_methods_with_a_fixed_batch_use_no_budget_unless_it_is_enforced():
    assert resolve("method=amp") == (None, None)
    enforced = ("device=cuda", "memory.enforce=true", "memory.meter=vram")
    card = dataclasses.replace(cpu(), total_bytes=16_000_000_000)
    assert resolve("method=amp", *enforced, hardware=card) == (123, "fp32: 1 FP32 step at B=16")


def test_without_a_meter_nothing_is_calibrated():
    assert resolve("memory.meter=vram") == (None, None)


def test_b_goes_no_higher_than_there_are_samples_but_starts_where_it_is_told():
    network = models.build(settings("model=resnet8").model, 10)
    for samples, highest in ((65, 96), (300, 300), (10**6, 512)):
        chosen = compose(["method=triaccel_batch", "model=resnet8"]).method
        assert Method(chosen, network, cpu(), 0, samples).settings.batch.max == highest
