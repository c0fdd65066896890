"""Sweeps by other launchers than Hydra's own: the same records, exit codes and words, wherever a job ran."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from test_cli import COMMAND, TINY, here, nothing_left_of, processes_of, records, run  # noqa: F401

from triaccel_bench import cli, deadline, launching
from triaccel_bench.launching import stopped_by
from triaccel_bench.preflight import Check, Report
from triaccel_bench.records import CHECKPOINT_FILE
from triaccel_bench.runner import Outcome


def needs(extra: str, module: str):
    found = importlib.util.find_spec("hydra_plugins") and importlib.util.find_spec(f"hydra_plugins.{module}")
    return pytest.mark.skipif(not found, reason=f"needs pip install -e '.[{extra}]'")


with_joblib = needs("joblib", "hydra_joblib_launcher")
with_submitit = needs("submitit", "hydra_submitit_launcher")
with_ray = needs("ray", "hydra_ray_launcher")
JOBLIB = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
SWEEP = ["-m", *TINY, "method=fp32,amp", "seeds=[0],[0,1]"]
ASKED = [("amp", 0, "done"), ("amp", 1, "done"), ("fp32", 0, "done"), ("fp32", 1, "done")]


def found(root: Path) -> list[tuple[str, int, str]]:
    return sorted((record["method"], record["seed"], record["status"]) for record in records(root))


@with_joblib
def test_joblib_runs_two_jobs_at_once_and_each_seed_once(tmp_path, run):  # noqa: F811
    done = run(*SWEEP, *JOBLIB)
    assert done.returncode == 0, done.stdout + done.stderr
    assert found(tmp_path) == ASKED
    head, *lines = done.stdout[: done.stdout.index("Table 1")].splitlines()
    assert head.startswith("4 jobs by JoblibLauncher")
    assert sum("finished before, reused" in line for line in lines) == 2, "asked for by two jobs, run by one"
    assert all(line.startswith(("synthetic/resnet8/", "  ")) for line in lines if line)
    assert done.stdout.count("Table 1") == 1 and not list(tmp_path.glob(".hydra*"))


@with_joblib
def test_ctrl_c_ends_all_jobs_with_their_checkpoints_and_those_who_wait_too(tmp_path):
    command = [*COMMAND, "-m", *TINY, "epochs=1,1000000", "method=fp32", "seeds=[0]", *JOBLIB, "results.root=runs"]
    pipe, environment = subprocess.PIPE, {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True, start_new_session=True, env=environment
    ) as process:
        try:
            words = {"at a step's peak", "/1000000"}
            while words and (line := process.stdout.readline()):
                words = {word for word in words if word not in line}
            # The worker that is through waits for a job; the other one trains.
            time.sleep(0.5)
            os.killpg(process.pid, signal.SIGINT)
            said = process.communicate(timeout=60)[1]
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130, said
    assert said.startswith("triaccel-bench: interrupted; finished seeds are kept") and said.count("\n") == 1
    assert len(list(tmp_path.rglob(CHECKPOINT_FILE))) == len(records(tmp_path)) == 1
    assert nothing_left_of(process.pid)


@with_submitit
def test_submitits_local_executor_runs_a_sweep(tmp_path, here, capfd, monkeypatch):  # noqa: F811
    sweep = ["-m", *TINY, "method=fp32,amp", "seeds=[0]", "results.root=some/where", "hydra/launcher=submitit_local"]
    status = cli.run(sweep)
    said = capfd.readouterr()
    assert status == 0, said
    assert found(tmp_path / "some" / "where") == [("amp", 0, "done"), ("fp32", 0, "done")]
    assert not list((tmp_path / "some").rglob("some")), "a relative root means the same folder in each job"
    logs = [path.read_text() for path in (tmp_path / "some/where").rglob("*_log.out")]
    assert sum("synthetic/resnet8/fp32/seed 0  epoch 1/1" in log for log in logs) == 1
    assert "synthetic/resnet8/fp32" not in said.out.split("Table 1")[0]


@with_submitit
def test_a_job_that_its_queue_stops_goes_on_when_it_is_queued_again(tmp_path):
    command = [
        *COMMAND,
        "-m",
        *TINY,
        "epochs=40",
        "method=fp32",
        "seeds=[0]",
        "results.root=runs",
        "results.checkpoint_every=1000",
    ]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}

    def said() -> str:
        return "".join(path.read_text() for path in tmp_path.rglob("*_log.out"))

    with subprocess.Popen(
        [*command, "hydra/launcher=submitit_local"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True, env=environment,
    ) as process:  # fmt: skip
        try:
            until = time.monotonic() + 60
            while "epoch 2/" not in said() and time.monotonic() < until:
                time.sleep(0.02)
            for one in processes_of(process.pid):
                # Slurm gives its signal to all that the job has started; here the command and the queue are not of it.
                words = Path(f"/proc/{one}/cmdline").read_bytes()
                if one != process.pid and b"submitit.local" not in words:
                    os.kill(one, signal.SIGUSR2)
            output = process.communicate(timeout=60)[0]
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output
    (record,) = records(tmp_path)
    assert record["status"] == "done" and len(record["epochs"]) == 40 and len(record["resumed_at"]) == 1


@with_ray
def test_a_local_ray_runs_two_jobs_at_once_and_hides_no_card(tmp_path, run, monkeypatch):  # noqa: F811
    import ray

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    for name in launching.FOR_RAY:
        monkeypatch.delenv(name, raising=False)
    start = "+hydra.launcher.ray.init.num_cpus=2", "+hydra.launcher.ray.init.num_gpus=2"
    try:
        done = run("-m", *TINY, "method=fp32,amp", "seeds=[0],[0,1]", "hydra/launcher=ray", *start,
                   "+hydra.launcher.ray.init.include_dashboard=false")  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert found(tmp_path) == ASKED
        asked = ray.remote(num_gpus=0)(lambda: os.environ.get("CUDA_VISIBLE_DEVICES"))
        assert ray.get(asked.remote()) == "0,1"
    finally:
        ray.shutdown()
    assert not list(tmp_path.glob(".hydra*"))


@with_joblib
def test_a_mistake_in_the_last_job_costs_no_hour_of_the_first(tmp_path, run):  # noqa: F811
    done = run("-m", *TINY, "method=fp32", "optimizer.lr=0.1,-0.1", *JOBLIB)
    assert done.returncode == 2 and done.stdout == "" and "optimizer.lr=-0.1" in done.stderr
    assert not records(tmp_path)


@with_joblib
def test_a_launcher_without_a_sweep_is_a_mistake(run):  # noqa: F811
    done = run(*TINY, *JOBLIB)
    assert done.returncode == 2 and done.stderr.endswith("add -m\n") and done.stderr.count("\n") == 1


def test_a_launcher_that_is_not_installed_is_told_with_its_extra(run, monkeypatch):  # noqa: F811
    error = "In 'config': Could not find 'hydra/launcher/submitit_slurm' Available options: basic"
    assert cli.sentence(cli.SettingsError(error)).endswith("pip install -e '.[submitit]' brings it")


class Fake:
    """A launcher in this process: it calls jobs as Hydra's does, or does what a test wants of it."""

    def __init__(self, act=None) -> None:
        self.act, self.sent = act, {}

    def install(self, hydra_context, task_function, config):
        self.sent = {"task": task_function, "config": config, "context": hydra_context}
        return self

    def launch(self, overrides, initial_job_idx):
        self.sent["overrides"] = overrides
        return self.act(self, overrides)


@pytest.fixture
def fake(monkeypatch):
    """The second launcher that is made is this one: the first composes."""
    made = Fake()
    genuine = Plugins.instantiate_launcher
    asked = []

    def instantiate(self, hydra_context, task_function, config):
        asked.append(task_function)
        if len(asked) == 1:
            return genuine(self, hydra_context, task_function, config)
        return made.install(hydra_context, task_function, config)

    monkeypatch.setattr(Plugins, "instantiate_launcher", instantiate)
    return made


def returning(*values):
    def act(launcher, overrides):
        returned = []
        for value in values:
            one = JobReturn()
            one.status = JobStatus.FAILED if isinstance(value, Exception) else JobStatus.COMPLETED
            one.return_value = value
            returned.append(one)
        return returned

    return act


def done(seed: int) -> list[Outcome]:
    return [Outcome("a/b/c", seed, "done", None, None)]


@with_joblib
def test_a_job_gets_its_settings_with_absolute_paths_and_one_folder_of_hydras(here, fake, capfd):  # noqa: F811
    fake.act = returning(done(0), done(0))
    (here / "weights.pt").touch()
    assert cli.run(["-m", *TINY, "epochs=1,2", "results.root=runs", "results.scratch=quick", "model.weights=weights.pt",
                    *JOBLIB]) == 0, capfd.readouterr()  # fmt: skip
    cells = fake.sent["task"].cells
    assert [cell.epochs for cell in cells] == [1, 2]
    for cell in cells:
        assert (cell.results.root, cell.results.scratch) == (str(here / "runs"), str(here / "quick"))
        assert cell.dataset.root == str(here / "data") and cell.model.weights == str(here / "weights.pt")
    folders = set()
    for overrides in fake.sent["overrides"]:
        composed = fake.sent["context"].config_loader.load_sweep_config(fake.sent["config"], list(overrides))
        folders.add(composed.hydra.sweep.dir)
    assert folders == {str(fake.sent["task"].stop.parent)}


@with_joblib
@pytest.mark.parametrize(
    ("status", "code", "stream"), [("diverged", 1, "stdout"), ("refused", 2, "stderr"), ("interrupted", 130, "stdout")]
)
def test_what_became_of_a_job_is_the_commands_exit_code_and_said_once(run, fake, status, code, stream):  # noqa: F811
    fake.act = returning(done(0), [*done(0), Outcome("a/b/d", 1, status, "no good; go home", None)])
    ended = run("-m", *TINY, "epochs=1,2", *JOBLIB)
    assert ended.returncode == code
    said = getattr(ended, stream)
    assert said.count("a/b/d") == said.count("no good; go home") == 1


@with_joblib
def test_a_job_that_is_lost_fails_alone(run, fake):  # noqa: F811
    fake.act = returning(done(0), RuntimeError("its machine went away"))
    lost = run("-m", *TINY, "epochs=1,2", "seeds=[0,1]", *JOBLIB)
    label = "synthetic/resnet8/triaccel (epochs=2)"
    assert lost.returncode == 1
    assert all(f"failed: {label} seed {seed}: the job ended early" in lost.stdout for seed in (0, 1))
    (again,) = lost.stdout.split("to run only what failed:\n")[1].splitlines()
    assert "epochs=2" in again and "seeds=[0,1]" in again and "launcher" not in again


@with_joblib
def test_a_failure_in_another_job_stops_the_seeds_that_have_not_begun(tmp_path, run, fake, monkeypatch):  # noqa: F811
    def act(launcher, overrides):
        task = launcher.sent["task"]
        assert not task.failed.exists(), "left there by a command that was killed"

        def run_cells(cells, reporter, failed_elsewhere, labels):
            before = failed_elsewhere()
            task.failed.touch()
            return [Outcome("a/b/c", int(before) + 2 * failed_elsewhere(), "done", None, None)]

        monkeypatch.setattr(launching, "run_cells", run_cells)
        (first,) = task.run(0)
        assert first.seed == 2
        (second,) = task.run(1)
        assert second.status == "skipped"
        return returning([first], [second])(launcher, overrides)

    fake.act = act
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "failed").touch()
    stopped = run(
        "-m", *TINY, "epochs=1,2", "seeds=[0]", "on_failure=stop", f"hydra.sweep.dir={tmp_path}/mine", *JOBLIB
    )
    assert "stopped (on_failure=stop) before 1 run" in stopped.stdout, stopped.stdout + stopped.stderr


@with_joblib
def test_a_job_counts_its_time_from_the_start_of_the_command(run, fake, monkeypatch):  # noqa: F811
    def act(launcher, overrides):
        task = launcher.sent["task"]
        assert task.began == deadline.begun()
        began = deadline._began
        deadline._began = began + 1000.0
        deadline.begin(task.began)
        assert deadline._began == began
        deadline.begin(("another machine", 0.0))
        assert deadline._began == began
        return returning(done(0), done(0))(launcher, overrides)

    fake.act = act
    ended = run("-m", *TINY, "epochs=1,2", "runner.max_minutes=5", *JOBLIB)
    assert ended.returncode == 0, ended.stderr


@with_joblib
def test_no_job_begins_a_run_once_the_time_of_the_command_is_up(tmp_path, run):  # noqa: F811
    late = run("-m", *TINY, "method=fp32,amp", "seeds=[0]", "runner.max_minutes=1e-4", *JOBLIB)
    assert late.returncode == 3, late.stdout + late.stderr
    assert "2 of 2 runs left" in late.stdout and not records(tmp_path)


@with_joblib
def test_a_launcher_that_gives_up_is_one_sentence(run, fake):  # noqa: F811
    def give_up(launcher, overrides):
        raise RuntimeError("a worker was killed\nby somebody")

    fake.act = give_up
    lost = run("-m", *TINY, "epochs=1,2", *JOBLIB)
    assert lost.returncode == 1 and lost.stderr.count("\n") == 1 and "a worker was killed);" in lost.stderr


@with_joblib
@pytest.mark.parametrize("patience", [60.0, 0.2])
def test_jobs_are_asked_to_stop_by_a_file_and_only_then_left(run, fake, monkeypatch, patience):  # noqa: F811
    monkeypatch.setattr(launching, "PATIENCE_SECONDS", patience)
    seen = []

    def act(launcher, overrides):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        task = launcher.sent["task"]
        seen.append(task.stop.exists())
        if patience < 1:
            time.sleep(30)
        return returning(*(task.run(number) for number in range(len(task.cells))))(launcher, overrides)

    fake.act = act
    begun = time.monotonic()
    stopped = run("-m", *TINY, "epochs=1,2", *JOBLIB)
    assert stopped.returncode == 130 and "interrupted; finished seeds are kept" in stopped.stderr
    assert seen == [True] and time.monotonic() - begun < 20
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL


@with_joblib
def test_preflight_only_is_one_job_for_all_cells(tmp_path, run, fake):  # noqa: F811
    fake.act = returning(Report((Check("memory", "fails", "too small", "use another", (1,)),)))
    looked = run("-m", *TINY, "epochs=1,2", "preflight=only", *JOBLIB)
    assert looked.returncode == 2 and "FAILS" in looked.stdout and "1 check failed" in looked.stdout
    assert len(fake.sent["overrides"]) == 1 and len(fake.sent["task"].cells) == 2 and not records(tmp_path)


@pytest.mark.parametrize("by", ["file", "signal"])
def test_who_is_asked_to_stop_hears_it_once_and_not_afterwards(tmp_path, by):
    before, heard = signal.getsignal(signal.SIGTERM), []
    stop = tmp_path / "stop"
    with pytest.raises(KeyboardInterrupt), stopped_by(stop):
        threading.Timer(0.1, stop.touch if by == "file" else lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
        try:
            time.sleep(10)
        except KeyboardInterrupt:
            # What it does to end is not cut short by being asked again.
            heard.append("once")
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
            heard.append("whole")
            raise
    assert heard == ["once", "whole"]
    assert signal.getsignal(signal.SIGTERM) == before


def test_the_command_alone_loads_no_launcher():
    code = (
        "import sys, triaccel_bench.cli; sys.exit(any(name in sys.modules for name in ('joblib', 'submitit', 'ray')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
