"""The benchmark of a step: its rows, its guard, what it counts; and its groups on tiny models on the CPU."""

import inspect
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from tiny import BASE, images
from torch.utils.flop_counter import FlopCounterMode

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import bench_parts  # noqa: E402
import bench_rig  # noqa: E402
import bench_step  # noqa: E402
import rivals  # noqa: E402
from bench_rig import Bench, Job, judged, one_core  # noqa: E402

HEAD = {"device": "none"}
AMP = ("model=resnet8", "method=amp")


@pytest.fixture
def few_steps(monkeypatch):
    monkeypatch.setattr(bench_rig, "WARM_UP_STEPS", 1)


def bench(jobs=(), path=None, targets=None, **options) -> Bench:
    return Bench(
        BASE, images(72), jobs, targets or {}, HEAD, path, 2, 2, device="cpu", **({"say": lambda text: None} | options)
    )


def test_a_row_without_a_target_is_neither_met_nor_missed():
    assert judged("a", "ms", {"value": 2.0}, {})["ok"] is None
    met = judged("a", "ms", {"value": 2.0, "spread": [1.0, 3.0]}, {"a": ("<=", 2.0)})
    assert met == {"name": "a", "value": 2.0, "unit": "ms", "target": "<= 2.0", "ok": True, "spread": [1.0, 3.0]}
    assert judged("a", "ms", {"value": 2.0}, {"a": (">=", 10)})["ok"] is False


@pytest.mark.parametrize("value", [None, float("nan")])
def test_a_missing_value_misses_its_target(value):
    row = judged("a", "ms", {"value": value}, {"a": ("<=", 2.0)})
    assert row["value"] is None and row["ok"] is False


def test_a_failed_job_says_so_in_all_its_rows_and_the_next_one_runs(tmp_path, capsys):
    def fails(bench):
        raise RuntimeError("no luck\nsecond line")

    path = tmp_path / "deep" / "step.json"
    jobs = [Job({"a": "ms", "b": "s"}, fails), Job({"c": "ms"}, lambda bench, value: {"c": {"value": value}}, (3.0,))]
    made = bench(jobs, path, {"c": ("<", 4)})
    for job in jobs:
        made.run(job)
    written = json.loads(path.read_text())
    assert written["device"] == "none"
    a, b, c = written["rows"]
    for row in (a, b):
        assert row["value"] is None and row["ok"] is False and row["error"] == "RuntimeError: no luck"
    assert (c["value"], c["target"], c["ok"]) == (3.0, "< 4", True)
    assert "no luck" in capsys.readouterr().err


def test_a_job_that_forgets_a_row_has_failed(capsys):
    made = bench([job := Job({"a": "ms", "b": "s"}, lambda bench: {"a": {"value": 1.0}})])
    made.run(job)
    assert made.rows["a"]["ok"] is made.rows["b"]["ok"] is False
    assert "KeyError" in capsys.readouterr().err


def test_a_run_that_is_ended_leaves_what_it_had(tmp_path):
    def ended(bench):
        raise KeyboardInterrupt

    path = tmp_path / "step.json"
    jobs = [Job({"a": "ms"}, lambda bench: {"a": {"value": 1.0}}), Job({"b": "ms"}, ended)]
    made = bench(jobs, path)
    made.run(jobs[0])
    with pytest.raises(KeyboardInterrupt):
        made.run(jobs[1])
    assert [row["name"] for row in json.loads(path.read_text())["rows"]] == ["a"]


def test_a_value_that_another_job_needs_is_measured_once():
    calls = []

    def first(bench):
        calls.append(1)
        return {"a": {"value": 2.0}}

    jobs = [Job({"b": "ms"}, lambda bench: {"b": {"value": 2 * bench.value("a")}}), Job({"a": "ms"}, first)]
    made = bench(jobs)
    for job in jobs:
        made.run(job)
    assert made.rows["b"]["value"] == 4.0 and len(calls) == 1


def test_every_target_is_the_target_of_a_row_and_rows_are_unique():
    names = [name for job in bench_step.all_jobs() for name in job.rows]
    assert len(names) == len(set(names))
    assert bench_step.TARGETS.keys() | bench_step.AIMS.keys() <= set(names)
    assert {rivals.OUR_STEP, rivals.OUR_EPOCH} <= set(names)


def test_jobs_name_configurations_that_exist():
    configurations = set()
    for job in bench_step.all_jobs():
        inspect.signature(job.measure).bind(None, *job.arguments)
        configurations.add(tuple(text for text in job.arguments if isinstance(text, str) and "=" in text))
    for overrides in configurations:
        bench_rig.compose(overrides)


def test_a_part_is_chosen_by_names_of_rows():
    job = Job({"step/resnet18/amp/B96": "ms"}, lambda bench: {})
    assert job.matches([]) and job.matches(["epoch", "resnet18/amp"]) and not job.matches(["epoch"])


def test_the_table_takes_any_row(capsys):
    made = bench()
    made.rows = {"a": judged("a", "ms", {"value": 1.0, "error": "odd [/text]", "plan": {"fp16": 2}}, {"a": ("<", 2)})}
    bench_rig.Console(width=150).print(made.table())
    assert "odd [/text]" in capsys.readouterr().out


def test_cost_of_a_step_from_shapes():
    half = bench_parts.step_cost("resnet18", 96, torch.float16)
    full = bench_parts.step_cost("resnet18", 96, torch.float32)
    parameters = 11_181_642
    assert full.parameter_bytes == parameters * 24 and half.parameter_bytes == parameters * 22
    assert full.operations == half.operations
    # The indices of the max pool are of 8 bytes in both.
    indices = 2 * 8 * 96 * 64 * 8 * 8
    assert full.activation_bytes - indices == pytest.approx(2 * (half.activation_bytes - indices), rel=0.01)
    # Two tensors, the result and the normalised one, for a convolution of the first stage's eight.
    assert full.activation_bytes > 2 * 4 * 96 * (2 * 64 * 16 * 16 + 8 * 64 * 8 * 8)
    again = bench_parts.step_cost("resnet18", 192, torch.float32)
    assert again.operations == 2 * full.operations and again.activation_bytes > 1.9 * full.activation_bytes


def test_operations_are_those_of_a_whole_step():
    """Where nothing is grouped, torch's own count of a forward and a backward pass is the truth."""
    model, batch = bench_parts.plain_model("resnet18_cifar").to("meta"), 4
    with FlopCounterMode(display=False) as counted:
        model(torch.empty(batch, 3, 32, 32, device="meta")).sum().backward()
    assert bench_parts.step_cost("resnet18_cifar", batch, torch.float32).operations == counted.get_total_flops()


def test_grouped_convolutions_are_counted_as_grouped():
    operations = bench_parts.step_cost("efficientnet_b0", 1, torch.float32, 224).operations
    # 0.39 G multiply-adds forward, as torchvision states them.
    assert operations == pytest.approx(3 * 2 * 0.386e9, rel=0.05)


def test_a_floor_stands_beside_its_step():
    made = bench()
    made.rows = {name: {"value": 2.0} for name in ("rate/fp16", "rate/copy", "step/cell")}
    figure = bench_parts.floor(made, "resnet18", "fp16", 96, "cell")["floor/cell"]
    assert figure["value"] == max(figure["arithmetic_ms"], figure["memory_ms"])
    assert figure["memory_ms"] == pytest.approx((figure["parameter_mb"] + figure["activation_mb"]) / 2)  # MB / (GB/s)
    assert made.rows["step/cell"]["ratio_to_floor"] == figure["ratio_to_floor"] == 2.0 / figure["value"]


def test_one_core_is_given_back():
    before = os.sched_getaffinity(0)
    with one_core():
        assert len(os.sched_getaffinity(0)) == 1 and torch.get_num_threads() == 1
    assert os.sched_getaffinity(0) == before


def test_steps_and_epochs_of_a_tiny_model(few_steps):
    made = bench()
    row = bench_step.step_time(made, "step", *AMP)["step"]
    assert row["value"] > 0 and row["spread"][0] <= row["value"] <= row["spread"][1] and row["eager_reason"]
    assert bench_step.epoch_time(made, "epoch", *AMP)["epoch"]["value"] > 0
    found = bench_step.waits(made, "cell", *AMP)
    assert all(figure["value"] < 1 for figure in found.values())


def test_the_adaptive_run_and_the_static_one_take_turns():
    found = bench_step.adaptive(bench(epochs=4), "resnet8")
    standing, changing = found["standing/resnet8"], found["with_changes/resnet8"]
    assert 1 <= standing["epochs"] <= 3 and changing["epochs"] == 3
    assert standing["value"] > 0 and changing["value"] == changing["adaptive_s"] / changing["static_s"]


def test_parts_of_a_tiny_model(few_steps):
    made = bench([Job({"step/resnet8/amp/B96": "ms"}, lambda bench: {"step/resnet8/amp/B96": {"value": 1.0}})])
    parts = (
        bench_parts.capture_cost(made, "cell", *AMP)
        | bench_parts.input_kernel(made, "cell", *AMP)
        | bench_parts.update_passes(made, "cell", *AMP)
        | bench_parts.matrix_rate(made, "fp32", (16,))
        | bench_parts.copy_rate(made, 1024)
        | rivals.own_variant(made, "resnet8", "ours/no_graphs", "auto", "engine.graphs=false")
    )
    assert all(figure["value"] > 0 for figure in parts.values())


def test_the_rivals_images_are_those_of_torchvision():
    data = images(16, side=32)
    settings = bench_rig.compose(["dataset=cifar10"]).dataset
    pixels, label = rivals.PilImages(data, settings)[3]
    assert pixels.shape == (3, 32, 32) and pixels.dtype == torch.float32 and label == int(data.y_train[3])


def test_figures_of_an_earlier_sitting_are_kept_but_for_those_of_another_code(tmp_path, capsys):
    path, jobs = tmp_path / "figures.json", [
        Job({"first": "ms"}, lambda bench: {"first": {"value": 1.0}}),
        Job({"second": "ms"}, lambda bench: {"second": {"value": bench.unknown}}),
    ]  # fmt: skip
    head = {"code_hash": "a" * 12, "date": "2026-01-01", "targets": ("x",)}
    before = Bench(BASE, images(72), jobs, {}, head, path, 1, 1, device="cpu", say=lambda text: None)
    for job in jobs:
        before.run(job)
    capsys.readouterr()
    now = head | {"date": "2026-01-02"}
    assert list(bench_rig.resumed(path, now)) == ["first"] and now["sittings"] == ["2026-01-01", "2026-01-02"]
    for other in ({"code_hash": "b" * 12}, {"targets": ("x", "y")}, {"card": "T4"}):
        with pytest.raises(ValueError, match=f"expected figures of {next(iter(other))}=.* in .*; leave it out"):
            bench_rig.resumed(path, head | other)
    path.write_text("[]")
    with pytest.raises(ValueError, match="expected .* to hold a benchmark's rows"):
        bench_rig.resumed(path, head)


def test_without_a_gpu_it_says_so(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench_step.main(["--out", str(tmp_path / "step.json")]) == 2
    assert "expected a CUDA device" in capsys.readouterr().err
