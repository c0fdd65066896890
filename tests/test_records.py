"""Records survive the round trip, are written whole or not at all, and broken ones are named."""

import json

import pytest
from tiny import settings

from triaccel_bench import files, records
from triaccel_bench.records import (
    DecisionTrace,
    EpochRecord,
    RecordError,
    Trace,
    planned_run,
    read_run,
    read_trace,
    write_run,
)


def run():
    record = planned_run(settings().model_dump(mode="json"), 3, "abc", 1)
    record.epochs.append(
        EpochRecord(
            epoch=1,
            train_loss=1.5,
            train_accuracy_percent=50.0,
            train_seconds=2.0,
            steps=4,
            samples_seen=64,
            batch_mean=16.0,
            batch_min=16,
            batch_max=16,
            batch_last=16,
            learning_rate_last=0.1,
            layers_requested={"bf16": 10},
            layers_executed={"fp32": 10},
        )  # fmt: skip
    )
    return record


def test_round_trip(tmp_path):
    decision = DecisionTrace(
        step=1, epoch=1, variance=[None, 0.5], lambda_max=None, memory_bytes=None, budget_bytes=None, free_bytes=None,
        batch_before=96, batch_after=96, batch_reason="fixed", requested=["fp32"] * 2, executed=["fp32"] * 2,
        promoted=[False] * 2, rate_scale=[1.0] * 2, plan_changed=False,
    )  # fmt: skip
    trace = Trace(layers=["a", "b"], decisions=[decision])
    path = write_run(tmp_path / "deep" / "folder", run(), trace)
    assert read_run(path) == run()
    assert read_trace(path.parent / records.TRACE_FILE) == trace
    assert read_run(path).epochs[0].memory_peak_bytes is None


def test_a_planned_run_is_a_failed_one_until_it_ends():
    assert (run().status, run().reason) == ("failed", "the run did not end")


@pytest.mark.parametrize("damage", [
    lambda text: text[: len(text) // 2], lambda text: "", lambda text: "[]", lambda text: text.replace('"seed"', '"sede"'),
    lambda text: text.replace('"steps": 4', '"steps": "four"'),
])  # fmt: skip
def test_broken_files_are_named_with_the_remedy(tmp_path, damage):
    path = write_run(tmp_path, run())
    path.write_text(damage(path.read_text()))
    with pytest.raises(RecordError, match="run that seed again") as caught:
        read_run(path)
    assert str(path) in str(caught.value)


def test_missing_and_broken_traces_are_named(tmp_path):
    with pytest.raises(RecordError, match="trace.json.gz"):
        read_trace(tmp_path / records.TRACE_FILE)
    (tmp_path / records.TRACE_FILE).write_bytes(b"not gzip")
    with pytest.raises(RecordError, match="cannot be read"):
        read_trace(tmp_path / records.TRACE_FILE)
    path = write_run(tmp_path, run(), Trace(layers=["a" * 500])).parent / records.TRACE_FILE
    whole = path.read_bytes()
    for damaged in (whole[:-9], whole[:12] + b"\xff" * 12 + whole[24:]):
        path.write_bytes(damaged)
        with pytest.raises(RecordError, match="cannot be read"):
            read_trace(path)


def test_a_run_without_a_trace_takes_an_older_runs_trace_away(tmp_path):
    write_run(tmp_path, run(), Trace(layers=["a"]))
    write_run(tmp_path, run())
    assert [entry.name for entry in tmp_path.iterdir()] == [records.RUN_FILE]


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    path = write_run(tmp_path, run())
    before = path.read_bytes()

    def fail(*arguments):
        raise OSError("disk full")

    monkeypatch.setattr(files.os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        files.write_atomically(path, b"new")
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == [records.RUN_FILE]


def test_not_a_number_never_enters_a_record():
    with pytest.raises(ValueError):
        run().model_copy(update={}).__class__.model_validate({**run().model_dump(), "tau_low": float("nan")})
    assert [records.finite(v) for v in (None, float("nan"), float("inf"), 2)] == [None, None, None, 2.0]


def test_run_file_stays_small():
    record = run()
    record.epochs = [record.epochs[0].model_copy(update={"epoch": n}) for n in range(30)]
    layer = records.LayerRecord(
        name="features.6.3.block.1.fc1", elements=100_000, requested="bf16", executed="fp16", rate_scale=0.123456789,
        variance=1.23456789e-9, eigenvalues=[1.23456789012345] * 5, lambda_age_steps=400, iterations=8, converged=True,
    )  # fmt: skip
    record.layers = [layer] * 82
    assert len(record.model_dump_json()) < 60_000
    assert json.loads(record.model_dump_json())["layers"][0]["elements"] == 100_000


@pytest.mark.parametrize(
    "field, value",
    [("evaluation_accuracy_percent", 107.0), ("evaluation_accuracy_percent", -3.0), ("train_seconds", -1.0)],
)
def test_what_no_epoch_can_have_is_no_record(tmp_path, field, value):
    path = write_run(tmp_path, run())
    told = json.loads(path.read_text())
    told["epochs"][-1][field] = value
    path.write_text(json.dumps(told))
    with pytest.raises(RecordError, match=field):
        read_run(path)
