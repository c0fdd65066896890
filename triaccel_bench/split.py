"""Where the time of a training step goes: a few eager steps after training, timed phase by phase, then undone.

Steps are replayed from one graph, in which nothing can be told apart, and a clock between phases would have to wait for
the device; so neither is done to the steps that are trained and timed. ``stats.split_seconds`` scales what is found
here to an epoch's own seconds.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import get_args

import torch
from torch import Tensor

from triaccel_bench import snapshot
from triaccel_bench.engine import Engine
from triaccel_bench.records import SplitRecord, StepPhase, Verdict

STEPS = 5
"""Timed steps, after one that warms up; fewer where they take longer than ``MOST_SECONDS``."""
MOST_SECONDS = 5.0

_SHORTEST_HOLD = 1e-3
_LONGEST_HOLD = 0.25
"""Seconds for which a card is kept from beginning a phase, so that the host launches all of it meanwhile."""
_TRIAL_CYCLES = 1_000_000

PHASES: tuple[StepPhase, ...] = get_args(StepPhase)

Timed = tuple[dict[StepPhase, float], float | None]
"""Seconds of each phase of a step, and what the host took to launch it, where it does launch."""


def sample(engine: Engine, indices: Tensor, executed: Sequence[str]) -> SplitRecord:
    """Time steps over ``indices`` under the plan in force; the engine and all generators are as before afterwards.

    The engine's captured steps are given up. A fault ends no run that has ended well: the record then says what it was.

    Args:
        executed: the plan in force.
    """
    replays = engine.captured.eager_reason is None
    on_card = indices.is_cuda
    phases: dict[StepPhase, float | None] = dict.fromkeys(PHASES)
    launch, taken, reason = None, 0, None
    try:
        timed = _undone(engine, indices, executed, _on_card if on_card else _on_host)
        taken = len(timed)
        if timed:
            phases |= {phase: statistics.median(seconds[phase] for seconds, _ in timed) for phase in PHASES}
            launch = statistics.median(taken for _, taken in timed) if on_card else None
        else:
            reason = "the card did not wait until a phase was launched, so that its time would be the host's"
    except Exception as error:
        reason = f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"
    if engine.updates_in_backward and phases["update"] is not None:
        phases |= {"backward": phases["backward"] + phases["update"], "update": None}
        reason = "weights are updated within the backward pass"
    return SplitRecord(
        clock="device" if on_card else "host",
        batch=len(indices),
        layers_executed=dict(Counter(executed)),
        steps=taken,
        phase_seconds=phases,
        launch_seconds=launch,
        verdict=verdict(phases, launch, replays),
        reason=reason,
    )


def verdict(phases: dict[StepPhase, float | None], launch: float | None, replays: bool) -> Verdict | None:
    """What a step waits for; ``None`` where its phases are unknown. ``records.Verdict`` has the rule."""
    if phases["data"] is None:
        return None
    total = sum(seconds for seconds in phases.values() if seconds is not None)
    if not replays and launch is not None and launch > total:
        return "launch-bound"
    return "input-bound" if phases["data"] > total - phases["data"] else "compute-bound"


def _undone(
    engine: Engine, indices: Tensor, executed: Sequence[str], time_steps: Callable[[Engine, Tensor], list[Timed]]
) -> list[Timed]:
    # On the host, where there is room: the steps are to fit as they did in training. A CPU's own tensors are no copy.
    state, drawn = deepcopy(engine.state_dict()), snapshot.generators(indices.device)
    try:
        return time_steps(engine, indices)
    finally:
        engine.on_phase = None
        engine.load_state_dict(state, executed)
        snapshot.set_generators(indices.device, drawn)


def _on_host(engine: Engine, indices: Tensor) -> list[Timed]:
    """Between two phases of a CPU all work is done."""
    found: list[Timed] = []
    engine.eager_step(indices)
    started = time.perf_counter()
    while len(found) < STEPS and (not found or time.perf_counter() - started < MOST_SECONDS):
        marks: dict[str, float] = {}
        engine.on_phase = lambda phase, marks=marks: marks.update({phase: time.perf_counter()})
        engine.eager_step(indices)
        found.append((_differences(marks), None))
    return found


def _differences(marks: dict[str, float]) -> dict[StepPhase, float]:
    names = "begin", *PHASES
    return {phase: marks[phase] - marks[before] for before, phase in zip(names, PHASES)}


def _on_card(engine: Engine, indices: Tensor) -> list[Timed]:
    """Steps of which the card did nothing before a phase was launched as a whole; none where that cannot be had."""
    device = indices.device
    launches: dict[str, float] = {}
    for _ in range(2):  # the first one also compiles, and rehearses what is updated within the backward pass
        engine.on_phase = lambda phase: launches.update({phase: time.perf_counter()})
        engine.eager_step(indices)
        torch.cuda.synchronize(device)
    hold = max(_SHORTEST_HOLD, 2 * sum(_differences(launches).values()))
    cycles_a_second = _cycles_a_second(device)
    found: list[Timed] = []
    started = time.perf_counter()
    while len(found) < STEPS and (not found or time.perf_counter() - started < MOST_SECONDS):
        watch = _Held(device, int(hold * cycles_a_second))
        engine.on_phase = watch
        engine.eager_step(indices)
        if watch.in_time:
            found.append((watch.seconds, watch.launched))
        elif hold >= _LONGEST_HOLD:
            break
        else:
            hold *= 2
    return found


def _cycles_a_second(device: torch.device) -> float:
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_TRIAL_CYCLES)  # loads it
    begun.record()
    torch.cuda._sleep(_TRIAL_CYCLES)
    ended.record()
    torch.cuda.synchronize(device)
    return _TRIAL_CYCLES / (begun.elapsed_time(ended) / 1e3)


class _Held:
    """Told by an engine of one step's phases: keeps the card from each until the host has launched it, and times it.

    A phase by itself and not the step: a card takes about a thousand launches ahead, and the host waits then.

    Attributes:
        seconds: of the card, by phase.
        launched: seconds of the host for all of them.
        in_time: whether no phase had begun before it was launched as a whole.
    """

    def __init__(self, device: torch.device, cycles: int) -> None:
        self._device, self._cycles = device, cycles
        self.seconds: dict[StepPhase, float] = {}
        self.launched, self.in_time = 0.0, True

    def __call__(self, phase: str) -> None:
        if phase == "begin":
            self.seconds, self.launched, self.in_time = {}, 0.0, True
        else:
            self.launched += time.perf_counter() - self._since
            ended = torch.cuda.Event(enable_timing=True)
            ended.record()
            self.in_time = self.in_time and not self._begun.query()
            torch.cuda.synchronize(self._device)
            self.seconds[phase] = self._begun.elapsed_time(ended) / 1e3
        if phase != PHASES[-1]:
            torch.cuda._sleep(self._cycles)
            self._begun = torch.cuda.Event(enable_timing=True)
            self._begun.record()
            self._since = time.perf_counter()
