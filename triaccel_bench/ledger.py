"""From what the loop saw to its records: one function an entry, values in, no device touched."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from triaccel_bench.captures import CapturedCalls
from triaccel_bench.control import Decision, Signals, State
from triaccel_bench.meters import Peaks, Readings
from triaccel_bench.models import Network
from triaccel_bench.probe import LayerCurvature, Probe
from triaccel_bench.reading import Reading
from triaccel_bench.records import (
    BackOffTrace,
    DecisionTrace,
    EpochRecord,
    LayerRecord,
    ProbeTrace,
    RunRecord,
    finite,
)


@dataclass
class EpochSoFar:
    """What the loop has seen of an epoch, in plain values: a checkpoint holds it, and a new process goes on with it."""

    number: int
    before: Reading
    """As it began."""
    begun: bool = False
    taken: int = 0
    """Samples handed out."""
    sizes: list[int] = field(default_factory=list)
    chosen: list[int] = field(default_factory=list)
    """B in force at each step."""
    plan_changes: int = 0
    probe_seconds: float = 0.0
    controller_seconds: float = 0.0
    seconds: float = 0.0
    """Wall-clock up to now."""
    captures_before: int = 0
    capture_seconds_before: float = 0.0
    pending: tuple[Reading, int, float] | None = None
    """A read-back that no control step has used yet, its step, and its share of the epoch."""


def epoch_record(
    so_far: EpochSoFar,
    now: Reading,
    evaluated: tuple[float, int, int],
    evaluation_seconds: float,
    captured: CapturedCalls,
    peaks: Peaks,
    readings: Readings,
    decision: Decision,
    curvature: Mapping[str, LayerCurvature],
    step: int,
) -> EpochRecord:
    """One whole epoch, from what was seen on its way and as of its end."""
    return EpochRecord(
        epoch=so_far.number,
        train_seconds=so_far.seconds,
        evaluation_seconds=evaluation_seconds,
        probe_seconds=so_far.probe_seconds,
        controller_seconds=so_far.controller_seconds,
        captures=captured.count - so_far.captures_before,
        capture_seconds=captured.seconds - so_far.capture_seconds_before,
        plan_changes=so_far.plan_changes,
        **evaluation_figures(*evaluated),
        **batch_figures(so_far.sizes, so_far.chosen),
        **epoch_figures(so_far.before, now, decision, curvature, step),
        **memory_figures(peaks.epoch, peaks.probe, readings),
    )


def go_on(run: RunRecord, before: RunRecord, step: int) -> None:
    """Let ``run``, of a new process, go on from the record of the process before it as of ``step``.

    Times add up, what was warned of is said once, and versions and device are the new process's.
    """
    run.resumed_at = [*before.resumed_at, step]
    run.first_use_seconds = (before.first_use_seconds or 0.0) + (run.first_use_seconds or 0.0)
    run.warnings = [*before.warnings, *(text for text in run.warnings if text not in before.warnings)]
    for name in ("epochs", "retries", "checkpoint_seconds", "steps", "steps_skipped", "samples_applied"):
        setattr(run, name, getattr(before, name))
    if run.provenance is None or before.provenance is None:
        return
    run.provenance.started_at = before.provenance.started_at
    for name in ("code_hash", "torch", "device_uuid"):
        old, new = getattr(before.provenance, name), getattr(run.provenance, name)
        if old != new:
            run.warnings.append(f"resumed at step {step} with another {name}: {new}, before it {old}")


def epoch_figures(
    before: Reading, now: Reading, decision: Decision, curvature: Mapping[str, LayerCurvature], step: int
) -> dict[str, Any]:
    """Fields of an ``EpochRecord``: what the engine counted since ``before``, and where the controller stands."""
    newest = [found.spectrum.eigenvalues[0] for found in curvature.values()]
    samples = now.samples - before.samples
    return {
        "train_loss": _mean(now.loss_sum - before.loss_sum, now.loss_samples - before.loss_samples),
        "train_accuracy_percent": _mean(100.0 * (now.correct - before.correct), samples),
        "steps_skipped": now.steps_skipped - before.steps_skipped,
        "learning_rate_last": now.learning_rate,
        "loss_scale_last": now.loss_scale if "fp16" in decision.executed else None,
        "batch_last": decision.batch,
        "layers_requested": dict(Counter(decision.requested)),
        "layers_executed": dict(Counter(decision.executed)),
        "layers_promoted": sum(decision.promoted),
        "rate_scale_min": min(decision.rates),
        "rate_scale_mean": statistics.fmean(decision.rates),
        "lambda_max": max(newest, default=None),
        "lambda_median": statistics.median(newest) if newest else None,
        "lambda_age_steps_max": max((step - found.step for found in curvature.values()), default=None),
        "layers_probed": len(curvature),
    }


def batch_figures(sizes: Sequence[int], chosen: Sequence[int]) -> dict[str, Any]:
    """Fields of an ``EpochRecord``: the samples of each of its steps, and the B in force at each."""
    return {
        "steps": len(sizes),
        "samples_seen": sum(sizes),
        "batch_mean": sum(sizes) / len(sizes),
        "batch_min": min(chosen),
        "batch_max": max(chosen),
    }


def evaluation_figures(loss_sum: float, correct: int, samples: int) -> dict[str, Any]:
    """Fields of an ``EpochRecord``: ``Engine.evaluate``'s sums."""
    return {
        "evaluation_loss": _mean(loss_sum, samples),
        "evaluation_accuracy_percent": 100.0 * correct / samples,
        "evaluation_samples": samples,
    }


def memory_figures(peak_bytes: int | None, probe_peak_bytes: int | None, readings: Readings) -> dict[str, Any]:
    """Fields of an ``EpochRecord``: the epoch's own peak, the probes' peak apart, and the wider figures beside them."""
    return {
        "memory_peak_bytes": peak_bytes,
        "probe_peak_bytes": probe_peak_bytes,
        "reserved_bytes": readings.reserved_bytes,
        "process_bytes": readings.process_bytes,
        "device_used_bytes": readings.device_used_bytes,
    }


def decision_trace(
    step: int, in_force_after: int, signals: Signals, before: Decision, after: Decision
) -> DecisionTrace:
    """All that one control step saw, as it saw it, and what it decided."""
    return DecisionTrace(
        step=step,
        in_force_after=in_force_after,
        epoch=signals.epoch,
        variance=_listed(signals.variance),
        lambda_max=_listed(signals.lambda_max),
        memory_bytes=signals.memory_bytes,
        budget_bytes=signals.budget_bytes,
        free_bytes=signals.free_bytes,
        batch_before=before.batch,
        batch_after=after.batch,
        batch_reason=after.batch_reason,
        requested=list(after.requested),
        executed=list(after.executed),
        promoted=list(after.promoted),
        rate_scale=list(after.rates),
        plan_changed=after.plan_changed,
        capture_share=signals.capture_share,
        rate_share=signals.rate_share,
    )


def back_off_trace(steps: int, tried: int, before: Decision, after: Decision) -> BackOffTrace:
    return BackOffTrace(in_force_after=steps, tried=tried, batch_before=before.batch, batch_after=after.batch)


def probe_trace(step: int, seconds: float, peak_bytes: int | None, probe: Probe) -> ProbeTrace:
    """What one curvature probe read, and its price."""
    return ProbeTrace(
        step=step,
        seconds=seconds,
        peak_bytes=peak_bytes,
        layers=list(probe.layers),
        eigenvalues=[list(spectrum.eigenvalues) for spectrum in probe.spectra],
        iterations=[spectrum.iterations for spectrum in probe.spectra],
        converged=[spectrum.converged for spectrum in probe.spectra],
    )


def progress(
    epochs_done: float, epochs: int, since: Reading, now: Reading, after: Decision, memory_bytes: int | None
) -> dict[str, Any]:
    """What a live display shows at a control step; loss and accuracy are the epoch's so far."""
    return {
        "share": epochs_done / epochs,
        "loss": _mean(now.loss_sum - since.loss_sum, now.loss_samples - since.loss_samples),
        "accuracy_percent": _mean(100.0 * (now.correct - since.correct), now.samples - since.samples),
        "batch": after.batch,
        "memory_bytes": memory_bytes,
        "layers_executed": dict(Counter(after.executed)),
    }


def fill_final_state(
    run: RunRecord,
    network: Network,
    decision: Decision,
    state: State,
    variance: Sequence[float] | None,
    curvature: Mapping[str, LayerCurvature],
    step: int,
) -> None:
    """The thresholds and every layer's state as the run ended."""
    run.tau_low, run.tau_high, run.tau_curv = state.tau_low, state.tau_high, state.tau_curv
    run.layers = []
    for index, (name, layer) in enumerate(network.layers.items()):
        record = LayerRecord(
            name=name,
            elements=layer.weight.numel(),
            requested=decision.requested[index],
            executed=decision.executed[index],
            promoted=decision.promoted[index],
            rate_scale=decision.rates[index],
            variance=finite(variance[index]) if variance else None,
        )
        if name in curvature:
            found = curvature[name]
            record.eigenvalues = list(found.spectrum.eigenvalues)
            record.lambda_age_steps = step - found.step
            record.iterations = found.spectrum.iterations
            record.converged = found.spectrum.converged
        run.layers.append(record)


def _mean(total: float, count: int) -> float | None:
    return finite(total / count) if count else None


def _listed(values: Sequence[float | None] | None) -> list[float | None] | None:
    return None if values is None else list(values)
