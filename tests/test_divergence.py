"""Steps that are not finite: what they leave alone, wherever they come from, and runs that are made of them."""

import math
import warnings

import pytest
import torch
from test_engine import batch
from tiny import engine, settings, trainer

from triaccel_bench import models, worker
from triaccel_bench.control import Signals, decide, start
from triaccel_bench.outcomes import Outcome
from triaccel_bench.records import CHECKPOINT_FILE, RUN_FILE, read_run
from triaccel_bench.results import Results
from triaccel_bench.schedule import make_schedule
from triaccel_bench.tables import table1

EXECUTED = "method.precision.cpu_executes=requested"
METHODS = {
    "fp32": ["method=fp32"],
    "amp": ["method=amp", EXECUTED],
    "amp, update in backward": ["method=amp", EXECUTED, "method.update.in_backward=true"],
    "triaccel": ["method=triaccel", EXECUTED, "method.batch.elastic=false"],
    "triaccel_plus": ["method=triaccel_plus", EXECUTED, "method.batch.elastic=false"],
}


def overflow(made, steps: int) -> None:
    """Every gradient has an inf in the first steps."""

    def poisoned(gradient):
        return gradient.index_fill(0, torch.zeros(1, dtype=torch.long), math.inf) if made.step < steps else gradient

    for leaf in made.engine._leaves:
        leaf.register_hook(poisoned)


@pytest.mark.parametrize("name", METHODS)
def test_a_run_says_how_many_updates_were_dropped_and_its_rate_has_not_seen_them(name):
    """Two of four batches, in every kind of update: the schedule stands where two applied batches take it."""
    chosen = settings(*METHODS[name], "epochs=1", "method.batch.initial=16", "optimizer.lr=0.01")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made, run = trainer(chosen)
        overflow(made, 2)
        made.train()
    assert (run.steps, run.steps_skipped, run.samples_applied) == (4, 2, 32)
    (epoch,) = run.epochs
    assert (epoch.steps, epoch.steps_skipped) == (4, 2)
    expected = make_schedule(0.01, 1, chosen.optimizer.warmup_epochs, 64)(torch.tensor(16 + 8.0, dtype=torch.float64))
    assert epoch.learning_rate_last == pytest.approx(expected.item())
    untouched = make_schedule(0.01, 1, chosen.optimizer.warmup_epochs, 64)(torch.tensor(56.0, dtype=torch.float64))
    assert untouched.item() < 0.5 * expected.item(), "which all four would have brought it to"


@pytest.fixture
def broken_weights(tmp_path):
    network = models.build(settings().model, 10)
    state = network.module.state_dict()
    state["conv1.weight"][0, 0, 0, 0] = math.nan
    torch.save(state, tmp_path / "weights.pt")
    return tmp_path / "weights.pt"


LIMIT = "method.loss_scale.max_consecutive_skips=6"
DEAD = {
    "a rate that is too high": ["method=fp32", "optimizer.lr=1e30", "epochs=30", LIMIT],
    "weights that are no numbers": ["method=fp32", "epochs=30", LIMIT, "model.weights={weights}"],
    "a scale that never comes down": ["method=amp", EXECUTED, "epochs=30", LIMIT, "method.loss_scale.initial=1e38"],
    "tri-accel": ["method=triaccel", EXECUTED, "epochs=30", LIMIT, "model.weights={weights}"],
    "too short for the limit": ["method=fp32", "optimizer.lr=1e30", "epochs=4"],
}


@pytest.mark.parametrize("kind", DEAD)
def test_a_dead_run_is_diverged_and_no_figure(kind, tmp_path, broken_weights):
    overrides = [part.format(weights=broken_weights) for part in DEAD[kind]]
    folder, sent = tmp_path / "runs" / "cell", []

    class Pipe:
        send = sent.append

    for seed, chosen in ((0, settings(*overrides)), (1, settings("method=fp32", "epochs=1"))):
        worker.run_seed(Pipe, chosen, seed, "cell", folder / f"seed-{seed}")
    dead, sound = (read_run(folder / f"seed-{seed}" / RUN_FILE) for seed in (0, 1))
    assert (dead.status, sound.status) == ("diverged", "done")
    assert "lower optimizer.lr or check the data" in dead.reason
    assert dead.traceback[0].startswith("Traceback") and "trainer.py" in "".join(dead.traceback)
    assert not (folder / "seed-0" / CHECKPOINT_FILE).exists(), "nothing goes on from it"
    if kind != "too short for the limit":
        assert len(dead.epochs) < 30 and "max_consecutive_skips=6" in dead.reason
    # A sound seed of the same cell.
    sound = sound.model_copy(update={"settings": dead.settings, "method": dead.method})
    table = table1(Results((dead, sound)))
    assert "seed 0 diverged" in "\n".join(table.footers) and table.frame["n"].tolist() == [1]
    assert table.frame["accuracy_percent_mean"].tolist() == [sound.epochs[-1].evaluation_accuracy_percent]
    assert Outcome("label", 0, "diverged", dead.reason, None).failed


@pytest.mark.parametrize("in_backward", ["false", "true"])
def test_plans_do_not_depend_on_the_loss_scale_and_an_overflow_moves_none(in_backward):
    """Scales 1 and 65536 (2^32 between raw variances); then a step that overflows."""
    found = []
    for scale in (1.0, 65536.0):
        made = engine(f"method.loss_scale.initial={scale}", f"method.update.in_backward={in_backward}")
        # Scaling without FP16 rounding, which would differ between scales by itself.
        made._scaled = True
        made.scalars.set_scaled(True)
        rules = settings("method=triaccel", "method.precision.dwell=1").method
        requested, (_, state) = [], start(len(made.network.layers), rules, lambda level: level)
        for step in range(20):
            made.step(*batch(seed=step))
            if step % 5 == 4:
                variance = tuple(made.read().variance)
                seen = Signals(1 + step // 5, variance, None, None, None)
                decision, state = decide(seen, state, rules, lambda level: level)
                requested.append(decision.requested)
        before = made.moments.ema.clone()
        for leaf in made._leaves:
            leaf.register_hook(lambda gradient: gradient * math.inf)
        made.step(*batch(seed=20))
        assert torch.equal(before, made.moments.ema) and torch.isfinite(before).all()
        assert made.read().steps_skipped == 1
        found.append((requested, before))
    (plans, ema), (plans_scaled, ema_scaled) = found
    torch.testing.assert_close(ema, ema_scaled, rtol=1e-3, atol=0)
    assert plans == plans_scaled and len(set(plans)) > 1, "and there were changes that a scale could have moved"
