"""What the audit finds of the paper: golden, and never to be made right."""

from __future__ import annotations

import pytest

from triaccel_bench import findings as audit
from triaccel_bench import paper
from triaccel_bench.findings import CONSISTENT, IMPOSSIBLE, SLIP, findings

FINDINGS = {(finding.where, finding.what): finding for finding in findings()}


@pytest.mark.parametrize(
    ("where", "what", "printed", "computed", "verdict"),
    [
        ("Table 1", "CIFAR-10, ResNet-18, AMP (Static): score", "12.25", "12.44", SLIP),
        ("Table 1", "CIFAR-10, ResNet-18, Tri-Accel: score", "12.92", "12.92", CONSISTENT),
        ("Table 2", "EfficientNet-B0, + Dynamic Batch Sizing: reduction", "6.0 %", "6.3 %", SLIP),
        ("Table 2", "EfficientNet-B0, + Dynamic Precision: reduction", "10.0 %", "10.3 %", SLIP),
        ("Table 2", "EfficientNet-B0, + Full Tri-Accel: reduction", "13.3 %", "12.0 %", SLIP),
        ("Table 2", "ResNet-18, + Full Tri-Accel: reduction", "12.3 %", "12.3 %", CONSISTENT),
        ("Tables 1 and 2", "ResNet-18, + Full Tri-Accel: VRAM", "0.31 GB", "0.307 GB", CONSISTENT),
        ("Tables 1 and 2", "EfficientNet-B0, + Full Tri-Accel: VRAM", "0.26 GB", "0.265 GB", CONSISTENT),
        ("Abstract", "time below FP32's on CIFAR-10, up to", "9.9 %", "9.2 %", SLIP),
        ("Abstract", "memory below FP32's on CIFAR-10, up to", "13.3 %", "13.3 %", CONSISTENT),
        ("Abstract", "accuracy over FP32's on CIFAR-10", "1.1 pp", "1.1 pp", CONSISTENT),
        ("Abstract", "static mixed precision's memory (ResNet-18, CIFAR-10)", "0.35 GB", "0.32 GB", SLIP),
        ("Abstract", "Tri-Accel's memory (ResNet-18, CIFAR-10)", "0.31 GB", "0.31 GB", CONSISTENT),
        ("Abstract", "Tri-Accel's accuracy (ResNet-18, CIFAR-10)", "78.1 %", "78.1 %", CONSISTENT),
        ("Section 3.3", "occupancy of the card's memory", "maximal", "1.6 to 2.1 %", SLIP),
        ("Section 4", "Tri-Accel's accuracy (ResNet-18, CIFAR-10)", "over 78 %", "78.1 %", CONSISTENT),
        ("Section 4", "accuracy beside FP32 and AMP, every task", "matches or outperforms", "+0.9 %", CONSISTENT),
        ("Section 4", "epoch time beside FP32 and AMP, every task", "matches or outperforms", "+0.5 %", SLIP),
        ("Section 4", "VRAM beside FP32 and AMP, every task", "matches or outperforms", "+0.0 %", CONSISTENT),
        ("Section 4.1", "images of CIFAR-10, training and test", "60,000", "60,000", CONSISTENT),
        ("Section 4.2", "scores of Table 1 by the printed formula", "Acc / (Time x Memory %) x 100", "0 of 12 rows", SLIP),
        ("Section 4.4", "epoch time beside static mixed precision, every task", "improves", "-3.1 to +0.5 %", SLIP),
        ("Section 4.4", "VRAM on ResNet-18 beside FP32 and AMP", "reduced", "-11.4 to -2.9 %", CONSISTENT),
        ("Section 4.4", "accuracy on ResNet-18 beside FP32 and AMP", "maintained or improved", "+1.2 to +2.5 %", CONSISTENT),
        ("Section 4.4", "epoch time on EfficientNet-B0 beside FP32 and AMP", "accelerated", "-10.0 to -2.3 %", CONSISTENT),
        ("Section 4.4", "score on CIFAR-10, both architectures", "the best", "+3.3 to +28.8 %", CONSISTENT),
        ("Section 4.4", "accuracy on CIFAR-100 beside FP32 and AMP", "higher", "+1.6 to +2.5 %", CONSISTENT),
        ("Section 4.4", "score on CIFAR-100 beside FP32 and AMP", "a modest trade-off", "+6.6 to +28.9 %", SLIP),
        ("Section 4.4", "VRAM with dynamic precision alone (Table 2)", "reduced", "-11.4 to -10.3 %", CONSISTENT),
        ("Section 4.4", "of the full reduction, by precision alone (Table 2)", "not the full", "86 to 93 %", CONSISTENT),
        ("Section 4.4", "VRAM saved, all components, ResNet-18 (Table 2)", "12.3 %", "12.3 %", CONSISTENT),
        ("Section 4.4", "VRAM saved, all components, EfficientNet-B0 (Table 2)", "13.3 %", "12.0 %", SLIP),
        ("Conclusion", "time below FP32's, up to", "9.9 %", "10.0 %", SLIP),
        ("Conclusion", "VRAM below FP32's, up to", "13.3 %", "13.3 %", CONSISTENT),
        ("Conclusion", "accuracy over FP32's, from", "1.1 pp", "1.1 pp", CONSISTENT),
        ("Conclusion", "accuracy over FP32's, to", "1.7 pp", "1.7 pp", CONSISTENT),
        ("Conclusion", "accuracy over AMP's, up to", "0.7 pp", "1.2 pp", SLIP),
        ("Conclusion", "score over FP32's, up to", "25 %", "28.9 %", SLIP),
        ("Conclusion", "score over AMP's, up to", "10 %", "12.1 %", SLIP),
        ("Table 1", "CIFAR-10, ResNet-18, FP32 Baseline: VRAM of a step", "0.35 GB", "at least 0.13 GB", CONSISTENT),
        ("Table 1", "CIFAR-10, EfficientNet-B0, FP32 Baseline: VRAM of a step", "0.30 GB", "at least 0.96 GB", IMPOSSIBLE),
        ("Table 1", "CIFAR-10, EfficientNet-B0, AMP (Static): VRAM of a step", "0.26 GB", "at least 0.49 GB", IMPOSSIBLE),
        ("Table 1", "CIFAR-100, EfficientNet-B0, Tri-Accel: VRAM of a step", "0.29 GB", "at least 0.48 GB", IMPOSSIBLE),
        ("Table 2", "EfficientNet-B0, + Dynamic Batch Sizing: VRAM of a step", "0.282 GB", "at least 0.96 GB", IMPOSSIBLE),
        ("Table 1", "CIFAR-10, EfficientNet-B0, FP32 Baseline: time of an epoch", "18.5 s", "at least 9.79 s", CONSISTENT),
        ("Table 1", "CIFAR-10, ResNet-18, AMP (Static): time of an epoch", "19.4 s", "at least 0.03 s", CONSISTENT),
    ],
)  # fmt: skip
def test_finding(where, what, printed, computed, verdict):
    found = FINDINGS[where, what]
    assert (found.printed, found.computed, found.verdict) == (printed, computed, verdict)


def test_every_claim_and_every_row_is_found_once():
    found = findings()
    assert len(FINDINGS) == len(found)
    for claim in paper.CLAIMS.values():
        assert FINDINGS[claim.where, claim.what].printed == claim.printed
    counts = {
        kind: sum(kind in what for _, what in FINDINGS) for kind in (": score", ": reduction", ": VRAM of", ": time")
    }
    rows, ablations = len(paper.TABLE1), len(paper.TABLE2)
    assert counts == {": score": rows, ": reduction": ablations - 2, ": VRAM of": rows + ablations, ": time": rows}
    assert len(found) == sum(counts.values()) + 4 + len(paper.CLAIMS)


def test_what_is_impossible_is_efficientnet_at_the_size_of_section_4_1():
    impossible = {key for key, finding in FINDINGS.items() if finding.verdict == IMPOSSIBLE}
    assert impossible == {
        (where, what) for where, what in FINDINGS if "EfficientNet" in what and "VRAM of a step" in what
    }
    assert len(impossible) == 10


def test_at_32_pixels_nothing_would_be_impossible(monkeypatch):
    monkeypatch.setitem(paper.INPUT_SIZES, "efficientnet_b0", 32)
    assert not [finding for finding in findings() if finding.verdict == IMPOSSIBLE]


def test_printed_memory_is_read_as_high_as_it_can_be(monkeypatch):
    """Half a digit up, in GiB: only what lies above that is impossible."""
    most = 0.305 * 2**30 / 10**9
    for least, verdict in ((most - 0.001, CONSISTENT), (most + 0.001, IMPOSSIBLE)):
        monkeypatch.setattr(audit, "_least_gb", lambda *_, rerun, least=least: least)
        row = paper.printed("cifar10", "efficientnet_b0", "fp32")
        assert audit._fits("Table 1", "x", row, "cifar10", 2).verdict == verdict


def test_a_time_below_its_arithmetic_is_impossible(monkeypatch):
    row = paper.printed("cifar10", "resnet18", "fp32")
    for least, verdict in ((21.04, CONSISTENT), (21.06, IMPOSSIBLE)):
        monkeypatch.setattr(audit.bounds, "seconds", lambda *_, least=least: least)
        assert audit._in_time(row).verdict == verdict


def test_the_faster_card_counts():
    assert "P100" in FINDINGS["Table 1", "CIFAR-10, ResNet-18, FP32 Baseline: time of an epoch"].note
    assert "T4" in FINDINGS["Table 1", "CIFAR-10, ResNet-18, AMP (Static): time of an epoch"].note


def test_a_network_that_was_not_counted_is_named(monkeypatch):
    monkeypatch.setitem(paper.INPUT_SIZES, "resnet18", 33)
    with pytest.raises(LookupError, match="expected resnet18 at 33, got no such network; run scripts/make_bounds.py"):
        findings()


def test_every_note_is_a_sentence():
    assert all(finding.note.endswith(".") for finding in findings())
