"""Lower bounds: counted as told, never above what a step is seen to keep, and from rates that cards are sold with."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from triaccel_bench import bounds, models
from triaccel_bench.bounds import FP32, MASTERED, NARROWEST, NetworkShape, Widths
from triaccel_bench.configuration import compose
from triaccel_bench.meters import TensorMeter

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import make_bounds  # noqa: E402

SMALL = NetworkShape("small", 8, parameters=100, head_inputs=10, normalised=60, normalised_most=20, products=1000)


@pytest.mark.parametrize("network", [("resnet8", 32), ("efficientnet_b0", 32)])
def test_the_file_holds_what_is_counted(network):
    assert make_bounds.count(*network) == bounds.shape_of(*network)


def test_the_script_tells_a_file_that_is_out_of_date(monkeypatch, capsys):
    monkeypatch.setattr(make_bounds, "NETWORKS", (("resnet8", 32),))
    assert make_bounds.main(["--check"]) == 1
    assert "run scripts/make_bounds.py" in capsys.readouterr().out
    monkeypatch.setattr(bounds, "dump", lambda shapes: (ROOT / "triaccel_bench" / bounds.FILE).read_text())
    assert make_bounds.main(["--check"]) == 0


def test_resnet8_by_hand():
    """Three stages of three normalised results each, the last two with a shortcut; kernels of 3 with padding of 1."""
    shape = bounds.shape_of("resnet8", 32)
    assert shape.normalised == 3 * (16 * 32**2 + 32 * 16**2 + 64 * 8**2)
    assert shape.normalised_most == 16 * 32**2
    first = 32**2 * 3 * 16
    # A stride of 2 takes two products a dimension of a kernel of three, a shortcut of one tap takes one.
    second = (2 * 16) ** 2 * 16 * 32 + 16**2 * 32 * 32 + 16**2 * 16 * 32
    third = (2 * 8) ** 2 * 32 * 64 + 8**2 * 64 * 64 + 8**2 * 32 * 64
    forward = first + 2 * 32**2 * 16 * 16 + second + third
    assert shape.products == 3 * forward - first
    convolutions = 9 * (3 * 16 + 2 * 16 * 16 + 16 * 32 + 32 * 32 + 32 * 64 + 64 * 64) + 16 * 32 + 32 * 64
    assert shape.parameters == convolutions + 2 * 3 * (16 + 32 + 64)


@pytest.mark.parametrize(
    ("geometry", "least"),
    [
        ((32, 32, 3, 1, 1), 32),
        ((32, 32, 1, 1, 0), 32),
        ((32, 16, 7, 2, 3), 32),
        ((4, 2, 2, 2, 0), 4),
        ((2, 1, 3, 2, 1), 2),
        ((1, 1, 3, 1, 1), 1),
        ((1, 1, 3, 2, 1), 1),
        ((1, 3, 1, 1, 1), 1),
    ],
    ids="3 taps,1 tap,stem,patches,half padding,one pixel,one pixel stride 2,results of padding".split(","),
)
def test_products_along_a_dimension(geometry, least):
    assert make_bounds._least(*geometry) == least


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("model", "size"), make_bounds.NETWORKS)
def test_no_bound_is_above_what_a_step_keeps(model, size, checkpointing):
    overrides = [f"model={model}", f"model.input_size={size}", f"model.checkpointing={str(checkpointing).lower()}"]
    with torch.device("meta"):
        network = models.build(compose(overrides).model, 10)
        images = torch.empty(4, 3, size, size)
    momentum = sum(parameter.nbytes for parameter in network.module.parameters())
    meter = TensorMeter(network.module, momentum)
    with meter.recording():
        network.module.train()(images).sum().backward()
    shape = bounds.shape_of(model, size)
    assert bounds.memory_bytes(shape, 10, 4, FP32, checkpointing) <= meter.largest.total
    kept = bounds.memory_bytes(shape, 10, 4, Widths(0, 0, 0, 4), checkpointing)
    assert 0 < kept <= meter.largest.saved
    assert shape.parameters_for(10) * 4 == momentum


def test_memory_is_the_larger_of_two_moments():
    classes = 10
    parameters = 100 + 10 * 11
    assert SMALL.parameters_for(classes) == parameters
    few, many = 1, 1000
    assert bounds.memory_bytes(SMALL, classes, few, FP32, rerun=False) == parameters * 12
    assert bounds.memory_bytes(SMALL, classes, many, FP32, rerun=False) == parameters * 8 + 60 * many * 4
    assert bounds.memory_bytes(SMALL, classes, many, FP32, rerun=True) == parameters * 8 + 40 * many * 4
    assert bounds.memory_bytes(SMALL, classes, many, MASTERED, rerun=True) == parameters * 8 + 40 * many * 2
    assert bounds.memory_bytes(SMALL, classes, many, NARROWEST, rerun=True) == parameters * 4 + 40 * many * 2
    assert bounds.memory_bytes(SMALL, classes, 0, Widths(gradients=0), rerun=True) == parameters * 8


def test_rerunning_never_raises_the_bound():
    one_norm = NetworkShape("one", 8, 100, 10, normalised=20, normalised_most=20, products=1000)
    both = [bounds.memory_bytes(one_norm, 10, 1000, FP32, rerun) for rerun in (False, True)]
    assert both[0] == both[1]


def test_seconds_are_two_operations_a_product():
    assert bounds.seconds(SMALL, 10, images=5, rate=100.0) == 2 * (1000 + 3 * 10 * 10) * 5 / 100.0


@pytest.mark.parametrize(
    ("card", "tflops"),
    [
        ("T4", {"fp32": 8.1, "16 bit": 65}),
        ("P100", {"fp32": 10.6, "16 bit": 21.2}),
        ("A100", {"fp32": 19.5, "tf32": 156, "16 bit": 312}),
    ],
)
def test_rates_are_those_of_the_data_sheets(card, tflops):
    for arithmetic, rate in tflops.items():
        assert bounds.CARDS[card].rate(arithmetic) / 1e12 == pytest.approx(rate, rel=0.01)


def test_rates_of_hopper_are_no_lower_than_its_data_sheet():
    """That quotes matrix units at a lower clock than the highest."""
    rates = {"fp32": 66.9, "tf32": 494.7, "16 bit": 989.4}
    for card in ("H100", "H200"):
        assert all(bounds.CARDS[card].rate(name) / 1e12 >= rate for name, rate in rates.items())


def test_a_card_without_units_runs_at_its_rate_for_fp32():
    assert bounds.CARDS["T4"].rate("tf32") == bounds.CARDS["T4"].rate("fp32")


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("Tesla T4", "T4"),
        ("Tesla P100-PCIE-16GB", "P100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GH200 480GB", None),
        ("Quadro T400", None),
        ("CPU (x86_64)", None),
        (None, None),
    ],
)
def test_cards_by_name(name, card):
    assert bounds.card_of(name) is (bounds.CARDS[card] if card else None)


def test_what_was_not_counted_has_no_shape():
    assert bounds.shape_of("resnet18", 33) is None
    assert bounds.shape_of("vit", 32) is None


def test_the_file_is_packaged():
    assert f'"{bounds.FILE}"' in (ROOT / "pyproject.toml").read_text()
