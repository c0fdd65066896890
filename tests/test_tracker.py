"""TensorBoard beside a run: what the record and the trace hold, each epoch once, and no run that depends on it."""

from __future__ import annotations

import math
import sys

import pytest
from tiny import BASE, settings, trainer

from triaccel_bench import cli, inspection, tracker, worker
from triaccel_bench.records import read_run, read_trace
from triaccel_bench.resumption import Interrupted, Keeper, Owner
from triaccel_bench.settings import SettingsError

try:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
except ImportError:
    EventAccumulator = None

installed = pytest.mark.skipif(EventAccumulator is None, reason="needs the extra tensorboard")

MOVING = ["method=triaccel_precision_batch", "method.control.interval=2"]


def scalars_in(folder) -> dict[str, list[tuple[int, float]]]:
    """Every scalar of every file there, by tag, as (step, value): nothing is hidden because it was written twice."""
    found: dict[str, list[tuple[int, float]]] = {}
    for path in sorted((folder / tracker.FOLDER).iterdir()):
        read = EventAccumulator(str(path), size_guidance={"scalars": 0}, purge_orphaned_data=False)
        read.Reload()
        for tag in read.Tags()["scalars"]:
            found.setdefault(tag, []).extend((event.step, event.value) for event in read.Scalars(tag))
    return found


def written(scalars, entries) -> dict[str, list[tuple[int, float]]]:
    """What ``scalars`` makes of (entry, step) pairs."""
    expected: dict[str, list[tuple[int, float]]] = {}
    for entry, step in entries:
        for tag, value in scalars(entry):
            if value is not None:
                expected.setdefault(tag, []).append((step, value))
    return expected


def check(folder, run, trace) -> None:
    expected = written(tracker.epoch_scalars, [(record, record.epoch) for record in run.epochs])
    expected |= written(tracker.decision_scalars, [(decision, decision.step) for decision in trace.decisions])
    found = scalars_in(folder)
    assert found.keys() == expected.keys()
    for tag, values in expected.items():
        assert [step for step, _ in found[tag]] == [step for step, _ in values], tag
        assert all(math.isclose(a, b, rel_tol=1e-6) for (_, a), (_, b) in zip(found[tag], values)), tag


def train(made, run, folder, kind="tensorboard") -> None:
    with tracker.followed(kind, folder, run, made.trace, made.emit) as made.emit:
        made.train()


@installed
def test_scalars_are_those_of_record_and_trace(tmp_path):
    made, run = trainer(settings(*MOVING, "epochs=3"))
    train(made, run, tmp_path)
    check(tmp_path, run, made.trace)
    found = scalars_in(tmp_path)
    assert [step for step, _ in found["accuracy (%)/evaluation"]] == [1, 2, 3] and len(made.trace.decisions) > 3
    assert {"loss/train", "seconds/train", "memory (GB)/memory_peak", "batch/mean", "rates/learning rate", "layers/fp32",
            "control/batch"} <= found.keys()  # fmt: skip
    assert "loss scale" not in found, "what there is not has no curve"


@installed
def test_a_run_that_goes_on_writes_no_epoch_twice(tmp_path):
    chosen = settings(*MOVING, "epochs=4")
    owner = Owner("cell", 0, 1, "0" * 16)

    def begun():
        keeper = Keeper(tmp_path / "checkpoint.pt", owner, every=2)
        keeper.look()
        keeper._last_took = 0.0
        return trainer(chosen, keeper=keeper)

    made, run = begun()
    came = []

    def killed(kind, payload):
        came.append(kind)
        if came.count("epoch") == 3:
            raise KeyboardInterrupt

    made.emit = killed
    with pytest.raises(KeyboardInterrupt):
        train(made, run, tmp_path)
    # An epoch further than the checkpoint, as a process may be that is killed.
    assert [step for step, _ in scalars_in(tmp_path)["loss/train"]][:2] == [1, 2] and (
        tmp_path / "checkpoint.pt"
    ).exists()
    made, run = begun()
    assert run.resumed_at and len(run.epochs) == 2
    train(made, run, tmp_path)
    check(tmp_path, run, made.trace)
    assert [step for step, _ in scalars_in(tmp_path)["loss/train"]] == [1, 2, 3, 4]


@installed
def test_an_interrupted_run_leaves_what_it_had(tmp_path):
    made, run = trainer(settings(*MOVING, "epochs=3"))
    emit = made.emit

    def stops(kind, payload):
        emit(kind, payload)
        if kind == "progress" and len(run.epochs) == 1 and len(made.trace.decisions) > 3:
            made.stop.asked = "SIGTERM"

    made.emit, made.keeper = stops, Keeper(tmp_path / "checkpoint.pt", Owner("cell", 0, 1, ""), 1)
    with pytest.raises(Interrupted):
        train(made, run, tmp_path)
    assert len(run.epochs) == 1, "within the second epoch, after whose control steps nothing was flushed"
    check(tmp_path, run, made.trace)


@installed
def test_without_a_tracker_scalars_of_an_earlier_run_go(tmp_path):
    made, run = trainer(settings("epochs=1"))
    train(made, run, tmp_path)
    assert scalars_in(tmp_path)
    (tmp_path / tracker.FOLDER / "mine.txt").write_text("kept")
    made, run = trainer(settings("epochs=1"))
    train(made, run, tmp_path, kind="none")
    assert [path.name for path in (tmp_path / tracker.FOLDER).iterdir()] == ["mine.txt"]


@installed
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_disk_that_takes_no_scalars_ends_no_run(tmp_path, when, monkeypatch):
    def fails(*given, **more):
        raise OSError("no room")

    if when == "before":
        (tmp_path / tracker.FOLDER).write_text("a file where the folder should be")
    else:
        monkeypatch.setattr(tracker.TensorBoard, "follow", fails)
    made, run = trainer(settings("epochs=2"))
    train(made, run, tmp_path)
    assert len(run.epochs) == 2
    (said,) = [text for text in run.warnings if text.startswith("tracker=tensorboard: expected ")]
    assert said.endswith("; the run goes on without") and str(tmp_path) in said


def absent(monkeypatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorboard"] + ["torch.utils.tensorboard"]:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)


def test_where_it_is_not_installed_preflight_refuses_in_one_sentence(monkeypatch):
    absent(monkeypatch)
    cells = [settings("tracker=tensorboard"), settings()]
    report = inspection.look(cells, False)
    (sentence,) = report.obstacles().values()
    assert report.obstacles().keys() == {0}
    assert sentence.startswith("tracker=tensorboard: expected the package tensorboard, got none")
    assert sentence.endswith("; pip install -e '.[tensorboard]', or use tracker=none") and "\n" not in sentence
    assert not any(check.name == "tracker" for check in inspection.look(cells[1:], False).checks)


def test_without_preflight_the_run_refuses_before_it_reads_data(monkeypatch, tmp_path):
    absent(monkeypatch)
    monkeypatch.setattr(worker, "load", lambda dataset: pytest.fail("data were read"))
    said = []
    pipe = type("Pipe", (), {"send": staticmethod(said.append)})
    chosen = settings("tracker=tensorboard", f"results.root={tmp_path}")
    worker.run_seed(pipe, chosen, 0, "cell", tmp_path / "seed-0")
    ((kind, message),) = said
    assert kind == "refused" and message.startswith("tracker=tensorboard: expected")


def test_nothing_of_it_is_imported_where_it_is_off(monkeypatch, tmp_path):
    absent(monkeypatch)
    made, run = trainer(settings("epochs=1"))
    train(made, run, tmp_path, kind="none")
    assert not (tmp_path / tracker.FOLDER).exists() and run.warnings == []
    with pytest.raises(SettingsError, match="extra|tensorboard"):
        train(*trainer(settings("epochs=1")), tmp_path)


@installed
def test_the_command_writes_them_beside_the_record(tmp_path, capfd):
    tiny = [*BASE, f"results.root={tmp_path}", "epochs=2", "seeds=[0]", *MOVING]
    assert cli.run([*tiny, "tracker=tensorboard"]) == 0
    (path,) = tmp_path.glob("*/seed-0/run.json")
    check(path.parent, read_run(path), read_trace(path.parent / "trace.json.gz"))
    before = sorted(path.parent.rglob("*"))
    assert cli.run(tiny) == 0 and sorted(path.parent.rglob("*")) == before, "the same cell, finished before"
