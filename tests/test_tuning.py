"""Trials are alike for every method, who has a second round, and what is chosen and written with its origin."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from planned import B0, CARD, FIRST, ROOT, every_trial, first_round, record, swept

from triaccel_bench.configuration import CONFIG_PACKAGE, compose
from triaccel_bench.identity import flat, identifying_settings, identity
from triaccel_bench.reproduction import second_round, sweep
from triaccel_bench.tuning import KEYS

sys.path.insert(0, str(ROOT / "scripts"))
import choose_trials  # noqa: E402
import draw_trials  # noqa: E402


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


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
