"""A recorded schedule followed to the letter, behind the protocol of ``methods.Method``: nothing is read or decided.

Precision plan, layer rates and batch size change after as many steps as they did in the recorded
run. With the same data, seed and epochs every batch then holds the samples it held there.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from typing import Any

from triaccel_bench import control, resumption
from triaccel_bench.hardware import Hardware, executed_dtype
from triaccel_bench.models import Network
from triaccel_bench.probe import LayerCurvature
from triaccel_bench.recording import Change, read_recording
from triaccel_bench.resumption import CheckpointError
from triaccel_bench.settings import Settings, SettingsError


class OpenLoop:
    """The schedule of ``settings.replay`` and where the run stands in it.

    Args:
        samples: how many are trained on.

    Raises:
        SettingsError: the schedule is another network's, of another number of samples, or not the one that it was.
    """

    start = None
    """Nothing is decided that could be derived again."""

    def __init__(self, settings: Settings, network: Network, hardware: Hardware, samples: int) -> None:
        replay, rules = settings.replay, settings.method
        recording = read_recording(replay.run)
        if recording.fingerprint() != replay.schedule:
            raise SettingsError(
                f"replay.run={replay.run}: expected schedule {replay.schedule}, got {recording.fingerprint()}: it "
                "changed since this command began; start it again"
            )
        _check_layers(replay.run, recording.layers, tuple(network.layers))
        if recording.samples != samples:
            raise SettingsError(
                f"replay.run={replay.run}: expected a run over as many training samples as here, {samples}, got one "
                f"over {recording.samples}; set dataset and dataset.validation_fraction as they were there"
            )
        if replay.shuffle == "layers":
            recording = recording.with_layers_shuffled(replay.seed)
        self._changes = recording.changes
        self._after = [change.after for change in self._changes]
        self._executed_of = lambda requested: executed_dtype(requested, hardware, rules.precision)
        self.decision, self.state = control.start(len(network.layers), rules, self._executed_of)
        self.curvature: dict[str, LayerCurvature] = {}
        self._at = -1

    def scheduled(self, step: int) -> control.Decision | None:
        """What comes into force after ``step`` steps; ``None``: all stays as it is."""
        at = bisect_right(self._after, step) - 1
        if at == self._at:
            return None
        self._at = at
        before, self.decision = self.decision, self._decision(self._changes[at])
        return None if _in_force(self.decision) == _in_force(before) else self.decision

    def _decision(self, change: Change) -> control.Decision:
        executed = tuple(map(self._executed_of, change.requested))
        moved = change.requested != self.decision.requested
        return control.Decision(
            change.requested, executed, change.promoted, change.rates, change.batch, "as recorded", moved
        )

    def probe_due(self, step: int) -> bool:
        return False

    def decide(
        self, epoch: int, variance: object, memory_bytes: int | None, budget_bytes: int | None, *unread: object
    ) -> tuple[control.Signals, control.Decision]:
        """The schedule as it stands; memory goes into the record and nowhere else."""
        stays = replace(self.decision, plan_changed=False)
        return control.Signals(epoch, None, None, memory_bytes, budget_bytes), stays

    def back_off(self, tried: int) -> bool:
        """A smaller B would be another schedule: a run whose memory runs out ends."""
        return False

    def release(self) -> None:
        """Nothing is kept on the device."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": self._at}

    def load_state_dict(self, saved: object) -> None:
        """Go on from there. Raises ``CheckpointError`` where that is none."""
        at = resumption.checked(int, resumption.section(saved, "at"), "place in the schedule")
        if not -1 <= at < len(self._changes):
            raise CheckpointError("its place in the schedule is not as expected (that of another one)")
        self._at = at
        if at >= 0:
            self.decision = self._decision(self._changes[at])


def _in_force(decision: control.Decision) -> tuple[object, ...]:
    return decision.requested, decision.promoted, decision.rates, decision.batch


def _check_layers(where: str, recorded: tuple[str, ...], here: tuple[str, ...]) -> None:
    if recorded == here:
        return
    odd = next((pair for pair in zip(recorded, here) if pair[0] != pair[1]), None)
    told = f"{len(recorded)} layers, not {len(here)}" if odd is None else f"{odd[0]} where this one has {odd[1]}"
    raise SettingsError(
        f"replay.run={where}: expected a run of this model, got one of another ({told}); set model as it was there"
    )
