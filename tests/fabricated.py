"""Tiny data sets in the shapes that users bring, for the tests of ``sources`` and ``data``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from triaccel_bench.data import DataError, ImageSet, load
from triaccel_bench.settings import DatasetSettings


def settings(**changes) -> DatasetSettings:
    values = dict(
        name="cifar10", path=None, root="unused", download=False, mirrors=(), num_classes=10, image_size=32,
        train_size=40, test_size=20, flip=True, crop_padding=4, mean=(0.49, 0.48, 0.45), std=(0.25, 0.24, 0.26),
        validation_fraction=0.0, evaluate_on="test",
    )  # fmt: skip
    return DatasetSettings(**(values | changes))


def images(count: int, side: int = 32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, side, side, 3), dtype=np.uint8)


def write_npz(path: Path, **changes) -> str:
    arrays = dict(
        x_train=images(40), y_train=np.arange(40) % 10, x_test=images(20, seed=1), y_test=np.arange(20) % 10
    ) | changes  # fmt: skip
    np.savez(path, **{key: value for key, value in arrays.items() if value is not None})
    return str(path)


def write_class_folders(path: Path, side: int = 32, suffix: str = "png") -> str:
    for part, count in (("train", 4), ("test", 2)):
        for label in range(10):
            folder = path / part / f"class{label}"
            folder.mkdir(parents=True)
            for i, pixels in enumerate(images(count, side, seed=label)):
                Image.fromarray(pixels).save(folder / f"{i}.{suffix}")
    return str(path)


def check_whole(loaded: ImageSet, train: int = 40, test: int = 20, side: int = 32) -> None:
    for x, y, count in ((loaded.x_train, loaded.y_train, train), (loaded.x_eval, loaded.y_eval, test)):
        assert x.dtype == torch.uint8 and x.shape == (count, 3, side, side) and x.is_contiguous()
        assert y.dtype == torch.int64 and y.shape == (count,) and x.device.type == "cpu"
    assert len(loaded.fingerprint) == 16 and int(loaded.fingerprint, 16) >= 0


def message_of(dataset: DatasetSettings) -> str:
    with pytest.raises(DataError) as caught:
        load(dataset)
    assert caught.value.__cause__ is None and caught.value.__suppress_context__ is (
        caught.value.__context__ is not None
    ), "a raw error must not be shown behind the message"
    return str(caught.value)
