"""A run in its process: what becomes of a fault before, in and after the training."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny import settings

from triaccel_bench import worker
from triaccel_bench.hardware import DeviceError
from triaccel_bench.records import RUN_FILE, read_run


class Pipe:
    def __init__(self):
        self.sent = []

    def send(self, message):
        self.sent.append(message)


def run(folder, *overrides):
    pipe = Pipe()
    worker.run_seed(pipe, settings("method=fp32", "epochs=1", *overrides), 0, "cell", folder)
    return pipe.sent


def raising(error):
    def call(*arguments, **options):
        raise error

    return call


def test_a_finished_run_reports_and_records_the_same(tmp_path):
    sent = run(tmp_path)
    record = read_run(tmp_path / RUN_FILE)
    assert sent[-1] == ("finished", ("done", None)) and record.status == "done"
    assert [payload for kind, payload in sent if kind == "epoch"][0]["epoch"] == len(record.epochs) == 1
    assert record.provenance.started_at <= record.provenance.finished_at
    assert len(record.dataset_fingerprint) == 16


@pytest.mark.parametrize("step, error", [
    ("hardware_module.inspect", DeviceError("device=cuda: no card; use device=cpu")),
    ("load", worker.DataError("a.npz: cut off")),
    ("Trainer", worker.WeightsError("w.pt: other tensors")),
    ("Trainer", worker.SettingsError("memory.budget=paper: none")),
])  # fmt: skip
def test_a_fault_of_the_set_up_is_a_refusal_without_a_record(tmp_path, monkeypatch, step, error):
    monkeypatch.setattr(f"triaccel_bench.worker.{step}", raising(error))
    assert run(tmp_path)[-1] == ("refused", str(error))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("step", ["hardware_module.inspect", "provenance", "load", "Trainer", "Trainer.train"])
def test_an_unforeseen_fault_anywhere_is_a_failed_record_and_shows_where(tmp_path, monkeypatch, step):
    monkeypatch.setattr(f"triaccel_bench.worker.{step}", raising(KeyError("lost")))
    *before, last = run(tmp_path)
    assert last == ("finished", ("failed", "KeyError: 'lost'"))
    assert before[-1][0] == "note" and "Traceback" in before[-1][1]["text"]
    record = read_run(tmp_path / RUN_FILE)
    assert (record.status, record.reason) == ("failed", "KeyError: 'lost'")
    assert record.traceback[0] == "Traceback (most recent call last):" and record.traceback[-1] == record.reason
    assert any("test_worker.py" in line for line in record.traceback) and not any("\n" in x for x in record.traceback)


def test_a_traceback_without_end_leaves_a_record_of_its_usual_size(tmp_path, monkeypatch):
    def deeper(*_):
        raise RuntimeError("\n".join(map(str, range(5000))))

    monkeypatch.setattr("triaccel_bench.worker.Trainer.train", deeper)
    run(tmp_path)
    assert read_run(tmp_path / RUN_FILE).traceback == [str(number) for number in range(4800, 5000)]


@pytest.mark.parametrize(
    "error, said",
    [
        (torch.OutOfMemoryError("CUDA out of memory.\nTried"), "CUDA out of memory."),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when"), "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when"),
    ],
    ids=["allocator", "cublas"],
)
def test_memory_that_does_not_suffice_has_a_status_of_its_own(tmp_path, monkeypatch, error, said):
    monkeypatch.setattr("triaccel_bench.worker.Trainer.train", raising(error))
    run(tmp_path)
    record = read_run(tmp_path / RUN_FILE)
    assert record.status == "oom"
    assert record.reason.startswith(f"does not fit at batch 16: {said} (held between steps: weights ")
    assert "optimizer" in record.reason
    assert record.traceback[0].startswith("Traceback") and said in "\n".join(record.traceback)


def test_a_full_disk_is_a_failure_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "write_run", raising(OSError(28, "No space left on device")))
    status, reason = run(tmp_path)[-1][1]
    assert status == "failed"
    assert reason.startswith("done, but its record cannot be written")
    assert "No space left" in reason and "results.root" in reason


def test_the_record_names_the_data_the_run_saw(tmp_path):
    prints = []
    for name, pixel in (("a", 0), ("b", 1)):
        images = np.full((64, 8, 8, 3), pixel, np.uint8)
        labels = np.arange(64) % 10
        np.savez(tmp_path / f"{name}.npz", x_train=images, y_train=labels, x_test=images[:32], y_test=labels[:32])
        run(tmp_path / name, "dataset=cifar10", f"dataset.path={tmp_path / name}.npz", "dataset.image_size=8")
        prints.append(read_run(tmp_path / name / RUN_FILE).dataset_fingerprint)
    assert prints[0] != prints[1]
