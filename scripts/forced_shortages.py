"""Memory that runs out on purpose: once a run, in one phase, at a place and a moment drawn at random."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from bench_rig import Bench, Figures
from torch import Tensor, nn

from triaccel_bench.trainer import Trainer

PHASES = ("forward", "backward", "update", "capture", "probe", "evaluation")
PLACES = 3
TRAIN_IMAGES, EVALUATION_IMAGES = 1920, 256
OVERRIDES = (
    "method=triaccel_precision_curvature",
    "method.curvature.estimator=fisher",
    "method.curvature.every=8",
    "epochs=2",
)
NEVER_THERE = 2**50
"""Bytes that no device has: the allocator's own error, and not one that looks like it."""


class Shortage:
    """Asks for too much memory at the ``at``-th time that the phase comes to the place, and never again."""

    def __init__(self, device: torch.device, at: int) -> None:
        self._device, self._left = device, at
        self.happened = False

    def __call__(self, *_: Any) -> None:
        self._left -= 1
        if self._left == 0:
            self.happened = True
            if self._device.type == "cuda":
                torch.empty(NEVER_THERE, dtype=torch.uint8, device=self._device)
            raise torch.OutOfMemoryError("as much as nobody has")


def _captured() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def force(made: Trainer, phase: str, chance: random.Random) -> Shortage:
    """Let memory run out once in ``phase`` of a run that has not begun."""
    layers = list(made.network.layers.values())
    layer = chance.choice(layers)
    # An eager phase comes by in every step, a probe or an evaluation a few times in all, and a capture once.
    times = {"capture": 1, "probe": 2, "evaluation": 2}.get(phase, 12)
    shortage = Shortage(made.hardware.device, chance.randint(1, times))

    def in_forward(module: nn.Module, _: tuple[Tensor, ...]) -> None:
        training, graded = made.network.module.training, torch.is_grad_enabled()
        here = {
            "forward": training and graded,
            "capture": training and graded and _captured(),
            "probe": not training and graded,
            "evaluation": not training and not graded,
        }
        if here[phase]:
            shortage()

    if phase == "backward":

        def in_backward(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if made.network.module.training and output.requires_grad:
                output.register_hook(shortage)

        layer.register_forward_hook(in_backward)
    elif phase == "update":
        moments, update = made.engine.moments, made.engine.moments.update

        def failing(*arguments: Any) -> None:
            shortage()
            update(*arguments)

        moments.update = failing
    else:
        layer.register_forward_pre_hook(in_forward)
    return shortage


def shortages(bench: Bench, model: str, phase: str, places: int = PLACES) -> Figures:
    """Share of forced shortages after which the run went on to its end, every sample used once in every epoch."""
    few = copy.copy(bench)
    whole = bench.images
    few.images = replace(
        whole,
        x_train=whole.x_train[:TRAIN_IMAGES],
        y_train=whole.y_train[:TRAIN_IMAGES],
        x_eval=whole.x_eval[:EVALUATION_IMAGES],
        y_eval=whole.y_eval[:EVALUATION_IMAGES],
    )
    recovered, told = 0, []
    for place in range(places):
        chance = random.Random(f"{model} {phase} {place}")
        # Hooks run where Python does: in eager steps, and in those that are captured.
        graphs = "true" if phase in ("capture", "probe") else "false"
        made = few.trainer(f"model={model}", *OVERRIDES, f"engine.graphs={graphs}")
        used = _watched(made)
        shortage = force(made, phase, chance)
        made.train()
        fault = _fault(made, shortage, used)
        recovered += fault is None
        told.append(fault or "recovered")
    return {f"oom/{model}/{phase}": {"value": recovered / places, "places": places, "told": Counter(told)}}


def _watched(made: Trainer) -> list[list[int]]:
    """By epoch, the samples of the steps that ended well."""
    epochs: list[list[int]] = []
    step: Callable[[Tensor], str] = made.engine.step
    begin_epoch = made.data.begin_epoch

    def begun(*arguments: Any) -> Any:
        epochs.append([])
        return begin_epoch(*arguments)

    def stepped(indices: Tensor) -> str:
        outcome = step(indices)
        epochs[-1] += indices.tolist()
        return outcome

    made.data.begin_epoch, made.engine.step = begun, stepped
    return epochs


def _fault(made: Trainer, shortage: Shortage, used: list[list[int]]) -> str | None:
    run, everything = made.run, list(range(made.data.train_count))
    if not shortage.happened:
        return "the place was never reached"
    if sum(run.retries.values()) != 1:
        return f"retries {run.retries}"
    if [sorted(epoch) for epoch in used] != [everything] * run.epochs_planned:
        return "a sample was lost or used twice"
    if [epoch.evaluation_samples for epoch in run.epochs] != [made.data.eval_count] * run.epochs_planned:
        return "an evaluation missed images"
    return None
