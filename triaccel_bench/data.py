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

from triaccel_bench.kernels.batch import LEVELS, BatchAssembler
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


def _permutation(n: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(n, generator=_generator(seed, epoch, _ORDER))


class ElasticSampler:
    """One epoch's permutation of ``n`` samples, handed out in batches of whatever size is asked for next.

    Every index comes exactly once. A request that would leave fewer than ``MIN_LEFTOVER``
    samples takes them too, so a batch holds up to ``MIN_LEFTOVER - 1`` more than asked for.
    There is no length: the number of batches is known when the epoch ends. To go on within
    an epoch, let a new sampler of the same seed and epoch ``skip`` what was ``taken``.

    Args:
        order: int64 ``[n]``, this epoch's permutation where it already lies on the device
            (``DeviceData.order``); ``None`` draws it and moves it there.
    """

    def __init__(self, n: int, seed: int, epoch: int, device: torch.device | str, order: Tensor | None = None) -> None:
        self._order = _permutation(n, seed, epoch).to(device) if order is None else order
        self._n = n
        self.taken = 0

    @property
    def remaining(self) -> int:
        return self._n - self.taken

    def take(self, size: int) -> Tensor:
        """The next indices, int64 [size .. size + MIN_LEFTOVER - 1], or fewer at the end: a view of the order.

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

    def skip(self, count: int) -> None:
        """The first ``count`` indices have been used before.

        Raises:
            ValueError: there are fewer.
        """
        if not 0 <= count <= self._n:
            raise ValueError(f"count={count}: expected 0 to {self._n} samples; skip what was taken")
        self.taken = count

    def put_back(self, count: int) -> None:
        """The last ``count`` indices were not used: the next batch begins with them.

        Raises:
            ValueError: fewer were taken.
        """
        if count > self.taken:
            raise ValueError(f"count={count}: expected at most {self.taken} samples taken; put back what was taken")
        self.taken -= count


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
    """An ``ImageSet`` kept on the device as uint8, and the current epoch's order and augmentation beside it.

    Batches leave it normalised, [B, 3, input_size, input_size], with labels int64 [B]. One with
    draws is gathered, cropped from the zero-padded image, flipped, normalised and resized, and
    nothing waits for the device.

    Args:
        kernels: ``"triton"`` (one launch a batch) or ``"torch"`` (the reference).
        channels_last: the memory layout of the batches; False is contiguous.

    Attributes:
        bytes: what images and labels occupy. The epoch's state below is not counted: it belongs to
            training, like an optimizer's, and takes 13 bytes a sample (0.65 MB for CIFAR-10).
        order: int64 ``[train_count]``, the epoch's permutation.
        flip, top, left: bool, int16 and int16 ``[train_count]``, its augmentation by sample index.

    These four never move, so that a captured graph finds each epoch's values in them. Before the
    first ``begin_epoch`` they hold the samples in order, neither flipped nor shifted.

    Raises:
        ValueError: ``kernels`` cannot run on the device.
    """

    def __init__(
        self,
        images: ImageSet,
        dataset: DatasetSettings,
        input_size: int,
        device: torch.device | str,
        kernels: str = "torch",
        channels_last: bool = False,
    ) -> None:
        self.x_train, self.y_train = images.x_train.to(device), images.y_train.to(device)
        self.x_eval, self.y_eval = images.x_eval.to(device), images.y_eval.to(device)
        self.bytes = sum(tensor.nbytes for tensor in (self.x_train, self.y_train, self.x_eval, self.y_eval))
        self.train_count, self.eval_count = len(self.y_train), len(self.y_eval)
        self.dataset, self.input_size = dataset, input_size
        self._layout = torch.channels_last if channels_last else torch.contiguous_format
        table = _normalised_levels(dataset).to(device)
        self._train, self._eval = (
            BatchAssembler(pixels, labels, table, dataset.crop_padding, kernels, input_size)
            for pixels, labels in ((self.x_train, self.y_train), (self.x_eval, self.y_eval))
        )
        self._eval_order = torch.arange(self.eval_count, device=device)
        self.order = torch.arange(self.train_count, device=device)
        self.flip = torch.zeros(self.train_count, dtype=torch.bool, device=device)
        self.top, self.left = (
            torch.full((self.train_count,), dataset.crop_padding, dtype=torch.int16, device=device) for _ in range(2)
        )
        self._prepared: tuple[tuple[int, int], list[Tensor]] | None = None

    def prepare(self, seed: int, epoch: int) -> None:
        """Draw a coming epoch on the host, while the device is still busy with the one before; changes no batch."""
        if self._prepared is not None and self._prepared[0] == (seed, epoch):
            return
        draws = draw(self.train_count, self.dataset, seed, epoch, "cpu")
        drawn = [_permutation(self.train_count, seed, epoch), draws.flip, draws.top.short(), draws.left.short()]
        if self.order.device.type == "cuda":
            # New ones each time: the allocator holds one back until copies from it are done, an old one would be
            # overwritten under them.
            drawn = [tensor.pin_memory() for tensor in drawn]
        self._prepared = (seed, epoch), drawn

    def begin_epoch(self, seed: int, epoch: int) -> ElasticSampler:
        """Make an epoch's order and augmentation current, drawing them now if ``prepare`` did not; returns its sampler.

        They are copied on the current stream, without a wait. Batches taken from an earlier epoch's
        sampler are views of ``order`` and change with it.
        """
        self.prepare(seed, epoch)
        drawn, self._prepared = self._prepared[1], None
        for current, new in zip((self.order, self.flip, self.top, self.left), drawn):
            current.copy_(new, non_blocking=True)
        return ElasticSampler(self.train_count, seed, epoch, self.order.device, self.order)

    def input_buffers(self, batch: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Uninitialised images of this ``dtype`` (fp16, bf16 or fp32) and labels, for one batch of this size."""
        shape, device = (batch, 3, self.input_size, self.input_size), self.order.device
        images = torch.empty(shape, dtype=dtype, device=device, memory_format=self._layout)
        return images, torch.empty(batch, dtype=torch.int64, device=device)

    def fill(self, images: Tensor, labels: Tensor, indices: Tensor) -> None:
        """Write the training batch ``indices`` with this epoch's draws into ``input_buffers``; may be captured."""
        self._train.assemble(indices, self.flip, self.top, self.left, images, labels)

    def train_batch(self, indices: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """A new training batch, float32, with the draws given."""
        images, labels = self.input_buffers(len(indices))
        self._train.assemble(indices, draws.flip, draws.top, draws.left, images, labels)
        return images, labels

    def plain_batch(self, indices: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Training images without augmentation, as the curvature probes see them."""
        images, labels = self.input_buffers(len(indices), dtype)
        self._train.assemble_plain(indices, images, labels)
        return images, labels

    def eval_batches(self, size: int, dtype: torch.dtype = torch.float32) -> Iterator[tuple[Tensor, Tensor]]:
        """Every evaluation image once, in order; the last batch may be smaller."""
        for indices in self._eval_order.split(size):
            images, labels = self.input_buffers(len(indices), dtype)
            self._eval.assemble_plain(indices, images, labels)
            yield images, labels


def _normalised_levels(dataset: DatasetSettings) -> Tensor:
    """f32 [3, 256]: (level / 255 - mean) / std. From the host: a device's division by 255 may round differently."""
    mean, std = (torch.tensor(values).view(3, 1) for values in (dataset.mean, dataset.std))
    return torch.arange(LEVELS, dtype=torch.float32).expand(3, LEVELS).div(255).sub_(mean).div_(std)
