"""The measurement of overheads: the records it makes up are real ones, and its rows say what was measured."""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import bench_overheads  # noqa: E402

from triaccel_bench.results import read_results  # noqa: E402
from triaccel_bench.tables import table1  # noqa: E402


def test_made_up_records_are_read_and_give_whole_rows(tmp_path):
    size = bench_overheads.fabricate(tmp_path, 23)
    found = read_results([tmp_path])
    assert len(found.runs) == 23 and not found.problems and size > 23 * 25_000, "as large as real ones"
    rows = table1(found).rows
    assert len(rows) == 5 and all("n/a" not in row[3] for row in rows)


def test_rows_of_a_command_that_works_and_of_one_that_does_not(tmp_path, capsys, monkeypatch):
    out = tmp_path / "deep" / "overheads.json"
    arguments = ["--only", "tables", "--records", "6", "--repeats", "1", "--out", str(out)]
    assert bench_overheads.main(arguments) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["name"], row["unit"], row["target"], row["ok"], row["records"]) == (
        "tables/records", "s", "<= 10.0", True, 6,
    )  # fmt: skip
    assert row["value"] > 0
    monkeypatch.setattr(bench_overheads, "fabricate", lambda folder, records: folder.mkdir() or 0)
    assert bench_overheads.main(arguments) == 1
    (row,) = json.loads(out.read_text())["rows"]
    assert row["value"] is None and row["ok"] is False and "ended with 2" in row["error"]
    assert bench_overheads.main(["--only", "nothing"]) == 2
    assert "expected part of help, run/fixed, tables/records" in capsys.readouterr().err
