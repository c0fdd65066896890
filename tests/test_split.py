"""Where a step's time goes: sampled after training, undone without a trace, and unknown where it cannot be known."""

from __future__ import annotations

import time

import pytest
import torch
from measured import epoch, run
from tiny import images, settings, trainer

from triaccel_bench import graphs, snapshot, split
from triaccel_bench.progress import split_line
from triaccel_bench.records import RunRecord, SplitRecord
from triaccel_bench.split import verdict
from triaccel_bench.stats import PARTS, split_seconds


def alike(before, after) -> bool:
    """Bit for bit; moments are NaN as long as nobody reads them."""
    pairs = zip(before, after, strict=True)
    return all(torch.equal(*(torch.nan_to_num(x, nan=-1e30) if x.is_floating_point() else x for x in p)) for p in pairs)


MOVING = ["epochs=2", "method=triaccel_precision_batch", "method.control.interval=2"]


def state_of(made) -> list[torch.Tensor]:
    """All that later steps would depend on."""
    module, engine = made.network.module, made.engine
    held = [*module.parameters(), *module.buffers(), *engine.sgd.momenta, *engine.scalars.state, *engine.moments.state]
    copies = [copy for layer in made.network.layers.values() for copy in getattr(layer, "copies", {}).values()]
    return [tensor.detach().clone() for tensor in [*held, *copies, engine._rates, *snapshot.generators(held[0].device)]]


def test_a_run_ends_alike_with_and_without(monkeypatch):
    ends = []
    for sampled in (False, True):
        with monkeypatch.context() as patch:
            if not sampled:
                patch.setattr(split, "sample", lambda *given: None)
            made, record = trainer(settings(*MOVING))
            made.train()
        seen = [(e.train_loss, e.evaluation_loss, e.steps_skipped, e.captures) for e in record.epochs]
        ends.append([*state_of(made), torch.tensor(record.samples_applied), torch.tensor(seen)])
        assert (record.split is not None) == sampled
    assert alike(*ends)


@pytest.mark.parametrize("more", [
    ["method.update.in_backward=true"],
    ["method.precision.cpu_executes=requested", "method.dtype=bf16", "method.update.momentum_dtype=bf16"],
    ["model=efficientnet_b0"], ["method=amp", "method.dtype=bf16"],
])  # fmt: skip
def test_steps_leave_no_trace_in_the_middle_of_a_run(more):
    made, _ = trainer(settings(*MOVING, *more))
    order = made.data.begin_epoch(0, 1)
    for _ in range(2):
        made.engine.step(order.take(16))
    before = state_of(made)
    told = split.sample(made.engine, made.data.order[:16], made.method.decision.executed)
    after = state_of(made)
    assert told.steps == split.STEPS and alike(before, after)


def test_without_undoing_a_run_would_end_otherwise(monkeypatch):
    made, _ = trainer(settings(*MOVING))
    made.engine.step(made.data.order[:16])
    before = state_of(made)
    monkeypatch.setattr(made.engine, "load_state_dict", lambda *state: None)
    split.sample(made.engine, made.data.order[:16], made.method.decision.executed)
    assert not alike(before, state_of(made))


def slow(function, seconds):
    def slower(*given):
        time.sleep(seconds)
        return function(*given)

    return slower


@pytest.mark.parametrize("where, phase", [("_source", "data"), ("update", "update")])
def test_time_is_booked_where_it_is_spent(where, phase):
    made, record = trainer(settings("epochs=1"))
    setattr(made.engine, where, slow(getattr(made.engine, where), 0.08))
    found = split.sample(made.engine, made.data.order[:16], made.method.decision.executed)
    assert found.phase_seconds[phase] >= 0.08 > max(v for k, v in found.phase_seconds.items() if k != phase)
    assert found.clock == "host" and found.launch_seconds is None and found.steps == split.STEPS
    assert found.verdict == ("input-bound" if phase == "data" else "compute-bound")
    assert made.engine.on_phase is None


def test_an_update_within_the_backward_pass_is_unknown_and_not_zero():
    made, record = trainer(settings("epochs=1", "method.update.in_backward=true"))
    made.train()
    assert record.split.phase_seconds["update"] is None and record.split.phase_seconds["backward"] > 0
    assert "within the backward pass" in record.split.reason and record.split.verdict is not None


def test_a_fault_ends_no_run():
    made, record = trainer(settings("epochs=1"))

    def fails(*inputs):
        raise torch.OutOfMemoryError("none left\nat all")

    made.engine.eager_step = fails
    made.train()
    assert record.split.reason == "OutOfMemoryError: none left" and record.split.verdict is None
    assert set(record.split.phase_seconds.values()) == {None} and record.split.steps == 0
    assert record.layers and record.epochs


def test_a_slow_machine_takes_fewer_steps(monkeypatch):
    monkeypatch.setattr(split, "MOST_SECONDS", 0.0)
    made, _ = trainer(settings("epochs=1"))
    assert split.sample(made.engine, made.data.order[:16], made.method.decision.executed).steps == 1


@pytest.mark.parametrize("data, launch, replays, expected", [
    (0.1, None, False, "compute-bound"), (0.4, None, False, "input-bound"), (0.3, None, False, "compute-bound"),
    (0.1, 0.5, False, "launch-bound"), (0.1, 0.5, True, "compute-bound"), (0.1, 0.3, False, "compute-bound"),
    (0.4, 9.0, False, "launch-bound"), (0.4, 9.0, True, "input-bound"), (None, 0.5, False, None),
])  # fmt: skip
def test_the_verdict_follows_its_rule(data, launch, replays, expected):
    assert verdict({"data": data, "forward": 0.1, "backward": 0.2, "update": None}, launch, replays) == expected


def sampled(**changes) -> SplitRecord:
    values = dict(
        clock="device", batch=96, layers_executed={"fp32": 21}, steps=5, launch_seconds=0.001, verdict="compute-bound",
        phase_seconds={"data": 0.001, "forward": 0.003, "backward": 0.005, "update": 0.001},
    )  # fmt: skip
    return SplitRecord(**values | changes)


TIMES = dict(train_seconds=13.0, probe_seconds=1.5, capture_seconds=1.0, controller_seconds=0.5)


def test_an_epochs_seconds_are_split_whole():
    found = split_seconds(run(split=sampled()), epoch(**TIMES))
    assert tuple(found) == PARTS and sum(found.values()) == pytest.approx(13.0)
    assert found == pytest.approx({
        "data": 1.0, "forward": 3.0, "backward": 5.0, "update": 1.0, "controller": 0.5, "probe": 1.5, "capture": 1.0,
    })  # fmt: skip


@pytest.mark.parametrize("changes", [
    dict(batch_max=128), dict(batch_min=64), dict(plan_changes=1), dict(layers_executed={"bf16": 21}),
])  # fmt: skip
def test_an_epoch_of_other_steps_than_were_sampled_is_unknown(changes):
    found = split_seconds(run(split=sampled()), epoch(**TIMES | changes))
    assert [found[part] for part in PARTS] == [None] * 4 + [0.5, 1.5, 1.0]


def test_what_was_not_recorded_is_unknown():
    found = split_seconds(run(), epoch(**TIMES | {"controller_seconds": None}))
    assert [found[part] for part in PARTS] == [None] * 5 + [1.5, 1.0]
    apart = sampled(phase_seconds={"data": 0.001, "forward": 0.003, "backward": 0.006, "update": None})
    found = split_seconds(run(split=apart), epoch(**TIMES))
    assert found["update"] is None and found["backward"] == pytest.approx(6.0)


def test_the_controller_is_clocked_as_it_decides():
    made, record = trainer(settings(*MOVING))
    made.method.decide = slow(made.method.decide, 0.03)
    made.train()
    decided = [sum(d.epoch == e.epoch for d in made.trace.decisions) for e in record.epochs]
    assert all(e.train_seconds > e.controller_seconds >= 0.03 * n > 0 for e, n in zip(record.epochs, decided))
    still, other = trainer(settings("epochs=1", "method.control.interval=1000"))
    still.train()
    assert other.epochs[0].controller_seconds == 0.0


def test_a_line_tells_the_last_epoch():
    recorded = run(split=sampled(), epochs=[epoch(1), epoch(2, **TIMES)])
    assert split_line("a/b/c/seed 0", recorded) == [
        "a/b/c/seed 0: 13.00 s of epoch 2: data 8 %, forward 23 %, backward 38 %, update 8 %, controller 4 %, probe 12 %, "
        "capture 8 % (sampled by the device's clock); compute-bound"
    ]
    assert split_line("a", run()) == []
    (line,) = split_line("a", run(split=sampled(verdict=None, reason="no"), epochs=[epoch(batch_max=128)]))
    assert "data n/a" in line and line.endswith("verdict unknown: no")


def test_records_from_before_still_load():
    whole = run(split=sampled(), epochs=[epoch(1, **TIMES)])
    assert RunRecord.model_validate_json(whole.model_dump_json()) == whole
    older = whole.model_dump(exclude={"split": True, "epochs": {"__all__": {"controller_seconds"}}})
    read = RunRecord.model_validate(older)
    assert read.split is None and read.epochs[0].controller_seconds is None
    with pytest.raises(ValueError, match="phase_seconds"):
        RunRecord.model_validate(older | {"split": sampled().model_dump() | {"phase_seconds": {"forwards": 1}}})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["resnet18", "efficientnet_b0"])
@pytest.mark.parametrize("more", [[], ["engine.graphs=false"], ["kernels=torch"], ["method.update.in_backward=true"]])
def test_on_a_card_phases_are_the_devices_and_nothing_is_left_behind(name, more, monkeypatch):
    small = [
        "device=cuda", "memory.meter=vram", "dataset.image_size=32", "model.input_size=32", "epochs=1", "method=amp",
        "method.dtype=bf16", "method.batch.initial=96", "method.batch.max=96", "dataset.train_size=192",
        f"model={name}", *more,
    ]  # fmt: skip
    with torch.cuda.stream(graphs.stream(torch.device("cuda", 0))):
        made, record = trainer(settings(*small), images(train=192, evaluation=32, side=32))
        found = []
        monkeypatch.setattr(split, "sample", lambda *given: found.append(given))
        made.train()
        monkeypatch.undo()
        before = state_of(made)
        told = split.sample(*found[0])
        after = state_of(made)
    assert alike(before, after)
    assert told.reason is None or "within the backward pass" in told.reason
    assert told.clock == "device" and told.steps > 0 and told.launch_seconds > 0
    known = {phase: seconds for phase, seconds in told.phase_seconds.items() if seconds is not None}
    assert min(known.values()) > 0 and known["backward"] > known["data"]
    assert ("update" in known) != ("method.update.in_backward=true" in more)
    assert told.verdict == verdict(told.phase_seconds, told.launch_seconds, "engine.graphs=false" not in more)
