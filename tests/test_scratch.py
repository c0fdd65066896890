"""Roots on slow or shared disks: local files first, whole copies, many writers, and no locks to rely on."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import secrets
from pathlib import Path

import pytest
from measured import epoch
from tiny import Listening, settings

from triaccel_bench import claims, cli, configuration, inspection, records, runner, scratch, worker
from triaccel_bench.child import Ended
from triaccel_bench.deadline import Deadline
from triaccel_bench.identity import RESULTS_VERSION, identity
from triaccel_bench.layout import to_markdown
from triaccel_bench.progress import Reporter
from triaccel_bench.records import CHECKPOINT_FILE, RUN_FILE, TRACE_FILE, Trace, planned_run, read_run, write_run
from triaccel_bench.results import read_results
from triaccel_bench.resumption import Keeper
from triaccel_bench.scratch import Workplace
from triaccel_bench.tables import table1


class Pipe:
    def __init__(self) -> None:
        self.sent = []

    def send(self, message) -> None:
        self.sent.append(message)


class Killed(BaseException):
    pass


@pytest.fixture
def places(tmp_path):
    home = tmp_path / "root" / "cell" / "seed-0"
    home.mkdir(parents=True)
    return home, tmp_path / "local"


def run(home: Path, local: Path):
    pipe = Pipe()
    chosen = settings("method=fp32", "epochs=2", f"results.scratch={local}")
    worker.run_seed(pipe, chosen, 0, "cell", home)
    return pipe.sent


def killed_run(home: Path, local: Path, monkeypatch) -> None:
    """Up to the first checkpoint."""
    keep = Keeper.keep

    def keep_and_die(self, state):
        keep(self, state)
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Keeper, "keep", keep_and_die)
        run(home, local)


def test_files_are_written_locally_and_copied_home_as_they_are_whole(places, monkeypatch):
    home, local = places
    published, publish = [], Workplace.publish

    def noted(self, name):
        # Whoever writes into the root itself would be seen here.
        assert not (home / name).exists() and (self.folder / name).parent.parent == local
        published.append(name)
        publish(self, name)

    monkeypatch.setattr(Workplace, "publish", noted)
    assert run(home, local)[-1] == ("finished", ("done", None))
    assert published == [CHECKPOINT_FILE, TRACE_FILE, RUN_FILE]
    assert sorted(path.name for path in home.iterdir()) == [RUN_FILE, TRACE_FILE]
    assert read_run(home / RUN_FILE).status == "done" and records.read_trace(home / TRACE_FILE)
    assert not list(local.iterdir())


def test_another_machine_goes_on_from_the_checkpoint_at_home(places, tmp_path, monkeypatch):
    home, local = places
    killed_run(home, local, monkeypatch)
    assert (home / CHECKPOINT_FILE).exists() and not (home / RUN_FILE).exists()
    assert run(home, tmp_path / "other")[-1] == ("finished", ("done", None))
    assert read_run(home / RUN_FILE).resumed_at == [4]
    assert [path.name for path in home.iterdir() if "checkpoint" in path.name] == []


def test_a_checkpoint_that_home_has_no_more_is_of_the_past(places, monkeypatch):
    home, local = places
    killed_run(home, local, monkeypatch)
    (home / CHECKPOINT_FILE).unlink()
    run(home, local)
    assert read_run(home / RUN_FILE).resumed_at == []


def test_a_copy_that_breaks_off_leaves_home_as_it_was(places, monkeypatch):
    home, local = places
    work = Workplace(home, str(local))
    work.open()
    (home / RUN_FILE).write_text("before")
    (work.folder / RUN_FILE).write_text("afterwards")

    def broken(source, target, length):
        target.write(source.read(3))
        raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))

    monkeypatch.setattr(scratch.shutil, "copyfileobj", broken)
    with pytest.raises(OSError, match="not connected"):
        work.publish(RUN_FILE)
    assert (home / RUN_FILE).read_text() == "before"
    assert [path.name for path in home.iterdir()] == [RUN_FILE]


def test_a_record_whose_home_was_away_is_kept_and_brought_home_by_the_next_command(tmp_path, monkeypatch):
    chosen = settings(
        "method=fp32", "seeds=[0]", f"results.root={tmp_path / 'root'}", f"results.scratch={tmp_path / 'local'}"
    )
    cell = identity(chosen, "cpu")
    home = runner.seed_folder(chosen, cell, 0)
    home.mkdir(parents=True)
    publish = Workplace.publish

    def away(self, name):
        if name == RUN_FILE:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        publish(self, name)

    pipe = Pipe()
    monkeypatch.setattr(runner, "_device_name", lambda *_: "cpu")
    with monkeypatch.context() as patch:
        patch.setattr(Workplace, "publish", away)
        worker.run_seed(pipe, chosen, 0, cell, home)
        kind, (status, reason) = pipe.sent[-1]
        assert status == "failed" and reason.startswith("done, but its record cannot be written")
        assert not (home / RUN_FILE).exists()
        (refused,) = runner.run_cells([chosen], Listening())
        assert refused.status == "refused" and str(tmp_path / "local") in refused.reason
    monkeypatch.setattr(runner, "_child", lambda *_: pytest.fail("it is finished"))
    listening = Listening()
    (outcome,) = runner.run_cells([chosen], listening)
    assert outcome.reused and "could not be written" in listening.said[0] and "reused" in listening.said[1]
    assert not list((tmp_path / "local").iterdir())


def test_a_scratch_that_cannot_be_written_is_refused_before_training(places, tmp_path):
    home, _ = places
    (tmp_path / "file").touch()
    kind, sentence = run(home, tmp_path / "file")[-1]
    assert kind == "refused" and sentence.startswith(f"results.scratch={tmp_path / 'file'}: expected a local folder")
    chosen = settings(f"results.root={tmp_path / 'root'}", f"results.scratch={tmp_path / 'file'}")
    assert "results.scratch" in inspection.look([chosen], thorough=False).obstacles()[0]


def test_two_roots_with_one_scratch_do_not_meet(tmp_path):
    folders = {Workplace(tmp_path / root / "cell" / "seed-0", "local").folder for root in ("a", "b")}
    assert len(folders) == 2


def test_a_root_without_locks_is_told_once_and_others_files_are_left_alone(tmp_path, monkeypatch):
    def without(handle, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(claims.fcntl, "flock", without)
    listening, asked = Listening(), []
    for seed in (0, 1):
        folder = tmp_path / "cell" / f"seed-{seed}"
        folder.mkdir(parents=True)
        (folder / f".{RUN_FILE}.half").touch()
        with claims.claimed(folder, "label", listening, Deadline(None)):
            asked.append(seed)
        assert (folder / f".{RUN_FILE}.half").exists(), "somebody may be writing it"
    assert asked == [0, 1]
    assert [text.split(" (")[0] for text in listening.said] == [f"{tmp_path}: no locks there"]


def record_of(chosen, seed: int, cell: str):
    run = planned_run(chosen.model_dump(mode="json"), seed, cell, RESULTS_VERSION)
    made = [epoch(number) for number in range(1, chosen.epochs + 1)]
    return run.model_copy(update={"status": "done", "reason": None, "epochs": made})


def finishing(log: Path):
    """In place of a child: a run that has ended as soon as it begins, by the way that real ones write."""

    def child(entry, arguments, *_):
        if entry != "run_seed":
            return Ended(("device", "cpu"), 0)
        chosen, seed, cell, folder, _ = arguments
        work = Workplace(folder, chosen.results.scratch)
        work.open()
        write_run(work.folder, record_of(chosen, seed, cell), Trace(layers=[]))
        work.publish_record()
        work.close()
        with log.open("a") as lines:
            lines.write(f"{cell} {seed}\n")
        return Ended(("finished", ("done", None)), 0)

    return child


def in_processes(count: int, task) -> None:
    """``task(number)`` in so many processes that begin together."""
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(count)

    def begin(number: int) -> None:
        barrier.wait()
        task(number)

    processes = [context.Process(target=begin, args=(number,)) for number in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * count


def test_six_writers_of_twenty_runs_lose_none_and_double_none(tmp_path, monkeypatch):
    root, log = tmp_path / "root", tmp_path / "log"
    monkeypatch.setattr(runner, "_child", finishing(log))
    mine = [settings(f"epochs={n + 1}", f"seeds={list(range(20))}", f"results.root={root}") for n in range(6)]
    mine = [
        cell.model_copy(update={"results": cell.results.model_copy(update={"scratch": str(tmp_path / "local")})})
        if number % 2
        else cell
        for number, cell in enumerate(mine)
    ]
    shared = settings("epochs=9", "seeds=[0,1,2,3,4]", f"results.root={root}")

    def write(number: int) -> None:
        ended = runner.run_cells([shared, mine[number], shared], Reporter())
        assert [outcome.status for outcome in ended] == ["done"] * 30

    in_processes(6, write)
    found = read_results([root])
    assert not found.problems and len(found.runs) == 6 * 20 + 5
    ran = log.read_text().splitlines()
    assert len(ran) == len(set(ran)) == 125, "each run once, whoever asked for it"
    assert {(run.cell, run.seed) for run in found.runs} == {(c, int(s)) for c, s in (line.split() for line in ran)}
    names = {RUN_FILE, TRACE_FILE, ".lock"}
    assert {path.name for path in root.glob("*/*/*")} == names and not list((tmp_path / "local").iterdir())
    assert to_markdown(table1(found)) == to_markdown(table1(read_results([root])))


def test_without_locks_all_writers_leave_whole_files(tmp_path, monkeypatch):
    root, log = tmp_path / "root", tmp_path / "log"
    monkeypatch.setattr(runner, "_child", finishing(log))
    monkeypatch.setattr(fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOLCK, "none")))
    chosen = settings(f"seeds={list(range(20))}", "results.reuse=false", f"results.root={root}")
    in_processes(6, lambda number: runner.run_cells([chosen], Reporter()))
    found = read_results([root])
    assert not found.problems and sorted(run.seed for run in found.runs) == list(range(20))
    assert {path.name for path in root.glob("*/*/*")} == {RUN_FILE, TRACE_FILE, ".lock"}


def test_sweeps_begun_in_one_second_share_no_folder_and_overwrite_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setattr(runner, "_child", finishing(tmp_path / "log"))
    monkeypatch.setattr(cli, "_tell", lambda *_, **__: None)
    remove = cli._remove_folders_of_hydra

    def noted():
        with (tmp_path / "folders").open("a") as lines:
            lines.writelines(f"{folder}\n" for folder in configuration.FOLDERS_OF_HYDRA)
        remove()

    monkeypatch.setattr(cli, "_remove_folders_of_hydra", noted)
    monkeypatch.setattr("hydra.core.utils.datetime", Second)
    base = ["-m", "+experiment=smoke", "progress=none", "preflight=off", "method=fp32,amp", "seeds=[0]"]

    def command(number: int) -> None:
        configuration._COMMAND = secrets.token_hex(4)  # as in processes that were not forked
        if cli.run([*base, f"epochs={number + 1}"]):
            os._exit(1)

    in_processes(4, command)
    folders = (tmp_path / "folders").read_text().splitlines()
    assert len(folders) == len(set(folders)) == 4 and all("20260102-030405" in folder for folder in folders)
    found = sorted((tmp_path / "results" / "runs").rglob(RUN_FILE))
    kept = {(read_run(path).method, read_run(path).epochs_planned) for path in found}
    assert len(found) == 8 and kept == {(method, epochs) for method in ("fp32", "amp") for epochs in (1, 2, 3, 4)}
    for path in found:
        assert read_run(path).cell in str(path.parent.parent)


class Second:
    """A clock that stands still."""

    @staticmethod
    def now():
        from datetime import datetime

        return datetime(2026, 1, 2, 3, 4, 5)
