"""The loop: epochs of steps, a control step every T_ctrl, a curvature probe every T_curv, an evaluation an epoch.

The trainer is the only writer: plan, layer rates, batch size, weights and optimizer state
change here or not at all. It does not know which method it runs.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from triaccel_bench import control, ledger, models, precision
from triaccel_bench.anatomy import Anatomy
from triaccel_bench.data import DeviceData, ElasticSampler, ImageSet
from triaccel_bench.engine import Engine
from triaccel_bench.hardware import Hardware, executed_dtype, kernels_for
from triaccel_bench.meters import Clock, MemoryMeter, Peaks, largest, open_meter
from triaccel_bench.methods import Method, resolve_budget
from triaccel_bench.probe import Probe
from triaccel_bench.reading import Reading
from triaccel_bench.records import EpochRecord, RunRecord, Trace
from triaccel_bench.recovery import Recovery, tolerated
from triaccel_bench.schedule import batch_rate_factor, make_schedule
from triaccel_bench.settings import Settings
from triaccel_bench.shortage import error_of

WARM_UP_STEPS = 2
"""Steps of a throw-away copy before the first epoch's clock: library start-up and kernel compilation."""

PLANS_TO_COMPILE = (("fp16",), ("bf16",), ("fp32",), ("fp16", "bf16", "fp32"))
"""Dtypes, repeated over the layers, that a method with adaptive precision may mix: their kernels compile beforehand."""

Emit = Callable[[str, dict[str, Any]], None]


class Diverged(RuntimeError):
    """Too many non-finite steps in a row, or a last epoch that applied no step or ends in a loss that is not finite."""


class Trainer:
    """One (cell, seed) on one device.

    Args:
        run: the record to fill in; it is filled as training goes on, so that a run that ends early leaves what it had.
        emit: receives ``("progress" | "epoch" | "note", payload)``.
    """

    def __init__(
        self, settings: Settings, seed: int, hardware: Hardware, images: ImageSet, run: RunRecord, emit: Emit
    ) -> None:
        self.settings, self.seed, self.hardware, self.run, self.emit = settings, seed, hardware, run, emit
        self.clock = Clock(hardware.device)
        precision.allow_tf32(settings.method.tf32)
        precision.reduce_in_fp32()
        self.kernels = kernels_for(hardware, settings.method.precision)
        torch.backends.cudnn.benchmark = settings.engine.autotune
        self.data = DeviceData(
            images,
            settings.dataset,
            settings.model.input_size,
            hardware.device,
            self.kernels,
            settings.model.layout == "channels_last",
        )
        run.dataset_bytes = self.data.bytes
        run.train_samples, run.evaluation_samples = self.data.train_count, self.data.eval_count

        started = self.clock.read()
        calibrate = partial(self._scratch, [("fp32",)], settings.memory.calibration_steps, settings.without_savings)
        self.budget_bytes, run.budget_source = resolve_budget(settings, hardware, calibrate)
        run.budget_bytes = self.budget_bytes
        if settings.memory.enforce and self.budget_bytes is not None:
            share = (self.budget_bytes + self.data.bytes) / hardware.total_bytes
            torch.cuda.set_per_process_memory_fraction(min(share, 1.0), hardware.device)
        # Under the cap, where there is one: what a library tries out now has to fit as well.
        tolerated(lambda: self._scratch(self._plans_to_warm_up(), WARM_UP_STEPS, settings))

        torch.manual_seed(seed)
        self.network, self.method, self.engine = self._assemble(self._reason_for_eager_steps(), settings)
        self.meter = self._meter_of(self.engine)
        self.anatomy = Anatomy(self.meter, self.engine, self.data.bytes)
        self.recovery = Recovery(run, self.engine, self.method.release, self.emit)
        run.meter, run.meter_reason = self.meter.name, self.meter.reason
        self.trace = Trace(layers=list(self.network.layers))
        self.peaks = Peaks()
        self._probe_pool_bytes, self._evaluated_at = 0, settings.evaluation.batch
        self._record_next, self.step = True, 0
        self.training_seconds = 0.0
        """Wall-clock of training so far, probes excluded, as of the last probe, control step or epoch's end."""
        self.training_began = 0.0
        """What the clock would have shown as training began, had there been nothing else."""
        run.first_use_seconds = self.clock.read() - started

    def _assemble(self, eager: str | None, settings: Settings) -> tuple[models.Network, Method, Engine]:
        network = models.build(settings.model, settings.dataset.num_classes)
        layout = torch.channels_last if settings.model.layout == "channels_last" else torch.contiguous_format
        network.module.to(self.hardware.device, memory_format=layout).train()
        precision.prepare(network)
        momentum, samples = settings.optimizer.momentum, self.data.train_count
        method = Method(settings.method, network, self.hardware, self.seed, momentum, samples)
        schedule = make_schedule(settings.optimizer.lr, settings.epochs, settings.optimizer.warmup_epochs, samples)
        engine = Engine(
            network,
            settings.method,
            settings.optimizer,
            schedule,
            self.kernels,
            method.decision.executed,
            self._batch,
            eager,
            settings.engine.cached,
            settings.memory.enforce,
        )
        return network, method, engine

    def _reason_for_eager_steps(self) -> str | None:
        if not self.settings.engine.graphs:
            return "asked for by engine.graphs=false"
        if self.settings.memory.meter == "tensors":
            return "memory.meter=tensors counts what autograd saves, which a replay does not show"
        return None

    def _batch(self, dtype: torch.dtype, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The engine's source: augmented images of the current epoch and their labels."""
        images, labels = self.data.input_buffers(len(indices), dtype)
        self.data.fill(images, labels, indices)
        return images, labels

    def _plans_to_warm_up(self) -> list[tuple[str, ...]]:
        adaptive = self.settings.method.precision.adaptive and self.hardware.device.type == "cuda"
        return list(PLANS_TO_COMPILE) if adaptive else [(self.settings.method.dtype,)]

    def _meter_of(self, engine: Engine) -> MemoryMeter:
        chosen, module = self.settings.memory.meter, engine.network.module
        return open_meter(chosen, self.hardware, self.data.bytes, module, lambda: engine.state_bytes)

    def _scratch(self, plans: list[tuple[str, ...]], steps: int, settings: Settings) -> int | None:
        """Train a throw-away copy at B0, ``steps`` under each requested plan; returns the meter's peak under the last.

        It runs eagerly: the memory it needs is the same, and a capture would outlast its few steps.
        """
        torch.manual_seed(self.seed)
        network, method, engine = self._assemble("a copy of a few steps", settings)
        meter = self._meter_of(engine)
        self.data.begin_epoch(self.seed, 0)
        batch = min(self.settings.method.batch.initial, self.data.train_count)
        indices = torch.arange(batch, device=self.hardware.device)
        for plan in plans:
            executed = [executed_dtype(level, self.hardware, self.settings.method.precision) for level in plan]
            engine.set_plan([executed[index % len(executed)] for index in range(len(network.layers))])
            if self.hardware.device.type == "cuda":
                # With engine.autotune the first step also holds the workspace of trials, which no later step needs.
                engine.step(indices)
            meter.begin_window()
            for _ in range(steps):
                with meter.recording():
                    engine.step(indices)
        self.clock.read()
        peak = meter.window_peak_bytes()
        del network, method, engine, meter
        gc.collect()
        if self.hardware.device.type == "cuda":
            torch.cuda.empty_cache()
        return peak

    def train(self) -> Trace:
        """Run every epoch; the record given to the constructor and the returned trace are complete afterwards.

        Raises:
            Diverged: the run is of no use; its record holds what it did.
        """
        before = self.engine.read()
        for epoch in range(1, self.settings.epochs + 1):
            record, before = self._epoch(epoch, before)
            self.run.epochs.append(record)
            self.emit("epoch", record.model_dump())
        if record.steps_skipped == record.steps or record.evaluation_loss is None:
            raise Diverged(
                f"the last epoch skipped {record.steps_skipped} of {record.steps} steps and its evaluation loss is "
                f"{record.evaluation_loss}; lower optimizer.lr or check the data"
            )
        self.finish()
        return self.trace

    def _epoch(self, epoch: int, before: Reading) -> tuple[EpochRecord, Reading]:
        self.peaks = Peaks()
        self._begin_window()
        self._record_next = True
        plan_changes = 0
        probe_seconds = 0.0
        sizes: list[int] = []
        chosen: list[int] = []
        captures, capture_seconds = self.engine.captured.count, self.engine.captured.seconds
        started = self.clock.read()
        self.training_began = started - self.training_seconds
        sampler = self.data.begin_epoch(self.seed, epoch)
        reading_begun = None
        while sampler.remaining:
            sizes.append(self._train_step(sampler))
            chosen.append(self.method.decision.batch)
            if reading_begun is not None:
                # A step later, so that the device is at work while the host decides.
                plan_changes += self._control(epoch, before, *reading_begun)
                reading_begun = None
            if self.method.probe_due(self.step):
                seconds = self._probe()
                probe_seconds += seconds
                self.training_began += seconds
            if self.step % self.settings.method.control.interval == 0:
                share_of_epoch = sampler.taken / self.data.train_count
                reading_begun = self.engine.start_reading(), self.step, share_of_epoch
        if reading_begun is not None:
            plan_changes += self._control(epoch, before, *reading_begun)
        if epoch < self.settings.epochs:
            # The device has yet to run the last steps: it does not wait while the next order is drawn.
            self.data.prepare(self.seed, epoch + 1)
        elapsed = self.clock.read() - started
        self.training_seconds = started + elapsed - self.training_began
        reading = self.engine.read()
        self._close_window()
        self._check(reading)

        evaluation_started = self.clock.read()
        evaluated, self._evaluated_at = self.recovery.in_halves(
            "an evaluation", self._evaluated_at, lambda size: self.engine.evaluate(self.data.eval_batches(size))
        )
        evaluation_seconds = self.clock.read() - evaluation_started
        self.anatomy.reached("evaluation", self._close_window())
        self.peaks.epoch = largest(self.peaks.epoch, self.peaks.window)
        record = EpochRecord(
            epoch=epoch,
            train_seconds=elapsed,
            evaluation_seconds=evaluation_seconds,
            probe_seconds=probe_seconds,
            captures=self.engine.captured.count - captures,
            capture_seconds=self.engine.captured.seconds - capture_seconds,
            plan_changes=plan_changes,
            **ledger.evaluation_figures(*evaluated),
            **ledger.batch_figures(sizes, chosen),
            **ledger.epoch_figures(before, reading, self.method.decision, self.method.curvature, self.step),
            **ledger.memory_figures(self.peaks.epoch, self.peaks.probe, self.meter.readings()),
        )
        return record, reading

    def _train_step(self, sampler: ElasticSampler) -> int:
        """One step over the next samples, fewer of them where memory runs out; returns how many."""
        while True:
            indices = sampler.take(self.method.decision.batch)
            joined = len(indices) > self.method.decision.batch
            if joined:
                self._close_window()
            outcome, failed = self.recovery.attempt(
                "step", f"step {self.step + 1}, of {len(indices)}", lambda batch=indices: self._step(batch)
            )
            if failed is None:
                break
            sampler.put_back(len(indices))
            if not self.method.back_off(tried=len(indices)):
                raise error_of(failed)
            self._follow(self.method.decision)
            self._begin_window()
            self.peaks.window, self._record_next = None, True  # no reading of the size that is next
        if joined or (outcome == "warmed" and self.settings.engine.autotune):
            # A leftover that joined its batch, or what cuDNN tried out: of the epoch's peak, but no reading of B.
            peak = self.meter.window_peak_bytes(self.engine.captured.replayed_bytes)
            self.peaks.epoch = largest(self.peaks.epoch, peak)
            self._begin_window()
        self._record_next = self._record_next and joined
        self.step += 1
        return len(indices)

    def _step(self, indices: torch.Tensor) -> str:
        counted = self.meter.recording() if self._record_next else nullcontext()
        with counted, self.anatomy.watching(self._record_next):
            return self.engine.step(indices)

    def _follow(self, decision: control.Decision) -> None:
        """Put its rates and its batch size's share in the rate in force."""
        rules = self.settings.method.batch
        self.engine.set_rates(decision.rates, batch_rate_factor(rules.lr_rule, decision.batch, rules.initial))

    def _probe(self) -> float:
        """Read curvature; its peak is kept apart from the training window's. Returns the seconds it took."""
        self._close_window()
        count = min(self.settings.method.curvature.batch, self.data.train_count)
        drawn = random.Random(f"{self.seed} {self.step}").sample(range(self.data.train_count), count)
        started = self.clock.read()  # only now, so that the samples are drawn while the device is at work
        self.training_seconds = started - self.training_began
        if not self.method.may_probe(self.training_seconds):
            return self.clock.read() - started

        def read() -> Probe | None:
            images, labels = self.data.plain_batch(torch.tensor(drawn, device=self.hardware.device))
            return self.method.probe(images, labels, self.step, self.training_seconds, self.engine.captured.idle_pool)

        probe, _ = self.recovery.attempt("probe", "a curvature probe, which is left out", read)
        seconds = self.clock.read() - started
        peak = self.meter.window_peak_bytes(0 if probe is None else probe.replayed_bytes)
        self._begin_window()
        if probe is None:
            return seconds
        reason = self.method.eager_reason
        if reason is not None and reason not in self.run.warnings:
            self.run.warnings.append(reason)
            self.emit("note", {"text": f"curvature probes run eagerly: {reason}"})
        self.peaks.probe = largest(self.peaks.probe, self.anatomy.reached("probe", peak))
        self._probe_pool_bytes = probe.replayed_bytes
        self.trace.probes.append(ledger.probe_trace(self.step, seconds, peak, probe))
        return seconds

    def _control(
        self, epoch: int, epoch_start: Reading, finish: Callable[[], Reading], step: int, share_of_epoch: float
    ) -> bool:
        """One control step (section 3.4): the read-back begun at ``step``, one decision, put in force from now on.

        Returns whether the plan changed.
        """
        reading = finish()
        # The device is at most a step behind this clock.
        self.training_seconds = self.clock.now() - self.training_began
        self._check(reading)
        self._close_window()
        memory_bytes, self.peaks.window = self.peaks.window, None
        self.peaks.epoch = largest(self.peaks.epoch, memory_bytes)
        free_bytes = self._headroom_bytes(memory_bytes)
        before = self.method.decision
        capturing = self.engine.captured.share(self.training_seconds)
        signals, decision = self.method.decide(
            epoch, reading.variance, memory_bytes, self.budget_bytes, free_bytes, capturing, reading.momentum_square
        )
        if decision.executed != before.executed:
            self.recovery.must("a change of plan", lambda: self.engine.set_plan(decision.executed))
        if decision.rates != before.rates or decision.batch != before.batch:
            self._follow(decision)
        self._record_next = True
        self.trace.decisions.append(ledger.decision_trace(step, signals, before, decision))
        done = epoch - 1 + share_of_epoch
        self.emit("progress", ledger.progress(done, self.settings.epochs, epoch_start, reading, decision, memory_bytes))
        return decision.plan_changed

    def _headroom_bytes(self, peak_bytes: int | None) -> int | None:
        """By how much the peak could grow: what the card has left, and under ``memory.enforce`` what the cap leaves."""
        # Asked for where B may grow: the driver takes its time to answer, and the device has nothing to do meanwhile.
        if peak_bytes is None or not self.settings.method.batch.elastic:
            return None
        found = self.meter.headroom_bytes(peak_bytes)
        if found is None:
            return None
        if self.settings.memory.enforce:
            return min(found, self.budget_bytes - peak_bytes)
        # A new batch size warms up beside the graphs' memory.
        return found - max(self.engine.captured.pool_bytes, self._probe_pool_bytes)

    def _begin_window(self) -> None:
        self.meter.begin_window()
        self.engine.captured.replayed_bytes = 0

    def _close_window(self) -> int | None:
        peak = self.meter.window_peak_bytes(self.engine.captured.replayed_bytes)
        self.peaks.window = largest(self.peaks.window, peak)
        self._begin_window()
        return peak

    def _check(self, reading: Reading) -> None:
        self.run.steps = self.step
        self._note_eager_steps()
        self.run.steps_skipped = reading.steps_skipped
        self.run.samples_applied = reading.samples_applied
        limit = self.settings.method.loss_scale.max_consecutive_skips
        if reading.longest_skip_run >= limit:
            raise Diverged(
                f"{reading.longest_skip_run} steps in a row had non-finite gradients, "
                f"method.loss_scale.max_consecutive_skips={limit}; lower optimizer.lr or check the data"
            )

    def _note_eager_steps(self) -> None:
        """Record once why steps are not captured, and say so if that was not to be expected."""
        reason = self.engine.captured.eager_reason
        self.run.graphs = reason is None and self.engine.captured.count > 0
        if reason != self.run.eager_reason:
            self.run.eager_reason = reason
            if self.hardware.device.type == "cuda" and self._reason_for_eager_steps() is None:
                self.run.warnings.append(reason)
                self.emit("note", {"text": f"steps run eagerly: {reason}"})

    def finish(self) -> None:
        """Write the controller's last state into the run record; also after a run that ended early."""
        method = self.method
        variance = self.engine.read().variance
        method.release()
        self.run.memory = self.anatomy.record()
        ledger.fill_final_state(
            self.run, self.network, method.decision, method.state, variance, method.curvature, self.step
        )
