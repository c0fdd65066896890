"""ResNet-18 under AMP as others train it, on the same card: a DataLoader, an eager loop, torch.compile.

Where there is a choice the rival has the better one: channels-last memory, cuDNN's autotuning, PyTorch's fused SGD
(with which GradScaler waits for nothing), and on resident data our own input kernel.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch._inductor.config
from bench_parts import plain_model
from bench_rig import SEED, WARM_UP_STEPS, Bench, Figures, full_batches, median_of, over, stepper
from PIL import Image
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from triaccel_bench.configuration import compose
from triaccel_bench.data import DeviceData, ImageSet
from triaccel_bench.settings import DatasetSettings

BATCH = 96
OUR_STEP = "step/resnet18/amp/B96"
OUR_EPOCH = "epoch/resnet18/amp"
LOADER_WARM_UP = 20
COMPILED_AFTER = 3
"""Steps until torch.compile has compiled, warmed up and recorded its graphs."""


class PilImages(Dataset):
    """What torchvision's CIFAR10 yields: a PIL image through the transform, and its label."""

    def __init__(self, images: ImageSet, dataset: DatasetSettings) -> None:
        self._pixels = images.x_train.permute(0, 2, 3, 1).contiguous().numpy()
        self._labels = images.y_train.tolist()
        self._transform = transforms.Compose(
            [
                transforms.RandomCrop(images.x_train.shape[-1], dataset.crop_padding),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize(dataset.mean, dataset.std),
            ]
        )

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._transform(Image.fromarray(self._pixels[index])), self._labels[index]


class Loop:
    """A training step as PyTorch's AMP recipe has it."""

    def __init__(self, device: torch.device, compiled: bool = False) -> None:
        torch.manual_seed(SEED)
        model = plain_model("resnet18").to(device, memory_format=torch.channels_last).train()
        self._optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, fused=True)
        self._scaler = torch.amp.GradScaler(device.type)
        self._model: Callable[[Tensor], Tensor] = torch.compile(model, mode="reduce-overhead") if compiled else model
        self._device = device
        self._compiled = compiled

    def step(self, images: Tensor, labels: Tensor) -> None:
        if self._compiled:
            torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(self._device.type, torch.float16):
            loss = functional.cross_entropy(self._model(images), labels)
        self._scaler.scale(loss).backward()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad(set_to_none=True)


@contextmanager
def _as_usual(bench: Bench) -> Iterator[None]:
    """PyTorch's default stream, which its own graphs expect, and autotuned convolutions."""
    before = torch.backends.cudnn.benchmark
    torch.cuda.synchronize()
    torch.backends.cudnn.benchmark = True
    try:
        with torch.cuda.stream(torch.cuda.default_stream(bench.device)):
            yield
            torch.cuda.synchronize()
    finally:
        torch.backends.cudnn.benchmark = before


def loader_epoch(bench: Bench) -> Figures:
    """Seconds of one epoch out of a DataLoader with two worker processes, augmenting PIL images."""
    ours = bench.value(OUR_EPOCH)
    with _as_usual(bench):
        images = PilImages(bench.images, compose(["dataset=cifar10"]).dataset)
        loader = DataLoader(
            images, BATCH, shuffle=True, num_workers=2, persistent_workers=True, pin_memory=True, drop_last=False
        )
        loop = Loop(bench.device)

        def train(batches: int) -> float:
            started = time.perf_counter()
            for pixels, labels in itertools.islice(loader, batches):
                pixels = pixels.to(bench.device, non_blocking=True, memory_format=torch.channels_last)
                loop.step(pixels, labels.to(bench.device, non_blocking=True))
            torch.cuda.synchronize()
            return time.perf_counter() - started

        train(LOADER_WARM_UP)
        seconds = train(len(loader))
    return {
        "rival/dataloader/resnet18/amp": {"value": seconds, "workers": 2, "batches": len(loader)},
        "over_ours/dataloader/resnet18/amp": {"value": over(seconds, ours), "ours_s": ours},
    }


def eager_step(bench: Bench) -> Figures:
    """The eager loop, its data on the GPU."""
    ours = bench.value(OUR_STEP)
    with _as_usual(bench):
        step = _on_resident_data(bench, Loop(bench.device))
        for _ in range(WARM_UP_STEPS):
            step()
        times = bench.timed(step)
    figure = median_of(times)
    return {
        "rival/eager/resnet18/amp": figure,
        "over_ours/eager/resnet18/amp": {"value": over(figure["value"], ours), "ours_ms": ours},
    }


def compiled_step(bench: Bench) -> Figures:
    """The same loop with its model compiled and captured by ``torch.compile(mode="reduce-overhead")``."""
    ours = bench.value(OUR_STEP)
    try:
        # A compilation that finds its result on disk would not be one.
        with _as_usual(bench), torch._inductor.config.patch(force_disable_caches=True):
            step = _on_resident_data(bench, Loop(bench.device, compiled=True))
            started = time.perf_counter()
            for _ in range(COMPILED_AFTER):
                step()
            torch.cuda.synchronize()
            seconds = time.perf_counter() - started
            for _ in range(WARM_UP_STEPS):
                step()
            times = bench.timed(step)
    finally:
        torch.compiler.reset()
    figure = median_of(times)
    return {
        "rival/compile/resnet18/amp": figure,
        "rival/compile_seconds/resnet18/amp": {"value": seconds},
        "over_ours/compile/resnet18/amp": {"value": over(figure["value"], ours), "ours_ms": ours},
    }


def own_variant(bench: Bench, model: str, row: str, kernels: str, *overrides: str) -> Figures:
    """Our own engine with something left out, beside the whole."""
    ours = bench.value(f"step/{model}/amp/B96")
    made = bench.trainer(f"model={model}", "method=amp", *overrides, kernels=kernels)
    # Launched one by one these steps are slow; fewer of them tell as much.
    figure = median_of(bench.timed(stepper(made), max(bench.steps // 4, 1)))
    return {row: figure | {"over_ours": over(figure["value"], ours), "eager_reason": made.engine.captured.eager_reason}}


def _on_resident_data(bench: Bench, loop: Loop) -> Callable[[], None]:
    settings = compose(["dataset=cifar10"]).dataset
    side = bench.images.x_train.shape[-1]
    data = DeviceData(bench.images, settings, side, bench.device, bench.hardware.kernels, channels_last=True)
    batches = full_batches(data, BATCH)
    images, labels = data.input_buffers(BATCH)

    def step() -> None:
        data.fill(images, labels, next(batches))
        loop.step(images, labels)

    return step
