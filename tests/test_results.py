"""Records found below folders: each seed once, every unusable file named."""

from __future__ import annotations

import pytest
from measured import run, write

from triaccel_bench.results import read_results
from triaccel_bench.tables import table1


def test_broken_files_are_named(tmp_path):
    write(tmp_path, run(seed=0), run(seed=1))
    broken = tmp_path / "cell" / "run.json"
    broken.parent.mkdir()
    broken.write_text('{"results_version": 1,')
    results = read_results([tmp_path, tmp_path / "absent"])
    assert len(results.runs) == 2
    assert [str(tmp_path / "absent") in results.problems[0], str(broken) in results.problems[1]] == [True, True]
    assert f"Not used: {results.problems[1]}" in table1(results).footers


def test_what_is_no_folder_or_no_file_is_named(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "a" / "run.json").mkdir(parents=True)
    results = read_results([tmp_path / "file", tmp_path])
    assert not results.runs and len(results.problems) == 2
    assert "expected a folder, got a file; correct --results" in results.problems[0]
    assert str(tmp_path / "a" / "run.json") in results.problems[1]


@pytest.mark.parametrize(("done", "lost"), [("a", "b"), ("b", "a")])
def test_a_seed_counts_once_and_as_finished_wherever_it_lies(tmp_path, done, lost):
    lost = write(tmp_path / lost, run(seed=0), run(seed=1, status="failed", reason="lost the machine"))
    done = write(tmp_path / done, run(seed=0), run(seed=1, accuracy=79.0))
    results = read_results([lost, lost / ".." / lost.name, done])
    assert sorted((one.seed, one.status) for one in results.runs) == [(0, "done"), (1, "done")]
    assert len(results.problems) == 1
    assert results.problems[0].startswith(str(lost)) and "recorded twice" in results.problems[0]
