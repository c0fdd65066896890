"""The benchmark of curvature: its rows and arithmetic, and its jobs on a tiny model on the CPU."""

import inspect
import json
import math
import sys
import time
from pathlib import Path

import pytest
import torch
from tiny import BASE, images

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import bench_curvature  # noqa: E402
import bench_rig  # noqa: E402
import curvature_truth  # noqa: E402
from bench_rig import Bench, judged  # noqa: E402
from curvature_truth import Checks, TrainedModels, settings_of  # noqa: E402

from triaccel_bench.lanczos import Spectrum  # noqa: E402
from triaccel_bench.methods import Method  # noqa: E402
from triaccel_bench.models import ResNet8  # noqa: E402
from triaccel_bench.probe import Probe  # noqa: E402
from triaccel_bench.records import LayerRecord, ProbeTrace, Trace, planned_run  # noqa: E402

MODEL = "resnet8"


def bench(*overrides: str) -> Bench:
    base = [*BASE, "method.curvature.every=2", "method.curvature.batch=8", "method.batch.elastic=false", *overrides]
    return Bench(base, images(72), [], {}, {}, None, 2, 1, device="cpu", say=lambda text: None)


@pytest.fixture
def every_probe(monkeypatch):
    monkeypatch.setattr(Method, "_allowance", lambda self, training_seconds: math.inf)


def run_of(*epochs: dict):
    run = planned_run(bench_rig.compose(BASE).model_dump(mode="json"), 0, "cell", 1)
    run.steps = 12
    common = dict(train_loss=1.0, train_accuracy_percent=1.0, steps=6, samples_seen=6, batch_mean=1.0, batch_min=1)
    common |= dict(batch_max=1, batch_last=1, learning_rate_last=0.1, layers_requested={}, layers_executed={})
    record = bench_curvature.RunRecord.model_fields["epochs"].annotation.__args__[0]
    run.epochs = [
        record(**{**common, "epoch": index, "train_seconds": 1.0, **each}) for index, each in enumerate(epochs, 1)
    ]
    return run


def probe(step: int, seconds: float, *layers: str) -> ProbeTrace:
    count = len(layers)
    return ProbeTrace(
        step=step, seconds=seconds, peak_bytes=None, layers=list(layers), eigenvalues=[[1.0]] * count,
        iterations=[3] * count, converged=[True] * count,
    )  # fmt: skip


def test_every_target_is_the_target_of_a_row_and_rows_are_unique():
    jobs = bench_curvature.all_jobs()
    names = [name for job in jobs for name in job.rows]
    assert len(names) == len(set(names))
    assert bench_curvature.targets("NVIDIA H200").keys() | bench_curvature.AIMS.keys() <= set(names)
    assert not bench_curvature.targets("another").keys() & bench_curvature.H200_TARGETS.keys()
    for job in jobs:
        inspect.signature(job.measure).bind(None, *job.arguments)


def test_layers_that_are_named_exist():
    for model in bench_curvature.MODELS:
        names = dict(curvature_truth.plain_model(model).named_modules())
        assert names.keys() >= set(bench_curvature.TRUTH_LAYERS.get(model, ()))
    assert names.keys() >= set(bench_curvature.EXACT_LAYERS)
    assert len(bench_curvature.TRUTH_LAYERS["efficientnet_b0"]) == 12


def test_a_target_with_two_sides():
    met = {value: judged("a", "", {"value": value}, {"a": ("in", (0.08, 0.12))}) for value in (0.07, 0.08, 0.1, 0.13)}
    assert [row["ok"] for row in met.values()] == [False, True, True, False]
    assert met[0.1]["target"] == "0.08 .. 0.12"


def test_the_share_is_of_training_with_its_probes():
    run = run_of({"train_seconds": 4.0, "probe_seconds": 0.7}, {"train_seconds": 2.0, "probe_seconds": 0.1})
    trace = Trace(layers=["a", "b"], probes=[probe(4, 0.5, "a", "b"), probe(8, 0.2, "a"), probe(12, 0.1, "b")])
    found = bench_curvature.share(run, trace, 4)
    assert found["value"] == pytest.approx(0.8 / 6)
    assert found["without_first_probe"] == pytest.approx(0.3 / 5.5)
    assert found["over_training_without_probes"] == pytest.approx(0.8 / 5.2)
    assert (found["probes"], found["due"], found["first_probe_ms"]) == (3, 3, 500.0)
    assert found["probe_ms"] == pytest.approx(150) and "note" not in found
    whole = Trace(layers=["a"], probes=[probe(step, 0.1, "a") for step in (4, 8, 12)])
    assert "all layers" in bench_curvature.share(run, whole, 4)["note"]
    assert "note" not in bench_curvature.share(run, whole, 2)
    with pytest.raises(RuntimeError, match="no probe in 12 steps"):
        bench_curvature.share(run, Trace(layers=["a"]), 4)


def test_memory_is_that_of_the_worst_epoch():
    run = run_of(
        {"memory_peak_bytes": 200, "probe_peak_bytes": 100},
        {"memory_peak_bytes": 100, "probe_peak_bytes": 150},
        {"memory_peak_bytes": 100},
    )
    found = bench_curvature.memory(run)
    assert (found["value"], found["whole_run"], found["training_gb"]) == (1.5, 1.0, 200 / 1e9)
    with pytest.raises(RuntimeError, match="no memory"):
        bench_curvature.memory(run_of({}))


def test_rounds_count_refreshes_and_the_steps_between():
    run = run_of({})
    run.layers = [LayerRecord(name="a", elements=1, requested="fp32", executed="fp32", lambda_age_steps=2)]
    trace = Trace(layers=["a", "b", "c"], probes=[probe(2, 0.1, "a", "b"), probe(4, 0.1, "a"), probe(10, 0.1, "a")])
    found = bench_curvature.rounds(run, trace, 2)
    assert found["value"] == pytest.approx(4 / 3) and found["never"] == 1 and found["layers_a_probe"] == 1
    assert (found["steps_between"], found["longest_between"], found["age_at_end"], found["due"]) == (4, 6, 2, 6)
    assert found["products_a_probe"] == 3


def test_a_run_and_what_its_probes_took(every_probe):
    trained = TrainedModels(epochs=1)
    found = bench_curvature.training(bench(), MODEL, "fisher", 1, trained)
    share, vram, rounds = (found[f"fisher/{what}/{MODEL}"] for what in ("share", "vram", "rounds"))
    assert 0 < share["value"] < 1 and share["probes"] == share["due"] == 2 and "all layers" in share["note"]
    assert vram["value"] >= 1.0 and rounds["value"] == 2.0 and rounds["steps_between"] == 2
    made = trained.trainer(made_on := bench(), MODEL)
    assert made_on.device.type == "cpu" and made.step == 0
    state = made.network.module.state_dict()
    assert all(torch.equal(state[key], value) for key, value in trained._states[MODEL].items())


def test_the_clock_stands_still_while_probes_are_checked(monkeypatch, every_probe):
    """A check that takes long shows in no figure of the run."""
    made = bench().trainer(*settings_of(MODEL, "hessian", 1))
    checks = Checks(made, None, 4)

    def slow(made, names, *_):
        time.sleep(0.3)
        return dict.fromkeys(names, 2.0), dict.fromkeys(names, True), 0.3

    monkeypatch.setattr(curvature_truth, "references", slow)
    made.train()
    assert len(checks.found) == 4 and {each["step"] for each in checks.found} == {2, 4}
    assert 0.6 <= checks.figure()["check_s"] < 1.2
    (epoch,) = made.run.epochs
    began = made.training_seconds + epoch.probe_seconds
    assert began == pytest.approx(epoch.train_seconds, abs=0.05)
    again = bench().trainer(*settings_of(MODEL, "hessian", 1))
    again.train()
    assert epoch.train_seconds < again.run.epochs[0].train_seconds + 0.3


def test_checks_take_turns_and_leave_out_what_did_not_converge(monkeypatch):
    made = bench().trainer(*settings_of(MODEL, "hessian", 2))
    names = list(made.network.layers)[:3]
    refreshed = Probe(tuple(names), (Spectrum((1.1, 0.5), 2, True),) * 3, 0.01, 6)
    monkeypatch.setattr(made.method, "probe", lambda *_: refreshed)
    asked = []

    def references(made, names_now, images, labels, product):
        asked.append((product, list(names_now)))
        return dict.fromkeys(names_now, 1.0), {name: name != names[1] for name in names_now}, 0.0

    monkeypatch.setattr(curvature_truth, "references", references)
    checks = Checks(made, names[2:], 8)
    pixels, labels = curvature_truth.probe_images(made, 0)
    for step in (2, 4, 6, 8, 10):
        assert made.method.probe(pixels, labels, step, 1.0, None) is refreshed
    assert asked[0] == ("exact", names[2:]) and asked[1] == ("difference", names[:1])
    assert asked[2] == ("difference", [names[1], names[2]])
    found = checks.figure()
    assert found["value"] == pytest.approx(0.1) and found["layers"] == 2 and found["exact_checks"] == 1
    assert found["checks"] + found["left_out"] == len(checks.found) == 8
    assert made.network.module.training and all(part.training for part in made.network.module.modules())


def test_a_run_without_a_converged_reference_has_no_error():
    made = bench().trainer(*settings_of(MODEL, "hessian", 1))
    with pytest.raises(RuntimeError, match="none of 0 references"):
        Checks(made, None, 4).figure()


@pytest.mark.parametrize("product", ["exact", "jacobian"])
def test_errors_of_a_tiny_run(every_probe, product):
    found = curvature_truth.error(bench(f"method.curvature.product={product}"), MODEL, 1, 4, None)
    figure = found[f"hessian/error/{MODEL}"]
    assert json.loads(json.dumps(figure, allow_nan=False)) == figure
    assert figure["checks"] == figure["exact_checks"] == 4 and 0 <= figure["value"] <= figure["p90"] <= figure["worst"]
    if product == "jacobian":
        # Both are exact, by ways of their own.
        assert figure["worst"] < 0.02 and figure["left_out"] == 0


def test_ranks_and_times_of_a_tiny_model(monkeypatch):
    monkeypatch.setattr(curvature_truth, "RANKED_BATCHES", 2)
    trained, made = TrainedModels(epochs=1), bench()
    row = curvature_truth.ranks(made, MODEL, trained, "exact")[f"rank/fisher_hessian/{MODEL}"]
    assert json.loads(json.dumps(row, allow_nan=False)) == row
    assert -1 <= row["spread"][0] <= row["value"] <= 1 and row["layers"] == 10
    times = (
        bench_curvature.probe_times(made, MODEL, trained, "fisher")
        | bench_curvature.probe_times(made, MODEL, trained, "jacobian")
        | bench_curvature.double_backward(made, MODEL, trained)
        | bench_curvature.differences(made, MODEL, trained)
    )
    assert len(times) == 6 and all(figure["value"] > 0 for figure in times.values())
    assert times[f"time/double_backward/{MODEL}"]["layers_measured"] == "10 of 10"


def test_a_round_that_takes_too_long_is_scaled(monkeypatch):
    monkeypatch.setattr(bench_curvature, "DOUBLE_BACKWARD_SECONDS", 0.0)
    row = bench_curvature.double_backward(bench(), MODEL, TrainedModels(1))[f"time/double_backward/{MODEL}"]
    assert row["layers_measured"] == "1 of 10" and row["value"] == pytest.approx(10 * row["longest_s"])


def test_spearman_goes_by_ranks():
    a = curvature_truth.pandas.Series({"x": 1.0, "y": 10.0, "z": 100.0, "unread": math.nan})
    assert curvature_truth.spearman(a, a**2) == pytest.approx(1)
    assert curvature_truth.spearman(a, -a) == pytest.approx(-1)


def test_without_curvlinops_its_rows_say_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "curvlinops", None)
    found = curvature_truth.beside_curvlinops(bench(), MODEL, TrainedModels(1), {"exact": 0.02})
    assert found.keys() == {f"time/curvlinops/{MODEL}", f"truth/curvlinops/{MODEL}/exact"}
    rows = [judged(name, "", figure, {}) for name, figure in found.items()]
    assert all(row["value"] is None and row["ok"] is False and "pip install" in row["error"] for row in rows)


def test_shares_that_agree_with_curvlinops(monkeypatch):
    """Its rows from layers that agree and one that does not; the operator itself has a test of its own."""
    monkeypatch.setitem(sys.modules, "curvlinops", torch)
    monkeypatch.setattr(curvature_truth, "plain_model", lambda name, classes: ResNet8(classes))
    names = ("fc", "layer3.conv2")
    monkeypatch.setattr(
        curvature_truth, "curvlinops_largest", lambda module, parameter, *_: 1.0 + 0.03 * ("fc" in parameter)
    )
    answer = ({"fc": 1.0, "layer3.conv2": 1.0}, {}, 0.5)
    monkeypatch.setattr(curvature_truth, "references", lambda *_: answer)
    limits = {"exact": 0.02, "difference": 0.10}
    found = curvature_truth.beside_curvlinops(bench(), MODEL, TrainedModels(1), limits, names)
    assert found[f"truth/curvlinops/{MODEL}/exact"]["value"] == 0.5
    assert list(found[f"truth/curvlinops/{MODEL}/exact"]["outside"]) == ["fc"]
    assert found[f"truth/curvlinops/{MODEL}/difference"]["value"] == 1.0
    assert found[f"time/curvlinops/{MODEL}"]["ours_exact_s"] == 0.5
    # What could not be read is outside, and can stand in the file.
    answer[0]["fc"] = math.nan
    found = curvature_truth.beside_curvlinops(bench(), MODEL, TrainedModels(1), limits, names)
    assert found[f"truth/curvlinops/{MODEL}/difference"]["outside"] == {"fc": None}


def test_without_a_gpu_it_says_so(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench_curvature.main(["--quick", "--out", str(tmp_path / "curvature.json")]) == 2
    assert "expected a CUDA device" in capsys.readouterr().err
