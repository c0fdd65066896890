"""Typed, frozen settings of one cell, and the only place that judges a configuration.

``parsing.parse`` turns the plain dictionary that Hydra composed into ``Settings`` or raises
``SettingsError`` with one sentence per fault: the key, what was got, what was expected.
Every field's meaning, unit and paper section stand beside its default in ``conf/``.
"""

from __future__ import annotations

import os
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

DatasetName = Literal["cifar10", "cifar100", "digits", "synthetic"]
ModelName = Literal["resnet18", "resnet18_cifar", "efficientnet_b0", "resnet8"]
Dtype = Literal["fp16", "bf16", "fp32"]

MAX_COUNT = 2**31 - 1
"""The largest whole number of any setting; a larger one is a slip, and overflows a tensor's 32-bit index."""
MAX_PIXELS = 4096  # a side


def _expanded(text: str) -> str:
    if not text:
        raise ValueError("expected a path, got nothing; name one or leave the setting out")
    path = os.path.expanduser(text)
    if path.startswith("~"):
        raise ValueError("expected a home folder that exists; write the whole path")
    return path


PathText = Annotated[str, AfterValidator(_expanded)]
PositiveInt = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Pixels = Annotated[int, Field(ge=1, le=MAX_PIXELS)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]


class SettingsError(ValueError):
    """A configuration that cannot be run; the message names key, value and remedy."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class DatasetSettings(_Section):
    name: DatasetName
    path: PathText | None
    root: PathText
    download: bool
    mirrors: tuple[str, ...]
    num_classes: Annotated[int, Field(ge=2, le=100_000)]
    image_size: Pixels
    train_size: Annotated[int, Field(ge=16, le=MAX_COUNT)] | None
    test_size: PositiveInt | None
    flip: bool
    crop_padding: Annotated[int, Field(ge=0, le=MAX_PIXELS)]
    mean: Annotated[tuple[float, ...], Field(min_length=3, max_length=3)]
    std: Annotated[tuple[PositiveFloat, ...], Field(min_length=3, max_length=3)]
    validation_fraction: Annotated[float, Field(ge=0, lt=1)]
    evaluate_on: Literal["test", "validation"]


class ModelSettings(_Section):
    name: ModelName
    stem: Literal["imagenet", "cifar"]
    input_size: Annotated[int, Field(ge=8, le=MAX_PIXELS)]
    layout: Literal["nchw", "channels_last"]
    checkpointing: bool | Annotated[int, Field(ge=0, le=MAX_COUNT)]
    weights: PathText


class LossScaleSettings(_Section):
    initial: PositiveFloat
    growth_factor: Annotated[float, Field(ge=1)]
    backoff_factor: Annotated[float, Field(gt=0, lt=1)]
    growth_interval: PositiveInt
    max_consecutive_skips: PositiveInt


class PrecisionSettings(_Section):
    adaptive: bool
    beta: Annotated[float, Field(ge=0, lt=1)]
    normalise_by_batch: bool
    tau_low: Literal["auto"] | NonNegativeFloat
    tau_high: Literal["auto"] | NonNegativeFloat
    hysteresis: Annotated[float, Field(ge=1)]
    dwell: PositiveInt
    narrowest: Literal["fp16", "bf16"]
    bf16_substitute: Literal["fp16", "fp32", "emulate"]
    cpu_executes: Literal["fp32", "requested"]


class CurvatureSettings(_Section):
    rates: bool
    promotion: bool
    estimator: Literal["hessian", "fisher"]
    product: Literal["auto", "jacobian", "exact", "difference"]
    k: PositiveInt
    every: PositiveInt
    batch: Annotated[int, Field(ge=2, le=MAX_COUNT)]
    iterations: PositiveInt
    tolerance: PositiveFloat
    max_overhead: Fraction
    alpha: NonNegativeFloat
    tau_curv: Literal["auto"] | NonNegativeFloat


class BatchSettings(_Section):
    elastic: bool
    initial: Annotated[int, Field(ge=2, le=MAX_COUNT)]
    min: Annotated[int, Field(ge=2, le=MAX_COUNT)]
    max: Annotated[int, Field(ge=2, le=MAX_COUNT)]
    up: PositiveInt
    down: PositiveInt
    rho_low: Fraction
    rho_high: Fraction
    growth: Literal["paper", "model", "schedule"]
    head_start: Annotated[float, Field(ge=1)]
    lr_rule: Literal["none", "sqrt", "linear"]


class CaptureSettings(_Section):
    max_overhead: Fraction


class UpdateSettings(_Section):
    in_backward: bool
    momentum_dtype: Literal["fp32", "bf16"]


class ControlSettings(_Section):
    interval: PositiveInt
    plan_changes_per_epoch: PositiveInt


class MethodSettings(_Section):
    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
    dtype: Dtype
    tf32: bool
    loss_scale: LossScaleSettings
    precision: PrecisionSettings
    curvature: CurvatureSettings
    batch: BatchSettings
    control: ControlSettings
    capture: CaptureSettings
    update: UpdateSettings

    @property
    def probes_curvature(self) -> bool:
        return self.curvature.rates or self.curvature.promotion

    @model_validator(mode="after")
    def _consistent(self) -> MethodSettings:
        p, b = self.precision, self.batch
        if isinstance(p.tau_low, float) and isinstance(p.tau_high, float) and p.tau_low >= p.tau_high:
            raise ValueError(
                f"method.precision.tau_low={p.tau_low} and method.precision.tau_high={p.tau_high}: "
                "expected tau_low < tau_high; lower the first or raise the second"
            )
        if p.adaptive and p.narrowest == "bf16" and self.dtype == "fp16":
            raise ValueError(
                "method.dtype=fp16 and method.precision.narrowest=bf16: expected layers to start no narrower than they "
                "may become; set method.dtype=bf16"
            )
        c = self.curvature
        if c.estimator == "fisher" and c.product != "auto":
            raise ValueError(
                f"method.curvature.estimator=fisher and method.curvature.product={c.product}: expected product=auto, "
                "since the Fisher information takes no Hessian products; leave one of them out"
            )
        if isinstance(p.tau_low, str) != isinstance(p.tau_high, str):
            raise ValueError(
                f"method.precision.tau_low={p.tau_low} and method.precision.tau_high={p.tau_high}: "
                "expected both numbers or both auto; set the other one too"
            )
        if not b.min <= b.initial <= b.max:
            raise ValueError(
                f"method.batch.min={b.min}, method.batch.initial={b.initial} and method.batch.max={b.max}: "
                "expected min <= initial <= max; move the bound or the initial size"
            )
        if b.rho_low >= b.rho_high:
            raise ValueError(
                f"method.batch.rho_low={b.rho_low} and method.batch.rho_high={b.rho_high}: "
                "expected rho_low < rho_high; lower the first or raise the second"
            )
        return self


class OptimizerSettings(_Section):
    lr: PositiveFloat
    momentum: Annotated[float, Field(ge=0, lt=1)]
    weight_decay: NonNegativeFloat
    warmup_epochs: Annotated[int, Field(ge=0, le=MAX_COUNT)]


class MemorySettings(_Section):
    meter: Literal["vram", "tensors"]
    # From a kilobyte to a petabyte: a number of bytes is no number of GB.
    budget: Literal["fp32", "paper", "device"] | Annotated[float, Field(ge=1e-6, le=1e6)]
    calibration_steps: PositiveInt
    enforce: bool


class EngineSettings(_Section):
    graphs: bool
    cached: PositiveInt
    autotune: bool


class EvaluationSettings(_Section):
    batch: PositiveInt


class ResultsSettings(_Section):
    root: PathText
    scratch: PathText | None
    reuse: bool
    resume: bool
    checkpoint_every: PositiveInt


class RunnerSettings(_Section):
    # Signs of life come once a second at most.
    timeout: Annotated[float, Field(ge=2)] | None
    max_minutes: PositiveFloat | None
    share_gpu: bool
    order: Literal["interleaved", "cells"]


class ReplaySettings(_Section):
    run: PathText | None
    shuffle: Literal["layers"] | None
    seed: Annotated[int, Field(ge=0, le=MAX_COUNT)]
    schedule: Annotated[str, Field(pattern=r"^[0-9a-f]{12}$")] | None

    @model_validator(mode="after")
    def _consistent(self) -> ReplaySettings:
        if self.run is None and (self.shuffle is not None or self.schedule is not None):
            key = "shuffle" if self.shuffle is not None else "schedule"
            raise ValueError(
                f"replay.{key}={getattr(self, key)} and replay.run=null: expected a run to follow; set "
                f"method=replay and replay.run, or leave replay.{key} out"
            )
        return self


RELU_NETWORKS = ("resnet18", "resnet18_cifar", "resnet8")
"""Models whose logits are piecewise linear in each layer's weight."""
MOST_JACOBIAN_ROWS = 512
"""Images of a probe times classes up to which a Gram matrix is cheaper than products: it costs their square."""

_STEMS = {"resnet18": "imagenet", "resnet18_cifar": "cifar", "efficientnet_b0": "imagenet", "resnet8": "cifar"}
_PRINTED_CELLS = {(data, model) for data in ("cifar10", "cifar100") for model in ("resnet18", "efficientnet_b0")}


class Settings(_Section):
    seeds: Annotated[tuple[Annotated[int, Field(ge=0, le=MAX_COUNT)], ...], Field(min_length=1)]
    epochs: PositiveInt
    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")]
    kernels: Literal["auto", "triton", "torch"]
    progress: Literal["auto", "rich", "plain", "none"]
    preflight: Literal["auto", "only", "off"]
    on_failure: Literal["continue", "stop"]
    tracker: Literal["none", "tensorboard"]
    dataset: DatasetSettings
    model: ModelSettings
    method: MethodSettings
    optimizer: OptimizerSettings
    memory: MemorySettings
    engine: EngineSettings
    evaluation: EvaluationSettings
    results: ResultsSettings
    runner: RunnerSettings
    replay: ReplaySettings

    @property
    def uses_budget(self) -> bool:
        """Whether ``memory.budget`` is in force: followed by the batch size, or enforced."""
        return self.method.batch.elastic or self.memory.enforce

    @property
    def without_savings(self) -> Settings:
        """The same without what makes a step need less memory or rounds an FP32 product: what MemMax is taken by."""
        update = self.method.update.model_copy(update={"in_backward": False, "momentum_dtype": "fp32"})
        method = self.method.model_copy(update={"update": update, "tf32": False})
        model = self.model.model_copy(update={"checkpointing": False})
        return self.model_copy(update={"method": method, "model": model})

    @model_validator(mode="after")
    def _consistent(self) -> Settings:
        if len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"seeds={list(self.seeds)}: expected distinct seeds; remove the repeated one")
        if self.dataset.evaluate_on == "validation" and self.dataset.validation_fraction == 0:
            raise ValueError(
                "dataset.evaluate_on=validation and dataset.validation_fraction=0: expected a fraction above 0; "
                "set dataset.validation_fraction=0.1, or dataset.evaluate_on=test"
            )
        if self.runner.max_minutes is not None and not self.results.resume:
            raise ValueError(
                f"runner.max_minutes={self.runner.max_minutes:g} and results.resume=false: expected checkpoints to "
                "stop at, for the next start to go on from; use results.resume=true"
            )
        if self.device == "cpu" and self.kernels == "triton":
            raise ValueError("device=cpu and kernels=triton: expected a CUDA device for Triton; use kernels=auto")
        if self.memory.enforce and self.device == "cpu":
            raise ValueError(
                "memory.enforce=true and device=cpu: expected a CUDA device to cap; use memory.enforce=false"
            )
        if self.memory.enforce and self.memory.meter == "tensors":
            raise ValueError(
                "memory.enforce=true and memory.meter=tensors: expected the meter of what is capped; use vram"
            )
        train_size = self.dataset.train_size
        if train_size is not None and self.method.batch.initial > train_size:
            raise ValueError(
                f"method.batch.initial={self.method.batch.initial} and dataset.train_size={train_size}: "
                "expected a batch no larger than the data set; lower method.batch.initial"
            )
        budget = self.memory.budget
        if self.uses_budget and budget == "device" and self.device == "cpu":
            raise ValueError("memory.budget=device and device=cpu: expected a CUDA device; use memory.budget=fp32")
        if self.uses_budget and budget == "paper" and (self.dataset.name, self.model.name) not in _PRINTED_CELLS:
            raise ValueError(
                f"memory.budget=paper, dataset.name={self.dataset.name} and model.name={self.model.name}: expected a "
                "cell that Table 1 prints; use memory.budget=fp32 or a number of GB"
            )
        c = self.method.curvature
        if self.method.probes_curvature and c.product == "jacobian":
            rows = c.batch * self.dataset.num_classes
            if self.model.name not in RELU_NETWORKS:
                raise ValueError(
                    f"method.curvature.product=jacobian and model.name={self.model.name}: expected a ReLU network "
                    f"({', '.join(RELU_NETWORKS)}); use product=auto"
                )
            if rows > MOST_JACOBIAN_ROWS:
                raise ValueError(
                    f"method.curvature.product=jacobian, method.curvature.batch={c.batch} and dataset.num_classes="
                    f"{self.dataset.num_classes}: expected at most {MOST_JACOBIAN_ROWS} images x classes, got {rows}; "
                    "lower method.curvature.batch or use product=auto"
                )
        if self.model.stem != _STEMS[self.model.name]:
            raise ValueError(
                f"model.stem={self.model.stem} and model.name={self.model.name}: expected {_STEMS[self.model.name]}; "
                "a ResNet-18 with the other stem is model=resnet18 or model=resnet18_cifar"
            )
        weights = self.model.weights
        if weights not in ("none", "imagenet") and not os.path.isfile(weights):
            raise ValueError(f"model.weights={weights}: expected none, imagenet or a state dict, got no such file")
        if weights == "imagenet" and self.model.stem != "imagenet":
            raise ValueError(
                f"model.weights=imagenet and model.name={self.model.name}: expected a model with ImageNet weights; "
                "use model=resnet18 or model=efficientnet_b0"
            )
        return self
