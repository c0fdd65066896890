#!/usr/bin/env python3
"""Kills a small sweep with SIGKILL at random moments and starts it again until it is done. Exit code 0 only if
nothing came of that.

python scripts/kill_test.py [--kills 50] [--seed 0] [--methods fp32,amp] [--folder DIR]     10 s a kill on two cores

Each kill takes the whole session, the command alone, the process that trains, or one that helps. After every kill all
records are read; after every sweep records and tables are held against those of a sweep that nobody disturbed: every
figure that no clock has told is the same bit for bit, and no run is missing, there twice, or half there.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from triaccel_bench.layout import to_markdown
from triaccel_bench.records import CHECKPOINT_FILE, RUN_FILE, TRACE_FILE, read_run, read_trace
from triaccel_bench.results import Results, read_results
from triaccel_bench.tables import table1, table2

# Probes by Fisher take so little of the time they may take that no clock decides whether they are made.
SWEEP = (
    "-m", "dataset=digits", "dataset.image_size=8", "model=resnet8", "model.input_size=8", "dataset.crop_padding=1",
    "seeds=[0,1]", "epochs=3", "device=cpu", "progress=plain", "memory.meter=tensors", "memory.calibration_steps=1",
    "method.batch.initial=32", "method.batch.min=16", "method.batch.max=64", "method.batch.up=8", "method.batch.down=8",
    "method.curvature.estimator=fisher", "method.curvature.every=25", "method.curvature.batch=8",
    "method.curvature.max_overhead=1.0", "method.control.interval=7",
)  # fmt: skip
METHODS = "fp32,amp,triaccel"
CLOCKS = {
    "provenance", "resumed_at", "seconds", "first_use_seconds", "checkpoint_seconds", "train_seconds",
    "evaluation_seconds", "probe_seconds", "capture_seconds", "controller_seconds", "split",
}  # fmt: skip
VICTIMS, WEIGHTS = ("session", "command", "worker", "helper"), (3, 2, 3, 1)


class Fault(Exception):
    """What a kill has done that it must not do."""


def start(root: Path, methods: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "triaccel_bench.cli", *SWEEP, f"method={methods}", f"results.root={root}"]
    # One thread: two on a busy machine wait for each other, and its number may change the order of sums.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, **streams, text=True, start_new_session=True, env=environment)


def processes_of(session: int) -> dict[int, int]:
    """The parent of each process that lives in the session."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent, _, owner = path.read_text().rsplit(")", 1)[1].split()[:4]
            if int(owner) == session and state != "Z":
                found[int(path.parent.name)] = int(parent)
    return found


def kill(process: subprocess.Popen, victim: str, chance: random.Random) -> str:
    """SIGKILL to the victim, then the end of all that is left of the session by itself; returns what was said."""
    alive = processes_of(process.pid)
    helpers = [found for found, parent in alive.items() if parent == process.pid]
    # Forked by a helper.
    workers = [found for found in alive if found not in helpers and found != process.pid]
    one_of = {"session": [], "command": [process.pid], "worker": workers, "helper": helpers}[victim]
    for found in [chance.choice(one_of)] if one_of else [*alive]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(found, signal.SIGKILL)
    said, _ = process.communicate()
    if "Traceback" in said:
        raise Fault(f"a traceback after the kill of a {victim}: {said[-2000:]}")
    until = time.monotonic() + 20
    while (left := processes_of(process.pid)) and time.monotonic() < until:
        time.sleep(0.02)
    if left:
        raise Fault(f"processes {sorted(left)} live on after the kill of a {victim}")
    return said


def wait(process: subprocess.Popen, root: Path, takes: float, chance: random.Random) -> None:
    """Until a random moment: of the whole sweep, or, two times of three, of the second after a checkpoint."""
    begun, until = time.time(), chance.uniform(0.0, takes)
    after = chance.uniform(0.0, 1.0) if chance.random() < 2 / 3 else None
    while process.poll() is None and (after is not None or time.time() - begun < until):
        # What was found may be gone when it is looked at.
        with contextlib.suppress(OSError):
            if after is not None and any(path.stat().st_mtime > begun for path in root.glob(f"*/*/{CHECKPOINT_FILE}")):
                time.sleep(after)
                return
        time.sleep(0.005)


def paths_of(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob(RUN_FILE))


def check_on_the_way(root: Path, expected: list[str]) -> None:
    """Whatever is there is whole, and one of the sweep's runs."""
    for name in paths_of(root):
        if name not in expected:
            raise Fault(f"{name}: a run that is none of the sweep's")
        if read_run(root / name).status == "done":
            read_trace((root / name).with_name(TRACE_FILE))
    # It may have been killed before there was a folder.
    if root.exists() and (problems := read_results([root]).problems):
        raise Fault("; ".join(problems))


def without_clocks(value: Any) -> Any:
    if isinstance(value, dict):
        # The root's name is part of what was asked for, and no figure.
        return {key: without_clocks(part) for key, part in value.items() if key not in CLOCKS | {"root"}}
    if isinstance(value, list):
        # Warnings of other code are of whoever edits it meanwhile.
        return [without_clocks(part) for part in value if not str(part).startswith("resumed at step")]
    return value


def differences(left: Any, right: Any, where: str) -> Iterator[str]:
    if isinstance(left, dict) and isinstance(right, dict) and left.keys() == right.keys():
        for key in left:
            yield from differences(left[key], right[key], f"{where}.{key}")
    elif isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        for index, pair in enumerate(zip(left, right)):
            yield from differences(*pair, f"{where}.{index}")
    elif left != right:
        yield f"{where}: {str(left)[:200]} against {str(right)[:200]}"


def tables(root: Path) -> str:
    """Both tables as Markdown, of records in which each clock reads one second."""
    results = read_results([root])
    runs = []
    for run in results.runs:
        clocks = {"train_seconds": 1.0, "probe_seconds": 0.0, "controller_seconds": 0.0}
        epochs = [epoch.model_copy(update=clocks) for epoch in run.epochs]
        # Whoever edits the code meanwhile is told so by the tables.
        code = {"code_hash": None, "git_commit": None, "git_dirty": None}
        provenance = run.provenance.model_copy(update=code)
        told = {"epochs": epochs, "first_use_seconds": 1.0, "provenance": provenance, "split": None}
        runs.append(run.model_copy(update=told))
    whole = Results(tuple(sorted(runs, key=lambda run: (run.cell, run.seed))), results.problems)
    return to_markdown(table1(whole)) + to_markdown(table2(whole))


def check_at_the_end(root: Path, undisturbed: Path) -> None:
    """The sweep ended as the other one."""
    expected, found = paths_of(undisturbed), paths_of(root)
    if found != expected:
        raise Fault(f"expected the runs {expected}, got {found}")
    for name in expected:
        left, right = read_run(undisturbed / name), read_run(root / name)
        traces = [read_trace((place / name).with_name(TRACE_FILE)) for place in (undisturbed, root)]
        pairs = [(left.model_dump(), right.model_dump()), tuple(trace.model_dump(mode="json") for trace in traces)]
        for pair in pairs:
            if told := list(differences(*map(without_clocks, pair), name)):
                raise Fault("; ".join(told[:5]))
    left_over = [str(path) for path in root.rglob("*") if CHECKPOINT_FILE in path.name or path.name.startswith(".run")]
    if left_over:
        raise Fault(f"left over: {left_over}")
    if told := list(differences(tables(undisturbed).splitlines(), tables(root).splitlines(), "tables")):
        raise Fault("; ".join(told[:5]))


def run(kills: int, methods: str, chance: random.Random, folder: Path, say=print) -> Counter[str]:
    """Sweeps, one after the other, until that many kills have been survived; returns how often what happened."""
    undisturbed = folder / "undisturbed"
    begun = time.monotonic()
    process = start(undisturbed, methods)
    said, _ = process.communicate()
    takes = time.monotonic() - begun
    if process.returncode or len(paths_of(undisturbed)) != 2 * len(methods.split(",")):
        raise Fault(f"the sweep does not even end undisturbed: {said[-2000:]}")
    say(f"undisturbed: {takes:.1f} s")
    expected, done, counts, sweeps = paths_of(undisturbed), 0, Counter(), 0
    while done < kills:
        sweeps += 1
        root = folder / f"sweep-{sweeps}"
        while True:
            process = start(root, methods)
            try:
                if done < kills:
                    wait(process, root, takes, chance)
                # The last sweep ends undisturbed, when all kills have been.
                said, _ = process.communicate(timeout=0.0 if done < kills else None)
            except subprocess.TimeoutExpired:
                (victim,) = chance.choices(VICTIMS, WEIGHTS)
                said = kill(process, victim, chance)
                done += 1
                counts[victim] += 1
            else:
                if process.returncode:
                    raise Fault(f"exit code {process.returncode} without a kill: {said[-2000:]}")
            counts["resumed"] += said.count("resumed at epoch")
            check_on_the_way(root, expected)
            if process.returncode == 0:
                break
        check_at_the_end(root, undisturbed)
        say(f"sweep {sweeps}: ended as the undisturbed one; {done} of {kills} kills")
        shutil.rmtree(root)
    victims = ", ".join(f"{counts[victim]} of the {victim}" for victim in VICTIMS)
    say(
        f"{done} kills ({victims}), {sweeps} sweeps, {counts['resumed']} times gone on from a checkpoint: no difference"
    )
    return counts


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the victims")
    parser.add_argument("--methods", default=METHODS, help=f"of the sweep; {METHODS} by default")
    parser.add_argument("--folder", type=Path, help="where to write; a temporary one that is removed by default")
    options = parser.parse_args(arguments)
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        try:
            run(options.kills, options.methods, random.Random(options.seed), folder)
        except Fault as fault:
            print(f"kill_test: {fault}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
