"""What has come of each (cell, seed) of a command, what is said of it at the end, and the exit code."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from triaccel_bench.records import Status

LAST_WORDS = 200
"""Lines of a traceback or a crash that a record keeps; the last ones."""

TIME_IS_UP = 3
"""The exit code of a command that ``runner.max_minutes`` has stopped."""


@dataclass(frozen=True)
class Outcome:
    """Of one seed, or of a cell that was refused.

    Attributes:
        status: that of the record; refused: it cannot be set up; left: the time was up before its end; skipped: not
            begun, because another failed and ``on_failure=stop``.
        number: of its cell in the command.
    """

    label: str
    seed: int
    status: Status | Literal["refused", "left", "skipped"]
    reason: str | None
    path: Path | None
    reused: bool = False
    number: int = 0

    @property
    def failed(self) -> bool:
        return self.status in ("diverged", "oom", "failed", "refused")


@dataclass(frozen=True)
class Asked:
    """How a cell was asked for: its own overrides, and the options of the whole command, but for ``-m``."""

    overrides: tuple[str, ...]
    options: tuple[str, ...] = ()

    def again(self, seeds: Sequence[int] | None) -> str:
        """The line for a shell that asks for these seeds of this cell alone; ``None``: for those it was asked with."""
        overrides = self.overrides
        if seeds is not None:
            kept = [override for override in overrides if not re.match(r"\+{0,2}seeds=", override)]
            overrides = *kept, f"seeds=[{','.join(map(str, seeds))}]"
        return shlex.join(["triaccel-bench", *overrides, *self.options])


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """As ``cli`` tells them."""
    statuses = {outcome.status for outcome in outcomes}
    if "left" in statuses:
        # Whoever starts the command again while it says so gets to all of them, and then hears of what failed.
        return TIME_IS_UP
    if "refused" in statuses:
        return 2
    if statuses <= {"done", "interrupted"} and "interrupted" in statuses:
        return 130
    return 0 if statuses <= {"done"} else 1


def closing_lines(outcomes: Sequence[Outcome], asked: Sequence[Asked], minutes: float | None) -> list[str]:
    """What failed and how to run only that; what was not run, and why.

    Args:
        asked: how each cell was asked for.
        minutes: ``runner.max_minutes``.
    """
    lines = []
    for outcome in outcomes:
        if outcome.failed and outcome.status != "refused" or outcome.status == "interrupted":
            where = f" (see {outcome.path})" if outcome.path is not None and outcome.path.exists() else ""
            lines.append(f"{outcome.status}: {outcome.label} seed {outcome.seed}: {outcome.reason}{where}")
    lines += _how_to_run_them(outcomes, asked)
    skipped = [outcome for outcome in outcomes if outcome.status == "skipped"]
    if skipped:
        lines.append(f"stopped (on_failure=stop) before {_runs(len(skipped))}: {_named(skipped)}")
    left = [outcome for outcome in outcomes if outcome.status == "left"]
    if left:
        lines.append(
            f"time is up (runner.max_minutes={minutes:g}): {len(left)} of {_runs(len(outcomes))} left: "
            f"{_named(left)}; the same command goes on with them"
        )
        lines += [f"{run.label} seed {run.seed}: {run.reason}" for run in left if run.reason is not None]
    return lines


def _how_to_run_them(outcomes: Sequence[Outcome], asked: Sequence[Asked]) -> list[str]:
    """A line a cell; of cells that were refused only beside others: alone they are the command itself."""
    failed = [outcome for outcome in outcomes if outcome.failed]
    if all(outcome.status == "refused" for outcome in outcomes) or not failed:
        return []
    seeds: dict[int, list[int] | None] = {}
    for outcome in failed:
        if outcome.status == "refused":
            seeds[outcome.number] = None
        elif (so_far := seeds.setdefault(outcome.number, [])) is not None:
            so_far.append(outcome.seed)
    return ["to run only what failed:", *(f"  {asked[number].again(which)}" for number, which in seeds.items())]


def _named(outcomes: Sequence[Outcome]) -> str:
    seeds: dict[tuple[int, str], list[int]] = {}
    for outcome in outcomes:
        seeds.setdefault((outcome.number, outcome.label), []).append(outcome.seed)
    return "; ".join(
        f"{label} seed{'s' * (len(which) > 1)} {', '.join(map(str, which))}" for (_, label), which in seeds.items()
    )


def _runs(count: int) -> str:
    return f"{count} run{'s' * (count != 1)}"
