"""A run that is killed anywhere and started again ends as one that never was: bit for bit on a CPU."""

import math
import os
import pickle
import random
import signal
import sys
import threading
import time
import zipfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from test_cli import endless_run, nothing_left_of
from tiny import children, images, settings, trainer

from triaccel_bench import assembly, resumption, runner, worker
from triaccel_bench.hessian import HessianEstimator
from triaccel_bench.meters import TensorMeter, largest
from triaccel_bench.methods import Method
from triaccel_bench.progress import Reporter
from triaccel_bench.records import CHECKPOINT_FILE, RUN_FILE, read_run
from triaccel_bench.resumption import Interrupted, Keeper, Owner, Stop, load, save

OWNER = Owner("cell", 0, 1, "0" * 16)
BASE = ["epochs=3", "evaluation.batch=16", "method.control.interval=3", "method.precision.dwell=1"]
NARROW = "method.precision.cpu_executes=requested"
PROBED = [NARROW, "method.curvature.every=4"]
SCHEDULE = ["method.batch.growth=schedule", "memory.budget=1.0"]
RUNS = {
    "fp32": ["method=fp32"],
    "amp": ["method=amp", NARROW, "method.loss_scale.growth_interval=3"],
    "triaccel": ["method=triaccel", *PROBED],
    "triaccel, products": [
        "method=triaccel",
        *PROBED,
        "method.curvature.product=exact",
        "method.curvature.iterations=3",
    ],
    "triaccel, fisher, schedule": ["method=triaccel", *PROBED, *SCHEDULE, "method.curvature.estimator=fisher"],
    "triaccel_plus": ["method=triaccel_plus", *PROBED, *SCHEDULE, "method.batch.max=32"],
}
CLOCKS = {
    "training_seconds", "seconds", "train_seconds", "evaluation_seconds", "probe_seconds", "first_use_seconds",
    "checkpoint_seconds", "controller_seconds", "phase_seconds", "last_turns", "seconds_per_product",
}  # fmt: skip
"""What a clock has told: it adds up, and is never the same twice."""


class Killed(BaseException):
    pass


@pytest.fixture(autouse=True)
def nothing_by_the_clock(monkeypatch):
    """Every checkpoint is written, every probe is made, and reads one layer where layers take turns."""
    monkeypatch.setattr(resumption, "MAX_SHARE", math.inf)
    monkeypatch.setattr(Method, "_allowance", lambda self, training_seconds: 1e-9)
    monkeypatch.setattr(HessianEstimator, "_predicted_seconds", lambda self, name, allowed: 1.0)


def keeper_at(folder: Path) -> Keeper:
    keeper = Keeper(folder / CHECKPOINT_FILE, OWNER, 1)
    keeper.look()
    return keeper


def differences(left, right, where: str = "") -> list[str]:
    if isinstance(left, dict):
        if left.keys() != right.keys():
            return [f"{where}: other names"]
        kept = [key for key in left if key not in CLOCKS | {"resumed_at"}]
        return [found for key in kept for found in differences(left[key], right[key], f"{where}.{key}")]
    if isinstance(left, (list, tuple)):
        if len(left) != len(right):
            return [f"{where}: {len(left)} against {len(right)}"]
        return [found for n, pair in enumerate(zip(left, right)) for found in differences(*pair, f"{where}.{n}")]
    if isinstance(left, torch.Tensor):
        # NaN is not equal to itself.
        alike = left.dtype == right.dtype and torch.equal(*(t.double().nan_to_num(7.25) for t in (left, right)))
        return [] if alike else [f"{where}: tensors differ"]
    alike = left == right or (left != left and right != right)
    return [] if alike else [f"{where}: {left} against {right}"]


def ended(made) -> dict:
    copies = [copy.detach() for copy in made.engine._copies.of_parameters if copy is not None]
    return {
        **made.state_dict(),
        "copies": copies,
        "ema": made.engine.moments.ema,
        "plan": made.method.decision.executed,
    }


def disturb(made, keeper: Keeper, how: str, at: int) -> None:
    """Let the process be killed, or asked to stop, in step ``at`` or in the evaluation of epoch ``at``."""
    engine, evaluate, step = made.engine, made.engine._evaluate_batch, made.engine.step

    def act() -> None:
        if how.startswith("kill"):
            raise Killed
        keeper.stop.asked = "SIGTERM"

    def stepping(indices):
        outcome = step(indices)
        if not how.endswith("evaluation") and made.step + 1 == at:
            act()
        return outcome

    def evaluating(*batch):
        if how.endswith("evaluation") and made.so_far.number == at:
            act()
        evaluate(*batch)

    engine.step, engine._evaluate_batch = stepping, evaluating


def broken_run(chosen, folder: Path, disturbances):
    """The run, disturbed one after the other, each time gone on with by a new trainer."""
    data = images(train=100)
    for how, at in disturbances:
        keeper = keeper_at(folder)
        torch.manual_seed(at)  # a new process has drawn something else until then
        made, _ = noisy(trainer(chosen, data, keeper=keeper))
        disturb(made, keeper, how, at)
        with pytest.raises((Killed, Interrupted)):
            made.train()
    torch.manual_seed(len(disturbances))
    made, run = noisy(trainer(chosen, data, keeper=keeper_at(folder)))
    made.train()
    return made, run


def noisy(pair):
    """Training that draws from torch's generator, as dropout and stochastic depth do."""

    def disturbed(module, inputs, output):
        return output * (1 + 0.1 * torch.rand(())) if module.training else output

    pair[0].network.module.conv1.register_forward_hook(disturbed)
    return pair


@pytest.mark.parametrize("name", RUNS)
def test_a_broken_run_ends_as_an_unbroken_one(name, tmp_path):
    chosen = settings(*BASE, *RUNS[name])
    whole, record = noisy(trainer(chosen, images(train=100)))
    whole.train()
    expected = ended(whole)
    steps = [epoch.steps for epoch in record.epochs]
    first, second = steps[0], steps[0] + steps[1]
    chance = random.Random(name)
    disturbances = [
        ("kill", 2),
        ("signal", chance.randint(1, first - 1)),
        ("signal in the evaluation", 1),
        ("kill", first + chance.randint(1, steps[1])),
        ("signal", first + chance.randint(1, steps[1] - 1)),
        ("signal", second),
        ("signal", second + chance.randint(1, steps[2] - 1)),
        ("kill in the evaluation", 3),
    ]
    made, run = broken_run(chosen, tmp_path, disturbances)
    assert not differences(expected, ended(made))
    assert [probe.step for probe in made.trace.probes] == [probe.step for probe in whole.trace.probes]
    assert [decision.step for decision in made.trace.decisions] == [d.step for d in whole.trace.decisions]
    if name.startswith("triaccel"):
        assert whole.trace.probes and {d.batch_after for d in whole.trace.decisions} != {16}
        assert any(d.plan_changed for d in whole.trace.decisions) == chosen.method.precision.adaptive
    # A process that was killed before its first checkpoint has told nobody that it went on.
    assert len(disturbances) - 2 <= len(run.resumed_at) <= len(disturbances)
    assert run.resumed_at == sorted(run.resumed_at)
    assert all(math.isfinite(epoch.train_seconds) and epoch.train_seconds > 0 for epoch in run.epochs)


class ProcessMeter(TensorMeter):
    """Its peak is its process's, as the allocator's is: steps that warm up, of another copy, are in it too."""

    peak: int | None = None

    def begin_window(self) -> None:
        super().begin_window()
        ProcessMeter.peak = None

    def window_peak_bytes(self, replayed_bytes: int = 0) -> int | None:
        return ProcessMeter.peak

    @contextmanager
    def recording(self):
        with super().recording():
            yield
        ProcessMeter.peak = largest(ProcessMeter.peak, self._peak_bytes)


def test_what_a_new_process_warms_up_with_is_no_reading_of_its_batch(tmp_path, monkeypatch):
    """A batch size that shrank fills less than the first one did, which a new process tries out anew."""
    monkeypatch.setattr(assembly, "open_meter", lambda chosen, card, data, module, state: ProcessMeter(module, state))
    rules = ["initial=32", "down=8", "rho_low=0.1", "rho_high=0.99"]
    chosen = settings(*BASE, "method=triaccel_batch", "memory.budget=fp32", *(f"method.batch.{rule}" for rule in rules))
    whole, _ = trainer(chosen, images(train=100))
    whole.train()
    sizes = [(d.step, d.batch_after) for d in whole.trace.decisions]
    assert sizes and {size for _, size in sizes} == {24}
    keeper = keeper_at(tmp_path)
    made, _ = trainer(chosen, images(train=100), keeper=keeper)
    disturb(made, keeper, "signal", 7)
    with pytest.raises(Interrupted):
        made.train()
    made, _ = trainer(chosen, images(train=100), keeper=keeper_at(tmp_path))
    made.train()
    assert [(d.step, d.batch_after) for d in made.trace.decisions] == sizes
    assert not differences(ended(whole), ended(made))


def test_memory_that_ran_out_before_is_remembered(tmp_path):
    """Its ceiling, its warnings, and the size that an evaluation fitted in."""
    chosen = settings(
        "epochs=3", "method=fp32", "method.batch.initial=32", "method.batch.down=8", "evaluation.batch=32"
    )
    states = []
    for at in (None, 5):
        keeper = keeper_at(tmp_path)
        made, run = trainer(chosen, images(train=100), keeper=keeper)
        count, update, evaluate = 0, made.engine.moments.update, made.engine._evaluate_batch

        def failing(*arguments):
            nonlocal count
            count += 1
            if count == 2:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            update(*arguments)  # noqa: B023

        def small(batch, labels):
            if len(labels) > 16:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            evaluate(batch, labels)  # noqa: B023

        made.engine.moments.update, made.engine._evaluate_batch = failing, small
        if at is not None:
            disturb(made, keeper, "signal", at)
            with pytest.raises(Interrupted, match="SIGTERM at epoch 2, step 5; its checkpoint is kept"):
                made.train()
            made, run = trainer(chosen, images(train=100), keeper=keeper_at(tmp_path))
        made.train()
        states.append(ended(made))
        keeper.path.unlink()
    assert run.retries == {"allocator": 2} and run.epochs[-1].batch_max == 24 and len(run.warnings) == 2
    assert not differences(*states)


def test_a_checkpoint_costs_no_more_than_its_share(tmp_path, monkeypatch):
    monkeypatch.undo()
    clock = iter([0.0, 10.0, 11.0, 20.0, 31.1]).__next__
    keeper = Keeper(tmp_path / CHECKPOINT_FILE, OWNER, 2, now=clock)
    assert not keeper.due(1), "every second epoch"
    keeper._last_took = 0.0
    assert keeper.due(2)  # at 10: the first one is free
    keeper._since, keeper._last_took = 11.0, 1.0
    assert not keeper.due(4)  # at 11
    assert not keeper.due(6)  # at 20
    assert keeper.due(8)  # at 31.1


def test_a_disk_without_room_ends_no_run(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(resumption, "save", full)
    made, run = trainer(settings("method=fp32"), keeper=Keeper(tmp_path / CHECKPOINT_FILE, OWNER, 1))
    made.train()
    assert len(run.epochs) == 2 and ["No space left" in text for text in run.warnings] == [True]


def test_only_plain_tensors_and_types_are_written(tmp_path):
    made, _ = trainer(settings(*BASE, *RUNS["triaccel, products"]), images(train=100))
    made.train()

    def kinds(value) -> set[type]:
        if isinstance(value, dict):
            return {kind for pair in value.items() for part in pair for kind in kinds(part)}
        if isinstance(value, (list, tuple)):
            return {kind for part in value for kind in kinds(part)}
        return {type(value)}

    state = made.state_dict()
    assert kinds(state) <= {torch.Tensor, int, float, bool, str, type(None)}
    save(tmp_path / "a.pt", OWNER, state)
    assert not differences(load(tmp_path / "a.pt", OWNER), state)
    whole = sum(p.numel() for p in made.network.module.parameters()) * 8
    assert (tmp_path / "a.pt").stat().st_size < 1.5 * whole + 300_000


class Pipe:
    def __init__(self):
        self.sent = []

    def send(self, message):
        self.sent.append(message)


def run_seed(folder: Path, *overrides: str) -> list:
    pipe = Pipe()
    worker.run_seed(pipe, settings("method=fp32", "epochs=2", *overrides), 0, "cell", folder)
    return pipe.sent


def notes(sent: list) -> list[str]:
    return [payload["text"] for kind, payload in sent if kind == "note"]


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A checkpoint of a run that the worker was asked to stop."""
    folder = tmp_path_factory.mktemp("interrupted")

    class Asking(Pipe):
        def send(self, message):
            super().send(message)
            if message[0] == "epoch":
                os.kill(os.getpid(), signal.SIGUSR1)

    pipe = Asking()
    handlers = [signal.getsignal(number) for number in resumption.SIGNALS]
    worker.run_seed(pipe, settings("method=fp32", "epochs=2"), 0, "cell", folder)
    assert pipe.sent[-1] == ("finished", ("interrupted", "SIGUSR1 at epoch 2, step 4; its checkpoint is kept"))
    assert [path.name for path in folder.iterdir()] == [CHECKPOINT_FILE], "and no record of half a run"
    assert [signal.getsignal(number) for number in resumption.SIGNALS] == handlers
    return folder / CHECKPOINT_FILE


def test_the_worker_goes_on_says_so_and_removes_what_it_went_on_from(interrupted, tmp_path, monkeypatch):
    (tmp_path / CHECKPOINT_FILE).write_bytes(interrupted.read_bytes())
    monkeypatch.setattr(worker, "_now", lambda: "2100-01-01T00:00:00+00:00")
    sent = run_seed(tmp_path)
    assert sent[-1] == ("finished", ("done", None))
    assert "resumed at epoch 2, step 4" in notes(sent)
    record = read_run(tmp_path / RUN_FILE)
    assert [epoch.epoch for epoch in record.epochs] == [1, 2] and record.resumed_at == [4]
    assert [payload["epoch"] for kind, payload in sent if kind == "epoch"] == [2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.json", "trace.json.gz"]
    assert len(record.warnings) == len(set(record.warnings))
    # Begun with the first process, ended with this one.
    assert record.provenance.started_at < "2100-01-01" < record.provenance.finished_at


def test_a_signal_that_was_waiting_is_one(tmp_path):
    handlers = [signal.getsignal(number) for number in resumption.SIGNALS]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        # To this thread: of a process, any other one that does not block it may take it.
        signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
        sent = run_seed(tmp_path)
        assert signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    assert sent == [("finished", ("interrupted", "SIGTERM before the first step of this process"))]
    assert [signal.getsignal(number) for number in resumption.SIGNALS] == handlers


def test_without_resume_nothing_is_read_or_written(interrupted, tmp_path, monkeypatch):
    (tmp_path / CHECKPOINT_FILE).write_bytes(interrupted.read_bytes())
    monkeypatch.setattr(Keeper, "keep", lambda *_: pytest.fail("written"))
    sent = run_seed(tmp_path, "results.resume=false")
    assert sent[-1] == ("finished", ("done", None)) and not any("resumed" in text for text in notes(sent))
    assert read_run(tmp_path / RUN_FILE).resumed_at == []


def changed(path: Path, change) -> None:
    held = torch.load(path, weights_only=True)
    change(held)
    torch.save(held, path)


def flipped(path: Path) -> None:
    """Within a tensor: between its files an archive has bytes that mean nothing."""
    with zipfile.ZipFile(path) as archive:
        largest = max(archive.infolist(), key=lambda entry: entry.file_size)
        inside = archive.read(largest)[:64]
    content = bytearray(path.read_bytes())
    content[content.index(inside) + 32] ^= 255
    path.write_bytes(content)


class Evil:
    def __reduce__(self):
        return print, ("run from a checkpoint",)


def set_at(*names):
    *outer, last, value = names

    def change(held):
        for name in outer:
            held = held[name]
        held[last] = value

    return lambda path: changed(path, change)


DAMAGE = {
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:1000]), "it is damaged"),
    "empty": (lambda path: path.write_bytes(b""), "it is damaged"),
    "flipped bits": (flipped, "it is damaged"),
    "text": (lambda path: path.write_text("weights"), "it is damaged"),
    "a pickle": (lambda path: path.write_bytes(pickle.dumps(Evil())), "it is damaged"),
    "code": (lambda path: torch.save({"state": Evil()}, path), "it is damaged"),
    "somebody's weights": (lambda path: torch.save({"conv1.weight": torch.ones(2)}, path), "it is no checkpoint"),
    "another version": (set_at("version", 0), "format version 0, not 1"),
    "another seed": (set_at("owner", "seed", 7), "another run's"),
    "other data": (set_at("owner", "data", "x"), "another run's"),
    "no engine": (lambda path: changed(path, lambda held: held["state"].pop("engine")), "it lacks engine"),
    "a shape": (set_at("state", "engine", "momenta", 0, torch.ones(3)), "its momenta.0 is not as expected"),
    "a dtype": (set_at("state", "engine", "momenta", 0, torch.ones(3).int()), "its momenta.0 is not as expected"),
    "a weight less": (lambda path: changed(path, lambda h: h["state"]["engine"]["model"].popitem()), "it lacks model"),
    "a word for a number": (set_at("state", "step", "many"), "its step is not as expected"),
    "another plan": (set_at("state", "method", "decision", "executed", ("fp8",)), "its controller is not as expected"),
    "half a record": (set_at("state", "run", "epochs", [{}]), "its run.epochs.0"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_what_is_damaged_or_foreign_is_ignored_and_said_so(interrupted, tmp_path, kind, capfd):
    path = tmp_path / CHECKPOINT_FILE
    path.write_bytes(interrupted.read_bytes())
    damage, words = DAMAGE[kind]
    damage(path)
    sent = run_seed(tmp_path, "epochs=1")
    assert sent[-1] == ("finished", ("done", None))
    (said,) = [text for text in notes(sent) if "checkpoint" in text]
    assert words in said and said.endswith("it is ignored, and the run starts from the beginning")
    assert "\n" not in said and "run from a checkpoint" not in capfd.readouterr().out
    record = read_run(tmp_path / RUN_FILE)
    assert record.resumed_at == [] and len(record.epochs) == 1 and said in record.warnings


def test_a_start_after_a_foreign_checkpoint_is_as_any_start(interrupted, tmp_path):
    results = []
    for number, kind in enumerate((None, "half a record", "a shape")):
        folder = tmp_path / str(number)
        folder.mkdir()
        if kind is not None:
            (folder / CHECKPOINT_FILE).write_bytes(interrupted.read_bytes())
            DAMAGE[kind][0](folder / CHECKPOINT_FILE)
        run_seed(folder, "epochs=1")
        results.append(read_run(folder / RUN_FILE).model_dump()["epochs"])
    assert not differences(results[0], results[1]) and not differences(results[0], results[2])


def test_a_signal_before_the_first_step_ends_at_once(tmp_path, monkeypatch):
    def slow(dataset):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)

    monkeypatch.setattr(worker, "load", slow)
    begun = time.monotonic()
    status, reason = run_seed(tmp_path)[-1][1]
    assert status == "interrupted" and "before the first step" in reason and time.monotonic() - begun < 8
    assert not list(tmp_path.iterdir())


def test_a_thread_has_no_signals():
    found = []

    def inside():
        with resumption.stoppable() as stop:
            found.append(stop)

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert isinstance(found[0], Stop) and found[0].asked is None


@pytest.mark.parametrize("number", resumption.SIGNALS, ids=lambda number: number.name)
def test_a_child_that_is_asked_to_stop_is_interrupted_and_gone_on_with(tmp_path, number):
    said, others = [], children()

    class Asking(Reporter):
        def epoch(self, payload, epochs):
            if not any("resumed" in text for text in said):
                for process in children(but=others):
                    os.kill(process, number)

        def line(self, text):
            said.append(text)

    chosen = settings(f"results.root={tmp_path}", "seeds=[0]", "epochs=400", "method=fp32")
    (outcome,) = runner.run_cells([chosen], Asking())
    assert outcome.status == "interrupted" and number.name in outcome.reason, outcome
    (path,) = tmp_path.rglob(CHECKPOINT_FILE)
    assert not list(tmp_path.rglob(RUN_FILE))
    content = torch.load(path, weights_only=True)
    assert content["state"]["step"] < 1600

    class Ending(Asking):
        def epoch(self, payload, epochs):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner.run_cells([chosen], Ending())
    assert any(text.startswith("resumed at epoch ") for text in said)
    later = torch.load(path, weights_only=True)
    assert later["state"]["step"] > content["state"]["step"], "it is written before the child ends"
    assert not children(but=others)


def test_a_signal_to_all_and_another_one_leave_time_for_the_checkpoint(tmp_path):
    """As Slurm's --signal and its end, or `timeout`, which asks the command and then its group."""
    with endless_run(tmp_path) as process:
        os.killpg(process.pid, signal.SIGUSR1)
        os.kill(process.pid, signal.SIGTERM)
        time.sleep(0.2)
        os.killpg(process.pid, signal.SIGTERM)
        _, said = process.communicate(timeout=60)
        assert process.returncode == 130 and "Traceback" not in said
        assert nothing_left_of(process.pid)
    (path,) = tmp_path.rglob("*checkpoint*")
    assert path.name == CHECKPOINT_FILE and not list(tmp_path.rglob(RUN_FILE))
    state = load(path, Owner(**torch.load(path, weights_only=True)["owner"]))
    assert state["so_far"]["begun"], "of the moment it was asked, and not of the epoch's end before"


@pytest.mark.skipif(sys.platform != "linux", reason="kills by /proc")
def test_killed_at_random_moments_a_sweep_ends_as_undisturbed(tmp_path):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
    import kill_test

    counts = kill_test.run(5, "triaccel", random.Random(1), tmp_path)
    assert sum(counts[victim] for victim in kill_test.VICTIMS) == 5 and counts["resumed"] > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["fp32", "amp", "triaccel, fisher, schedule", "triaccel_plus"])
def test_on_a_card_it_goes_on_with_captured_steps_and_the_same_losses(name, tmp_path):
    """The rate is small: gradients of a library differ in the last bit from run to run, and training blows that up."""
    card = ["device=cuda", "memory.meter=vram", "dataset.image_size=32", "model.input_size=32", "optimizer.lr=1e-4"]
    chosen = settings(*BASE, *RUNS[name], *card, "epochs=4")
    data = images(train=128, evaluation=32, side=32)
    whole, expected = trainer(chosen, data)
    whole.train()
    for at in (9, 20):
        keeper = keeper_at(tmp_path)
        made, run = trainer(chosen, data, keeper=keeper)
        disturb(made, keeper, "signal", at)
        with pytest.raises(Interrupted):
            made.train()
    made, run = trainer(chosen, data, keeper=keeper_at(tmp_path))
    made.train()
    assert run.graphs and run.eager_reason is None and len(run.resumed_at) == 2
    assert run.budget_bytes == expected.budget_bytes
    assert sum(epoch.samples_seen for epoch in run.epochs) == 4 * 128
    for ours, theirs in zip(run.epochs, expected.epochs, strict=True):
        assert ours.train_loss == pytest.approx(theirs.train_loss, rel=1e-2)
        assert ours.evaluation_loss == pytest.approx(theirs.evaluation_loss, rel=1e-2)
