"""What a sweep will take, from a few steps of its first cell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from triaccel_bench.data import DataError, DeviceData, ImageSet, load
from triaccel_bench.engine import Engine
from triaccel_bench.hardware import Hardware
from triaccel_bench.meters import Clock
from triaccel_bench.preflight import Check, duration
from triaccel_bench.settings import DatasetSettings, Settings

STEPS = 20
"""Timed steps, after those that warm up and are captured; fewer where they take longer than ``MOST_SECONDS``."""

MOST_SECONDS = 30.0

_WARM_UP_STEPS = 3
_EVALUATED_BATCHES = 3

_PAYS = 1.05
"""How many times faster FP16 must be than FP32 to be said to pay; less is noise."""


@dataclass(frozen=True)
class Pace:
    """Seconds of one step of ``batch`` images and of evaluating one image."""

    batch: int
    step_seconds: float
    evaluation_seconds: float

    def epoch_seconds(self, train: int, evaluated: int) -> float:
        return train / self.batch * self.step_seconds + evaluated * self.evaluation_seconds


def images_for(dataset: DatasetSettings) -> ImageSet:
    """The data set, or where it has not been fetched yet noise of its shape, which trains as fast.

    Raises:
        DataError: ``dataset.path`` names none, or there is none whose shape is known.
    """
    try:
        return load(dataset.model_copy(update={"download": False}))
    except DataError:
        if dataset.path is not None or dataset.train_size is None or dataset.test_size is None:
            raise
        return load(dataset.model_copy(update={"name": "synthetic", "path": None}))


def measure(settings: Settings, engine: Engine, data: DeviceData, clock: Clock) -> Pace:
    """Time steps and evaluation of a run that is thrown away."""
    batch = min(settings.method.batch.initial, data.train_count)
    data.begin_epoch(settings.seeds[0], 1)
    step_seconds = _step_seconds(engine, data, clock, batch)
    size = settings.evaluation.batch
    engine.evaluate(islice(data.eval_batches(size), 2))  # the second one is captured
    started = clock.read()
    _, _, samples = engine.evaluate(islice(data.eval_batches(size), _EVALUATED_BATCHES))
    return Pace(batch, step_seconds, (clock.read() - started) / samples)


def _step_seconds(engine: Engine, data: DeviceData, clock: Clock, batch: int) -> float:
    indices = data.order[:batch]
    for _ in range(_WARM_UP_STEPS):
        engine.step(indices)
    started, taken = clock.read(), 0
    while taken < STEPS and clock.now() - started < MOST_SECONDS:
        engine.step(indices)
        taken += 1
    return (clock.read() - started) / taken


def expectation(pace: Pace, data: DeviceData, cells: Sequence[Settings]) -> Check:
    """Time an epoch, a run and the sweep; other cells are taken to be as fast an image as the first."""
    first = cells[0]
    epoch = pace.epoch_seconds(data.train_count, data.eval_count) / 60
    label = f"{first.dataset.name}/{first.model.name}/{first.method.name}"
    runs = sum(len(settings.seeds) for settings in cells)
    of_each = (_epoch_minutes(pace, cell, first, epoch) * cell.epochs * len(cell.seeds) for cell in cells)
    finding = (
        f"{label}: {pace.step_seconds * 1e3:.2f} ms a step of {pace.batch} images, {duration(epoch)} an epoch, "
        f"{duration(epoch * first.epochs)} a run, {duration(sum(of_each))} for {runs} run{'s' * (runs != 1)}"
    )
    if len(cells) > 1:
        finding += " if the other cells take as long an image"
    if first.method.probes_curvature:
        finding += f", and up to {first.method.curvature.max_overhead:.0%} more for curvature"
    return Check("time", "ok", finding)


def _epoch_minutes(pace: Pace, settings: Settings, first: Settings, of_first: float) -> float:
    dataset = settings.dataset
    if dataset == first.dataset or dataset.train_size is None or dataset.test_size is None:
        return of_first
    return pace.epoch_seconds(dataset.train_size, dataset.test_size) / 60


def does_fp16_pay(engine: Engine, data: DeviceData, clock: Clock, batch: int, found: Hardware) -> Check:
    """FP32 against FP16 on a card without matrix units, by the clock. Changes the engine's plan."""
    layers = len(engine.network.layers)
    seconds = {}
    for level in ("fp32", "fp16"):
        engine.set_plan([level] * layers)
        seconds[level] = _step_seconds(engine, data, clock, batch)
    ratio = seconds["fp32"] / seconds["fp16"]
    each = ", ".join(f"{value * 1e3:.2f} ms in {level.upper()}" for level, value in seconds.items())
    told = f"a step takes {each} on {found.name}"
    if ratio >= _PAYS:
        return Check("FP16 pays", "ok", f"{told}, so FP16 pays ({ratio:.2f} times as fast)")
    remedy = "use method=fp32 or method.precision.bf16_substitute=fp32, unless memory is what you are short of"
    return Check("FP16 pays", "warning", f"{told}, so FP16 does not pay ({ratio:.2f} times as fast)", remedy)
