"""Records and traces to series: figures by hand, seeds that count, and traces of every age."""

from __future__ import annotations

import pytest
from measured import GB, epoch, run
from traced import decision, epochs, trace, triaccel

from triaccel_bench import series
from triaccel_bench.cells import cells
from triaccel_bench.records import BackOffTrace, write_run
from triaccel_bench.results import Results, read_results


def only(*runs):
    (cell,) = cells(runs)
    return cell


def test_accuracy_is_the_mean_of_finished_seeds_with_their_range():
    slow = [epoch(n, evaluation_accuracy_percent=a, train_seconds=30.0) for n, a in ((1, 60.0), (2, 80.0))]
    unfinished = run(seed=2, epochs=epochs(99.0), epochs_planned=2)
    curve = series.accuracy_over_seconds(
        only(run(epochs=epochs(50.0, 70.0, train_seconds=20.0)), run(seed=1, epochs=slow), unfinished)
    )
    assert curve == series.Curve((25.0, 50.0), (55.0, 75.0), (50.0, 70.0), (60.0, 80.0), seeds=2)


def test_memory_is_summed_over_epochs_as_seconds_times_peak():
    one = run(epochs=[epoch(n, train_seconds=s, memory_peak_bytes=m * GB) for n, s, m in ((1, 10.0, 2), (2, 5.0, 4))])
    assert series.accuracy_over_memory(only(one)).x == (20.0, 40.0)


@pytest.mark.parametrize("changes", [{"meter": "off"}, {"epochs": [epoch(1), epoch(2, memory_peak_bytes=None)]}])
def test_a_run_that_was_not_metered_throughout_has_no_curve_over_memory(changes):
    cell = only(run(**changes))
    assert series.accuracy_over_memory(cell) is None and series.accuracy_over_seconds(cell)


def test_an_epoch_without_an_evaluation_has_no_point():
    assert series.accuracy_over_seconds(only(run(epochs=epochs(None, 70.0)))).x == (42.0,)


def test_steps_lie_within_epochs_of_different_lengths():
    at = series.epochs_trained(run(epochs=[epoch(1, steps=10), epoch(2, steps=20)]))
    assert [at(step) for step in (0, 5, 10, 20, 30, 31)] == [0.0, 0.5, 1.0, 1.5, 2.0, 2.0]


def test_course_follows_the_trace_with_what_ran_out_of_memory():
    out = BackOffTrace(in_force_after=4, tried=96, batch_before=64, batch_after=32)
    course = series.course(triaccel(), trace(decision(4), back_offs=[out]))
    assert course.memory == ((0.4, 300_000_000),) and course.traced
    assert course.batch == ((0.0, 96.0), (0.4, 64.0), (0.4, 32.0), (2.0, 32.0))


def test_course_without_a_trace_is_of_epochs_whose_remainder_moves_nothing():
    still, moved = epoch(1, batch_mean=95.2), epoch(2, batch_mean=70.0, batch_min=64)
    course = series.course(run(epochs=[still, moved]), None)
    assert course.batch == ((0.0, 96.0), (1.0, 70.0), (2.0, 70.0)) and not course.traced
    assert course.memory == ((1.0, 350_000_000), (2.0, 350_000_000))


def test_layers_begin_as_the_method_asks_and_change_when_a_decision_comes_into_force():
    found = series.layer_map(triaccel(), trace(decision(4, in_force_after=5)))
    assert found.edges == (0.0, 0.5, 2.0)
    assert found.requested == (("bf16", "fp32"), ("bf16", "bf16"), ("bf16", "fp16"))
    assert found.executed == (("fp16", "fp32"), ("fp16", "fp16"), ("fp16", "fp16"))
    assert found.promoted[0] == (False, True) and found.rates[0] == (1.0, 0.5)
    assert found.lambdas == ((None, 4.0), (None, None), (None, None))
    assert found.substituted


def test_an_earlier_trace_tells_no_start_that_a_first_decision_changed():
    moved, still = (decision(4, in_force_after=None, plan_changed=change) for change in (True, False))
    old = trace(moved).model_copy(update={"start": None})
    assert series.layer_map(triaccel(), old).executed[1] == (None, "fp16")
    assert series.layer_map(triaccel(), old.model_copy(update={"decisions": [still]})).executed[1] == ("fp16", "fp16")


def test_a_decision_at_the_very_end_is_in_no_picture():
    assert series.layer_map(triaccel(), trace(decision(4), decision(20))).edges == (0.0, 0.4, 2.0)


def test_the_first_seed_with_a_trace_is_shown(tmp_path):
    write_run(tmp_path / "seed0", triaccel(0))
    write_run(tmp_path / "seed1", triaccel(1), trace())
    write_run(tmp_path / "seed2", triaccel(2, status="failed"), trace())
    results = read_results([tmp_path])
    shown, found = series.Traces(results).first(only(*results.runs))
    assert shown.seed == 1 and [seen.step for seen in found.decisions] == [4, 14]
    (tmp_path / "seed1/trace.json.gz").write_bytes(b"cut off")
    shown, found = series.Traces(read_results([tmp_path])).first(only(*results.runs))
    assert shown.seed == 0 and found is None
    assert series.Traces(Results(results.runs)).first(only(*results.runs))[1] is None


def test_stems_are_file_names_and_never_twice():
    stem = series.Stems()
    assert [stem("A/b", "ü ../c"), stem("a b", "c"), stem("a b", "c")] == ["a_b-_.._c", "a_b-c", "a_b-c-2"]
