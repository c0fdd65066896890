"""The paper's numbers as printed."""

from __future__ import annotations

import dataclasses

import pytest

from triaccel_bench import paper, settings


def test_tables_are_whole():
    datasets, models = ("cifar10", "cifar100"), ("resnet18", "efficientnet_b0")
    assert {(row.dataset, row.model, row.method) for row in paper.TABLE1} == {
        (dataset, model, method) for dataset in datasets for model in models for method in ("fp32", "amp", "triaccel")
    }
    assert {(row.model, row.method) for row in paper.TABLE2} == {
        (model, method) for model in models for method in ("fp32", "triaccel_batch", "triaccel_precision", "triaccel")
    }
    assert (len(paper.TABLE1), len(paper.TABLE2)) == (12, 8)


def test_rows_cannot_be_corrected_in_place():
    with pytest.raises(dataclasses.FrozenInstanceError):
        paper.TABLE1[1].score = 12.44


def test_eleven_of_twelve_scores_follow_from_their_row():
    wrong = [row for row in paper.TABLE1 if not row.score_agrees]
    assert [(row.dataset, row.model, row.method, row.score) for row in wrong] == [("cifar10", "resnet18", "amp", 12.25)]
    assert wrong[0].score_computed == pytest.approx(12.436, abs=1e-3)


def test_reductions_of_table_2():
    computed = {(row.model, row.method): round(row.reduction_computed_percent, 1) for row in paper.TABLE2}
    assert computed == {
        ("resnet18", "fp32"): 0.0,
        ("resnet18", "triaccel_batch"): 8.3,
        ("resnet18", "triaccel_precision"): 11.4,
        ("resnet18", "triaccel"): 12.3,
        ("efficientnet_b0", "fp32"): 0.0,
        ("efficientnet_b0", "triaccel_batch"): 6.3,
        ("efficientnet_b0", "triaccel_precision"): 10.3,
        ("efficientnet_b0", "triaccel"): 12.0,
    }
    printed = {row.method: row.reduction_percent for row in paper.TABLE2 if row.model == "efficientnet_b0"}
    assert printed == {"fp32": None, "triaccel_batch": 6.0, "triaccel_precision": 10.0, "triaccel": 13.3}
    assert {row.model for row in paper.TABLE2 if not row.reduction_agrees} == {"efficientnet_b0"}


def test_lookup():
    row = paper.printed("cifar100", "efficientnet_b0", "triaccel")
    assert (row.accuracy_percent, row.seconds, row.memory_gb, row.score) == (74.3, 19.0, 0.29, 13.48)
    assert paper.printed("cifar10", "resnet18", "tf32") is None
    assert paper.printed_ablation("cifar10", "resnet18", "triaccel_batch").memory_gb == 0.321
    assert paper.printed_ablation("cifar100", "resnet18", "triaccel_batch") is None


def test_printed_vram_is_the_fp32_row_in_decimal_bytes():
    assert paper.printed_vram_bytes("cifar10", "resnet18") == 350_000_000
    assert paper.printed_vram_bytes("cifar100", "efficientnet_b0") == 330_000_000
    assert paper.printed_vram_bytes("digits", "resnet8") is None


def test_settings_know_the_cells_that_table_1_prints():
    """``memory.budget=paper`` is judged before the paper's numbers are read."""
    assert {(row.dataset, row.model) for row in paper.TABLE1} == settings._PRINTED_CELLS
