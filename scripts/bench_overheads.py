#!/usr/bin/env python3
"""What triaccel-bench costs beside training, on any CPU: its help, what a run takes before and after its epochs, and
tables of thousands of records. Exit code 1 if a target is missed.

python scripts/bench_overheads.py [--only TEXT ...] [--repeats 3] [--records 5000] [--out results/bench/overheads.json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench_rig import Figures, count, judged, median_of
from rich.console import Console
from rich.table import Table

from triaccel_bench import worker
from triaccel_bench.configuration import compose
from triaccel_bench.files import write_atomically
from triaccel_bench.identity import RESULTS_VERSION
from triaccel_bench.records import (
    RUN_FILE,
    EpochRecord,
    LayerRecord,
    Provenance,
    RunRecord,
    planned_run,
    read_run,
)

HELP, FIXED, TABLES = "help", "run/fixed", "tables/records"
TARGETS = {HELP: ("<=", 1.5), FIXED: ("<=", 3.0), TABLES: ("<=", 10.0)}
SEEDS_A_CELL, LAYERS, EPOCHS = 5, 62, 30
TINY = [
    "dataset=synthetic", "dataset.image_size=8", "dataset.train_size=64", "dataset.test_size=32", "model=resnet8",
    "model.input_size=8", "dataset.crop_padding=1", "device=cpu", "memory.meter=tensors", "progress=none", "epochs=2",
    "method=fp32", "method.batch.initial=16", "method.batch.min=8",
]  # fmt: skip


def seconds_of(*command: str, cwd: Path) -> float:
    """Wall-clock of a command in a process of its own, which must succeed."""
    begun = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=cwd, capture_output=True, text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    taken = time.perf_counter() - begun
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    return taken


def help_seconds(folder: Path, repeats: int) -> dict:
    seconds_of("triaccel_bench.cli", "--help", cwd=folder)
    return median_of([seconds_of("triaccel_bench.cli", "--help", cwd=folder) for _ in range(repeats)])


def fixed_seconds(folder: Path, repeats: int, more: int = 4) -> dict:
    """What each run after the first takes beside its epochs: a command of one seed held against one of several."""
    found, trained = [], []
    for repeat in range(repeats):
        took = {}
        for seeds in (1, 1 + more):
            root = folder / f"{repeat}-{seeds}"
            wanted = f"seeds={list(range(seeds))}".replace(" ", "")
            took[seeds] = seconds_of("triaccel_bench.cli", *TINY, wanted, f"results.root={root}", cwd=folder)
        runs = {run.seed: run for run in map(read_run, root.rglob(RUN_FILE))}
        inside = [sum(e.train_seconds + e.evaluation_seconds for e in runs[seed].epochs) for seed in range(1, 1 + more)]
        trained.append(statistics.fmean(inside))
        found.append((took[1 + more] - took[1]) / more - trained[-1])
    return median_of(found, epochs_seconds=statistics.median(trained))


def tables_seconds(folder: Path, repeats: int, records: int) -> dict:
    size = fabricate(folder / "runs", records)
    command = "triaccel_bench.tables_cli", "--results", "runs", "--out", "tables"
    times = [seconds_of(*command, cwd=folder) for _ in range(repeats)]
    return median_of(times, records=records, megabytes=round(size / 1e6))


def fabricate(folder: Path, records: int) -> int:
    """Records as large as those of thirty epochs of a ResNet, five seeds a cell; returns their bytes."""
    methods = "fp32", "amp", "triaccel", "triaccel_batch"
    settings = {method: compose([f"method={method}", f"epochs={EPOCHS}"]).model_dump(mode="json") for method in methods}
    size = 0
    for number in range(records):
        cell, seed = divmod(number, SEEDS_A_CELL)
        method = methods[cell % len(methods)]
        run = _fabricated(settings[method], f"{cell:012x}", seed, 0.1 + cell // len(methods) / 1000)
        path = folder / f"{run.dataset}-{run.model}-{method}-{run.cell}" / f"seed-{seed}" / RUN_FILE
        path.parent.mkdir(parents=True)
        size += path.write_text(run.model_dump_json(indent=1))
    return size


def _fabricated(settings: dict, cell: str, seed: int, rate: float) -> RunRecord:
    chosen = settings | {"seeds": list(range(SEEDS_A_CELL)), "optimizer": settings["optimizer"] | {"lr": rate}}
    run = planned_run(chosen, seed, cell, RESULTS_VERSION)
    run.status, run.reason, run.meter, run.provenance = "done", None, "vram", _provenance()
    run.epochs = [
        EpochRecord(
            epoch=epoch, train_loss=1 / epoch, train_accuracy_percent=50 + epoch, evaluation_loss=1 / epoch,
            evaluation_accuracy_percent=50 + epoch, evaluation_samples=10_000, train_seconds=5 + seed / 100, steps=521,
            samples_seen=50_000, batch_mean=95.97, batch_min=96, batch_max=96, batch_last=80, learning_rate_last=rate,
            memory_peak_bytes=219_000_000 + seed, reserved_bytes=482_000_000, layers_requested={"bf16": LAYERS},
            layers_executed={"bf16": LAYERS},
        ) for epoch in range(1, EPOCHS + 1)
    ]  # fmt: skip
    run.layers = [
        LayerRecord(
            name=f"layer{layer}.conv", elements=10_000, requested="bf16", executed="bf16", variance=1.234e-9,
            eigenvalues=[1.5, 1.25, 1.125, 1.0625, 1.03125], lambda_age_steps=7, iterations=8, converged=True,
        ) for layer in range(LAYERS)
    ]  # fmt: skip
    return run


def _provenance() -> Provenance:
    return Provenance(
        code_version="0", python="3", torch="2", torchvision="0", device="cuda:0", device_name="Card", bf16_native=True,
        device_total_bytes=16 * 10**9, kernels="torch", kernels_reason="fabricated", started_at="2026-01-01",
    )  # fmt: skip


def measure(rows: dict[str, tuple[str, Callable[[Path], dict]]], only: list[str]) -> Figures:
    found = {}
    for name, (unit, of) in rows.items():
        if only and not any(part in name for part in only):
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                figure = of(Path(folder))
            except (RuntimeError, OSError) as error:
                figure = {"value": None, "error": str(error)}
        found[name] = judged(name, unit, figure, TARGETS)
        print(
            f"{name}: {found[name]['value']} {unit}, target {found[name]['target']}, ok {found[name]['ok']}", flush=True
        )
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="rows whose names hold one of these")
    parser.add_argument("--repeats", type=count, default=3, help="of every measurement; default: %(default)s")
    parser.add_argument("--records", type=count, default=5000, help="that tables are made of; default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("results/bench/overheads.json"), help="default: %(default)s")
    options = parser.parse_args(arguments)
    rows = {
        HELP: ("s", lambda folder: help_seconds(folder, options.repeats)),
        FIXED: ("s", lambda folder: fixed_seconds(folder, options.repeats)),
        TABLES: ("s", lambda folder: tables_seconds(folder, options.repeats, options.records)),
    }
    found = measure(rows, options.only)
    if not found:
        print(f"--only {' '.join(options.only)}: expected part of {', '.join(rows)}, got none", file=sys.stderr)
        return 2
    table = Table("row", "value", "unit", "target", "ok")
    for row in found.values():
        value = "failed" if row["value"] is None else f"{row['value']:.2f}"
        table.add_row(row["name"], value, *(str(row[key]) for key in ("unit", "target", "ok")))
    Console(width=100).print(table)
    head = {
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
    text = json.dumps(head | {"code_hash": worker.code_hash(), "rows": list(found.values())}, indent=1, allow_nan=False)
    try:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(options.out, f"{text}\n".encode())
    except OSError as error:
        print(f"--out {options.out}: expected a file that can be written, got {error}; name another", file=sys.stderr)
        return 2
    print(f"{len(found)} rows in {options.out}")
    return 1 if any(row["ok"] is False for row in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
