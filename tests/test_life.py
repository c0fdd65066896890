"""Whatever takes its time gives signs of life on the way, so that only a hang is silent."""

import io

import numpy as np
import pytest
import torch
from fabricated import settings as dataset
from fabricated import write_class_folders
from tiny import engine, settings, trainer

from triaccel_bench import curvature, life, sources
from triaccel_bench.data import load


@pytest.fixture
def signs(monkeypatch):
    """All that are given, unlike in a run, where one a second is passed on."""
    monkeypatch.setattr(life, "EVERY_SECONDS", 0.0)
    given = []
    with life.watched(lambda: given.append(1)):
        yield given


def batch(size: int = 16):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(size, 3, 8, 8, generator=generator), torch.arange(size) % 10


def test_a_sign_for_each_step_and_each_batch_of_an_evaluation(signs):
    made = engine("method=fp32")
    for _ in range(3):
        made.step(*batch())
    assert len(signs) == 3
    made.evaluate([batch(), batch(), batch(8)])
    assert len(signs) == 6


def test_calibration_and_warm_up_give_them_too(signs):
    trainer(settings("method=triaccel", "memory.calibration_steps=5"))
    assert len(signs) >= 5


@pytest.mark.parametrize(("asked", "least"), [
    ("estimator=hessian product=jacobian", 10), ("estimator=hessian product=exact", 20),
    ("estimator=hessian product=difference", 20), ("estimator=fisher", 10),
])  # fmt: skip
def test_a_sign_for_each_part_of_a_probe(signs, asked, least):
    """For ten layers and ten classes."""
    overrides = [f"method.curvature.{part}" for part in asked.split()]
    chosen = settings("method=triaccel", *overrides, "method.curvature.iterations=2", "method.curvature.k=2")
    made = engine("method=fp32")
    network = made.network
    images, labels = batch(8)
    curvature.eigenvalues(network.module, network.layers, images, labels, chosen.method.curvature)
    assert len(signs) >= least


def test_a_sign_for_each_image_of_a_folder_and_each_part_of_a_download(signs, tmp_path, monkeypatch):
    load(dataset(path=write_class_folders(tmp_path / "images")))
    assert len(signs) == 60
    signs.clear()
    monkeypatch.setattr("urllib.request.urlopen", lambda url, timeout: io.BytesIO(bytes(5 * sources.CHUNK_BYTES - 1)))
    with pytest.raises(sources.DataError, match="expected md5"):
        load(dataset(root=str(tmp_path / "fresh"), download=True))
    assert len(signs) == 5


def test_one_a_second_is_passed_on_and_none_where_nobody_watches(monkeypatch):
    times = iter(np.arange(0.0, 100.0, 0.25).tolist())
    monkeypatch.setattr(life.time, "monotonic", lambda: next(times))
    given = []
    life.sign()
    with life.watched(lambda: given.append(1)):
        for _ in range(40):
            life.sign()
    life.sign()
    assert 6 <= len(given) <= 10
