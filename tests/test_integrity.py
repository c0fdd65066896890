"""Disks that fill up, folders that cannot be written, sweeps begun at once and clocks that jump: what was there stays
as it was, a sentence says what is wrong, and the exit code is not 0."""

from __future__ import annotations

import ast
import contextlib
import errno
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
import torch
from measured import run, write
from tiny import settings

import triaccel_bench
from triaccel_bench import claims, configuration, files, runner, tables_cli, worker
from triaccel_bench.child import Ended
from triaccel_bench.deadline import Deadline
from triaccel_bench.hardware import inspect
from triaccel_bench.identity import identity
from triaccel_bench.progress import Reporter
from triaccel_bench.records import RUN_FILE, TRACE_FILE, Trace, read_run, write_run
from triaccel_bench.results import read_results
from triaccel_bench.resumption import Keeper, Owner, load

TINY = [
    "+experiment=smoke", "dataset.image_size=8", "model.input_size=8", "dataset.train_size=64", "dataset.test_size=32",
    "epochs=1", "method.batch.initial=16", "method.batch.min=8", "method=fp32", "preflight=off", "seeds=[0]",
]  # fmt: skip


def lower_limit(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@contextlib.contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    """Writes beyond it fail, as they do on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    lower_limit(size)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def command(*arguments: str, largest: int | None = None, **options) -> subprocess.CompletedProcess:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    limit = None if largest is None else lambda: lower_limit(largest)
    return subprocess.run(
        [sys.executable, "-m", "triaccel_bench.cli", *arguments], text=True, env=environment, preexec_fn=limit,
        **({"capture_output": True} if "stdout" not in options else {"stderr": subprocess.PIPE}), **options,
    )  # fmt: skip


def contents(folder: Path) -> dict[str, bytes]:
    """All files below it but locks."""
    found = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


@pytest.mark.parametrize("call", ["fsync", "chmod"])
@pytest.mark.parametrize("which", [1, 2])
def test_record_and_trace_change_together_or_not_at_all(tmp_path, monkeypatch, call, which):
    write_run(tmp_path, run(accuracy=70.0), Trace(layers=["old"]))
    before, calls = contents(tmp_path), []

    def fails(*arguments):
        calls.append(call)
        if len(calls) == which:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, call, fails)
    for trace in (Trace(layers=["new"]), None)[: 3 - which]:
        calls.clear()
        with pytest.raises(OSError, match="No space left"):
            write_run(tmp_path, run(accuracy=80.0), trace)
        assert contents(tmp_path) == before


def test_a_record_that_is_too_large_for_the_disk_leaves_the_old_pair(tmp_path):
    write_run(tmp_path, run(accuracy=70.0), Trace(layers=["old"]))
    before = contents(tmp_path)
    with files_no_larger_than(len(before[RUN_FILE]) // 2), pytest.raises(OSError):
        write_run(tmp_path, run(accuracy=80.0), Trace(layers=["new"]))
    assert contents(tmp_path) == before
    write_run(tmp_path, run(accuracy=80.0), Trace(layers=["new"]))
    assert read_run(tmp_path / RUN_FILE).epochs[0].evaluation_accuracy_percent == 80.0
    assert contents(tmp_path)[TRACE_FILE] != before[TRACE_FILE]


def test_tables_change_together_or_not_at_all(tmp_path, capsys):
    runs, out = write(tmp_path / "runs", run()), tmp_path / "tables"
    arguments = ["--results", str(runs), "--out", str(out)]
    assert tables_cli.main(arguments) == 0
    before = contents(out)
    capsys.readouterr()
    write(runs, run(method="amp"), run(method="triaccel"))
    sizes = sorted(map(len, before.values()))
    with files_no_larger_than((sizes[0] + sizes[-1]) // 2):
        assert tables_cli.main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and "name another by --out" in said.err
    assert contents(out) == before
    assert tables_cli.main(arguments) == 0 and contents(out).keys() == before.keys() and contents(out) != before


def test_a_checkpoint_that_is_too_large_for_the_disk_leaves_the_old_one_and_says_what_the_system_said(tmp_path):
    owner = Owner("cell", 0, 1, "data")
    keeper = Keeper(tmp_path / "checkpoint.pt", owner, 1)
    assert keeper.keep({"weights": torch.ones(10)})[0] is None
    with files_no_larger_than(20_000):
        fault, _ = keeper.keep({f"weights{n}": torch.zeros(1000) for n in range(100)})
    assert "File too large" in fault
    assert torch.equal(load(keeper.path, owner)["weights"], torch.ones(10))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_a_run_without_room_for_its_record_fails_and_the_record_of_before_stays(tmp_path):
    arguments = [*TINY, f"results.root={tmp_path}", "results.reuse=false", "results.resume=false"]
    chosen = configuration.compose(arguments)
    folder = runner.seed_folder(chosen, identity(chosen, inspect("cpu", "auto").name), 0)
    write_run(folder, run(), Trace(layers=["old"]))
    before = contents(tmp_path)
    done = command(*arguments, largest=5000)
    assert done.returncode == 1 and "its record cannot be written" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert contents(tmp_path) == before


@pytest.mark.parametrize("named", [[], ["hydra.sweep.dir=mine"]])
def test_hydra_without_room_for_its_files_is_refused_and_leaves_none(tmp_path, named):
    done = command("-m", *TINY, "results.root=runs", *named, largest=100, cwd=tmp_path)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "File too large" in done.stderr and "results.root" in done.stderr
    # What the user named is the user's.
    assert {path.name for path in tmp_path.rglob("*")} == ({"mine", "multirun.yaml"} if named else {"runs"})


@pytest.mark.parametrize("arguments", [["--help"], ["--cfg", "job"]])
def test_output_on_a_full_disk_is_told_from_a_folder_that_cannot_be_written(tmp_path, arguments):
    with open("/dev/full", "w") as full:
        done = command(*arguments, stdout=full, cwd=tmp_path)
    assert done.returncode == 130 and done.stderr.startswith("triaccel-bench: output closed ([Errno 28]")


def test_a_disk_that_others_fill_meanwhile_stops_the_sweep_before_it_trains_for_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(
        runner, "_before_the_first", lambda cells, labels, devices, reporter: ({("cpu", "auto"): "cpu"}, {})
    )
    trained = []

    def answer(entry, arguments, *_):
        trained.append(arguments[1])
        write_run(arguments[3], run(seed=arguments[1]))
        full = shutil.disk_usage(tmp_path)._replace(free=1000)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
        return Ended(("finished", ("done", None)), 0)

    monkeypatch.setattr(runner, "_child", answer)
    chosen = settings(f"results.root={tmp_path}", "seeds=[0,1,2]", "preflight=auto")
    first, last = runner.run_cells([chosen], Reporter())
    assert trained == [0] and (first.status, last.status) == ("done", "refused")
    assert "0 MB are free" in last.reason and "results.root" in last.reason


def test_without_a_folder_for_temporary_files_a_sentence_says_so(tmp_path, monkeypatch):
    def none():
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(runner.tempfile, "gettempdir", none)
    with pytest.raises(runner.Refused, match="TMPDIR: expected a folder .*; set TMPDIR to one"):
        runner.run_cells([settings(f"results.root={tmp_path}")], Reporter())


def test_leftovers_that_cannot_be_removed_stop_nobody(tmp_path, monkeypatch):
    chosen = settings(f"results.root={tmp_path}", "seeds=[0]")
    folder = runner.seed_folder(chosen, "cell", 0)
    (folder / f".{RUN_FILE}.half").mkdir(parents=True)
    with claims.claimed(folder, "seed 0", Reporter(), Deadline(None)) as claimed:
        assert claimed


def test_folders_that_cannot_be_looked_into_are_named(tmp_path, monkeypatch):
    write(tmp_path, run(seed=0), run(method="amp"))
    hidden, look = str(tmp_path / "cifar10-resnet18-amp"), os.scandir

    def scandir(path):
        if str(path) == hidden:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), hidden)
        return look(path)

    monkeypatch.setattr(os, "scandir", scandir)
    found = read_results([tmp_path])
    assert len(found.runs) == 1 and len(found.problems) == 1
    assert hidden in found.problems[0] and "Permission denied" in found.problems[0]


def test_no_two_commands_share_a_folder_of_hydra_whatever_their_clocks_and_process_numbers(tmp_path):
    code = """
import os, sys
from hydra.core import utils
class Stopped(utils.datetime):
    now = classmethod(lambda cls, zone=None: cls(2026, 1, 1))
utils.datetime = Stopped
os.getpid = lambda: 7
from triaccel_bench import cli
cli._run = lambda jobs, asked: []
cli._remove_folders_of_hydra = lambda: None
assert cli.run([*sys.argv[1:], "results.root=runs", "device=cpu"]) == 0
"""
    for options in ([], ["-m"]):
        subprocess.run([sys.executable, "-c", code, *options], check=True, cwd=tmp_path)
    made = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert len(made) == 2 and {name[:-8] for name in made} == {".hydra-20260101-000000-"}


def test_one_commands_end_leaves_anothers_folder_of_hydra_alone(tmp_path, monkeypatch):
    from triaccel_bench import cli

    other = tmp_path / ".hydra-20260101-000000-01234567"
    other.mkdir()
    (other / "multirun.yaml").touch()
    monkeypatch.setattr(configuration, "FOLDERS_OF_HYDRA", set())
    assert cli.run(["--cfg", "job", f"results.root={tmp_path}"]) == 0
    assert (other / "multirun.yaml").exists()


def test_a_clock_that_is_put_back_ends_no_run_before_its_beginning(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    times = [datetime(2026, 1, 2, tzinfo=timezone.utc) - timedelta(hours=n) for n in range(9)]

    class PutBack(datetime):
        @classmethod
        def now(cls, zone=None):
            return times.pop(0)

    class Pipe:
        def send(self, message):
            pass

    monkeypatch.setattr(worker, "datetime", PutBack)
    chosen = settings("epochs=1", "method=fp32", "seeds=[0]")
    worker.run_seed(Pipe(), chosen, 0, "cell", tmp_path)
    found = read_run(tmp_path / RUN_FILE)
    began, ended = (datetime.fromisoformat(getattr(found.provenance, name)) for name in ("started_at", "finished_at"))
    assert found.status == "done" and timedelta(0) <= ended - began < timedelta(minutes=10)
    assert len(times) == 8, "the clock on the wall is asked once"
    assert 0 < found.epochs[0].train_seconds < 600


def test_sources_that_are_new_to_git_are_changes(tmp_path, monkeypatch):
    def git(*arguments):
        own = "-c", "user.name=a", "-c", "user.email=a@b"
        subprocess.run(["git", "-C", str(tmp_path), *own, *arguments], check=True, capture_output=True)

    (tmp_path / "triaccel_bench").mkdir()
    (tmp_path / "triaccel_bench" / "__init__.py").touch()
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    monkeypatch.setattr(worker.triaccel_bench, "__file__", str(tmp_path / "triaccel_bench" / "__init__.py"))
    (tmp_path / "notes.yaml").touch()
    assert worker._git_state()[1] is False
    (tmp_path / "conf" / "tuned").mkdir(parents=True)
    (tmp_path / "conf" / "tuned" / "mine.yaml").touch()
    assert worker._git_state()[1] is True


def test_durations_come_from_clocks_that_nobody_sets():
    """The wall's clock is for dates: only ``worker._now`` asks it."""
    of_the_wall = {
        ("time", "time"),
        ("time", "time_ns"),
        ("datetime", "now"),
        ("datetime", "utcnow"),
        ("date", "today"),
    }
    asking = []
    for path in sorted(Path(triaccel_bench.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                asking += [path.stem] * ((node.value.id, node.attr) in of_the_wall)
            if isinstance(node, ast.ImportFrom) and node.module == "time":
                asking += [path.stem] * any(alias.name in ("time", "time_ns") for alias in node.names)
    assert asking == ["worker"]
