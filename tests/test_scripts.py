"""The scripts do what README and docs say of them."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import settings, trainer

from triaccel_bench import tables_cli
from triaccel_bench.methods import Method
from triaccel_bench.records import write_run

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import check_loop  # noqa: E402


def test_own_loop_moves_rates():
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "own_loop.py"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    first, second = [float(line.split("loss ")[1].split(",")[0]) for line in done.stdout.splitlines()]
    assert second < first
    assert float(done.stdout.split()[-1]) < 1.0


def record(folder: Path, monkeypatch, *overrides: str):
    monkeypatch.setattr(Method, "_allowance", lambda self, training_seconds: math.inf)
    made, run = trainer(settings("method.precision.cpu_executes=requested", *overrides))
    trace = made.train()
    run.status, run.reason = "done", None
    write_run(folder, run, trace)
    return run, trace


def test_check_loop_passes_a_loop_that_acts(tmp_path, monkeypatch, capsys):
    record(tmp_path / "run", monkeypatch, "epochs=6")
    assert check_loop.main([str(tmp_path)]) == 0, capsys.readouterr().out
    said = capsys.readouterr().out
    for what in (
        "two executed dtypes",
        "plan changed",
        "B changed",
        "B settled",
        "finite lambda",
        "rate scale",
        "promoted",
    ):
        assert f"pass  {what}" in said.replace("the ", "").replace("a ", "") or what in said


def test_check_loop_fails_a_loop_that_does_nothing(tmp_path, monkeypatch, capsys):
    """A static run that claims to be Tri-Accel fails every check of movement."""
    run, trace = record(tmp_path / "run", monkeypatch, "method=fp32")
    run.method = "triaccel"
    for section, key in (
        ("precision", "adaptive"),
        ("batch", "elastic"),
        ("curvature", "rates"),
        ("curvature", "promotion"),
    ):
        run.settings["method"][section][key] = True
    write_run(tmp_path / "run", run, trace)
    assert check_loop.main([str(tmp_path)]) == 1
    assert capsys.readouterr().out.count("FAIL") == 7


def test_check_loop_asks_tri_accel_plus_what_it_has(tmp_path, monkeypatch):
    run, trace = record(tmp_path / "run", monkeypatch, "method=triaccel_plus", "epochs=6")
    found = {what: holds for what, holds, _ in check_loop.checks(run, trace)}
    assert found["B settled in the band or at a stated bound"] and found["a finite lambda for every layer"]
    assert found["no layer was promoted"] and found["static precision stayed static"]
    run.layers[0].eigenvalues[0] = math.nan
    failed = [what for what, holds, _ in check_loop.checks(run, trace) if not holds]
    assert failed == ["a finite lambda for every layer"]
    trace.decisions[-2].batch_after += 8
    failed = [what for what, holds, _ in check_loop.checks(run, trace) if not holds]
    assert "B settled in the band or at a stated bound" in failed


@pytest.mark.parametrize("method, switch", [
    ("triaccel_batch", "batch"), ("triaccel_precision", "precision"), ("triaccel_curvature", "curvature"),
])  # fmt: skip
def test_check_loop_sees_an_ablation_that_moves_another_switch(tmp_path, monkeypatch, method, switch):
    run, trace = record(tmp_path / "run", monkeypatch, f"method={method}", "epochs=6")
    assert all(holds for _, holds, _ in check_loop.checks(run, trace))
    method_settings = run.settings["method"]
    method_settings["precision"]["adaptive"] = False
    method_settings["batch"]["elastic"] = False
    method_settings["curvature"] |= {"rates": False, "promotion": False}
    moved = [what for what, holds, _ in check_loop.checks(run, trace) if not holds]
    expected = {"batch": "batch stayed", "precision": "precision stayed", "curvature": "rates stayed"}[switch]
    assert any(expected in what for what in moved)


def test_check_loop_without_records_says_so(tmp_path, capsys):
    assert check_loop.main([str(tmp_path)]) == 2
    assert "no finished run" in capsys.readouterr().err


def test_the_committed_reference_runs_pass():
    """But for the paper's method, which on so fast a card has no time to read many layers' curvature."""
    cells = [path for path in (ROOT / "results" / "reference" / "h200" / "runs").iterdir()]
    passing = [str(path) for path in cells if "-triaccel-" not in path.name]
    assert 0 < len(passing) < len(cells) and check_loop.main(passing) == 0


def test_the_committed_page_follows_from_the_committed_records(tmp_path):
    box = ROOT / "results" / "reference" / "h200"
    assert (
        tables_cli.main(["verdicts", "--results", str(box / "runs"), str(box / "tuning"), "--out", str(tmp_path)]) == 0
    )
    assert (tmp_path / "README.md").read_text() == (ROOT / "results" / "README.md").read_text()


def test_the_committed_reference_tables_follow_from_their_runs(tmp_path):
    """Byte for byte."""
    reference = ROOT / "results" / "reference" / "h200"
    command = [sys.executable, "-m", "triaccel_bench.tables_cli", "--results", "runs", "--out", str(tmp_path)]
    subprocess.run(command, cwd=reference, check=True, capture_output=True)
    for table in ("table1.md", "table2.md", "differences.md"):
        assert (tmp_path / table).read_text() == (reference / "tables" / table).read_text()
