"""A recorded schedule, followed: the same weights to the last bit, and the refusals of what is no schedule for a run."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from recorded import memory_runs_out_at, read, train
from test_resumption import BASE, RUNS, broken_run, differences, ended, noisy
from test_resumption import nothing_by_the_clock as nothing_by_the_clock
from tiny import images, settings, trainer

from triaccel_bench import checkpointing
from triaccel_bench.identity import identifying_settings, identity
from triaccel_bench.loop import TriAccel
from triaccel_bench.recording import Change, read_recording
from triaccel_bench.records import RUN_FILE, write_run
from triaccel_bench.settings import SettingsError

REFERENCE = Path(__file__).resolve().parent.parent / "results" / "reference" / "h200"
OWN = ["epochs=3", "evaluation.batch=16"]
"""What of ``BASE`` is no setting of the method."""
MOVES = {
    "plan": lambda d: d.plan_changed,
    "rates": lambda d: min(d.rate_scale) < 1,
    "batch": lambda d: d.batch_after != d.batch_before,
}
CASES = {
    "triaccel": (RUNS["triaccel"], MOVES, ()),
    "in FP32": (["method=triaccel", "method.curvature.every=4"], MOVES, ()),
    "square root rule": ([*RUNS["triaccel"], "method.batch.lr_rule=sqrt"], MOVES, ()),
    "triaccel_plus": (RUNS["triaccel_plus"], ("batch", "rates"), ()),
    "memory ran out": (
        [*RUNS["triaccel"], "method.batch.initial=32", "method.batch.down=8", "memory.budget=0.0138"],
        MOVES,
        (1, 2, 9),
    ),
}


def agreeing(folder: Path) -> list[str]:
    """Values of the recorded method for what the settings of all tests say of any method."""
    method = json.loads((folder if folder.is_file() else folder / RUN_FILE).read_text())["settings"]["method"]
    keys = "control.interval", "curvature.every", "batch.initial", "batch.down", "batch.max"
    return [f"method.{key}={method[key.split('.')[0]][key.split('.')[1]]}" for key in keys]


def following(folder: Path, *overrides: str):
    agreed = agreeing(folder) if folder.exists() else ()
    return settings(*OWN, "method=replay", f"replay.run={folder}", *agreed, *overrides)


@pytest.fixture(scope="module")
def adaptive(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adaptive")
    return folder, train(settings(*BASE, *RUNS["triaccel"]), folder)[0]


def weights(made) -> list[torch.Tensor]:
    return [*made.network.module.parameters(), *made.network.module.buffers()]


def same(left, right) -> bool:
    return all(torch.equal(a, b) for a, b in zip(weights(left), weights(right), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_the_weights_are_the_recorded_runs_bit_for_bit(tmp_path, case):
    overrides, moves, without_memory = CASES[case]
    prepare = memory_runs_out_at(*without_memory) if without_memory else lambda made: None
    original, run = train(settings(*BASE, *overrides), tmp_path / "run", prepare=prepare)
    for name in moves:
        assert any(map(MOVES[name], original.trace.decisions)), f"a run whose {name} never moves shows nothing"
    assert len(original.trace.back_offs) == len(without_memory)

    made, followed = train(following(tmp_path / "run"), tmp_path / "followed")
    assert same(original, made)
    assert all(torch.equal(a, b) for a, b in zip(original.engine.sgd.momenta, made.engine.sgd.momenta, strict=True))
    for theirs, ours in zip(run.epochs, followed.epochs, strict=True):
        for name in ("train_loss", "evaluation_loss", "steps", "samples_seen", "learning_rate_last", "layers_executed"):
            assert getattr(theirs, name) == getattr(ours, name), name
        assert (theirs.plan_changes, theirs.rate_scale_min) == (ours.plan_changes, ours.rate_scale_min)
    assert [(layer.requested, layer.rate_scale) for layer in run.layers] == [
        (layer.requested, layer.rate_scale) for layer in followed.layers
    ]


def test_nothing_is_read_or_decided(adaptive):
    made, run = trainer(following(adaptive[0]), images(train=100))
    asked = []
    made._probe = lambda: asked.append("probe") or 0.0
    made.train()
    assert not asked and not made.trace.probes and made.trace.start is None
    assert not made.engine._track and made.engine.read().variance is None
    assert run.budget_bytes is None and run.tau_low is None
    assert all(d.variance is d.lambda_max is d.free_bytes is d.budget_bytes is None for d in made.trace.decisions)
    assert run.epochs[-1].probe_seconds == 0 and run.epochs[-1].layers_probed == 0


def test_layers_shuffled_get_one_anothers_schedule_and_keep_it(adaptive):
    folder, original = adaptive
    plain, shuffled = read_recording(str(folder)), read_recording(str(folder)).with_layers_shuffled(3)
    moved = {}
    for here, there in zip(plain.changes, shuffled.changes, strict=True):
        assert (here.after, here.batch) == (there.after, there.batch)
        for name in ("requested", "rates", "promoted"):
            moved.setdefault(name, []).append((getattr(here, name), getattr(there, name)))
    ours = list(zip(*(here for pairs in moved.values() for here, _ in pairs)))
    theirs = list(zip(*(there for pairs in moved.values() for _, there in pairs)))
    assert ours != theirs and sorted(ours) == sorted(theirs), "whole histories change hands"

    made, run = trainer(following(folder, "replay.shuffle=layers", "replay.seed=3"), images(train=100))
    made.train()
    last = shuffled.changes[-1]
    assert tuple(made.method.decision.rates) == last.rates and made.method.decision.requested == last.requested
    assert [epoch.samples_seen for epoch in run.epochs] == [100] * 3
    assert not same(original, made)


def test_a_shuffle_follows_its_seed_and_leaves_no_layer_order_as_it_was(adaptive):
    plain = read_recording(str(adaptive[0]))
    assert plain.with_layers_shuffled(1) == plain.with_layers_shuffled(1) != plain.with_layers_shuffled(2)
    two = replace(plain, layers=("a", "b"), changes=(Change(0, ("fp16", "fp32"), (False, True), (1.0, 0.5), 16),))
    for seed in range(8):
        assert two.with_layers_shuffled(seed).changes[0] == Change(0, ("fp32", "fp16"), (True, False), (0.5, 1.0), 16)


def test_a_run_that_follows_goes_on_after_a_kill(adaptive, tmp_path):
    chosen = following(adaptive[0], "replay.shuffle=layers")
    whole, _ = noisy(trainer(chosen, images(train=100)))
    whole.train()
    made, run = broken_run(chosen, tmp_path, [("signal", 1), ("signal", 6), ("kill", 9), ("signal", whole.step)])
    assert len(run.resumed_at) >= 3
    assert not differences(ended(whole), ended(made))


def test_memory_that_runs_out_ends_it(adaptive):
    made, _ = trainer(following(adaptive[0]), images(train=100))
    memory_runs_out_at(4)(made)
    with pytest.raises(torch.OutOfMemoryError):
        made.train()
    assert made.step == 3 and not made.trace.back_offs


def changed(folder: Path, to: Path, change) -> Path:
    run, trace = read(folder)
    change(run, trace)
    write_run(to, run, trace)
    return to


def forget_when(run, trace):
    for decision in trace.decisions:
        decision.in_force_after = None


REFUSED = {
    "a run that is done, got one that is failed": lambda run, trace: setattr(run, "status", "failed"),
    "a run with control decisions, got a trace without one": lambda run, trace: trace.decisions.clear(),
    "does not tell when decisions came into force": forget_when,
    "got a trace of an earlier version": lambda run, trace: setattr(trace, "start", None),
    "expected a run that decided, got one that followed the schedule of /first": lambda run, trace: run.settings[
        "replay"
    ].update(run="/first"),
    "epochs=3 and replay.run=": lambda run, trace: setattr(run, "epochs_planned", 4),
}


@pytest.mark.parametrize("said", REFUSED)
def test_a_run_without_a_schedule_for_this_one_is_refused(adaptive, tmp_path, said):
    folder = changed(adaptive[0], tmp_path / "run", REFUSED[said])
    with pytest.raises(SettingsError) as caught:
        following(folder)
    assert said in str(caught.value) and f"replay.run={folder}" in str(caught.value)


@pytest.mark.parametrize(("overrides", "said"), [
    (["method=replay"], "method=replay and replay.run=null: expected the folder of a recorded run"),
    (["method=replay", "replay.run=/nowhere"], "replay.run=/nowhere: expected the folder of a run, or its run.json, got no"),
    (["replay.shuffle=layers"], "replay.shuffle=layers and replay.run=null: expected a run to follow"),
    (["method=triaccel", "replay.run=RUN"], "method.name=triaccel and replay.run=RUN: expected method=replay"),
    (["method=replay", "replay.run=RUN", "method.batch.up=16"], "method.batch.up=16: expected 8 as in the run of replay"),
    (["method=replay", "replay.run=RUN", "+method.dtype=fp16"], "method.dtype=fp16: expected bf16 as in the run of replay"),
    (["method=replay", "replay.run=RUN", "optimizer.lr=0.07"], "optimizer.lr=0.07 and replay.run=RUN: expected that run's"),
    (["method=replay", "replay.run=RUN", "replay.schedule='000000000000'"], "replay.schedule=000000000000 and replay.run=RUN"),
    (["method=replay", "replay.run=RUN", "replay.shuffle=steps"], "replay.shuffle=steps: expected 'layers'"),
])  # fmt: skip
def test_settings_that_do_not_fit_are_refused(adaptive, overrides, said):
    def placed(text: str) -> str:
        return text.replace("RUN", str(adaptive[0]))

    with pytest.raises(SettingsError) as caught:
        settings(*OWN, *agreeing(adaptive[0]), *map(placed, overrides))
    assert placed(said) in str(caught.value)


def test_another_model_and_another_amount_of_data_are_refused(adaptive):
    with pytest.raises(
        SettingsError, match="expected a run over as many training samples as here, 64, got one over 100"
    ):
        trainer(following(adaptive[0]), images(train=64))
    chosen = following(adaptive[0], "model=resnet18_cifar", "model.input_size=32")
    with pytest.raises(SettingsError, match="expected a run of this model, got one of another"):
        trainer(chosen, images(train=100))


def with_checkpointing(folder: Path, to: Path, value) -> Path:
    return changed(folder, to, lambda run, trace: run.settings["model"].update(checkpointing=value))


def test_as_much_is_run_again_as_in_the_recorded_run(tmp_path):
    asked = [*BASE, *RUNS["triaccel"], "model.checkpointing=2"]
    original, _ = train(settings(*asked), tmp_path / "run")
    made, followed = train(following(tmp_path / "run"), tmp_path / "followed")
    assert followed.settings["model"]["checkpointing"] == 2

    def run_again(network) -> list[bool]:
        parts = network.module.modules()
        return [part.checkpointing for part in parts if isinstance(part, checkpointing.Checkpointed)]

    assert run_again(made.network) == run_again(original.network) and run_again(made.network).count(True) == 2
    assert same(original, made)


@pytest.mark.parametrize("recorded, given, refused", [
    (2, "false", False), (2, "0", False), (2, "2", False), (True, "true", False), (False, "0", False),
    (2, "true", True), (2, "null", True), (True, "1", True), (1, "true", True), (False, "1", True),
])  # fmt: skip
def test_what_is_run_again_is_the_recorded_runs_or_refused(adaptive, tmp_path, recorded, given, refused):
    folder, told = with_checkpointing(adaptive[0], tmp_path / "run", recorded), json.dumps(recorded)
    if not refused:
        assert following(folder, f"model.checkpointing={given}").model.checkpointing is recorded
        return
    with pytest.raises(SettingsError) as caught:
        following(folder, f"model.checkpointing={given}")
    assert str(caught.value) == (
        f"model.checkpointing={given}: expected {told} as in the run of replay.run={folder}, got {given}; leave it out"
    )


def test_a_record_without_that_setting_ran_nothing_again(adaptive, tmp_path):
    folder = changed(adaptive[0], tmp_path / "run", lambda run, trace: run.settings["model"].pop("checkpointing"))
    assert following(folder).model.checkpointing is False


def test_a_recording_that_changes_meanwhile_is_refused(adaptive, tmp_path):
    shutil.copytree(adaptive[0], tmp_path / "run")
    chosen = following(tmp_path / "run")
    changed(adaptive[0], tmp_path / "run", lambda run, trace: trace.decisions.pop(2))
    with pytest.raises(SettingsError, match="it changed since this command began"):
        trainer(chosen, images(train=100))


def test_an_earlier_versions_recording_is_refused():
    folder = next((REFERENCE / "further/first-version").rglob(RUN_FILE)).parent
    with pytest.raises(SettingsError, match="earlier version"):
        following(folder)


def test_a_loop_of_ones_own_follows_no_recording(adaptive):
    model = torch.nn.Sequential(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(SettingsError, match="method=replay: expected a method that decides"):
        TriAccel(model, optimizer, method="replay", overrides=[f"replay.run={adaptive[0]}"])


def test_a_cell_follows_the_schedule_and_not_where_it_lies(adaptive, tmp_path):
    def cell(folder: Path, *overrides: str) -> str:
        return identity(following(folder, *overrides), "device")

    first = cell(adaptive[0])
    shutil.copytree(adaptive[0], tmp_path / "copy")
    assert cell(tmp_path / "copy") == cell(adaptive[0] / RUN_FILE) == cell(adaptive[0], "replay.seed=5") == first
    shuffled = cell(adaptive[0], "replay.shuffle=layers")
    assert len({first, shuffled, cell(adaptive[0], "replay.shuffle=layers", "replay.seed=5")}) == 3
    other = [
        lambda run, trace: trace.decisions[-1].rate_scale.__setitem__(0, 0.125),
        lambda run, trace: run.settings["method"]["batch"].update(lr_rule="none"),
        lambda run, trace: run.settings["method"]["update"].update(momentum_dtype="bf16"),
        lambda run, trace: [setattr(d, "in_force_after", d.step) for d in trace.decisions],
    ]
    cells = {cell(changed(adaptive[0], tmp_path / str(n), change)) for n, change in enumerate(other)}
    assert len(cells - {first}) == len(other)


def test_a_cell_that_follows_nothing_is_called_as_before():
    dumped = settings("method=triaccel").model_dump(mode="json")
    assert "replay" in dumped and "replay" not in identifying_settings(dumped)
    assert json.dumps(identifying_settings({k: v for k, v in dumped.items() if k != "replay"})) == json.dumps(
        identifying_settings(dumped)
    )


def test_rates_stay_exact_on_their_way(adaptive):
    """A schedule is what was in force, not something near it."""
    folder, original = adaptive
    recorded = read_recording(str(folder)).changes[-1].rates
    assert recorded == original.method.decision.rates and any(math.frexp(rate)[0] != 0.5 for rate in recorded)
