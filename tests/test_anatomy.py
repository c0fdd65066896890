"""Where memory goes: kinds add up to the peak, phases are told apart, and what is not known is null."""

from __future__ import annotations

import gc
import random
from types import SimpleNamespace

import pytest
import torch
from measured import epoch, run
from test_meters import CUDA, FakeAllocator, card
from tiny import engine, images, settings, trainer
from torch import nn

from triaccel_bench import graphs
from triaccel_bench.anatomy import Anatomy, Step
from triaccel_bench.meters import NoMeter, VramMeter
from triaccel_bench.progress import Reporter, memory_panel
from triaccel_bench.records import MemoryRecord, RunRecord

HELD = ("weights", "copies", "optimizer", "dataset")
PHASES = ("forward", "backward", "update", "capture", "probe", "evaluation")


def known(sizes: dict) -> int:
    return sum(size for size in sizes.values() if size is not None)


def test_kinds_add_up_to_the_peak_and_none_is_negative():
    draw = random.Random(0)
    for _ in range(300):
        held = {kind: draw.randrange(100) for kind in HELD}
        before = sum(held.values()) + draw.randrange(50)
        gradients = draw.randrange(80)
        step = Step(before, before + gradients + draw.randrange(100), gradients, held)
        for workspace in (None, 0, draw.randrange(60), 10**6):
            kinds = step.kinds(workspace)
            assert known(kinds) == step.peak and min(filter(None, kinds.values()), default=0) >= 0
            assert kinds["workspace"] == (None if workspace is None else min(workspace, kinds["workspace"]))
            assert {kind: kinds[kind] for kind in HELD} == held and kinds["gradients"] == gradients


def test_a_workspace_that_the_step_itself_began_is_none_of_its_activations():
    step = Step(before=100, peak=180, gradients=20, held={"weights": 95})
    assert step.kinds(4) == {"weights": 95, "gradients": 20, "activations": 60, "workspace": 4, "other": 1}
    assert step.kinds(30) == {"weights": 95, "gradients": 20, "activations": 35, "workspace": 30, "other": 0}


class Scripted:
    """An engine of one layer whose steps allocate what a test says."""

    def __init__(self, allocator: FakeAllocator) -> None:
        layer = nn.Linear(5, 5, bias=False)
        self.network = SimpleNamespace(module=layer, layers={"layer": layer})
        self.state_bytes, self.on_phase = 100, None
        self.captured = SimpleNamespace(eager_reason=None, capture_peak_bytes=None, give_up=lambda: False)
        self.allocator = allocator

    def step(self, forward: int, after_gradient: int, update: int, replayed: bool = False) -> None:
        """``forward`` bytes die with the backward pass, the others at once."""
        if replayed:
            return
        tell, allocator, layer = self.on_phase or (lambda phase: None), self.allocator, self.network.module
        arriving = layer.weight.register_hook(lambda gradient: allocator.allocate(gradient.nbytes))
        tell("begin")
        allocator.allocate(forward)
        loss = layer(torch.ones(1, 5)).sum()
        tell("forward")
        loss.backward()
        arriving.remove()
        allocator.allocate(after_gradient)
        allocator.free(after_gradient + forward)
        tell("backward")
        allocator.allocate(update)
        allocator.free(update)
        tell("update")
        allocator.free(layer.weight.grad.nbytes)
        layer.weight.grad = None


@pytest.fixture
def scripted(monkeypatch):
    monkeypatch.setattr(graphs, "_earlier_peaks", {})
    monkeypatch.setattr(graphs, "workspace_bytes", lambda device: 8)
    allocator = FakeAllocator(monkeypatch)
    made = Scripted(allocator)
    allocator.allocate(1000 + 100 + 100 + 8 + 3)  # data set, weight, momentum, workspace, and what is nobody's
    return made, Anatomy(VramMeter(card(nvml=None), 1000), made, 1000)


@pytest.mark.parametrize("step, gradients, activations", [
    ((50, 0, 0), 100, 50),  # as the gradient arrives
    ((50, 70, 0), 100, 120),  # behind it
    ((0, 0, 500), 100, 500),  # in the update
])  # fmt: skip
def test_gradients_are_those_that_exist_at_the_peak(scripted, step, gradients, activations):
    made, anatomy = scripted
    with anatomy.watching(due=True):
        made.step(*step)
    found = anatomy.record()
    assert found.kind_bytes == {
        "weights": 100, "copies": 0, "gradients": gradients, "optimizer": 100, "activations": activations,
        "workspace": 8, "dataset": 1000, "other": 3,
    }  # fmt: skip
    assert found.step_peak_bytes == known(found.kind_bytes) == 1211 + gradients + activations
    forward, behind, update = step
    assert found.phase_bytes == {
        "forward": 211 + forward, "backward": 211 + forward + 100 + behind, "update": 311 + update,
        "capture": None, "probe": None, "evaluation": None,
    }  # fmt: skip


def test_a_gradient_that_comes_after_the_peak_is_not_of_it(scripted):
    made, anatomy = scripted
    freed = made.network.module.weight.register_hook(lambda gradient: made.allocator.free(300))
    with anatomy.watching(due=True):
        made.step(400, 0, 0)
    freed.remove()
    assert anatomy.record().kind_bytes["gradients"] == 0


def test_the_largest_step_that_ran_eagerly_counts_and_a_windows_peak_survives(scripted):
    made, anatomy = scripted
    meter = VramMeter(card(nvml=None), 1000)
    meter.begin_window()
    for forward, replayed in ((50, False), (80, False), (20, False), (9000, True)):
        with anatomy.watching(due=False):  # captured: any eager step is one to read
            made.step(forward, 0, 0, replayed)
    assert meter.window_peak_bytes() == 211 + 80 + 100
    anatomy.reached("evaluation", 70)
    anatomy.reached("evaluation", None)
    made.captured.capture_peak_bytes = 1350
    found = anatomy.record()
    assert found.step_peak_bytes == 1000 + 211 + 80 + 100 and found.kind_bytes["activations"] == 80
    assert (found.phase_bytes["capture"], found.phase_bytes["evaluation"]) == (350, 70)


def test_steps_that_are_not_due_are_left_alone_and_a_failed_one_leaves_no_hook(scripted):
    made, anatomy = scripted
    made.captured.eager_reason = "asked for"
    with anatomy.watching(due=False):
        assert made.on_phase is None
    with pytest.raises(torch.OutOfMemoryError), anatomy.watching(due=True):
        made.on_phase("begin")
        made.on_phase("forward")
        raise torch.OutOfMemoryError("none left")
    assert made.on_phase is None and not made.network.module.weight._backward_hooks
    found = anatomy.record()
    assert found.step_peak_bytes is None and found.phase_bytes["forward"] == 211 and found.phase_bytes["update"] is None
    unknown = {kind for kind, size in found.kind_bytes.items() if size is None}
    assert unknown == {"gradients", "activations", "other"} and found.kind_bytes["weights"] == 100


def test_watching_changes_no_step_and_copies_no_gradient(monkeypatch):
    weights = []
    for watched in (False, True):
        FakeAllocator(monkeypatch)
        made = engine("model=resnet8")
        anatomy = Anatomy(VramMeter(card(CUDA, nvml=None), 0), made, 0)
        generator, seen = torch.Generator().manual_seed(0), []
        given, leaf = [], made.network.module.conv1.weight
        leaf.register_hook(lambda gradient, given=given: given.append(gradient.data_ptr()))
        leaf.register_post_accumulate_grad_hook(lambda leaf, seen=seen: seen.append(leaf.grad.data_ptr()))
        for _ in range(3):
            with anatomy.watching(due=watched):
                made.step(torch.randn(4, 3, 8, 8, generator=generator), torch.arange(4))
        assert seen == given and len(seen) == 3
        weights.append(torch.cat([parameter.flatten() for parameter in made.network.module.parameters()]))
    assert torch.equal(*weights)


def test_a_run_that_counts_tensors_knows_what_its_meter_does():
    made, record = trainer(settings("epochs=1", "method.curvature.every=2"))
    made.train()
    memory = record.memory
    assert memory.step_peak_bytes == known(memory.kind_bytes)
    assert memory.step_peak_bytes == max(e.memory_peak_bytes for e in record.epochs) + record.dataset_bytes
    assert {kind for kind, size in memory.kind_bytes.items() if size is None} == {"workspace", "other"}
    resident = [*made.network.module.parameters(), *made.network.module.buffers()]
    assert memory.kind_bytes["weights"] == sum(tensor.nbytes for tensor in resident)
    assert memory.kind_bytes["optimizer"] == made.engine.state_bytes
    forward, backward, update, *rest = (memory.phase_bytes[phase] for phase in PHASES)
    assert update < forward < backward == memory.step_peak_bytes - record.dataset_bytes and rest == [None] * 3


def test_without_a_meter_nothing_is_made_up():
    made = engine("model=resnet8")
    anatomy = Anatomy(NoMeter("off"), made, 7)
    with anatomy.watching(due=True):
        made.step(torch.randn(4, 3, 8, 8), torch.arange(4))
    found = anatomy.record()
    assert found.step_peak_bytes is None and set(found.phase_bytes.values()) == {None}
    assert {kind for kind, size in found.kind_bytes.items() if size is not None} == set(HELD)
    assert found.kind_bytes["dataset"] == 7


def recorded(**changes) -> RunRecord:
    kinds = dict(
        zip((*HELD, "gradients", "activations", "workspace", "other"), (45e6, 22e6, 45e6, 184e6, 1e7, 2e7, None, 1e6))
    )
    memory = MemoryRecord(
        step_peak_bytes=int(known(kinds)),
        kind_bytes={kind: None if size is None else int(size) for kind, size in kinds.items()},
        phase_bytes=dict.fromkeys(PHASES) | {"forward": 130_000_000, "probe": 160_000_000},
    )
    figures = dict(memory_peak_bytes=143_000_000, probe_peak_bytes=160_000_000, reserved_bytes=400_000_000)
    return run(memory=memory, epochs=[epoch(1), epoch(2, **figures)], **changes)


def test_the_panel_shows_kinds_beside_phases_and_the_whole_run():
    title, *lines = memory_panel("cifar10/resnet18/amp/seed 0", recorded())
    assert title == "cifar10/resnet18/amp/seed 0: VRAM in GB (1e9 bytes)"
    assert all(len(line) < 80 for line in lines) and len({line.find("at a phase") for line in lines}) == 2
    cells = " ".join("\n".join(lines).split())
    for words in (
        "weights 0.0450 forward 0.1300 data set 0.1840", "copies 0.0220 backward n/a allocated 0.5340",
        "workspace n/a", "process (NVML) n/a", "reserved 0.4000", "probe 0.1600", "together 0.1430",
    ):  # fmt: skip
        assert words in cells, (words, cells)


def test_no_panel_where_there_is_nothing_to_show(capsys):
    assert memory_panel("a", recorded(meter="off")) == [] and memory_panel("a", run()) == []
    Reporter().memory("a", recorded())
    assert capsys.readouterr().out == ""


def test_records_from_before_still_load():
    whole = recorded()
    assert RunRecord.model_validate_json(whole.model_dump_json()) == whole
    older = whole.model_dump(exclude={"memory"})
    assert RunRecord.model_validate(older).memory is None
    with pytest.raises(ValueError, match="kind_bytes"):
        RunRecord.model_validate(
            older | {"memory": {"step_peak_bytes": 1, "kind_bytes": {"wieghts": 1}, "phase_bytes": {}}}
        )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("method", ["fp32", "amp"])
@pytest.mark.parametrize("name", ["resnet18", "efficientnet_b0"])
def test_on_a_card_captured_and_eager_runs_tell_the_same(name, method):
    small = [
        "device=cuda", "memory.meter=vram", "dataset.image_size=32", "model.input_size=32", "epochs=2",
        "method.batch.initial=96", "method.batch.max=96", "dataset.train_size=192",
    ]  # fmt: skip
    if method == "amp":
        # Four steps leave running statistics at which an evaluation of EfficientNet leaves FP16's range.
        small.append("method.dtype=bf16")
    found = {}
    for captured in (True, False):
        gc.collect()
        graphs.workspace_bytes(torch.device("cuda", 0))  # frees those of the steps sampled after the run before
        torch.cuda.empty_cache()
        outside = torch.cuda.memory_allocated()
        with torch.cuda.stream(graphs.stream(torch.device("cuda", 0))):
            chosen = settings(*small, f"model={name}", f"method={method}", f"engine.graphs={captured}")
            made, record = trainer(chosen, images(train=192, evaluation=32, side=32))
            made.train()
        memory = found[captured] = record.memory
        assert record.graphs is captured and memory.kind_bytes["workspace"] is not None
        assert known(memory.kind_bytes) == memory.step_peak_bytes
        own = max(e.memory_peak_bytes for e in record.epochs) + record.dataset_bytes
        assert memory.step_peak_bytes == pytest.approx(own, rel=0.03)
        assert 0 <= memory.kind_bytes["other"] - outside < 0.03 * memory.step_peak_bytes
        assert (memory.kind_bytes["copies"] > 0) == (method == "amp")
        phases = memory.phase_bytes
        assert phases["backward"] >= 0.99 * phases["forward"]
        # Beside the gradients of all weights an update needs little: those of copies without dead taps, made whole.
        assert phases["update"] < (1.05 if name == "resnet18" and method == "amp" else 1.0) * phases["backward"]
        assert (phases["capture"] is not None) == captured and phases["probe"] is None
        assert max(phases[phase] for phase in PHASES[:3]) == memory.step_peak_bytes - record.dataset_bytes
        del made
    for phase in ("forward", "backward", "update", "evaluation"):
        assert found[True].phase_bytes[phase] == pytest.approx(found[False].phase_bytes[phase], rel=0.03), phase
    assert found[True].phase_bytes["capture"] == pytest.approx(found[True].phase_bytes["backward"], rel=0.03)
