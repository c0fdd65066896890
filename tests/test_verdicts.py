"""The page of verdicts: its rules at their edges, what it says of made-up records, and where its figures come from."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from measured import GB, epoch, merged, provenance, run, settings, write
from omegaconf import OmegaConf

from triaccel_bench import paper, tables_cli, targets, verdict_page, verdicts
from triaccel_bench.compare import Difference, holm, paired
from triaccel_bench.differences import ACCURACY, QUANTITIES
from triaccel_bench.evidence import CLAIMED, EQUAL_TIME, FOLLOWED, KINDS, MEAN_BATCH, SHUFFLED, Compared, Evidence
from triaccel_bench.recording import open_loop
from triaccel_bench.reproduction import sweep
from triaccel_bench.results import Results
from triaccel_bench.verdict_tables import levelled_off
from triaccel_bench.verdicts import Checked, every, some

TIME = next(quantity for quantity in QUANTITIES if quantity.field == "seconds")
SEEDS = (0, 1, 2)
MEAN = 184
"""Samples a step of Tri-Accel+."""
FIGURES = {  # accuracy, seconds, GB of a seed without noise
    "fp32": (80.0, 20.0, 0.180),
    "tf32": (80.0, 15.0, 0.180),
    "amp": (80.0, 7.0, 0.120),
    "triaccel": (81.5, 14.0, 0.150),
    "triaccel_plus": (80.3, 2.5, 0.150),
    "triaccel_batch": (80.0, 19.0, 0.170),
    "triaccel_precision": (80.0, 15.0, 0.160),
}


def cell(model: str, method: str, figures=None, tree=None, seeds=SEEDS, **changes) -> list:
    accuracy, seconds, gb = figures or FIGURES[method]
    asked = {"seeds": list(seeds), "epochs": 10} | (tree or {})
    batch = MEAN if method == "triaccel_plus" else 96
    made = []
    for seed in seeds:
        apart = (seed - 1) * 0.02
        epochs = [
            epoch(
                number, evaluation_accuracy_percent=accuracy + apart - (3 if number < 9 else 0),
                train_seconds=seconds * (1 + apart / 10), memory_peak_bytes=round(gb * GB), controller_seconds=0.0,
                batch_mean=float(batch), batch_min=batch, batch_max=batch, batch_last=batch,
            )
            for number in range(1, asked["epochs"] + 1)
        ]  # fmt: skip
        made.append(run(model=model, method=method, seed=seed, epochs=epochs, tree=asked, **changes))
    return made


def study(**changed) -> list:
    """All methods on both networks; ``changed`` figures by method, or None to leave one out."""
    figures = FIGURES | changed
    models = paper.MODEL_LABELS
    return [one for model in models for m, f in figures.items() if f is not None for one in cell(model, m, f)]


def page(results: Results, device: str = "") -> str:
    return verdict_page.page(verdict_page.evidence_of(results, device))


def evidence(*runs) -> Evidence:
    return Evidence(Results(tuple(runs)))


def verdict_of(key: str, *runs) -> str:
    claim = (paper.CLAIMS | paper.MEASURABLE)[key]
    return next(each.verdict for each in verdicts.judged(evidence(*runs)) if each.claim is claim)


def compared(mean: float, low: float | None, high: float | None, p: float | None = 0.001, quantity=TIME) -> Compared:
    fp32, ours = (evidence(*study()).cell("cifar10", "resnet18", method) for method in ("fp32", "triaccel"))
    return Compared(ours, fp32, quantity, Difference(mean, 3, quantity.ratio, low, high, p), p)


def test_every_claim_of_the_paper_is_judged_once_in_its_order():
    claims = [each.claim for each in verdicts.judged(evidence(*study()))]
    assert claims == [*paper.CLAIMS.values(), *paper.MEASURABLE.values()]


def test_without_records_nothing_is_tested_and_the_page_says_why():
    assert {each.verdict for each in verdicts.judged(evidence())} == {"not tested"}
    text = page(Results(()))
    assert "CIFAR-10: no record." in text and f"Of {len(paper.CLAIMS | paper.MEASURABLE)} claims" in text


@pytest.mark.parametrize("low, high, p, state", [
    (0.80, 0.90, 0.01, "holds"),      # its whole interval beyond the printed ratio
    (0.88, 0.95, 0.01, "holds"),      # the printed ratio within
    (0.901, 0.95, 0.01, "holds"),     # at its edge
    (0.902, 0.95, 0.01, "weaker"),
    (0.90, 1.00, 0.01, "open"),       # no difference is within
    (0.80, 0.90, 0.06, "open"),       # not after Holm's correction
    (1.01, 1.05, 0.01, "opposite"),
    (None, None, None, "untested"),
])  # fmt: skip
def test_a_printed_saving_at_its_edges(low, high, p, state):
    mean = 0.9 if low is None else (low + high) / 2
    assert verdicts.reaches(compared(mean, low, high, p), 0.901) == state


def test_a_printed_gain_is_reached_from_below():
    found = {high: compared(0.8, 0.2, high, quantity=ACCURACY) for high in (1.1, 1.09)}
    assert [verdicts.reaches(each, 1.1) for each in found.values()] == ["holds", "weaker"]


@pytest.mark.parametrize("low, high, state", [
    (0.99, 1.01, "holds"), (0.99, 1.011, "open"), (1.001, 1.009, "holds"), (1.001, 1.011, "opposite"), (0.5, 0.9, "holds"),
])  # fmt: skip
def test_what_matches_another_method(low, high, state):
    assert verdicts.no_worse(compared((low + high) / 2, low, high)) == state


@pytest.mark.parametrize("effect, low, high, state", [
    (0.9, 0.88, 0.95, "holds"), (0.9, 0.91, 0.95, "weaker"),     # a printed gain
    (1.0, 0.99, 1.01, "holds"), (1.0, 1.02, 1.03, "opposite"),   # no difference
    (1.1, 1.1, 1.3, "holds"), (1.1, 1.2, 1.3, "opposite"), (1.1, 0.5, 0.6, "holds"), (1.1, None, None, "untested"),
])  # fmt: skip
def test_printed_gains_and_losses_of_a_row(effect, low, high, state):
    assert verdicts.against_printed(compared(1.0 if low is None else (low + high) / 2, low, high), effect) == state


def test_accuracy_matches_within_the_margin_of_its_one_sided_bound():
    models = "resnet18", "efficientnet_b0"

    def state(loss: float) -> str:
        found = evidence(*study(triaccel=(80.0 - loss, 14.0, 0.15)))
        return {
            verdicts.no_worse(found.pair("cifar10", m, "triaccel", "fp32", "accuracy_percent")) for m in models
        }.pop()

    assert (state(0.2), state(0.299), state(0.301)) == ("holds", "holds", "opposite")


@pytest.mark.parametrize("states, of_all, of_some", [
    (["holds", "holds"], "reproduced", "reproduced"),
    (["holds", "open"], "in part", "reproduced"),
    (["holds", "untested"], "in part", "reproduced"),
    (["holds", "opposite"], "in part", "reproduced"),
    (["weaker", "opposite"], "in part", "in part"),
    (["opposite", "opposite"], "contradicted", "contradicted"),
    (["opposite", "untested"], "contradicted", "not reproduced"),
    (["opposite", "open"], "contradicted", "not reproduced"),
    (["open", "untested"], "not reproduced", "not reproduced"),
    (["untested"], "not tested", "not tested"),
])  # fmt: skip
def test_tests_add_up_to_a_verdict(states, of_all, of_some):
    tests = [Checked(state, "") for state in states]
    assert (every(tests), some(tests)) == (of_all, of_some)


def test_verdicts_of_made_up_records():
    runs = study()
    assert verdict_of("time_cifar10", *runs) == "reproduced"
    assert verdict_of("accuracy_cifar10", *runs) == "reproduced"
    assert verdict_of("faster_than_amp", *runs) == "contradicted"
    assert verdict_of("best_score", *runs) == "in part"  # better than FP32's, worse than AMP's
    assert verdict_of("combination", *runs) == "reproduced"
    assert verdict_of("cifar100_accuracy", *runs) == "not tested"
    assert verdict_of("memory", *runs) == "reproduced" and verdict_of("memory_amp", *runs) == "contradicted"
    assert verdict_of("images", *runs) == "not tested"
    assert verdict_of("saved_resnet18", *study(triaccel=(81.5, 14.0, 0.170))) == "in part"
    assert verdict_of("saved_resnet18", *study(triaccel=(81.5, 14.0, 0.190))) == "contradicted"


def test_p_values_are_corrected_within_a_family():
    """Controls take nothing from what can be claimed of the paper's method."""
    plain, beside = evidence(*study()), evidence(*study(), *controls())
    assert plain.tests == 2 * (3 * 4 + 3) + 2 * 8 and beside.tests == plain.tests + 5 * 4
    for found in (plain, beside):
        p = [
            found.pair("cifar10", m, *pair, f).p for m in paper.MODEL_LABELS for pair, fs in CLAIMED.items() for f in fs
        ]
        raw = [
            found.pair("cifar10", m, *pair, f).found.p
            for m in paper.MODEL_LABELS for pair, fs in CLAIMED.items() for f in fs
        ]  # fmt: skip
        assert p == pytest.approx(holm(raw))


def test_one_seed_tests_nothing():
    runs = [one for one in study() if one.seed == 0]
    assert {each.outcome for each in targets.reached(evidence(*runs))} == {"not tested"}
    assert verdict_of("time_cifar10", *runs) == "not tested"
    assert "ResNet-18: fewer seeds than planned: FP32 Baseline (1 of 10), TF32 (1 of 3)" in page(Results(tuple(runs)))


def test_the_seeds_that_the_page_misses_are_those_that_the_reproduction_runs():
    most: Counter[tuple[str, str]] = Counter()
    for part in ("table1", "table2", "seeds"):
        for job in sweep(part, ["device=cpu"]).jobs():
            most |= {(job.model.name, job.method.name): len(job.seeds)}
    assert most == {each: verdict_page.seeds_planned(*each) for each in most} and set(most.values()) == {3, 10}


def test_a_control_that_is_lacking_is_named():
    text = page(Results((*study(), *controls())))
    assert "ResNet-18: controls lacking: AMP (Static) for as long as Tri-Accel Plus.\n" in text
    every = ", ".join((
        "AMP (Static) at Tri-Accel Plus's mean batch", "FP32 Baseline for as long as Tri-Accel Plus",
        "AMP (Static) for as long as Tri-Accel Plus", "recorded schedule", "recorded schedule, layers shuffled",
    ))  # fmt: skip
    assert f"EfficientNet-B0: controls lacking: {every}.\n" in text


def test_a_seed_that_a_control_lacks_is_named_with_it():
    beside = controls()
    lost = next(one for one in beside if one.method == "fp32" and one.seed == 2)
    lost.status, lost.reason = "failed", "no driver"
    text = page(Results((*study(), *beside)))
    assert "CIFAR-10 / ResNet-18 / FP32 Baseline, 1 epoch: not in the mean: seed 2 failed: no driver" in text
    assert "ResNet-18: controls lacking: FP32 Baseline for as long as Tri-Accel Plus (2 of 3 seeds), " in text
    without = [one for one in (*study(), *beside) if one.method != "triaccel_plus"]
    assert "controls lacking" not in page(Results(tuple(without))), "there is nothing to hold them against"


def test_a_run_that_diverged_contradicts_stability_and_stands_in_no_mean():
    runs = study()
    for one in runs:
        if one.method == "triaccel":
            one.status, one.reason = "diverged", "60 skips in a row"
    assert verdict_of("stability", *runs) == "contradicted" and verdict_of("time_cifar10", *runs) == "not tested"
    assert "seed 0 diverged: 60 skips in a row" in page(Results(tuple(runs)))


def stability(*runs) -> list[Checked]:
    claim = paper.MEASURABLE["stability"]
    (found,) = (each for each in verdicts.judged(evidence(*runs)) if each.claim is claim)
    return [each for each in found.tests if "finished" in each.text]


def test_stability_takes_every_run_that_was_asked_for_and_more_than_one():
    runs = study()
    assert {each.state for each in stability(*runs)} == {"holds"}
    assert {each.state for each in stability(*(one for one in runs if one.seed == 0))} == {"untested"}
    runs = [one for one in runs if one.method != "triaccel" or one.seed != 1]
    assert {(each.state, each.text.split(": ")[1]) for each in stability(*runs)} == {("open", "2 of 3 runs finished")}


@pytest.mark.parametrize("judge, low, high, state", [
    (verdicts.at_most(1.0), 0.8, 1.0, "holds"), (verdicts.at_most(1.0), 0.8, 1.01, "open"),
    (verdicts.at_most(1.0), 1.01, 1.2, "opposite"), (verdicts.at_least(78.0), 78.0, 79.0, "holds"),
    (verdicts.at_least(78.0), 77.9, 79.0, "open"), (verdicts.at_least(78.0), 60.0, 77.9, "opposite"),
    (verdicts.about(0.35), 0.34, 0.36, "holds"), (verdicts.about(0.35), 0.355, 0.36, "holds"),
    (verdicts.about(0.35), 0.1, 0.6, "open"), (verdicts.about(0.35), 0.1, 0.3, "opposite"),
])  # fmt: skip
def test_a_wide_interval_shows_no_figure(judge, low, high, state):
    assert judge(compared(1.0, low, high).found) == state


def test_a_newer_run_that_failed_outweighs_no_study():
    runs = study()
    newer = [one.model_copy(update={"results_version": 99, "status": "failed", "cell": f"{one.cell}9"}) for one in runs]
    assert len(evidence(*runs, *newer).cells) == len(evidence(*runs).cells) > 0


def test_no_other_text_is_overwritten_and_an_unknown_device_is_told(tmp_path, capsys):
    records, out = tmp_path / "runs", tmp_path / "README.md"
    for number, one in enumerate(study()):
        (records / str(number)).mkdir(parents=True)
        (records / str(number) / "run.json").write_text(one.model_dump_json())
    command = ["verdicts", "--results", str(records), "--out", str(tmp_path)]
    out.write_text("# Mine")
    assert tables_cli.main(command) == 2 and out.read_text() == "# Mine"
    out.unlink()
    assert tables_cli.main(command) == 0 == tables_cli.main(command)
    before = out.read_text()
    assert tables_cli.main([*command, "--device", "nosuch"]) == 2 and out.read_text() == before
    assert "--device nosuch: expected part of a device's name, got records of" in capsys.readouterr().err


@pytest.mark.parametrize("low, high, more, outcome", [
    (0.14, 0.15, False, "met"), (0.14, 0.151, False, "not shown"), (0.151, 0.2, False, "missed"),
    (7.0, 8.0, True, "met"), (6.9, 8.0, True, "not shown"), (5.0, 6.9, True, "missed"), (None, None, True, "not tested"),
])  # fmt: skip
def test_targets_at_their_edges(low, high, more, outcome):
    assert targets.ratio_outcome(compared(1.0, low, high), 7.0 if more else 0.15, more) == outcome
    assert targets.ratio_outcome(None, 1.0, more) == "not tested"


def test_targets_of_made_up_records():
    found = {
        (each.target.model, each.target.against, each.field): each.outcome
        for each in targets.reached(evidence(*study()))
    }
    assert found["resnet18", "fp32", "seconds"] == "met" and found["resnet18", "amp", "seconds"] == "met"
    assert found["resnet18", "amp", "accuracy_percent"] == "met" and len(found) == 4 * len(targets.TARGETS)
    assert found["resnet18", "fp32", "score"] == "met" and found["resnet18", "fp32", "memory_peak_bytes"] == "met"
    worse = evidence(*study(triaccel_plus=(79.0, 8.0, 0.17)))
    assert {each.outcome for each in targets.reached(worse) if each.field != "score"} >= {"missed"}
    assert next(each for each in targets.reached(worse) if each.field == "accuracy_percent").outcome == "missed"


@pytest.mark.parametrize("accuracies, outcome", [
    ((79.9, 80.0, 80.1), "met"), ((79.2, 80.0, 80.8), "not shown"), ((79.5, 79.7, 79.6), "not shown"),
    ((79.3, 79.4, 79.5), "missed"), ((65.7, 70.2, 67.0), "missed"),
])  # fmt: skip
def test_accuracy_is_missed_where_the_whole_interval_loses_more_than_the_margin(accuracies, outcome):
    ours = cell("resnet18", "triaccel_plus")
    for one, accuracy in zip(ours, accuracies):
        one.epochs[-1].evaluation_accuracy_percent = accuracy
    found = targets.reached(evidence(*ours, *cell("resnet18", "fp32"), *cell("resnet18", "amp")))
    assert {each.outcome for each in found if each.field == "accuracy_percent"} == {outcome, "not tested"}


def test_a_time_of_the_last_epochs_stands_beside_that_of_the_whole_run():
    """A method whose epochs become shorter is not to be told by its shortest alone."""
    early = {number: 12.5 for number in range(1, 6)}
    runs = [one for one in study() if one.method != "triaccel_plus"]
    plus = cell("resnet18", "triaccel_plus")
    for one in plus:
        one.epochs[:5] = [each.model_copy(update={"train_seconds": early[each.epoch]}) for each in one.epochs[:5]]
    text = page(Results((*runs, *plus)))
    assert (
        "Training seconds of whole runs, no target: ResNet-18 × 0.375 [" in text and "] AMP (Static)'s, n = 3" in text
    )
    row = next(line for line in text.splitlines() if "| Tri-Accel Plus | 80.30" in line)
    assert "| 2.500 ± " in row and "| 75.0 ± " in row


def test_fewer_trials_than_another_method_had_are_told():
    tree = {"dataset": {"evaluate_on": "validation", "validation_fraction": 0.1}, "seeds": [0]}
    trials = [one for m in ("fp32", "amp", "triaccel", "triaccel_plus") for one in cell("resnet18", m, tree=tree)]
    tree |= {"optimizer": {"lr": 0.2}}
    trials += cell("resnet18", "amp", (71.0, 7.0, 0.12), tree, (0,), cell="b")
    text = page(Results((*study(), *trials)))
    assert (
        "CIFAR-10, ResNet-18: fewer finished trials than another method has: FP32 Baseline (1 of 2), TF32 (0 of 2), "
        "Tri-Accel (1 of 2), Tri-Accel Plus (1 of 2)." in text
    )
    assert "fewer finished trials" not in page(Results(tuple(study())))
    shorter = cell("resnet18", "amp", tree=tree | {"epochs": 5}, seeds=(0,), cell="c")
    text = page(Results((*study(), *trials, *shorter)))
    assert "(1 of 2)" in text and "AMP (Static) (1 of 2)" not in text, "another tuning takes nothing away"


def test_the_page_says_by_how_many_seeds_a_trial_is_best_and_where_other_values_were_run():
    tree = {"dataset": {"evaluate_on": "validation", "validation_fraction": 0.1}}
    rate = {"optimizer": {"lr": 0.2}}
    trials = cell("efficientnet_b0", "amp", (70.0, 7.0, 0.12), tree, (100,))
    trials += cell("efficientnet_b0", "amp", (71.0, 7.0, 0.12), tree | rate, (100,), cell="b")
    text = page(Results((*study(), *trials)))
    alone = "CIFAR-10 / EfficientNet-B0: best of the first round alone"
    assert alone in text and "EfficientNet-B0: no second round of trials of AMP (Static)." in text
    assert "EfficientNet-B0 / AMP (Static): the runs above have optimizer.lr=0.1, " in text
    second = cell("efficientnet_b0", "amp", (72.0, 7.0, 0.12), tree, (101, 102))
    second += cell("efficientnet_b0", "amp", (69.0, 7.0, 0.12), tree | rate, (101, 102), cell="b")
    text = page(Results((*study(), *trials, *second)))
    assert alone not in text and "no second round" not in text and "the runs above have" not in text
    assert re.search(r"AMP \(Static\) \| 2 of 2 \| 10 \| 73.33 \| 3 \| optimizer.lr=0.1, ", text)


def test_the_methods_whose_trials_count_are_those_that_are_tuned():
    tuning = OmegaConf.load(Path(__file__).parent.parent / "conf" / "experiment" / "reproduce" / "tuning.yaml")
    assert tuple(tuning.hydra.sweeper.params.method.split(",")) == verdict_page.METHODS_TUNED


def test_the_page_says_that_the_papers_method_loses_to_amp_and_where_its_time_goes():
    text = page(Results(tuple(study())))
    assert "ResNet-18: it loses in time (× 2.000 [" in text
    assert "Tri-Accel against AMP: +7.000 s an epoch, of which controller" in text
    alike = page(Results(tuple(study(triaccel=FIGURES["amp"]))))
    assert re.search(
        r"ResNet-18: no difference is shown \(p corrected by Holm\): .*time × 1.000 \[1.000, 1.000\], n = 3", alike
    )


@pytest.mark.parametrize("gains, said", [
    ((0.0, 0.1, 0.2), "not shown"), ((0.09, 0.1, 0.11), "levelled off"), ((0.9, 1.0, 1.1), "still rising"),
    ((0.1,), "not tested: one seed"), ((), "not tested: fewer than 10 epochs"),
])  # fmt: skip
def test_whether_fp32_had_levelled_off(gains, said):
    last = {seed: 80 + gain for seed, gain in enumerate(gains)}
    assert levelled_off(paired(last, dict.fromkeys(last, 80.0)))[1] == said


def controls(model: str = "resnet18") -> list:
    plus = settings("cifar10", model, "triaccel_plus")["method"]
    followed = {"method": open_loop(plus, "replay"), "replay": {"run": "x", "schedule": "0" * 12}}
    shuffled = followed | {"replay": followed["replay"] | {"shuffle": "layers"}}
    return [
        *cell(model, "amp", (80.1, 3.0, 0.14), {"method": {"batch": {"initial": MEAN}}}, cell="mean"),
        *cell(model, "fp32", (70.0, 20.0, 0.18), {"epochs": 1}, cell="equal"),
        *cell(model, "replay", (80.2, 2.4, 0.15), followed, cell="follow"),
        *cell(model, "replay", (79.0, 2.4, 0.15), shuffled, cell="shuffle"),
    ]


def test_controls_are_told_by_the_one_thing_in_which_they_differ():
    found = evidence(*study(), *controls())
    kinds = {kind: each.cell for kind, each in found.controls("cifar10", "resnet18")}
    assert kinds == {MEAN_BATCH: "mean", EQUAL_TIME: "equal", FOLLOWED: "follow", SHUFFLED: "shuffle"}
    assert found.controls("cifar10", "efficientnet_b0") == [] and tuple(kinds) == KINDS and found.unused == []
    text = page(Results((*study(), *controls())))
    assert "the schedule against its shuffled twin: accuracy +1.20" in text and "AMP (Static), B = 184" in text


@pytest.mark.parametrize("method, figures, tree", [
    ("amp", (80.1, 3.0, 0.14), {"method": {"batch": {"initial": 104}}}),  # another batch
    ("fp32", (70.0, 20.0, 0.18), {"epochs": 3}),  # more than twice as long
    ("replay", (80.2, 2.4, 0.15), {"optimizer": {"lr": 0.5}}),
    ("replay", (80.2, 2.4, 0.15), {"method": {"batch": {"head_start": 2.0}}}),
])  # fmt: skip
def test_what_is_like_a_control_but_for_its_figure_is_none(method, figures, tree):
    if method == "replay":
        plus = open_loop(settings("cifar10", "resnet18", "triaccel_plus")["method"], "replay")
        tree = merged({"method": plus, "replay": {"run": "x", "schedule": "0" * 12}}, tree)
    found = evidence(*study(), *cell("resnet18", method, figures, tree, cell="other"))
    assert found.controls("cifar10", "resnet18") == [] and [each.cell for each in found.unused] == ["other"]


def test_a_control_is_held_against_the_seeds_that_it_was_made_by():
    slower = cell("resnet18", "triaccel_plus", (80.3, 25.0, 0.150), seeds=range(3, 10))
    found = evidence(*study(), *slower, *controls())
    assert {kind for kind, _ in found.controls("cifar10", "resnet18")} == set(KINDS)


def test_overhead_is_that_of_the_whole_run():
    """Curvature that is read in the first half alone costs what it costs."""
    runs = study()
    for one in (one for one in runs if one.method == "triaccel"):
        for each in one.epochs:
            each.train_seconds, each.probe_seconds = 10.0, 2.0 if each.epoch <= 5 else 0.0
    assert verdict_of("overhead", *runs) == "contradicted"
    (found,) = (each for each in verdicts.judged(evidence(*runs)) if each.claim is paper.MEASURABLE["overhead"])
    assert "ResNet-18: 10 [10, 10] % of the run's time, n = 3" in [each.text for each in found.tests]
    assert verdict_of("overhead", *study()) == "in part", "none at all, and CIFAR-100 is not there"


def test_controls_are_no_part_of_the_study():
    plain, beside = evidence(*study()), evidence(*study(), *controls())
    assert [each.cell for each in plain.cells] == [each.cell for each in beside.cells]


def test_methods_that_were_tuned_each_for_itself_are_compared_and_it_is_said():
    runs = [one for one in study() if one.method != "amp"]
    runs += cell("resnet18", "amp", tree={"optimizer": {"lr": 0.05}})
    assert evidence(*runs).pair("cifar10", "resnet18", "triaccel", "amp", "seconds").found.mean == pytest.approx(2)
    assert "optimizer.lr (0.05 and 0.1)" in page(Results(tuple(runs)))


def test_trials_are_told_apart_from_what_is_reported():
    tree = {"dataset": {"evaluate_on": "validation", "validation_fraction": 0.1}, "seeds": [0]}
    trials = [
        *cell("resnet18", "amp", (70.0, 7.0, 0.12), tree | {"optimizer": {"lr": 0.05}}, (0,), cell="a"),
        *cell("resnet18", "amp", (71.0, 7.0, 0.12), tree | {"optimizer": {"lr": 0.2}}, (0,), cell="b"),
    ]
    found = evidence(*study(), *trials)
    (tuned,) = found.tunings
    assert tuned.best.cell == "b" and len(found.cells) == 2 * len(FIGURES)
    assert "optimizer.lr=0.2, optimizer.weight_decay=0.0005" in page(Results((*study(), *trials)))


def test_trials_alone_are_a_page_of_trials():
    tree = {"dataset": {"evaluate_on": "validation", "validation_fraction": 0.1}, "seeds": [0]}
    trials = cell("resnet18", "amp", (70.0, 7.0, 0.12), tree, (0,), cell="a")
    found = evidence(*trials)
    assert found.device_name == trials[0].provenance.device_name and len(found.tunings) == 1
    assert not found.says_nothing


def test_records_of_no_cell_of_the_paper_are_named_and_replace_no_page(tmp_path, capsys):
    ours, theirs = study(), cell("resnet18", "amp", tree={"model": {"input_size": 64}}, cell="large")
    text = page(Results((*ours, *theirs)))
    assert "Not on this page: records of cifar10/resnet18/amp: no cell of the paper" in text
    assert "no cell of the paper" not in page(Results(tuple(ours)))
    assert evidence(*theirs).says_nothing and not evidence(*ours).says_nothing
    for folder, runs in (("theirs", theirs), ("ours", ours)):
        for one in runs:
            write(tmp_path / folder, one)
    asked = ["verdicts", "--results", str(tmp_path / "ours"), "--out", str(tmp_path / "page")]
    assert tables_cli.main(asked) == 0
    written = (tmp_path / "page" / "README.md").read_bytes()
    asked[2] = str(tmp_path / "theirs")
    assert tables_cli.main(asked) == 0 and (tmp_path / "page" / "README.md").read_bytes() == written
    assert "stays as it is, since none of these records" in capsys.readouterr().err
    asked[4] = str(tmp_path / "other")
    assert tables_cli.main(asked) == 0 and "no cell of the paper" in (tmp_path / "other" / "README.md").read_text()


def test_records_of_another_device_are_named_and_left_out():
    other = cell("resnet18", "fp32", (10.0, 1.0, 0.1), provenance=provenance("Card B"))
    text = page(Results((*study(), *other)))
    assert "Not on this page: records of Card B." in text and "10.02" not in text
    assert evidence(*study(), *other).unused == []
    assert Evidence(Results((*study(), *other)), "b").device_name == "Card B"


def test_records_of_earlier_code_are_named_and_left_out():
    later = [
        one for method in ("fp32", "amp") for one in cell("resnet18", method, results_version=2, cell=f"2 {method}")
    ]
    found = evidence(*study(), *later)
    assert {one.method for one in found.cells if one.model == "resnet18"} == {"fp32", "amp"}
    assert found.cell("cifar10", "resnet18", "amp").cell == "2 amp" and len(found.unused) == len(FIGURES)
    assert "Tri-Accel Plus, cell cifar10-resnet18-triaccel_plus: not comparable" in page(Results((*study(), *later)))


def test_the_same_records_in_any_order_give_the_same_bytes():
    runs = [*study(), *controls()]
    assert page(Results(tuple(runs))) == page(Results(tuple(reversed(runs))))


def test_figures_of_the_paper_come_from_its_data(monkeypatch):
    """Whatever is printed there stands on the page, and changes with it."""
    before = page(Results(tuple(study())))
    for claim in paper.CLAIMS.values():
        assert f"| {claim.printed} |" in before
    monkeypatch.setitem(paper.CLAIMS, "time_cifar10", paper.Claim("Abstract", "time", "47.3 %"))
    changed = page(Results(tuple(study())))
    assert "47.3 %" in changed and "47.3 %" not in before
    assert verdict_of("time_cifar10", *study()) == "in part"  # 30 % less, not 47.3


def test_the_pages_code_types_no_figure_of_the_paper():
    printed = {re.sub(r"[^0-9.]", "", claim.printed) for claim in paper.CLAIMS.values()} - {"", "."}
    printed |= {str(value) for row in paper.TABLE1 for value in (row.accuracy_percent, row.seconds, row.score)}
    for module in ("verdict_page", "verdict_tables", "verdicts", "evidence"):
        source = (Path(verdicts.__file__).parent / f"{module}.py").read_text()
        typed = set(re.findall(r"\d+\.\d+", source))
        assert not typed & {value for value in printed if "." in value}, module


def test_command_writes_the_page_where_it_is_asked(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "results" / "runs", *cell("resnet18", "fp32"))
    assert tables_cli.main(["verdicts"]) == 0
    text = (tmp_path / "results" / "README.md").read_text()
    assert text.startswith("# What of Tri-Accel's paper reproduces") and "results/README.md" in capsys.readouterr().out
    assert tables_cli.main(["verdicts", "--results", "results/runs", "--out", "there"]) == 0
    assert (tmp_path / "there" / "README.md").read_text() == text
    (tmp_path / "file").touch()
    assert tables_cli.main(["verdicts", "--out", "file"]) == 2 and "name another by --out" in capsys.readouterr().err


def test_hostile_text_is_no_markup_on_the_page():
    hostile = "x\n# Heading\n[l](javascript:0) ![i](http://h) `c` | <b> \u202e\x1b[31m"
    runs = study()
    for one in runs:
        one.provenance.device_name = hostile
    text = page(Results(tuple(runs)))
    assert "\n# Heading" not in text and "](" not in text and "<b>" not in text.replace("\\<b>", "")
    assert "\u202e" not in text and "\x1b" not in text


def test_odd_records_end_nothing():
    runs = study()
    for one in runs:
        one.epochs[-1].evaluation_accuracy_percent = 0.0
        for each in one.epochs:
            each.train_seconds = 0.0
    assert "not tested" in page(Results(tuple(runs)))
    assert tables_cli.table1(Results(tuple(runs))).rows
    bare = runs[0].model_dump()
    for group in ("dataset", "model", "method", "memory"):
        with pytest.raises(ValueError, match=f"expected a group {group}, got None"):
            type(runs[0]).model_validate(bare | {"settings": {**bare["settings"], group: None}})
