"""The plan of the reproduction: its cells compose, records decide what is left, and controls come from records."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from planned import B0, CARD, ROOT, every_trial, first_round, record, swept

from triaccel_bench import cli, reproduction, runner
from triaccel_bench.configuration import compose
from triaccel_bench.identity import identity
from triaccel_bench.reproduction import PARTS, Forecaster, Sweep, controls, sweep
from triaccel_bench.settings import Settings

sys.path.insert(0, str(ROOT / "scripts"))
import choose_trials  # noqa: E402
import reproduce  # noqa: E402

TINY = (
    "dataset=synthetic model=resnet8 device=cpu memory.meter=tensors memory.calibration_steps=1 dataset.train_size=64 "
    "dataset.test_size=32 dataset.image_size=8 model.input_size=8 dataset.crop_padding=1 epochs=1 seeds=[0] "
    "method.batch.initial=16 method.batch.min=8 method.batch.max=32 progress=none preflight=off"
).split()


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


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


def test_trials_are_of_tuning_alone():
    given = ["model=resnet18", "method=fp32", "+trial=t1"]
    assert sweep("table1", given).jobs() == sweep("table1", given[:2]).jobs()
    assert sweep("tuning", given).jobs()[0].optimizer.lr != sweep("table1", given).jobs()[0].optimizer.lr


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


def test_a_choice_that_cannot_be_written_is_no_refusal_of_the_reproduction(tmp_path, monkeypatch, capsys):
    every_trial()
    (tmp_path / "file").write_text("mine")
    monkeypatch.setattr(choose_trials, "TUNED", tmp_path / "file")
    in_turn(monkeypatch, 0)
    assert run("method=fp32", "+trial=t0", "--only", "tuning") == 1
    assert "file: expected a folder" in capsys.readouterr().err and Path("results/README.md").exists()


def test_mistakes_are_one_sentence(capsys):
    assert run("method=fp23", "--only", "table1") == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("reproduce: ") and captured.err.count("\n") == 1 and "fp23" in captured.err
    with pytest.raises(SystemExit):
        run("--only", "table3")
    assert f"expected some of {','.join(PARTS)}, got table3" in capsys.readouterr().err
