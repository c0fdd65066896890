"""What this device can truly do: native dtypes, kernels that run on it, and the NVML handle of the same card.

Everything that asks torch, Triton, NVML or the operating system stands in a small function of
its own at the end of the file, so that a test can put any card in their place.
"""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from triaccel_bench.settings import Dtype, PrecisionSettings

try:
    import triton
    import triton.language as tl
except Exception as error:  # a broken installation fails in many ways, and the torch path needs none of it
    triton, _triton_import_error = None, error

BF16_NATIVE_FROM = (8, 0)
FP16_UNITS_FROM = (7, 0)
TRITON_FROM = (7, 0)

_WHEELS = "https://download.pytorch.org/whl/"


class DeviceError(RuntimeError):
    """The device or the kernels asked for cannot be used here; the message says why and what to do."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One device as measured, not as advertised.

    ``device`` always carries its index on CUDA. ``kernels`` is the backend in force.
    ``nvml`` is a handle for ``pynvml``, or None, and then ``nvml_reason`` says why (but for a
    CPU, where NVML is not asked). What a card does not tell, or a CPU does not have, is None.
    """

    device: torch.device
    name: str
    uuid: str | None = None
    capability: tuple[int, int] | None = None
    total_bytes: int | None = None
    bf16_native: bool = False
    fp16_units: bool = False
    """Whether there are matrix units for FP16; without them FP16 saves memory, and perhaps no time."""
    kernels: Literal["triton", "torch"]
    kernels_reason: str
    nvml: Any | None = None
    nvml_reason: str | None = None
    driver: str | None = None
    warnings: tuple[str, ...] = ()


def inspect(device: str, kernels: str) -> Hardware:
    """Look at ``device`` ("cpu", "cuda" or "cuda:N"; "cuda" is "cuda:0") and settle which ``kernels`` it runs.

    ``kernels`` is "auto" (Triton where it passes a self-test here, else torch), "triton" or "torch".

    Raises:
        DeviceError: there is no such device, this torch build has no code for it, or
            ``kernels`` is "triton" and Triton does not run on it.
    """
    if device == "cpu":
        return _inspect_cpu(kernels)
    index = torch.device(device).index or 0
    if index >= cuda_device_count():
        raise DeviceError(_no_such_device(device, cuda_device_count()))
    try:
        properties = cuda_properties(index)
    except (RuntimeError, torch.cuda.DeferredCudaCallError) as error:
        raise DeviceError(f"device={device}: CUDA does not start ({_one_line(error)}); use device=cpu") from None
    name, capability = properties.name, (properties.major, properties.minor)
    _require_runnable(name, capability, cuda_arch_list())
    backend, kernels_reason = _choose_kernels(kernels, torch.device("cuda", index), name, capability)
    nvml, nvml_reason, driver = open_nvml(properties)
    bf16_native = capability >= BF16_NATIVE_FROM
    emulated = f"{name} ({_sm(capability)}) has no native BF16: method.precision.bf16_substitute says what runs instead"
    return Hardware(
        device=torch.device("cuda", index),
        name=name,
        uuid=f"GPU-{properties.uuid}",
        capability=capability,
        total_bytes=properties.total_memory,
        bf16_native=bf16_native,
        fp16_units=capability >= FP16_UNITS_FROM,
        kernels=backend,
        kernels_reason=kernels_reason,
        nvml=nvml,
        nvml_reason=nvml_reason,
        driver=driver,
        warnings=() if bf16_native else (emulated,),
    )


def executed_dtype(requested: Dtype, hardware: Hardware, precision: PrecisionSettings) -> Dtype:
    """The dtype in which a layer that asks for ``requested`` runs on this device.

    A CPU executes FP32 unless ``precision.cpu_executes`` is "requested". BF16 where it is not
    native becomes ``precision.bf16_substitute``; torch's own support query is of no use here,
    since it counts emulation as support.
    """
    if hardware.device.type == "cpu":
        return requested if precision.cpu_executes == "requested" else "fp32"
    if requested == "bf16" and not hardware.bf16_native and precision.bf16_substitute != "emulate":
        return precision.bf16_substitute
    return requested


def kernels_for(hardware: Hardware, precision: PrecisionSettings) -> Literal["triton", "torch"]:
    """The backend of a run: torch where BF16 is emulated, of which Triton's compiler knows nothing on those cards."""
    emulated = hardware.device.type == "cuda" and not hardware.bf16_native and precision.bf16_substitute == "emulate"
    return "torch" if emulated else hardware.kernels


def _inspect_cpu(kernels: str) -> Hardware:
    reason = "no CUDA device: Triton kernels run on GPUs only"
    if kernels == "triton":
        raise DeviceError(f"kernels=triton and device=cpu: {reason}; use kernels=auto")
    return Hardware(device=torch.device("cpu"), name=cpu_name(), kernels="torch", kernels_reason=reason)


def _no_such_device(device: str, count: int) -> str:
    got = f"{count} CUDA device{'' if count == 1 else 's'}"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        got += f" under CUDA_VISIBLE_DEVICES={visible!r}"
    remedy = f"use a number below {count}"
    if count == 0:
        reason, remedy = _why_no_cuda(visible)
        got += f" ({reason})" if reason else ""
    return f"device={device}: expected that CUDA device, got {got}; {remedy}"


def _why_no_cuda(visible: str | None) -> tuple[str | None, str]:
    """The reason, as far as it can be known, and what to do."""
    if torch.version.cuda is None:
        reason = f"torch {torch.__version__} is built without CUDA"
        return reason, f"install a build for CUDA ({_WHEELS}cu126 suits most drivers), or use device=cpu"
    supported, fault = driver_cuda()
    if fault is not None:
        remedy = "install NVIDIA's driver or start the container with its GPUs, so that nvidia-smi lists the card"
        return f"no driver answers: {fault}", f"{remedy}, or use device=cpu"
    if supported is not None and supported[0] < int(torch.version.cuda.split(".")[0]):
        reason = (
            f"the driver supports CUDA up to {supported[0]}.{supported[1]}, this torch build is for "
            f"{torch.version.cuda}"
        )
        older = {12: f", install a build for CUDA 12.6 ({_WHEELS}cu126)", 11: f", install one of {_WHEELS}cu118"}
        return reason, f"update the driver{older.get(supported[0], '')}, or use device=cpu"
    if visible is not None:
        return None, "name a card of nvidia-smi in CUDA_VISIBLE_DEVICES or unset it, or use device=cpu"
    return None, "check the driver with nvidia-smi, or use device=cpu"


def _require_runnable(name: str, capability: tuple[int, int], arch_list: list[str]) -> None:
    if not arch_list or any(_runs(arch, capability) for arch in arch_list):
        return
    raise DeviceError(
        f"{name} is {_sm(capability)}, and this torch build (torch {torch.__version__}, CUDA {torch.version.cuda}) has "
        f"code for {', '.join(arch_list)} only, so its first operation would fail; {_build_for(capability)}"
    )


def _build_for(capability: tuple[int, int]) -> str:
    """Which of PyTorch's builds have code for a card, as a remedy."""
    if capability < (5, 0):
        return f"no build of PyTorch 2.6 or later covers {_sm(capability)}: use another card, or device=cpu"
    if capability < (7, 5):
        # Builds for later CUDA have dropped these cards.
        cuda, folder = f"12.6, which still covers {_sm(capability)}", "cu126"
    elif capability < (10, 0):
        cuda, folder = "12.6 or later", "cu126"
    elif (11, 0) <= capability < (12, 0):
        cuda, folder = "13.0 or later", "cu130"
    else:
        cuda, folder = "12.8 or later", "cu128"
    return f"install a build for CUDA {cuda} ({_WHEELS}{folder}), or use device=cpu"


def _runs(arch: str, capability: tuple[int, int]) -> bool:
    """Machine code (sm_XY) runs on its major version from its minor upwards, PTX (compute_XY) on all that came later.

    The suffix "a" binds either to exactly the capability that it names, "f" to the major version.
    """
    parts = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", arch)
    if parts is None:
        return False
    kind, suffix, built = parts[1], parts[4], (int(parts[2]), int(parts[3]))
    if suffix == "a":
        return built == capability
    return built <= capability and (built[0] == capability[0] or (kind == "compute" and not suffix))


def _choose_kernels(
    kernels: str, device: torch.device, name: str, capability: tuple[int, int]
) -> tuple[Literal["triton", "torch"], str]:
    if kernels == "torch":
        return "torch", "asked for by kernels=torch"
    if triton is None:
        obstacle = f"Triton cannot be imported ({_one_line(_triton_import_error)})"
    elif capability < TRITON_FROM:
        obstacle = f"{name} is {_sm(capability)} and Triton needs {_sm(TRITON_FROM)} or later"
    else:
        obstacle = triton_self_test(device)
    if obstacle is None:
        return "triton", f"Triton's self-test passed on {name}"
    if kernels == "triton":
        raise DeviceError(f"kernels=triton: expected Triton to run on {device}, but {obstacle}; use kernels=auto")
    return "torch", obstacle


def _sm(capability: tuple[int, int]) -> str:
    return "sm_{}{}".format(*capability)


def _one_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def cuda_device_count() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def cuda_properties(index: int) -> Any:
    return torch.cuda.get_device_properties(index)


def cuda_arch_list() -> list[str]:
    return torch.cuda.get_arch_list()


def cuda_free_bytes(index: int) -> int:
    """What this process could still allocate, beside the context that this question makes."""
    return torch.cuda.mem_get_info(index)[0]


def driver_cuda() -> tuple[tuple[int, int] | None, str | None]:
    """The newest CUDA that the driver supports, or why no driver answers; neither where nobody can be asked.

    CUDA need not start for this.
    """
    try:
        import pynvml
    except ImportError:
        return None, None
    try:
        pynvml.nvmlInit()
        number = pynvml.nvmlSystemGetCudaDriverVersion_v2()
    except pynvml.NVMLError as error:
        return None, _one_line(error)
    return (number // 1000, number % 1000 // 10), None


def cpu_name() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.machine()


def open_nvml(properties: Any) -> tuple[Any | None, str | None, str | None]:
    """NVML's handle of the card that torch describes, why there is none, and the driver's version.

    NVML counts physical cards and knows nothing of CUDA_VISIBLE_DEVICES, so an index would
    name another card; the UUID, or else the PCI address, names the same one to both.
    """
    try:
        import pynvml
    except ImportError as error:
        return None, f"pynvml cannot be imported ({_one_line(error)})", None
    driver = None
    try:
        pynvml.nvmlInit()
        driver = pynvml.nvmlSystemGetDriverVersion()
        return _nvml_handle(pynvml, properties), None, driver
    except pynvml.NVMLError as error:
        return None, _one_line(error), driver


def _nvml_handle(pynvml: Any, properties: Any) -> Any:
    # A slice of a divided card must not be taken for the whole card, which is what its PCI address names.
    for kind in ("GPU", "MIG"):
        try:
            return pynvml.nvmlDeviceGetHandleByUUID(f"{kind}-{properties.uuid}")
        except pynvml.NVMLError as error:
            unknown = error
    if not hasattr(properties, "pci_bus_id"):  # earlier torch does not tell it
        raise unknown
    address = f"{properties.pci_domain_id:08X}:{properties.pci_bus_id:02X}:{properties.pci_device_id:02X}.0"
    return pynvml.nvmlDeviceGetHandleByPciBusId(address)


if triton is not None:

    @triton.jit
    def _increment_kernel(value):
        tl.store(value, tl.load(value) + 1.0)


def triton_self_test(device: torch.device) -> str | None:
    """Compile and launch a one-element kernel; None if it returns the right value, else what went wrong.

    This also finds what no version check can, such as a missing C compiler or an old driver. Waits for the device.
    """
    try:
        value = torch.full((1,), 41.0, device=device)
        with torch.cuda.device_of(value):
            _increment_kernel[(1,)](value)
        result = value.item()
    except Exception as error:  # compiler, linker, driver and launcher each raise their own kind
        return f"Triton's self-test failed ({type(error).__name__}: {_one_line(error)})"
    return None if result == 42.0 else f"Triton's self-test returned {result} for 41 + 1"
