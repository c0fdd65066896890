"""Runs of tests with their records on disk, and what can be done to them."""

from __future__ import annotations

from pathlib import Path

import torch
from tiny import images, trainer

from triaccel_bench.records import RUN_FILE, TRACE_FILE, RunRecord, Trace, read_run, read_trace, write_run
from triaccel_bench.settings import Settings
from triaccel_bench.trainer import Trainer


def train(chosen: Settings, folder: Path, keeper=None, prepare=lambda made: None) -> tuple[Trainer, RunRecord]:
    """Train over 100 images and leave the record, ``prepare`` having had the trainer before."""
    made, run = trainer(chosen, images(train=100), keeper=keeper)
    prepare(made)
    made.train()
    write(folder, made, run)
    return made, run


def write(folder: Path, made: Trainer, run: RunRecord) -> None:
    run.status, run.reason = "done", None
    write_run(folder, run, made.trace)


def read(folder: Path) -> tuple[RunRecord, Trace]:
    return read_run(folder / RUN_FILE), read_trace(folder / TRACE_FILE)


def memory_runs_out_at(*updates: int):
    """For ``prepare``: the first attempts at these updates find no memory."""

    def prepare(made: Trainer) -> None:
        count, update = 0, made.engine.moments.update

        def failing(*arguments):
            nonlocal count
            count += 1
            if count in updates:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            update(*arguments)

        made.engine.moments.update = failing

    return prepare
