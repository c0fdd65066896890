#!/usr/bin/env python3
"""Does the control loop in these records really act? Exit code 0 only if every check passes.

python scripts/check_loop.py RECORDS [RECORDS ...]     folders searched for run.json

Every finished run's trace is compared with the switches of its own settings: what is switched
off must never have moved, and what is switched on must have moved, so that a loop that does
nothing cannot pass. A run with every switch on must also have read every layer's curvature,
promoted a layer, and brought its batch size to rest.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path

from triaccel_bench.records import RUN_FILE, TRACE_FILE, RunRecord, Trace, read_run, read_trace

SETTLED_DECISIONS = 3
"""Control steps without a change of B that count as settled."""
BOUNDS = ("batch.min", "batch.max", "predicted", "free", "of its peak")
"""Words of the reasons with which the batch controller states a bound outside the band."""


def checks(run: RunRecord, trace: Trace) -> Iterator[tuple[str, bool, str]]:
    """Yield (what is checked, whether it holds, the evidence) for one run."""
    method = run.settings["method"]
    decisions = trace.decisions
    if not decisions:
        yield "control steps were taken", False, "none recorded"
        return
    if run.settings.get("replay", {}).get("run") is not None:
        # What moves there is the schedule of another run.
        yield "nothing was read", not trace.probes and run.tau_low is None, f"{len(trace.probes)} probes"
        return
    yield from _precision(method, run, trace)
    yield from _batch(method, run, trace)
    yield from _curvature(method, run, trace)


def _precision(method: dict, run: RunRecord, trace: Trace) -> Iterator[tuple[str, bool, str]]:
    changes = [d.step for d in trace.decisions if d.plan_changed]
    if method["precision"]["adaptive"]:
        # A CPU executes every layer in FP32 by design; there the plan can be seen in what was requested.
        kind = "requested" if _executes_fp32_only(method, run) else "executed"
        mixes = [set(getattr(d, kind)) for d in trace.decisions]
        mixed = [mix for mix in mixes if len(mix) >= 2]
        yield (
            f"two {kind} dtypes at once",
            bool(mixed),
            f"{sorted((mixed or mixes)[-1])} at {len(mixed)} of {len(mixes)} control steps",
        )
        yield "the plan changed after the start", bool(changes), f"at steps {changes}"
    else:
        start = {method["dtype"]}
        # Promotion alone may lift a layer out of the static plan.
        still = all(set(d.requested) <= start or method["curvature"]["promotion"] for d in trace.decisions)
        yield (
            "static precision stayed static",
            still,
            f"requested {sorted(set().union(*(d.requested for d in trace.decisions)))}",
        )


def _is_a_whole_loop(method: dict) -> bool:
    """Not an ablation; Tri-Accel+ has no plan that moves."""
    return method["batch"]["elastic"] and method["curvature"]["rates"]


def _executes_fp32_only(method: dict, run: RunRecord) -> bool:
    on_cpu = run.provenance is not None and run.provenance.device == "cpu"
    return on_cpu and method["precision"]["cpu_executes"] == "fp32"


def _batch(method: dict, run: RunRecord, trace: Trace) -> Iterator[tuple[str, bool, str]]:
    batch = method["batch"]
    sizes = [batch["initial"], *(d.batch_after for d in trace.decisions)]
    if not batch["elastic"]:
        yield "static batch stayed static", set(sizes) == {batch["initial"]}, f"B in {sorted(set(sizes))}"
        return
    yield "B changed", len(set(sizes)) > 1, f"B {' '.join(map(str, _runs(sizes)))}"
    if not _is_a_whole_loop(method):
        return
    tail = trace.decisions[-SETTLED_DECISIONS:]
    last = tail[-1]
    still = len(tail) == SETTLED_DECISIONS and len({d.batch_after for d in tail} | {tail[0].batch_before}) == 1
    share = math.nan if last.memory_bytes is None or not last.budget_bytes else last.memory_bytes / last.budget_bytes
    inside = batch["rho_low"] <= share <= batch["rho_high"]
    bound = any(word in last.batch_reason for word in BOUNDS)
    yield (
        "B settled in the band or at a stated bound",
        still and (inside or bound),
        f"B={last.batch_after}, {last.batch_reason}",
    )


def _curvature(method: dict, run: RunRecord, trace: Trace) -> Iterator[tuple[str, bool, str]]:
    curvature = method["curvature"]
    rates = [rate for d in trace.decisions for rate in d.rate_scale]
    promoted = sum(any(d.promoted) for d in trace.decisions)
    whole = _is_a_whole_loop(method)
    if whole:
        found = [layer for layer in run.layers if layer.eigenvalues and math.isfinite(layer.eigenvalues[0])]
        yield (
            "a finite lambda for every layer",
            len(found) == len(run.layers) > 0,
            f"{len(found)} of {len(run.layers)} layers",
        )
    elif not (curvature["rates"] or curvature["promotion"]):
        yield "no curvature was read", not trace.probes, f"{len(trace.probes)} probes"
    if curvature["rates"]:
        yield "the smallest rate scale is below 1", 0 < min(rates) < 1, f"{min(rates):.4f}"
    else:
        yield "static rates stayed static", set(rates) == {1.0}, f"rates in [{min(rates)}, {max(rates)}]"
    if whole and curvature["promotion"]:
        yield "a layer was promoted", promoted > 0, f"at {promoted} of {len(trace.decisions)} control steps"
    elif not curvature["promotion"]:
        yield "no layer was promoted", promoted == 0, f"at {promoted} control steps"


def _runs(values: list[int]) -> list[int]:
    return [value for index, value in enumerate(values) if index == 0 or value != values[index - 1]]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folders", nargs="+", help="searched for run.json files, below as well")
    folders = parser.parse_args(arguments).folders
    paths = sorted(path for folder in folders for path in Path(folder).rglob(RUN_FILE))
    failed = checked = 0
    for path in paths:
        run = read_run(path)
        print(f"{run.dataset}/{run.model}/{run.method} seed {run.seed}: {run.status}")
        if run.status != "done":
            failed += 1
            continue
        for what, holds, evidence in checks(run, read_trace(path.parent / TRACE_FILE)):
            checked += 1
            failed += not holds
            print(f"  {'pass' if holds else 'FAIL'}  {what}: {evidence}")
    if not checked:
        print(f"no finished run below {folders}; expected a folder with run.json files", file=sys.stderr)
        return 2
    print(f"{checked} checks on {len(paths)} records, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
