"""What the benchmarks share: options, trainers, clocks, and a report that is on disk after every job."""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import operator
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hydra.errors import HydraException
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from triaccel_bench import graphs, worker
from triaccel_bench.configuration import compose
from triaccel_bench.data import DeviceData, ImageSet, load
from triaccel_bench.files import write_atomically
from triaccel_bench.graphs import Graph
from triaccel_bench.hardware import inspect
from triaccel_bench.identity import RESULTS_VERSION
from triaccel_bench.records import finite, planned_run
from triaccel_bench.trainer import Trainer

SEED = 0
CAPTURED_AFTER = 2
"""Steps of one batch size after which it is replayed: an eager one, and the capture."""
WARM_UP_STEPS = 50
TABLE_WIDTH = 180
"""Characters, where no terminal says how many there are."""
REFUSALS = (*worker.REFUSALS, HydraException, OSError)


def _within(value: float, bounds: tuple[float, float]) -> bool:
    return bounds[0] <= value <= bounds[1]


RELATIONS = {"<=": operator.le, "<": operator.lt, ">=": operator.ge, "==": operator.eq, "in": _within}

Figures = dict[str, dict[str, Any]]
"""By row: its ``value``, and whatever else is known of it."""
Targets = Mapping[str, tuple[str, Any]]
"""By row: one of ``RELATIONS`` and its bound; of "in" the lower and the upper one, both allowed."""


@dataclass(frozen=True)
class Job:
    """One thing to measure, in a process that goes on if it fails."""

    rows: Mapping[str, str]
    """The unit of each row that ``measure`` returns."""
    measure: Callable[..., Figures]
    arguments: Sequence[Any] = ()
    """What ``measure`` takes after the bench."""
    quick: bool = False
    """Whether it is part of a first look."""

    def matches(self, parts: Sequence[str]) -> bool:
        return not parts or any(part in name for name in self.rows for part in parts)


class Bench:
    """Runs jobs one after the other.

    Args:
        base: overrides of every configuration.
        head: what the file says above its rows.
        path: where the file is written after every job; ``None``: nowhere.
        steps: steps a repeat.
        epochs: of an adaptive run: enough for its plan to have moved and to stand still.
        data, overrides: what the script was told, for a process that measures the same again.
    """

    def __init__(
        self,
        base: Sequence[str],
        images: ImageSet,
        jobs: Sequence[Job],
        targets: Targets,
        head: Mapping[str, Any],
        path: Path | None,
        repeats: int,
        steps: int,
        epochs: int = 12,
        device: str = "cuda",
        say: Callable[[str], None] = print,
        data: Path | None = None,
        overrides: Sequence[str] = (),
    ) -> None:
        self.data, self.overrides = data, list(overrides)
        self.images, self.repeats, self.steps, self.epochs = images, repeats, steps, epochs
        self._base, self._targets, self._head, self._path, self._say = list(base), targets, dict(head), path, say
        self._jobs = {name: job for job in jobs for name in job.rows}
        self._device_text = device
        self.hardware = inspect(device, "auto")
        self.device = self.hardware.device
        self.rows: Figures = {}

    def trainer(self, *overrides: str, kernels: str = "auto", emit: Callable = lambda kind, payload: None) -> Trainer:
        """A trainer of this configuration on the benchmark's images; its engine can be stepped without its loop."""
        # The one before may hold its memory until its cycles are found, and would be part of this one's figures.
        gc.collect()
        # Of what conf/ ships: figures are compared over years, and what was tuned for a cell moves.
        settings = compose(["tuned=none", *self._base, *overrides])
        hardware = self.hardware if kernels == "auto" else inspect(self._device_text, kernels)
        run = planned_run(settings.model_dump(mode="json"), SEED, "benchmark", RESULTS_VERSION)
        return Trainer(settings, SEED, hardware, self.images, run, emit)

    def timed(self, call: Callable[[], object], count: int | None = None, repeats: int | None = None) -> list[float]:
        """Milliseconds a call, one for each repeat of ``count`` calls: by device events, or the wall-clock of a CPU."""
        count, times = count or self.steps, []
        for _ in range(repeats or self.repeats):
            if self.device.type == "cuda":
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                for _ in range(count):
                    call()
                end.record()
                end.synchronize()
                times.append(start.elapsed_time(end) / count)
            else:
                started = time.perf_counter()
                for _ in range(count):
                    call()
                times.append(1e3 * (time.perf_counter() - started) / count)
        return times

    def timed_on_device(
        self, call: Callable[[], object], flush: Callable[[], None] = lambda: None, calls: int = 100
    ) -> list[float]:
        """Milliseconds a call of something so short that launching it takes longer: ``calls`` of it in one graph."""

        def many() -> None:
            for _ in range(calls):
                call()

        if self.device.type != "cuda":
            return [each / calls for each in self.timed(many, 1)]
        graph = Graph(many)
        flush()
        graph.replay()
        times = [each / calls for each in self.timed(graph.replay, 3)]
        graph.release()
        return times

    def value(self, name: str) -> float | None:
        """A row's value; its job runs now if it has not yet. Ask before anything of one's own lies on the device."""
        if name not in self.rows:
            self.run(self._jobs[name])
        return self.rows[name]["value"]

    def run(self, job: Job) -> None:
        """Measure; a job that raises leaves rows that say so. The file holds all that was measured up to now."""
        if job.rows.keys() <= self.rows.keys():
            return
        started = time.perf_counter()
        try:
            found = job.measure(self, *job.arguments)
            found = {name: found[name] for name in job.rows}
        except Exception as error:
            traceback.print_exc()
            text = (str(error).strip() or "no message").splitlines()[0]
            found = {name: {"value": None, "error": f"{type(error).__name__}: {text}"} for name in job.rows}
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        for name, unit in job.rows.items():
            self.rows[name] = judged(name, unit, found[name], self._targets)
            self._say(f"{name}: {_shown(self.rows[name]['value'])} {unit}{_verdict(self.rows[name])}")
        self._say(f"  ({time.perf_counter() - started:.1f} s)")
        self.save()

    def save(self) -> None:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps(self._head | {"rows": list(self.rows.values())}, indent=1, allow_nan=False)
            write_atomically(self._path, f"{text}\n".encode())

    def table(self) -> Table:
        made = Table("row", "value", "unit", "target", "spread", "besides")
        for row in self.rows.values():
            spread = " .. ".join(map(_shown, row.get("spread", ())))
            besides = {key: row[key] for key in row if key not in ("name", "value", "unit", "target", "ok", "spread")}
            text = ", ".join(f"{key} {_shown(value)}" for key, value in besides.items() if value is not None)
            target = f"{row['target'] or ''}{_verdict(row)}"
            made.add_row(*map(escape, (row["name"], _shown(row["value"]), row["unit"], target, spread, text)))
        return made


def judged(name: str, unit: str, figure: Mapping[str, Any], targets: Targets) -> dict[str, Any]:
    """A row: the figure, its target in words and whether it is met; what has no target is neither met nor missed."""
    value = finite(figure["value"])
    target = ok = None
    if name in targets:
        relation, bound = targets[name]
        target = f"{relation} {bound}" if relation != "in" else "{} .. {}".format(*bound)
        ok = value is not None and RELATIONS[relation](value, bound)
    if "error" in figure:
        ok = False
    return {"name": name, "value": value, "unit": unit, "target": target, "ok": ok} | {
        key: held for key, held in figure.items() if key != "value"
    }


def median_of(values: Sequence[float], **besides: Any) -> dict[str, Any]:
    """The figure of repeated measurements."""
    return {"value": statistics.median(values), "spread": [min(values), max(values)], **besides}


def over(theirs: float | None, ours: float | None) -> float | None:
    """How many times ours theirs is; ``None`` where one of them is missing."""
    return None if theirs is None or not ours else theirs / ours


def stepper(made: Trainer) -> Callable[[], None]:
    """The step of a trainer's engine over new indices of full batches, warmed up."""
    batches = full_batches(made.data, made.settings.method.batch.initial)

    def step() -> None:
        made.engine.step(next(batches))

    for _ in range(CAPTURED_AFTER + WARM_UP_STEPS):
        step()
    return step


def full_batches(data: DeviceData, batch: int) -> Iterator[Tensor]:
    """Indices of an epoch's full batches, over and over."""
    data.begin_epoch(SEED, 1)
    return itertools.cycle(data.order[: data.train_count // batch * batch].split(batch))


def epoch_batches(made: Trainer, epoch: int) -> Iterator[Tensor]:
    """One epoch's indices, batch by batch."""
    sampler = made.data.begin_epoch(SEED, epoch)
    while sampler.remaining:
        yield sampler.take(made.settings.method.batch.initial)


def whole_epoch(made: Trainer, epoch: int) -> None:
    """The steps of one epoch as the trainer drives them, without its control steps."""
    for indices in epoch_batches(made, epoch):
        made.engine.step(indices)
    made.data.prepare(SEED, epoch + 1)


def warm_up(made: Trainer, epoch: int) -> None:
    """Capture every batch size of an epoch, and draw that epoch."""
    for indices in {len(indices): indices for indices in epoch_batches(made, epoch)}.values():
        for _ in range(CAPTURED_AFTER + 1):
            made.engine.step(indices)
    made.data.prepare(SEED, epoch)


@contextmanager
def one_core() -> Iterator[None]:
    """Every thread of this process on one CPU core, and torch's operations in one thread, as they would be there."""
    allowed, threads = os.sched_getaffinity(0), torch.get_num_threads()
    torch.set_num_threads(1)
    _confine({max(allowed)})
    try:
        yield
    finally:
        _confine(allowed)
        torch.set_num_threads(threads)


def _confine(cores: set[int]) -> None:
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), cores)
        except ProcessLookupError:  # it has ended since
            continue


def common_options(description: str, out: str) -> argparse.ArgumentParser:
    """A parser of what every benchmark is told."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data", type=Path, help=".npz with x_train y_train x_test y_test; else a generated set")
    parser.add_argument("--out", type=Path, default=Path(out), help="default: %(default)s")
    parser.add_argument("--repeats", type=count, help="of every measurement; default: 7, with --quick 2")
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="rows whose names hold one of these")
    parser.add_argument("--override", nargs="+", default=[], metavar="KEY=VALUE", help="settings of every run of ours")
    parser.add_argument("--quick", action="store_true", help="a first look: few rows, few steps")
    parser.add_argument("--resume", action="store_true", help="keep rows that --out has, of this card and code")
    return parser


def count(text: str) -> int:
    """An option's value: a whole number of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text}")
    return int(text)


def run_benchmark(
    options: argparse.Namespace,
    jobs: Sequence[Job],
    targets: Callable[[str], Targets],
    facts: Mapping[str, Any],
    steps: int,
    epochs: int = 12,
) -> int:
    """Measure what ``options`` ask for, and print the table; returns the exit code.

    Args:
        targets: those of a device of this name.
        facts: what stands in the file beside the machine's and the commit's.
        steps, epochs: of ``Bench``.
    """
    if not torch.cuda.is_available():
        print("expected a CUDA device to measure, got none; run this on a machine with an NVIDIA GPU", file=sys.stderr)
        return 2
    for name, value in worker.CUBLAS_WORKSPACES.items():
        os.environ.setdefault(name, value)
    base = ["device=cuda", "progress=none"]
    if options.data is None:
        base += ["dataset=synthetic", "dataset.train_size=50000", "dataset.test_size=10000"]
    else:
        base += ["dataset=cifar10", f"dataset.path={json.dumps(str(options.data.resolve()))}"]
    base += options.override
    found = inspect("cuda", "auto")
    repeats = options.repeats or (2 if options.quick else 7)
    provenance = worker.provenance(found)
    head = {
        "device": found.name,
        "torch": provenance.torch,
        "triton": provenance.triton,
        "cuda": provenance.cuda,
        "date": provenance.started_at,
        "commit": provenance.git_commit,
        "changed_since_commit": provenance.git_dirty,
        "code_hash": provenance.code_hash,
        "data": "synthetic" if options.data is None else options.data.name,
        **facts,
        "repeats": repeats,
    }
    chosen = [job for job in jobs if job.matches(options.only) and (job.quick or not options.quick)]
    if not chosen:
        asked = " ".join(options.only)
        print(f"--only {asked}: expected part of a row's name, got none of a row that is measured", file=sys.stderr)
        return 2
    rows: Figures = {}
    if options.resume:
        try:
            rows = resumed(options.out, head)
        except (ValueError, OSError) as error:
            print(error, file=sys.stderr)
            return 2
    try:
        images = load(compose(base).dataset)
    except REFUSALS as error:
        print(error, file=sys.stderr)
        return 2
    bench = Bench(
        base,
        images,
        jobs,
        targets(found.name),
        head,
        options.out,
        repeats,
        steps,
        epochs,
        data=options.data,
        overrides=options.override,
    )
    bench.rows |= rows
    # As a run has it: the stream of captures also for all else.
    with torch.cuda.stream(graphs.stream(found.device)):
        for job in chosen:
            bench.run(job)
    console = Console()
    (console if console.is_terminal else Console(width=TABLE_WIDTH)).print(bench.table())
    print(f"{len(bench.rows)} rows in {options.out}")
    return 1 if any(row["ok"] is False for row in bench.rows.values()) else 0


def resumed(path: Path, head: dict[str, Any]) -> Figures:
    """Rows that an earlier sitting left in ``path``, but for failed ones; ``head`` then says when that was.

    Raises:
        ValueError: they are of another card, code or extent, or nobody's.
        OSError: there are none.
    """
    earlier = json.loads(path.read_text())
    if not isinstance(earlier, dict) or not isinstance(earlier.get("rows"), list):
        raise ValueError(f"--resume: expected {path} to hold a benchmark's rows, got none; leave it out")
    for key, value in head.items():
        if key not in _OF_A_SITTING and earlier.get(key) != json.loads(json.dumps(value)):
            raise ValueError(
                f"--resume: expected figures of {key}={value} in {path}, got {earlier.get(key)}; leave it out, or name "
                "another --out"
            )
    head["sittings"] = [*earlier.get("sittings", [earlier["date"]]), head["date"]]
    return {row["name"]: row for row in earlier["rows"] if "error" not in row}


_OF_A_SITTING = ("date", "commit", "changed_since_commit", "sittings")


def _verdict(row: Mapping[str, Any]) -> str:
    return {None: "", True: " ok", False: " MISSED"}[row["ok"]] if "error" not in row else f" FAILED ({row['error']})"


def _shown(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
