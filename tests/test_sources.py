from __future__ import annotations

import hashlib
import io
import os
import pickle
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from fabricated import check_whole, images, message_of, settings, write_class_folders, write_npz
from PIL import Image
from torchvision.datasets import CIFAR10, CIFAR100

from triaccel_bench.data import load
from triaccel_bench.sources import DataError

BATCHES = [f"data_batch_{i}" for i in range(1, 6)]


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()


def write_pickle(path: Path, content: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(content))


@pytest.fixture
def cifar10(tmp_path, monkeypatch) -> Path:
    """A root with torchvision's CIFAR-10 layout, 5 x 8 + 20 images, whose checksums torchvision is made to expect."""
    root = tmp_path / "root"
    folder = root / CIFAR10.base_folder
    flat = images(60).transpose(0, 3, 1, 2).reshape(60, -1)
    for i, name in enumerate(BATCHES):
        write_pickle(folder / name, {"data": flat[i * 8 : i * 8 + 8], "labels": [j % 10 for j in range(8)]})
    write_pickle(folder / "test_batch", {"data": flat[40:], "labels": [j % 10 for j in range(20)]})
    write_pickle(folder / "batches.meta", {"label_names": [f"class{i}" for i in range(10)]})
    monkeypatch.setattr(CIFAR10, "train_list", [[name, md5(folder / name)] for name in BATCHES])
    monkeypatch.setattr(CIFAR10, "test_list", [["test_batch", md5(folder / "test_batch")]])
    monkeypatch.setattr(CIFAR10, "meta", CIFAR10.meta | {"md5": md5(folder / "batches.meta")})
    monkeypatch.setattr(CIFAR10, "url", (tmp_path / "origin-is-down" / CIFAR10.filename).as_uri())
    return root


@pytest.fixture
def archive(cifar10, monkeypatch) -> Path:
    """The same data as the archive that a mirror serves."""
    path = cifar10.parent / "mirror" / CIFAR10.filename
    path.parent.mkdir()
    with tarfile.open(path, "w:gz") as tar:
        tar.add(cifar10 / CIFAR10.base_folder, CIFAR10.base_folder)
    monkeypatch.setattr(CIFAR10, "tgz_md5", md5(path))
    return path


@pytest.mark.parametrize("inside", [False, True])
def test_torchvisions_folder_by_path(cifar10, inside):
    path = cifar10 / CIFAR10.base_folder if inside else cifar10
    loaded = load(settings(path=str(path)))
    check_whole(loaded)
    assert loaded.classes == tuple(f"class{i}" for i in range(10)) and "cifar-10-batches-py" in loaded.source
    assert np.array_equal(loaded.x_train[9].permute(1, 2, 0).numpy(), images(60)[9])
    assert loaded.y_train[:9].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0]


def test_cifar100_folder_uses_fine_labels(tmp_path, monkeypatch):
    folder = tmp_path / CIFAR100.base_folder
    for name, count in (("train", 40), ("test", 20)):
        data = images(count).transpose(0, 3, 1, 2).reshape(count, -1)
        labels = {"fine_labels": list(range(60, 60 + count)), "coarse_labels": [0] * count}
        write_pickle(folder / name, {"data": data} | labels)
        monkeypatch.setattr(CIFAR100, f"{name}_list", [[name, md5(folder / name)]])
    write_pickle(folder / "meta", {"fine_label_names": [f"fine{i}" for i in range(100)]})
    monkeypatch.setattr(CIFAR100, "meta", CIFAR100.meta | {"md5": md5(folder / "meta")})
    loaded = load(settings(name="cifar100", path=str(folder), num_classes=100))
    check_whole(loaded)
    assert loaded.y_train[0] == 60 and loaded.classes[60] == "fine60"


def test_root_is_read_without_a_download(cifar10):
    check_whole(load(settings(root=str(cifar10))))


@pytest.mark.parametrize("channels_first", [False, True])
def test_npz(tmp_path, channels_first):
    x = images(40).transpose(0, 3, 1, 2) if channels_first else images(40)
    path = write_npz(tmp_path / "a.npz", x_train=x, y_train=(np.arange(40) % 10).astype(np.uint8).reshape(-1, 1),
                     classes=np.array([f"name{i}" for i in range(10)]))  # fmt: skip
    loaded = load(settings(path=path))
    check_whole(loaded)
    assert np.array_equal(loaded.x_train.permute(0, 2, 3, 1).numpy(), images(40))
    assert loaded.classes[3] == "name3" and loaded.y_train[11] == 1


def test_unset_sizes_accept_any_count(tmp_path):
    path = write_npz(tmp_path / "a.npz", x_train=images(23), y_train=np.zeros(23, int))
    check_whole(load(settings(path=path, train_size=None, test_size=None)), train=23)


@pytest.mark.parametrize("suffix", ["png", "bmp", "jpg"])
def test_class_folders(tmp_path, suffix):
    loaded = load(settings(path=write_class_folders(tmp_path, suffix=suffix)))
    check_whole(loaded)
    assert loaded.classes == tuple(f"class{i}" for i in range(10))
    assert loaded.y_train.tolist() == sorted(list(range(10)) * 4)
    if suffix != "jpg":
        assert np.array_equal(loaded.x_train[4].permute(1, 2, 0).numpy(), images(4, seed=1)[0])


def test_class_folders_take_grey_and_palette_images_and_skip_hidden_files(tmp_path):
    path = Path(write_class_folders(tmp_path))
    grey = Image.fromarray(images(1)[0]).convert("L")
    grey.save(path / "train/class0/0.png")
    Image.fromarray(images(1)[0]).convert("P").save(path / "train/class0/1.png")
    (path / "train/class0/.DS_Store").write_bytes(b"x")
    loaded = load(settings(path=str(path)))
    assert np.array_equal(loaded.x_train[0].numpy(), np.stack([np.asarray(grey)] * 3))


def cut(path: Path, share: float = 0.5) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


@pytest.mark.parametrize("name", ["data_batch_3", "test_batch", "batches.meta"])
@pytest.mark.parametrize("damage", ["half", "empty", "missing", "one bit"])
@pytest.mark.parametrize("by", ["path", "root", "root, download"])
def test_a_damaged_cifar_folder_is_refused_by_file_and_check(cifar10, name, damage, by):
    folder = cifar10 / CIFAR10.base_folder
    broken, whole = folder / name, {path: path.read_bytes() for path in folder.iterdir() if path.name != name}
    size = broken.stat().st_size
    if damage == "missing":
        broken.unlink()
    elif damage == "one bit":
        broken.write_bytes(broken.read_bytes()[:-1] + bytes([broken.read_bytes()[-1] ^ 1]))
    else:
        cut(broken, 0.5 if damage == "half" else 0)
    place = {"path": str(cifar10)} if by == "path" else {"root": str(cifar10), "download": "download" in by}
    message = message_of(settings(**place))
    left = {"half": f"({size // 2} bytes)", "empty": "(0 bytes)", "missing": "no such file", "one bit": f"({size} by"}
    assert message.startswith(f"{broken}: expected") and left[damage] in message and "md5" in message
    assert "dataset.path" in message and ("dataset.download" in message or "origin-is-down" in message)
    assert {path: path.read_bytes() for path in folder.iterdir() if path.name != name} == whole, "good files are kept"


@pytest.mark.parametrize("download", [False, True])
@pytest.mark.parametrize("size", [0, 1000])
def test_a_damaged_archive_is_named_and_never_unpacked(cifar10, archive, download, size):
    root = cifar10.parent / "fresh"
    root.mkdir()
    (root / CIFAR10.filename).write_bytes(archive.read_bytes()[:size])
    message = message_of(settings(root=str(root), download=download))
    assert f"{root / CIFAR10.filename}: expected md5 {CIFAR10.tgz_md5}" in message and f"({size} bytes)" in message
    assert ("origin-is-down" in message) is download and "dataset.path" in message
    assert not (root / CIFAR10.base_folder).exists()


def test_nothing_there_and_no_download(tmp_path):
    message = message_of(settings(root=str(tmp_path)))
    assert f"{tmp_path / CIFAR10.base_folder}: expected the folder" in message
    assert "dataset.download=false: set dataset.download=true" in message and "dataset.path" in message


def test_a_good_archive_is_unpacked_without_a_download(cifar10, archive):
    root = cifar10.parent / "fresh"
    root.mkdir()
    archive.rename(root / CIFAR10.filename)
    check_whole(load(settings(root=str(root))))
    assert (root / CIFAR10.filename).exists()


def test_only_damaged_files_are_replaced_from_the_archive(cifar10, archive):
    folder = cifar10 / CIFAR10.base_folder
    cut(folder / "data_batch_2")
    (folder / "test_batch").unlink()
    kept = {name: (folder / name).stat().st_ino for name in ("data_batch_1", "batches.meta")}
    check_whole(load(settings(root=str(cifar10), download=True, mirrors=(archive.parent.as_uri(),))))
    assert kept == {name: (folder / name).stat().st_ino for name in kept}
    assert sorted(path.name for path in cifar10.iterdir()) == [CIFAR10.base_folder, CIFAR10.filename], "no scratch left"


def test_mirrors_are_tried_in_turn_and_every_failure_is_named(cifar10, archive, monkeypatch):
    bad = cifar10.parent / "bad"
    bad.mkdir()
    (bad / CIFAR10.filename).write_bytes(b"<html>quota exceeded</html>")
    mirrors = ("nonsense", "http://127.0.0.1:9/x", bad.as_uri() + "/")
    fresh = cifar10.parent / "fresh"
    message = message_of(settings(root=str(fresh), download=True, mirrors=mirrors))
    for base in ("nonsense", "http://127.0.0.1:9/x", bad.as_uri()):
        assert f"{base}/{CIFAR10.filename} (" in message
    assert CIFAR10.url in message and f"expected md5 {CIFAR10.tgz_md5}, got" in message and "27 bytes" in message
    assert "dataset.path" in message and "dataset.mirrors" in message
    assert list(fresh.iterdir()) == [], "a failed download leaves nothing"
    check_whole(load(settings(root=str(fresh), download=True, mirrors=(*mirrors, archive.parent.as_uri()))))


def test_a_download_cut_off_midway_leaves_nothing(cifar10, archive, monkeypatch):
    class Dying(io.BytesIO):
        def read(self, size=-1):
            if self.tell():
                raise TimeoutError("timed out")
            return super().read(10)

    monkeypatch.setattr("urllib.request.urlopen", lambda url, timeout: Dying(archive.read_bytes()))
    fresh = cifar10.parent / "fresh"
    assert "(timed out)" in message_of(settings(root=str(fresh), download=True))
    assert list(fresh.iterdir()) == []


def test_a_root_that_cannot_be_written(cifar10, archive):
    blocked = cifar10.parent / "file"
    blocked.write_bytes(b"")
    message = message_of(settings(root=str(blocked), download=True, mirrors=(archive.parent.as_uri(),)))
    assert str(blocked) in message and "dataset.path" in message


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"x_train": images(39), "y_train": np.zeros(39, int)}, "40 train images (dataset.train_size), got 39"),
        ({"x_test": images(19), "y_test": np.zeros(19, int)}, "expected 20 test images (dataset.test_size), got 19"),
        ({"y_train": np.zeros(39, int)}, "got 40 images and 39 labels"),
        ({"x_train": images(0), "y_train": np.zeros(0, int)}, "at least one image, got 0 images"),
        ({"x_train": images(40) / 255}, "x_train: expected uint8"),
        ({"x_train": np.full((40, 32, 32, 3), np.nan)}, "x_train: expected uint8"),
        ({"x_train": np.array([None] * 40)}, "expected an .npz of plain arrays"),
        ({"x_train": images(40).astype(np.int64)}, "got int64 [40, 32, 32, 3]; save the pixels as bytes 0..255"),
        ({"x_test": images(20, side=28)}, "dataset.image_size=32), got uint8 [20, 28, 28, 3]"),
        ({"x_train": images(40)[..., :1]}, "got uint8 [40, 32, 32, 1]"),
        ({"x_train": images(40).reshape(40, -1)}, "got uint8 [40, 3072]"),
        ({"x_train": np.uint8(3)}, "got uint8 []"),
        ({"y_train": np.zeros(40)}, "y_train: expected integers ['N'], got float64 [40]"),
        ({"y_train": np.eye(40, 10, dtype=int)}, "got int64 [40, 10]; save one class number an image"),
        ({"y_test": np.int64(3)}, "y_test: expected integers ['N'], got int64 []"),
        ({"y_train": np.arange(40)}, "expected train labels in 0..9 (dataset.num_classes), got 0..39"),
        ({"y_test": np.arange(20) % 10 - 1}, "expected test labels in 0..9 (dataset.num_classes), got -1..8"),
        ({"x_test": None, "y_test": None}, "y_test, got x_train, y_train; add x_test, y_test"),
        ({"classes": np.array(["a", "b"])}, "expected 10 classes (dataset.num_classes), got 2"),
        ({"classes": np.array(["a", 1], dtype=object)}, "expected an .npz of plain arrays"),
    ],
)
def test_a_wrong_npz_is_refused_by_array_and_check(tmp_path, changes, expected):
    message = message_of(settings(path=write_npz(tmp_path / "a.npz", **changes)))
    assert message.startswith(str(tmp_path / "a.npz")) and expected in message and ";" in message


@pytest.mark.parametrize("share", [0, 0.3, 0.999])
def test_a_cut_off_npz_is_refused(tmp_path, share):
    path = Path(write_npz(tmp_path / "a.npz"))
    cut(path, share)
    message = message_of(settings(path=str(path)))
    assert f"{path}: expected a whole .npz archive" in message and f"({path.stat().st_size} bytes)" in message


def test_no_damage_to_an_npz_shows_a_raw_error(tmp_path):
    path = Path(write_npz(tmp_path / "a.npz", x_train=images(40, side=8), x_test=images(20, side=8)))
    whole, random, refused = path.read_bytes(), np.random.default_rng(0), 0
    for _ in range(150):
        content = bytearray(whole)
        for place in random.choice([*range(200), *range(len(whole) - 600, len(whole))], 2):
            content[place] = random.integers(256)
        path.write_bytes(content)
        try:
            load(settings(path=str(path), image_size=8))
        except DataError as error:
            refused += 1
            assert str(error).startswith(str(path)) and ";" in str(error)
    assert refused > 75


def test_an_encrypted_npz_is_refused(tmp_path):
    path = Path(write_npz(tmp_path / "a.npz"))
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(content)
    assert "encrypted" in message_of(settings(path=str(path)))


@pytest.mark.parametrize("kind", ["npy", "flipped bit", "not arrays"])
def test_a_foreign_or_rotten_npz_is_refused(tmp_path, kind):
    path = Path(write_npz(tmp_path / "a.npz"))
    if kind == "npy":
        with path.open("wb") as file:
            np.save(file, images(4))
    elif kind == "flipped bit":
        content = bytearray(path.read_bytes())
        content[len(content) // 3] ^= 1
        path.write_bytes(content)
    else:
        with zipfile.ZipFile(path, "w") as file:
            for key in ("x_train", "y_train", "x_test", "y_test"):
                file.writestr(f"{key}.npy", b"text")
    message = message_of(settings(path=str(path)))
    expected = {
        "npy": f"{path}: expected a whole .npz archive",
        "flipped bit": f"{path}: expected an .npz of plain arrays, got one that cannot be read",
        "not arrays": f"{path}, x_train: expected uint8",
    }
    assert message.startswith(expected[kind])


def test_a_path_that_is_nothing_we_read(tmp_path):
    assert "got no such file or folder; correct dataset.path" in message_of(settings(path=str(tmp_path / "none")))
    assert "a folder holding nothing" in message_of(settings(path=str(tmp_path)))
    (tmp_path / "cifar-100-python").mkdir()
    message = message_of(settings(path=str(tmp_path)))
    assert "expected an .npz file, a folder cifar-10-batches-py" in message and "holding cifar-100-python" in message
    (tmp_path / "a.tar.gz").write_bytes(b"")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    os.mkfifo(tmp_path / "fifo.npz")
    for name in ("a.tar.gz", "fifo.npz"):
        assert "got a file of another kind" in message_of(settings(path=str(tmp_path / name)))
    for name in ("loop", "a.tar.gz/below", "n" * 300):
        assert str(tmp_path / name) in message_of(settings(path=str(tmp_path / name)))
    assert "got a file of another kind" in message_of(settings(path="/dev/zero"))


def break_folders(path: Path, fault: str) -> Path:
    file = path / "train/class3/1.png"
    if fault == "cut off":
        cut(file)
    elif fault == "no image":
        file.write_text("hello")
    elif fault == "wrong size":
        Image.fromarray(images(1, side=28)[0]).save(file)
    elif fault == "16 bit":
        Image.fromarray(np.zeros((32, 32), np.uint16)).save(file)
    elif fault == "no test":
        (path / "test").rename(path / "val")
        return path / "test"
    elif fault == "class missing":
        (path / "test/class3").rename(path / "test/class_three")
        return path
    elif fault == "image missing":
        file.unlink()
        return path
    elif fault == "empty":
        for image in path.glob("test/*/*"):
            image.unlink()
        return path / "test"
    return file


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("cut off", "got a file that cannot be decoded"),
        ("no image", "got a file that cannot be decoded"),
        ("wrong size", "expected 32 x 32 pixels (dataset.image_size), got 28 x 28"),
        ("16 bit", "expected 8 bits a channel, got mode I;16"),
        ("no test", "expected one folder a class, got no such folder; add it"),
        ("class missing", "got class3, class_three in one only"),
        ("image missing", "expected 40 train images (dataset.train_size), got 39"),
        ("empty", "expected images in its class folders, got none"),
    ],
)
def test_broken_class_folders_are_refused_by_file_and_check(tmp_path, fault, expected):
    where = break_folders(Path(write_class_folders(tmp_path)), fault)
    message = message_of(settings(path=str(tmp_path)))
    assert message.startswith(f"{where}: ") and expected in message


def test_files_that_may_not_be_read_are_named(tmp_path, monkeypatch):
    def refuse(folder):
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(Path, "iterdir", refuse)
    message = message_of(settings(path=str(tmp_path)))
    assert message.startswith(f"{tmp_path}: cannot be read (") and "Permission denied" in message


def test_cifar_of_another_size_than_the_settings_say(cifar10):
    assert "expected 50000 train images (dataset.train_size), got 40" in message_of(
        settings(root=str(cifar10), train_size=50000)
    )
    assert "expected train images of 64 pixels a side" in message_of(settings(root=str(cifar10), image_size=64))
    assert "expected train labels in 0..4" in message_of(settings(root=str(cifar10), num_classes=5))
