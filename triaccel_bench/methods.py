"""FP32, AMP, Tri-Accel and its ablations behind one protocol: they differ in switches, not in classes.

The trainer asks a ``Method`` when to probe and what to do next; it does not know which
switches are on. A static method answers "as before" to every question.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from torch import Tensor

from triaccel_bench import control, curvature, precision, resumption
from triaccel_bench.hardware import Hardware, executed_dtype
from triaccel_bench.models import Network
from triaccel_bench.paper import printed_vram_bytes
from triaccel_bench.probe import LayerCurvature, Probe
from triaccel_bench.records import StartTrace
from triaccel_bench.resumption import CheckpointError, checked
from triaccel_bench.settings import MAX_COUNT, MethodSettings, Settings


class Method:
    """The controller of one run: its state, its curvature estimator, and the current decision.

    Args:
        samples: how many are trained on.
    """

    def __init__(
        self,
        settings: MethodSettings,
        network: Network,
        hardware: Hardware,
        seed: int,
        samples: int = MAX_COUNT,
    ) -> None:
        self.settings = settings = control.within(settings, samples)
        self._network = network
        self._executed_of = lambda requested: executed_dtype(requested, hardware, settings.precision)
        self.decision, self.state = control.start(len(network.layers), settings, self._executed_of)
        self.start = StartTrace(
            rules=settings.model_dump(mode="json"),
            executes={level: self._executed_of(level) for level in control.LEVELS},
            samples=samples,
        )
        self.probe_images = min(settings.curvature.batch, samples)
        """Of every probe: what is captured for one shape serves no other."""
        self.curvature: dict[str, LayerCurvature] = {}
        self._unreadable: set[str] = set()
        self._probe_seconds = 0.0
        borrow = partial(precision.strict_fp32, network)
        rows = None if network.classes is None else settings.curvature.batch * network.classes
        # Who built the network knows its classes, and how its weights are used.
        known = network.classes is not None
        parts = network.module, network.layers, settings.curvature, seed, borrow, hardware.kernels, rows, known
        self._estimator = curvature.build(*parts) if settings.probes_curvature else None

    def scheduled(self, step: int) -> control.Decision | None:
        """A decision that needs no reading, for all that comes after ``step`` steps; a closed loop has none."""
        return None

    def probe_due(self, step: int) -> bool:
        """Every T_curv steps (section 4.3), for methods that read curvature."""
        return self._estimator is not None and step % self.settings.curvature.every == 0

    def prepare_probe(self, images: Tensor, labels: Tensor, pool: Any = None) -> int:
        """A probe whose reading is forgotten, so that the first one finds loaded and captured what all share.

        What a process loads and captures once is no price of curvature, and on a fast card it would use up
        ``curvature.max_overhead`` of a whole run. Returns ``Probe.replayed_bytes``. Also where it fails,
        the run's probes are those that they would have been.
        """
        before = self._estimator.state_dict()
        try:
            return self._estimator.probe(images, labels, 0.0, pool).replayed_bytes
        finally:
            self._estimator.load_state_dict(before)

    def probe(
        self, images: Tensor, labels: Tensor, step: int, training_seconds: float, pool: Any = None
    ) -> Probe | None:
        """Refresh as many layers' spectra as ``curvature.max_overhead`` allows; ``None`` when the share is used up.

        Args:
            training_seconds: wall-clock of training so far, probes excluded.
            pool: memory of CUDA graphs that lies idle between two steps.
        """
        if not self.may_probe(training_seconds):
            return None
        allowance = self._allowance(training_seconds)
        begun = time.perf_counter()
        try:
            probe = self._estimator.probe(images, labels, max(allowance, 0.0), pool)
        except Exception:
            # One that fails is paid for as well, or it would be tried again and again.
            self._probe_seconds += time.perf_counter() - begun
            raise
        self._probe_seconds += probe.seconds
        for name, spectrum in zip(probe.layers, probe.spectra, strict=True):
            if spectrum.eigenvalues:
                self.curvature[name] = LayerCurvature(spectrum, step)
            else:
                self._unreadable.add(name)
        return probe

    def may_probe(self, training_seconds: float) -> bool:
        """Whether ``curvature.max_overhead`` leaves time for a probe; the first one is always made."""
        return self._allowance(training_seconds) > 0 or self._probe_seconds == 0

    def _allowance(self, training_seconds: float) -> float:
        return self.settings.curvature.max_overhead * training_seconds - self._probe_seconds

    @property
    def eager_reason(self) -> str | None:
        """Why probes run without a CUDA graph although one was tried; ``None`` otherwise."""
        return self._estimator.eager_reason if self._estimator else None

    def decide(
        self,
        epoch: int,
        variance: tuple[float, ...] | None,
        memory_bytes: int | None,
        budget_bytes: int | None,
        free_bytes: int | None,
        capture_share: float | None = None,
        rate_share: float | None = None,
    ) -> tuple[control.Signals, control.Decision]:
        """One pass of the unified loop (section 3.4) over the newest signals."""
        signals = control.Signals(
            epoch,
            variance,
            self.lambda_max(),
            memory_bytes,
            budget_bytes,
            free_bytes,
            capture_share,
            rate_share,
        )
        self.decision, self.state = control.decide(signals, self.state, self.settings, self._executed_of)
        return signals, self.decision

    def state_dict(self) -> dict[str, Any]:
        """Where the controller and its estimator stand."""
        return {
            "state": asdict(self.state),
            "decision": asdict(self.decision),
            "curvature": {name: asdict(found) for name, found in self.curvature.items()},
            "unreadable": sorted(self._unreadable),
            "probe_seconds": self._probe_seconds,
            "estimator": None if self._estimator is None else self._estimator.state_dict(),
        }

    def load_state_dict(self, saved: object) -> None:
        """Go on from there; whoever steps still has to follow ``decision``.

        Raises:
            CheckpointError: it is no such state, or one of other layers.
        """
        section = resumption.section
        state = checked(control.State, section(saved, "state"), "controller")
        decision = checked(control.Decision, section(saved, "decision"), "decision")
        curvature = checked(dict[str, LayerCurvature], section(saved, "curvature"), "curvature")
        unreadable = set(checked(list[str], section(saved, "unreadable"), "unreadable layers"))
        each = state.base, state.promoted, state.dwelt, state.rates, decision.requested, decision.executed
        layers = self._network.layers
        levels = {*state.base, *decision.requested, *decision.executed}
        fits = {len(values) for values in each} == {len(layers)} and {*curvature, *unreadable} <= layers.keys()
        if not fits or not levels <= set(control.LEVELS) or state.batch < 1 or decision.batch != state.batch:
            raise CheckpointError("its controller is not as expected (that of other layers)")
        if self._estimator is not None:
            self._estimator.load_state_dict(section(saved, "estimator"))
        self._probe_seconds = checked(float, section(saved, "probe_seconds"), "seconds of probes")
        self.state, self.decision, self.curvature, self._unreadable = state, decision, curvature, unreadable

    def release(self) -> None:
        """Give up what probes keep on the device between them."""
        if self._estimator is not None:
            self._estimator.release()

    def back_off(self, tried: int) -> bool:
        """Go on with a smaller B after memory ran out, whether B is elastic or not; False: there is none."""
        smaller = control.back_off(self.state, self.settings.batch, tried)
        if smaller is None:
            return False
        self.state = smaller
        self.decision = replace(self.decision, batch=smaller.batch, batch_reason="shrink: memory ran out")
        return True

    def lambda_max(self) -> tuple[float | None, ...] | None:
        """Newest largest eigenvalue of each layer; NaN where it was probed and could not be read."""
        if not self.curvature:
            return None
        return tuple(self._newest(name) for name in self._network.layers)

    def _newest(self, name: str) -> float | None:
        if name in self.curvature:
            return self.curvature[name].spectrum.eigenvalues[0]
        return math.nan if name in self._unreadable else None


def resolve_budget(
    settings: Settings, hardware: Hardware, calibrate: Callable[[], int | None]
) -> tuple[int | None, str | None]:
    """MemMax of section 3.3 in bytes and where it came from; ``(None, None)`` if nothing uses or can measure it.

    ``calibrate`` runs FP32 at B0 in this process and returns the meter's peak. ``Settings``
    refuses budgets that this cell or device does not have.
    """
    budget = settings.memory.budget
    unmetered = settings.memory.meter == "vram" and hardware.total_bytes is None
    if not settings.uses_budget or unmetered:
        return None, None
    if budget == "fp32":
        steps = settings.memory.calibration_steps
        return calibrate(), f"fp32: {steps} FP32 step{'s' * (steps != 1)} at B={settings.method.batch.initial}"
    if budget == "paper":
        return printed_vram_bytes(
            settings.dataset.name, settings.model.name
        ), "paper: FP32 VRAM of this cell in Table 1"
    if budget == "device":
        return hardware.total_bytes, "device: total memory"
    return round(budget * 1e9), "set"
