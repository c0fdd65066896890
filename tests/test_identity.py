"""A cell's name follows what can change its results, and nothing else."""

import os

import pytest

from triaccel_bench.configuration import compose
from triaccel_bench.identity import identifying_settings, identity


def cell(*overrides: str, device: str = "card") -> str:
    return identity(compose(list(overrides)), device)


@pytest.mark.parametrize(
    "override",
    [
        "seeds=[5]",
        "results.root=/elsewhere",
        "progress=plain",
        "dataset.root=/big/disk",
        "dataset.download=false",
        "runner.timeout=5",
        "runner.max_minutes=700",
        "on_failure=stop",
        "tracker=tensorboard",
    ],
)
def test_a_cell_ignores_what_cannot_change_a_result(override):
    assert cell(override) == cell()


@pytest.mark.parametrize(
    "override",
    [
        "epochs=3",
        "optimizer.lr=0.2",
        "method.curvature.alpha=0.1",
        "model=resnet8",
        "memory.budget=device",
        "method.capture.max_overhead=0.5",
        "engine.graphs=false",
        "model.layout=nchw",
    ],
)
def test_a_cell_follows_what_can(override):
    assert cell(override) != cell()
    assert cell(device="other card") != cell()


@pytest.mark.parametrize("override", [
    "method.curvature.alpha=0.1", "method.precision.beta=0.5", "method.batch.up=8", "memory.budget=device",
    "method.control.plan_changes_per_epoch=3", "method.capture.max_overhead=0.5",
])  # fmt: skip
def test_fp32_ignores_switches_that_are_off(override):
    assert cell("method=fp32", override) == cell("method=fp32")


@pytest.mark.parametrize(("method", "override"), [
    ("triaccel_batch", "method.precision.beta=0.5"), ("triaccel_plus", "method.curvature.tau_curv=1.0"), ("triaccel", "method.batch.head_start=2.0"),
    ("triaccel_precision method.curvature.promotion=true", "method.curvature.alpha=0.5"),
    ("fp32", "method.update.momentum_dtype=bf16"),
])  # fmt: skip
def test_settings_that_only_another_choice_reads_are_left_out(method, override):
    given = f"method={method}".split()
    assert cell(*given, override) == cell(*given)


def test_a_cell_without_a_head_start_has_the_name_that_it_had_before_there_was_one():
    dumped = compose(["method=triaccel_plus", "method.batch.head_start=1"]).model_dump(mode="json")
    assert "head_start" not in identifying_settings(dumped)["method"]["batch"]


@pytest.mark.parametrize(("method", "override"), [
    ("triaccel_plus", "method.batch.growth=model"), ("triaccel_plus", "method.curvature.alpha=0.5"),
    ("triaccel_precision method.curvature.promotion=true", "method.curvature.tau_curv=1.0"), ("amp", "method.update.momentum_dtype=bf16"), ("triaccel_plus", "method.batch.head_start=3.0"),
    ("fp32", "method.update.in_backward=true"), ("fp32", "model.checkpointing=true"),
])  # fmt: skip
def test_and_count_where_they_are_read(method, override):
    given = f"method={method}".split()
    assert cell(*given, override) != cell(*given)


@pytest.mark.parametrize("override", ["memory.budget=0.3", "memory.calibration_steps=5"])
def test_an_enforced_budget_counts_for_every_method(override):
    assert cell("method=fp32", "memory.enforce=true", override) != cell("method=fp32", "memory.enforce=true")


@pytest.mark.parametrize("key", ["dataset.path", "model.weights"])
def test_a_cell_follows_the_files_it_reads(tmp_path, monkeypatch, key):
    path = tmp_path / "file.npz"
    path.write_bytes(b"one")
    first = cell(f"{key}={path}")
    monkeypatch.chdir(tmp_path)
    assert cell(f"{key}=file.npz") == first
    path.write_bytes(b"two")
    assert cell(f"{key}={path}") != first


@pytest.mark.parametrize("key", ["dataset.path", "model.weights"])
def test_a_file_counts_by_its_content_wherever_it_lies(tmp_path, key):
    first, second = tmp_path / "a.npz", tmp_path / "there" / "b.npz"
    second.parent.mkdir()
    for path, age in ((first, 10**9), (second, 2 * 10**9)):
        path.write_bytes(b"one")
        os.utime(path, (age, age))
    assert cell(f"{key}={first}") == cell(f"{key}={second}")


def test_a_folder_counts_by_what_is_below_it_wherever_it_lies(tmp_path):
    found = []
    for name in ("here", "there"):
        picture = tmp_path / name / "train" / "cat" / "1.png"
        picture.parent.mkdir(parents=True)
        picture.write_bytes(b"one")
        os.utime(picture, (10**9, 10**9))
        found.append(cell(f"dataset.path={tmp_path / name}"))
    assert found[0] == found[1]
    os.utime(picture, (2 * 10**9, 2 * 10**9))
    assert cell(f"dataset.path={tmp_path / name}") != found[0]


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_cell_stands_a_file_that_cannot_be_read(tmp_path):
    path = tmp_path / "file.npz"
    path.write_bytes(b"one")
    path.chmod(0)
    assert len(cell(f"dataset.path={path}")) == 12


def test_a_cell_stands_a_path_that_leads_nowhere(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path in (tmp_path / "loop", tmp_path / "none", "x" * 300, "/dev/null/x"):
        assert len(cell(f"dataset.path={path}")) == 12


def test_a_cell_follows_the_files_of_a_folder(tmp_path):
    (tmp_path / "train" / "cat").mkdir(parents=True)
    picture = tmp_path / "train" / "cat" / "1.png"
    picture.write_bytes(b"one")
    first = cell(f"dataset.path={tmp_path}")
    assert cell(f"dataset.path={tmp_path}") == first
    picture.write_bytes(b"another")
    assert cell(f"dataset.path={tmp_path}") != first
