"""The loop: what moves, when, and what stays the same whatever the controller does."""

import math
from collections import Counter

import pytest
import torch
from tiny import images, settings, trainer

from triaccel_bench import control, data, fisher, models, precision, snapshot
from triaccel_bench.configuration import compose
from triaccel_bench.data import ElasticSampler
from triaccel_bench.divergence import Diverged
from triaccel_bench.engine import Engine
from triaccel_bench.methods import Method
from triaccel_bench.schedule import Schedule


@pytest.fixture
def every_layer_each_probe(monkeypatch):
    """Probe without a price limit: how many layers fit in a share of time depends on the machine."""
    monkeypatch.setattr(Method, "_allowance", lambda self, training_seconds: math.inf)


def weights(made) -> list[torch.Tensor]:
    return [p.detach().clone() for p in made.network.module.parameters()]


def test_a_tri_accel_run_moves_everything_and_records_it(every_layer_each_probe):
    made, run = trainer(settings("epochs=3", "method.precision.cpu_executes=requested"))
    trace = made.train()
    assert [record.epoch for record in run.epochs] == [1, 2, 3]
    for record in run.epochs:
        assert record.samples_seen == 64 and record.evaluation_samples == 32
        assert record.batch_min <= record.batch_mean <= record.batch_max
        assert sum(record.layers_executed.values()) == sum(record.layers_requested.values()) == 10
        assert record.memory_peak_bytes > 0 and record.train_seconds > record.probe_seconds
    assert {decision.batch_after for decision in trace.decisions} != {16}
    assert any(decision.plan_changed for decision in trace.decisions)
    assert all(layer.eigenvalues and math.isfinite(layer.eigenvalues[0]) for layer in run.layers)
    assert min(layer.rate_scale for layer in run.layers) < 1
    assert (run.meter, run.budget_source.split(":")[0]) == ("tensors", "fp32")
    assert run.budget_bytes > 0 and run.tau_low is not None
    assert trace.layers == [layer.name for layer in run.layers]


PRODUCTS = [
    "estimator=fisher",
    "estimator=hessian product=jacobian",
    "estimator=hessian product=exact",
    "estimator=hessian product=difference",
]


@pytest.mark.parametrize("estimator", PRODUCTS)
def test_the_first_probe_of_a_run_is_not_its_process_s_first(estimator, every_layer_each_probe, monkeypatch):
    """What is loaded and captured once comes before the run, which is the same without it."""
    parts = [f"method.curvature.{part}" for part in estimator.split()]
    chosen = settings("epochs=2", "method.curvature.iterations=2", "method.curvature.k=2", *parts)
    made, run = trainer(chosen)
    estimator, at = made.method._estimator, []
    assert run.first_use_seconds > 0 and not made.method.curvature and made.method.may_probe(0.0)
    real = estimator.probe
    monkeypatch.setattr(estimator, "probe", lambda *given: at.append(made.step) or real(*given))
    ready = snapshot.generators(made.hardware.device)
    trace = made.train()
    assert at == [found.step for found in trace.probes] and min(at) > 0

    prepared = []
    monkeypatch.setattr(Method, "prepare_probe", lambda self, *given: prepared.append(given) or 0)
    cold, _ = trainer(chosen)
    drawn = snapshot.generators(cold.hardware.device)
    assert all(torch.equal(*pair) for pair in zip(ready, drawn, strict=True))
    without = cold.train()
    assert len(prepared) == 1 and len(prepared[0][0]) == chosen.method.curvature.batch
    assert all(torch.equal(*pair) for pair in zip(weights(made), weights(cold), strict=True))
    assert [found.eigenvalues for found in trace.probes] == [found.eigenvalues for found in without.probes]


def test_a_probe_that_finds_no_memory_before_the_run_changes_none_of_the_run(every_layer_each_probe, monkeypatch):
    chosen = settings("epochs=1", "method.curvature.estimator=fisher")
    expected, _ = trainer(chosen)
    wanted = expected.train()
    real, failed = fisher.leading, []

    def once(*given):
        if not failed:
            failed.append(1)
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return real(*given)

    monkeypatch.setattr(fisher, "leading", once)
    made, run = trainer(chosen)
    assert failed and not run.retries and not run.warnings
    assert [found.eigenvalues for found in made.train().probes] == [found.eigenvalues for found in wanted.probes]
    assert all(torch.equal(*pair) for pair in zip(weights(made), weights(expected), strict=True))


def test_what_a_probe_needs_of_the_pool_is_known_before_the_first_one(monkeypatch):
    """At the first control step already, which may come long before it: the batch is not to grow into it."""
    monkeypatch.setattr(Method, "prepare_probe", lambda self, *given: 123456)
    made, _ = trainer(settings("epochs=1", "method.curvature.every=1000"))
    lent = []
    monkeypatch.setattr(made.anatomy, "headroom_bytes", lambda peak, cap, needed: lent.append(needed))
    made.train()
    assert set(lent) == {123456}


@pytest.mark.parametrize("method", ["triaccel_precision", "triaccel_batch", "fp32"])
def test_without_curvature_nothing_is_probed_before_a_run(method, monkeypatch):
    monkeypatch.setattr(Method, "prepare_probe", lambda *given: pytest.fail("probed"))
    trainer(settings(f"method={method}"))


@pytest.mark.parametrize("method", ["fp32", "amp"])
def test_static_methods_never_move(method):
    made, run = trainer(settings(f"method={method}"))
    trace = made.train()
    assert {d.batch_after for d in trace.decisions} == {16}
    assert not any(d.plan_changed for d in trace.decisions)
    assert {rate for d in trace.decisions for rate in d.rate_scale} == {1.0}
    assert not trace.probes and run.budget_bytes is None and run.tau_low is None
    assert run.epochs[-1].train_loss < run.epochs[0].train_loss


def test_same_seed_same_weights_other_seed_other_weights():
    results = []
    for seed in (0, 0, 1):
        made, _ = trainer(settings("method=fp32"), seed=seed)
        made.train()
        results.append(weights(made))
    assert all(torch.equal(a, b) for a, b in zip(results[0], results[1], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(results[0], results[2], strict=True))


def test_probes_without_consequence_leave_the_run_bit_identical(every_layer_each_probe):
    """Curvature read but alpha = 0 and no promotion, against no curvature at all."""
    finals = []
    for switch in ("true", "false"):
        made, run = trainer(
            settings(
                "method=triaccel_batch",
                "epochs=3",
                f"method.curvature.rates={switch}",
                "method.curvature.alpha=0",
                "method.curvature.every=3",
            )  # fmt: skip
        )
        trace = made.train()
        assert bool(trace.probes) == (switch == "true")
        finals.append((weights(made), [b.clone() for b in made.network.module.buffers()]))
    for ours, theirs in zip(finals[0], finals[1], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_dead_run_ends_as_diverged():
    chosen = settings("method=fp32", "optimizer.lr=1e30", "epochs=30", "method.loss_scale.max_consecutive_skips=6")
    made, run = trainer(chosen)
    with pytest.raises(Diverged, match="max_consecutive_skips=6"):
        made.train()
    assert run.steps_skipped >= 6
    assert len(run.epochs) < 30


def test_batch_size_changes_take_effect_one_batch_after_their_reading(monkeypatch):
    """The device runs a step while the host decides."""
    taken = []
    take = ElasticSampler.take

    def recorded(self, size):
        indices = take(self, size)
        taken.append((size, indices.tolist()))
        return indices

    monkeypatch.setattr(data.ElasticSampler, "take", recorded)
    made, run = trainer(
        settings("method=triaccel_batch", "epochs=1", "method.control.interval=1", "method.batch.down=4")
    )
    trace = made.train()
    asked = [size for size, _ in taken]
    assert asked[2:] == [decision.batch_after for decision in trace.decisions][: len(asked) - 2]
    assert len(set(asked)) > 1
    assert sorted(index for _, indices in taken for index in indices) == list(range(64))
    assert run.epochs[0].steps == len(taken)


def test_the_rate_follows_the_batch_by_the_rule():
    chosen = settings("method=triaccel_batch", "method.batch.lr_rule=linear", "epochs=8")
    made, run = trainer(chosen)
    made.train()
    last = run.epochs[-1]
    assert last.batch_last != 16
    schedule = Schedule(chosen.optimizer.lr, 2 * 64, 8 * 64)
    middle = 8 * 64 - (64 % last.batch_last or last.batch_last) / 2
    expected = schedule(torch.tensor(middle, dtype=torch.float64)).item() * last.batch_last / 16
    assert last.learning_rate_last == pytest.approx(expected, rel=1e-4)


def test_schedule_position_is_that_of_applied_samples():
    made, run = trainer(settings("method=fp32"))
    made.train()
    assert run.samples_applied == 2 * 64 and run.steps_skipped == 0


@pytest.mark.parametrize("name", ["resnet18", "efficientnet_b0"])
def test_a_leftover_of_one_joins_its_neighbour_where_batch_norm_needs_two(name):
    """97 samples in batches of 96: at 32 pixels these models end in 1x1 maps, where one sample has no variance."""
    sampler = ElasticSampler(97, seed=0, epoch=1, device=torch.device("cpu"))
    sizes = []
    while sampler.remaining:
        sizes.append(len(sampler.take(96)))
    assert sizes == [97]
    torch.manual_seed(0)
    chosen = compose([f"model={name}", "method=fp32", "device=cpu"])
    network = models.build(chosen.model, 10)
    precision.prepare(network)
    engine = Engine(
        network, chosen.method, chosen.optimizer, Schedule(0.1, 0, 97), "torch", ["fp32"] * len(network.layers)
    )
    engine.step(torch.randn(2, 3, 32, 32), torch.tensor([0, 1]))
    assert engine.read().steps_skipped == 0


def test_every_sample_once_an_epoch_under_random_batch_sizes(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    seen: Counter[int] = Counter()
    take = ElasticSampler.take

    def random_take(self, size):
        indices = take(self, int(torch.randint(1, 40, (1,), generator=generator)))
        seen.update(indices.tolist())
        return indices

    monkeypatch.setattr(data.ElasticSampler, "take", random_take)
    made, run = trainer(settings("method=fp32", "epochs=10"), images(train=97))
    made.train()
    assert set(seen.values()) == {10} and len(seen) == 97
    assert [record.samples_seen for record in run.epochs] == [97] * 10


def test_one_host_read_back_per_control_step(monkeypatch):
    """Between control steps, probes and epoch ends the engine is never read."""
    reads = []
    read = Engine.start_reading
    monkeypatch.setattr(Engine, "start_reading", lambda self: reads.append(1) or read(self))
    made, run = trainer(settings("method=triaccel_precision", "epochs=2"))
    made.train()
    controls = run.steps // 2
    assert len(reads) == 1 + controls + 2 + 1  # start, control steps, epoch ends, final record


def test_the_recorded_signals_replay_to_the_recorded_decisions(every_layer_each_probe):
    """Nothing but what the trace holds entered a decision."""
    made, _ = trainer(settings("epochs=3", "method.precision.cpu_executes=requested"))
    trace, rules = made.train(), made.settings.method
    _, state = control.start(len(trace.layers), rules, lambda level: level)
    assert len({decision.batch_after for decision in trace.decisions}) > 1
    for recorded in trace.decisions:
        variance, lambda_max = (None if v is None else tuple(v) for v in (recorded.variance, recorded.lambda_max))
        signals = control.Signals(
            recorded.epoch, variance, lambda_max, recorded.memory_bytes, recorded.budget_bytes, recorded.free_bytes
        )
        again, state = control.decide(signals, state, rules, lambda level: level)
        assert (again.batch, again.batch_reason) == (recorded.batch_after, recorded.batch_reason)
        assert again.executed == tuple(recorded.executed) and again.promoted == tuple(recorded.promoted)
        assert again.rates == tuple(recorded.rate_scale) and again.plan_changed == recorded.plan_changed


def test_probe_peak_is_kept_apart_from_the_training_window():
    made, run = trainer(settings("epochs=1", "method.curvature.every=2"))
    made.meter = _Scripted(iter(range(1, 1000)))
    trace = made.train()
    assert run.epochs[0].probe_peak_bytes in {probe.peak_bytes for probe in trace.probes}
    assert not {probe.peak_bytes for probe in trace.probes} & {d.memory_bytes for d in trace.decisions}


class _Scripted:
    """A meter whose successive windows read 1, 2, 3, ..."""

    name, reason = "tensors", None

    def __init__(self, values):
        self._values = values

    def begin_window(self): ...

    def window_peak_bytes(self, replayed_bytes=0):
        return next(self._values)

    def recording(self):
        from contextlib import nullcontext

        return nullcontext()

    def readings(self):
        from triaccel_bench.meters import Readings

        return Readings()

    def headroom_bytes(self, peak_bytes):
        return None


def test_a_run_whose_last_epoch_is_dead_is_diverged_too():
    """Too short for the limit on skips in a row, yet no step of the last epoch was applied."""
    made, run = trainer(settings("method=fp32", "optimizer.lr=1e30", "epochs=4"))
    with pytest.raises(Diverged, match="last epoch"):
        made.train()
    assert len(run.epochs) == 4


def test_batch_bounds_are_the_controllers_and_not_the_remainders():
    made, run = trainer(settings("method=fp32", "epochs=1"), images(train=60))
    made.train()
    (record,) = run.epochs
    assert (record.batch_min, record.batch_max, record.steps) == (16, 16, 4)
    assert record.batch_mean == 15.0


def test_growth_is_held_against_what_is_free_beyond_the_peak(monkeypatch):
    made, _ = trainer(settings("method=triaccel_batch", "epochs=1", "memory.budget=1.0"))
    monkeypatch.setattr(made.meter, "headroom_bytes", lambda peak_bytes: 0)
    trace = made.train()
    assert {decision.batch_after for decision in trace.decisions} == {16}
    assert all("0 bytes free" in decision.batch_reason for decision in trace.decisions)


def test_a_leftover_that_joins_its_batch_is_no_reading_of_b_and_counts_in_the_epoch():
    """67 samples in batches of 16: the last one has 19."""
    made, run = trainer(
        settings(
            "method=triaccel_batch", "method.batch.initial=16", "method.batch.min=16", "method.batch.max=16",
            "method.control.interval=2", "memory.budget=10", "epochs=2",
        ),
        images(train=67),
    )  # fmt: skip
    readings = []
    decide = made.method.decide

    def watching(epoch, variance, memory_bytes, *rest):
        readings.append(memory_bytes)
        return decide(epoch, variance, memory_bytes, *rest)

    made.method.decide = watching
    made.train()
    # A window with no other step in it has none.
    assert len(set(readings) - {None}) == 1 and readings[0] is not None
    assert all(epoch.memory_peak_bytes > readings[0] for epoch in run.epochs)


def test_the_budget_is_fp32s_own_where_a_method_rounds_products_of_fp32_layers(monkeypatch):
    allowed = []
    step = Engine.step
    monkeypatch.setattr(Engine, "step", lambda *given: allowed.append(torch.backends.cudnn.allow_tf32) or step(*given))
    more = "memory.budget=fp32", "memory.calibration_steps=3", "method.tf32=true"
    with precision.tf32_allowed(False):  # what a run allows is its process's
        made, _ = trainer(settings("method=triaccel_batch", *more))
        assert allowed[:3] == [False] * 3 and all(allowed[3:]) and len(allowed) > 3
        del allowed[:]
        made.train()
    assert allowed and all(allowed)
