"""What a person sees while runs go on: a live bar on a terminal, whole plain lines everywhere else."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager
from itertools import zip_longest
from typing import Any

from triaccel_bench.labels import layer_mix
from triaccel_bench.records import RunRecord
from triaccel_bench.stats import split_seconds

MEMORY_LABEL = {"vram": "VRAM", "tensors": "tensors (not VRAM)", "off": "VRAM"}


class Reporter(AbstractContextManager):
    """Says nothing; what the others say, they add."""

    def __exit__(self, *exception) -> None: ...

    def start(self, label: str, meter: str) -> None:
        """A run begins; ``meter`` is the setting ``memory.meter``."""

    def progress(self, payload: dict[str, Any]) -> None: ...

    def epoch(self, payload: dict[str, Any], epochs: int) -> None: ...

    def line(self, text: str) -> None: ...

    def memory(self, label: str, run: RunRecord) -> None:
        """A cell has ended: where memory and time of one of its runs went."""


class Plain(Reporter):
    """One line an epoch and a note; never wrapped, never cut."""

    def __init__(self, now=time.monotonic) -> None:
        self._now = now
        self._label, self._meter = "", "vram"
        self._started = 0.0
        self._first: int | None = None

    def start(self, label: str, meter: str) -> None:
        self._label, self._meter, self._first = label, meter, None

    def epoch(self, payload: dict[str, Any], epochs: int) -> None:
        if self._first is None:
            # One that goes on has done the epochs before in no time of this process, and what a process does before its
            # first (kernels may take minutes to compile) it does once.
            self._first = payload["epoch"]
            self._started = self._now() - payload["train_seconds"] - payload["evaluation_seconds"]
        left = (self._now() - self._started) / (payload["epoch"] - self._first + 1) * (epochs - payload["epoch"])
        self.line(f"{self._label}  {epoch_text(payload, epochs, self._meter)}  {_clock(left)} left")

    def line(self, text: str) -> None:
        print(text, flush=True)

    def memory(self, label: str, run: RunRecord) -> None:
        for text in [*memory_panel(label, run), *split_line(label, run)]:
            self.line(text)


class Labelled(Plain):
    """Plain, for one of several jobs whose lines run together: each says whose it is, and no panel is torn apart.

    Args:
        label: the job's, until its first run begins.
    """

    def __init__(self, label: str, now=time.monotonic) -> None:
        super().__init__(now)
        self._label = label

    def line(self, text: str) -> None:
        super().line(text if text.startswith(self._label) else f"{self._label}: {text}")

    def memory(self, label: str, run: RunRecord) -> None:
        if panel := [*memory_panel(label, run), *split_line(label, run)]:
            super().line("\n".join(panel))


class Live(Plain):
    """Plain's lines above a rich bar with loss, accuracy, B, memory, precision mix and time left."""

    def __init__(self) -> None:
        super().__init__()
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=16),
            TaskProgressColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            transient=True,
        )
        self._task = None

    def __enter__(self) -> Live:
        self._bar.start()
        return self

    def __exit__(self, *exception) -> None:
        self._bar.stop()

    def start(self, label: str, meter: str) -> None:
        super().start(label, meter)
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(label, total=1.0, figures="starting")

    def progress(self, payload: dict[str, Any]) -> None:
        text = (
            f"loss {_number(payload['loss'], '.3f')}  train {_number(payload['accuracy_percent'], '.1f')} %  "
            f"B {payload['batch']}  {memory_text(payload['memory_bytes'], self._meter)}  "
            f"{layer_mix([payload['layers_executed']])}"
        )
        self._bar.update(self._task, completed=payload["share"], figures=text)

    def line(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)


def open_reporter(kind: str) -> Reporter:
    """``auto`` is live on a terminal and plain in a pipe, a log or a notebook cell."""
    if kind == "none" or sys.stdout is None:
        return Reporter()
    if kind == "rich" or (kind == "auto" and sys.stdout.isatty()):
        return Live()
    return Plain()


def epoch_text(payload: dict[str, Any], epochs: int, meter: str) -> str:
    """One epoch's figures in one line; ``payload`` is an ``EpochRecord`` as a dictionary."""
    peaks = [p for p in (payload["memory_peak_bytes"], payload["probe_peak_bytes"]) if p is not None]
    low, high = payload["batch_min"], payload["batch_max"]
    return "  ".join(
        (
            f"epoch {payload['epoch']}/{epochs}",
            f"loss {_number(payload['train_loss'], '.3f')}",
            f"accuracy {_number(payload['evaluation_accuracy_percent'], '.2f')} %",
            f"B {payload['batch_mean']:.0f} ({low}-{high})" if low != high else f"B {low}",
            memory_text(max(peaks, default=None), meter),
            layer_mix([payload["layers_executed"]]),
            f"{payload['train_seconds']:.2f} s",
        )
    )


def memory_text(count: int | None, meter: str) -> str:
    return f"{MEMORY_LABEL[meter]} {_gb(count)}{'' if count is None else ' GB'}"


def memory_panel(label: str, run: RunRecord) -> list[str]:
    """Where the memory of a run went, in lines of less than 80 characters; none where nothing is known of it."""
    if run.memory is None or run.meter == "off":
        return []
    kinds = dict(run.memory.kind_bytes)
    dataset, peak = kinds.pop("dataset", None), run.memory.step_peak_bytes
    kinds["together"] = None if peak is None else peak - (dataset or 0)
    peaks = [_largest(run, name) for name in ("memory_peak_bytes", "probe_peak_bytes")]
    own = max((count for count in peaks if count is not None), default=None)
    whole = {
        "data set": dataset,
        "allocated": None if own is None else own + (dataset or 0),
        "reserved": _largest(run, "reserved_bytes"),
        "process (NVML)": _largest(run, "process_bytes"),
        "device, all users": _largest(run, "device_used_bytes"),
    }
    columns = [
        _column("at a step's peak", kinds),
        _column("at a phase's peak", run.memory.phase_bytes),
        _column("data set included", whole),
    ]
    rows = zip_longest(*columns)
    return [
        f"{label}: {MEMORY_LABEL[run.meter]} in GB (1e9 bytes)",
        *(
            "  " + "   ".join(cell or " " * len(column[0]) for cell, column in zip(row, columns)).rstrip()
            for row in rows
        ),
    ]


def split_line(label: str, run: RunRecord) -> list[str]:
    """Where the time of a run's last epoch went, and its verdict, in one line; none where nothing was sampled."""
    if run.split is None or not run.epochs:
        return []
    last = run.epochs[-1]
    parts = ", ".join(
        f"{part} {'n/a' if seconds is None else f'{seconds / last.train_seconds:.0%}'.replace('%', ' %')}"
        for part, seconds in split_seconds(run, last).items()
    )
    verdict = run.split.verdict or f"verdict unknown: {run.split.reason}"
    sampled = f"sampled by the {run.split.clock}'s clock"
    return [f"{label}: {last.train_seconds:.2f} s of epoch {last.epoch}: {parts} ({sampled}); {verdict}"]


def _largest(run: RunRecord, figure: str) -> int | None:
    """The largest of a figure of the run's epochs; ``None`` if none has it."""
    return max((count for epoch in run.epochs if (count := getattr(epoch, figure)) is not None), default=None)


def _column(heading: str, sizes: dict[str, int | None]) -> list[str]:
    """Names and GB, all lines of one length, under a heading."""
    width = max(map(len, sizes))
    body = [f"{name:<{width}} {_gb(count, 4):>8}" for name, count in sizes.items()]
    return [f"{heading:<{len(body[0])}}", *body]


def _gb(count: int | None, digits: int = 3) -> str:
    return "n/a" if count is None else f"{count / 1e9:.{digits}f}"


def _number(value: float | None, form: str) -> str:
    return "n/a" if value is None else format(value, form)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
