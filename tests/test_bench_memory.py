"""The benchmark of memory: its rows, what it calls a prediction, and its groups on a tiny model on the CPU."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
from tiny import BASE, images

from triaccel_bench import assembly, rungs
from triaccel_bench.configuration import compose
from triaccel_bench.records import DecisionTrace, Trace

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import bench_memory  # noqa: E402
import bench_rig  # noqa: E402
import forced_shortages  # noqa: E402
from bench_rig import Bench  # noqa: E402

MODEL = "resnet8"
HEAD = {"device": "none"}


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(bench_rig, "WARM_UP_STEPS", 1)
    monkeypatch.setattr(forced_shortages, "TRAIN_IMAGES", 120)


def bench(**options) -> Bench:
    base = [*BASE, "method.batch.initial=8", "method.batch.min=4", "method.batch.down=4", "method.curvature.batch=8"]
    silent = {"say": lambda text: None}
    return Bench(base, images(120), (), {}, HEAD, None, 2, 2, device="cpu", **(silent | options))


def test_every_row_that_has_a_target_is_measured():
    rows = {row for job in bench_memory.all_jobs() for row in job.rows}
    asked = bench_memory.targets("NVIDIA H200")
    assert asked.keys() <= rows and bench_memory.targets("Tesla T4").keys() < asked.keys()
    assert sum(name.startswith("oom/") for name in asked) == 12


@pytest.mark.parametrize("phase", ["forward", "backward", "update", "probe", "evaluation"])
def test_a_forced_shortage_happens_once_and_passes(phase):
    found = forced_shortages.shortages(bench(), MODEL, phase, places=2)[f"oom/{MODEL}/{phase}"]
    assert found["told"] == {"recovered": 2} and found["value"] == 1.0


def test_what_goes_wrong_is_told():
    made = bench().trainer(f"model={MODEL}", "epochs=1")
    never = forced_shortages.force(made, "capture", random.Random(0))
    used = forced_shortages._watched(made)
    made.train()
    assert forced_shortages._fault(made, never, used) == "the place was never reached"
    never.happened, made.run.retries = True, {"allocator": 1}
    assert forced_shortages._fault(made, never, used) is None
    used[0][0] = used[0][1]
    assert forced_shortages._fault(made, never, used) == "a sample was lost or used twice"
    made.run.retries = {}
    assert forced_shortages._fault(made, never, used) == "retries {}"


def decision(before: int, after: int, memory: int, changed: bool = False) -> DecisionTrace:
    return DecisionTrace(
        step=1, epoch=1, variance=None, lambda_max=None, memory_bytes=memory, budget_bytes=10_000, free_bytes=None,
        batch_before=before, batch_after=after, batch_reason="", requested=[], executed=[], promoted=[],
        rate_scale=[], plan_changed=changed,
    )  # fmt: skip


def test_only_rungs_never_run_before_are_predictions():
    rules = compose(["method=triaccel_batch", "method.batch.growth=model"]).method.batch
    trace = Trace(layers=[])
    trace.decisions = [
        decision(96, 128, 1000),  # one rung, from no line
        decision(128, 256, 1300),  # the line says 2500
        decision(256, 128, 2600),
        decision(128, 256, 1300),  # known by now
        decision(256, 320, 2600, changed=True),  # another plan
        decision(320, 320, 3000),
    ]
    (found,) = bench_memory.prediction_errors(trace, rules)
    assert (found["batch"], found["predicted"], found["measured"]) == (256, 2500.0, 2600)
    assert found["error"] == pytest.approx(2500 / 2600 - 1)
    assert rungs.Seen().line() is None and bench_memory.prediction_errors(Trace(layers=[]), rules) == []


def test_a_run_that_follows_its_budget_tells_where_it_settles():
    found = bench_memory.elastic(bench(), MODEL, epochs=4)
    rows = bench_memory.all_jobs()[1].rows
    assert found.keys() == {name.replace(bench_memory.MODELS[0], MODEL) for name in rows}
    assert found[f"elastic/batch/{MODEL}"]["value"] >= 8
    assert found[f"elastic/peak_over_budget/{MODEL}"]["value"] > 0
    assert found[f"elastic/epoch_over_fp32/{MODEL}"]["fp32_s"] > 0


def test_a_budget_that_is_not_fp32s_peak_is_told(monkeypatch):
    monkeypatch.setattr(assembly, "resolve_budget", lambda *given: (10**12, "someone else's"))
    with pytest.raises(RuntimeError, match="expected a budget of FP32's peak, .* got 1000000000000"):
        bench_memory.elastic(bench(), MODEL, epochs=1)
