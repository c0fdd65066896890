"""Small settings, data and engines for tests: seconds on two cores."""

from __future__ import annotations

import multiprocessing
from collections.abc import Collection

import torch

from triaccel_bench import models, precision
from triaccel_bench.configuration import compose
from triaccel_bench.data import ImageSet
from triaccel_bench.engine import Engine
from triaccel_bench.hardware import inspect
from triaccel_bench.progress import Reporter
from triaccel_bench.records import RunRecord, planned_run
from triaccel_bench.resumption import Keeper
from triaccel_bench.schedule import Schedule
from triaccel_bench.settings import Settings
from triaccel_bench.trainer import Trainer

BASE = [
    "+experiment=smoke", "progress=none", "preflight=off", "dataset.image_size=8", "model.input_size=8", "dataset.train_size=64",
    "dataset.test_size=32", "dataset.crop_padding=1", "method.batch.initial=16", "method.batch.min=8",
    "method.batch.max=32",
]  # fmt: skip


class Listening(Reporter):
    """Keeps the lines that it is told."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def line(self, text: str) -> None:
        self.said.append(text)


def children(but: Collection[int] = ()) -> set[int]:
    """Process numbers of children, without those that were there before: joblib keeps its pool for the next sweep."""
    return {process.pid for process in multiprocessing.active_children()} - set(but)


def settings(*overrides: str) -> Settings:
    return compose([*BASE, *overrides])


def images(train: int = 64, evaluation: int = 32, side: int = 8, seed: int = 0) -> ImageSet:
    """Noise around a brightness that gives the class away."""
    generator = torch.Generator().manual_seed(seed)

    def split(count: int):
        labels = torch.arange(count) % 10
        noise = torch.randint(0, 25, (count, 3, side, side), generator=generator)
        return (noise + 23 * labels[:, None, None, None]).to(torch.uint8), labels

    x_train, y_train = split(train)
    x_eval, y_eval = split(evaluation)
    return ImageSet(x_train, y_train, x_eval, y_eval, tuple(map(str, range(10))), "0" * 16, "test")


def engine(
    *overrides: str, plan: list[str] | None = None, schedule: Schedule | None = None, seed: int = 0, **more
) -> Engine:
    chosen = settings(*overrides)
    torch.manual_seed(seed)
    network = models.build(chosen.model, 10)
    precision.prepare(network)
    schedule = schedule or Schedule(0.05, 0, 10_000)
    plan = plan or ["fp32"] * len(network.layers)
    return Engine(network, chosen.method, chosen.optimizer, schedule, "torch", plan, **more)


def trainer(
    chosen: Settings, data: ImageSet | None = None, seed: int = 0, keeper: Keeper | None = None
) -> tuple[Trainer, RunRecord]:
    run = planned_run(chosen.model_dump(mode="json"), seed, "cell", 1)
    hardware = inspect(chosen.device, chosen.kernels)
    return Trainer(chosen, seed, hardware, data or images(), run, lambda kind, payload: None, keeper), run
