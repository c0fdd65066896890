#!/usr/bin/env python3
"""Memory that a step needs less of, a batch that fills its budget, predictions that hold, and shortages that pass.

Rows, for each model: ``less`` is the peak of a 16-bit step at B0 with what saves memory for hardly any time (all but
checkpointing), and its time over that of the plain step; ``elastic`` the batch, epoch time and peak that a run
settles at whose budget is FP32's peak (``conf/pair`` says how many first blocks run again); ``predicted`` how far the
peak of a rung never run before was from what the controller had predicted; ``oom`` the share of forced shortages after
which a run went on as if nothing had been.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from bench_rig import Bench, Figures, Job, Targets, common_options, count, median_of, over, run_benchmark, stepper
from forced_shortages import PHASES, shortages

from triaccel_bench import rungs
from triaccel_bench.records import Trace
from triaccel_bench.settings import BatchSettings

MODELS = ("resnet18", "efficientnet_b0")
LESS = ("method=amp", "method.dtype=bf16", "method.update.in_backward=true", "method.update.momentum_dtype=bf16")
"""A 16-bit plan with all that saves memory and costs hardly any time."""
PLAIN = ("method=amp", "method.dtype=bf16")
ELASTIC = ("method=triaccel_plus", "method.batch.growth=model", "memory.budget=fp32", "method.control.interval=50")
BUDGET_WITHIN = 1.1
"""Factor within which the budget, FP32's first steps, and the peak of an FP32 run have to agree."""
TURNS = 2
"""In which the plain step and the one of less memory are timed one after the other."""
TARGETS = {f"oom/{model}/{phase}": ("==", 1.0) for model in MODELS for phase in PHASES} | {
    f"predicted/{model}": ("<=", 0.05) for model in MODELS
}
"""What the rows shall reach on any card."""
H200_TARGETS = {
    "less/memory/resnet18": ("<=", 0.16),
    "less/memory/efficientnet_b0": ("<=", 0.125),
    **{f"less/step_over_plain/{model}": ("<=", 1.10) for model in MODELS},
    "elastic/batch/resnet18": (">=", 384),
    "elastic/epoch/resnet18": ("<=", 0.25),
    "elastic/batch/efficientnet_b0": (">=", 160),
    "elastic/epoch_over_fp32/efficientnet_b0": ("<=", 0.55),
    **{f"elastic/peak_over_budget/{model}": ("<=", 1.0) for model in MODELS},
}
"""And on an NVIDIA H200, at 32 x 32."""


def less_memory(bench: Bench, model: str) -> Figures:
    """GB and milliseconds of a step with less memory, and of the same step without; the two take turns."""
    times: dict[str, list[float]] = {"plain": [], "less": []}
    peaks: dict[str, int | None] = {}
    for _ in range(TURNS):
        for name, overrides in (("plain", PLAIN), ("less", LESS)):
            made = bench.trainer(f"model={model}", *overrides)
            step = stepper(made)
            made.meter.begin_window()
            made.engine.captured.replayed_bytes = 0
            times[name] += bench.timed(step)
            peaks[name] = made.meter.window_peak_bytes(made.engine.captured.replayed_bytes)
            del made, step
    gb = {name: None if peak is None else peak / 1e9 for name, peak in peaks.items()}
    medians = {name: statistics.median(each) for name, each in times.items()}
    return {
        f"less/memory/{model}": {"value": gb["less"], "plain_gb": gb["plain"]},
        f"less/step/{model}": median_of(times["less"]),
        f"less/step_over_plain/{model}": {
            "value": over(medians["less"], medians["plain"]),
            "plain_ms": medians["plain"],
        },
    }


def elastic(bench: Bench, model: str, epochs: int) -> Figures:
    """Where a run settles that starts at B0 and may use what FP32 needs there."""
    plain = bench.trainer(f"model={model}", "method=fp32", "epochs=3")
    plain.train()
    fp32_s = statistics.median(epoch.train_seconds for epoch in plain.run.epochs[1:])
    fp32_peaks = [epoch.memory_peak_bytes for epoch in plain.run.epochs]
    del plain
    made = bench.trainer(f"model={model}", *ELASTIC, f"epochs={epochs}")
    trace = made.train()
    run, last = made.run, made.run.epochs[-1]
    settled = [epoch.train_seconds for epoch in run.epochs if epoch.batch_min == epoch.batch_max == last.batch_max]
    peaks = [epoch.memory_peak_bytes for epoch in run.epochs]
    if None in peaks or None in fp32_peaks or run.budget_bytes is None:
        raise RuntimeError(f"no memory was measured: {run.meter_reason}")
    if not 1 / BUDGET_WITHIN <= run.budget_bytes / max(fp32_peaks) <= BUDGET_WITHIN:
        raise RuntimeError(
            f"expected a budget of FP32's peak, which a run of its own puts at {max(fp32_peaks)} bytes, got "
            f"{run.budget_bytes}: something else was on the card"
        )
    errors = prediction_errors(trace, made.settings.method.batch)
    seconds = statistics.median(settled) if settled else None
    besides = {
        "checkpointing": made.settings.model.checkpointing,
        "accuracy_percent": last.evaluation_accuracy_percent,
        "epochs_there": len(settled),
    }
    return {
        f"elastic/batch/{model}": {"value": last.batch_max, "from": made.settings.method.batch.initial, **besides},
        f"elastic/epoch/{model}": {"value": seconds},
        f"elastic/epoch_over_fp32/{model}": {"value": over(seconds, fp32_s), "fp32_s": fp32_s},
        f"elastic/peak_over_budget/{model}": {
            "value": max(peaks) / run.budget_bytes,
            "budget_gb": run.budget_bytes / 1e9,
            "fp32_gb": max(fp32_peaks) / 1e9,
            "by_epoch": [round(peak / run.budget_bytes, 3) for peak in peaks],
        },
        f"predicted/{model}": {
            "value": max((abs(each["error"]) for each in errors), default=None),
            "rungs": errors or None,
        },
    }


def prediction_errors(trace: Trace, rules: BatchSettings) -> list[dict[str, Any]]:
    """For each rung that was reached for the first time under its plan: predicted and measured peak, and the error."""
    found: list[dict[str, Any]] = []
    seen = rungs.Seen()
    before = None
    expected: float | None = None
    for decision in trace.decisions:
        if decision.memory_bytes is None or decision.budget_bytes is None:
            continue
        if expected is not None and decision.batch_before == before:
            measured = decision.memory_bytes
            found.append(
                {"batch": before, "predicted": expected, "measured": measured, "error": expected / measured - 1}
            )
        reading = rungs.Reading(decision.batch_before, decision.memory_bytes, decision.budget_bytes)
        seen = seen.with_reading(reading)
        before, expected = decision.batch_after, None
        if decision.plan_changed:
            seen = seen.under_a_new_plan()
        elif before != decision.batch_before and before not in seen.peaks:
            expected = rungs.predicted_peak(reading, seen, before)
    return found


def all_jobs(epochs: int = 10) -> list[Job]:
    jobs = []
    for model in MODELS:
        rows = {f"less/memory/{model}": "GB", f"less/step/{model}": "ms", f"less/step_over_plain/{model}": "ratio"}
        jobs.append(Job(rows, less_memory, (model,), True))
        rows = {
            f"elastic/batch/{model}": "samples",
            f"elastic/epoch/{model}": "s",
            f"elastic/epoch_over_fp32/{model}": "ratio",
            f"elastic/peak_over_budget/{model}": "ratio",
            f"predicted/{model}": "relative",
        }
        jobs.append(Job(rows, elastic, (model, epochs), model == MODELS[0]))
    for model in MODELS:
        for phase in PHASES:
            jobs.append(Job({f"oom/{model}/{phase}": "of places"}, shortages, (model, phase), model == MODELS[0]))
    return jobs


def targets(device: str) -> Targets:
    return TARGETS | (H200_TARGETS if "H200" in device else {})


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    steps = options.steps or (20 if options.quick else 200)
    facts = {
        "steps": steps,
        "epochs": options.epochs,
        "less": list(LESS),
        "elastic": list(ELASTIC),
    }
    return run_benchmark(options, all_jobs(options.epochs), targets, facts, steps)


def _parser() -> argparse.ArgumentParser:
    parser = common_options(__doc__.split("\n")[0], "results/bench/memory.json")
    parser.add_argument("--steps", type=count, help="a repeat; default: 200, with --quick 20")
    parser.add_argument("--epochs", type=count, default=10, help="of the elastic runs; default: %(default)s")
    return parser


if __name__ == "__main__":
    sys.exit(main())
