"""The audit's tables, and records held against lower bounds."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from measured import epoch, provenance, run

from triaccel_bench import bounds, paper
from triaccel_bench.audit import (
    CONSISTENT,
    IMPOSSIBLE,
    NO_BOUND,
    NOT_MEASURED,
    audit_table,
    check_records,
    records_table,
)
from triaccel_bench.findings import findings
from triaccel_bench.layout import to_csv, to_latex, to_markdown
from triaccel_bench.results import Results, read_results

REFERENCE = Path(__file__).resolve().parent.parent / "results" / "reference" / "h200"
H200 = provenance("NVIDIA H200")
SHAPE = bounds.shape_of("resnet18", 32)


def checked(*runs):
    (record,) = check_records(Results(runs))
    return record


def test_the_papers_table_shows_every_finding_and_remark():
    table = audit_table()
    assert len(table.rows) == len(findings()) == len(table.frame)
    assert ("12.25", "12.44", "arithmetic slip") in [row[2:5] for row in table.rows]
    assert "16 arithmetic slip, 10 physically impossible" in table.caption
    assert set(paper.REMARKS) < set(table.footers)


def test_our_reference_records_are_consistent():
    records = check_records(read_results([REFERENCE]))
    assert len(records) >= 13
    assert {record.verdict for record in records} == {CONSISTENT}
    assert all(record.memory_bound_bytes and record.bound_seconds for record in records)


def test_a_record_beside_its_bounds():
    record = checked(run(provenance=H200))
    assert record.verdict == CONSISTENT
    assert record.memory_bound_bytes == bounds.memory_bytes(SHAPE, 10, 96, bounds.FP32, rerun=False)
    assert record.bound_seconds == bounds.seconds(SHAPE, 10, 960, bounds.CARDS["H200"].rate("fp32"))
    assert (record.memory_peak_bytes, record.train_seconds) == (350_000_000, 21.0)


@pytest.mark.parametrize("figures", [{"gb": 0.13}, {"seconds": 4.7e-4}])
def test_a_record_below_a_bound_is_impossible(figures):
    """134.2 MB, and 0.47 ms for the ten steps of the record."""
    assert checked(run(provenance=H200, **figures)).verdict == IMPOSSIBLE


def test_any_epoch_may_be_the_impossible_one():
    epochs = [epoch(0), epoch(1, memory_peak_bytes=10**8), epoch(2, train_seconds=1e-6), epoch(3)]
    record = checked(run(epochs=epochs, provenance=H200))
    assert record.verdict == IMPOSSIBLE
    assert (record.memory_peak_bytes, record.train_seconds) == (10**8, 1e-6)


def test_an_epoch_of_fewer_samples_may_be_as_much_shorter():
    epochs = [epoch(0, train_seconds=1.0), epoch(1, train_seconds=0.9, samples_seen=96)]
    assert checked(run(epochs=epochs, provenance=H200)).train_seconds == 1.0


def test_the_smallest_batch_of_the_epoch_counts():
    model = {"model": {"name": "efficientnet_b0"}}
    large, small = (
        checked(run(model="efficientnet_b0", epochs=[epoch(batch_min=low, batch_max=512)], tree=model))
        for low in (512, 32)
    )
    assert large.memory_bound_bytes > small.memory_bound_bytes
    shape = bounds.shape_of("efficientnet_b0", 32)
    assert small.memory_bound_bytes == bounds.memory_bytes(shape, 10, 32, bounds.FP32, rerun=False)


@pytest.mark.parametrize(
    ("method", "tree", "executed", "widths", "arithmetic"),
    [
        ("fp32", {}, {"fp32": 21}, (4, 4, 4, 4), "fp32"),
        ("tf32", {}, {"fp32": 21}, (4, 4, 4, 4), "tf32"),
        ("amp", {}, {"fp16": 21}, (4, 4, 2, 2), "16 bit"),
        ("fp32", {}, {"fp32": 20, "bf16": 1}, (4, 4, 2, 2), "16 bit"),
        ("fp32", {}, {"fp32": 21, "fp16": 0}, (4, 4, 4, 4), "fp32"),
        ("triaccel", {}, {"fp32": 21}, (4, 4, 2, 2), "16 bit"),
        ("amp", {"method": {"update": {"momentum_dtype": "bf16"}}}, {"fp16": 21}, (4, 2, 2, 2), "16 bit"),
        ("fp32", {"method": {"update": {"in_backward": True}}}, {"fp32": 21}, (4, 4, 0, 4), "fp32"),
        ("fp32", {"optimizer": {"momentum": 0.0}}, {"fp32": 21}, (4, 0, 4, 4), "fp32"),
    ],
)
def test_the_bound_goes_by_what_the_run_kept_and_executed(method, tree, executed, widths, arithmetic):
    record = checked(run(method=method, tree=tree, epochs=[epoch(layers_executed=executed)], provenance=H200))
    assert record.memory_bound_bytes == bounds.memory_bytes(SHAPE, 10, 96, bounds.Widths(*widths), rerun=False)
    assert record.bound_seconds == bounds.seconds(SHAPE, 10, 960, bounds.CARDS["H200"].rate(arithmetic))


def test_blocks_that_were_run_again_keep_less():
    tree = {"model": {"checkpointing": True}}
    record = checked(run(model="efficientnet_b0", epochs=[epoch(batch_min=512, batch_max=512)], tree=tree))
    shape = bounds.shape_of("efficientnet_b0", 32)
    assert record.memory_bound_bytes == bounds.memory_bytes(shape, 10, 512, bounds.FP32, rerun=True)


def test_classes_count():
    ten, hundred = (checked(run(dataset=name)).memory_bound_bytes for name in ("cifar10", "cifar100"))
    assert hundred - ten == 90 * 513 * 12


def test_what_has_no_bound_is_told():
    odd = run(model="mystery", provenance=H200)
    elsewhere = run(provenance=provenance("Card A"), seed=1)
    table = records_table(Results((odd, elsewhere)))
    assert [row[-1] for row in table.rows] == [NO_BOUND, CONSISTENT]
    footers = " ".join(table.footers)
    assert "mystery at 32; scripts/make_bounds.py" in footers
    assert "No bound on time: Card A; rates are known of T4" in footers


def test_a_size_that_was_not_counted_has_no_bound():
    assert checked(run(tree={"model": {"input_size": 48}}, provenance=H200)).verdict == NO_BOUND


def test_a_run_that_never_trained_was_not_measured():
    record = checked(run(epochs=[], status="failed", reason="no card", provenance=None, epochs_planned=1))
    assert record.verdict == NOT_MEASURED
    assert NOT_MEASURED in to_markdown(records_table(Results((run(epochs=[], provenance=None),))))


def test_a_diverged_run_is_held_against_its_bounds_too():
    assert checked(run(status="diverged", seconds=1e-6, provenance=H200)).verdict == IMPOSSIBLE


def test_without_a_memory_reading_time_is_judged_alone():
    record = checked(run(gb=None, meter="off", provenance=H200))
    assert (record.memory_peak_bytes, record.memory_bound_bytes, record.verdict) == (None, None, CONSISTENT)
    assert checked(run(gb=None, meter="off")).verdict == NO_BOUND


def test_live_tensors_are_marked():
    table = records_table(Results((run(meter="tensors"),)))
    assert table.rows[0][6] == "0.350 ‡"
    assert any(footer.startswith("‡") for footer in table.footers)


def test_records_of_an_older_version_lack_settings():
    old = run(provenance=H200)
    del old.settings["method"]["update"], old.settings["model"]["checkpointing"]
    assert checked(old) == checked(run(provenance=H200))


def test_problems_are_named_below():
    assert "Not used: x.json: bad" in records_table(Results((run(),), ("x.json: bad",))).footers


def test_the_same_records_give_the_same_bytes():
    def content(*runs) -> bytes:
        tables = audit_table(), records_table(Results(runs))
        return gzip.compress("".join(w(t) for t in tables for w in (to_markdown, to_csv, to_latex)).encode(), mtime=0)

    first, second = run(seed=0), run(seed=1)
    assert content(first, second) == content(second, first)
