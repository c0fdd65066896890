from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import pytest
import torch

from triaccel_bench import hardware
from triaccel_bench.hardware import DeviceError, Hardware, executed_dtype, inspect

EVERY_ARCH = ["sm_60", "sm_70", "sm_75", "sm_80", "sm_90"]


@dataclass(frozen=True)
class FakeCard:
    """What torch tells of a card; ``uuid`` is bare, as in torch."""

    name: str
    major: int
    minor: int
    uuid: str = "aaaa"
    total_memory: int = 16 * 2**30
    pci_domain_id: int = 0
    pci_bus_id: int = 0x3B
    pci_device_id: int = 0


T4 = FakeCard("Tesla T4", 7, 5)
P100 = FakeCard("Tesla P100-PCIE-16GB", 6, 0)
A100 = FakeCard("NVIDIA A100", 8, 0)


@pytest.fixture
def machine(monkeypatch):
    """Install cards into a machine whose CUDA obeys CUDA_VISIBLE_DEVICES, without NVML unless a test adds it."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", None)

    def install(*cards: FakeCard, arch_list: list[str] = EVERY_ARCH, self_test: str | None = None) -> None:
        def visible() -> list[FakeCard]:
            value = os.environ.get("CUDA_VISIBLE_DEVICES")
            if value is None:
                return list(cards)
            names = [name for name in value.split(",") if name]
            by_name = {str(i): c for i, c in enumerate(cards)} | {f"GPU-{c.uuid}": c for c in cards}
            return [by_name[name] for name in names]

        monkeypatch.setattr(hardware, "cuda_device_count", lambda: len(visible()))
        monkeypatch.setattr(hardware, "cuda_properties", lambda index: visible()[index])
        monkeypatch.setattr(hardware, "cuda_arch_list", lambda: arch_list)
        monkeypatch.setattr(hardware, "triton_self_test", lambda device: self_test)

    return install


def fake_pynvml(by_uuid: dict[str, object], by_address: dict[str, object] | None = None, init_error: str | None = None):
    module = ModuleType("pynvml")

    class NVMLError(Exception):
        pass

    def init() -> None:
        if init_error is not None:
            raise NVMLError(init_error)

    def find(table: dict[str, object]):
        def lookup(key: str) -> object:
            if key not in table:
                raise NVMLError("Not Found")
            return table[key]

        return lookup

    module.NVMLError = NVMLError
    module.nvmlInit = init
    module.nvmlSystemGetDriverVersion = lambda: "570.00"
    module.nvmlDeviceGetHandleByUUID = find(by_uuid)
    module.nvmlDeviceGetHandleByPciBusId = find(by_address or {})
    return module


def precision(substitute: str = "fp16", cpu_executes: str = "fp32") -> SimpleNamespace:
    return SimpleNamespace(bf16_substitute=substitute, cpu_executes=cpu_executes)


@pytest.mark.parametrize(
    ("card", "native"),
    [(P100, False), (FakeCard("V100", 7, 0), False), (T4, False), (A100, True), (FakeCard("L4", 8, 9), True)],
)
def test_emulated_bf16_does_not_count_as_native(machine, monkeypatch, card, native):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_: True)
    machine(card)

    found = inspect("cuda", "auto")

    assert found.bf16_native is native
    assert len(found.warnings) == (0 if native else 1)
    if not native:
        assert card.name in found.warnings[0] and "method.precision.bf16_substitute" in found.warnings[0]
    assert executed_dtype("bf16", found, precision("fp16")) == ("bf16" if native else "fp16")
    assert executed_dtype("bf16", found, precision("fp32")) == ("bf16" if native else "fp32")
    assert executed_dtype("bf16", found, precision("emulate")) == "bf16"
    assert executed_dtype("fp16", found, precision("fp32")) == "fp16"
    assert executed_dtype("fp32", found, precision("fp16")) == "fp32"


@pytest.mark.parametrize("requested", ["fp16", "bf16", "fp32"])
def test_a_cpu_executes_fp32_unless_told_otherwise(requested):
    cpu = inspect("cpu", "auto")
    assert executed_dtype(requested, cpu, precision()) == "fp32"
    assert executed_dtype(requested, cpu, precision(cpu_executes="requested")) == requested


def test_a_card_is_described_as_it_is(machine):
    machine(T4, A100)
    found = inspect("cuda:1", "auto")
    assert found.device == torch.device("cuda", 1)
    assert (found.name, found.uuid) == ("NVIDIA A100", "GPU-aaaa")
    assert (found.capability, found.total_bytes) == ((8, 0), 16 * 2**30)
    assert inspect("cuda", "auto").device == torch.device("cuda", 0)


def test_a_card_that_torch_has_no_code_for_is_refused_with_a_way_out(machine):
    machine(P100, arch_list=["sm_70", "sm_75"], self_test="the refusal must come before any kernel")
    with pytest.raises(DeviceError) as refusal:
        inspect("cuda", "triton")
    for part in ("Tesla P100-PCIE-16GB", "sm_60", "sm_70, sm_75", "CUDA 12.6", "/whl/cu126", "device=cpu"):
        assert part in str(refusal.value)


@pytest.mark.parametrize(
    ("capability", "arch_list", "runs"),
    [
        ((6, 1), ["sm_60"], True),
        ((7, 5), ["sm_70"], True),
        ((7, 0), ["sm_75"], False),
        ((8, 0), ["sm_86"], False),
        ((9, 0), ["sm_80"], False),
        ((10, 0), ["sm_90", "compute_90"], True),
        ((9, 0), ["compute_100"], False),
        ((12, 1), ["sm_120"], True),
        ((9, 0), ["sm_90a"], True),
        ((10, 3), ["sm_100a"], False),
        ((10, 0), ["compute_90a"], False),
        ((10, 3), ["sm_100f"], True),
        ((12, 0), ["compute_100f"], False),
        ((8, 0), ["gfx90a"], False),
        ((8, 0), [], True),
    ],
)
def test_which_builds_run_on_which_card(machine, capability, arch_list, runs):
    machine(FakeCard("card", *capability), arch_list=arch_list)
    if runs:
        assert inspect("cuda", "torch").capability == capability
    else:
        with pytest.raises(DeviceError, match="card is sm_"):
            inspect("cuda", "torch")


def test_a_device_that_is_not_there_is_refused(machine, monkeypatch):
    machine(T4)
    with pytest.raises(DeviceError, match="device=cuda:1: .* got 1 CUDA device; use a number below 1"):
        inspect("cuda:1", "auto")

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(DeviceError, match="got 0 CUDA devices under CUDA_VISIBLE_DEVICES=''.*device=cpu"):
        inspect("cuda", "auto")


@pytest.mark.parametrize("kind", [RuntimeError, torch.cuda.DeferredCudaCallError])
def test_a_card_that_does_not_start_is_refused_without_a_traceback(machine, monkeypatch, kind):
    def fail(index: int):
        raise kind("CUDA error: device busy\nCompile with TORCH_USE_CUDA_DSA")

    machine(T4)
    monkeypatch.setattr(hardware, "cuda_properties", fail)
    with pytest.raises(DeviceError, match=r"^device=cuda: .* \(CUDA error: device busy\); use device=cpu$"):
        inspect("cuda", "auto")


def test_kernels_follow_what_the_device_can_run(machine, monkeypatch):
    machine(A100)
    passed = inspect("cuda", "auto")
    assert (passed.kernels, passed.kernels_reason) == ("triton", "Triton's self-test passed on NVIDIA A100")
    assert inspect("cuda", "triton").kernels == "triton"
    asked = inspect("cuda", "torch")
    assert (asked.kernels, asked.kernels_reason) == ("torch", "asked for by kernels=torch")

    machine(A100, self_test="the compiler is missing")
    assert_falls_back("the compiler is missing")

    machine(P100)
    assert_falls_back("Tesla P100-PCIE-16GB is sm_60 and Triton needs sm_70 or later")

    machine(A100)
    monkeypatch.setattr(hardware, "triton", None)
    monkeypatch.setattr(hardware, "_triton_import_error", ImportError("No module named 'triton'"), raising=False)
    assert_falls_back("Triton cannot be imported (No module named 'triton')")


def assert_falls_back(reason: str) -> None:
    found = inspect("cuda", "auto")
    assert (found.kernels, found.kernels_reason) == ("torch", reason)
    with pytest.raises(DeviceError) as refusal:
        inspect("cuda", "triton")
    assert reason in str(refusal.value) and "use kernels=auto" in str(refusal.value)


def test_a_cpu_needs_neither_triton_nor_nvml(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_pynvml({}, init_error="NVML Shared Library Not Found"))
    found = inspect("cpu", "auto")
    assert (found.kernels, found.kernels_reason) == ("torch", "no CUDA device: Triton kernels run on GPUs only")
    assert found.device == torch.device("cpu") and found.name
    assert (found.nvml, found.nvml_reason, found.uuid, found.total_bytes) == (None, None, None, None)
    assert found.warnings == ()
    with pytest.raises(DeviceError, match="kernels=triton and device=cpu"):
        inspect("cpu", "triton")


def test_the_module_imports_where_triton_does_not(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    spec = importlib.util.spec_from_file_location("hardware_without_triton", hardware.__file__)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)

    assert module.inspect("cpu", "auto").kernels == "torch"
    monkeypatch.setattr(module, "cuda_device_count", lambda: 1)
    monkeypatch.setattr(module, "cuda_properties", lambda index: A100)
    monkeypatch.setattr(module, "cuda_arch_list", lambda: EVERY_ARCH)
    assert module.inspect("cuda", "auto").kernels_reason.startswith("Triton cannot be imported (")


def test_a_self_test_that_cannot_run_says_so_in_one_line():
    reason = hardware.triton_self_test(torch.device("cpu"))  # neither a driver nor a card can launch on this
    assert reason.startswith("Triton's self-test failed (") and "\n" not in reason


@pytest.mark.parametrize(("kernel_adds", "reason"), [(1.0, None), (0.0, "Triton's self-test returned 41.0 for 41 + 1")])
def test_a_self_test_that_runs_is_judged_by_its_value(monkeypatch, kernel_adds, reason):
    class Kernel:
        def __getitem__(self, grid):
            return lambda value: value.add_(kernel_adds)

    monkeypatch.setattr(hardware, "_increment_kernel", Kernel())
    assert hardware.triton_self_test(torch.device("cpu")) == reason


def test_the_self_test_kernel_itself_is_right():
    pytest.importorskip("triton")
    code = "import torch; from triaccel_bench.hardware import triton_self_test as t; print(t(torch.device('cpu')))"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert ran.stdout.strip() == "None", ran.stderr


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, "card A"), ("1", "card B"), ("1,0", "card B"), ("GPU-bbbb", "card B"), ("0,1", "card A")],
)
def test_nvml_watches_the_card_that_cuda_uses(machine, monkeypatch, visible, expected):
    a, b = FakeCard("A", 8, 0, uuid="aaaa"), FakeCard("B", 8, 0, uuid="bbbb")
    machine(a, b)
    monkeypatch.setitem(sys.modules, "pynvml", fake_pynvml({"GPU-aaaa": "card A", "GPU-bbbb": "card B"}))
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    found = inspect("cuda:0", "auto")

    assert (found.nvml, found.nvml_reason, found.driver) == (expected, None, "570.00")
    assert found.uuid == f"GPU-{expected[-1].lower() * 4}"


def test_nvml_finds_a_card_by_its_address_where_its_uuid_is_unknown(machine, monkeypatch):
    machine(A100)
    monkeypatch.setitem(sys.modules, "pynvml", fake_pynvml({}, {"00000000:3B:00.0": "by address"}))
    assert inspect("cuda", "auto").nvml == "by address"


def test_a_slice_of_a_card_is_not_taken_for_the_whole_card(machine, monkeypatch):
    machine(A100)
    monkeypatch.setitem(sys.modules, "pynvml", fake_pynvml({"MIG-aaaa": "slice"}, {"00000000:3B:00.0": "whole card"}))
    assert inspect("cuda", "auto").nvml == "slice"


@pytest.mark.parametrize(
    ("pynvml", "reason"),
    [
        (None, "pynvml cannot be imported (import of pynvml halted; None in sys.modules)"),
        (fake_pynvml({}, init_error="NVML Shared Library Not Found"), "NVML Shared Library Not Found"),
        (fake_pynvml({}), "Not Found"),
    ],
)
def test_a_missing_nvml_is_a_reason_and_no_error(machine, monkeypatch, pynvml, reason):
    machine(A100)
    monkeypatch.setitem(sys.modules, "pynvml", pynvml)
    found = inspect("cuda", "auto")
    assert (found.nvml, found.nvml_reason) == (None, reason)


def test_a_card_whose_address_torch_does_not_tell_is_no_error(machine, monkeypatch):
    machine(SimpleNamespace(name="A100", major=8, minor=0, uuid="cccc", total_memory=1))
    monkeypatch.setitem(sys.modules, "pynvml", fake_pynvml({}))
    assert inspect("cuda", "auto").nvml_reason == "Not Found"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_card():
    found: Hardware = inspect("cuda", "auto")
    assert found.capability == torch.cuda.get_device_capability(0)
    assert found.bf16_native is torch.cuda.is_bf16_supported(including_emulation=False)
    assert found.kernels == ("triton" if found.capability >= (7, 0) else "torch"), found.kernels_reason
    if found.nvml is not None:
        import pynvml

        assert pynvml.nvmlDeviceGetUUID(found.nvml) == found.uuid
