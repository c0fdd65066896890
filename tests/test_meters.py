from __future__ import annotations

import gc
import os
import sys
import time
import weakref
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from triaccel_bench import graphs
from triaccel_bench.meters import CardState, Clock, NoMeter, Readings, TensorMeter, VramMeter, card_state, open_meter

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
GIB = 2**30

needs_card = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def card(device: torch.device = CUDA, nvml: object | None = "card", nvml_reason: str | None = None) -> SimpleNamespace:
    return SimpleNamespace(device=device, nvml=nvml, nvml_reason=nvml_reason)


class FakeAllocator:
    """torch.cuda's memory counters over a card on which others hold memory too."""

    def __init__(self, monkeypatch, total: int = 16 * GIB, others: int = 0) -> None:
        self.allocated = self.peak = self.reserved = 0
        for name, function in {
            "memory_stats_as_nested_dict": lambda device: {
                "allocated_bytes": {"all": {"current": self.allocated, "peak": self.peak}}
            },
            "memory_reserved": lambda device: self.reserved,
            "reset_peak_memory_stats": self._reset,
            "mem_get_info": lambda device: (total - others - self.reserved, total),
        }.items():
            monkeypatch.setattr(torch.cuda, name, function)

    def _reset(self, device: torch.device) -> None:
        self.peak = self.allocated

    def allocate(self, size: int) -> None:
        self.allocated += size
        self.peak = max(self.peak, self.allocated)
        self.reserved = max(self.reserved, self.allocated)

    def free(self, size: int) -> None:
        self.allocated -= size


def install_pynvml(
    monkeypatch, used: int, processes: list[tuple[int, int | None]], driver_reserved: int = 0
) -> ModuleType:
    module = ModuleType("pynvml")
    module.NVMLError = type("NVMLError", (Exception,), {})
    module.nvmlMemory_v2 = 2
    module.NVML_CLOCK_SM, module.NVML_TEMPERATURE_GPU = "sm", "gpu"
    module.nvmlDeviceGetMemoryInfo = lambda handle, version=None: SimpleNamespace(
        used=used if version == 2 else used + driver_reserved
    )
    module.nvmlDeviceGetComputeRunningProcesses = lambda handle: [
        SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in processes
    ]
    module.nvmlDeviceGetClockInfo = lambda handle, which: {"sm": 1410}[which]
    module.nvmlDeviceGetTemperature = lambda handle, which: {"gpu": 55}[which]
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def test_the_clock_waits_for_the_device_before_it_looks():
    calls: list[str] = []
    clock = Clock(CPU, now=lambda: calls.append("now") or 7.0, synchronise=lambda: calls.append("wait"))
    assert clock.read() == 7.0
    clock.read()
    assert calls == ["wait", "now", "wait", "now"]


def test_queued_work_is_inside_the_seconds():
    seconds, queued = 0.0, 3.0

    def wait() -> None:
        nonlocal seconds, queued
        seconds, queued = seconds + queued, 0.0

    clock = Clock(CUDA, now=lambda: seconds, synchronise=wait)
    started = clock.read()
    queued = 5.0
    assert clock.read() - started == 5.0


def test_the_clock_waits_for_its_own_card_and_a_cpu_for_none(monkeypatch):
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    before = time.perf_counter()
    assert before <= Clock(CPU).read() <= time.perf_counter()
    assert waited == []
    Clock(torch.device("cuda", 1)).read()
    assert waited == [torch.device("cuda", 1)]


def test_a_shared_card_does_not_count_as_own_use_but_limits_growth(monkeypatch):
    own, dataset, others, driver = int(0.30 * GIB), int(0.15 * GIB), 6 * GIB, int(0.9 * GIB)
    allocator = FakeAllocator(monkeypatch, total=16 * GIB, others=others + driver)
    install_pynvml(monkeypatch, used=own + dataset + others, processes=[(1, others)], driver_reserved=driver)
    meter = VramMeter(card(), dataset_bytes=dataset)
    allocator.allocate(dataset)
    meter.begin_window()
    allocator.allocate(own)
    allocator.free(own // 2)

    assert meter.window_peak_bytes() == own
    readings = meter.readings()
    assert readings.reserved_bytes == own + dataset
    assert readings.device_used_bytes == own + dataset + others
    assert meter.headroom_bytes(own) == 16 * GIB - others - driver - own - dataset


def test_headroom_is_what_the_peak_can_grow_by_and_not_what_is_free_between_steps(monkeypatch):
    allocator = FakeAllocator(monkeypatch, total=1000, others=300)
    meter = VramMeter(card(nvml=None), dataset_bytes=100)
    allocator.allocate(100)
    meter.begin_window()
    allocator.allocate(450)
    allocator.free(400)
    assert meter.window_peak_bytes() == 450
    assert meter.headroom_bytes(450) == 150
    assert NoMeter("off").headroom_bytes(450) is None


def test_a_window_forgets_the_peak_before_it(monkeypatch):
    allocator = FakeAllocator(monkeypatch)
    meter = VramMeter(card(nvml=None), dataset_bytes=0)
    allocator.allocate(900)
    allocator.free(800)
    meter.begin_window()
    assert meter.window_peak_bytes() == 100
    allocator.allocate(50)
    allocator.free(50)
    assert meter.window_peak_bytes() == 150


def test_a_replay_counts_with_what_is_allocated_beside_it(monkeypatch):
    """The allocator sees nothing of a replay; weights that came after the capture count all the same."""
    allocator = FakeAllocator(monkeypatch)
    meter = VramMeter(card(nvml=None), dataset_bytes=100)
    allocator.allocate(600)
    meter.begin_window()
    assert meter.window_peak_bytes(replayed_bytes=250) == 750
    allocator.allocate(400)
    allocator.free(350)
    assert meter.window_peak_bytes(replayed_bytes=250) == 900
    assert meter.window_peak_bytes(replayed_bytes=400) == 950


def test_a_capture_does_not_hide_the_peak_before_it(monkeypatch):
    """A capture resets torch's counter to learn its own peak; the window keeps what it had seen."""
    allocator = FakeAllocator(monkeypatch)
    meter = VramMeter(card(nvml=None), dataset_bytes=0)
    meter.begin_window()
    allocator.allocate(900)
    allocator.free(800)
    graphs.begin_interval(CUDA)
    assert meter.window_peak_bytes() == 900
    meter.begin_window()
    assert meter.window_peak_bytes() == 100


@pytest.mark.parametrize("order", ["AB", "BA", "A", "B"])
def test_the_peak_of_a_job_does_not_depend_on_the_jobs_before_it(monkeypatch, order):
    allocator = FakeAllocator(monkeypatch)
    dataset, held, step = {"A": 40, "B": 10}, {"A": 300, "B": 20}, {"A": 700, "B": 30}
    peaks = {}
    for job in order:
        allocator.allocate(dataset[job])
        meter = open_meter("vram", card(nvml=None), dataset[job], nn.Identity())
        meter.begin_window()
        allocator.allocate(held[job])
        allocator.allocate(step[job])
        allocator.free(step[job])
        peaks[job] = meter.window_peak_bytes()
        allocator.free(held[job] + dataset[job])
    assert peaks == {job: held[job] + step[job] for job in order}


@pytest.mark.parametrize(
    ("processes", "expected"),
    [
        ([(1, 9 * GIB), (os.getpid(), 2 * GIB)], 2 * GIB),
        ([(1, 9 * GIB)], None),
        ([(os.getpid(), None)], None),
        ([(os.getpid(), 10)], None),
        ([], None),
    ],
    ids=["told", "other numbers in a container", "not told", "another process under our number", "no process"],
)
def test_the_process_figure_is_this_processs_or_none(monkeypatch, processes, expected):
    FakeAllocator(monkeypatch).allocate(GIB)
    install_pynvml(monkeypatch, used=11 * GIB, processes=processes)
    assert VramMeter(card(), 0).readings().process_bytes == expected


def test_without_nvml_the_allocator_still_measures_and_one_line_says_why(monkeypatch):
    allocator = FakeAllocator(monkeypatch)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    meter = open_meter("vram", card(nvml=None, nvml_reason="NVML Shared Library Not Found"), 0, nn.Identity())
    allocator.allocate(500)
    assert meter.name == "vram" and meter.reason == "NVML off: NVML Shared Library Not Found"
    assert meter.window_peak_bytes() == 500
    assert meter.readings() == Readings(reserved_bytes=500)
    assert card_state(card(nvml=None)) == CardState(None, None)


def test_a_question_that_the_card_does_not_answer_is_none(monkeypatch):
    FakeAllocator(monkeypatch)
    pynvml = install_pynvml(monkeypatch, used=7, processes=[])
    assert VramMeter(card(), 0).reason is None
    assert card_state(card()) == CardState(sm_clock_mhz=1410, temperature_celsius=55)

    def unsupported(*_, **__):
        raise pynvml.NVMLError("Not Supported")

    for name in ("GetMemoryInfo", "GetComputeRunningProcesses", "GetTemperature"):
        monkeypatch.setattr(pynvml, f"nvmlDevice{name}", unsupported)
    readings = VramMeter(card(), 0).readings()
    assert (readings.process_bytes, readings.device_used_bytes) == (None, None)
    assert card_state(card()) == CardState(sm_clock_mhz=1410, temperature_celsius=None)


@pytest.mark.parametrize("kind", ["vram", "tensors"])
def test_on_a_cpu_no_cuda_counter_is_touched(monkeypatch, kind):
    def refuse(*_):
        raise AssertionError("a CUDA counter was touched")

    for name in (
        "reset_peak_memory_stats",
        "memory_stats_as_nested_dict",
        "memory_reserved",
        "mem_get_info",
        "synchronize",
    ):
        monkeypatch.setattr(torch.cuda, name, refuse)
    model = nn.Linear(4, 2)
    meter = open_meter(kind, card(CPU, nvml=None), 0, model)
    meter.begin_window()
    with meter.recording():
        model(torch.ones(3, 4)).sum().backward()
    Clock(CPU).read()
    assert meter.readings() == Readings()
    assert (meter.window_peak_bytes() is None) == (kind == "vram")


def test_no_card_is_one_line_and_no_number():
    meter = open_meter("vram", card(CPU, nvml=None), 123, nn.Identity())
    assert isinstance(meter, NoMeter)
    assert (meter.name, meter.reason) == ("off", "VRAM monitor off: no CUDA device")
    assert meter.window_peak_bytes() is None


def test_live_tensors_of_a_linear_layer_are_counted_by_hand():
    layer = nn.Linear(5, 3)
    layer.bias.requires_grad_(False)
    meter = TensorMeter(layer, state_bytes=1000)
    assert (meter.name, meter.reason, meter.window_peak_bytes()) == ("tensors", None, None)
    with meter.recording():
        layer(torch.ones(7, 5, requires_grad=True)).square().sum().backward()
    weights, weight_gradient = (15 + 3) * 4, 15 * 4
    saved = 7 * 5 * 4 + 7 * 3 * 4  # the input, and the output for the square; the weight, saved too, is counted above
    assert meter.window_peak_bytes() == weights + weight_gradient + 1000 + saved


def test_a_storage_saved_twice_counts_once():
    meter = TensorMeter(nn.Identity())
    x = torch.ones(64, requires_grad=True)
    with meter.recording():
        y = x * 1.5
        (y.square().sum() + y.view(8, 8).exp().sum() + y[:32].square().sum()).backward()
    assert meter.window_peak_bytes() == 2 * 64 * 4  # y, under all its views, and the result of exp


def small_network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(144, 10))


def run_step(meter: TensorMeter, network: nn.Module, batch: int) -> None:
    with meter.recording():
        loss = F.cross_entropy(network(torch.randn(batch, 3, 8, 8)), torch.zeros(batch, dtype=torch.long))
        loss.backward()


def test_the_count_is_deterministic_and_grows_with_the_batch():
    network = small_network()
    meter = TensorMeter(network, state_bytes=lambda: sum(p.nbytes for p in network.parameters()))
    peaks = []
    for batch in (4, 8, 16, 8, 4):
        meter.begin_window()
        run_step(meter, network, batch)
        peaks.append(meter.window_peak_bytes())
    p4, p8, p16 = peaks[:3]
    assert peaks == [p4, p8, p16, p8, p4]
    assert p16 - p8 == 2 * (p8 - p4) > 0


def test_a_window_holds_its_largest_recorded_step_and_nothing_of_the_window_before():
    network = small_network()
    meter = TensorMeter(network)
    run_step(meter, network, 4)
    small = meter.window_peak_bytes()
    meter.begin_window()
    assert meter.window_peak_bytes() is None
    run_step(meter, network, 16)
    large = meter.window_peak_bytes()
    run_step(meter, network, 4)
    assert meter.window_peak_bytes() == large > small
    meter.begin_window()
    run_step(meter, network, 4)
    assert meter.window_peak_bytes() == small


def test_steps_in_turn_within_one_recording_do_not_add_up():
    network = small_network()
    meter = TensorMeter(network)
    run_step(meter, network, 8)
    once = meter.window_peak_bytes()
    meter.begin_window()
    with meter.recording():
        for _ in range(3):
            F.cross_entropy(network(torch.randn(8, 3, 8, 8)), torch.zeros(8, dtype=torch.long)).backward()
    assert meter.window_peak_bytes() == once


def test_double_backward_sees_the_same_graph():
    curvatures = []
    for meter in (NoMeter("off"), TensorMeter(nn.Identity())):
        x = torch.tensor(0.5, requires_grad=True)
        with meter.recording():
            (slope,) = torch.autograd.grad(x.exp() * x.tanh(), x, create_graph=True)
        curvatures.append(torch.autograd.grad(slope, x)[0])
    assert torch.equal(*curvatures)


def test_recording_changes_no_gradient():
    gradients = []
    for recorded in (False, True):
        torch.manual_seed(0)
        network = small_network()
        torch.manual_seed(1)
        run_step(TensorMeter(network) if recorded else NoMeter("off"), network, 8)
        gradients.append([p.grad for p in network.parameters()])
    assert all(torch.equal(plain, watched) for plain, watched in zip(*gradients))


def test_a_step_that_fails_leaves_no_reading_and_keeps_no_tensor():
    layer = nn.Linear(5, 3)
    meter = TensorMeter(layer)

    def step() -> None:
        nonlocal activation
        saved = layer(torch.ones(7, 5)).exp()
        activation = weakref.ref(saved)
        raise torch.OutOfMemoryError("injected")

    activation = None
    gc.disable()  # a reference cycle would hold the memory until some later collection
    try:
        with meter.recording():
            step()
    except torch.OutOfMemoryError:
        pass
    finally:
        gc.enable()
    assert activation() is None
    assert meter.window_peak_bytes() is None


class TestOnACard:
    pytestmark = needs_card

    def test_peak_and_order_of_jobs(self):
        torch.cuda.init()
        peaks: dict[tuple[str, str], int] = {}
        for order in ("AB", "BA"):
            for job in order:
                meter = VramMeter(card(nvml=None), dataset_bytes=0)
                held_before = torch.cuda.memory_allocated(CUDA)
                meter.begin_window()
                tensor = torch.empty({"A": 64, "B": 8}[job] * 2**20, dtype=torch.uint8, device=CUDA)
                peaks[order, job] = meter.window_peak_bytes() - held_before
                del tensor
        assert peaks["AB", "A"] == peaks["BA", "A"] == 64 * 2**20
        assert peaks["AB", "B"] == peaks["BA", "B"] == 8 * 2**20

    def test_the_clock_waits_for_the_device(self):
        matrix = torch.randn(4096, 4096, device=CUDA)
        clock = Clock(CUDA)
        started, stopped = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for _ in range(2):  # the first round pays for the library's start-up
            before = clock.read()
            started.record()
            for _ in range(60):
                torch.mm(matrix, matrix)
            stopped.record()
            seconds = clock.read() - before
        assert seconds >= 0.98 * started.elapsed_time(stopped) / 1000

    def test_readings_of_a_real_card(self):
        tensor = torch.empty(64 * 2**20, dtype=torch.uint8, device=CUDA)
        meter = VramMeter(card(nvml=None), dataset_bytes=tensor.nbytes)
        readings = meter.readings()
        assert readings.reserved_bytes >= tensor.nbytes
        assert 0 < meter.headroom_bytes(0) < torch.cuda.get_device_properties(0).total_memory
