"""The loop: epochs of steps, a control step every T_ctrl, a curvature probe every T_curv, an evaluation an epoch.

The trainer is the only writer: plan, layer rates, batch size, weights and optimizer state
change here or not at all. It does not know which method it runs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, is_dataclass
from typing import Any, NoReturn

import torch

from triaccel_bench import control, ledger, precision, snapshot, split
from triaccel_bench.anatomy import Anatomy
from triaccel_bench.assembly import Assembly, Budget, reason_for_eager_steps
from triaccel_bench.data import DeviceData, ElasticSampler, ImageSet
from triaccel_bench.divergence import check_end, check_skips
from triaccel_bench.hardware import Hardware, kernels_for
from triaccel_bench.meters import Clock, Peaks, largest
from triaccel_bench.probe import Probe
from triaccel_bench.reading import Reading
from triaccel_bench.records import EpochRecord, RunRecord, Trace
from triaccel_bench.recovery import Recovery
from triaccel_bench.resumption import CheckpointError, Interrupted, Keeper, Stop, checked, restore, section
from triaccel_bench.schedule import batch_rate_factor
from triaccel_bench.settings import Settings
from triaccel_bench.shortage import error_of

Emit = Callable[[str, dict[str, Any]], None]

_PLAIN = {
    "so_far": ledger.EpochSoFar,
    "peaks": Peaks,
    "step": int,
    "training_seconds": float,
    "_record_next": bool,
    "_evaluated_at": int,
}
"""The loop's own state."""


class Trainer:
    """One (cell, seed) on one device.

    Args:
        run: the record to fill in; it is filled as training goes on, so that a run that ends early leaves what it had.
        emit: receives ``("progress" | "epoch" | "note", payload)``.
        keeper: has the checkpoint to go on from and writes new ones; ``None``: there are none.

    Raises:
        CheckpointError: what ``keeper`` found does not fit these settings; ``run`` is as it was.
    """

    def __init__(
        self,
        settings: Settings,
        seed: int,
        hardware: Hardware,
        images: ImageSet,
        run: RunRecord,
        emit: Emit,
        keeper: Keeper | None = None,
    ) -> None:
        self.settings, self.seed, self.hardware, self.run, self.emit = settings, seed, hardware, run, emit
        self.clock = Clock(hardware.device)
        precision.allow_tf32(settings.method.tf32)
        precision.reduce_in_fp32()
        self.kernels = kernels_for(hardware, settings.method.precision)
        torch.backends.cudnn.benchmark = settings.engine.autotune
        place = hardware.device, self.kernels, settings.model.layout == "channels_last"
        self.data = DeviceData(images, settings.dataset, settings.model.input_size, *place)
        run.dataset_bytes = self.data.bytes
        run.train_samples, run.evaluation_samples = self.data.train_count, self.data.eval_count

        started = self.clock.read()
        self.keeper, found = keeper, None if keeper is None else keeper.found
        self.stop = Stop() if keeper is None else keeper.stop
        assembly = Assembly(seed, hardware, self.data, self.kernels)
        known = None if found is None else checked(Budget, section(found, "budget"), "budget")
        self.budget_bytes, run.budget_source = assembly.prepare(settings, known)
        run.budget_bytes = self.budget_bytes
        (self.network, self.method, self.engine), self._probe_pool_bytes = assembly.build_run(settings)
        self.meter = assembly.meter_of(settings, self.engine)
        self.anatomy = Anatomy(self.meter, self.engine, self.data.bytes)
        self.recovery = Recovery(run, self.engine, self.method.release, self.emit)
        run.meter, run.meter_reason = self.meter.name, self.meter.reason
        self.trace = Trace(layers=list(self.network.layers), start=self.method.start)
        self.peaks = Peaks()
        self._evaluated_at = settings.evaluation.batch
        self._record_next, self.step = True, 0
        self.training_seconds = 0.0
        """Wall-clock of training so far, probes excluded, as of the last probe, control step or epoch's end."""
        self.training_began = 0.0
        """What the clock would have shown as training began, had there been nothing else."""
        run.first_use_seconds = self.clock.read() - started
        self.so_far = ledger.EpochSoFar(1, self.engine.read())
        if found is not None:
            self._load(found)

    def state_dict(self) -> dict[str, Any]:
        """All that the run's further course and its record depend on, between two steps, in plain tensors and values.

        Not in it: data, order and augmentation, which follow the seed and the epoch; 16-bit copies, graphs and memory
        pools, which a new process makes anew.
        """
        self._close_window()
        plain = {name: getattr(self, name) for name in _PLAIN}
        return {
            **{name: asdict(value) if is_dataclass(value) else value for name, value in plain.items()},
            **{name: getattr(self, name).state_dict() for name in ("method", "engine", "recovery", "anatomy")},
            "run": self.run.model_dump(),
            "trace": self.trace.model_dump(),
            "budget": (self.run.budget_bytes, self.run.budget_source),
            "generators": snapshot.generators(self.hardware.device),
        }

    def _load(self, saved: dict[str, Any]) -> None:
        before = checked(RunRecord, section(saved, "run"), "run")
        trace = checked(Trace, section(saved, "trace"), "trace")
        if trace.layers != self.trace.layers:
            raise CheckpointError("its layers are not as expected (those of another network)")
        for name, kind in _PLAIN.items():
            setattr(self, name, checked(kind, section(saved, name), name))
        self.method.load_state_dict(section(saved, "method"))
        self.engine.load_state_dict(section(saved, "engine"), self.method.decision.executed)
        self.recovery.load_state_dict(section(saved, "recovery"))
        self.anatomy.load_state_dict(section(saved, "anatomy"))
        drawn = snapshot.generators(self.hardware.device)
        restore(drawn, section(saved, "generators"), "generators")
        snapshot.set_generators(self.hardware.device, drawn)
        self.trace = trace
        ledger.go_on(self.run, before, self.step)
        self._begin_window()  # what warming up took, at B0, is no reading of the size that goes on

    def train(self) -> Trace:
        """Run every epoch that is left; the record given to the constructor and the returned trace are complete then.

        Raises:
            Diverged: the run is of no use; its record holds what it did.
            Interrupted: a signal asked for it; a checkpoint holds everything.
        """
        if self.run.resumed_at:
            self.emit("note", {"text": f"resumed at epoch {self.so_far.number}, step {self.step}"})
        while self.so_far.number <= self.settings.epochs:
            record, reading = self._epoch(self.so_far)
            self.run.epochs.append(record)
            self.so_far = ledger.EpochSoFar(record.epoch + 1, reading)
            self.emit("epoch", record.model_dump())
            if record.epoch < self.settings.epochs and self.keeper is not None and self.keeper.due(record.epoch):
                self._keep()
        check_end(self.run.epochs[-1])
        self.finish()
        decision = self.method.decision
        self.run.split = split.sample(self.engine, self.data.order[: decision.batch], decision.executed)
        return self.trace

    def _epoch(self, so_far: ledger.EpochSoFar) -> tuple[EpochRecord, Reading]:
        """The epoch, or what is left of it."""
        if not so_far.begun:
            self.peaks = Peaks()
            self._begin_window()
            self._record_next = so_far.begun = True
            so_far.captures_before = self.engine.captured.count
            so_far.capture_seconds_before = self.engine.captured.seconds
        now = self.clock.read()
        started, self.training_began = now - so_far.seconds, now - self.training_seconds
        sampler = self.data.begin_epoch(self.seed, so_far.number)
        sampler.skip(so_far.taken)
        reading_begun = None
        if so_far.pending is not None:
            reading, *where = so_far.pending
            reading_begun = lambda: reading, *where  # noqa: E731
        while sampler.remaining:
            if self.stop.asked:
                self._interrupt(started, reading_begun)
            self._follow_schedule(so_far)
            so_far.sizes.append(self._train_step(sampler))
            so_far.chosen.append(self.method.decision.batch)
            so_far.taken = sampler.taken
            if reading_begun is not None:
                # A step later, so that the device is at work while the host decides.
                so_far.plan_changes += self._control(so_far, *reading_begun)
                reading_begun = None
            if self.method.probe_due(self.step):
                seconds = self._probe()
                so_far.probe_seconds += seconds
                self.training_began += seconds
            if self.step % self.settings.method.control.interval == 0:
                began = self.clock.now()
                reading_begun = self.engine.start_reading(), self.step, sampler.taken / self.data.train_count
                so_far.controller_seconds += self.clock.now() - began
        if reading_begun is not None:
            so_far.plan_changes += self._control(so_far, *reading_begun)
        self._follow_schedule(so_far)  # what comes after the last step is in force as the epoch is evaluated
        so_far.pending = None
        if so_far.number < self.settings.epochs:
            # The device has yet to run the last steps: it does not wait while the next order is drawn.
            self.data.prepare(self.seed, so_far.number + 1)
        so_far.seconds = self.clock.read() - started
        self.training_seconds = started + so_far.seconds - self.training_began
        reading = self.engine.read()
        self._close_window()
        self._check(reading)

        evaluation_started = self.clock.read()
        evaluated, self._evaluated_at = self.recovery.in_halves(
            "an evaluation", self._evaluated_at, lambda size: self.engine.evaluate(self._evaluation_batches(size))
        )
        evaluation_seconds = self.clock.read() - evaluation_started
        self.anatomy.reached("evaluation", self._close_window())
        self.peaks.epoch = largest(self.peaks.epoch, self.peaks.window)
        clocked = evaluated, evaluation_seconds, self.engine.captured
        controller = self.method.decision, self.method.curvature, self.step
        return ledger.epoch_record(so_far, reading, *clocked, self.peaks, self.meter.readings(), *controller), reading

    def _evaluation_batches(self, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for batch in self.data.eval_batches(size):
            if self.stop.asked:
                # Nothing of it is kept: the epoch's samples are used up, so that a new process comes here at once.
                self._interrupt()
            yield batch

    def _interrupt(self, started: float | None = None, reading_begun: tuple | None = None) -> NoReturn:
        """Write a checkpoint and end; ``started`` where the epoch's clock still runs."""
        if started is not None:
            now = self.clock.read()
            self.so_far.seconds, self.training_seconds = now - started, now - self.training_began
        if reading_begun is not None:
            finish, *where = reading_begun
            self.so_far.pending = finish(), *where
        where = f"epoch {self.so_far.number}, step {self.step}"
        fault = self._keep()
        kept = "its checkpoint is kept" if fault is None else f"no checkpoint was written ({fault})"
        raise Interrupted(f"{self.stop.asked} at {where}; {kept}")

    def _keep(self) -> str | None:
        """Write a checkpoint; returns why that was not possible, which is no reason to end."""
        fault, seconds = self.keeper.keep(self.state_dict())
        self.run.checkpoint_seconds += seconds
        text = f"no checkpoint was written ({fault}); free space below results.root"
        if fault is not None and text not in self.run.warnings:
            self.run.warnings.append(text)
            self.emit("note", {"text": text})
        return fault

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
            before = self.method.decision
            if not self.method.back_off(tried=len(indices)):
                raise error_of(failed)
            self.trace.back_offs.append(ledger.back_off_trace(self.step, len(indices), before, self.method.decision))
            self._put_in_force(before, self.method.decision)
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

    def _put_in_force(self, before: control.Decision, decision: control.Decision) -> None:
        """Its plan, its rates, and its batch size with what that does to the rate."""
        if decision.executed != before.executed:
            self.recovery.must("a change of plan", lambda: self.engine.set_plan(decision.executed))
        if decision.rates != before.rates or decision.batch != before.batch:
            rules = self.settings.method.batch
            self.engine.set_rates(decision.rates, batch_rate_factor(rules.lr_rule, decision.batch, rules.initial))

    def _follow_schedule(self, so_far: ledger.EpochSoFar) -> None:
        """Put in force what the method had known would come after as many steps, where it goes by a schedule."""
        before = self.method.decision
        decision = self.method.scheduled(self.step)
        if decision is None:
            return
        self._put_in_force(before, decision)
        self._record_next = True
        so_far.plan_changes += decision.plan_changed
        unread = control.Signals(so_far.number, None, None, None, None)
        self.trace.decisions.append(ledger.decision_trace(self.step, self.step, unread, before, decision))

    def _probe(self) -> float:
        """Read curvature; its peak is kept apart from the training window's. Returns the seconds it took."""
        self._close_window()
        count = self.method.probe_images
        drawn = random.Random(f"{self.seed} {self.step}").sample(range(self.data.train_count), count)
        started = self.clock.read()  # only now, so that the samples are drawn while the device is at work
        self.training_seconds = started - self.training_began
        if not self.method.may_probe(self.training_seconds):
            return self.clock.read() - started

        def read() -> Probe | None:
            images, labels = self.data.plain_batch(torch.tensor(drawn, device=self.hardware.device))
            return self.method.probe(images, labels, self.step, self.training_seconds, self.engine.captured.lend_pool())

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
        self, so_far: ledger.EpochSoFar, finish: Callable[[], Reading], step: int, share_of_epoch: float
    ) -> bool:
        """One control step (section 3.4): the read-back begun at ``step``, one decision, put in force from now on.

        Returns whether the plan changed.
        """
        reading = finish()
        arrived = self.clock.now()  # the device is at most a step behind
        self.training_seconds = arrived - self.training_began
        self._check(reading)
        self._close_window()
        memory_bytes, self.peaks.window = self.peaks.window, None
        self.peaks.epoch = largest(self.peaks.epoch, memory_bytes)
        free_bytes = None
        if memory_bytes is not None and self.settings.method.batch.elastic:
            # Only where B may grow: the driver takes its time to answer, and the device has nothing to do meanwhile.
            cap_bytes = self.budget_bytes if self.settings.memory.enforce else None
            free_bytes = self.anatomy.headroom_bytes(memory_bytes, cap_bytes, self._probe_pool_bytes)
        before = self.method.decision
        capturing = self.engine.captured.share(self.training_seconds)
        rate_share = self.engine.schedule.share_of_peak(reading.samples_applied)
        seen = reading.variance, memory_bytes, self.budget_bytes, free_bytes, capturing, rate_share
        signals, decision = self.method.decide(so_far.number, *seen)
        self._put_in_force(before, decision)
        self._record_next = True
        self.trace.decisions.append(ledger.decision_trace(step, self.step, signals, before, decision))
        done, epochs = so_far.number - 1 + share_of_epoch, self.settings.epochs
        self.emit("progress", ledger.progress(done, epochs, so_far.before, reading, decision, memory_bytes))
        so_far.controller_seconds += self.clock.now() - arrived
        return decision.plan_changed

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
        check_skips(reading, self.settings.method.loss_scale.max_consecutive_skips)

    def _note_eager_steps(self) -> None:
        """Record once why steps are not captured, and say so if that was not to be expected."""
        reason = self.engine.captured.eager_reason
        self.run.graphs = reason is None and self.engine.captured.count > 0
        if reason != self.run.eager_reason:
            self.run.eager_reason = reason
            if self.hardware.device.type == "cuda" and reason_for_eager_steps(self.settings) is None:
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
