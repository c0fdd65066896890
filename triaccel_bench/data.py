"""Data sets as uint8 tensors on the device, the elastic sampler, and augmentation (section 4.1 of the paper).

Order, crops and flips are drawn per sample index from (seed, epoch) alone, so that two runs
see the same images in the same order whatever their batch sizes do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from triaccel_bench.settings import DatasetSettings
from triaccel_bench.sources import Arrays, DataError, read_cifar, read_path

MIN_LEFTOVER = 8
"""Samples; a smaller remainder of an epoch joins the batch before it: BatchNorm cannot normalise a single value."""

_DIGITS_TEST_SIZE = 360
_ORDER, _AUGMENTATION = 0, 1


@dataclass(frozen=True)
class ImageSet:
    """Images uint8 [N, 3, S, S] and labels int64 [N], contiguous, on the CPU; accuracy is measured on ``eval``."""

    x_train: Tensor
    y_train: Tensor
    x_eval: Tensor
    y_eval: Tensor
    classes: tuple[str, ...]
    fingerprint: str
    """First 16 hex digits of the sha256 over the four arrays."""
    source: str


def load(dataset: DatasetSettings) -> ImageSet:
    """Read or generate the data set, check it against its settings, and set the validation images apart.

    Raises:
        DataError: something is missing, damaged or of another size than the settings say.
    """
    try:
        arrays = _read(dataset)
    except OSError as error:
        raise DataError(f"{dataset.path or dataset.root}: cannot be read ({error}); correct it or its rights") from None
    except (MemoryError, RuntimeError) as error:
        fault = str(error).split("\n")[0]
        raise DataError(
            f"dataset={dataset.name}: expected images that fit into the machine's memory, got none ({fault}); "
            "lower dataset.train_size, dataset.test_size or dataset.image_size"
        ) from None
    _check(arrays.x_train, arrays.y_train, dataset.train_size, "train", arrays.source, dataset)
    _check(arrays.x_test, arrays.y_test, dataset.test_size, "test", arrays.source, dataset)
    classes = arrays.classes or tuple(map(str, range(dataset.num_classes)))
    if len(classes) != dataset.num_classes:
        raise DataError(
            f"{arrays.source}: expected {dataset.num_classes} classes (dataset.num_classes), got {len(classes)}; "
            "correct the setting or the data set"
        )
    tensors = [torch.from_numpy(np.ascontiguousarray(array)) for array in _split(arrays, dataset)]
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(repr((tuple(tensor.shape), tensor.dtype)).encode())
        digest.update(tensor.numpy())
    return ImageSet(*tensors, classes=classes, fingerprint=digest.hexdigest()[:16], source=arrays.source)


def _read(dataset: DatasetSettings) -> Arrays:
    if dataset.name in ("digits", "synthetic"):
        if dataset.path is not None:
            raise DataError(
                f"dataset.path={dataset.path}: expected null, dataset={dataset.name} reads no file; remove dataset.path"
            )
        return _digits(dataset.image_size) if dataset.name == "digits" else _synthetic(dataset)
    if dataset.path is not None:
        return read_path(Path(dataset.path), dataset.name, dataset.image_size)
    return read_cifar(dataset.name, Path(dataset.root), dataset.download, dataset.mirrors)


def _check(
    images: np.ndarray, labels: np.ndarray, size: int | None, part: str, source: str, dataset: DatasetSettings
) -> None:
    if part == "train" and len(images) == 1:
        raise DataError(f"{source}: expected at least 2 train images for BatchNorm to average over, got 1; add some")
    if len(images) != len(labels) or len(images) == 0:
        raise DataError(
            f"{source}: expected one label for each {part} image and at least one image, got {len(images)} images and "
            f"{len(labels)} labels; save them again"
        )
    if size is not None and len(images) != size:
        raise DataError(
            f"{source}: expected {size} {part} images (dataset.{part}_size), got {len(images)}; "
            f"restore the missing ones, or set dataset.{part}_size={len(images)} if this is the whole set"
        )
    if images.shape[1:] != (3, dataset.image_size, dataset.image_size):
        raise DataError(
            f"{source}: expected {part} images of {dataset.image_size} pixels a side (dataset.image_size), "
            f"got {images.shape[-1]}; set dataset.image_size={images.shape[-1]}"
        )
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= dataset.num_classes:
        raise DataError(
            f"{source}: expected {part} labels in 0..{dataset.num_classes - 1} (dataset.num_classes), "
            f"got {low}..{high}; correct the labels or the setting"
        )


def _split(arrays: Arrays, dataset: DatasetSettings) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    if dataset.validation_fraction == 0:
        return arrays.x_train, arrays.y_train, arrays.x_test, arrays.y_test
    total = len(arrays.y_train)
    count = round(dataset.validation_fraction * total)
    if not 0 < count < total - 1:
        raise DataError(
            f"dataset.validation_fraction={dataset.validation_fraction}: expected a share that holds out an image and "
            f"leaves 2 to train on, got {count} of {total} held out; change the fraction"
        )
    held = _stratified(arrays.y_train, count)
    kept = np.setdiff1d(np.arange(total), held)
    x_train, y_train = arrays.x_train[kept], arrays.y_train[kept]
    if dataset.evaluate_on == "validation":
        return x_train, y_train, arrays.x_train[held], arrays.y_train[held]
    return x_train, y_train, arrays.x_test, arrays.y_test


def _stratified(labels: np.ndarray, count: int) -> np.ndarray:
    """Sorted indices of ``count`` samples that keep the shares of the classes (largest remainders)."""
    classes, sizes = np.unique(labels, return_counts=True)
    quota = sizes * count / len(labels)
    chosen = np.floor(quota).astype(np.int64)
    chosen[np.argsort(chosen - quota, kind="stable")[: count - chosen.sum()]] += 1
    # numpy freezes the stream of RandomState and not that of Generator; a split must outlive numpy's releases.
    random = np.random.RandomState(0)
    members = [random.permutation(np.flatnonzero(labels == label))[:n] for label, n in zip(classes, chosen)]
    return np.sort(np.concatenate(members))


def _digits(image_size: int) -> Arrays:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataError(
            "dataset=digits: expected scikit-learn, got no such package; pip install scikit-learn"
        ) from None
    bunch = load_digits()
    # 8 x 8 grey levels 0..16.
    grey = torch.from_numpy(bunch.images).float().div(16).mul(255).unsqueeze(1)
    images = _resized(grey, image_size).round().to(torch.uint8).expand(-1, 3, -1, -1).numpy()
    labels = bunch.target.astype(np.int64)
    test = np.zeros(len(labels), dtype=bool)
    test[_stratified(labels, _DIGITS_TEST_SIZE)] = True
    classes = tuple(map(str, range(10)))
    return Arrays(images[~test], labels[~test], images[test], labels[test], classes, "scikit-learn digits")


def _synthetic(dataset: DatasetSettings) -> Arrays:
    """A smooth pattern a class plus uniform noise, from a fixed seed; the classes take turns."""
    if dataset.train_size is None or dataset.test_size is None:
        raise DataError(
            f"dataset.train_size={dataset.train_size}, dataset.test_size={dataset.test_size}: expected the numbers "
            "of images that dataset=synthetic shall generate, got null; set both"
        )
    train, size = dataset.train_size, dataset.image_size
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(dataset.num_classes, 3, 4, 4, generator=generator).mul(191)
    labels = torch.arange(train + dataset.test_size) % dataset.num_classes
    # At most 191 + 63, so the sum of two bytes cannot overflow.
    images = torch.randint(0, 64, (len(labels), 3, size, size), generator=generator, dtype=torch.uint8)
    images += _resized(coarse, size).to(torch.uint8)[labels]
    x, y = images.numpy(), labels.numpy()
    return Arrays(x[:train], y[:train], x[train:], y[train:], None, "synthetic")


def _resized(images: Tensor, size: int) -> Tensor:
    return functional.interpolate(images, size=(size, size), mode="bilinear", align_corners=False, antialias=False)


def _generator(seed: int, epoch: int, stream: int) -> torch.Generator:
    state = np.random.SeedSequence([seed, epoch, stream]).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0]) >> 1)


class ElasticSampler:
    """One epoch's permutation of ``n`` samples, handed out in batches of whatever size is asked for next.

    Every index comes exactly once. A request that would leave fewer than ``MIN_LEFTOVER``
    samples takes them too, so a batch holds up to ``MIN_LEFTOVER - 1`` more than asked for.
    There is no length: the number of batches is known when the epoch ends. To go on within
    an epoch, take ``taken`` samples from a new sampler of the same seed and epoch.
    """

    def __init__(self, n: int, seed: int, epoch: int, device: torch.device | str) -> None:
        self._order = torch.randperm(n, generator=_generator(seed, epoch, _ORDER)).to(device)
        self._n = n
        self.taken = 0

    @property
    def remaining(self) -> int:
        return self._n - self.taken

    def take(self, size: int) -> Tensor:
        """The next indices, int64 [size .. size + MIN_LEFTOVER - 1], or fewer at the end; never waits for the device.

        Raises:
            ValueError: ``size`` is below 1.
            IndexError: the epoch is used up.
        """
        if size < 1:
            raise ValueError(f"size={size}: expected at least 1 sample a batch; raise the batch size")
        if self.remaining == 0:
            raise IndexError(f"all {self._n} samples of this epoch were taken; start the next epoch's sampler")
        first = self.taken
        self.taken = self._n if self.remaining - size < MIN_LEFTOVER else first + size
        return self._order[first : self.taken]


@dataclass(frozen=True)
class Draws:
    """One epoch's augmentation by sample index: flip bool [n]; top, left int64 [n], in pixels of the padded image."""

    flip: Tensor
    top: Tensor
    left: Tensor


def draw(n: int, dataset: DatasetSettings, seed: int, epoch: int, device: torch.device | str) -> Draws:
    """Flips with probability 1/2 and crops uniform over the padded image (section 4.1), for every sample at once."""
    generator = _generator(seed, epoch, _AUGMENTATION)
    top, left = torch.randint(0, 2 * dataset.crop_padding + 1, (2, n), generator=generator)
    flip = torch.rand(n, generator=generator).lt(0.5) if dataset.flip else torch.zeros(n, dtype=torch.bool)
    return Draws(flip=flip.to(device), top=top.to(device), left=left.to(device))


class DeviceData:
    """An ``ImageSet`` kept on the device as uint8.

    Batches leave it as normalised float32 [B, 3, input_size, input_size] and labels int64 [B];
    ``bytes`` is what images and labels occupy there.
    """

    def __init__(self, images: ImageSet, dataset: DatasetSettings, input_size: int, device: torch.device | str) -> None:
        self.x_train, self.y_train = images.x_train.to(device), images.y_train.to(device)
        self.x_eval, self.y_eval = images.x_eval.to(device), images.y_eval.to(device)
        self.bytes = sum(tensor.nbytes for tensor in (self.x_train, self.y_train, self.x_eval, self.y_eval))
        self.train_count, self.eval_count = len(self.y_train), len(self.y_eval)
        self.mean = torch.tensor(dataset.mean, device=device).view(3, 1, 1)
        self.std = torch.tensor(dataset.std, device=device).view(3, 1, 1)
        self.crop_padding = dataset.crop_padding
        self.input_size = input_size
        self._channels = torch.arange(3, device=device).view(3, 1, 1)
        self._pixels = torch.arange(dataset.image_size, device=device)

    def train_batch(self, indices: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """Gather, crop from the zero-padded image, flip, normalise, resize; never waits for the device."""
        side = len(self._pixels)
        rows = self._pixels + (draws.top[indices] - self.crop_padding).unsqueeze(1)
        mirrored = torch.where(draws.flip[indices].unsqueeze(1), self._pixels.flip(0), self._pixels)
        columns = mirrored + (draws.left[indices] - self.crop_padding).unsqueeze(1)
        rows, columns = rows.view(-1, 1, side, 1), columns.view(-1, 1, 1, side)
        inside = (rows >= 0) & (rows < side) & (columns >= 0) & (columns < side)
        samples = indices.view(-1, 1, 1, 1)
        pixels = self.x_train[samples, self._channels, rows.clamp(0, side - 1), columns.clamp(0, side - 1)]
        return self._normalised(pixels * inside), self.y_train[indices]

    def plain_batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Training images without augmentation, as the curvature probes see them."""
        return self._normalised(self.x_train[indices]), self.y_train[indices]

    def eval_batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Every evaluation image once, in order; the last batch may be smaller."""
        for first in range(0, self.eval_count, size):
            yield self._normalised(self.x_eval[first : first + size]), self.y_eval[first : first + size]

    def _normalised(self, pixels: Tensor) -> Tensor:
        images = pixels.float().div_(255).sub_(self.mean).div_(self.std)
        return images if images.shape[-1] == self.input_size else _resized(images, self.input_size)
