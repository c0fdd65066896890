#!/usr/bin/env python3
"""Draw the trials of tuning: conf/trial/t0.yaml and on. The same seed and ranges give the same files.

python scripts/draw_trials.py [--out DIR]

The first trial is what ``conf/`` ships, so that tuning cannot choose worse on the validation split than not tuning.
Exit code 2: they cannot be written.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from triaccel_bench.files import write_together

SEED, TRIALS = 2025, 8
SHIPPED = {
    "optimizer.lr": "0.1",
    "optimizer.weight_decay": "5.0e-4",
    "method.precision.tau_low": "auto",
    "method.precision.tau_high": "auto",
    "method.curvature.alpha": "0.05",
    "method.curvature.tau_curv": "auto",
}
RANGES = {
    "optimizer.lr": (0.02, 0.3),
    "optimizer.weight_decay": (1e-4, 2e-3),
    "method.precision.tau_low": (1e-7, 1e-4),
    "method.precision.tau_high": (3.0, 1000.0),  # times tau_low
    "method.curvature.alpha": (0.005, 0.5),
    "method.curvature.tau_curv": (1.0, 1000.0),
}
"""Each cut into as many parts of equal length on a logarithmic scale as there are draws, one draw in each (a Latin
hypercube): few trials then leave no end of a range untried."""

OUT = Path(__file__).resolve().parent.parent / "conf" / "trial"


def drawn() -> list[dict[str, str]]:
    """Each trial's settings by key, as text for YAML."""
    chance, draws = random.Random(SEED), TRIALS - 1
    columns = {key: _column(chance, low, high, draws) for key, (low, high) in RANGES.items()}
    columns["method.precision.tau_high"] = [
        ratio * low for ratio, low in zip(columns["method.precision.tau_high"], columns["method.precision.tau_low"])
    ]
    return [SHIPPED, *({key: f"{column[n]:.2e}" for key, column in columns.items()} for n in range(draws))]


def _column(chance: random.Random, low: float, high: float, draws: int) -> list[float]:
    places = [(part + chance.random()) / draws for part in range(draws)]
    chance.shuffle(places)
    return [low * math.exp(place * math.log(high / low)) for place in places]


def text(number: int, trial: dict[str, str]) -> str:
    """A trial as a file of the group ``trial``."""
    origin = "what conf/ ships" if number == 0 else f"seed {SEED}"
    lines = ["# @package _global_", f"# Trial {number} of {TRIALS}, {origin}; made by scripts/draw_trials.py."]
    opened: list[str] = []
    for key, value in trial.items():
        *groups, name = key.split(".")
        for depth, group in enumerate(groups):
            if opened[: depth + 1] != groups[: depth + 1]:
                lines.append(f"{'  ' * depth}{group}:")
        opened = groups
        lines.append(f"{'  ' * len(groups)}{name}: {value}")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Draw the trials of tuning.")
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR", help="default: conf/trial")
    out = parser.parse_args(arguments).out
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_together({out / f"t{number}.yaml": text(number, trial).encode() for number, trial in enumerate(drawn())})
    except OSError as error:
        print(f"{out}: expected a folder that can be written, got {error}; name another by --out", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
