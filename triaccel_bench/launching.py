"""Jobs of a sweep handed to another launcher than Hydra's own: joblib, Slurm by submitit, Ray.

Every job is composed and judged in the process of the command first, whichever launcher is asked for; ``Withhold``
sees to that. Then the launcher takes ``Job``, with settings and absolute paths in it, to wherever its jobs run. A
job's outcomes come back as its return value. To stop all of them, wherever they are, the command makes a file in
the sweep's own folder, for which each job looks: signals do not travel.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from hydra._internal.callbacks import Callbacks
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from hydra.types import HydraContext
from omegaconf import DictConfig, open_dict, read_write

from triaccel_bench import deadline
from triaccel_bench.child import SECONDS_TO_END
from triaccel_bench.claims import Refused
from triaccel_bench.outcomes import Outcome
from triaccel_bench.preflight import Report
from triaccel_bench.progress import Labelled, Reporter
from triaccel_bench.runner import cell_labels, preflight, run_cells
from triaccel_bench.settings import Settings
from triaccel_bench.terminal import print_any_name

LOCAL = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
QUEUE = "SlurmLauncher"
INTERRUPTIONS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
POLL_SECONDS = 0.5
PATIENCE_SECONDS = SECONDS_TO_END + 10.0
"""What all jobs together get to end in, once they are asked to."""


FOR_RAY = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_DEDUP_LOGS": "0"}
"""Earlier releases of Ray hide all GPUs from a job that asks for none, and ours lease theirs; lines of progress that
differ in their figures alone are no repetition."""


class LaunchError(RuntimeError):
    """The launcher itself gave up, or lost one of its jobs; what has been finished is kept."""


@dataclass(frozen=True)
class Launch:
    """What Hydra's launchers are made of: the whole configuration of a sweep, and what composes one job of it."""

    config: DictConfig
    loader: ConfigLoader

    @property
    def folder(self) -> Path:
        return Path(str(self.config.hydra.sweep.dir)).absolute()

    @property
    def launcher(self) -> str:
        return self.config.hydra.launcher._target_.rsplit(".", 1)[1]


class Withhold(Callback):
    """Hydra composes a sweep as if its own launcher were to run it; the one that was asked for is kept for later.

    Attributes:
        kept: None: it was Hydra's own, or there was no sweep.
    """

    kept: Launch | None = None

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        if config.hydra.launcher._target_ == LOCAL:
            return
        # Named by the time and at random: asked for once, it is the same in the copy.
        str(config.hydra.sweep.dir)
        Withhold.kept = Launch(deepcopy(config), GlobalHydra.instance().config_loader())
        with read_write(config), open_dict(config):
            config.hydra.launcher = {"_target_": LOCAL}


@dataclass(frozen=True)
class Job:
    """One cell of a sweep, wherever the launcher has brought it; called by Hydra, which says which one.

    Attributes:
        labels: what the cells are called, as ``cell_labels`` has it.
        began: as ``deadline.begun`` told it in the process of the command; ``None``: a job's time is its own.
    """

    cells: tuple[Settings, ...]
    labels: tuple[str, ...]
    stop: Path
    began: tuple[str, float] | None = None

    @property
    def failed(self) -> Path:
        """There once a run of any job has failed."""
        return self.stop.with_name("failed")

    def forget(self) -> None:
        for told in (self.stop, self.failed):
            told.unlink(missing_ok=True)

    def __call__(self, config: DictConfig) -> list[Outcome]:
        return self.run(HydraConfig.get().job.num)

    def run(self, number: int) -> list[Outcome]:
        deadline.begin(self.began)
        settings, label = self.cells[number], self.labels[number]
        if self.stop.exists():
            return [Outcome(label, settings.seeds[0], "interrupted", "before it began", None)]
        if settings.on_failure == "stop" and self.failed.exists():
            return [Outcome(label, seed, "skipped", None, None) for seed in settings.seeds]
        print_any_name()
        reporter = Reporter() if settings.progress == "none" else Labelled(label)
        try:
            with _start_method(), stopped_by(self.stop):
                outcomes = run_cells([settings], reporter, self.failed.exists, [label])
        except Refused as error:
            outcomes = [Outcome(label, settings.seeds[0], "refused", str(error), None)]
        except KeyboardInterrupt:
            outcomes = [Outcome(label, settings.seeds[0], "interrupted", "asked to stop", None)]
        if any(outcome.failed for outcome in outcomes):
            with suppress(OSError):
                self.failed.touch()
        return outcomes


@dataclass(frozen=True)
class Look:
    """The checks of all cells where the launcher's jobs run."""

    cells: tuple[Settings, ...]

    def __call__(self, config: DictConfig) -> Report:
        with _start_method():
            return preflight(self.cells)


@contextmanager
def _start_method() -> Iterator[None]:
    """Workers of a pool tell their children how they were started themselves, and these know nothing of that pool."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("forkserver", force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(before, force=True)


@contextmanager
def stopped_by(stop: Path) -> Iterator[None]:
    """``KeyboardInterrupt`` here, once, when there is that file, or one of ``INTERRUPTIONS``."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    listening, ended, here = True, threading.Event(), threading.get_ident()

    def interrupt(*_: object) -> None:
        nonlocal listening
        if listening:
            listening = False
            raise KeyboardInterrupt

    def watch() -> None:
        while not ended.wait(POLL_SECONDS):
            if stop.exists():
                signal.pthread_kill(here, signal.SIGTERM)
                return

    before = {number: signal.signal(number, interrupt) for number in INTERRUPTIONS}
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        listening = False
        ended.set()
        watcher.join()
        for number, handler in before.items():
            # None: it was not installed by Python.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def launch(how: Launch, cells: Sequence[Settings], overrides: Sequence[list[str]]) -> list[Outcome]:
    """Run each cell as a job, whose overrides say how Hydra composes it there.

    Raises:
        LaunchError: the launcher gave up.
        KeyboardInterrupt: it was asked for; jobs have ended, or will as soon as they look.
    """
    stop = how.folder / "stop"
    # What waits in a queue is not late, and limits of time there are limits of a job.
    began = None if how.launcher == QUEUE else deadline.begun()
    job = Job(tuple(_anywhere(settings) for settings in cells), tuple(cell_labels(cells)), stop, began)
    how.folder.mkdir(parents=True, exist_ok=True)
    # A folder that the user named may hold those of a command that was killed.
    job.forget()
    with _asking_to_stop(stop) as asked:
        returned = _launched(how, job, overrides)
    job.forget()
    if asked:
        raise KeyboardInterrupt
    outcomes: list[Outcome] = []
    for number, (label, settings, one) in enumerate(zip(job.labels, cells, returned)):
        if one.status == JobStatus.COMPLETED:
            outcomes += [replace(outcome, number=number) for outcome in one.return_value]
        else:
            error = one._return_value
            reason = f"the job ended early ({type(error).__name__}: {error})"
            outcomes += [Outcome(label, seed, "failed", reason, None, number=number) for seed in settings.seeds]
    return outcomes


def look(how: Launch, cells: Sequence[Settings], overrides: Sequence[list[str]]) -> Report:
    """``preflight`` of all cells in one job. Raises as ``launch`` does, and what the job raised."""
    (one,) = _launched(how, Look(tuple(_anywhere(settings) for settings in cells)), overrides[:1])
    return one.return_value


def _launched(how: Launch, task: Any, overrides: Sequence[list[str]]) -> Sequence[JobReturn]:
    # Its folder is named by the time and at random: one name for all, not one for each process that composes.
    config, folder = deepcopy(how.config), str(how.folder)
    with read_write(config), open_dict(config):
        config.hydra.overrides.hydra.append(f"hydra.sweep.dir={_quoted(folder)}")
        config.hydra.sweep.dir = folder
    for name, value in FOR_RAY.items():
        os.environ.setdefault(name, value)
    context = HydraContext(config_loader=how.loader, callbacks=Callbacks(config))
    launcher = Plugins.instance().instantiate_launcher(hydra_context=context, task_function=task, config=config)
    try:
        with _deaf_children(type(launcher).__name__):
            return launcher.launch(overrides, initial_job_idx=0)
    except SystemExit:
        # Ray answers SIGTERM with it.
        raise KeyboardInterrupt from None
    except Exception as error:
        said = (str(error).strip().splitlines() or [""])[0]
        what = f"{type(launcher).__name__} ended early ({type(error).__name__}: {said})"
        raise LaunchError(f"{what}; what it kept of its jobs lies below {folder}") from None


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _anywhere(settings: Settings) -> Settings:
    """The same with absolute paths: who starts the job chooses its working folder."""
    results, dataset, model = settings.results, settings.dataset, settings.model
    results = results.model_copy(update={"root": _absolute(results.root), "scratch": _absolute(results.scratch)})
    dataset = dataset.model_copy(update={"root": _absolute(dataset.root), "path": _absolute(dataset.path)})
    if model.weights not in ("none", "imagenet"):
        model = model.model_copy(update={"weights": _absolute(model.weights)})
    replayed = settings.replay.model_copy(update={"run": _absolute(settings.replay.run)})
    return settings.model_copy(update={"results": results, "dataset": dataset, "model": model, "replay": replayed})


def _absolute(path: str | None) -> str | None:
    return None if path is None else os.path.abspath(path)


@contextmanager
def _asking_to_stop(stop: Path) -> Iterator[list[str]]:
    """Signals make the file that jobs look for; ``KeyboardInterrupt`` if these take too long. Yields who asked."""
    asked: list[str] = []

    def ask(number: int, frame: object) -> None:
        if not asked:
            asked.append(signal.Signals(number).name)
            with suppress(OSError):
                stop.touch()
            signal.setitimer(signal.ITIMER_REAL, PATIENCE_SECONDS)

    def give_up(*_: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = {number: signal.signal(number, ask) for number in INTERRUPTIONS}
    before[signal.SIGALRM] = signal.signal(signal.SIGALRM, give_up)
    try:
        yield asked
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextmanager
def _deaf_children(launcher: str) -> Iterator[None]:
    """Ctrl-C reaches the whole process group; what is started here does not hear it, and is told by the file.

    A worker that waits for its next job would end of it, and a pool that loses one kills all others. They inherit
    what this thread blocks; another one hears the signal meanwhile.
    """
    ended = threading.Event()
    threading.Thread(target=ended.wait, daemon=True).start()
    # Before the signal is blocked: the start of a tracker unblocks it.
    resource_tracker.ensure_running()
    if launcher == "JoblibLauncher":
        from joblib.externals.loky.backend import resource_tracker as trackers_of_joblib

        trackers_of_joblib.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        ended.set()
