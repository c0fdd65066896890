"""The plan of the reproduction: its cells compose, records decide what is left, and controls come from records."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from measured import epoch, provenance
from omegaconf import OmegaConf
from traced import trace

from triaccel_bench import cli, reproduction, runner
from triaccel_bench.configuration import CONFIG_PACKAGE, compose
from triaccel_bench.identity import RESULTS_VERSION, flat, identifying_settings, identity
from triaccel_bench.records import planned_run, write_run
from triaccel_bench.reproduction import PARTS, Forecaster, Sweep, controls, second_round, sweep
from triaccel_bench.runner import seed_folder
from triaccel_bench.settings import Settings
from triaccel_bench.tuning import KEYS

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import choose_trials  # noqa: E402
import draw_trials  # noqa: E402
import reproduce  # noqa: E402

CARD = "Card A"
TINY = (
    "dataset=synthetic model=resnet8 device=cpu memory.meter=tensors memory.calibration_steps=1 dataset.train_size=64 "
    "dataset.test_size=32 dataset.image_size=8 model.input_size=8 dataset.crop_padding=1 epochs=1 seeds=[0] "
    "method.batch.initial=16 method.batch.min=8 method.batch.max=32 progress=none preflight=off"
).split()


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def record(
    settings: Settings,
    seed: int,
    batch: int = 96,
    seconds: float = 2.0,
    accuracy: float = 70.0,
    fp32: int = 0,
    status: str = "done",
    device: str | None = CARD,
) -> None:
    """A run on ``CARD`` that ended, where a sweep there would look for it."""
    cell = identity(settings, CARD)
    run = planned_run(settings.model_dump(mode="json"), seed, cell, RESULTS_VERSION)
    run.status, run.reason, run.provenance, run.meter = status, None, None, "vram"
    run.provenance = device and provenance(device)
    run.epochs = [
        epoch(
            n, batch_min=batch, batch_max=batch, batch_mean=float(batch), train_seconds=seconds, evaluation_seconds=0.5,
            evaluation_accuracy_percent=accuracy, layers_executed={"fp32": fp32, "bf16": 21 - fp32},
        )
        for n in range(1, settings.epochs + 1)
    ]  # fmt: skip
    run.evaluation_samples = 5000
    write_run(seed_folder(settings, cell, seed), run, trace())


def swept(part: str) -> dict[str, list[str]]:
    params = OmegaConf.load(ROOT / "conf" / "experiment" / "reproduce" / f"{part}.yaml").hydra.sweeper.params
    return {key: value.split(",") for key, value in params.items()}


def test_parts_are_the_cells_that_were_promised():
    models, methods = ["resnet18", "efficientnet_b0"], ["fp32", "tf32", "amp", "triaccel", "triaccel_plus"]
    ablation = ["fp32", "triaccel_batch", "triaccel_precision", "triaccel"]
    assert swept("table1") == {"model": models, "method": methods}
    assert swept("table2") == {"model": models, "method": ablation}
    assert swept("seeds") == {"model": ["resnet18"], "method": ["fp32", "amp", "triaccel", "triaccel_plus"]}
    found = {part: sweep(part, ["model=resnet18"]).jobs() for part in ("table1", "table2", "seeds")}
    for job in (job for jobs in found.values() for job in jobs):
        assert (job.epochs, job.dataset.name, job.model.input_size, job.memory.budget) == (30, "cifar10", 32, "fp32")
        assert len(job.seeds) == (10 if job in found["seeds"] else 3)
    one = {job.method.name: identity(job, CARD) for job in found["table1"]}
    shared = [job for part in ("table2", "seeds") for job in found[part] if job.method.name in one]
    assert len(shared) == 6 and all(identity(job, CARD) == one[job.method.name] for job in shared)


@pytest.mark.parametrize("part", sorted(path.stem for path in (ROOT / "conf" / "experiment" / "reproduce").iterdir()))
def test_every_part_is_a_sweep_that_any_launcher_takes(part):
    assert OmegaConf.load(ROOT / "conf" / "experiment" / "reproduce" / f"{part}.yaml").hydra.mode == "MULTIRUN"


PLUS = ("optimizer.lr", "optimizer.weight_decay", "method.curvature.alpha")
"""Tri-Accel+ asks for BF16 whatever the thresholds."""


def test_trials_are_as_many_for_every_method_on_held_out_images():
    trials = [f"t{n}" for n in range(draw_trials.TRIALS)]
    assert swept("tuning") == swept("table1") | {"+trial": trials}
    for method, read, tried in (
        ("amp", KEYS[:2], trials[:2]),
        ("triaccel", KEYS, trials),
        ("triaccel_plus", PLUS, trials),
    ):
        jobs = sweep("tuning", ["model=resnet18", f"method={method}", f"+trial={','.join(tried)}"]).jobs()
        assert len({identity(job, CARD) for job in jobs}) == len(tried)
        assert {(job.dataset.evaluate_on, job.dataset.validation_fraction) for job in jobs} == {("validation", 0.1)}
        known = dict(flat(identifying_settings(jobs[0].model_dump(mode="json"))))
        assert [key for key in KEYS if key in known] == list(read)
    assert not set(jobs[0].seeds) & set(compose(["+experiment=reproduce/seeds"]).seeds)


def test_the_committed_trials_are_what_is_drawn():
    files = {path.name: path.read_text() for path in (ROOT / "conf" / "trial").iterdir()}
    assert files == {f"t{n}.yaml": draw_trials.text(n, trial) for n, trial in enumerate(draw_trials.drawn())}
    for trial in draw_trials.drawn()[1:]:
        assert float(trial["method.precision.tau_low"]) < float(trial["method.precision.tau_high"])


def test_the_first_trial_is_what_conf_ships():
    shipped, first = compose(["tuned=none"]), compose(["tuned=none", "+trial=t0"])
    assert shipped == first


def test_the_committed_choices_are_those_of_the_committed_trials(tmp_path):
    choose_trials.main([str(ROOT / "results" / "reference" / "h200" / "tuning"), "--out", str(tmp_path)])
    committed = {path.name: path.read_text() for path in (ROOT / "conf" / "tuned").glob("*-*.yaml")}
    assert len(committed) >= 5 and committed == {path.name: path.read_text() for path in tmp_path.iterdir()}


def test_the_best_trial_is_chosen_and_its_origin_written(tmp_path, capsys):
    jobs = sweep("tuning", ["model=resnet18", "method=triaccel"]).jobs()
    out = tmp_path / "tuned"
    assert choose_trials.main(["results/tuning", "--out", str(out)]) == 2
    for number, job in enumerate(jobs[:-1]):
        record(job, 100, accuracy=60.0 + 5 * (number == 3) + number / 10)
    assert choose_trials.main(["results/tuning", "--out", str(out)]) == 1
    assert "expected every trial, t7 lacking" in capsys.readouterr().out and not [*out.iterdir()]
    record(jobs[-1], 100, accuracy=60.0)
    assert choose_trials.main(["results/tuning", "--out", str(out)]) == 0
    path = out / "cifar10-resnet18-triaccel.yaml"
    text = path.read_text()
    assert "Trial t3, the best of 8 (8 finished):\n# 65.30 %" in text and CARD in text
    assert OmegaConf.load(path) == OmegaConf.load(ROOT / "conf" / "trial" / "t3.yaml")
    record(jobs[-1], 100, accuracy=99.0)
    assert choose_trials.main(["results/tuning", "--out", str(out)]) == 1 and path.read_text() == text
    assert choose_trials.main(["results/tuning", "--out", str(out), "--force"]) == 0 and "Trial t7" in path.read_text()


def test_of_equally_accurate_trials_every_method_takes_the_same(tmp_path):
    for method in ("fp32", "amp"):
        for job in sweep("tuning", ["model=resnet18", f"method={method}"]).jobs():
            record(job, 100, accuracy=46.53)
    assert choose_trials.main(["results/tuning", "--out", str(tmp_path)]) == 0
    chosen = [OmegaConf.load(tmp_path / f"cifar10-resnet18-{method}.yaml") for method in ("fp32", "amp")]
    assert chosen[0] == chosen[1]


def test_a_tie_within_one_standard_error_goes_to_the_plan_with_fewest_fp32_layers(tmp_path):
    jobs = sweep("tuning", ["model=resnet18", "method=triaccel_plus"]).jobs()
    out = tmp_path / "tuned"

    def choice(found: dict[int, tuple[float, int]]) -> str:
        for number, job in enumerate(jobs):
            accuracy, fp32 = found.get(number, (60.0, 0))
            record(job, 100, accuracy=accuracy, fp32=fp32)
        assert choose_trials.main(["results/tuning", "--out", str(out), "--force"]) == 0
        return (out / "cifar10-resnet18-triaccel_plus.yaml").read_text()

    # sqrt(75 * 25 / 5000) = 0.61 points.
    text = choice({2: (75.0, 9), 5: (74.5, 3), 6: (74.4, 1), 7: (74.3, 0)})
    assert "Trial t6, of 8 (8 finished) within one standard error of the most accurate, t2 with 75.00 %" in text
    assert "\n# 74.40 % of the validation images" in text
    assert "Trial t5, of 8" in choice({2: (75.0, 9), 5: (74.5, 3), 6: (74.45, 3)})  # equals: the more accurate
    assert "Trial t2, the best of 8" in choice({2: (75.0, 9), 5: (74.3, 3)})


B0 = ("model=efficientnet_b0", "method=amp")
FIRST = {2: 79.0, 5: 80.0}
"""Accuracy of the first round by trial; the others' is 70 % and their number."""


def first_round(*leaving_out: int) -> list[Settings]:
    jobs = sweep("tuning", B0).jobs()
    for number, job in enumerate(jobs):
        if number not in leaving_out:
            record(job, 100, accuracy=FIRST.get(number, 70.0 + number))
    return jobs


def chosen(capsys, *options: str) -> tuple[int, str, str]:
    """Exit code, what was said, and the file."""
    code = choose_trials.main(["--out", "tuned", *options])
    path = Path("tuned/cifar10-efficientnet_b0-amp.yaml")
    return code, capsys.readouterr().out, path.read_text() if path.exists() else ""


def test_the_best_trials_of_a_network_that_scatters_get_more_seeds_and_the_choice_is_by_their_means(capsys):
    none, coming = second_round(CARD, B0)
    assert none == [] and [job.seeds for job in coming] == [(100, 101, 102)] * 2
    assert second_round(CARD, ["model=resnet18"]) == ([], [])
    jobs = first_round()
    (second,), coming = second_round(CARD, B0)
    assert coming == [] and second.overrides[-2:] == ("seeds=[100,101,102]", "+trial=t2,t5")
    again = second.jobs()
    assert [identity(job, CARD) for job in again] == [identity(jobs[n], CARD) for n in (2, 5)]
    code, said, text = chosen(capsys)
    assert code == 1 and "expected 3 seeds of the best trials, t5 lacks 2, t2 lacks 2; run" in said and not text
    for job, accuracies in zip(again, [(78.0, 77.0), (70.0, 69.0)]):
        for seed, accuracy in zip((101, 102), accuracies):
            record(job, seed, accuracy=accuracy)
    assert second_round(CARD, B0) == ([second], []), "what the second round found changes nothing of who is in it"
    code, _, text = chosen(capsys)
    assert code == 0 and "Trial t2, the best of 2 in the second round, of 8 (8 finished):\n# 78.00 %" in text
    assert "seeds 100, 101, 102, on" in text
    record(jobs[5], 100, accuracy=99.0)
    code, said, kept = chosen(capsys, "--keep")
    assert code == 0 and "holds another choice, which stays" in said and kept == text
    assert chosen(capsys)[0] == 1 and "Trial t5" in chosen(capsys, "--force")[2]


def test_nobody_is_a_finalist_before_the_first_round_is_over(capsys):
    jobs = first_round(3)
    assert second_round(CARD, B0)[0] == [] and len(second_round(CARD, B0)[1]) == 2
    assert second_round(CARD, [*B0, "+trial=t1,t4"])[0] == []
    record(jobs[3], 100, status="interrupted")
    assert second_round(CARD, B0)[0] == []
    record(jobs[3], 100, status="diverged")  # a trial, and lost
    (second,), _ = second_round(CARD, [*B0, "+trial=t1,t4"])
    assert second.overrides[-1] == "+trial=t2,t5", "of all trials, whichever of them a command asks for"


@pytest.mark.parametrize("status", ["failed", "interrupted"])
def test_a_trial_that_was_killed_was_none(status, capsys):
    """Unlike one that diverged; whether it had reached its device or not."""
    jobs = first_round()
    for where in (CARD, None):
        record(jobs[3], 100, status=status, device=where)
        assert second_round(CARD, B0)[0] == []
        code, said, text = chosen(capsys)
        assert code == 1 and said.count("amp.yaml") == 1 and "t3 did not; run the tuning again" in said and not text
    record(jobs[3], 100, accuracy=60.0)
    for seed in (101, 102):
        for number in (2, 5):
            record(jobs[number], seed, status=status if (number, seed) == (5, 102) else "done")
    assert chosen(capsys)[0] == 1
    record(jobs[5], 102)
    assert chosen(capsys)[0] == 0


def test_a_trial_that_is_none_of_those_that_are_drawn_is_named(capsys):
    first_round()
    mine = sweep("tuning", [*B0, "+trial=t0", "optimizer.lr=0.3"]).jobs()[0]
    record(mine, 100, accuracy=99.0)
    code, said, text = chosen(capsys)
    assert code == 1 and f"expected trials of conf/trial, got cells {identity(mine, CARD)}; move" in said and not text


def test_trials_are_of_tuning_alone():
    given = ["model=resnet18", "method=fp32", "+trial=t1"]
    assert sweep("table1", given).jobs() == sweep("table1", given[:2]).jobs()
    assert sweep("tuning", given).jobs()[0].optimizer.lr != sweep("table1", given).jobs()[0].optimizer.lr


def test_a_finalist_that_fails_with_more_seeds_has_lost(capsys):
    jobs = first_round()
    for seed in (101, 102):
        record(jobs[5], seed, accuracy=80.0, status="done" if seed == 101 else "diverged")
    assert "t2 lacks 2; run" in chosen(capsys)[1]
    for seed in (101, 102):
        record(jobs[2], seed, accuracy=60.0)
    code, _, text = chosen(capsys)
    assert code == 0 and "Trial t2" in text and "# 66.33 %" in text
    record(jobs[2], 101, status="oom")
    code, _, text = chosen(capsys, "--force")
    assert code == 0 and "Trial t5" in text and "seeds 100, 101, on" in text, "as many failed: the more accurate"


def test_seeds_of_ones_own_have_a_second_round_until_they_are_enough():
    one = [*B0, "seeds=[7]"]
    for number, job in enumerate(sweep("tuning", one).jobs()):
        record(job, 7, accuracy=FIRST.get(number, 70.0))
    (second,), _ = second_round(CARD, one)
    assert second.overrides[-2:] == ("seeds=[7,8,9]", "+trial=t2,t5")
    assert second_round(CARD, [*B0, "seeds=[7,8,9]"]) == ([], [])


def test_what_seeds_scatter_by_counts_as_an_error_too(capsys):
    jobs = first_round()
    for seed, accuracy in ((101, 70.0), (102, 75.0)):
        record(jobs[5], seed, accuracy=accuracy, fp32=3)  # mean 75, std of its mean 2.9
    for seed in (101, 102):
        record(jobs[2], seed, accuracy=70.0)  # mean 73, and no FP32 layer
    code, _, text = chosen(capsys)
    assert code == 0 and "Trial t2, of 2 in the second round" in text
    assert "within one standard error of the most accurate, t5 with 75.00 %" in text


def test_tuning_is_two_rounds_and_then_a_choice(monkeypatch):
    rounds = []

    def swept(overrides: list[str]) -> int:
        if not rounds:
            first_round()  # the second round goes by what the first has just found
        rounds.append(overrides)
        return 0

    monkeypatch.setattr(choose_trials, "main", lambda arguments: rounds.append(arguments) or 0)
    monkeypatch.setattr(runner, "device_name", lambda settings: CARD)
    monkeypatch.setattr(runner, "epoch_seconds", lambda settings: 1.0)
    monkeypatch.setattr(cli, "run", swept)
    assert reproduce.main([*B0, "--only", "tuning"]) == 0
    assert rounds[0] == ["+experiment=reproduce/tuning", *B0] and rounds[1][-1] == "+trial=t2,t5"
    assert rounds[2][-1] == "--keep" and len(rounds) == 3


def test_runs_of_the_second_round_are_forecast_and_listed(monkeypatch, capsys):
    monkeypatch.setattr(runner, "device_name", lambda settings: CARD)
    monkeypatch.setattr(runner, "epoch_seconds", lambda settings: 1.0)
    assert reproduce.main([*B0, "--only", "tuning", "--list"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"tuning +12 runs, +0 done", said) and "best trials on efficientnet_b0 with more seeds" in said
    first_round()
    assert reproduce.main([*B0, "--only", "tuning", "--list"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"tuning +12 runs, +8 done", said) and "'seeds=[100,101,102]' +trial=t2,t5" in said


def test_tuned_values_are_those_of_one_network_and_data_set_and_of_no_loop_of_ones_own():
    config = (ROOT / "conf" / "config.yaml").read_text()
    assert "optional tuned: ${dataset}-${model}-${method}" in config
    assert '"pair=none", "tuned=none"' in (ROOT / "triaccel_bench" / "loop.py").read_text()


@pytest.mark.parametrize("model", ["resnet18", "efficientnet_b0"])
def test_tri_accel_plus_sets_what_it_runs_again_of_a_network_and_no_other_method_does(model):
    ours = compose([f"model={model}", "method=triaccel_plus"]).model
    assert ours.checkpointing in (2, 3)
    plain = compose([f"model={model}", "method=triaccel_plus", "pair=none"]).model
    assert plain == compose([f"model={model}", "method=amp"]).model and plain.checkpointing is False
    given = compose([f"model={model}", "method=triaccel_plus", "model.checkpointing=1"]).model
    assert given.checkpointing == 1


@pytest.fixture
def table1() -> list[Settings]:
    given = ["model=resnet18", "method=fp32,amp,triaccel_plus", "seeds=[0,1]", "epochs=4", "optimizer.lr=0.2"]
    return sweep("table1", given).jobs()


def test_controls_come_from_the_records(table1):
    for settings in table1:
        for seed in settings.seeds:
            pace = {"fp32": 8.0, "amp": 3.0, "triaccel_plus": 4.0}[settings.method.name]
            record(settings, seed, batch=180 + 20 * seed, seconds=pace)
    made, lacking = controls(table1, CARD, ["model=resnet18", "epochs=4", "seeds=[0,1]"])
    assert lacking == []
    mean, fp32, amp, replay = (each.jobs() for each in made)
    (static,) = mean
    # The mean of 180 and 200 on a rung, and the linear rule's rate there.
    assert (static.method.name, static.method.batch.initial, static.epochs) == ("amp", 192, 4)
    assert static.optimizer.lr == pytest.approx(0.2 * 192 / 96) and not static.method.batch.elastic
    # 4 epochs of 4 s are 2 of 8 s, and 5 of 3 s.
    assert [(job.method.name, job.epochs) for job in (*fp32, *amp)] == [("fp32", 2), ("amp", 5)]
    assert [job.replay.shuffle for job in replay] == [None, "layers"] and {job.optimizer.lr for job in replay} == {0.2}
    assert all("triaccel_plus" in job.replay.run and job.replay.run.endswith("seed-0") for job in replay)
    # As much of the network is run again as in the recorded run, and nothing of it for AMP.
    assert {job.model.checkpointing for job in replay} == {2} and static.model.checkpointing is False


def test_controls_without_records_say_what_is_lacking(table1):
    plus = next(job for job in table1 if job.method.name == "triaccel_plus")
    record(plus, 0)
    made, lacking = controls(table1, CARD, [])
    assert made == [] and len(lacking) == 1
    assert re.search(
        r"resnet18: expected finished runs of triaccel_plus .* seed 1; run the part table1 first", lacking[0]
    )
    assert "expected triaccel_plus among" in controls(table1[:1], CARD, [])[1][0]


@pytest.mark.parametrize("rule, factor", [("none", 1.0), ("sqrt", 2.0), ("linear", 4.0)])
def test_rates_follow_a_batch_as_in_training(rule, factor):
    from triaccel_bench.schedule import batch_rate_factor

    assert reproduction.rate_factor(rule, 384, 96) == factor == batch_rate_factor(rule, 384, 96)


def test_minutes_come_from_records_else_from_a_few_steps(table1):
    fp32, amp, plus = table1
    record(fp32, 0)  # 60 s from start to end, of which 4 x 2.5 s in epochs
    measured = []

    def measure(settings: Settings) -> float:
        measured.append(settings.method.name)
        return 10.0

    forecaster = Forecaster(CARD, measure)
    found = forecaster.forecast("table1", table1)
    assert (found.runs, found.done, measured) == (6, 1, ["amp", "triaccel_plus"])
    tried = reproduction._START_SECONDS + 4 * 10.0
    probed = reproduction._START_SECONDS + 4 * 10.0 * (1 + plus.method.curvature.max_overhead)
    assert found.minutes * 60 == pytest.approx(60 + 2 * tried + 2 * probed)
    again = forecaster.forecast("seeds", table1)
    assert (again.runs, again.minutes) == (0, 0)
    promised = forecaster.of_controls(table1)
    assert promised.runs == 10 and promised.minutes * 60 == pytest.approx(2 * tried + 8 * probed)


def run(*arguments: str) -> int:
    return reproduce.main([*TINY, *arguments])


def test_the_command_runs_what_is_left_and_nothing_twice(capsys, monkeypatch):
    part = "--only", "table1"
    assert run("method=fp32", *part) == 0
    said = capsys.readouterr().out
    assert re.search(r"table1 +1 runs, +0 done, .* left\n", said) and "table1: triaccel-bench +experiment=" in said
    (path,) = Path("results/runs").glob("*/seed-0/run.json")
    before = path.read_bytes()
    assert Path("results/README.md").read_text().startswith("# ") and Path("results/tables/table1.md").is_file()
    monkeypatch.setattr(runner, "epoch_seconds", lambda settings: pytest.fail("its record tells"))
    monkeypatch.setattr(runner, "_run_seed", lambda *arguments: pytest.fail("it is finished"))
    assert run("method=fp32", *part) == 0
    assert re.search(r"table1 +1 runs, +1 done, 0.0 s left", capsys.readouterr().out) and path.read_bytes() == before
    assert run("method=fp32", "--only", "controls") == 1
    assert "controls not run: resnet8: expected triaccel_plus among Table 1's methods" in capsys.readouterr().out


def test_the_command_hands_on_what_is_left_of_a_limit_and_stops_at_it(monkeypatch):
    asked, codes, clock = [], iter([0, 3]), [0.0]

    def swept_for_ten_minutes(overrides: list[str]) -> int:
        asked.append((overrides[0], overrides[-1]))
        clock[0] += 600.0
        return next(codes)

    monkeypatch.setattr(reproduce, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(cli, "run", swept_for_ten_minutes)
    assert run("method=fp32", "runner.max_minutes=10.0004", "--only", "table1,table2,seeds") == 3
    assert asked == [
        ("+experiment=reproduce/table1", "runner.max_minutes=10.0004"),
        ("+experiment=reproduce/table2", "runner.max_minutes=0.0004"),
    ]


def in_turn(monkeypatch, *codes: int) -> list[str]:
    """Sweeps that end with these codes; returns which were asked for."""
    asked, left, clock = [], iter(codes), [0.0]

    def swept_for_ten_minutes(overrides: list[str]) -> int:
        asked.append(overrides[0].rpartition("/")[2])
        clock[0] += 600.0
        return next(left)

    monkeypatch.setattr(reproduce, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(runner, "device_name", lambda settings: CARD)
    monkeypatch.setattr(runner, "epoch_seconds", lambda settings: 1.0)
    monkeypatch.setattr(cli, "run", swept_for_ten_minutes)
    return asked


@pytest.mark.parametrize(
    "codes, limit, ended, page",
    [
        ((2, 0, 1), [], 2, True),
        ((0, 2, 0), [], 2, True),
        ((2, 3), ["runner.max_minutes=50"], 3, True),
        ((0, 2), ["runner.max_minutes=15"], 3, True),
        ((2, 130), [], 130, False),
    ],
)
def test_a_refused_sweep_keeps_no_other_from_being_run_and_no_page_from_being_written(
    monkeypatch, codes, limit, ended, page
):
    record(sweep("table1", [*TINY, "method=fp32"]).jobs()[0], 0)
    asked = in_turn(monkeypatch, *codes)
    assert run("method=fp32", *limit, "--only", "table1,table2,seeds") == ended
    assert asked == ["table1", "table2", "seeds"][: len(codes)]
    assert Path("results/README.md").exists() == Path("results/tables/table1.md").exists() == page


def test_a_control_that_will_be_refused_is_named_and_keeps_no_other_from_being_looked_at(capsys):
    refused = Sweep("controls", ("+experiment=reproduce/replay", "model=resnet18", "replay.run=/nowhere"))
    assert reproduce._jobs_or_none(refused) == []
    assert re.search(
        r"cannot be run: triaccel-bench .*/nowhere: .*expected the folder of a run", capsys.readouterr().out
    )
    assert len(reproduce._jobs_or_none(sweep("table1", ["model=resnet18", "method=amp"]))) == 1


def test_a_refused_tuning_stays_refused_whatever_is_chosen(monkeypatch):
    for choice, code, ended in ((0, 2, 2), (0, 1, 0), (2, 2, 2), (2, 0, 1)):
        monkeypatch.setattr(choose_trials, "main", lambda arguments, choice=choice: choice)
        in_turn(monkeypatch, code)
        assert run("method=fp32", "+trial=t0", "--only", "tuning") == ended


def test_controls_without_records_are_told_with_one_and_nothing_is_tried_for_them(monkeypatch, capsys):
    for root in ("results/runs", "results/tuning"):
        Path(root).mkdir(parents=True)
    monkeypatch.setattr(runner, "device_name", lambda settings: CARD)
    monkeypatch.setattr(runner, "epoch_seconds", lambda settings: pytest.fail("its controls cannot be run"))
    assert run("--only", "controls") == 1
    said = capsys.readouterr()
    assert "controls not run: resnet8: expected finished runs of triaccel_plus" in said.out and not said.err
    assert re.search(r"controls +0 runs, +0 done", said.out) and not Path("results/README.md").exists()


def test_controls_of_networks_that_a_part_before_makes_records_of_are_forecast(monkeypatch, capsys):
    monkeypatch.setattr(runner, "device_name", lambda settings: CARD)
    tried = []
    monkeypatch.setattr(runner, "epoch_seconds", lambda settings: tried.append(settings.model.name) or 1.0)
    given = [text for text in TINY if not text.startswith("model=")]
    assert reproduce.main([*given, "--only", "seeds,controls", "--list"]) == 0
    assert re.search(r"controls +5 runs, +0 done", capsys.readouterr().out) and set(tried) == {"resnet18"}


def test_a_limit_counts_from_the_first_sweep_and_nothing_is_tried_within_it(monkeypatch, capsys):
    asked, clock = in_turn(monkeypatch, 0), [0.0]
    monkeypatch.setattr(reproduce, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def slow(settings: Settings) -> str:
        clock[0] += 3600.0
        return CARD

    monkeypatch.setattr(runner, "device_name", slow)
    monkeypatch.setattr(runner, "epoch_seconds", lambda settings: pytest.fail("no step of the limit is spent so"))
    assert run("method=fp32", "runner.max_minutes=0.5", "--only", "table1") == 0 and asked == ["table1"]
    assert re.search(r"table1 +1 runs, +0 done, an unknown time left", capsys.readouterr().out)


def every_trial(accuracy: float = 70.0) -> Path:
    """Records of all trials of one method; returns the name of the file that its choice goes into."""
    for job in sweep("tuning", ["model=resnet18", "method=amp"]).jobs():
        record(job, 100, accuracy=accuracy)
    return Path("cifar10-resnet18-amp.yaml")


def refused(capsys, code: int, *told: str) -> None:
    """One sentence has said so, and no traceback."""
    said = capsys.readouterr().err
    assert code == 2 and said.count("\n") == 1 and all(text in said for text in told), said
    assert re.search(r": expected .*, got .*; \w+", said)


def test_choices_lie_where_the_command_reads(tmp_path):
    """Wherever this script lies beside the package."""
    copy = tmp_path / "elsewhere" / "scripts" / "choose_trials.py"
    copy.parent.mkdir(parents=True)
    copy.write_bytes((ROOT / "scripts" / "choose_trials.py").read_bytes())
    spec = importlib.util.spec_from_file_location("choose_trials_elsewhere", copy)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    read = Path(importlib.util.find_spec(CONFIG_PACKAGE).origin).parent
    assert (module.TRIALS, module.TUNED) == (read / "trial", read / "tuned") and module.TUNED.is_dir()


@pytest.mark.parametrize(
    "program", [lambda out: choose_trials.main(["--out", out]), lambda out: draw_trials.main(["--out", out])]
)
def test_a_folder_that_cannot_be_written_is_one_sentence(program, tmp_path, capsys):
    every_trial()
    (tmp_path / "file").write_text("mine")
    for out in ("/proc/none", "file", "file/below"):
        refused(capsys, program(out), out, "--out")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_choice_that_cannot_be_read_is_one_sentence_and_stays(tmp_path, capsys):
    path = every_trial()
    path.write_bytes(b"\xff\xfe")
    refused(capsys, choose_trials.main(["--out", "."]), path.name, "UTF-8", "--force")
    assert path.read_bytes() == b"\xff\xfe"
    assert choose_trials.main(["--out", ".", "--force"]) == 0 and "the best of 8" in path.read_text()
    path.unlink()
    path.mkdir()
    for force in ([], ["--force"]):
        capsys.readouterr()
        refused(capsys, choose_trials.main(["--out", ".", *force]), path.name, "folder", "move it")
    assert path.is_dir() and not [*path.iterdir()]


def test_a_choice_that_cannot_be_written_is_no_refusal_of_the_reproduction(tmp_path, monkeypatch, capsys):
    every_trial()
    (tmp_path / "file").write_text("mine")
    monkeypatch.setattr(choose_trials, "TUNED", tmp_path / "file")
    in_turn(monkeypatch, 0)
    assert run("method=fp32", "+trial=t0", "--only", "tuning") == 1
    assert "file: expected a folder" in capsys.readouterr().err and Path("results/README.md").exists()


def test_records_that_were_not_used_are_named(tmp_path, capsys):
    path = every_trial()
    broken = Path("results/tuning/broken/run.json")
    broken.parent.mkdir()
    broken.write_text("{")
    assert choose_trials.main(["--out", "tuned"]) == 0 and Path("tuned", path).is_file()
    assert f"Not used: {broken}" in capsys.readouterr().err.replace(f"{tmp_path}/", "")
    assert choose_trials.main(["results/tuning", "results/other", "--out", "tuned"]) == 0
    assert "Not used: results/other: expected a folder, got no such folder; correct its name" in capsys.readouterr().err
    assert choose_trials.main(["results/tuning/broken", "--out", "tuned"]) == 2
    said = capsys.readouterr().err
    assert "Not used: " in said and "No trials below" in said


def test_mistakes_are_one_sentence(capsys):
    assert run("method=fp23", "--only", "table1") == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("reproduce: ") and captured.err.count("\n") == 1 and "fp23" in captured.err
    with pytest.raises(SystemExit):
        run("--only", "table3")
    assert f"expected some of {','.join(PARTS)}, got table3" in capsys.readouterr().err
