"""A run that crashes, hangs or dies in its process: what it leaves, and that the others go on."""

import multiprocessing
import os
import signal
import time

import pytest
from tiny import children, settings

from triaccel_bench import child, deadline, runner
from triaccel_bench.child import Ended, call
from triaccel_bench.deadline import Deadline
from triaccel_bench.identity import identity
from triaccel_bench.progress import Reporter
from triaccel_bench.records import CHECKPOINT_FILE, read_run


@pytest.fixture(autouse=True)
def begun_now(monkeypatch):
    """As a command begins; what a test does to that clock ends with it."""
    monkeypatch.setattr(deadline, "_began", time.monotonic())


def folder_of(chosen, seed: int):
    return runner.seed_folder(chosen, identity(chosen, runner._device_name(chosen, None)), seed)


class Acting(Reporter):
    """Does something to the process of the first run, once; children that were there before are not its business."""

    def __init__(self, number: int) -> None:
        self.number, self.acted = number, False
        self.others = children()

    def epoch(self, payload, epochs):
        if not self.acted:
            self.acted = True
            (training,) = children(but=self.others)
            os.kill(training, self.number)


def long_and_short(root, timeout: int) -> list:
    """The first is at it still when ``Acting``, however busy the machine, has heard of its first epoch."""
    shared = f"results.root={root}", "seeds=[0]", "method=fp32", f"runner.timeout={timeout}"
    return [settings(*shared, f"epochs={epochs}") for epochs in (2000, 2)]


@pytest.mark.parametrize(("number", "words"), [
    (signal.SIGSEGV, "Segmentation fault"), (signal.SIGABRT, "Aborted"), (signal.SIGKILL, None),
])  # fmt: skip
def test_a_crash_leaves_its_stack_and_the_others_go_on(tmp_path, number, words):
    first, second = runner.run_cells(long_and_short(tmp_path, timeout=60), Acting(number))
    assert (first.status, second.status) == ("failed", "done")
    record = read_run(first.path)
    assert record.status == "failed" and record.reason == first.reason and number.name in first.reason
    said = "\n".join(record.traceback)
    if words is None:
        assert said == "", "nobody is asked before SIGKILL"
    else:
        assert words in said and "trainer.py" in said
    assert read_run(second.path).traceback == []


def test_what_nobody_caught_is_told_with_its_traceback():
    ended = call("code_hash", (), lambda *_: None)
    assert (ended.verdict, ended.exit_code) == (None, 1) and ended.how == "exit code 1"
    assert ended.words[0].startswith("Traceback") and "TypeError" in ended.words[-1]


def test_a_hung_run_is_ended_tells_where_and_the_others_go_on(tmp_path):
    """It reads from a pipe that nobody writes to, as from a server that is gone."""
    chosen = settings(f"results.root={tmp_path}", "seeds=[0,1]", "method=fp32", "runner.timeout=4")
    folder = folder_of(chosen, 0)
    folder.mkdir(parents=True)
    os.mkfifo(folder / CHECKPOINT_FILE)
    others = children()
    first, second = runner.run_cells([chosen], Reporter())
    assert (first.status, second.status) == ("failed", "done")
    assert "it hung: no step, evaluation batch or other sign of life for 4 s" in first.reason
    assert "raise runner.timeout" in first.reason and "did not even tell" not in first.reason
    record = read_run(first.path)
    assert record.reason == first.reason
    stack = "\n".join(record.traceback)
    assert "resumption.py" in stack and "in look" in stack and "worker.py" in stack
    assert not children(but=others)


def test_a_hung_run_that_reacts_to_nothing_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(child, "SECONDS_TO_END", 1.0)
    acting = Acting(signal.SIGSTOP)
    first, second = runner.run_cells(long_and_short(tmp_path, timeout=3), acting)
    assert (first.status, second.status) == ("failed", "done")
    assert "it did not even tell where" in first.reason and read_run(first.path).traceback == []
    assert not children(but=acting.others)


def test_a_slow_epoch_is_no_hang(tmp_path, monkeypatch):
    """It says nothing for longer than the timeout but that it lives; after some such signs it is asked to stop."""
    said, signs = [], []

    class Listening(Reporter):
        def progress(self, payload):
            said.append(payload)

        def epoch(self, payload, epochs):
            said.append(payload)

    mind = child._Watch._mind_the_time

    def minding(watch):
        if watch._silence == 0.0 and not said:
            signs.append(time.monotonic())
        if len(signs) == 6:
            monkeypatch.setattr(deadline, "_began", time.monotonic() - 100 * 60 + 1)
        mind(watch)

    monkeypatch.setattr(child._Watch, "_mind_the_time", minding)
    chosen = settings(
        f"results.root={tmp_path}", "seeds=[0]", "epochs=1", "method=fp32", "runner.timeout=3", "preflight=auto",
        "runner.max_minutes=100", "dataset.train_size=40000", "method.batch.initial=8",
        "method.control.interval=100000000",
    )  # fmt: skip
    (outcome,) = runner.run_cells([chosen], Listening())
    assert outcome.status == "left" and "stopped at epoch 1, step" in outcome.reason, outcome
    assert not said and signs[5] - signs[1] > 3


def test_time_in_which_the_command_itself_was_stopped_is_no_silence(monkeypatch):
    """Ctrl-Z and an hour later fg."""
    pipes = [multiprocessing.Pipe(duplex=False)[0] for _ in range(2)]
    watch = child._Watch(None, *pipes, lambda *_: None, 900.0, None)
    monkeypatch.setattr(watch, "_hear_words", lambda wait: False)
    monkeypatch.setattr(child.time, "monotonic", iter([0.0, 3600.0]).__next__)
    assert watch._listen() and watch._silence < 5


def test_a_preflight_that_hangs_is_a_refusal_that_says_so(monkeypatch):
    monkeypatch.setattr(runner, "_child", lambda *_: Ended(None, -9, ("where",), silence=900.0))
    with pytest.raises(runner.Refused, match="preflight: its process ended early.*it hung: .* for 900 s"):
        runner.run_cells([settings("preflight=auto")], Reporter())


def test_there_is_room_before_the_deadline_for_what_cannot_be_interrupted():
    hours = Deadline(120.0)
    assert hours.room() == deadline.SECONDS_TO_FINISH >= child.SECONDS_TO_END
    assert hours.room(silence=30.0) == deadline.SECONDS_TO_FINISH + 60.0
    assert Deadline(0.1).room(30.0) == 3.0, "of a short time half is run"
    assert not Deadline(None).near(1e9) and Deadline(1e-9).near()


def test_the_longest_silence_is_that_of_this_epoch_and_the_one_before():
    here, there = multiprocessing.Pipe(duplex=False)
    watch = child._Watch(None, here, multiprocessing.Pipe(duplex=False)[0], lambda *_: None, None, None)

    def after(silence: float, kind: str) -> float:
        watch._silence = silence
        there.send((kind, {}))
        assert watch._listen()
        return max(watch._longest)

    assert after(90.0, "alive") > 89, "kernels compile"
    assert after(1.0, "epoch") > 89
    assert after(3.0, "alive") > 89, "a checkpoint"
    assert 3 <= after(1.0, "epoch") < 4
    assert after(1.0, "alive") >= 3 and after(1.0, "epoch") < 2
