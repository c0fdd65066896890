"""The grouping of seeds into cells, what tells cells apart, and the baseline of each."""

from __future__ import annotations

import math

import pytest
from measured import GB, epoch, provenance, run

from triaccel_bench.cells import baseline, cells, why_no_baseline
from triaccel_bench.stats import Mean


@pytest.mark.parametrize("status", ["diverged", "oom", "failed", "interrupted"])
def test_unfinished_seeds_are_named_and_in_no_mean(status):
    bad = run(
        seed=1,
        status=status,
        reason="first line\n  second line",
        epochs=[epoch(evaluation_accuracy_percent=10.0)],
        cell="c",
    )
    (cell,) = cells(
        [run(seed=0, cell="c"), bad, run(seed=2, cell="c", epochs=[epoch(evaluation_accuracy_percent=79.0)])]
    )
    assert cell.mean("accuracy_percent") == Mean(78.0, pytest.approx(math.sqrt(2)), 2)
    assert cell.excluded == (f"seed 1 {status}: first line second line",)
    assert cell.seeds_expected == 3


def test_seeds_asked_for_without_a_record_are_named():
    (cell,) = cells([run(seed=0, tree={"seeds": [0, 1, 2]}), run(seed=2, tree={"seeds": [0, 1, 2]})])
    assert cell.excluded == ("seed 1 missing: asked for, no record",)
    assert len(cell.summaries) == 2


def test_no_cell_is_grouped_away_for_an_empty_setting():
    methods = {"fp32": None, "amp": None, "triaccel": 0.05, "NA": 0.1}
    found = cells(run(seed=0, method=m, tree={"seeds": [0], "method": {"alpha": a}}) for m, a in methods.items())
    assert sorted(cell.method for cell in found) == sorted(methods)
    assert [len(cell.summaries) for cell in found] == [1, 1, 1, 1]


def test_an_unknown_device_does_not_drop_a_run():
    (cell,) = cells([run(seed=0, provenance=None)])
    assert cell.device_name is None
    assert len(cell.summaries) == 1


def test_devices_are_never_mixed_in_one_mean():
    asked = {"seeds": [0, 1, 2, 3]}
    died_early = run(seed=2, status="failed", reason="no driver", provenance=None, epochs=[], tree=asked)
    runs = [run(seed=0, tree=asked), run(seed=1, tree=asked, provenance=provenance("Card B")), died_early]
    found = cells(runs)
    assert [cell.device_name for cell in found] == ["Card A", "Card B"]
    assert [[s.seed for s in cell.summaries] for cell in found] == [[0], [1]]
    assert [cell.excluded for cell in found] == [
        ("seed 2 failed: no driver", "seed 3 missing: asked for, no record"),
        (),
    ]
    assert [cell.variant for cell in found] == ["device=Card A", "device=Card B"]


def test_meters_are_never_mixed_in_one_mean():
    runs = [
        run(seed=0, meter="vram"),
        run(seed=1, meter="tensors", epochs=[epoch(memory_peak_bytes=10 * GB)]),
        run(seed=2, meter="off"),
    ]
    (cell,) = cells(runs)
    assert (cell.meter, cell.mean("memory_peak_bytes")) == ("vram", Mean(350_000_000, None, 1))
    assert cell.mean("accuracy_percent").n == 3


def test_cells_of_one_label_are_told_apart_by_what_differs():
    runs = [
        run(seed=0, cell="a", tree={"epochs": 1, "seeds": [0]}),
        run(seed=0, cell="b", tree={"epochs": 30, "seeds": [0, 1], "progress": "rich"}),
        run(seed=0, cell="d", method="amp"),
    ]
    found = cells(runs)
    assert {cell.cell: cell.variant for cell in found} == {"a": "epochs=1", "b": "epochs=30", "d": ""}


def test_cells_that_differ_in_no_setting_are_told_apart_by_their_hash():
    found = cells([run(seed=0, cell="a"), run(seed=0, cell="b")])
    assert [cell.variant for cell in found] == ["cell=a", "cell=b"]


def test_the_order_of_records_changes_nothing():
    runs = [run(seed=seed, method=method) for method in ("fp32", "amp") for seed in (0, 1)]
    assert cells(runs) == cells(reversed(runs))


def test_baseline_shares_all_settings_but_the_methods_own():
    ours = run(seed=0, method="triaccel", cell="t", tree={"memory": {"budget": "fp32", "meter": "vram"}})
    same = run(seed=0, cell="f", tree={"memory": {"budget": "device", "meter": "vram"}})
    longer = run(seed=0, cell="g", tree={"epochs": 30, "memory": {"budget": "fp32", "meter": "vram"}})
    found = cells([ours, same, longer])
    triaccel = next(cell for cell in found if cell.method == "triaccel")
    assert baseline(triaccel, found).cell == "f"
    assert baseline(triaccel, cells([ours, longer])) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"provenance": provenance("Card B")},
        {"meter": "tensors"},
        {"meter": "off"},
        {"status": "failed"},
        {"model": "resnet8"},
    ],
)
def test_baseline_of_another_device_meter_or_model_is_none(changes):
    ours = run(seed=0, method="triaccel")
    found = cells([ours, run(seed=0, **changes)])
    assert baseline(next(cell for cell in found if cell.method == "triaccel"), found) is None


def test_a_setting_that_the_method_does_not_read_tells_nothing_apart():
    trees = ({"epochs": 1}, {"epochs": 2, "method": {"curvature": {"alpha": 0.5}}, "optimizer": {"lr": 0.2}})
    found = cells(run(cell=name, tree=tree) for name, tree in zip("ab", trees, strict=True))
    assert [cell.variant for cell in found] == ["epochs=1, lr=0.1", "epochs=2, lr=0.2"]
    read = cells(run(cell=name, method="triaccel", tree=tree) for name, tree in zip("ab", trees, strict=True))
    assert read[1].variant == "epochs=2, curvature.alpha=0.5, lr=0.2"


def test_what_saves_memory_still_has_plain_fp32_as_its_baseline():
    tree = {"model": {"checkpointing": True}, "method": {"update": {"in_backward": True}}}
    plain, ours = cells([run(), run(method="triaccel", tree=tree)])
    assert baseline(ours, [plain, ours]) is plain


def test_a_record_without_todays_settings_is_still_told_apart():
    runs = [run(cell="a"), run(cell="b", tree={"epochs": 2})]
    for one in runs:
        del one.settings["method"]["precision"]
    assert [cell.variant for cell in cells(runs)] == ["epochs=1", "epochs=2"]


@pytest.mark.parametrize(
    ("others", "reason"),
    [
        ([], "there is no fp32 cell of this data set and model"),
        ([{"gb": None}], "the fp32 cell has no finished seed with a memory reading"),
        ([{"cell": "a"}, {"cell": "b"}], "more than one fp32 cell has the same settings"),
        ([{"tree": {"epochs": 30}}], "the fp32 cell differs in epochs=30 (here 1)"),
        ([{"tree": {"epochs": 30, "optimizer": {"lr": 0.2}}, "cell": "a"}, {"meter": "tensors", "cell": "b"}],
         "the fp32 cell differs in meter=tensors (here vram)"),
        ([{"provenance": provenance("Card B")}], "the fp32 cell differs in device=Card B (here Card A)"),
        ([{"tree": {"method": {"batch": {"initial": 128}}}}], "the fp32 cell differs in batch.initial=128 (here 96)"),
    ],
)  # fmt: skip
def test_the_lack_of_a_baseline_is_explained(others, reason):
    found = cells([run(method="triaccel"), *(run(**other) for other in others)])
    ours = next(cell for cell in found if cell.method == "triaccel")
    assert baseline(ours, found) is None
    assert why_no_baseline(ours, found) == reason
