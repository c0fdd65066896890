"""The command line as a user meets it: sweeps, reuse, exit codes, and one sentence for every mistake."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "triaccel_bench.cli"]
TINY = [
    "+experiment=smoke", "dataset.image_size=8", "model.input_size=8", "dataset.train_size=64", "dataset.test_size=32",
    "epochs=1", "method.batch.initial=16", "method.batch.min=8",
]  # fmt: skip


def run(*arguments: str, root: Path, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*COMMAND, *arguments, f"results.root={root}"], capture_output=True, text=True, timeout=120, cwd=root,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment},
    )  # fmt: skip


def records(root: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(root.rglob("run.json"))]


def test_help_names_groups_and_settings(tmp_path):
    done = run("--help", root=tmp_path)
    assert done.returncode == 0
    for word in ("triaccel_curvature", "efficientnet_b0", "cifar100", "max_overhead", "triaccel-bench"):
        assert word in done.stdout


def test_a_sweep_runs_and_a_second_one_reuses_it(tmp_path):
    command = ["-m", *TINY, "method=fp32,triaccel", "seeds=[0,1]"]
    first = run(*command, root=tmp_path)
    assert first.returncode == 0, first.stdout + first.stderr
    found = records(tmp_path)
    assert sorted((r["method"], r["seed"], r["status"]) for r in found) == [
        ("fp32", 0, "done"), ("fp32", 1, "done"), ("triaccel", 0, "done"), ("triaccel", 1, "done"),
    ]  # fmt: skip
    for record in found:
        assert record["settings"]["method"]["name"] == record["method"]
        assert record["provenance"]["torch"] and record["provenance"]["device_name"]
        assert record["epochs"][0]["evaluation_samples"] == 32
    assert "tensors (not VRAM)" in first.stdout
    second = run(*command, root=tmp_path)
    assert second.returncode == 0
    assert second.stdout.count("reused") == 4
    assert records(tmp_path) == found


def test_a_run_without_memory_meter_says_so_once_and_leaves_figures_empty(tmp_path):
    done = run(*TINY, "memory.meter=vram", root=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("VRAM monitor off") == 1
    (record,) = records(tmp_path)
    epoch = record["epochs"][0]
    assert epoch["memory_peak_bytes"] is None and record["budget_bytes"] is None
    assert (epoch["batch_min"], epoch["batch_max"], epoch["batch_last"]) == (16, 16, 16)


def test_lines_in_a_pipe_are_whole(tmp_path):
    done = run(*TINY, "method=fp32", root=tmp_path, COLUMNS="40")
    (line,) = [line for line in done.stdout.splitlines() if "epoch 1/1" in line]
    assert line.startswith("synthetic/resnet8/fp32/seed 0") and line.endswith("left") and len(line) > 80


@pytest.mark.parametrize("arguments, words", [
    (["epohcs=3"], ["epohcs", "did you mean epochs?"]),
    (["method.curvature.alhpa=1"], ["alhpa", "did you mean alpha?"]),
    (["method=fp23"], ["fp23", "fp32"]),
    (["model=vgg"], ["vgg", "resnet18"]),
    (["dataset=imagenet"], ["imagenet", "cifar10"]),
    (["epochs=ten"], ["epochs=ten", "integer"]),
    (["seeds=[]"], ["seeds"]),
    (["optimizer.lr=-1"], ["optimizer.lr=-1"]),
    (["method.precision.tau_low=2", "method.precision.tau_high=1"], ["tau_low < tau_high"]),
    (["device=cuda"], ["device=cpu"]),
    (["epochs=${nothing}"], ["nothing"]),
    (["epochs="], ["epochs"]),
    (["+experiment=nothing"], ["nothing", "table1"]),
    (["-m", "epochs=1", "optimizer.lr=0.1,-0.1"], ["optimizer.lr=-0.1"]),
])  # fmt: skip
def test_mistakes_end_in_one_sentence_and_exit_code_two(tmp_path, arguments, words):
    done = run(*arguments, root=tmp_path)
    said = done.stdout + done.stderr
    assert done.returncode == 2, said
    assert "Traceback" not in said
    assert len(said.strip().splitlines()) == 1, said
    for word in words:
        assert word in said
    assert not records(tmp_path)


def test_data_that_is_not_there_is_refused_before_training(tmp_path):
    done = run("device=cpu", "dataset=cifar10", "dataset.download=false", "model=resnet8", root=tmp_path)
    assert done.returncode == 2
    assert "cifar" in done.stderr.lower() and len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stdout + done.stderr
    assert not records(tmp_path)


def test_a_diverged_run_fails_the_command_and_is_named(tmp_path):
    done = run(
        *TINY, "method=fp32", "optimizer.lr=1e30", "epochs=20", "method.loss_scale.max_consecutive_skips=4", root=tmp_path
    )
    assert done.returncode == 1
    (record,) = records(tmp_path)
    assert record["status"] == "diverged" and "max_consecutive_skips=4" in record["reason"]
    assert "diverged: synthetic/resnet8/fp32 seed 0" in done.stdout


def test_a_killed_child_leaves_a_failed_record(tmp_path, monkeypatch):
    from tiny import settings

    from triaccel_bench import runner
    from triaccel_bench.progress import Silent

    monkeypatch.setattr(runner, "_child", lambda entry, arguments, receive: (None, -9))
    monkeypatch.setattr(runner, "_device_name", lambda device, kernels: "cpu")
    (outcome,) = runner.run_cells([settings(f"results.root={tmp_path}", "seeds=[0]")], Silent())
    assert (outcome.status, "SIGKILL" in outcome.reason) == ("failed", True)
    (record,) = records(tmp_path)
    assert record["status"] == "failed" and not record["epochs"]
