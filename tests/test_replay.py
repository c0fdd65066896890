"""Every decision comes out again from its trace alone, and one that was not made is noticed."""

import json
import math
import random
import struct
from pathlib import Path

import pytest
from recorded import memory_runs_out_at, read, train, write
from test_resumption import BASE, RUNS, broken_run
from test_resumption import nothing_by_the_clock as nothing_by_the_clock
from tiny import settings

from triaccel_bench import control, ledger, replay, tables_cli
from triaccel_bench.control import Signals
from triaccel_bench.records import StartTrace, Trace, planned_run, read_trace, write_run
from triaccel_bench.settings import MethodSettings

REFERENCE = Path(__file__).resolve().parent.parent / "results" / "reference" / "h200"


def told(folder: Path) -> list[str]:
    return [str(mismatch) for mismatch in replay.mismatches(*read(folder))]


@pytest.fixture(scope="module")
def adaptive(tmp_path_factory) -> Path:
    """A Tri-Accel run that moved all there is, with its probes by the clock."""
    folder = tmp_path_factory.mktemp("adaptive")
    made, _ = train(settings(*BASE, *RUNS["triaccel"]), folder)
    assert any(d.plan_changed for d in made.trace.decisions)
    assert len({d.batch_after for d in made.trace.decisions}) > 1
    assert any(min(d.rate_scale) < 1 for d in made.trace.decisions)
    return folder


@pytest.mark.parametrize("name", ["fp32", "triaccel, fisher, schedule", "triaccel_plus"])
def test_every_decision_is_derived_again(tmp_path, name):
    # Larger batches are fewer steps, and fewer decisions.
    made, _ = train(settings(*BASE, *RUNS[name], "epochs=4"), tmp_path)
    assert len(made.trace.decisions) > 3 and not told(tmp_path)
    if name != "fp32":
        assert any(d.batch_after > d.batch_before and d.rate_share < 1 for d in made.trace.decisions)


def test_a_run_that_was_killed_and_went_on_too(tmp_path):
    chosen = settings(*BASE, *RUNS["triaccel"])
    made, run = broken_run(chosen, tmp_path, [("signal", 3), ("signal", 7), ("kill", 10)])
    write(tmp_path / "run", made, run)
    assert run.resumed_at[:2] == [3, 7] and any(d.plan_changed for d in made.trace.decisions)
    assert not told(tmp_path / "run")


def test_memory_that_ran_out_is_part_of_it(tmp_path):
    chosen = settings(*BASE, "method=triaccel", "method.batch.initial=32", "method.batch.down=8", "memory.budget=1.0")
    made, _ = train(chosen, tmp_path, prepare=memory_runs_out_at(1, 2, 7))
    assert [(b.tried, b.batch_before, b.batch_after) for b in made.trace.back_offs[:2]] == [(32, 32, 24), (24, 24, 16)]
    assert len(made.trace.back_offs) == 3 and not told(tmp_path)
    run, trace = read(tmp_path)
    trace.back_offs[0].tried = 20
    found = [str(mismatch) for mismatch in replay.mismatches(run, trace)]
    assert found[0] == "step 0, back-off: batch_after: recorded 24, derived 16"
    del trace.back_offs[:]
    assert [str(m) for m in replay.mismatches(run, trace)][0].startswith("step 3, batch_before: recorded ")


CHANGES = {
    "requested[conv1]": lambda d: d.requested.__setitem__(0, "fp16" if d.requested[0] != "fp16" else "bf16"),
    "executed[conv1]": lambda d: d.executed.__setitem__(0, "fp16" if d.executed[0] != "fp16" else "bf16"),
    "promoted[conv1]": lambda d: d.promoted.__setitem__(0, not d.promoted[0]),
    "rate_scale[conv1]": lambda d: d.rate_scale.__setitem__(0, math.nextafter(d.rate_scale[0], 2)),
    "batch_before": lambda d: setattr(d, "batch_before", d.batch_before + 1),
    "batch_after": lambda d: setattr(d, "batch_after", d.batch_after + 1),
    "batch_reason": lambda d: setattr(d, "batch_reason", "so it was"),
    "plan_changed": lambda d: setattr(d, "plan_changed", not d.plan_changed),
}


@pytest.mark.parametrize("field", CHANGES)
def test_what_was_not_decided_so_is_named(adaptive, field):
    run, trace = read(adaptive)
    CHANGES[field](trace.decisions[3])
    (found,) = replay.mismatches(run, trace)
    assert (found.step, found.field) == (trace.decisions[3].step, field)
    assert str(found) == f"step {found.step}, {field}: recorded {found.recorded}, derived {found.derived}"


def test_a_signal_counts_to_its_last_bit(adaptive):
    """``auto`` takes tau_high from the variances of the second window."""
    run, trace = read(adaptive)
    seen = trace.decisions[1].variance
    second = sorted(seen)[-2]
    seen[seen.index(second)] = math.nextafter(second, math.inf)
    assert [mismatch.field for mismatch in replay.mismatches(run, trace)] == ["tau_high"]


def test_a_trace_beside_another_runs_record_is_noticed(adaptive, tmp_path):
    run, trace = read(adaptive)
    run.settings["method"]["batch"]["up"] = 16
    assert [str(m) for m in replay.mismatches(run, trace)] == ["step 0, rules.batch.up: recorded 8, derived 16"]


def rules(**changes) -> MethodSettings:
    dumped = settings("method=triaccel", "method.precision.dwell=1").method.model_dump(mode="json")
    return MethodSettings.model_validate_json(json.dumps(dumped | changes))


def decided(folder: Path, seen: list[Signals], **changes) -> Trace:
    """The trace of decisions on these signals of three layers, written and read again."""
    chosen, own = rules(**changes), {level: level for level in control.LEVELS}
    before, state = control.start(3, chosen, own.__getitem__)
    start = StartTrace(rules=chosen.model_dump(mode="json"), executes=own, samples=64)
    trace = Trace(layers=["a", "b", "c"], start=start)
    for step, signals in enumerate(seen, start=1):
        after, state = control.decide(signals, state, chosen, own.__getitem__)
        trace.decisions.append(ledger.decision_trace(step, step, signals, before, after))
        before = after
    run = planned_run(settings().model_dump(mode="json") | {"method": start.rules}, 0, "cell", 1)
    write_run(folder, run, trace)
    assert not told(folder)
    return read(folder)[1]


def test_signals_that_are_not_finite_are_no_missing_ones(tmp_path):
    nan, inf = math.nan, math.inf
    seen = [
        Signals(1, None, None, None, None),
        Signals(1, (1e-6, 2e-6, 3e-6), (nan, None, 1.0), 100, 1000, 50, 0.01, 0.25),
        Signals(2, (nan, -inf, inf), (inf, 2.0, nan), 100, 1000, 50, inf),
        Signals(3, (nan, 2e-6, 3e-6), (1.0, 2.0, 3.0), 100, 1000, 50, nan),
        Signals(4, (nan, 2e-6, 3e-6), (1.0, 2.0, 3.0), 100, 1000, 50, 0.01),
    ]
    trace = decided(tmp_path, seen)
    for signals, decision in zip(seen, trace.decisions, strict=True):
        assert repr((signals.rate_share, signals.capture_share)) == repr((decision.rate_share, decision.capture_share))
        assert repr(decision.variance) == repr(None if signals.variance is None else list(signals.variance))
        assert repr(decision.lambda_max) == repr(None if signals.lambda_max is None else list(signals.lambda_max))
    assert trace.decisions[-1].requested[0] == "fp32", "the widest dtype for a variance that is no number"


def test_a_signal_that_is_missing_is_said_so(tmp_path):
    trace = decided(tmp_path, [Signals(1, (1e-6, 2e-6, 3e-6), (1.0, 2.0, 3.0), 100, 1000)] * 3)
    run = read(tmp_path)[0]
    trace.decisions[2].variance[1] = None
    with pytest.raises(replay.NotReplayable, match="the signals of step 3 are not one of each layer"):
        list(replay.mismatches(run, trace))


def test_numbers_come_back_bit_for_bit(tmp_path):
    chance = random.Random(0)
    drawn = [struct.unpack("<d", chance.randbytes(8))[0] for _ in range(3000)]
    drawn += [0.0, -0.0, 5e-324, 2.2250738585072014e-308, 1.7976931348623157e308, 0.1 + 0.2]
    drawn = [value for value in drawn if value == value]
    trace = decided(tmp_path, [Signals(1, None, None, None, None)])
    trace.decisions[0].variance = drawn
    write_run(tmp_path, read(tmp_path)[0], trace)
    back = read(tmp_path)[1].decisions[0].variance
    assert [struct.pack("<d", value) for value in back] == [struct.pack("<d", value) for value in drawn]


def test_a_trace_stays_small(adaptive):
    """Its start once, and a few bytes more a decision."""
    _, trace = read(adaptive)
    assert len(trace.start.model_dump_json()) < 2500
    signals_alone = trace.decisions[0].model_dump_json(exclude={"in_force_after", "rate_share"})
    assert len(trace.decisions[0].model_dump_json()) - len(signals_alone) < 100


def test_a_trace_that_tells_what_is_no_longer_recorded_is_read(adaptive, tmp_path):
    run, trace = read(adaptive)
    told = json.loads(trace.model_dump_json())
    told["start"]["momentum_steps"] = told["decisions"][0]["noise_scale"] = 19.0
    told["start"]["rules"]["batch"]["noise_share"] = 0.5
    assert Trace.model_validate_json(json.dumps(told)) == trace
    told["decisions"][0]["nose_scale"] = 19.0
    with pytest.raises(ValueError, match="nose_scale"):
        Trace.model_validate_json(json.dumps(told))


def test_every_decision_of_the_committed_runs_follows_from_what_it_saw(capsys):
    runs = {*REFERENCE.glob("runs/*/seed-*")}
    following = {*REFERENCE.glob("runs/*-replay-*/seed-*")}
    assert tables_cli.main(["replay", str(REFERENCE / "runs")]) == 0
    told = capsys.readouterr().out
    assert told.count(" 0 mismatches\n") == len(runs - following) > 50
    assert told.count(": nothing to replay: it decided nothing") == len(following)


@pytest.mark.parametrize(
    "path", sorted(REFERENCE.glob("further/first-version/*/*/trace.json.gz")), ids=lambda path: path.parts[-3]
)
def test_traces_of_earlier_versions_are_read_and_not_replayed(path, capsys):
    assert read_trace(path).decisions
    assert tables_cli.main(["replay", str(path.parent)]) == 2
    assert "cannot be replayed: its trace is of an earlier version" in capsys.readouterr().out


def test_the_command_tells_of_each_run_and_fails_on_a_mismatch(adaptive, tmp_path, capsys):
    run, trace = read(adaptive)
    count = len(trace.decisions)
    assert tables_cli.main(["replay", str(adaptive), str(adaptive / "run.json")]) == 0
    assert capsys.readouterr().out == f"{adaptive / 'run.json'}: {count} decisions, 0 mismatches\n" * 2
    for decision in trace.decisions:
        decision.promoted = [not value for value in decision.promoted]
    write_run(tmp_path / "bent", run, trace)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text("{")
    assert tables_cli.main(["replay", str(tmp_path), str(adaptive)]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"{tmp_path / 'bent' / 'run.json'}: {count} decisions, {10 * count} mismatches"
    assert said[1].startswith(f"  step {trace.decisions[0].step}, promoted[conv1]: recorded ")
    assert said[21:] == [
        f"  and {10 * count - 20} more",
        said[22],
        f"{adaptive / 'run.json'}: {count} decisions, 0 mismatches",
    ]
    assert "not a record" in said[22]
    assert tables_cli.main(["replay", str(tmp_path / "broken")]) == 2


def test_the_command_wants_runs_and_only_replay_takes_them(tmp_path, capsys):
    for arguments, said in (
        (["replay"], "replay: expected folders of runs, or their run.json, got none"),
        (["audit", str(tmp_path)], f"audit: expected no folders beside it, got {tmp_path}"),
    ):
        with pytest.raises(SystemExit) as caught:
            tables_cli.main(arguments)
        assert caught.value.code == 2 and said in capsys.readouterr().err
    assert tables_cli.main(["replay", str(tmp_path)]) == 2
    assert "expected a folder with run.json in it" in capsys.readouterr().out
