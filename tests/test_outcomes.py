"""The end of a command: what failed and the line that runs only that, what is left, and the exit code."""

import fcntl
import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from test_cli import COMMAND, TINY
from tiny import Listening, settings

from triaccel_bench import cli, deadline, runner
from triaccel_bench.child import Ended
from triaccel_bench.identity import identity
from triaccel_bench.outcomes import Outcome, exit_code
from triaccel_bench.progress import Plain, Reporter
from triaccel_bench.records import CHECKPOINT_FILE


@pytest.fixture(autouse=True)
def begun_now(monkeypatch):
    """As a command begins; what a test does to that clock ends with it."""
    monkeypatch.setattr(deadline, "_began", time.monotonic())


@pytest.fixture
def jobs_of(monkeypatch, tmp_path):
    """The jobs that a command line asks for, of which the given seeds by cell fail; nothing is run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")

    def call(arguments, failing=(), status="failed"):
        found = []

        def run_cells(jobs, reporter):
            found.extend(jobs)
            outcomes = [
                Outcome(f"cell {n}", seed, status if (n, seed) in failing else "done", "why", None, number=n)
                for n, job in enumerate(jobs)
                for seed in job.seeds
            ]
            return outcomes

        monkeypatch.setattr(cli, "run_cells", run_cells)
        return cli.run(list(arguments)), found

    return call


ASKED = {
    "single": ["method=fp32", "device=cpu", "seeds=[0,1,2]", "epochs=7"],
    "no seeds named": ["epochs=7", "+experiment=smoke", "method=amp"],
    "an option": ["--config-name", "config", "method=fp32", "seeds=[0,1,2]"],
    "multirun": ["-m", "method=fp32,amp", "optimizer.lr=0.1,0.2", "seeds=[0,1,2]"],
    "multirun over seeds": ["--multirun", "method=fp32,amp", "seeds=[0,1],[2,3]"],
    "multirun of quoted values": ["-m", "dataset.path='a,b','c d'", "method=fp32"],
    "an experiment": ["+experiment=demo"],
    "an experiment, narrowed": [
        "+experiment=table1",
        "model=resnet18",
        "dataset=cifar10",
        "method=tf32,amp",
        "results.root=o'hara & söhne",
    ],
    "names": ['dataset.path=~/häuser & höfe, (1)/it\'s "x" $HOME.npz', "results.root=a b"],
    "a list": ['dataset.mirrors=["https://a.b/c?d=e&f=g"]', "method=fp32", "++seeds=[4,5]"],
    "something taken away": ["~dataset.flip", "+dataset.flip=true", "method=fp32"],
}


@pytest.mark.parametrize("kind", ASKED)
def test_the_line_that_is_told_asks_for_what_failed_and_nothing_else(jobs_of, capfd, kind):
    _, jobs = jobs_of(ASKED[kind])
    assert jobs, capfd.readouterr().err
    last = len(jobs) - 1
    failing = {(0, jobs[0].seeds[-1]), (last, jobs[last].seeds[0]), (last, jobs[last].seeds[-1])}
    capfd.readouterr()
    code, _ = jobs_of(ASKED[kind], failing)
    said = capfd.readouterr().out
    assert code == 1 and said.count("failed: cell") == len(failing)
    commands = [line.strip() for line in said.split("to run only what failed:\n")[1].splitlines()]
    assert len(commands) == len({number for number, _ in failing})
    for number, command in zip(sorted({0, last}), commands, strict=True):
        # What a shell makes of it.
        parts = subprocess.run(["bash", "-c", f"printf '%s\\0' {command}"], capture_output=True, text=True).stdout
        program, *arguments = parts.split("\0")[:-1]
        assert (
            command.count("seeds=") == 1
            and program == "triaccel-bench"
            and [program, *arguments] == shlex.split(command)
        )
        again, (job,) = jobs_of(arguments)
        seeds = tuple(seed for seed in jobs[number].seeds if (number, seed) in failing)
        assert (again, job) == (0, jobs[number].model_copy(update={"seeds": seeds}))


def test_cells_that_were_refused_are_told_beside_others_and_not_alone(jobs_of, capfd):
    jobs_of(["-m", "method=fp32,amp", "seeds=[3,4]"], {(1, 3), (1, 4)}, "refused")
    assert "to run only what failed:\n  triaccel-bench method=amp 'seeds=[3,4]'\n" in capfd.readouterr().out
    code, _ = jobs_of(["method=amp", "seeds=[3]"], {(0, 3)}, "refused")
    assert code == 2 and "to run only" not in capfd.readouterr().out


def test_where_nothing_failed_nothing_is_told(jobs_of, capfd):
    assert jobs_of(["method=amp"])[0] == 0 and "failed" not in capfd.readouterr().out


@pytest.mark.parametrize(("statuses", "code"), [
    ("done done", 0), ("done failed", 1), ("diverged", 1), ("oom done", 1), ("failed skipped", 1),
    ("refused done failed", 2), ("done left", 3), ("failed left", 3), ("refused left", 3), ("done interrupted", 130),
])  # fmt: skip
def test_exit_codes(statuses, code):
    assert exit_code([Outcome("", 0, status, None, None) for status in statuses.split()]) == code


def failing_first(monkeypatch, *, status="failed"):
    """Children of which the first fails; returns the seeds and methods that were begun."""
    begun = []

    def answer(entry, arguments, *_):
        begun.append((arguments[0].method.name, arguments[1]))
        return Ended(("finished", (status if len(begun) == 1 else "done", "why")), 0)

    monkeypatch.setattr(runner, "_child", answer)
    monkeypatch.setattr(runner, "_device_name", lambda *_: "cpu")
    return begun


@pytest.mark.parametrize("status", ["failed", "diverged", "oom"])
def test_a_sweep_goes_on_after_a_failure_unless_told_to_stop(tmp_path, monkeypatch, status):
    for on_failure, expected in (("continue", [status, "done", "done", "done"]), ("stop", [status, *["skipped"] * 3])):
        begun = failing_first(monkeypatch, status=status)
        common = f"results.root={tmp_path}", "seeds=[0,1]", f"on_failure={on_failure}"
        cells = [settings(f"method={method}", *common) for method in ("fp32", "amp")]
        outcomes = runner.run_cells(cells, Reporter())
        assert [outcome.status for outcome in outcomes] == expected
        assert [(outcome.number, outcome.seed) for outcome in outcomes] == [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert len(begun) == (4 if on_failure == "continue" else 1)
        assert not (tmp_path / "x").exists()


def test_a_stopped_sweep_says_what_it_did_not_begin(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    failing_first(monkeypatch)
    code = cli.run(["-m", *TINY, "preflight=off", "method=fp32,amp", "seeds=[0,1]", "on_failure=stop"])
    said = capfd.readouterr().out
    label = "synthetic/resnet8"
    assert code == 1 and f"failed: {label}/fp32 seed 0: why" in said
    assert f"stopped (on_failure=stop) before 3 runs: {label}/fp32 seed 1; {label}/amp seeds 0, 1" in said


def test_the_time_of_the_whole_sweep_counts_and_the_next_start_goes_on(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    command = ["-m", *TINY, "method=fp32,amp", "seeds=[0,1]", "epochs=1000000", "runner.max_minutes=700"]
    steps = []

    def late(*_):
        deadline._began = time.monotonic() - 699.7 * 60

    monkeypatch.setattr(Plain, "epoch", late)
    for start in range(2):
        assert cli.run([*command, f"results.root={tmp_path}"]) == 3
        said = capfd.readouterr().out
        (path,) = tmp_path.rglob(CHECKPOINT_FILE)
        steps.append(torch.load(path, weights_only=True)["state"]["step"])
        left = "synthetic/resnet8/fp32 seeds 0, 1; synthetic/resnet8/amp seeds 0, 1"
        assert f"time is up (runner.max_minutes=700): 4 of 4 runs left: {left}; the same command goes on" in said
        (told,) = re.findall(
            r"^synthetic/resnet8/fp32 seed 0: stopped at epoch \d+, step (\d+); its checkpoint", said, re.M
        )
        assert int(told) == steps[-1]
        assert ("resumed at epoch" in said) == (start == 1)
        assert "Table 1" not in said, "there is nothing to show yet"
    assert 0 < steps[0] < steps[1]


def test_after_a_run_that_was_stopped_for_the_time_none_begins(tmp_path, monkeypatch):
    """It was given room for its own pace, more than one that has not begun would need."""
    begun = []

    def stopped(entry, arguments, *_):
        begun.append(arguments[1])
        return Ended(
            ("finished", ("interrupted", "SIGTERM at epoch 2, step 4; its checkpoint is kept")), 0, out_of_time=True
        )

    monkeypatch.setattr(runner, "_child", stopped)
    monkeypatch.setattr(runner, "_device_name", lambda *_: "cpu")
    chosen = settings(f"results.root={tmp_path}", "seeds=[0,1]", "runner.max_minutes=700")
    first, second = runner.run_cells([chosen], Reporter())
    assert (first.status, first.reason) == ("left", "stopped at epoch 2, step 4; its checkpoint is kept")
    assert second.status == "left" and begun == [0]


def test_finished_runs_are_not_left_however_late_it_is(tmp_path, monkeypatch):
    failing_first(monkeypatch, status="done")
    monkeypatch.setattr(runner, "_finished", lambda path, cell, seed, reporter: seed == 1)
    monkeypatch.setattr(deadline, "_began", time.monotonic() - 1e6)
    chosen = settings(f"results.root={tmp_path}", "seeds=[0,1,2]", "runner.max_minutes=5")
    outcomes = runner.run_cells([chosen], Reporter())
    assert [(outcome.seed, outcome.status, outcome.reused) for outcome in outcomes] == [
        (0, "left", False), (1, "done", True), (2, "left", False),
    ]  # fmt: skip


def test_nobody_waits_for_another_command_beyond_the_time(tmp_path, monkeypatch):
    begun = failing_first(monkeypatch)
    chosen = settings(f"results.root={tmp_path}", "seeds=[0]", "runner.max_minutes=0.02")
    folder = runner.seed_folder(chosen, identity(chosen, "cpu"), 0)
    folder.mkdir(parents=True)
    deadline.begin()
    with (folder / ".lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        (outcome,) = runner.run_cells([chosen], Reporter())
    assert (outcome.status, outcome.reason) == ("left", "another command is running it") and not begun


def test_a_child_that_does_not_stop_in_time_is_left_without_a_record(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "_child", lambda *_: Ended(None, -signal.SIGKILL, out_of_time=True))
    monkeypatch.setattr(runner, "_device_name", lambda *_: "cpu")
    (outcome,) = runner.run_cells([settings(f"results.root={tmp_path}", "seeds=[0]")], Reporter())
    assert outcome.status == "left" and outcome.reason.startswith("it did not stop in time and was killed; it goes on")
    assert not outcome.path.exists()


def test_without_checkpoints_there_is_nowhere_to_stop(tmp_path):
    environment = {**os.environ, "HOME": str(Path.home())}
    done = subprocess.run(
        [*COMMAND, *TINY, "runner.max_minutes=5", "results.resume=false"], cwd=tmp_path, capture_output=True, text=True,
        env=environment,
    )  # fmt: skip
    assert done.returncode == 2 and "runner.max_minutes=5 and results.resume=false: expected checkpoints" in done.stderr


@pytest.mark.parametrize(("order", "expected"), [
    ("interleaved", [("fp32", 0), ("amp", 5), ("fp32", 1), ("amp", 6), ("amp", 7)]),
    ("cells", [("fp32", 0), ("fp32", 1), ("amp", 5), ("amp", 6), ("amp", 7)]),
])  # fmt: skip
def test_methods_take_turns_unless_told_otherwise_and_are_told_by_cell(tmp_path, monkeypatch, order, expected):
    begun = failing_first(monkeypatch, status="done")
    common = f"results.root={tmp_path}", f"runner.order={order}"
    cells = [settings("method=fp32", "seeds=[0,1]", *common), settings("method=amp", "seeds=[5,6,7]", *common)]
    outcomes = runner.run_cells(cells, Reporter())
    assert begun == expected
    assert [(outcome.number, outcome.seed) for outcome in outcomes] == [(0, 0), (0, 1), (1, 5), (1, 6), (1, 7)]


def test_a_cell_that_is_refused_is_told_once_and_the_others_go_on(tmp_path, monkeypatch):
    begun = failing_first(monkeypatch, status="done")
    common = f"results.root={tmp_path}", "seeds=[0,1]"
    cells = [settings("method=fp32", *common), settings("method=amp", *common)]
    monkeypatch.setattr(runner, "_before_the_first", lambda *_: ({("cpu", "auto"): "cpu"}, {0: "no data"}))
    outcomes = runner.run_cells(cells, Reporter())
    assert [(outcome.number, outcome.status) for outcome in outcomes] == [(0, "refused"), (1, "done"), (1, "done")]
    assert begun == [("amp", 0), ("amp", 1)]


def labels(*overrides: list[str]) -> list[str]:
    return runner.cell_labels([settings(*each) for each in overrides])


def test_cells_of_one_name_are_told_apart_by_what_does_so():
    fp32, amp = "synthetic/resnet8/fp32", "synthetic/resnet8/amp"
    assert labels(["method=fp32"], ["method=amp"]) == [fp32, amp]
    rates = ["method=fp32", "optimizer.weight_decay=0.1"], ["method=fp32", "optimizer.lr=0.2"], ["method=amp"]
    assert labels(*rates) == [f"{fp32} (lr=0.1)", f"{fp32} (lr=0.2)", amp]
    grid = [["method=fp32", f"optimizer.lr={lr}", f"epochs={epochs}"] for lr in (0.1, 0.2) for epochs in (1, 2)]
    assert labels(*grid)[1:3] == [f"{fp32} (epochs=2, lr=0.1)", f"{fp32} (epochs=1, lr=0.2)"]
    # A setting that one of them does not read (alpha, without rates) says less than the one that decides about it.
    rates = [["method=triaccel", f"method.curvature.rates={on}"] for on in ("true", "false")]
    told = [f"synthetic/resnet8/triaccel (curvature.rates={on})" for on in ("true", "false")]
    assert labels(*rates) == told
    # Seeds are named beside the cell.
    assert labels(["method=fp32", "seeds=[0]"], ["method=fp32", "seeds=[1]"]) == [fp32, fp32]


def test_a_sweep_says_which_of_its_runs_it_speaks_of(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "_run_seed", lambda *arguments: ("failed", "so it is"))
    monkeypatch.setattr(runner, "_device_name", lambda *_: "cpu")
    cells = [settings(f"results.root={tmp_path}", "seeds=[0]", f"optimizer.lr={lr}") for lr in (0.1, 0.2)]
    listening = Listening()
    outcomes = runner.run_cells(cells, listening)
    names = [f"synthetic/resnet8/triaccel (lr={lr})" for lr in (0.1, 0.2)]
    assert [outcome.label for outcome in outcomes] == names
    assert listening.said == [f"{name}/seed 0: failed: so it is" for name in names]
    assert len({outcome.path for outcome in outcomes}) == 2
