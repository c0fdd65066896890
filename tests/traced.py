"""Traces as if they had been recorded, beside the records of ``measured``."""

from __future__ import annotations

from measured import epoch, run

from triaccel_bench.records import DecisionTrace, RunRecord, StartTrace, Trace

LAYERS = ("conv1", "layer1.0.conv1", "fc")


def epochs(*accuracies: float | None, **changes) -> list:
    """One for each accuracy, of ten steps."""
    return [epoch(n, evaluation_accuracy_percent=a, **changes) for n, a in enumerate(accuracies, 1)]


def decision(step: int, **changes) -> DecisionTrace:
    values = dict(
        step=step, in_force_after=step, epoch=1, variance=None, lambda_max=[4.0, None, float("nan")],
        memory_bytes=300_000_000, budget_bytes=350_000_000, free_bytes=None, batch_before=96, batch_after=64,
        batch_reason="shrink", requested=["fp32", "bf16", "fp16"], executed=["fp32", "fp16", "fp16"],
        promoted=[True, False, False], rate_scale=[0.5, 1.0, 1.0], plan_changed=True,
    )  # fmt: skip
    return DecisionTrace(**values | changes)


def trace(*decisions: DecisionTrace, **changes) -> Trace:
    start = StartTrace(rules={}, executes={"bf16": "fp16", "fp16": "fp16", "fp32": "fp32"}, samples=1)
    return Trace(layers=list(LAYERS), start=start, decisions=list(decisions) or [decision(4), decision(14)], **changes)


def triaccel(seed: int = 0, **changes) -> RunRecord:
    """A run of two epochs that ``trace`` fits."""
    return run(method="triaccel", seed=seed, epochs=epochs(40.0, 60.0 + seed), steps=20, **changes)
