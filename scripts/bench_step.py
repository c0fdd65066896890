#!/usr/bin/env python3
"""How fast is a training step on this GPU: beside its targets, the card's limits and other people's loops.

python scripts/bench_step.py [--quick] [--only TEXT ...] [--data FILE.npz] [--out FILE]

Every figure is taken in this one run, and the file is written anew after each, so that a run that
is ended early leaves what it had. The targets are for an NVIDIA H200; on another card there are
none. Exit code 0 only if no target was missed and nothing failed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import bench_parts
import rivals
import torch
from bench_rig import (
    WARM_UP_STEPS,
    Bench,
    Figures,
    Job,
    common_options,
    count,
    epoch_batches,
    median_of,
    one_core,
    over,
    run_benchmark,
    stepper,
    warm_up,
    whole_epoch,
)

from triaccel_bench import precision

TARGETS = {
    "step/resnet18/amp/B96": ("<=", 1.0),
    "step/efficientnet_b0/amp/B96": ("<=", 3.0),
    "step/resnet18/fp32/B96": ("<=", 3.4),
    "step/efficientnet_b0/fp32/B96": ("<=", 5.0),
    "step/resnet18_cifar/amp/B768": ("<=", 8.0),
    "epoch/resnet18/amp": ("<=", 0.55),
    "standing/resnet18": ("<=", 1.02),
    "standing/efficientnet_b0": ("<=", 1.02),
    "with_changes/resnet18": ("<=", 1.07),
    "with_changes/efficientnet_b0": ("<=", 1.07),
    "over_ours/dataloader/resnet18/amp": (">=", 10),
    "over_ours/compile/resnet18/amp": (">=", 1.5),
    "syncs/resnet18/amp": ("==", 0),
    "syncs/efficientnet_b0/amp": ("==", 0),
    "syncs/resnet18/triaccel_precision": ("==", 0),
    "waits/resnet18/amp": ("<", 0.01),
}
"""What the rows shall reach on an NVIDIA H200."""
AIMS = {"step/resnet18_cifar/amp/B768": 6.6}
"""What would be better still."""
KINDS = {
    "amp": ("fp16", "method=amp"),
    "bf16": ("bf16", "method=amp", "method.dtype=bf16"),
    "fp32": ("fp32", "method=fp32"),
    "tf32": ("tf32", "method=tf32"),
}
"""The dtype in which a kind of step multiplies, and its overrides."""
PLAIN_MEMORY = {
    "eager_nchw_small_workspace": ("--workspace", "small"),
    "eager_nchw": (),
    "eager_channels_last": ("--layout", "channels_last"),
    "graph_nchw_small_workspace": ("--graph", "--workspace", "small"),
    "graph_nchw": ("--graph",),
}
"""Set-ups of plain PyTorch whose peak memory is compared."""
CELLS = [(model, kind, 96) for kind in KINDS for model in ("resnet18", "efficientnet_b0")]
CELLS.insert(2, ("resnet18_cifar", "amp", 768))
WARM_UP = (
    f"steps: the eager first one, the capture, then {WARM_UP_STEPS} more; epochs: the first one; "
    "kernels alone: one call, the capture, a replay"
)
STEPS_WITHOUT_A_WAIT = 100
EPOCHS = 4


def step_time(bench: Bench, row: str, *overrides: str) -> Figures:
    """Milliseconds a step: input, forward, backward, statistics where the method has them, update."""
    made = bench.trainer(*overrides)
    step = stepper(made)
    made.meter.begin_window()
    made.engine.captured.replayed_bytes = 0
    times = bench.timed(step)
    peak = made.meter.window_peak_bytes(made.engine.captured.replayed_bytes)
    besides = {"memory_gb": None if peak is None else peak / 1e9, "eager_reason": made.engine.captured.eager_reason}
    return {row: median_of(times, **besides, **({"aim": AIMS[row]} if row in AIMS else {}))}


def in_a_process_of_its_own(bench: Bench, theirs: str, row: str, *overrides: str) -> Figures:
    """A row of this script under further overrides: cuDNN keeps for a whole process what it once chose."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rows.json")
        counts = ("--repeats", str(bench.repeats), "--steps", str(bench.steps), "--out", str(out))
        data = () if bench.data is None else ("--data", str(bench.data))
        command = [
            sys.executable,
            __file__,
            "--only",
            theirs,
            "--override",
            *bench.overrides,
            *overrides,
            *counts,
            *data,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if not out.exists():
            raise RuntimeError(done.stderr.strip().splitlines()[-1])
        found = {each["name"]: each for each in json.loads(out.read_text())["rows"]}[theirs]
    return {row: {key: held for key, held in found.items() if key not in ("name", "unit", "target", "ok")}}


def syncs(bench: Bench, row: str, *overrides: str) -> Figures:
    """1 if anything in an epoch's beginning and a hundred steps with new indices waits for the device, else 0."""
    made = bench.trainer(*overrides)
    warm_up(made, 1)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for indices in itertools.islice(epoch_batches(made, 1), STEPS_WITHOUT_A_WAIT):
            made.engine.step(indices)
    except RuntimeError as error:
        return {row: {"value": 1, "waits": str(error).splitlines()[0]}}
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return {row: {"value": 0}}


def waits(bench: Bench, cell: str, *overrides: str) -> Figures:
    """Share of an epoch in which the GPU waits for data, this process having one CPU core.

    The epoch draws its successor's order and augmentation, and is held against as many steps with
    fixed indices. With control steps it is the trainer's own loop.
    """
    with one_core():
        made = bench.trainer(*overrides, f"epochs={EPOCHS}")
        fixed = {len(indices): indices.clone() for indices in epoch_batches(made, 1)}
        sizes = [len(indices) for indices in epoch_batches(made, 1)]
        warm_up(made, 1)
        epochs = itertools.count(1)

        def same_batch_again() -> None:
            for size in sizes:
                made.engine.step(fixed[size])

        shares, busy = [], []
        for _ in range(bench.repeats):
            (whole,) = bench.timed(lambda: whole_epoch(made, next(epochs)), 1, 1)
            busy += bench.timed(same_batch_again, 1, 1)
            shares.append(1 - busy[-1] / whole)
        made.train()
    seconds = [epoch.train_seconds for epoch in made.run.epochs[1:]]
    least = statistics.median(busy) / 1e3
    return {
        f"waits/{cell}": median_of(shares, busy_s=least),
        f"waits_with_control/{cell}": median_of([1 - least / each for each in seconds]),
    }


def epoch_time(bench: Bench, row: str, *overrides: str) -> Figures:
    """Seconds of training in an epoch of the real loop, control steps included."""
    made = bench.trainer(*overrides, f"epochs={EPOCHS}")
    made.train()
    return {row: median_of([epoch.train_seconds for epoch in made.run.epochs[1:]])}


def adaptive(bench: Bench, model: str) -> Figures:
    """Tri-Accel's precision alone, against the plan that each of its epochs ended with, run statically.

    Its epochs and static ones take turns. ``standing`` is the ratio over epochs in which neither the
    plan changed nor a step was captured, ``with_changes`` that of all but the first, changes and
    captures included on the adaptive side alone.
    """
    static = bench.trainer(f"model={model}", "method=fp32", f"epochs={bench.epochs}")
    pairs: list[tuple[dict, float]] = []

    def run_statically(kind: str, epoch: dict) -> None:
        if kind != "epoch":
            return
        plan = made.method.decision.executed
        if precision.current(static.network) != plan:
            static.engine.set_plan(plan)
        warm_up(static, epoch["epoch"])
        started = static.clock.read()
        whole_epoch(static, epoch["epoch"])
        pairs.append((epoch, static.clock.read() - started))

    made = bench.trainer(f"model={model}", "method=triaccel_precision", f"epochs={bench.epochs}", emit=run_statically)
    made.train()
    later = pairs[1:]
    standing = [(a, b) for a, b in later if not (a["plan_changes"] or a["captures"] or a["capture_seconds"])]
    if not standing:
        raise RuntimeError(f"the plan changed or a step was captured in each of {bench.epochs} epochs; run more")
    ratios = [epoch["train_seconds"] / static_s for epoch, static_s in standing]
    figure = median_of(ratios, epochs=len(standing), plan=dict(Counter(made.method.decision.executed)))
    adaptive_s, static_s = (statistics.fmean(each) for each in zip(*((a["train_seconds"], b) for a, b in later)))
    return {
        f"standing/{model}": figure,
        f"with_changes/{model}": {
            "value": over(adaptive_s, static_s),
            "epochs": len(later),
            "adaptive_s": adaptive_s,
            "static_s": static_s,
            "plan_changes": sum(epoch["plan_changes"] for epoch, _ in pairs),
            "captures": sum(epoch["captures"] for epoch, _ in pairs),
            "captures_later": sum(epoch["captures"] for epoch, _ in later),
            "capture_s_later": sum(epoch["capture_seconds"] for epoch, _ in later),
        },
    }


def all_jobs() -> list[Job]:
    """In the order in which they run: what takes longest and matters least comes last."""
    models, first = ("resnet18", "efficientnet_b0"), "resnet18/amp"
    jobs = []
    for model, kind, batch in CELLS:
        row = f"step/{model}/{kind}/B{batch}"
        sizes = (f"method.batch.initial={batch}", f"method.batch.max={max(batch, 512)}")
        jobs.append(Job({row: "ms"}, step_time, (row, f"model={model}", *KINDS[kind][1:], *sizes), kind == "amp"))
    for cell in (first, "efficientnet_b0/amp", "resnet18/triaccel_precision"):
        jobs.append(Job({f"syncs/{cell}": "errors"}, syncs, (f"syncs/{cell}", *_overrides(cell)), True))
    rows = {f"waits/{first}": "share", f"waits_with_control/{first}": "share"}
    jobs.append(Job(rows, waits, (first, *_overrides(first)), True))
    for cell in (first, "efficientnet_b0/amp", "resnet18/fp32"):
        jobs.append(Job({f"epoch/{cell}": "s"}, epoch_time, (f"epoch/{cell}", *_overrides(cell)), cell == first))
    for model in models:
        jobs.append(Job({f"standing/{model}": "ratio", f"with_changes/{model}": "ratio"}, adaptive, (model,)))
    for kind in bench_parts.MATRIX_DTYPES:
        jobs.append(Job({f"rate/{kind}": "TFLOP/s"}, bench_parts.matrix_rate, (kind,)))
    jobs.append(Job({"rate/copy": "GB/s"}, bench_parts.copy_rate))
    for model, kind, batch in CELLS:
        cell = f"{model}/{kind}/B{batch}"
        job = Job({f"floor/{cell}": "ms"}, bench_parts.floor, (model, KINDS[kind][0], batch, cell), kind == "amp")
        jobs.append(job)
    for model, kind in itertools.product(models, ("amp", "fp32")):
        row = f"layout/{model}/{kind}/nchw"
        overrides = (f"model={model}", *KINDS[kind][1:], "model.layout=nchw")
        jobs.append(Job({row: "ms"}, step_time, (row, *overrides)))
    for kind in ("amp", "fp32"):
        rows = {f"autotune/resnet18/{kind}": "ms"}
        jobs.append(Job(rows, in_a_process_of_its_own, (f"step/resnet18/{kind}/B96", *rows, "engine.autotune=true")))
    for name, flags in PLAIN_MEMORY.items():
        row = f"plain_memory/efficientnet_b0/{name}"
        jobs.append(Job({row: "GB"}, bench_parts.plain_memory, (row, *flags)))
    for cell in (first, "efficientnet_b0/amp"):
        rows = {f"capture/{cell}": "s"}
        jobs.append(Job(rows, bench_parts.capture_cost, (cell, *_overrides(cell)), True))
        rows = {f"{what}/{cell}": "us" for what in ("moments", "finite_check", "sgd")}
        jobs.append(Job(rows, bench_parts.update_passes, (cell, *_overrides(cell)), True))
    jobs.append(Job({f"input/{first}": "us"}, bench_parts.input_kernel, (first, *_overrides(first)), True))
    for model in models:
        row = f"ours/no_graphs/{model}/amp"
        jobs.append(Job({row: "ms"}, rivals.own_variant, (model, row, "auto", "engine.graphs=false")))
        row = f"ours/torch_kernels/{model}/amp"
        jobs.append(Job({row: "ms"}, rivals.own_variant, (model, row, "torch")))
    rows = {f"rival/eager/{first}": "ms", f"over_ours/eager/{first}": "ratio"}
    jobs.append(Job(rows, rivals.eager_step, quick=True))
    rows = {f"rival/dataloader/{first}": "s", f"over_ours/dataloader/{first}": "ratio"}
    jobs.append(Job(rows, rivals.loader_epoch))
    rows = {
        f"rival/compile/{first}": "ms",
        f"rival/compile_seconds/{first}": "s",
        f"over_ours/compile/{first}": "ratio",
    }
    return [*jobs, Job(rows, rivals.compiled_step)]


def _overrides(cell: str) -> tuple[str, str]:
    model, method = cell.split("/")
    return f"model={model}", f"method={method}"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    steps = options.steps or (20 if options.quick else 200)
    facts = {"warm_up": WARM_UP, "steps": steps}
    return run_benchmark(options, all_jobs(), lambda device: TARGETS if "H200" in device else {}, facts, steps)


def _parser() -> argparse.ArgumentParser:
    parser = common_options(__doc__.split("\n")[0], "results/bench/step.json")
    parser.add_argument("--steps", type=count, help="a repeat; default: 200, with --quick 20")
    return parser


if __name__ == "__main__":
    sys.exit(main())
