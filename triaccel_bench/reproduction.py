"""The plan that reproduces the paper, as command lines of ``triaccel-bench``, and the minutes that it takes.

Every part is a sweep of ``conf/experiment/reproduce``. What the controls need beside that (a mean batch, seconds, a run
to follow) is read from the records of Table 1.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache
from importlib.resources import files
from pathlib import Path
from statistics import fmean

from omegaconf import OmegaConf

from triaccel_bench.cells import Cell
from triaccel_bench.cli import jobs_of
from triaccel_bench.configuration import CONFIG_PACKAGE
from triaccel_bench.identity import flat, identity
from triaccel_bench.records import RunRecord
from triaccel_bench.runner import finished_run, recorded_run, seed_folder
from triaccel_bench.settings import Settings
from triaccel_bench.stats import LAST_EPOCHS, summarise
from triaccel_bench.tuning import FINALISTS, SECOND_ROUND, is_over, tunings, values

PARTS = {
    "tuning": "trials of learning rate, weight decay and thresholds on held-out training images, in two rounds",
    "table1": "Table 1 on CIFAR-10",
    "table2": "Table 2",
    "seeds": "ten seeds for claims about accuracy",
    "controls": "where Tri-Accel+'s gain comes from",
}
TRIALS = Path(str(files(CONFIG_PACKAGE))) / "trial"
OURS, EQUAL_TIME, STATIC = "triaccel_plus", ("fp32", "amp"), "amp"
"""The method that controls are of, what is given its time, and what is given its batch."""

_RUNG = 8
"""Batch sizes are multiples of it."""
_START_SECONDS = 8.0
"""Around the epochs of a run that nothing is recorded of: process, data, compilation, a last look at steps."""


@dataclass(frozen=True)
class Sweep:
    """Overrides of one ``triaccel-bench`` command."""

    part: str
    overrides: tuple[str, ...]

    @property
    def command(self) -> str:
        return shlex.join(["triaccel-bench", *self.overrides])

    def jobs(self) -> list[Settings]:
        """Raises as ``cli.jobs_of`` does."""
        return jobs_of(list(self.overrides))


class Lacking(Exception):
    """Records that a control rests on are not there yet; the message names them and how to make them."""


def sweep(part: str, given: Sequence[str]) -> Sweep:
    """A part that rests on no records; ``given``: the user's own overrides, of which trials are of tuning alone."""
    return Sweep(part, (f"+experiment=reproduce/{part}", *(given if part == "tuning" else _without(given, "trial"))))


def tuning_root(table1: Sequence[Settings], given: Sequence[str]) -> str:
    """Where trials are recorded, by the first of them: to compose all takes a while."""
    first = table1[0]
    one = f"model={first.model.name}", f"method={first.method.name}", "+trial=t0"
    return sweep("tuning", [*_without(given, "model", "method", "trial"), *one]).jobs()[0].results.root


@cache
def trial_files() -> dict[str, dict[str, object]]:
    """What each of ``conf/trial`` sets, by its name and dotted key."""
    return {
        path.stem: dict(flat(OmegaConf.to_container(OmegaConf.load(path)))) for path in sorted(TRIALS.glob("*.yaml"))
    }


def trial_name(trial: Cell) -> str | None:
    """Which of the files it was; ``None``: it was none of them."""
    tried = {key: OmegaConf.create(f"value: {text}").value for key, text in values(trial).items()}
    return next((name for name, file in trial_files().items() if tried == {key: file[key] for key in tried}), None)


def second_round(device_name: str, given: Sequence[str]) -> tuple[list[Sweep], list[Settings]]:
    """Of tuning: each method's finalists with more seeds, on networks of ``SECOND_ROUND``.

    Returns:
        A sweep a method and network, by records of the whole first round; and the runs to come where that is not over.
    """
    # To compose every trial takes a while.
    one_each = sweep("tuning", [*_without(given, "trial"), "+trial=t0"]).jobs()
    networks = sorted({job.model.name for job in one_each} & SECOND_ROUND.keys())
    if not networks:
        return [], []
    first = sweep("tuning", [*_without(given, "trial", "model"), f"model={','.join(networks)}"]).jobs()
    found, coming = [], []
    for dataset, model, method in dict.fromkeys((job.dataset.name, job.model.name, job.method.name) for job in first):
        jobs = [job for job in first if (job.dataset.name, job.model.name, job.method.name) == (dataset, model, method)]
        seeds = jobs[0].seeds
        more = SECOND_ROUND[model] - len(seeds)
        if more <= 0:
            continue
        seeds = [*seeds, *range(max(seeds) + 1, max(seeds) + 1 + more)]
        runs = [recorded_run(job, device_name, seed) for job in jobs for seed in job.seeds]
        if not all(run is not None and is_over(run) for run in runs):
            coming += [job.model_copy(update={"seeds": tuple(seeds)}) for job in jobs[:FINALISTS]]
            continue
        kept = _without(given, "dataset", "model", "method", "trial", "seeds")
        one = f"dataset={dataset}", f"model={model}", f"method={method}", f"seeds={seeds}".replace(" ", "")
        for tuning in tunings(runs):
            names = sorted(filter(None, map(trial_name, tuning.finalists)))
            if names:
                found.append(sweep("tuning", [*kept, *one, f"+trial={','.join(names)}"]))
    return found, coming


def controls(table1: Sequence[Settings], device_name: str, given: Sequence[str]) -> tuple[list[Sweep], list[str]]:
    """The sweeps of all controls that records allow, and a sentence for each network whose records are lacking.

    Args:
        table1: the cells of that part.
    """
    found, lacking = [], []
    for model in dict.fromkeys(settings.model.name for settings in table1):
        cells = {settings.method.name: settings for settings in table1 if settings.model.name == model}
        try:
            found += _controls_of(model, cells, device_name, _without(given, "model", "method", "trial"))
        except Lacking as error:
            lacking.append(str(error))
    return found, lacking


def _controls_of(model: str, cells: dict[str, Settings], device_name: str, given: list[str]) -> list[Sweep]:
    ours = _runs(model, OURS, cells, device_name)
    settings = cells[OURS]
    optimizer, rules = settings.optimizer, settings.method.batch

    def control(name: str, *overrides: str, kept: Sequence[str] = given) -> Sweep:
        return Sweep("controls", (f"+experiment=reproduce/{name}", f"model={model}", *kept, *overrides))

    batch = _mean_batch(ours)
    rate = optimizer.lr * rate_factor(rules.lr_rule, batch, rules.initial)
    decay = f"optimizer.weight_decay={optimizer.weight_decay!r}"
    most = max(batch, rules.max)
    sizes = f"method.batch.initial={batch}", f"method.batch.max={most}", f"method.batch.min={min(batch, rules.min)}"
    made = [control("mean_batch", *sizes, f"optimizer.lr={rate:.6g}", decay)]
    for method in EQUAL_TIME:
        epochs = _epochs_in(_seconds(ours), _runs(model, method, cells, device_name))
        kept = _without(given, "epochs")
        made.append(control("equal_time", f"method={method}", f"epochs={epochs}", kept=kept))
    recorded = seed_folder(settings, identity(settings, device_name), settings.seeds[0])
    followed = f"replay.run={recorded}", f"optimizer.lr={optimizer.lr!r}", decay
    # The method's settings are the recorded run's.
    made.append(control("replay", *followed, kept=[text for text in given if not text.startswith("method.")]))
    return made


def _runs(model: str, method: str, cells: dict[str, Settings], device_name: str) -> list[RunRecord]:
    """Every seed's record. Raises ``Lacking``."""
    if method not in cells:
        raise Lacking(f"{model}: expected {method} among Table 1's methods, got none; leave method= out")
    settings = cells[method]
    found = {seed: finished_run(settings, device_name, seed) for seed in settings.seeds}
    lacking = [str(seed) for seed, run in found.items() if run is None]
    if lacking:
        raise Lacking(
            f"{model}: expected finished runs of {method} below {settings.results.root}, got none of "
            f"seed{'s' * (len(lacking) > 1)} {', '.join(lacking)}; run the part table1 first"
        )
    return list(found.values())


def _mean_batch(runs: Sequence[RunRecord]) -> int:
    mean = fmean(summarise(run).batch_mean for run in runs)
    return max(_RUNG, round(mean / _RUNG) * _RUNG)


def rate_factor(rule: str, batch: int, initial: int) -> float:
    """What ``schedule.batch_rate_factor`` is where there is no torch."""
    ratio = batch / initial
    return {"none": 1.0, "sqrt": math.sqrt(ratio), "linear": ratio}[rule]


def _seconds(runs: Sequence[RunRecord]) -> float:
    """Of training, a run."""
    return fmean(summarise(run).training_seconds for run in runs)


def _epochs_in(seconds: float, runs: Sequence[RunRecord]) -> int:
    each = fmean(summarise(run).seconds for run in runs)
    return max(1, round(seconds / each))


def _without(overrides: Sequence[str], *keys: str) -> list[str]:
    return [text for text in overrides if text.partition("=")[0].lstrip("+") not in keys]


@dataclass(frozen=True)
class Forecast:
    """Of one part, without runs that a part before has counted."""

    part: str
    runs: int
    done: int
    minutes: float
    """Of the runs that are left."""


@dataclass(frozen=True)
class _Pace:
    start_seconds: float
    epoch_seconds: float

    def of(self, epochs: int) -> float:
        return self.start_seconds + epochs * self.epoch_seconds


class Forecaster:
    """Says what runs will take, by records of this device where there are some, else by a few steps.

    Args:
        measure: seconds of an epoch with its evaluation, by a few steps (``runner.epoch_seconds``).
    """

    def __init__(self, device_name: str, measure: Callable[[Settings], float]) -> None:
        self._device_name, self._measure = device_name, measure
        self._paces: dict[tuple, _Pace] = {}
        self._counted: set[tuple[str, int]] = set()

    def forecast(self, part: str, jobs: Sequence[Settings]) -> Forecast:
        runs = done = 0
        seconds = 0.0
        for settings in jobs:
            cell = identity(settings, self._device_name)
            seeds = [seed for seed in settings.seeds if (cell, seed) not in self._counted]
            self._counted |= {(cell, seed) for seed in seeds}
            records = [finished_run(settings, self._device_name, seed) for seed in seeds]
            left = records.count(None)
            runs, done = runs + len(records), done + len(records) - left
            self._learn(settings, [record for record in records if record is not None])
            seconds += left and left * self._pace(settings).of(settings.epochs)
        return Forecast(part, runs, done, seconds / 60)

    def of_controls(self, table1: Sequence[Settings]) -> Forecast:
        """Of controls whose records are not there yet: each takes what the run that it imitates takes."""
        runs, seconds = 0, 0.0
        for settings in table1:
            if settings.method.name == OURS:
                static = [one for one in table1 if (one.model.name, one.method.name) == (settings.model.name, STATIC)]
                # Equal time, twice; the replay and its shuffled twin.
                for each in [*static, *[settings] * (len(EQUAL_TIME) + 2)]:
                    runs += len(settings.seeds)
                    seconds += len(settings.seeds) * self._pace(each).of(each.epochs)
        return Forecast("controls", runs, 0, seconds / 60)

    def _learn(self, settings: Settings, records: Iterable[RunRecord]) -> None:
        for record in records:
            self._paces[_pace_key(settings)] = _recorded_pace(record)

    def _pace(self, settings: Settings) -> _Pace:
        key = _pace_key(settings)
        if key not in self._paces:
            seconds = self._measure(settings)
            if settings.method.probes_curvature:
                seconds *= 1 + settings.method.curvature.max_overhead
            self._paces[key] = _Pace(_START_SECONDS, seconds)
        return self._paces[key]


def _pace_key(settings: Settings) -> tuple:
    """Runs of one key are as fast an epoch: thresholds and rates move plans and batches, but not by much."""
    return settings.dataset.name, settings.dataset.train_size, settings.model, settings.method.name


def _recorded_pace(run: RunRecord) -> _Pace:
    spent = [epoch.train_seconds + epoch.evaluation_seconds for epoch in run.epochs]
    start = _START_SECONDS
    if run.provenance and run.provenance.finished_at and not run.resumed_at:
        begun, ended = map(datetime.fromisoformat, (run.provenance.started_at, run.provenance.finished_at))
        start = max(0.0, (ended - begun).total_seconds() - sum(spent))
    return _Pace(start, fmean(spent[-LAST_EPOCHS:]))


def limited(wanted: Sweep, minutes: float | None) -> Sweep:
    """The same with what is left of a limit of time."""
    if minutes is None:
        return wanted
    return replace(wanted, overrides=(*wanted.overrides, f"runner.max_minutes={minutes:.6g}"))
