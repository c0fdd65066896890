"""The command line as a user meets it: sweeps, reuse, exit codes, and one sentence for every mistake."""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from measured import epoch
from tiny import children, settings

from triaccel_bench import cli, runner
from triaccel_bench.child import Ended
from triaccel_bench.identity import RESULTS_VERSION, identity
from triaccel_bench.progress import Reporter
from triaccel_bench.records import planned_run, write_run

COMMAND = [sys.executable, "-m", "triaccel_bench.cli"]
TINY = [
    "+experiment=smoke", "dataset.image_size=8", "model.input_size=8", "dataset.train_size=64", "dataset.test_size=32",
    "epochs=1", "method.batch.initial=16", "method.batch.min=8",
]  # fmt: skip


@contextlib.contextmanager
def endless_run(root: Path, *arguments: str):
    """A command in a session of its own, in the midst of its training."""
    with subprocess.Popen(
        [*COMMAND, *TINY, "method=fp32", "epochs=1000000", f"results.root={root}", *arguments], cwd=root,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    ) as process:  # fmt: skip
        try:
            assert "epoch 1/" in process.stdout.readline()
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def processes_of(session: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, owner = path.read_text().rsplit(")", 1)[1].split()[:4]
            if int(owner) == session and state != "Z":
                found.append(int(path.parent.name))
    return sorted(found)


def nothing_left_of(session: int) -> bool:
    deadline = time.monotonic() + 20
    while processes_of(session) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not processes_of(session)


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """The working folder of a command that runs in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


@pytest.fixture
def run(here, capfd):
    """The command in this process, whose fork server has torch loaded already; its output comes back as from a pipe."""

    def call(*arguments: str) -> subprocess.CompletedProcess:
        status = cli.run([*arguments, f"results.root={here}"])
        return subprocess.CompletedProcess(arguments, status, *capfd.readouterr())

    return call


def records(root: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(root.rglob("run.json"))]


def test_help_names_groups_and_settings(tmp_path):
    done = subprocess.run([*COMMAND, "--help"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0
    for word in ("triaccel_curvature", "efficientnet_b0", "cifar100", "max_overhead", "triaccel-bench"):
        assert word in done.stdout


def test_a_sweep_runs_and_a_second_one_reuses_it(tmp_path, run):
    command = ["-m", *TINY, "method=fp32,triaccel", "seeds=[0,1]"]
    first = run(*command)
    assert first.returncode == 0, first.stdout + first.stderr
    found = records(tmp_path)
    assert sorted((r["method"], r["seed"], r["status"]) for r in found) == [
        ("fp32", 0, "done"), ("fp32", 1, "done"), ("triaccel", 0, "done"), ("triaccel", 1, "done"),
    ]  # fmt: skip
    for record in found:
        assert record["settings"]["method"]["name"] == record["method"]
        assert record["provenance"]["torch"] and record["provenance"]["device_name"]
        assert record["epochs"][0]["evaluation_samples"] == 32
    assert "tensors (not VRAM)" in first.stdout
    assert first.stdout.count("at a step's peak") == 2, "one panel a cell"
    second = run(*command)
    assert second.returncode == 0
    assert second.stdout.count("reused") == 4 and "at a step's peak" not in second.stdout
    assert records(tmp_path) == found
    assert not (tmp_path / ".hydra").exists()


def test_a_run_without_memory_meter_says_so_once_and_leaves_figures_empty(tmp_path, run):
    done = run(*TINY, "memory.meter=vram")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("VRAM monitor off") == 1
    (record,) = records(tmp_path)
    epoch = record["epochs"][0]
    assert epoch["memory_peak_bytes"] is None and record["budget_bytes"] is None
    assert (epoch["batch_min"], epoch["batch_max"], epoch["batch_last"]) == (16, 16, 16)


def test_lines_in_a_pipe_are_whole(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    done = run(*TINY, "method=fp32")
    (line,) = [line for line in done.stdout.splitlines() if "epoch 1/1" in line]
    assert line.startswith("synthetic/resnet8/fp32/seed 0") and line.endswith("left") and len(line) > 80


@pytest.mark.parametrize("arguments, words", [
    (["epohcs=3"], ["epohcs", "did you mean epochs?"]),
    (["method.curvature.alhpa=1"], ["alhpa", "did you mean alpha?"]),
    (["method=fp23"], ["fp23", "fp32"]),
    (["model=vgg"], ["vgg", "resnet18"]),
    (["dataset=imagenet"], ["imagenet", "cifar10"]),
    (["pair=resnet18-triacel_plus"], ["pair=resnet18-triacel_plus: expected one of", ", none, resnet18-triaccel_plus; choose one"]),
    (["tuned=mine"], ["tuned=mine: expected one of", "none"]),
    (["model=resnet8", "method=amp", "pair=resnet8-amp"], ["pair=resnet8-amp: expected one of"]),
    (["-m", "pair=none,nothing"], ["pair=nothing: expected one of"]),
    (["epochs=ten"], ["epochs=ten", "whole number"]),
    (["epochs"], ["epochs: expected key=value"]),
    (["=1"], ["key=value"]),
    (["epochs='"], ["epochs=': expected a whole number"]),
    (["seeds=0,1"], ["add -m to run each", "write seeds=[0,1] for a list"]),
    (["-m", "seeds=0,1"], ["seeds=0: expected a list; write seeds=[0]"]),
    (["hydra.sweeper.params={epochs:1}"], ["--hydra-help"]),
    (["~method"], ["method: expected a value"]),
    (["dataset.path=~/no such (file).npz", "device=cpu"], [str(Path.home() / "no such (file).npz"), "no such file"]),
    (["seeds=[]"], ["seeds"]),
    (["optimizer.lr=-1"], ["optimizer.lr=-1"]),
    (["method.precision.tau_low=2", "method.precision.tau_high=1"], ["tau_low < tau_high"]),
    (["device=cuda"], ["device=cpu"]),
    (["epochs=${nothing}"], ["nothing"]),
    (["epochs="], ['epochs="": expected a whole number']),
    (["+experiment=nothing"], ["nothing", "table1"]),
    (["-m", "epochs=1", "optimizer.lr=0.1,-0.1"], ["optimizer.lr=-0.1"]),
])  # fmt: skip
def test_mistakes_end_in_one_sentence_and_exit_code_two(here, run, arguments, words):
    done = run(*arguments)
    said = done.stdout + done.stderr
    assert done.returncode == 2, said
    assert "Traceback" not in said
    assert len(said.strip().splitlines()) == 1, said
    for word in words:
        assert word in said
    assert not records(here)


@pytest.mark.parametrize("place", ["hydra.searchpath=[mine]", "--config-dir=mine"])
@pytest.mark.parametrize("group, others", [("pair", "resnet18-triaccel_plus, small"), ("tuned", "none, small")])
def test_files_of_ones_own_can_be_named_and_are_told_among_the_others(here, capfd, place, group, others):
    path = here / "mine" / group / "small.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("# @package _global_\nmodel:\n  checkpointing: 1\n")
    jobs = cli.jobs_of(["-m", f"{group}=none,small", "pair=none" if group == "tuned" else "tuned=none", place])
    assert [job.model.checkpointing for job in jobs] == [False, 1]
    assert cli.run([f"{group}=smal", place]) == 2
    assert f"{others}; choose one of them" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["file", "file/below", "n" * 300, "/proc/none", "~nobody-of-that-name/x"])
def test_a_root_that_cannot_be_written_is_refused_before_training(here, capfd, name):
    (here / "file").touch()
    assert cli.run([f"results.root={name}", *TINY, "method=fp32"]) == 2
    said = capfd.readouterr()
    assert said.out == "" and len(said.err.splitlines()) == 1 and "results.root" in said.err


def test_a_folder_of_a_seed_that_cannot_be_made_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "_device_name", lambda *_: "cpu")
    chosen = settings(f"results.root={tmp_path}", "seeds=[0]")
    runner.seed_folder(chosen, identity(chosen, "cpu"), 0).parent.touch()
    (outcome,) = runner.run_cells([chosen], Reporter())
    assert outcome.status == "refused" and "name another by results.root" in outcome.reason


@pytest.mark.parametrize("arguments", ["--cfg job epochs=7", "epochs=7 --cfg job method=fp32", "epochs=7 --cfg job"])
def test_options_may_stand_before_between_or_after_overrides(here, capfd, arguments):
    assert cli.run(arguments.split()) == 0
    assert "epochs: 7" in capfd.readouterr().out


def test_any_name_of_a_folder(here, capfd, monkeypatch):
    home = here / "häuser & höfe, (1)"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    assert cli.run(["results.root=~/so 'viel'", *TINY, "method=fp32"]) == 0, capfd.readouterr()
    assert records(home / "so 'viel'")[0]["status"] == "done"
    assert [entry.name for entry in here.iterdir()] == [home.name], "Hydra's folders too lie below the root"


def test_data_that_is_not_there_is_refused_before_training(tmp_path, run):
    done = run("device=cpu", "dataset=cifar10", "dataset.download=false", "model=resnet8")
    assert done.returncode == 2
    assert "cifar" in done.stderr.lower() and len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stdout + done.stderr
    assert not records(tmp_path)


@pytest.mark.parametrize("progress", ["plain", "none"])
def test_a_diverged_run_fails_the_command_and_is_named(tmp_path, run, progress):
    changes = "optimizer.lr=1e30", "epochs=20", "method.loss_scale.max_consecutive_skips=4", f"progress={progress}"
    done = run(*TINY, "method=fp32", *changes)
    assert done.returncode == 1
    (record,) = records(tmp_path)
    assert record["status"] == "diverged" and "max_consecutive_skips=4" in record["reason"]
    said, silent = (done.stdout, done.stderr) if progress == "plain" else (done.stderr, done.stdout)
    assert "diverged: synthetic/resnet8/fp32 seed 0" in said
    assert progress == "plain" or silent == ""


def test_a_run_whose_process_was_killed_fails_with_its_reason(tmp_path):
    class Killer(Reporter):
        def epoch(self, payload, epochs):
            for process in children(but=others):
                os.kill(process, signal.SIGKILL)

    others = children()
    (outcome,) = runner.run_cells([settings(f"results.root={tmp_path}", "seeds=[0]", "epochs=1000000")], Killer())
    assert (outcome.status, "SIGKILL" in outcome.reason) == ("failed", True)
    (record,) = records(tmp_path)
    assert (record["status"], record["reason"], record["epochs"]) == ("failed", outcome.reason, [])


def test_ctrl_c_ends_everything_and_leaves_no_half_record(tmp_path):
    with endless_run(tmp_path) as process:
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=120)
    assert process.returncode == 130
    assert said == "triaccel-bench: interrupted; finished seeds are kept, run the same command to go on\n"
    assert nothing_left_of(process.pid) and not records(tmp_path)
    assert [path.name for path in tmp_path.rglob("*checkpoint*")] == ["checkpoint.pt"]


def test_sigterm_is_an_interruption_too(monkeypatch, here, capfd):
    def terminated(jobs, reporter):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)

    monkeypatch.setattr(cli, "run_cells", terminated)
    monkeypatch.setattr(sys, "argv", ["triaccel-bench", "device=cpu"])
    before = {number: signal.getsignal(number) for number in cli.INTERRUPTIONS}
    try:
        with pytest.raises(SystemExit) as caught:
            cli.main()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert caught.value.code == 130 and "interrupted" in capfd.readouterr().err


def test_no_child_trains_on_when_its_parent_was_killed(tmp_path):
    with endless_run(tmp_path) as process:
        process.kill()
        _, said = process.communicate(timeout=120)
        assert nothing_left_of(process.pid)
    assert said == "" and not records(tmp_path)


def talking(root: Path, *arguments: str, stdout=subprocess.PIPE, **environment: str) -> subprocess.Popen:
    """The command with runs that only say the same line for ever."""
    code = """
from triaccel_bench import cli
def endless(jobs, reporter):
    while True:
        reporter.line("naïve")
cli.run_cells = endless
cli.main()
"""
    return subprocess.Popen(
        [sys.executable, "-c", code, "device=cpu", f"results.root={root}", *arguments], text=True, encoding="utf-8",
        stdout=stdout, stderr=subprocess.PIPE, env={**os.environ, **environment},
    )  # fmt: skip


def test_output_on_a_full_disk_ends_the_command_in_a_sentence(tmp_path):
    with open("/dev/full", "w") as full, talking(tmp_path, stdout=full) as process:
        said = process.stderr.read()
    assert process.returncode == 130 and "No space left" in said and said.count("\n") == 1


@pytest.mark.parametrize("progress", ["plain", "rich"])
@pytest.mark.parametrize("encoding, line", [("utf-8", "naïve\n"), ("ascii", "na\\xefve\n")])
def test_a_closed_pipe_ends_the_command_in_a_sentence_and_no_encoding_does(tmp_path, progress, encoding, line):
    with talking(tmp_path, f"progress={progress}", PYTHONIOENCODING=encoding) as process:
        assert process.stdout.readline() == line
        process.stdout.close()
        said = process.stderr.read()
    assert process.returncode == 130 and said.startswith("triaccel-bench: output closed") and said.count("\n") == 1


def test_a_second_command_waits_for_the_first_and_reuses_its_record(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "_device_name", lambda *_: "cpu")
    chosen = settings(f"results.root={tmp_path}", "seeds=[0]")
    cell = identity(chosen, "cpu")
    folder = runner.seed_folder(chosen, cell, 0)
    folder.mkdir(parents=True)
    first = (folder / ".lock").open("w")
    fcntl.flock(first, fcntl.LOCK_EX)
    said = []

    class First(Reporter):
        def line(self, text):
            said.append(text)
            if "waiting" in text:
                done = planned_run(chosen.model_dump(mode="json"), 0, cell, RESULTS_VERSION)
                made = [epoch(number) for number in range(1, chosen.epochs + 1)]
                write_run(folder, done.model_copy(update={"status": "done", "epochs": made}))
                first.close()

    (outcome,) = runner.run_cells([chosen], First())
    assert outcome.reused and "another command is running it" in said[0] and "reused" in said[1]


@pytest.mark.parametrize("damage", ["cut", "another seed", "another version", "no epochs", "folder"])
def test_a_record_that_does_not_answer_is_run_again(tmp_path, monkeypatch, damage):
    chosen = settings(f"results.root={tmp_path}", "seeds=[0]")
    cell = identity(chosen, "cpu")
    folder = runner.seed_folder(chosen, cell, 0)
    stale = planned_run(chosen.model_dump(mode="json"), 1 if damage == "another seed" else 0, cell, 1)
    stale.status = "done"
    stale.results_version = RESULTS_VERSION - (damage == "another version")
    path = write_run(folder, stale)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:100])
    elif damage == "folder":
        path.unlink()
        path.mkdir()
    (folder / ".run.json.half").touch()
    said, asked = [], []

    class Listening(Reporter):
        def line(self, text):
            said.append(text)

    def answer(entry, *_):
        asked.append(entry)
        return Ended(("finished", ("done", None)), 0)

    monkeypatch.setattr(runner, "_child", answer)
    monkeypatch.setattr(runner, "_device_name", lambda *_: "cpu")
    (outcome,) = runner.run_cells([chosen], Listening())
    assert asked == ["run_seed"] and not outcome.reused
    assert str(path) in said[0] and said[0].endswith("running that seed again")
    assert not (folder / ".run.json.half").exists(), "what a killed run left behind goes"
