"""Reads images from files: CIFAR as torchvision lays it out, .npz archives and class folders.

Every reader returns ``Arrays`` or raises ``DataError``. A damaged file is never used and a
good one never deleted: what is fetched lands under its final name only once its checksum fits.
"""

from __future__ import annotations

import http.client
import logging
import os
import tarfile
import tempfile
import urllib.request
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from torchvision.datasets import CIFAR10, CIFAR100
from torchvision.datasets.utils import calculate_md5

from triaccel_bench import life

DOWNLOAD_TIMEOUT_SECONDS = 30.0
CHUNK_BYTES = 1 << 16

_log = logging.getLogger(__name__)
_CIFAR: dict[str, type[CIFAR10]] = {"cifar10": CIFAR10, "cifar100": CIFAR100}
_ARCHIVE_BYTES = {"cifar10": 170_498_071, "cifar100": 169_001_437}
_UNPACKED_BYTES = 186_000_000


class DataError(Exception):
    """A data set that cannot be used; the message names the file, the check that failed and the remedy."""


@dataclass(frozen=True)
class Arrays:
    """A data set as stored: images uint8 [N, 3, S, S], labels int64 [N]."""

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    classes: tuple[str, ...] | None
    source: str


def read_path(path: Path, name: str, image_size: int) -> Arrays:
    """Read what the user put at ``path``: an ``.npz`` file, torchvision's folder (or its parent), or class folders."""
    cifar = _CIFAR[name]
    if path.is_file() and path.suffix == ".npz":
        return _read_npz(path, image_size)
    if path.name == cifar.base_folder or (path / cifar.base_folder).is_dir():
        root = path.parent if path.name == cifar.base_folder else path
        fault = _folder_fault(root, cifar)
        if fault is not None:
            raise DataError(f"{fault}; copy it again, or set dataset.path=null and dataset.download=true to fetch it")
        return _cifar_arrays(root, cifar)
    if (path / "train").is_dir() or (path / "test").is_dir():
        return _read_class_folders(path, image_size)
    if path.is_dir():
        found = ", ".join(sorted(entry.name for entry in path.iterdir())[:5]) or "nothing"
        got = f"a folder holding {found}"
    else:
        got = "a file of another kind" if path.exists() else "no such file or folder"
    raise DataError(
        f"{path}: expected an .npz file, a folder {cifar.base_folder}, or class folders train/ and test/, got {got}; "
        "correct dataset.path"
    )


def read_cifar(name: str, root: Path, download: bool, mirrors: tuple[str, ...]) -> Arrays:
    """Read CIFAR from torchvision's place under ``root``; mend it from its archive, fetching that where allowed."""
    cifar = _CIFAR[name]
    fault = _folder_fault(root, cifar)
    if fault is not None:
        archive = root / cifar.filename
        archive_fault = _file_fault(archive, cifar.tgz_md5)
        if archive_fault is not None:
            if archive.exists():
                fault = f"{fault}; {archive_fault}"
            if not download:
                raise DataError(
                    f"{fault}; nothing was fetched because dataset.download=false: set dataset.download=true, "
                    f"put a good {cifar.filename} into {root}, or name a copy by dataset.path"
                )
            _fetch(archive, cifar, mirrors, fault)
        _unpack(archive, root, cifar)
    return _cifar_arrays(root, cifar)


@dataclass(frozen=True)
class Archive:
    """Where CIFAR is fetched from and how much there is of it."""

    name: str
    url: str
    bytes: int
    unpacked_bytes: int


def cifar_archive(name: str) -> Archive:
    cifar, size = _CIFAR[name], _ARCHIVE_BYTES[name]
    return Archive(cifar.filename, cifar.url, size, _UNPACKED_BYTES)


def cifar_fault(name: str, root: Path, whole: bool) -> str | None:
    """What is missing of CIFAR below ``root``, or with ``whole`` damaged; None: neither, or its archive is there."""
    cifar = _CIFAR[name]
    archive = root / cifar.filename
    if whole:
        fault = _folder_fault(root, cifar)
        return fault if fault is not None and _file_fault(archive, cifar.tgz_md5) is not None else None
    files = (root / cifar.base_folder / file for file, _ in _cifar_files(cifar))
    missing = next((file for file in files if not file.is_file()), None)
    if missing is None or archive.is_file():
        return None
    return f"{missing}: expected a file of the data set, got no such file"


def _cifar_files(cifar: type[CIFAR10]) -> list[tuple[str, str]]:
    return [*map(tuple, cifar.train_list + cifar.test_list), (cifar.meta["filename"], cifar.meta["md5"])]


def _folder_fault(root: Path, cifar: type[CIFAR10]) -> str | None:
    folder = root / cifar.base_folder
    if not folder.is_dir():
        return f"{folder}: expected the folder of the data set, got no such folder"
    faults = (_file_fault(folder / name, md5) for name, md5 in _cifar_files(cifar))
    return next((fault for fault in faults if fault is not None), None)


def _file_fault(path: Path, md5: str) -> str | None:
    try:
        size_bytes = path.stat().st_size
        got = calculate_md5(path)
    except FileNotFoundError:
        return f"{path}: expected a file with md5 {md5}, got no such file"
    except OSError as error:
        return f"{path}: expected a file with md5 {md5}, got one that cannot be read ({error})"
    return None if got == md5 else f"{path}: expected md5 {md5}, got {got} ({size_bytes} bytes)"


def _cifar_arrays(root: Path, cifar: type[CIFAR10]) -> Arrays:
    train, test = cifar(str(root), train=True), cifar(str(root), train=False)
    return Arrays(
        x_train=train.data.transpose(0, 3, 1, 2),
        y_train=np.asarray(train.targets, dtype=np.int64),
        x_test=test.data.transpose(0, 3, 1, 2),
        y_test=np.asarray(test.targets, dtype=np.int64),
        classes=tuple(train.classes),
        source=str(root / cifar.base_folder),
    )


def _fetch(archive: Path, cifar: type[CIFAR10], mirrors: tuple[str, ...], fault: str) -> None:
    tried = []
    for url in (*(f"{base.rstrip('/')}/{cifar.filename}" for base in mirrors), cifar.url):
        try:
            archive.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=archive.parent, prefix=".fetching-") as folder:
                part = Path(folder) / cifar.filename
                _log.info("fetching %s into %s", url, archive.parent)
                with urllib.request.urlopen(url, timeout=DOWNLOAD_TIMEOUT_SECONDS) as response, part.open("wb") as file:
                    while chunk := response.read(CHUNK_BYTES):
                        life.sign()
                        file.write(chunk)
                got = calculate_md5(part)
                if got == cifar.tgz_md5:
                    os.replace(part, archive)
                    return
                tried.append(f"{url} (expected md5 {cifar.tgz_md5}, got {got}, {part.stat().st_size} bytes)")
        except (OSError, http.client.HTTPException, ValueError) as error:
            tried.append(f"{url} ({error})")
    raise DataError(
        f"{fault}; tried in vain: {', '.join(tried)}; name a local copy by dataset.path, put {cifar.filename} into "
        f"{archive.parent}, or add a base address to dataset.mirrors"
    )


def _unpack(archive: Path, root: Path, cifar: type[CIFAR10]) -> None:
    """Take the files that are missing or damaged out of a verified archive."""
    folder = root / cifar.base_folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tarfile.open(archive) as tar, tempfile.TemporaryDirectory(dir=root, prefix=".unpacking-") as scratch:
            for name, md5 in _cifar_files(cifar):
                if _file_fault(folder / name, md5) is not None:
                    part = Path(scratch) / name
                    part.write_bytes(tar.extractfile(f"{cifar.base_folder}/{name}").read())
                    os.replace(part, folder / name)
    except OSError as error:
        raise DataError(f"{folder}: cannot be written ({error}); name a writable folder by dataset.root") from None


def _read_npz(path: Path, image_size: int) -> Arrays:
    required = ("x_train", "y_train", "x_test", "y_test")
    if not zipfile.is_zipfile(path):
        raise DataError(
            f"{path}: expected a whole .npz archive, got a cut-off or foreign file ({path.stat().st_size} bytes); "
            "copy or save it again"
        )
    try:
        with np.load(path, allow_pickle=False) as file:
            missing = [key for key in required if key not in file.files]
            if missing:
                raise DataError(
                    f"{path}: expected arrays {', '.join(required)}, got {', '.join(file.files) or 'none'}; "
                    f"add {', '.join(missing)}"
                )
            arrays = {key: np.asarray(file[key]) for key in (*required, "classes") if key in file.files}
    except DataError:
        raise
    except Exception as error:
        # Damaged bytes make zipfile, zlib and numpy's header parser raise a dozen kinds between them.
        raise DataError(
            f"{path}: expected an .npz of plain arrays, got one that cannot be read ({error}); copy or save it again"
        ) from None
    return Arrays(
        **{key: _images(arrays[key], f"{path}, {key}", image_size) for key in ("x_train", "x_test")},
        **{key: _labels(arrays[key], f"{path}, {key}") for key in ("y_train", "y_test")},
        classes=tuple(map(str, arrays["classes"].ravel())) if "classes" in arrays else None,
        source=str(path),
    )


def _images(images: np.ndarray, where: str, image_size: int) -> np.ndarray:
    last, first = (image_size, image_size, 3), (3, image_size, image_size)
    if images.dtype != np.uint8 or images.shape[1:] not in (last, first):
        raise DataError(
            f"{where}: expected uint8 {['N', *last]} or {['N', *first]} (dataset.image_size={image_size}), "
            f"got {images.dtype} {list(images.shape)}; save the pixels as bytes 0..255 in that shape"
        )
    return images if images.shape[1:] == first else images.transpose(0, 3, 1, 2)


def _labels(labels: np.ndarray, where: str) -> np.ndarray:
    # Keras keeps its labels as a column.
    if labels.dtype.kind not in "iu" or labels.ndim == 0 or labels.shape[1:] not in ((), (1,)):
        raise DataError(
            f"{where}: expected integers ['N'], got {labels.dtype} {list(labels.shape)}; save one class number an image"
        )
    return labels.reshape(-1).astype(np.int64)


def _read_class_folders(path: Path, image_size: int) -> Arrays:
    names = {part: _class_names(path / part) for part in ("train", "test")}
    if names["train"] != names["test"]:
        odd = ", ".join(sorted(set(names["train"]) ^ set(names["test"])))
        raise DataError(f"{path}: expected the same classes in train/ and test/, got {odd} in one only; complete them")
    parts = {}
    for part in ("train", "test"):
        files = [
            (file, label)
            for label, name in enumerate(names[part])
            for file in sorted((path / part / name).iterdir())
            if file.is_file() and not file.name.startswith(".")
        ]
        if not files:
            raise DataError(f"{path / part}: expected images in its class folders, got none; add them")
        parts[f"x_{part}"] = np.stack([_read_image(file, image_size) for file, _ in files]).transpose(0, 3, 1, 2)
        parts[f"y_{part}"] = np.array([label for _, label in files], dtype=np.int64)
    return Arrays(**parts, classes=tuple(names["train"]), source=str(path))


def _class_names(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise DataError(f"{folder}: expected one folder a class, got no such folder; add it")
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _read_image(file: Path, image_size: int) -> np.ndarray:
    remedy = "resize or convert it, or take it out of the class folder"
    life.sign()
    try:
        with Image.open(file) as image:
            if image.size != (image_size, image_size):
                raise DataError(
                    f"{file}: expected {image_size} x {image_size} pixels (dataset.image_size), "
                    f"got {image.width} x {image.height}; {remedy}"
                )
            if image.mode.startswith(("I", "F")):
                raise DataError(f"{file}: expected 8 bits a channel, got mode {image.mode}; {remedy}")
            return np.asarray(image.convert("RGB"))
    except DataError:
        raise
    except Exception as error:
        # Pillow's decoders raise whatever damaged bytes lead them to.
        raise DataError(f"{file}: expected an image, got a file that cannot be decoded ({error}); {remedy}") from None
