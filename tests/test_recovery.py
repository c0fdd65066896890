"""Memory that runs out in a step, an evaluation or a probe: all is as before, and every sample is used once."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from tiny import images, settings, trainer

from triaccel_bench import control
from triaccel_bench.engine import Engine
from triaccel_bench.methods import Method

BASE = ["method.batch.min=8", "method.batch.initial=32", "method.batch.down=8", "epochs=2", "method=fp32"]
ERROR = "CUDA out of memory. Tried to allocate 2.00 GiB."


def sizes_of(made) -> list[int]:
    """Follows the sizes of the batches that were trained."""
    seen, step = [], made.engine.step

    def watching(indices):
        outcome = step(indices)
        seen.append(len(indices))
        return outcome

    made.engine.step = watching
    return seen


def everything(made) -> dict[str, torch.Tensor]:
    engine = made.engine
    return {
        **{f"model {name}": value for name, value in made.network.module.state_dict().items()},
        **{f"momentum {index}": value for index, value in enumerate(engine.sgd.momenta)},
        **{name: value for name, value in vars(engine.scalars).items() if isinstance(value, torch.Tensor)},
        "ema": engine.moments.ema,
        "updates": engine.moments.updates,
    }


def failing(call, at: int, error=None):
    """``call``, whose ``at``-th time raises half-way through."""
    count = 0

    def wrapped(*arguments, **options):
        nonlocal count
        count += 1
        result = call(*arguments, **options)
        if count == at:
            raise error or torch.OutOfMemoryError(ERROR)
        return result

    return wrapped


def disturbed(where: str, at: int, *overrides: str, error=None):
    """A run that runs out of memory once, and the sizes of the batches it trained."""
    made, run = trainer(settings(*BASE, *overrides), images(train=100))
    sizes = sizes_of(made)
    engine = made.engine
    if where == "forward":
        layer = list(made.network.layers.values())[4]
        layer.forward = failing(layer.forward, at, error)
    elif where == "backward":
        first = made.network.module.conv1.weight
        hooked = failing(lambda gradient: None, at, error)
        first.register_hook(hooked)
    elif where == "statistics":
        engine.moments.update = failing(engine.moments.update, at, error)
    elif where == "update":
        engine.scalars.advance = failing(engine.scalars.advance, at, error)
    return made, run, sizes


def undisturbed_at(sizes: list[int], *overrides: str):
    """A run of the same batches without any fault."""
    made, run = trainer(settings(*BASE, *overrides), images(train=100))
    left = list(sizes)
    take = type(made.data.begin_epoch(0, 1)).take
    rules = made.settings.method.batch

    def taken(sampler, size):
        wanted = left.pop(0)
        if wanted != made.method.decision.batch and wanted in (8, 16, 24):
            before = made.method.decision
            while made.method.decision.batch > wanted:
                made.method.state = control.back_off(made.method.state, rules, made.method.decision.batch)
                made.method.decision = made.method.decision.__class__(
                    **{**vars(made.method.decision), "batch": made.method.state.batch}
                )
            made._put_in_force(before, made.method.decision)
        return take(sampler, wanted)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(made.data.begin_epoch(0, 1)), "take", taken)
        made.train()
    assert not left
    return made, run


@pytest.mark.parametrize("at", [1, 3, 6])
@pytest.mark.parametrize("where", ["forward", "backward", "statistics", "update"])
def test_a_step_that_runs_out_is_undone_and_its_samples_go_on_in_smaller_batches(where, at):
    made, run, sizes = disturbed(where, at)
    made.train()
    assert run.retries == {"allocator": 1}
    assert any("memory ran out in step" in text and ERROR in text for text in run.warnings)
    assert [epoch.samples_seen for epoch in run.epochs] == [100, 100]
    whole = at - 1 - (where == "forward" and at > 3)  # an evaluation is a forward pass, too
    assert sizes[:whole] == [32, 32, 36, 32, 32, 36][:whole] and sizes[whole] == 24
    assert run.epochs[-1].batch_min == 24
    plain, _ = undisturbed_at(sizes)
    for name, value in everything(plain).items():
        torch.testing.assert_close(value, everything(made)[name], rtol=0, atol=0, equal_nan=True, msg=name)


def test_dropout_draws_again_what_it_drew():
    results = []
    for fault in (False, True):
        made, _ = trainer(settings(*BASE), images(train=64))
        made.network.module.fc = torch.nn.Sequential(torch.nn.Dropout(0.5), made.network.module.fc)
        if fault:
            made.engine.moments.update = failing(made.engine.moments.update, 1)
        torch.manual_seed(7)
        sampler = made.data.begin_epoch(0, 1)
        if fault:
            made.method.back_off = lambda tried: True  # the same size again
        made._train_step(sampler)
        results.append(everything(made))
    for name, value in results[0].items():
        torch.testing.assert_close(value, results[1][name], rtol=0, atol=0, equal_nan=True, msg=name)


def test_what_the_failed_step_held_is_gone_when_it_is_tried_again():
    made, run, _ = disturbed("none", 0)
    kept, alive = [], []
    step = made.engine._whole_step

    def holding(indices):
        alive.append([reference() is not None for reference in kept])
        activation = torch.ones(1000)
        kept.append(weakref.ref(activation))
        if len(kept) == 1:
            raise torch.OutOfMemoryError(ERROR)
        step(indices)
        del activation

    made.engine._whole_step = holding
    gc.collect()
    made._train_step(made.data.begin_epoch(0, 1))
    assert alive[1] == [False] and made.method.decision.batch == 24


def test_at_the_floor_the_run_ends_and_says_so():
    made, run, _ = disturbed("none", 0)
    tried = []

    def never(indices):
        tried.append(len(indices))
        raise torch.OutOfMemoryError(ERROR)

    made.engine._whole_step = never
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        made.train()
    assert tried == [32, 24, 16, 8] and run.retries == {"allocator": 4}
    assert made.method.decision.batch == 8


@pytest.mark.parametrize(
    "error, retries",
    [
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), {"cublas": 1}),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None),
        (RuntimeError("CUDA error: device-side assert triggered"), None),
    ],
    ids=["cublas", "shapes", "assert"],
)
def test_only_memory_is_tried_again(error, retries):
    made, run, _ = disturbed("forward", 2, error=error)
    if retries is None:
        with pytest.raises(RuntimeError, match=str(error).split(" (")[0][:20]):
            made.train()
        assert run.retries == {}
    else:
        made.train()
        assert run.retries == retries


def evaluations_of_at_most(fit: int, monkeypatch) -> list[int]:
    """Let no larger batch fit into an evaluation; returns the sizes tried from then on."""
    sizes, evaluate = [], Engine._evaluate_batch

    def wrapped(self, batch, labels):
        sizes.append(len(labels))
        if len(labels) > fit:
            raise torch.OutOfMemoryError(ERROR)
        evaluate(self, batch, labels)

    monkeypatch.setattr(Engine, "_evaluate_batch", wrapped)
    return sizes


def test_an_evaluation_goes_on_in_smaller_batches(monkeypatch):
    made, run = trainer(settings(*BASE, "epochs=1", "evaluation.batch=32"), images(train=64, evaluation=32))
    sizes = evaluations_of_at_most(8, monkeypatch)
    made.train()
    assert sizes == [32, 16, 8, 8, 8, 8] and run.retries == {"allocator": 2}
    assert run.epochs[0].evaluation_samples == 32
    expected, plain = trainer(settings(*BASE, "epochs=1", "evaluation.batch=8"), images(train=64, evaluation=32))
    monkeypatch.undo()
    expected.train()
    assert run.epochs[0].evaluation_loss == pytest.approx(plain.epochs[0].evaluation_loss, rel=1e-6)


def test_a_probe_that_does_not_fit_is_left_out(monkeypatch):
    chosen = settings("method=triaccel_curvature", "method.curvature.every=2", "epochs=1")
    made, run = trainer(chosen)
    monkeypatch.setattr(Method, "probe", failing(lambda *arguments: None, 1))
    made.train()
    assert run.retries == {"allocator": 1}
    assert any("a curvature probe, which is left out" in text for text in run.warnings)


def test_memory_that_ran_out_is_a_ceiling_for_growth():
    rules = settings("method=triaccel_batch").method
    _, state = control.start(1, rules, lambda level: level)
    state = control.back_off(
        control.replace(state, batch=96), rules.batch.model_copy(update={"min": 32, "down": 32}), 96
    )
    assert (state.batch, state.ceiling) == (64, 64)
    signals = control.Signals(0, None, None, 10, 1000)
    later, reason = control.next_batch(signals, state, rules.batch.model_copy(update={"max": 512}))
    assert later.batch == 64 and "batch.max=64" in reason
    assert control.back_off(control.replace(state, batch=8), rules.batch.model_copy(update={"min": 8}), 8) is None


def test_a_tail_that_does_not_fit_gets_smaller():
    rules = settings("method=fp32").method.batch.model_copy(update={"min": 8, "down": 8})
    _, state = control.start(1, settings("method=fp32").method, lambda level: level)
    assert control.back_off(control.replace(state, batch=32), rules, 16).batch == 8
    assert control.back_off(control.replace(state, batch=32), rules, 36).batch == 24
    assert control.back_off(control.replace(state, batch=32), rules, 8) is None


def test_what_did_not_fit_is_no_reading_of_the_next_size():
    made, run, _ = disturbed("forward", 2, "method=triaccel_batch", "method.batch.max=32")
    sampler = made.data.begin_epoch(0, 1)
    made._train_step(sampler)
    made.peaks.window = 10**12
    made._train_step(sampler)
    assert made.method.decision.batch == 24 and (made.peaks.window or 0) < 10**9


def test_a_size_that_an_evaluation_fitted_in_is_kept(monkeypatch):
    made, run = trainer(settings(*BASE, "evaluation.batch=32"), images(train=64, evaluation=32))
    sizes = evaluations_of_at_most(16, monkeypatch)
    made.train()
    assert sizes == [32, 16, 16, 16, 16] and run.retries == {"allocator": 1}


def test_a_failed_probe_is_paid_for(monkeypatch):
    made, run = trainer(settings("method=triaccel_curvature", "method.curvature.every=1", "epochs=1"))
    calls = []

    def never(*arguments):
        calls.append(1)
        raise torch.OutOfMemoryError(ERROR)

    monkeypatch.setattr(made.method._estimator, "probe", never)
    monkeypatch.setattr(Method, "_allowance", lambda self, training_seconds: -self._probe_seconds)
    made.train()
    assert len(calls) == 1 == run.retries["allocator"]


def test_a_warm_up_that_does_not_fit_is_left_out(monkeypatch):
    real = Engine.step

    def at_most_eight(self, indices):
        if len(indices) > 8:
            raise torch.OutOfMemoryError(ERROR)
        return real(self, indices)

    monkeypatch.setattr(Engine, "step", at_most_eight)
    made, run = trainer(settings(*BASE), images(train=64))
    made.train()
    assert run.retries == {"allocator": 3} and run.epochs[-1].batch_max == 8


UNSUPPORTED = RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED")


def test_what_is_called_unsupported_once_is_taken_for_a_shortage():
    made, run, sizes = disturbed("forward", 2, error=UNSUPPORTED)
    made.train()
    assert run.retries == {"cudnn_unsupported": 1} and sizes[:2] == [32, 24]


def test_what_is_unsupported_at_the_smaller_size_too_is_raised(monkeypatch):
    made, run = trainer(settings(*BASE), images(train=64))

    def never(indices):
        raise UNSUPPORTED

    monkeypatch.setattr(made.engine, "step", never)
    with pytest.raises(RuntimeError, match="CUDNN_STATUS_NOT_SUPPORTED"):
        made.train()
    assert run.retries == {"cudnn_unsupported": 1}


def test_a_doubtful_probe_says_nothing_of_a_step(monkeypatch):
    made, run = trainer(settings(*BASE, "method=triaccel_curvature", "method.curvature.every=1"), images(train=64))
    monkeypatch.setattr(made.method._estimator, "probe", failing(made.method._estimator.probe, 1, UNSUPPORTED))
    made.engine.moments.update = failing(made.engine.moments.update, 2, UNSUPPORTED)
    made.train()
    assert run.retries == {"cudnn_unsupported": 2}


def test_what_is_unsupported_at_the_floor_is_no_shortage(monkeypatch):
    made, run = trainer(settings(*BASE, "method.batch.initial=8"), images(train=64))
    monkeypatch.setattr(made.engine, "step", failing(made.engine.step, 1, UNSUPPORTED))
    with pytest.raises(RuntimeError, match="CUDNN_STATUS_NOT_SUPPORTED") as caught:
        made.train()
    assert not isinstance(caught.value, torch.OutOfMemoryError)


@pytest.mark.parametrize("pooled", [True, False])
def test_a_change_of_plan_that_does_not_fit_is_tried_again_where_graphs_held_memory(pooled):
    made, run = trainer(
        settings(
            *BASE, "method=triaccel_precision", "method.control.interval=1", "method.precision.dwell=1",
            "method.precision.cpu_executes=requested", "method.update.momentum_dtype=bf16",
        ),
        images(train=64),
    )  # fmt: skip
    made.engine.sgd.set_momentum_dtypes = failing(made.engine.sgd.set_momentum_dtypes, 1)
    if pooled:
        recover, held = made.engine.recover, [True]
        made.engine.recover = lambda: recover() or bool(held and held.pop())
        made.train()
        assert run.retries == {"allocator": 1} and sum(epoch.plan_changes for epoch in run.epochs) > 0
        assert any("memory ran out in a change of plan" in text for text in run.warnings)
    else:
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            made.train()
        assert run.retries == {"allocator": 1}


def test_where_graphs_held_memory_the_same_is_tried_once_more():
    made, run, sizes = disturbed("forward", 2)
    recover, held = made.engine.recover, [True]
    made.engine.recover = lambda: recover() or bool(held and held.pop())
    made.train()
    assert run.retries == {"allocator": 1} and set(sizes) == {32, 36}
