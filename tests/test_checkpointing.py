"""A checkpointed block: the same training bit for bit, with less kept for the backward pass."""

import gc

import pytest
import torch
from tiny import engine, images, settings, trainer
from torch import nn

from triaccel_bench import checkpointing, curvature, models, precision
from triaccel_bench.checkpointing import Checkpointed
from triaccel_bench.configuration import compose
from triaccel_bench.engine import Engine
from triaccel_bench.loop import TriAccel
from triaccel_bench.meters import TensorMeter
from triaccel_bench.schedule import Schedule
from triaccel_bench.settings import SettingsError

NAMES = ["resnet8", "resnet18", "efficientnet_b0"]
BLOCKS = {"resnet8": 4, "resnet18": 9, "resnet18_cifar": 9, "efficientnet_b0": 16}
MIXED = ("bf16", "fp16", "fp32")
MIXED_ON_CPU = ("fp16", "fp32", "fp16")
"""Without BF16: on a CPU the weight's gradient of a BF16 convolution holds uninitialised memory where taps only meet
padding (PyTorch 2.14)."""


def made(name: str, on: bool, levels: tuple[str, ...] = ("fp32",)) -> Engine:
    # A rate and a loss scale at which steps of few FP16 images are applied.
    overrides = "method=triaccel", f"model={name}", f"model.checkpointing={str(on).lower()}"
    one = engine(*overrides, "method.loss_scale.initial=0.01", schedule=Schedule(1e-3, 0, 10_000))
    one.set_plan([levels[index % len(levels)] for index in range(len(one.network.layers))])
    return one


def batch(seed: int = 0, size: int = 4, side: int = 16):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 3, side, side, generator=generator), torch.randint(0, 10, (size,), generator=generator)


def state_of(made: Engine) -> dict[str, torch.Tensor]:
    tensors = dict(made.network.module.state_dict())
    tensors |= {f"momentum {index}": value for index, value in enumerate(made.sgd.momenta)}
    tensors |= {"variance": made.moments.variance, "ema": made.moments.ema, "counters": made.scalars.counters}
    return {key: value.clone() for key, value in tensors.items()} | {"generator": torch.get_rng_state()}


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    # A step that overflows leaves NaN in the statistics of its own.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


class Runs:
    """Counts what checkpointed blocks run, the first time and again."""

    def __init__(self, module: nn.Module, monkeypatch) -> None:
        self.first = self.again = 0
        for kind in {type(part) for part in module.modules() if isinstance(part, Checkpointed)}:
            monkeypatch.setattr(kind, "run", self._counted(kind.run))

    def _counted(self, run):
        def counted(block, *inputs):
            again = checkpointing.recomputing()
            self.first, self.again = self.first + (not again), self.again + again
            return run(block, *inputs)

        return counted


@pytest.mark.parametrize("levels", [("fp32",), MIXED_ON_CPU], ids=["fp32", "mixed"])
@pytest.mark.parametrize("name", NAMES)
def test_training_is_the_same_bit_for_bit(name, levels, monkeypatch):
    """Losses, weights, running statistics, counters, momentum, gradient statistics and the generator."""
    states = []
    for on in (False, True, 2):
        one = made(name, on, levels)
        runs = Runs(one.network.module, monkeypatch)
        torch.manual_seed(7)
        for step in range(3):
            one.step(*batch(step, size=8))
        again = {False: 0, True: BLOCKS[name]}.get(on, on)
        assert (runs.first, runs.again) == (3 * BLOCKS[name], 3 * again)
        norms = [part for part in one.network.module.modules() if isinstance(part, models.Norm)]
        assert {int(norm.num_batches_tracked) for norm in norms} == {3} and one.read().steps_skipped < 3
        states.append((state_of(one), one.read()))
        monkeypatch.undo()
    for other in states[1:]:
        assert_same(states[0][0], other[0])
        assert states[0][1] == other[1]


def test_norms_that_count_for_themselves_count_once():
    """Without an engine each norm adds to its own counter."""
    modules = []
    for on in (False, True):
        torch.manual_seed(0)
        module = models.build(compose(["model=resnet8"]).model, 10).module
        checkpointing.switch(module, on)
        for step in range(2):
            module(batch(step)[0]).square().mean().backward()
        modules.append(module)
    assert_same(*({**module.state_dict()} for module in modules))
    gradients = ({name: p.grad for name, p in module.named_parameters()} for module in modules)
    assert_same(*gradients)


def test_stochastic_depth_drops_the_same_samples_again():
    outputs = []
    for on in (False, True):
        one = made("efficientnet_b0", on)
        for part in one.network.module.modules():
            if type(part).__name__ == "StochasticDepth":
                part.p = 0.5
        torch.manual_seed(3)
        one.step(*batch(size=8))
        outputs.append(state_of(one))
    assert_same(*outputs)


@pytest.mark.parametrize("name", NAMES)
def test_fewer_bytes_are_kept(name):
    peaks = []
    for on in (False, True, 3):
        one = made(name, on)
        meter = TensorMeter(one.network.module)
        with meter.recording():
            one.step(*batch(size=8, side=32))
        held = 2 * sum(p.nbytes for p in one.network.module.parameters())
        peaks.append(meter.window_peak_bytes() - held)
    assert peaks[1] < 0.75 * peaks[0] and peaks[1] <= peaks[2] < 0.9 * peaks[0]


class Wide(Checkpointed, nn.Module):
    """Saves its input and, times eight as wide, the results of two steps."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8, 1))

    def run(self, x):
        return (x * self.scale).exp().sin().sum(0)


def test_what_is_run_again_counts_for_as_long_as_autograd_would_keep_it():
    """At the peak, a deep chain holds every block's input, and of one block all that it saves."""
    elements, depth = 1000, 5
    module = nn.Sequential(*[Wide() for _ in range(depth)])
    checkpointing.switch(module, True)
    meter = TensorMeter(module)
    x = torch.randn(elements, requires_grad=True)
    with meter.recording():
        module(x).sum().backward()
    parameters = 2 * depth * 8 * 4
    # x is the first block's input; a block's second run keeps its input, exp and the operand of sin, which is the same.
    assert meter.window_peak_bytes() - parameters == 4 * elements * (depth + 8)


def test_nothing_is_kept_of_a_block_once_its_backward_pass_is_over():
    module = Wide()
    module.checkpointing = True
    meter = TensorMeter(module)
    with meter.recording():
        for _ in range(3):
            module(torch.randn(1000, requires_grad=True)).sum().backward()
    assert meter.window_peak_bytes() - 2 * 8 * 4 == 4 * 1000 * (1 + 8)


def test_a_graph_that_is_kept_is_run_again_once(monkeypatch):
    module = Wide()
    module.checkpointing = True
    runs = Runs(module, monkeypatch)
    x = torch.randn(10, requires_grad=True)
    y = module(x).sum()
    first, second = (torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second) and runs.again == 1


@pytest.mark.parametrize("draws", [True, False])
def test_a_block_that_does_not_do_the_same_twice_is_told(draws):
    class Fickle(Checkpointed, nn.Module):
        checkpointing = True

        def run(self, x):
            return x.exp() if draws and checkpointing.recomputing() else x.exp().sin()

    y = Fickle()(torch.randn(3, requires_grad=True))
    if draws:
        with pytest.raises(RuntimeError, match="expected 2 tensors to be saved .* got 1"):
            y.sum().backward()
    else:
        y.sum().backward()


def test_a_block_within_a_block_is_run_with_it(monkeypatch):
    class Outer(Checkpointed, nn.Module):
        checkpointing = True

        def __init__(self) -> None:
            super().__init__()
            self.inner = Wide()
            self.inner.checkpointing = True

        def run(self, x):
            return self.inner(x).sin()

    module, x = Outer(), torch.randn(5, requires_grad=True)
    runs = Runs(module, monkeypatch)
    (gradient,) = torch.autograd.grad(module(x).sum(), x)
    assert (runs.first, runs.again) == (2, 2)
    module.checkpointing = module.inner.checkpointing = False
    assert torch.equal(gradient, torch.autograd.grad(module(x).sum(), x)[0])


def test_evaluation_runs_nothing_again(monkeypatch):
    readings = []
    for on in (False, True):
        one = made("resnet8", on)
        runs = Runs(one.network.module, monkeypatch)
        readings.append(one.evaluate([batch(side=8)]))
        assert (runs.first, runs.again) == (BLOCKS["resnet8"], 0)
        monkeypatch.undo()
    assert readings[0] == readings[1]


@pytest.mark.parametrize("estimator, product", [("fisher", "auto"), ("hessian", "exact"), ("hessian", "jacobian")])
def test_probes_read_the_same_and_run_nothing_again(estimator, product, monkeypatch):
    chosen = compose(
        [f"method.curvature.{key}" for key in (f"estimator={estimator}", f"product={product}", "k=1", "iterations=2")]
        + ["method=triaccel"]
    ).method.curvature
    read = []
    for on in (False, True):
        network = made("resnet8", on).network
        runs = Runs(network.module, monkeypatch)
        layers = dict(list(network.layers.items())[:3])
        found = curvature.eigenvalues(network.module, layers, *batch(side=8), chosen)
        assert runs.first > 0 and runs.again == 0
        read.append(found.values)
        monkeypatch.undo()
    assert torch.equal(*read) and torch.isfinite(read[0]).all()


@pytest.mark.parametrize("again", [False, True])
def test_an_error_leaves_no_trace(again, monkeypatch):
    """Memory that runs out in a block is seen as such, and the step that follows is the one of a network untouched."""
    one, untouched = (made("resnet8", True) for _ in range(2))
    last = one.network.module.layer1

    def fails(x):
        if checkpointing.recomputing() is again:
            raise torch.OutOfMemoryError("out of memory")
        return type(last).run(last, x)

    last.run = fails
    with pytest.raises(torch.OutOfMemoryError):
        one.step(*batch(side=8))
    del last.run
    assert not checkpointing.recomputing() and checkpointing._here.call is None
    one.recover()
    for each in (one, untouched):
        each.step(*batch(side=8))
    assert_same(state_of(one), state_of(untouched))


@pytest.mark.parametrize("name", BLOCKS)
def test_every_residual_block_is_checkpointed_if_asked(name):
    for on in (False, True):
        module = models.build(compose([f"model={name}", f"model.checkpointing={str(on).lower()}"]).model, 10).module
        blocks = [part for part in module.modules() if isinstance(part, Checkpointed)]
        assert len(blocks) == BLOCKS[name] and {block.checkpointing for block in blocks} == {on}
    for first in (0, 2, 99):
        module = models.build(compose([f"model={name}", f"model.checkpointing={first}"]).model, 10).module
        chosen = [part.checkpointing for part in module.modules() if isinstance(part, Checkpointed)]
        assert chosen == [place < first for place in range(BLOCKS[name])]
    assert not compose([f"model={name}"]).model.checkpointing


def test_a_run_gives_the_same_record():
    curves = []
    for on in ("false", "true"):
        one, record = trainer(settings("epochs=2", f"model.checkpointing={on}", "method.batch.elastic=false"), images())
        one.train()
        curves.append([(epoch.train_loss, epoch.evaluation_loss, epoch.lambda_max) for epoch in record.epochs])
    assert curves[0] == curves[1]


def test_a_loop_of_ones_own_refuses_it():
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
    with pytest.raises(SettingsError, match="model.checkpointing=true: expected false .*; "):
        TriAccel(model, torch.optim.SGD(model.parameters(), 0.1), overrides=["model.checkpointing=true"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kernels", ["triton", "torch"])
@pytest.mark.parametrize("levels", [("fp32",), MIXED], ids=["fp32", "mixed"])
@pytest.mark.parametrize("name", ["resnet18", "efficientnet_b0"])
def test_captured_steps_are_the_same_and_need_less_memory(name, levels, kernels):
    """Draws of a replay come from the graph's own generator state: alike for both, as they draw alike."""
    precision.allow_tf32(False)
    states, losses, peaks = [], [], []
    for on in (False, True):
        chosen = compose([f"model={name}", "method=triaccel", f"model.checkpointing={str(on).lower()}"])
        torch.manual_seed(0)
        network = models.build(chosen.model, 10)
        network.module.to("cuda", memory_format=torch.channels_last).train()
        precision.prepare(network)
        plan = [levels[index % len(levels)] for index in range(len(network.layers))]
        one = Engine(network, chosen.method, chosen.optimizer, Schedule(1e-9, 0, 10_000), kernels, plan, eager=None)
        # ResNet-18's gradients are as large as what its blocks save of few images so small.
        x, labels = batch(size={"resnet18": 512, "efficientnet_b0": 96}[name], side=32)
        x, labels = x.to("cuda", memory_format=torch.channels_last), labels.cuda()
        torch.manual_seed(1)
        outcomes = [one.step(x, labels) for _ in range(4)]
        assert outcomes == ["warmed", "captured", "replayed", "replayed"], one.captured.eager_reason
        losses.append(one.read().loss_sum)
        peaks.append(one.captured.pool_bytes)
        states.append({key: value for key, value in state_of(one).items() if "running" in key or "tracked" in key})
        del one, network
        gc.collect()
        torch.cuda.empty_cache()
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    for key, value in states[0].items():
        torch.testing.assert_close(states[1][key], value, rtol=1e-3, atol=1e-4, msg=key)
    assert peaks[1] < {"resnet18": 0.95, "efficientnet_b0": 0.7}[name] * peaks[0]
