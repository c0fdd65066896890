"""The whole loop on a real card, and on the same card disguised as a T4 and a P100."""

import gc
import os
import subprocess
import sys

import pytest
import torch
from recorded import write
from test_openloop import agreeing
from tiny import images, settings, trainer

from triaccel_bench import captures, hardware, models, precision
from triaccel_bench import graphs as graphs_module
from triaccel_bench.configuration import compose
from triaccel_bench.data import DeviceData
from triaccel_bench.engine import Engine
from triaccel_bench.graphs import CaptureError
from triaccel_bench.kernels import backend
from triaccel_bench.meters import VramMeter
from triaccel_bench.methods import Method
from triaccel_bench.schedule import Schedule

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def clean():
    """Products of FP32 in FP32, and nothing left of the test before."""
    precision.allow_tf32(False)
    yield
    gc.collect()
    torch.cuda.empty_cache()


SMALL = ["device=cuda", "memory.meter=vram", "dataset.image_size=32", "model.input_size=32"]


def small(*overrides: str):
    return settings(*SMALL, *overrides)


def data():
    return images(train=64, evaluation=32, side=32)


def engine(name: str, levels: list[str], kernels: str, lr: float = 0.05, layout: str = "channels_last", **more):
    chosen = compose([f"model={name}", "method=triaccel"])
    torch.manual_seed(0)
    network = models.build(chosen.model, 10)
    network.module.to("cuda", memory_format=getattr(torch, layout)).train()
    precision.prepare(network)
    plan = [levels[index % len(levels)] for index in range(len(network.layers))]
    made = Engine(network, chosen.method, chosen.optimizer, Schedule(lr, 0, 10_000), kernels, plan, **more)
    return made, chosen


def resident(kernels: str, train: int = 64) -> DeviceData:
    chosen = compose(["model=resnet18"])
    held = images(train=train, evaluation=32, side=32)
    return DeviceData(held, chosen.dataset, 32, torch.device("cuda"), kernels, channels_last=True)


def source_of(data: DeviceData):
    def source(dtype, indices):
        batch = data.input_buffers(len(indices), dtype)
        data.fill(*batch, indices)
        return batch

    return source


def train(made, data: DeviceData, batches: list[int], epochs: int = 1) -> None:
    for epoch in range(epochs):
        sampler = data.begin_epoch(0, epoch)
        for size in batches:
            made.step(sampler.take(size))


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("kernels", ["triton", "torch"])
@pytest.mark.parametrize("name", ["resnet18", "efficientnet_b0"])
def test_steps_never_wait_for_the_device(name, kernels, graphs):
    data = resident(kernels)
    made, _ = engine(
        name, ["fp16", "bf16", "fp32"], kernels, source=source_of(data), eager=None if graphs else "asked for"
    )
    train(made, data, [16, 32, 16], epochs=2)  # warms up, and captures both sizes
    data.prepare(0, 2)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sampler = data.begin_epoch(0, 2)
        for size in (16, 32, 16):
            made.step(sampler.take(size))
        made.set_rates([0.5] * len(made.network.layers), 2.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    reading = made.read()
    assert reading.samples == 192 and reading.loss_sum > 0
    assert made.captured.count == (2 if graphs else 0)


@pytest.mark.parametrize("kernels", ["triton", "torch"])
@pytest.mark.parametrize("levels", [["fp32"], ["fp16", "bf16", "fp32"]], ids=["fp32", "mixed"])
@pytest.mark.parametrize("name", ["resnet18", "efficientnet_b0"])
def test_replayed_steps_are_the_eager_ones(name, levels, kernels):
    """Same seed, same batches of three sizes, a leftover among them: the same losses, counters and momentum.

    The rate is tiny: gradients of a library differ in the last bit from run to run, and training would blow that up.
    """
    readings, momenta = [], []
    for graphs in (True, False):
        data = resident(kernels)
        made, _ = engine(name, levels, kernels, lr=1e-9, source=source_of(data), eager=None if graphs else "asked for")
        for part in made.network.module.modules():
            if type(part).__name__ in ("Dropout", "StochasticDepth"):
                part.p = 0.0
        train(made, data, [16, 16, 24, 8], epochs=4)
        readings.append(made.read())
        momenta.append(torch.cat([buffer.flatten() for buffer in made.sgd.momenta]))
        assert made.captured.count == (3 if graphs else 0)
    replayed, eager = readings
    assert replayed.samples == eager.samples == 256 and replayed.steps_skipped == eager.steps_skipped
    assert replayed.learning_rate == eager.learning_rate
    assert replayed.loss_sum == pytest.approx(eager.loss_sum, rel=1e-3)
    assert torch.tensor(replayed.variance).log() == pytest.approx(torch.tensor(eager.variance).log(), abs=0.1)
    assert (momenta[0] - momenta[1]).norm() < 1e-2 * momenta[1].norm()


@pytest.mark.parametrize("name", ["resnet18", "efficientnet_b0"])
def test_memory_of_replayed_steps_is_that_of_eager_ones(name):
    peaks = {}
    for graphs in (True, False):
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        data = resident("triton")
        made, _ = engine(name, ["fp16"], "triton", source=source_of(data), eager=None if graphs else "asked for")
        meter = VramMeter(hardware.inspect("cuda", "triton"), data.bytes + before)
        with torch.cuda.stream(graphs_module.stream(torch.device("cuda", 0))):
            train(made, data, [64], epochs=1)
            meter.begin_window()
            train(made, data, [64], epochs=2)  # the capture lies in this window
            at_capture = meter.window_peak_bytes(made.captured.replayed_bytes)
            made.captured.replayed_bytes = 0
            meter.begin_window()
            train(made, data, [64], epochs=100)
            peaks[graphs] = at_capture, meter.window_peak_bytes(made.captured.replayed_bytes)
        del made, data
    for captured, eager in zip(peaks[True], peaks[False], strict=True):
        assert captured == pytest.approx(eager, rel=0.03)


def test_graphs_share_memory_and_old_ones_go():
    data = resident("triton", train=256)
    made, _ = engine("resnet18", ["fp16"], "triton", source=source_of(data), eager=None, cached=2)
    train(made, data, [256], epochs=2)
    torch.cuda.empty_cache()
    one = torch.cuda.memory_reserved()
    train(made, data, [128, 64, 32], epochs=2)
    torch.cuda.empty_cache()
    assert made.captured.count == 4 and len(made.captured) == 2
    assert torch.cuda.memory_reserved() <= 1.05 * one
    made.set_plan(["bf16"] * 21)
    assert len(made.captured) == 0
    train(made, data, [64, 48], epochs=3)
    assert made.captured.count == 6 and made.read().loss_sum > 0


@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize("name", ["resnet18", "efficientnet_b0"])
def test_a_changed_plan_is_captured_without_an_eager_step_where_that_works(name, refused, monkeypatch):
    plans = ["fp16"], ["fp32", "bf16", "fp16"]
    results = []
    for eager in (None, "asked for"):
        data = resident("triton")
        made, _ = engine(name, plans[0], "triton", lr=1e-9, source=source_of(data), eager=eager)
        sampler = data.begin_epoch(0, 0)
        outcomes = [made.step(sampler.take(16)) for _ in range(2)]
        layers = len(made.network.layers)
        made.set_plan([plans[1][index % 3] for index in range(layers)])
        real = captures.Graph

        def only_later(*args, real=real, **options):
            monkeypatch.setattr(captures, "Graph", real)
            raise CaptureError("not yet")

        if refused and eager is None:
            monkeypatch.setattr(captures, "Graph", only_later)
        outcomes += [made.step(sampler.take(16)) for _ in range(2)]
        results.append((made.read(), outcomes))
    (captured, outcomes), (plain, _) = results
    after = ["warmed", "captured"] if refused else ["captured", "replayed"]
    assert outcomes == ["warmed", "captured", *after]
    assert captured.samples == plain.samples == 64
    if name == "resnet18":  # the other draws Dropout's numbers
        assert captured.loss_sum == pytest.approx(plain.loss_sum, rel=1e-3)


def test_a_cold_capture_that_torch_invalidates_costs_an_eager_step_and_no_more():
    readings = []
    for invalidated in (False, True):
        data = resident("triton")
        inner, waits = source_of(data), []

        def source(dtype, indices, inner=inner, waits=waits):
            if waits and torch.cuda.is_current_stream_capturing():
                waits.pop()
                indices.sum().item()
            return inner(dtype, indices)

        made, _ = engine("resnet18", ["fp16"], "triton", source=source, eager=None)
        sampler = data.begin_epoch(0, 0)
        outcomes = [made.step(sampler.take(8)) for _ in range(2)]
        made.set_plan(["bf16"] * len(made.network.layers))
        waits += [True] * invalidated
        outcomes += [made.step(sampler.take(8)) for _ in range(3)]
        made.set_plan(["fp16"] * len(made.network.layers))
        outcomes.append(made.step(sampler.take(8)))
        # A plan is not captured without an eager step again once that was invalidated.
        cold, last = (("warmed", "captured", "replayed"), "warmed") if invalidated else (
            ("captured", "replayed", "replayed"), "captured"
        )  # fmt: skip
        assert outcomes == ["warmed", "captured", *cold, last] and made.captured.eager_reason is None
        readings.append(made.read())
    undisturbed, disturbed = readings
    assert disturbed.samples == undisturbed.samples == 48
    assert disturbed.steps_skipped == undisturbed.steps_skipped
    assert disturbed.loss_sum == pytest.approx(undisturbed.loss_sum, rel=0.02)


def test_under_a_cap_an_eager_step_finds_the_memory_of_the_graphs():
    """Reserved bytes are capped at little more than one step needs: warm-up steps and graphs take turns."""
    made, run = trainer(
        small("model=resnet18", "method=amp", "memory.enforce=true", "memory.budget=0.4", "epochs=4"),
        images(train=200, evaluation=32, side=32),
    )
    try:
        made.train()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert run.graphs and sum(epoch.captures for epoch in run.epochs) >= 2
    assert all(epoch.reserved_bytes <= 0.4e9 + run.dataset_bytes for epoch in run.epochs)


def test_a_step_that_cannot_be_captured_runs_eagerly_and_says_why():
    data = resident("triton")
    inner = source_of(data)

    def waiting(dtype, indices):
        indices.sum().item()
        return inner(dtype, indices)

    made, _ = engine("resnet18", ["bf16"], "triton", source=waiting, eager=None)
    train(made, data, [32], epochs=4)
    assert made.captured.count == 0 and "cannot be captured" in made.captured.eager_reason
    assert made.read().samples == 128 and made.read().steps_skipped == 0


def test_weight_copies_follow_the_update():
    data = resident("triton")
    made, _ = engine("resnet18", ["fp16", "fp32", "bf16"], "triton", source=source_of(data), eager=None)
    train(made, data, [32], epochs=4)
    pairs = [(copy, p) for copy, p in zip(made._copies.of_parameters, made._parameters) if copy is not None]
    assert len(pairs) == 14 + 1  # two of three of 21 layers, and one bias
    for copy, parameter in pairs:
        assert torch.equal(copy, parameter.to(copy.dtype))


def test_evaluation_replayed_is_evaluation():
    data = resident("triton")
    results = []
    for graphs in (True, False):
        made, _ = engine("resnet18", ["fp16"], "triton", source=source_of(data), eager=None if graphs else "asked for")
        results.append([made.evaluate(data.eval_batches(12)) for _ in range(3)])
    for found in results[0] + results[1][1:]:
        assert found[2] == 32 and found[:2] == pytest.approx(results[1][0][:2], rel=1e-3)


@pytest.mark.parametrize("name", ["resnet18", "efficientnet_b0"])
def test_uniform_fp16_plan_is_autocast(name):
    made, _ = engine(name, ["fp16"], "torch")
    network = made.network
    network.module.eval()
    torch.manual_seed(0)
    plain = models.build(compose([f"model={name}"]).model, 10).module.cuda().eval()
    batch = torch.randn(16, 3, 32, 32, device="cuda")
    with torch.autocast("cuda", torch.float16):
        reference = plain(batch)
    torch.testing.assert_close(network.module(batch), reference.float(), rtol=2e-3, atol=2e-3)


def test_both_backends_train_alike():
    losses = []
    for kernels in ("triton", "torch"):
        made, _ = engine("resnet18", ["fp32"], kernels, lr=1e-4)
        generator = torch.Generator().manual_seed(0)
        for _ in range(5):
            batch = torch.randn(16, 3, 32, 32, generator=generator).cuda()
            made.step(batch, torch.arange(16, device="cuda") % 10)
        losses.append(made.read().loss_sum)
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_peaks_do_not_depend_on_the_order_of_jobs():
    """A small job after a large one in the same process reports its own peak."""

    def peak(name: str) -> int:
        made, run = trainer(small(f"model={name}", "method=fp32", "epochs=1", "model.input_size=32"), data())
        made.train()
        return run.epochs[0].memory_peak_bytes

    peak("resnet8")  # library workspaces are allocated once a process
    first = {name: peak(name) for name in ("resnet18", "resnet8")}
    second = {name: peak(name) for name in ("resnet8", "resnet18")}
    assert first["resnet18"] > 2 * first["resnet8"]
    for name, value in first.items():
        assert second[name] == pytest.approx(value, rel=0.01)


@pytest.mark.parametrize("estimator", ["estimator=fisher", "product=jacobian", "product=difference"])
def test_probes_are_captured_before_the_run_and_never_in_it(estimator, monkeypatch):
    made = []
    real = graphs_module.Replayed._capture
    monkeypatch.setattr(graphs_module.Replayed, "_capture", lambda self, *given: made.append(1) or real(self, *given))
    chosen = small("method.curvature.every=2", f"method.curvature.{estimator}", "epochs=3", "method.curvature.k=2")
    monkeypatch.setattr(Method, "_allowance", lambda self, training_seconds: 1.0)
    run_of, record = trainer(chosen, data())
    assert len(made) == 1
    trace = run_of.train()
    assert len(made) == 1 and len(trace.probes) > 2 and run_of.method.eager_reason is None
    assert record.graphs and record.eager_reason is None and not record.warnings


WARM_UP = """
import contextlib, sys
from pathlib import Path
import torch
from tiny import images
from triaccel_bench.assembly import PLANS_TO_COMPILE, Assembly
from triaccel_bench.configuration import compose
from triaccel_bench.data import DeviceData
from triaccel_bench.hardware import inspect
from triaccel_bench.kernels import backend

compiled = lambda: len(list(Path(sys.argv[2]).rglob("*.cubin")))
together, counts = backend.compiled_together, []

@contextlib.contextmanager
def watched():
    with together():
        yield
    counts.append(compiled())

backend.compiled_together = watched
settings = compose([f"model={sys.argv[1]}", "method=triaccel"])
held = DeviceData(images(train=192, evaluation=32, side=32), settings.dataset, 32, torch.device("cuda"), "triton", True)
assembly = Assembly(0, inspect("cuda", "triton"), held, "triton")
peaks = [assembly.try_out(PLANS_TO_COMPILE, 2, settings) for _ in range(2)]
network, _, engine = assembly.build(settings, "to be looked at")
engine.set_plan([("fp16", "bf16", "fp32")[index % 3] for index in range(len(network.layers))])
engine.step(torch.arange(96, device="cuda"))
torch.cuda.synchronize()
print(counts[0], compiled(), *peaks)
"""


@pytest.mark.skipif(not backend.compiles_together(), reason="this Triton compiles one kernel at a time")
@pytest.mark.parametrize("name", ["resnet18", "efficientnet_b0"])
def test_a_warm_up_compiles_all_kernels_of_all_plans_together(name, tmp_path):
    """Also those of mixed plans; and steps whose kernels were not launched leave nothing behind in what is measured."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", WARM_UP, name, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    together, all_told, *peaks = map(int, done.stdout.split())
    assert together == all_told > 50 and peaks[0] == peaks[1]


def test_epoch_seconds_agree_with_device_events():
    made, run = trainer(small("model=resnet18", "method=fp32", "epochs=3"), data())
    events = []
    read = made.clock.read

    def with_event():
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record()
        return read()

    made.clock.read = with_event
    made.train()
    # Each epoch reads the clock at its start, at control steps, at the end of training, then around evaluation.
    reads = len(events) // len(run.epochs)
    for record, start in zip(run.epochs, range(0, len(events), reads), strict=True):
        elapsed = events[start].elapsed_time(events[start + reads - 3]) / 1e3
        assert record.train_seconds == pytest.approx(elapsed, rel=0.02, abs=2e-4)


DISGUISES = {"T4": (7, 5), "P100": (6, 0)}


@pytest.mark.parametrize("card", DISGUISES)
def test_a_card_without_native_bf16_trains_on_its_substitutes(card, monkeypatch):
    """Requested BF16 executes FP16 under loss scaling; a P100 gets the torch kernels."""
    real = hardware.cuda_properties
    major, minor = DISGUISES[card]

    class Disguised:
        def __init__(self, index):
            self._real = real(index)

        def __getattr__(self, name):
            return {"major": major, "minor": minor}.get(name, getattr(self._real, name))

    monkeypatch.setattr(hardware, "cuda_properties", Disguised)
    monkeypatch.setattr(hardware, "cuda_arch_list", lambda: ["sm_60", "sm_75"])
    made, run = trainer(
        small("model=resnet8", "method=triaccel", "epochs=2", "method.curvature.max_overhead=1.0"), data()
    )
    assert not made.hardware.bf16_native and len(made.hardware.warnings) == 1
    if card == "P100":
        assert made.hardware.kernels == "torch"
    trace = made.train()
    assert "bf16" not in {level for d in trace.decisions for level in d.executed}
    assert trace.decisions[0].requested.count("bf16") == len(trace.layers)
    assert run.epochs[-1].loss_scale_last is not None
    assert run.epochs[-1].evaluation_accuracy_percent > 10.0


def test_a_recorded_schedule_is_followed_on_a_card(tmp_path):
    """After as many steps as in the recorded run, in captured steps, and with what rounding leaves of its losses."""
    made, run = trainer(
        small("epochs=3", "method=triaccel", "method.precision.dwell=1", "method.curvature.max_overhead=1.0"), data()
    )
    made.train()
    write(tmp_path, made, run)
    follower, followed = trainer(
        small("epochs=3", "method=replay", f"replay.run={tmp_path}", *agreeing(tmp_path)), data()
    )
    follower.train()
    assert any(d.batch_after != d.batch_before or d.plan_changed for d in made.trace.decisions)
    for theirs, ours in zip(run.epochs, followed.epochs, strict=True):
        assert (theirs.steps, theirs.batch_mean, theirs.plan_changes) == (
            ours.steps,
            ours.batch_mean,
            ours.plan_changes,
        )
        assert theirs.layers_executed == ours.layers_executed and theirs.rate_scale_min == ours.rate_scale_min
        assert ours.train_loss == pytest.approx(theirs.train_loss, rel=0.05)
    assert followed.graphs and not follower.trace.probes


def test_a_command_says_nothing_on_stderr_where_all_is_well(tmp_path):
    overrides = [*SMALL, "+experiment=smoke", "method=amp", "model=resnet8", "seeds=[0]", f"results.root={tmp_path}"]
    command = [sys.executable, "-c", "from triaccel_bench.cli import main; main()", "progress=none", *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
