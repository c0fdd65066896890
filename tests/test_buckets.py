"""The update in buckets within the backward pass is the one after it, bit for bit; what overflows is skipped apart."""

import gc
import random

import pytest
import torch
from places import (  # noqa: F401
    assert_passes_in_the_interpreter,
    gpu,
    needs_card,
    on_every_backend,
    once,
    poisoned_memory,
)
from tiny import engine, images, settings, trainer
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from triaccel_bench import models, precision
from triaccel_bench.assembly import image_sizes
from triaccel_bench.buckets import BUCKETS, Buckets, deal
from triaccel_bench.configuration import compose
from triaccel_bench.convolution import WeightGradients, _Forked
from triaccel_bench.engine import Engine
from triaccel_bench.kernels.backend import INTERPRETED
from triaccel_bench.kernels.bookkeeping import StepScalars
from triaccel_bench.kernels.moments import GradientMoments
from triaccel_bench.kernels.update import FusedSGD
from triaccel_bench.schedule import Schedule

ERROR = "CUDA out of memory. Tried to allocate 2.00 GiB."


def batch(size: int = 16, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 3, 8, 8, generator=generator), torch.randint(0, 10, (size,), generator=generator)


def everything(made: Engine) -> list[torch.Tensor]:
    scalars = [value for value in vars(made.scalars).values() if isinstance(value, torch.Tensor)]
    copies = [copy.detach() for copy in made._copies.of_parameters if copy is not None]
    kept = [made.moments.variance, made.moments.ema, made.moments.updates]
    state = [*made.network.module.state_dict().values(), *made.sgd.momenta, *scalars, *copies, *kept]
    return [tensor.clone() for tensor in state]


def bits_equal(left, right) -> bool:
    # NaN is not equal to itself.
    return all(torch.equal(a.nan_to_num(7.25), b.nan_to_num(7.25)) for a, b in zip(left, right, strict=True))


@once
def test_buckets_are_about_equal_and_hold_everything_once():
    generator = random.Random(0)
    for _ in range(200):
        sizes = [generator.choice([0, 1, 7, 100, 10_000]) for _ in range(generator.randint(1, 40))] + [1]
        order = generator.sample(range(len(sizes)), len(sizes))
        dealt = deal(sizes, order)
        assert sorted(index for members in dealt for index in members) == list(range(len(sizes)))
        assert all(members == sorted(members) for members in dealt)
        filled = [sum(sizes[index] for index in members) for members in dealt]
        assert min(filled) > 0 and max(filled) <= max(-(-sum(sizes) // BUCKETS), max(sizes))
        assert len(dealt) < 2 * BUCKETS
        place = {index: at for at, members in enumerate(dealt) for index in members}
        assert [place[index] for index in order] == sorted(place[index] for index in order)


PLANS = {
    "fp32": [["fp32"] * 10],
    "amp": [["fp16"] * 10],
    "triaccel": [["bf16"] * 10, ["fp16", "fp32"] * 5, ["fp32"] * 10, ["fp16", "bf16"] * 5],
}


@once
@pytest.mark.parametrize("more", [(), ("model.checkpointing=true",), ("optimizer.momentum=0",)], ids=str)
@pytest.mark.parametrize("method", PLANS)
def test_training_is_the_same_bit_for_bit(method, more):
    results = []
    for chosen in ("false", "true"):
        switches = f"method={method}", f"method.update.in_backward={chosen}", "method.loss_scale.initial=64", *more
        made = engine(*switches, "method.loss_scale.growth_interval=3", schedule=Schedule(0.01, 40, 400))
        followed = []
        for step in range(12):
            if step % 3 == 0:
                made.set_plan(PLANS[method][step // 3 % len(PLANS[method])])
            if step % 2 == 0:
                made.set_rates([1 / (1 + 0.1 * layer + 0.01 * step) for layer in range(10)], 1 + step / 16)
            made.step(*batch((16, 16, 24, 7)[step % 4], seed=step))
            followed.append((made.read(), everything(made)))
            assert all(leaf.grad is None for leaf in made._leaves)
        results.append(followed)
    for (plain, left), (bucketed, right) in zip(*results, strict=True):
        assert plain == bucketed and plain.steps_skipped == 0
        assert bits_equal(left, right)


@once
@pytest.mark.parametrize("checkpointing", ["false", "true"])
def test_efficientnet_too_with_its_draws(checkpointing):
    results = []
    for chosen in ("false", "true"):
        made = engine(
            "model=efficientnet_b0", f"method.update.in_backward={chosen}", f"model.checkpointing={checkpointing}"
        )
        for step in range(2):
            torch.manual_seed(step)
            made.step(*batch(4, seed=step))
        results.append([*everything(made), torch.get_rng_state()])
    assert bits_equal(*results)


@once
def test_a_run_is_the_same():
    results = []
    for chosen in ("false", "true"):
        made, run = trainer(settings("method=triaccel", "epochs=3", f"method.update.in_backward={chosen}"), images())
        made.train()
        results.append((everything(made.engine), [epoch.evaluation_loss for epoch in run.epochs], run.steps))
    assert bits_equal(results[0][0], results[1][0]) and results[0][1:] == results[1][1:]


@once
def test_gradients_never_live_all_at_once():
    made = engine("method.update.in_backward=true")
    total, most, seen = sum(p.numel() for p in made._parameters), 0, set()

    def arrived(leaf):
        nonlocal most
        seen.add(id(leaf))
        most = max(most, sum(p.grad.numel() for p in made._parameters if p.grad is not None))

    for parameter in made._parameters:
        parameter.register_post_accumulate_grad_hook(arrived)
    made.step(*batch())
    largest = max(p.numel() for p in made._parameters)
    assert len(seen) == len(made._parameters) and largest <= most < 0.6 * total


def overflowing(made: Engine, name: str):
    """Every gradient of that layer's weight has an inf from now on; returns the handle."""
    weight = dict(made.network.layers)[name].weight
    leaf = next(leaf for leaf, p in zip(made._leaves, made._parameters, strict=True) if p is weight)
    return leaf.register_hook(lambda gradient: gradient.index_fill(0, torch.zeros(1, dtype=torch.long), float("inf")))


@once
@pytest.mark.parametrize("levels", [["fp16"] * 10, ["fp32"] * 10], ids=["scaled", "plain"])
def test_a_bucket_that_overflows_is_skipped_by_itself_and_the_step_counts_as_skipped(levels):
    made = engine("method.update.in_backward=true", plan=levels, schedule=Schedule(0.01, 0, 1000))
    made.step(*batch(seed=0))
    names = list(made.network.layers)
    scale = made.read().loss_scale
    weights, momenta = [p.detach().clone() for p in made._parameters], [m.clone() for m in made.sgd.momenta]
    ema = made.moments.ema.clone()
    handle = overflowing(made, "fc")
    made.step(*batch(seed=1))
    members = next(part.members for part in made._buckets._buckets if names.index("fc") in part.members)
    assert 0 < len(members) < len(made._parameters)
    for index, parameter in enumerate(made._parameters):
        assert torch.equal(weights[index], parameter) == (index in members)
        assert torch.equal(momenta[index], made.sgd.momenta[index]) == (index in members)
    for layer in range(10):
        assert torch.equal(ema[layer], made.moments.ema[layer]) == (layer in members)
    reading = made.read()
    assert (reading.steps_skipped, reading.consecutive_skips, reading.samples_applied) == (1, 1, 16)
    assert reading.loss_scale == (scale / 2 if levels[0] == "fp16" else scale)
    assert reading.variance is not None and made.moments.updates.item() == 1
    handle.remove()
    made.step(*batch(seed=1))
    reading = made.read()
    assert (reading.steps_skipped, reading.consecutive_skips, reading.samples_applied) == (1, 0, 32)


@once
def test_statistics_are_there_once_every_bucket_has_some():
    made = engine("method.update.in_backward=true")
    handle = overflowing(made, "conv1")
    made.step(*batch())
    assert made.read().variance is None
    handle.remove()
    made.step(*batch())
    assert all(value > 0 for value in made.read().variance)


def parts(place, seed: int = 0):
    """Two layers' weights and three others, one of them without an element."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (33, 7), (7, 5), (7,), (1,), (0,)
    return [(torch.randn(shape, generator=generator) * 0.3).to(place[1]).requires_grad_() for shape in shapes]


def loss_of(leaves, x, reuse: bool = False):
    wide, narrow, bias, factor, empty = leaves
    hidden = functional.relu(x @ wide + bias) * factor + empty.sum()
    if reuse:
        hidden = functional.relu(hidden @ narrow) @ narrow.T + bias
    return (hidden @ narrow).square().mean()


RULE = [0, 1, 0, -1, -1]


@on_every_backend
@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 4, 1, 3]], ids=str)
@pytest.mark.parametrize("reuse", [False, True])
def test_any_order_and_weights_that_are_read_again(place, order, reuse):
    backend, device = place
    one, rates = torch.ones((), device=device), torch.tensor([0.5, 2.0], device=device)
    ours, theirs = parts(place), parts(place)
    buckets = Buckets(ours, RULE, 2, order, backend, 0.9, True, 0.9, 0.01)
    moments = GradientMoments([p.numel() for p in theirs], 2, device, backend, 0.9)
    sgd = FusedSGD(theirs, RULE, backend, 0.9, 0.01)
    for step in range(3):
        x = torch.randn(9, 33, generator=torch.Generator().manual_seed(step)).to(device)
        lr, scale = one * 0.1 / (1 + step), one * 0.25
        with buckets.updating(ours, lambda leaves: None, lr, rates, scale, one):
            loss_of(ours, x, reuse).backward()
        loss_of(theirs, x, reuse).backward()
        gradients = sgd.gather([leaf.grad for leaf in theirs])
        moments.update(gradients, scale, one)
        sgd.step(gradients, lr, rates, scale, moments.nonfinite)
        for leaf in theirs:
            leaf.grad = None
        found = [*ours, *buckets.momenta, buckets.variance, buckets.ema, buckets.updates]
        assert bits_equal(found, [*theirs, *sgd.momenta, moments.variance, moments.ema, moments.updates])
        assert buckets.nonfinite.tolist() == [0.0] * len(buckets._buckets)


@on_every_backend
def test_a_rehearsal_changes_no_weight(place):
    one = torch.ones((), device=place[1])
    leaves = parts(place)
    buckets = Buckets(leaves, RULE, 2, [4, 3, 2, 1, 0], place[0], 0.9, True, 0.9, 0.01)
    before = [leaf.detach().clone() for leaf in leaves]
    x = torch.ones(3, 33, device=place[1])
    with (
        buckets.rehearsal(),
        buckets.updating(leaves, lambda leaves: None, one, torch.ones_like(before[0][0]), one, one),
    ):
        loss_of(leaves, x).backward()
    assert bits_equal(before, leaves) and not buckets.applied
    assert all(momentum.count_nonzero() == 0 for momentum in buckets.momenta)
    assert all(leaf.grad is None for leaf in leaves)


@once
def test_momentum_in_16_bit():
    place = "torch", "cpu"
    one, rates = torch.ones(()), torch.ones(2)
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        leaves = parts(place)
        buckets = Buckets(leaves, RULE, 2, [4, 3, 2, 1, 0], "torch", 0.9, True, 0.9, 0.01)
        buckets.set_momentum_dtypes([dtype, dtype, torch.float32, torch.float32, torch.float32])
        for step in range(5):
            x = torch.randn(9, 33, generator=torch.Generator().manual_seed(step))
            with buckets.updating(leaves, lambda leaves: None, one * 0.01, rates, one, one):
                loss_of(leaves, x).backward()
        assert [momentum.dtype for momentum in buckets.momenta[:3]] == [dtype, dtype, torch.float32]
        results.append([leaf.detach() for leaf in leaves])
    torch.testing.assert_close(*results, rtol=1e-2, atol=1e-3)


@once
def test_what_does_not_get_one_gradient_a_pass_is_refused():
    one, rates = torch.ones(()), torch.ones(2)
    leaves = parts(("torch", "cpu"))
    buckets = Buckets(leaves, RULE, 2, [0, 1, 2, 3, 4], "torch", 0.9, True, 0.9, 0.01)
    with pytest.raises(ValueError, match="gradient .*got None"):
        with buckets.updating(leaves, lambda leaves: None, one, rates, one, one):
            leaves[0].sum().backward()
    for leaf in leaves:
        leaf.grad = None
    with pytest.raises(RuntimeError, match="all of its gradient at once.*in_backward=false"):
        with buckets.updating(leaves, lambda leaves: None, one, rates, one, one):
            for _ in range(2):
                leaves[0].sum().backward()
    # Nothing of it hangs on: an ordinary pass is an ordinary pass.
    leaves[0].sum().backward()
    assert leaves[0].grad is not None


@once
@pytest.mark.parametrize("hooked", [False, True])
def test_gradients_that_are_formed_elsewhere_count_as_arrived(hooked, monkeypatch):
    """A convolution whose weight's gradient autograd never sees, also where hooks give a copy of its weight back."""
    order = []

    def add(self, form, weight, *operands):
        order.append("formed")
        self._formed.append((weight, form()))

    monkeypatch.setattr(WeightGradients, "add", add)
    monkeypatch.setattr(WeightGradients, "_wait", lambda self, most: order.append(f"waited for {most}"))
    results = []
    for bucketed in (True, False):
        order.clear()
        generator = torch.Generator().manual_seed(0)
        leaves = [torch.randn(4, 4, 3, 3, generator=generator).requires_grad_() for _ in range(6)]
        x = torch.randn(2, 4, 5, 5, generator=generator)
        one = torch.ones(())
        buckets = Buckets(leaves, [-1] * 6, 6, [5, 4, 3, 2, 1, 0], "torch", 0.9, True, 0.9, 0.01)
        sgd = FusedSGD(leaves, [-1] * 6, "torch", 0.9, 0.01)
        with WeightGradients() as apart:
            values = one * 0.1, torch.ones(6), one, one

            def work(leaves=leaves, x=x):
                y = x.clone().requires_grad_()
                with saved_tensors_hooks(torch.Tensor.detach, lambda kept: kept) if hooked else torch.enable_grad():
                    for leaf in leaves:
                        y = _Forked.apply(y, leaf, (1, 1), (1, 1), (1, 1)).tanh()
                (y.square().sum() + leaves[3].square().sum()).backward()

            if bucketed:
                with buckets.updating(leaves, apart.settle, *values):
                    work()
            else:
                work()
        if not bucketed:
            sgd.step([leaf.grad for leaf in leaves], *values[:3], torch.zeros(1))
        else:
            # Each bucket waits once, before the next ones are formed.
            assert order.count("waited for 0") == len(buckets._buckets) and order[-1] == "waited for 0"
            assert order[:3].count("waited for 0") == 1 and all(leaf.grad is None for leaf in leaves)
        results.append([leaf.detach() for leaf in leaves])
    assert bits_equal(*results)


@once
def test_settling_hands_over_what_is_asked_for():
    first, second = torch.zeros(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    with WeightGradients() as apart:
        apart._formed += [(first, torch.ones(2)), (second, torch.ones(2)), (first, torch.ones(2))]
        apart.settle([first])
        assert first.grad.tolist() == [2.0, 2.0] and second.grad is None
        first.grad = None
    assert first.grad is None and second.grad.tolist() == [1.0, 1.0]


def failing_backward(made: Engine, at: int):
    """The ``at``-th gradient of the first layer, the last to come, does not fit any more."""
    count = 0

    def hook(gradient):
        nonlocal count
        count += 1
        if count == at:
            raise torch.OutOfMemoryError(ERROR)

    made.network.module.conv1.weight.register_hook(hook)


FLOOR = (
    "method.batch.min=8",
    "method.batch.initial=32",
    "method.batch.down=8",
    "epochs=1",
    "method.update.in_backward=true",
)


@once
@pytest.mark.parametrize("method", ["fp32", "triaccel_precision"])
def test_a_step_that_does_not_fit_shows_it_in_its_rehearsal(method):
    """Backward fails after buckets have run: nothing has changed, and the samples go on in smaller batches."""
    made, run = trainer(settings(f"method={method}", *FLOOR), images(train=80))
    before, generator = everything(made.engine), torch.get_rng_state()
    failing_backward(made.engine, at=1)
    recover, found = made.engine.recover, []

    def watching():
        held = recover()
        found.append((bits_equal(before, everything(made.engine)), torch.equal(generator, torch.get_rng_state())))
        return held

    made.engine.recover = watching
    made.train()
    assert found == [(True, True)] and run.retries == {"allocator": 1}
    assert run.epochs[0].samples_seen == 80 and run.epochs[0].batch_max == 24


@once
def test_a_step_is_rehearsed_once_under_each_plan_and_the_rest_of_training_is_the_same():
    made = engine("method.update.in_backward=true")
    passes, real = [], made._whole_step

    def counted(*inputs):
        passes.append((len(inputs[1]), made._buckets._rehearsing))
        real(*inputs)

    made._whole_step = counted
    for size in (16, 7, 16, 7):
        made.step(*batch(size))
    made.set_plan(["bf16"] * 10)
    made.step(*batch(16))
    expected = [(16, True), (16, False), (7, True), (7, False), (16, False), (7, False), (16, True), (16, False)]
    assert passes == expected
    assert made.read().samples == 62 and made.read().samples_applied == 62


@once
def test_a_forward_pass_that_runs_out_later_is_undone():
    made, run = trainer(settings("method=fp32", *FLOOR), images(train=96))
    layer = list(made.network.layers.values())[4]
    forward, count = layer.forward, 0

    def failing(x):
        nonlocal count
        count += 1
        if count == 3:  # a rehearsal, a step, and the second step
            raise torch.OutOfMemoryError(ERROR)
        return forward(x)

    layer.forward = failing
    made.train()
    assert run.retries == {"allocator": 1} and run.epochs[0].samples_seen == 96
    assert (run.epochs[0].batch_min, run.epochs[0].batch_max) == (24, 32)


@once
def test_a_step_that_cannot_be_undone_ends_the_run_and_says_so():
    made, run = trainer(settings("method=fp32", *FLOOR), images(train=96))
    failing_backward(made.engine, at=3)
    with pytest.raises(torch.OutOfMemoryError, match="cannot be undone.*method.update.in_backward=false"):
        made.train()
    assert all(leaf.grad is None for leaf in made.engine._leaves)


@on_every_backend
def test_a_step_that_has_begun_has_the_rate_that_it_ends_with(place):
    backend, device = place
    scalars = StepScalars(0.1, 64, 640, 1024.0, 2.0, 0.5, 3, device, backend)
    for seed, (size, bad) in enumerate([(16, 0), (1, 1), (33, 0), (130, 0), (7, 1), (300, 0), (130, 0), (500, 0)]):
        scalars.rate_factor.fill_(1 + 0.3 * seed)
        others = [scalars.counters.clone(), scalars.loss_scale.clone(), scalars.inverse_scale.clone()]
        scalars.begin(size)
        begun = scalars.learning_rate.clone()
        assert bits_equal(others, [scalars.counters, scalars.loss_scale, scalars.inverse_scale])
        losses, correct = torch.ones(size, device=device), torch.ones(size, dtype=torch.int32, device=device)
        scalars.advance(losses, correct, torch.full((1,), float(bad), device=device), True)
        assert torch.equal(begun, scalars.learning_rate) and (begun > 0 or scalars.counters[4] > 600)


@on_every_backend
@pytest.mark.parametrize("count", [1, 3, 8])
def test_a_step_is_skipped_if_any_of_its_parts_is(place, count):
    backend, device = place
    losses, correct = torch.ones(5, device=device), torch.ones(5, dtype=torch.int32, device=device)
    for bad in (None, 0, count - 1):
        scalars = StepScalars(0.1, 64, 640, 1024.0, 2.0, 0.5, 3, device, backend)
        scalars.set_scaled(True)
        flags = torch.zeros(count, device=device)
        if bad is not None:
            flags[bad] = 1.0
        scalars.advance(losses, correct, flags, True)
        assert scalars.counters[4:].tolist() == ([5.0, 0.0, 0.0, 0.0] if bad is None else [0.0, 1.0, 1.0, 1.0])
        assert scalars.loss_scale.item() == (1024.0 if bad is None else 512.0)
    for wrong in (torch.zeros(9, device=device), torch.zeros(0, device=device)):
        with pytest.raises(ValueError, match="nonfinite: expected"):
            scalars.advance(losses, correct, wrong, True)


def on_card(in_backward: bool, *overrides: str, levels=("bf16",), kernels: str = "triton", **more) -> Engine:
    """ResNet-18 that trains so slowly that the last bits of its gradients do not add up."""
    # Random pixels make large gradients: with the usual scale the first steps of an FP16 plan are skipped.
    fixed = "method=triaccel", "method.loss_scale.initial=1", f"method.update.in_backward={str(in_backward).lower()}"
    chosen = compose([*fixed, *overrides])
    torch.manual_seed(0)
    network = models.build(chosen.model, 10)
    network.module.to("cuda", memory_format=torch.channels_last).train()
    precision.prepare(network)
    for part in network.module.modules():
        if type(part).__name__ in ("Dropout", "StochasticDepth"):
            part.p = 0.0
    plan = [levels[index % len(levels)] for index in range(len(network.layers))]
    schedule = Schedule(1e-4, 0, 10_000)
    return Engine(network, chosen.method, chosen.optimizer, schedule, kernels, plan, eager=None, **more)


@pytest.mark.parametrize("in_backward", [False, True])
def test_steps_with_copies_of_live_taps_alone_are_the_same_steps(in_backward, monkeypatch):
    monkeypatch.setattr(precision, "keeps_torchs_sums", lambda tensor: False)
    trained = []
    for sizes in (None, image_sizes(settings("model=resnet8").model.model_copy(update={"input_size": 4}))):
        update = f"method.update.in_backward={str(in_backward).lower()}"
        made = engine(update, "method.precision.adaptive=true", plan=["bf16"] * 10, image_sizes=sizes)
        generator = torch.Generator().manual_seed(0)
        for _ in range(3):
            made.step(torch.randn(8, 3, 4, 4, generator=generator), torch.arange(8))
        trained.append(made)
    plain, parts = trained
    assert any(window is not None for window in parts._copies.windows) and not any(plain._copies.windows)
    for ours, theirs in zip(parts.state_dict()["model"].values(), plain.state_dict()["model"].values(), strict=True):
        assert torch.equal(ours, theirs)
    assert all(map(torch.equal, parts.sgd.momenta, plain.sgd.momenta))
    assert parts.read().variance == plain.read().variance is not None, "the variance is of all taps"


def train_on_card(made: Engine, steps: int = 6, size: int = 16) -> list[str]:
    generator = torch.Generator().manual_seed(0)
    outcomes = []
    for _ in range(steps):
        x = torch.randn(size, 3, 32, 32, generator=generator).cuda().contiguous(memory_format=torch.channels_last)
        outcomes.append(made.step(x, torch.randint(0, 10, (size,), generator=generator).cuda()))
    return outcomes


@pytest.fixture
def library_deterministic():
    """Convolutions of a library only: a pooling layer has no deterministic backward pass."""
    torch.use_deterministic_algorithms(False)
    before, torch.backends.cudnn.deterministic = torch.backends.cudnn.deterministic, True
    yield
    torch.backends.cudnn.deterministic = before
    gc.collect()
    torch.cuda.empty_cache()


@gpu
@needs_card
@pytest.mark.parametrize("checkpointing", ["false", "true"])
@pytest.mark.parametrize("kernels", ["triton", "torch"])
@pytest.mark.parametrize("levels", [("fp32",), ("fp16", "bf16", "fp32")], ids=["fp32", "mixed"])
@pytest.mark.parametrize("name", ["resnet18", "efficientnet_b0"])
def test_captured_steps_are_the_same(name, levels, kernels, checkpointing, library_deterministic):
    """Twice without buckets tells how far kernels repeat themselves; with buckets it is no further away."""
    switches = f"model={name}", f"model.checkpointing={checkpointing}"
    results = []
    for bucketed in (False, False, True):
        made = on_card(bucketed, *switches, levels=levels, kernels=kernels)
        outcomes = train_on_card(made)
        assert outcomes[1:] == ["captured"] + ["replayed"] * 4 and made.captured.eager_reason is None
        reading = made.read()
        assert (reading.samples_applied, reading.steps_skipped) == (96, 0)
        weights = torch.cat([p.detach().flatten() for p in made._parameters])
        momenta = torch.cat([momentum.flatten().float() for momentum in made.sgd.momenta])
        results.append((weights, momenta, reading))
        for copy, parameter in zip(made._copies.of_parameters, made._parameters, strict=True):
            assert copy is None or torch.equal(copy, parameter.to(copy.dtype))
    for first, second, bucketed in zip(*(result[:2] for result in results), strict=True):
        apart = (first - second).norm() / first.norm()
        assert (first - bucketed).norm() / first.norm() <= 3 * apart + 1e-6
    first, _, bucketed = (result[2] for result in results)
    assert (first.learning_rate, first.loss_scale) == (bucketed.learning_rate, bucketed.loss_scale)
    assert bucketed.loss_sum == pytest.approx(first.loss_sum, rel=1e-3)
    assert torch.tensor(bucketed.variance).log() == pytest.approx(torch.tensor(first.variance).log(), abs=0.05)


@gpu
@needs_card
@pytest.mark.parametrize("levels", [("fp32",), ("bf16",)], ids=str)
@pytest.mark.parametrize("name", ["resnet18", "efficientnet_b0"])
def test_gradients_that_die_early_are_not_in_the_peak(name, levels, library_deterministic):
    """At a batch so small that the peak is all gradients' own."""
    peaks = {}
    for bucketed in (False, True):
        made = on_card(bucketed, f"model={name}", levels=levels)
        train_on_card(made, steps=3, size=4)
        peaks[bucketed] = max(call.graph.peak_bytes for call in made.captured._calls.values())
        gradients = sum(leaf.nbytes for leaf in made._leaves)
        del made
        gc.collect()
        torch.cuda.empty_cache()
    assert peaks[False] - peaks[True] > 0.5 * gradients


@gpu
@needs_card
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("kernels", ["triton", "torch"])
def test_copies_of_live_taps_alone_need_less_memory_and_train_alike(in_backward, kernels, library_deterministic):
    sizes = image_sizes(compose(["model=resnet18"]).model)
    trained, weights, held = [], [], []
    for given in (None, sizes):
        made = on_card(in_backward, kernels=kernels, image_sizes=given)
        outcomes = train_on_card(made)
        assert "replayed" in outcomes
        trained.append(made.read())
        weights.append([parameter.detach().clone() for parameter in made._parameters])
        held.append(sum(copy.nbytes for copy in made._copies.of_parameters if copy is not None))
        for parameter, copy, window in zip(made._parameters, made._copies.of_parameters, made._copies.windows):
            if window is not None:
                assert torch.equal(copy.detach(), parameter.detach()[window].to(copy.dtype))
        del made
        gc.collect()
        torch.cuda.empty_cache()
    assert held[0] - held[1] == 2 * (3 * 8 * 512 * 512 + 5 * 512 * 256)
    assert trained[1].loss_sum == pytest.approx(trained[0].loss_sum, rel=1e-3)
    for whole, part in zip(*weights, strict=True):
        torch.testing.assert_close(part, whole, rtol=1e-3, atol=1e-4)


@gpu
@needs_card
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("kernels", ["triton", "torch"])
def test_steps_never_wait_for_the_device(kernels, graphs, library_deterministic):
    made = on_card(True, levels=("fp16", "bf16", "fp32"), kernels=kernels)
    if not graphs:
        made.captured.eager_reason = "asked for"
    x = torch.randn(16, 3, 32, 32, device="cuda").contiguous(memory_format=torch.channels_last)
    labels = torch.arange(16, device="cuda") % 10
    for _ in range(3):
        made.step(x, labels)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            made.step(x, labels)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert made.read().samples == 96 and made.captured.count == graphs


@once
@pytest.mark.skipif(INTERPRETED, reason="is the interpreter")
def test_the_same_in_the_interpreter():
    assert_passes_in_the_interpreter(__file__)
