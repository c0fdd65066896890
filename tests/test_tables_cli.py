"""The command that writes the tables, and its exit codes."""

from __future__ import annotations

import subprocess
import sys

import pytest
from measured import run, write

from triaccel_bench import tables_cli


@pytest.mark.parametrize("command, option", [
    (["verdicts"], ["--margin", "1"]), (["figures"], ["--margin", "1"]), (["report"], ["--device", "T4"]),
    (["tables"], ["--box", "mine"]),
])  # fmt: skip
def test_an_option_that_a_command_does_not_read_is_refused(command, option, capsys):
    with pytest.raises(SystemExit) as ended:
        tables_cli.main([*command, *option])
    assert ended.value.code == 2 and f"{option[0]}: expected with" in capsys.readouterr().err


def test_command_writes_and_prints_both_tables(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(
        tmp_path / "results" / "runs",
        run(),
        run(method="triaccel", gb=0.3),
        run(method="triaccel", seed=1, status="oom"),
    )
    assert tables_cli.main([]) == 0
    out = capsys.readouterr().out
    for name in (f"table{n}.{suffix}" for n in (1, 2) for suffix in ("md", "csv", "tex")):
        assert (tmp_path / "results" / "tables" / name).stat().st_size > 0
        assert name in out
    assert "Table 1" in out and "Table 2" in out and "seed 1 oom" in out


@pytest.mark.parametrize("there", [True, False])
def test_command_without_records_says_in_one_sentence_how_to_make_some(tmp_path, capsys, there):
    folder = tmp_path / "runs"
    if there:
        folder.mkdir()
    assert tables_cli.main(["--results", str(folder), "--out", str(tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1 and "triaccel-bench +experiment=demo" in captured.err
    assert not (tmp_path / "out").exists()


def test_command_fails_when_no_record_is_of_a_finished_run(tmp_path, capsys):
    write(tmp_path, run(status="diverged", reason="60 skips in a row"))
    assert tables_cli.main(["--results", str(tmp_path), "--out", str(tmp_path / "out")]) == 1
    captured = capsys.readouterr()
    assert "seed 0 diverged: 60 skips in a row" in captured.out
    assert "No finished run" in captured.err


def test_command_fails_and_names_the_files_when_none_can_be_read(tmp_path, capsys):
    (tmp_path / "run.json").write_text("")
    assert tables_cli.main(["--results", str(tmp_path), "--out", str(tmp_path / "out")]) == 1
    assert str(tmp_path / "run.json") in capsys.readouterr().err


@pytest.mark.parametrize("out", ["file", "file/below", "/proc/none", "n" * 300])
def test_a_folder_that_cannot_be_written_is_named(tmp_path, capsys, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    write(tmp_path / "runs", run())
    assert tables_cli.main(["--results", "runs", "--out", out]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert out in captured.err and "name another by --out" in captured.err


def test_a_reader_that_has_seen_enough_is_no_fault(tmp_path):
    write(tmp_path / "runs", *(run(method=f"m{n}") for n in range(300)))
    with subprocess.Popen(
        [sys.executable, "-m", "triaccel_bench.tables_cli", "--results", "runs"], cwd=tmp_path, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout.readline()
        process.stdout.close()
        said = process.stderr.read()
    assert (process.returncode, said) == (0, "")


def test_command_audits_without_records_and_writes_what_it_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert tables_cli.main(["audit"]) == 0
    captured = capsys.readouterr()
    assert "12.44" in captured.out and "physically impossible" in captured.out and captured.err == ""
    written = sorted(path.name for path in (tmp_path / "results" / "tables").iterdir())
    assert written == ["audit.csv", "audit.md", "audit.tex"]
    assert all(name in captured.out for name in written)


@pytest.mark.parametrize("gb", [0.35, 0.1])
def test_command_audits_records_and_fails_where_one_is_impossible(tmp_path, monkeypatch, capsys, gb):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "results" / "runs", run(gb=gb))
    assert tables_cli.main(["audit"]) == (0 if gb == 0.35 else 1)
    captured = capsys.readouterr()
    assert captured.err.count("\n") == (0 if gb == 0.35 else 1)
    assert ("Seed 0 of cell cifar10-resnet18-fp32: its memory or its time lies below" in captured.err) == (gb == 0.1)
    assert "Audit of the records" in captured.out
    for suffix in ("md", "csv", "tex"):
        assert (tmp_path / "results" / "tables" / f"audit_records.{suffix}").stat().st_size > 0


def test_command_audits_the_paper_where_a_named_folder_holds_no_records(tmp_path, capsys):
    assert tables_cli.main(["audit", "--results", str(tmp_path / "none"), "--out", str(tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    assert "12.44" in captured.out
    assert captured.err.count("\n") == 1 and str(tmp_path / "none") in captured.err


def test_command_audits_names_records_that_cannot_be_read(tmp_path, capsys):
    (tmp_path / "run.json").write_text("")
    assert tables_cli.main(["audit", "--results", str(tmp_path), "--out", str(tmp_path / "out")]) == 1
    assert str(tmp_path / "run.json") in capsys.readouterr().err


def test_command_audits_into_a_folder_that_can_be_written(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert tables_cli.main(["audit", "--out", str(tmp_path / "file")]) == 2
    assert "name another by --out" in capsys.readouterr().err
