"""What a step must cost on this card at least, by its arithmetic and its bytes, and what its parts cost alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torchvision
from bench_rig import CAPTURED_AFTER, Bench, Figures, median_of, over
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from triaccel_bench.kernels.moments import GradientMoments
from triaccel_bench.kernels.update import FusedSGD
from triaccel_bench.precision import allow_tf32

MATRIX_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "tf32": torch.float32}
MATRIX_SIZES = (2048, 4096, 8192)
COPIED_BYTES = 2**30


class Cost(NamedTuple):
    """Of one training step."""

    operations: int
    """Multiplications and additions of convolutions and linear layers, those with zero padding included."""
    parameter_bytes: int
    activation_bytes: int


def plain_model(name: str, num_classes: int = 10) -> nn.Module:
    """torchvision's model as it comes, with the stem for small images in ``resnet18_cifar``."""
    model = getattr(torchvision.models, name.removesuffix("_cifar"))(num_classes=num_classes)
    if name.endswith("_cifar"):
        model.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
        model.maxpool = nn.Identity()
    return model


def step_cost(name: str, batch: int, dtype: torch.dtype, side: int = 32) -> Cost:
    """Counted from shapes alone, on no device.

    Parameters: the gradient is written and read, weight and momentum are read and written, and a
    copy of 16 bits is written. Activations: what the plain model saves for backward, all of it in
    ``dtype``, is written once and read once.
    """
    with torch.device("meta"):
        model = plain_model(name).to(dtype).train()
        images = torch.empty(batch, 3, side, side, dtype=dtype)
    owned = {_storage(tensor) for tensor in [*model.parameters(), *model.buffers()]}
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if _storage(tensor) not in owned:
            saved[_storage(tensor)] = tensor
        return tensor

    with FlopCounterMode(display=False) as counted, saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = model(images)
    first = next(part for part in model.modules() if isinstance(part, nn.Conv2d))
    with FlopCounterMode(display=False) as counted_first, torch.no_grad():
        first(images)
    # Backward takes each product twice again, but for the gradient by the images. Counted so and not by running it:
    # torch counts the weight gradient of a grouped convolution as if it had one group.
    operations = 3 * counted.get_total_flops() - counted_first.get_total_flops()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    size = dtype.itemsize
    copy = size if size == 2 else 0
    activations = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    del logits
    return Cost(operations, parameters * (2 * size + 4 * 4 + copy), 2 * activations)


def _storage(tensor: Tensor) -> int:
    # On the meta device every address is 0, so the storage object itself tells two of them apart.
    return tensor.untyped_storage()._cdata


def matrix_rate(bench: Bench, kind: str, sizes: tuple[int, ...] = MATRIX_SIZES) -> Figures:
    """TFLOP/s of the fastest of a few square products."""
    allow_tf32(kind == "tf32")
    rates = {}
    for size in sizes:
        left, right = torch.randn(2, size, size, device=bench.device).to(MATRIX_DTYPES[kind]).unbind()
        out = torch.empty_like(left)
        bench.timed(lambda: torch.mm(left, right, out=out), 5, 1)  # noqa: B023
        times = bench.timed(lambda: torch.mm(left, right, out=out), 10)  # noqa: B023
        rates[size] = 2 * size**3 / min(times) / 1e9
    allow_tf32(False)
    best = max(rates, key=rates.get)
    return {f"rate/{kind}": {"value": rates[best], "size": best}}


def copy_rate(bench: Bench, size_bytes: int = COPIED_BYTES) -> Figures:
    """GB/s of a copy on the device, read and written bytes together."""
    source = torch.zeros(size_bytes // 4, device=bench.device)
    target = torch.empty_like(source)
    bench.timed(lambda: target.copy_(source), 5, 1)
    return {"rate/copy": {"value": 2 * source.nbytes / min(bench.timed(lambda: target.copy_(source), 10)) / 1e6}}


def floor(bench: Bench, model: str, kind: str, batch: int, cell: str) -> Figures:
    """The larger of both times, in ms; the step's own row gets it beside its value."""
    operations, parameter_bytes, activation_bytes = step_cost(model, batch, MATRIX_DTYPES[kind])
    arithmetic_ms = operations / bench.value(f"rate/{kind}") / 1e9
    memory_ms = (parameter_bytes + activation_bytes) / bench.value("rate/copy") / 1e6
    least = max(arithmetic_ms, memory_ms)
    ratio = over(bench.value(f"step/{cell}"), least)
    bench.rows[f"step/{cell}"] |= {"floor": least, "ratio_to_floor": ratio}
    figure = {
        "value": least,
        "ratio_to_floor": ratio,
        "arithmetic_ms": arithmetic_ms,
        "memory_ms": memory_ms,
        "gflop": operations / 1e9,
        "parameter_mb": parameter_bytes / 1e6,
        "activation_mb": activation_bytes / 1e6,
    }
    return {f"floor/{cell}": figure}


def capture_cost(bench: Bench, cell: str, *overrides: str) -> Figures:
    """Seconds that a new plan costs before its steps are replayed: a capture, for a batch size captured before."""
    made = bench.trainer(*overrides)
    engine, indices = made.engine, made.data.order[: made.settings.method.batch.initial]
    for _ in range(CAPTURED_AFTER):
        engine.step(indices)
    seconds, eager_steps = [], 0
    for _ in range(bench.repeats):
        engine.set_plan(made.method.decision.executed)
        began, outcome = made.clock.read(), ""
        while outcome not in ("captured", "eager"):
            outcome = engine.step(indices)
            eager_steps += outcome != "captured"
        seconds.append(made.clock.read() - began)
    besides = {"replay": "included", "eager_steps": eager_steps, "eager_reason": engine.captured.eager_reason}
    return {f"capture/{cell}": median_of(seconds, **besides)}


def plain_memory(bench: Bench, row: str, *flags: str) -> Figures:
    """Peak GB of EfficientNet-B0 in plain PyTorch, in a process of its own: how a run is set up decides half of it."""
    command = [sys.executable, str(Path(__file__).with_name("plain_memory.py")), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    found = json.loads(done.stdout.splitlines()[-1])
    return {row: {"value": found["peak_gb"], "workspace_gb": found["workspace_gb"]}}


def input_kernel(bench: Bench, cell: str, *overrides: str) -> Figures:
    """Gather, crop, flip and normalise one batch."""
    made = bench.trainer(*overrides)
    indices = made.data.order[: made.settings.method.batch.initial]
    images, labels = made.data.input_buffers(len(indices), torch.float16)
    times = bench.timed_on_device(lambda: made.data.fill(images, labels, indices))
    moved = made.data.x_train[0].numel() * len(indices) + images.nbytes
    return {f"input/{cell}": _with_rate(times, moved)}


def update_passes(bench: Bench, cell: str, *overrides: str) -> Figures:
    """The two passes over all gradients, which are of 16 bits where a step in FP16 has them so.

    In a row of calls, what fits into the L2 cache is read from there: the rate may be above the memory's.
    """
    made = bench.trainer(*overrides)
    parameters = sorted(made.network.module.parameters(), key=lambda parameter: parameter.dim() < 2)
    layers = sum(parameter.dim() >= 2 for parameter in parameters)
    copies = [parameter.detach().half() for parameter in parameters[:layers]] + [None] * (len(parameters) - layers)
    grads = [torch.randn_like(parameter if copy is None else copy) for parameter, copy in zip(parameters, copies)]
    one, zero = torch.ones((), device=bench.device), torch.zeros((), device=bench.device)
    rates = torch.ones(layers, device=bench.device)
    kernels, sizes = bench.hardware.kernels, [parameter.numel() for parameter in parameters]
    sgd = FusedSGD(parameters, [*range(layers), *[-1] * (len(parameters) - layers)], kernels, 0.9, 5e-4, copies)
    read = sum(grad.nbytes for grad in grads)
    touched = read + 4 * sum(parameter.nbytes for parameter in parameters) + sum(c.nbytes for c in copies[:layers])
    found: Figures = {}
    for row, statistics_too in (("moments", True), ("finite_check", False)):
        passes = GradientMoments(sizes, layers, bench.device, kernels, 0.9, statistics_too)
        times = bench.timed_on_device(partial(passes.update, grads, one, one), passes.flush)
        found[f"{row}/{cell}"] = _with_rate(times, read)
    update = partial(sgd.step, grads, zero, rates, one, passes.nonfinite)
    found[f"sgd/{cell}"] = _with_rate(bench.timed_on_device(update, sgd.flush), touched)
    return found


def _with_rate(times_ms: Sequence[float], moved_bytes: int) -> dict[str, Any]:
    figure = median_of([1e3 * each for each in times_ms])
    return figure | {"mb": moved_bytes / 1e6, "gb_per_s": moved_bytes / figure["value"] / 1e3}
