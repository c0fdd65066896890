"""The control loop in your own training code: three lines on a plain PyTorch loop.

    loop = TriAccel(model, optimizer, batch=96, memory_gb=4.0)
    ...
    index = order[start : start + loop.batch_size]
    loss = cross_entropy(model(images), labels)
    loop.step(loss, images, labels)          # in place of backward, optimizer.step and zero_grad

It is the loop of the benchmark (same statistics, same decisions, same curvature) around an
optimizer of yours. Whether FP32 layers may use TF32 is left to your own flags of
``torch.backends``. ``scripts/own_loop.py`` is a whole example.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from triaccel_bench import control, models, precision
from triaccel_bench.configuration import compose
from triaccel_bench.hardware import executed_dtype, inspect
from triaccel_bench.kernels.moments import GradientMoments
from triaccel_bench.meters import Clock, open_meter
from triaccel_bench.methods import Method
from triaccel_bench.schedule import batch_rate_factor
from triaccel_bench.settings import SettingsError


class TriAccel:
    """Section 3.4's loop around a model and an optimizer.

    Args:
        model: a classifier on its device; its convolutions and linear layers become the named layers. In
            torchvision's blocks a BatchNorm also runs the activation behind it, whose hooks are not called.
        optimizer: any ``torch.optim`` optimizer over its parameters. Its groups are split by layer, so
            build learning-rate schedulers after this object; they keep working, because a layer's rate
            is applied around ``optimizer.step`` only.
        batch: B0, the batch size to start from.
        memory_gb: MemMax in GB (1e9 bytes); ``None``: all of the device's memory. Without a CUDA device B stays.
        method: a file of ``conf/method``.
        overrides: further settings, as on the command line: ``["method.curvature.alpha=0.1"]``.

    Raises:
        SettingsError: a setting is out of range.
        DeviceError: the device cannot run this build of PyTorch.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        batch: int = 96,
        memory_gb: float | None = None,
        method: str = "triaccel",
        overrides: Sequence[str] = (),
    ) -> None:
        if memory_gb is not None and not 1e-6 <= memory_gb <= 1e6:
            raise SettingsError(f"memory_gb={memory_gb}: expected GB (1e9 bytes) from 1e-6 to 1e6; or leave it out")
        if method == "replay":
            raise SettingsError(
                "method=replay: expected a method that decides, since a recorded schedule counts the benchmark's own "
                "steps; use another"
            )
        if of_optimizer := [text for text in overrides if text.lstrip("+~").startswith("optimizer.")]:
            raise SettingsError(
                f"{', '.join(of_optimizer)}: expected none of its settings in a loop of your own, which brings its "
                "own optimizer; set it there"
            )
        device = next(model.parameters()).device
        of_this_loop = [f"method={method}", f"device={device.type}", f"method.batch.initial={batch}"]
        # Tuned values, and what a method sets of a network, are those of the benchmark's own networks and data.
        settings = compose([*of_this_loop, "pair=none", "tuned=none", *overrides])
        self.settings = settings.method
        update = self.settings.update
        if update.in_backward or update.momentum_dtype != "fp32":
            raise SettingsError(
                f"method.update.in_backward={str(update.in_backward).lower()} and method.update.momentum_dtype="
                f"{update.momentum_dtype}: expected false and fp32 in a loop of your own, whose optimizer updates its "
                "way; leave them out"
            )
        if self.settings.batch.elastic and self.settings.batch.growth == "schedule":
            raise SettingsError(
                "method.batch.growth=schedule: expected paper or model in a loop of your own, whose learning-rate "
                "schedule is not read; set method.batch.growth=model"
            )
        if asked := settings.model.checkpointing:
            raise SettingsError(
                f"model.checkpointing={str(asked).lower()}: expected false in a loop of your own, whose blocks may "
                "draw or count something that a second run would not repeat; use torch.utils.checkpoint in your model"
            )
        self._hardware = inspect(str(device), settings.kernels)
        self._network = models.describe(model)
        precision.prepare(self._network)
        self._method = Method(self.settings, self._network, self._hardware, seed=0)
        precision.apply(self._network, self._method.decision.executed)

        self._optimizer = optimizer
        self._rates = _split_groups(optimizer, self._network)
        optimizer.register_step_pre_hook(self._scale_rates)
        optimizer.register_step_post_hook(self._restore_rates)
        runs_fp16 = "fp16" in {
            executed_dtype(level, self._hardware, self.settings.precision) for level in self._reachable_levels()
        }
        scale = self.settings.loss_scale
        self._scaler = torch.amp.GradScaler(
            device.type, scale.initial, scale.growth_factor, scale.backoff_factor, scale.growth_interval, runs_fp16
        )
        weights = [layer.weight for layer in self._network.layers.values()]
        self._moments = GradientMoments(
            [weight.numel() for weight in weights],
            len(weights),
            device,
            self._hardware.kernels,
            self.settings.precision.beta,
        )
        self._one = torch.ones((), device=device)
        self._meter = open_meter("vram", self._hardware, 0, model, 0)
        self._meter.begin_window()
        self._budget = self._hardware.total_bytes if memory_gb is None else round(memory_gb * 1e9)
        self._clock = Clock(self._hardware.device)
        self._started = self._clock.read()
        self._probe_seconds = 0.0
        self._peak_bytes: int | None = None
        self.steps = 0

    @property
    def batch_size(self) -> int:
        """B(t): how many samples the next step should have."""
        return self._method.decision.batch

    @property
    def plan(self) -> dict[str, str]:
        """The executed dtype of each named layer."""
        return dict(zip(self._network.layers, self._method.decision.executed, strict=True))

    @property
    def rates(self) -> dict[str, float]:
        """eta_l / eta_0 of each named layer."""
        return dict(zip(self._network.layers, self._method.decision.rates, strict=True))

    def step(self, loss: Tensor, images: Tensor, labels: Tensor) -> control.Decision | None:
        """Backward, statistics, update, and at every T_ctrl-th step a decision, which is returned.

        Args:
            loss: mean loss of the batch, not yet backpropagated; gradients must be empty.
            images, labels: the batch; its first ``curvature.batch`` samples serve the curvature probe.
        """
        self._scaler.scale(loss).backward()
        self._scaler.unscale_(self._optimizer)
        batch = labels.shape[0]
        factor = batch / self.settings.batch.initial if self.settings.precision.normalise_by_batch else 1.0
        gradients = [layer.weight.grad for layer in self._network.layers.values()]
        if None in gradients:
            missing = list(self._network.layers)[gradients.index(None)]
            raise ValueError(
                f"layer {missing}: expected a gradient of its weight, got none; every convolution and linear layer of "
                "the model has to train (no frozen, unused or parametrized ones)"
            )
        self._moments.update(gradients, self._one, self._one * factor)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad()
        self.steps += 1
        if self._method.probe_due(self.steps):
            self._probe(images, labels)
        return self._control() if self.steps % self.settings.control.interval == 0 else None

    def _probe(self, images: Tensor, labels: Tensor) -> None:
        self._close_window()
        now = self._clock.read()
        count = self.settings.curvature.batch
        training = now - self._started - self._probe_seconds
        self._method.probe(images[:count].detach(), labels[:count], self.steps, training)
        self._probe_seconds += self._clock.read() - now
        # The probe's own peak is no usage of training: B could do nothing about it.
        self._meter.begin_window()

    def _close_window(self) -> None:
        peak = self._meter.window_peak_bytes()
        if peak is not None:
            self._peak_bytes = max(peak, self._peak_bytes or 0)
        self._meter.begin_window()

    def _control(self) -> control.Decision:
        ema = torch.cat((self._moments.updates.double(), self._moments.ema.double())).tolist()
        variance = tuple(ema[1:]) if self.settings.precision.adaptive and ema[0] > 0 else None
        self._close_window()
        used, self._peak_bytes = self._peak_bytes, None
        # A loop of one's own has no epochs that we know of; five control windows stand for one.
        epoch = self.steps // (5 * self.settings.control.interval)
        free = None if used is None else self._meter.headroom_bytes(used)
        _, decision = self._method.decide(epoch, variance, used, self._budget, free)
        precision.apply(self._network, decision.executed)
        factor = batch_rate_factor(self.settings.batch.lr_rule, decision.batch, self.settings.batch.initial)
        self._rates[:] = [factor * rate for rate in (*decision.rates, 1.0)]
        return decision

    def _reachable_levels(self) -> tuple[str, ...]:
        if not self.settings.precision.adaptive:
            return (self.settings.dtype,)
        return control.LEVELS[control.LEVELS.index(self.settings.precision.narrowest) :]

    def _scale_rates(self, optimizer: torch.optim.Optimizer, *_) -> None:
        for group in optimizer.param_groups:
            group["triaccel_base_lr"] = group["lr"]
            group["lr"] = group["lr"] * self._rates[group["triaccel_layer"]]

    def _restore_rates(self, optimizer: torch.optim.Optimizer, *_) -> None:
        for group in optimizer.param_groups:
            group["lr"] = group.pop("triaccel_base_lr")


def _split_groups(optimizer: torch.optim.Optimizer, network: models.Network) -> list[float]:
    """Give each named layer's parameters a group of their own; returns the rates by ``triaccel_layer``, all one.

    Index -1, the last rate, is for parameters of no named layer.
    """
    owner = {
        id(parameter): index
        for index, layer in enumerate(network.layers.values())
        for parameter in layer.parameters(recurse=False)
    }
    split = []
    for group in optimizer.param_groups:
        by_layer: dict[int, list[Tensor]] = {}
        for parameter in group["params"]:
            by_layer.setdefault(owner.get(id(parameter), -1), []).append(parameter)
        options = {key: value for key, value in group.items() if key != "params"}
        split += [{"params": params, **options, "triaccel_layer": layer} for layer, params in by_layer.items()]
    optimizer.param_groups[:] = split
    return [1.0] * (len(network.layers) + 1)
