"""``triaccel-tables``: Tables 1 and 2 from run records, how methods differ in them, audits, verdicts, pictures, packs.

Imports no torch.
"""

from __future__ import annotations

import argparse
import gc
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from triaccel_bench import replay
from triaccel_bench.audit import IMPOSSIBLE, audit_table, check_records, records_table
from triaccel_bench.boxes import boxes_table
from triaccel_bench.differences import MARGIN, differences
from triaccel_bench.figures import figures
from triaccel_bench.files import write_together
from triaccel_bench.layout import Table, to_csv, to_latex, to_markdown
from triaccel_bench.reference import NoPack, pack
from triaccel_bench.report import FILE, NoLibrary, report
from triaccel_bench.results import Results, read_results
from triaccel_bench.stats import why_excluded
from triaccel_bench.style import NoMatplotlib
from triaccel_bench.tables import table1, table2
from triaccel_bench.terminal import render_terminal, silence_output
from triaccel_bench.verdict_page import TITLE, NoEvidence, evidence_of, page

REFERENCE = Path("results/reference")

DONE, NOTHING_USABLE, REFUSED = 0, 1, 2
RECORD_IMPOSSIBLE = 1

_RUNS = [Path("results/runs")]
_TRIALS = Path("results/tuning")
_TABLES, _FIGURES, _PAGE = Path("results/tables"), Path("results/figures"), Path("results")

_READ_BY = {"margin": ("tables", "report"), "box": ("pack",), "device": ("pack", "verdicts")}
"""Options that not every command reads."""

_ANOTHER = "name another by --out"

_WRITERS = {"md": to_markdown, "csv": to_csv, "tex": to_latex}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print and write the tables or the audit, draw pictures, make the report, or replay decisions.

    Exit codes of replay: ``replay.report``. Of all else:

    0: done, with unfinished seeds and unreadable files named below the tables; 1: there are
    records but none is of a finished run, one lies below a lower bound, or a pack was made without
    some of them; 2: no records, nowhere to write, no library that draws, or a bad command line. What the audit finds
    of the paper is a result, and 0.
    A reader that closes the pipe early has seen enough: that is no fault.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if (options.command == "replay") != bool(options.runs):
        if options.command == "replay":
            parser.error("replay: expected folders of runs, or their run.json, got none; name some, as results/runs")
        got = " ".join(map(str, options.runs))
        parser.error(f"{options.command}: expected no folders beside it, got {got}; name them by --results")
    for option, commands in _READ_BY.items():
        if getattr(options, option) is not None and options.command not in commands:
            parser.error(f"--{option}: expected with {' or '.join(commands)}, got {options.command}; leave it out")
    try:
        with _no_collector():
            code = _run(options)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except (BrokenPipeError, SystemExit):
        # rich answers a closed pipe with SystemExit.
        silence_output()
        return DONE
    except OSError as error:
        silence_output()
        print(f"Standard output: expected it to take the tables, got {error}", file=sys.stderr)
        return REFUSED


@contextmanager
def _no_collector() -> Iterator[None]:
    """Thousands of records are millions of objects, all of which live to the end: walking them doubles the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _run(options: argparse.Namespace) -> int:
    if options.command == "audit":
        return _audit(options)
    if options.command == "replay":
        lines, code = replay.report(options.runs)
        print(*lines, sep="\n")
        return code
    if options.command == "pack":
        return _pack(options)
    if options.command == "boxes":
        return _write_boxes(options)
    folders = options.results
    if options.command == "verdicts" and folders is _RUNS and _TRIALS.is_dir():
        folders = [*folders, _TRIALS]
    results = read_results(folders)
    if not results.runs:
        return _say_what_lacks(results, options.results)
    if options.command == "verdicts":
        return _write_verdicts(results, options)
    margin = MARGIN if options.margin is None else options.margin
    if options.command == "figures":
        return _write_figures(results, options.out or _FIGURES)
    if options.command == "report":
        return _write_report(results, options.out or _PAGE, margin)
    return _write_tables(results, options.out or _TABLES, margin)


def _audit(options: argparse.Namespace) -> int:
    """The paper's numbers, and the records' where there are some or where a folder of them was named."""
    named = options.results is not _RUNS
    results = read_results(options.results) if named or _RUNS[0].is_dir() else Results(())
    tables = {"audit": audit_table()} | ({"audit_records": records_table(results)} if results.runs else {})
    if not _show(tables, options.out or _TABLES):
        return REFUSED
    if not results.runs:
        return _say_what_lacks(results, options.results) if named or results.problems else DONE
    impossible = [record for record in check_records(results) if record.verdict == IMPOSSIBLE]
    for record in impossible:
        print(
            f"Seed {record.seed} of cell {record.cell}: its memory or its time lies below what its steps need at "
            "least; distrust its meter or its clock.",
            file=sys.stderr,
        )
    return RECORD_IMPOSSIBLE if impossible else DONE


def _write_figures(results: Results, out: Path) -> int:
    try:
        files = figures(results)
    except NoMatplotlib as error:
        print(error, file=sys.stderr)
        return REFUSED
    return _write_files(results, out, files, "the pictures hold")


def _write_report(results: Results, out: Path, margin: float) -> int:
    try:
        files = {FILE: report(results, margin)}
    except NoLibrary as error:
        print(error, file=sys.stderr)
        return REFUSED
    return _write_files(results, out, files, "the tables of the report hold")


def _write_files(results: Results, out: Path, files: dict[str, bytes], what: str) -> int:
    written = _saved(files, out)
    if written is None:
        return REFUSED
    print(*(f"Not used: {problem}" for problem in results.problems), sep="\n", end="\n" * bool(results.problems))
    print(written)
    return _code_of(results, what)


def _write_verdicts(results: Results, options: argparse.Namespace) -> int:
    out = options.out or _PAGE
    path = out / "README.md"
    try:
        evidence = evidence_of(results, options.device or "")
        other = path.exists() and not path.read_bytes().startswith(TITLE.encode())
    except NoEvidence as error:
        print(error, file=sys.stderr)
        return REFUSED
    except OSError as error:
        _say_unwritable(out, error)
        return REFUSED
    if other:
        print(f"{path}: expected a page of verdicts, got another text; name a folder by --out", file=sys.stderr)
        return REFUSED
    if path.exists() and evidence.says_nothing:
        print(f"{path}: stays as it is, since none of these records is of a cell of the paper", file=sys.stderr)
        return _code_of(results, "the page holds")
    written = _saved({path.name: page(evidence).encode()}, out)
    if written is None:
        return REFUSED
    print(written)
    return _code_of(results, "the page holds")


def _code_of(results: Results, what: str) -> int:
    if any(why_excluded(run) is None for run in results.runs):
        return DONE
    print(f"No finished run among the records: {what} no figures.", file=sys.stderr)
    return NOTHING_USABLE


def _say_what_lacks(results: Results, folders: list[Path]) -> int:
    if len(results.problems) > sum(not folder.is_dir() for folder in folders):
        print(*results.problems, sep="\n", file=sys.stderr)
        return NOTHING_USABLE
    print(
        f"No run records below {', '.join(map(str, folders))}; `triaccel-bench +experiment=demo` makes some "
        "on any CPU, and --results names another folder.",
        file=sys.stderr,
    )
    return REFUSED


def _pack(options: argparse.Namespace) -> int:
    """Pack the records of one box, then make its tables from what lies in the pack."""
    if options.box is None:
        print("--box: expected a name for the box, such as t4-colab, got none; add --box NAME", file=sys.stderr)
        return REFUSED
    out = REFERENCE / options.box
    try:
        packed = pack(options.results, out, options.device or "")
    except NoPack as error:
        print(error, file=sys.stderr)
        return REFUSED
    except OSError as error:
        print(f"{out}: expected a folder that can be written, got {error}; free space there", file=sys.stderr)
        return REFUSED
    for sentence in packed.refused:
        print(f"Left out: {sentence}", file=sys.stderr)
    print(f"Packed: {packed.records} records in {packed.folder}; {len(packed.refused)} left out")
    code = _write_tables(read_results([out]), out / "tables")
    return code or (NOTHING_USABLE if packed.refused else DONE)


def _write_boxes(options: argparse.Namespace) -> int:
    if options.results is not _RUNS:
        print("--results: expected none, since boxes are those of results/reference; leave it out", file=sys.stderr)
        return REFUSED
    packs = sorted(REFERENCE.glob("*/runs"))
    if not packs:
        print(f"{REFERENCE}: expected <box>/runs there, got none; run this in the project's folder", file=sys.stderr)
        return REFUSED
    table = boxes_table(read_results(packs))
    written = _written({"boxes": table}, REFERENCE, "free space there")
    if written is None:
        return REFUSED
    render_terminal(table)
    print(written)
    return DONE


def _points(text: str) -> float:
    if not 0 <= (value := float(text)) <= 100:
        raise argparse.ArgumentTypeError(f"expected points of accuracy from 0 to 100, got {text}")
    return value


def _box(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", text):
        raise argparse.ArgumentTypeError(f"expected lower-case letters, digits, dots and dashes, got {text!r}")
    return text


def _write_tables(results: Results, out: Path, margin: float = MARGIN) -> int:
    tables = {"table1": table1(results), "table2": table2(results), "differences": differences(results, margin)}
    if not _show(tables, out):
        return REFUSED
    return _code_of(results, "the tables hold")


def _show(tables: dict[str, Table], out: Path) -> bool:
    """Write each table in every format, then print them; False, and why on standard error, where that cannot be."""
    written = _written(tables, out, _ANOTHER)
    if written is None:
        return False
    for name, table in tables.items():
        if table.rows or name != "differences":
            render_terminal(table)
            print()
    print(written)
    return True


def _written(tables: dict[str, Table], out: Path, remedy: str) -> str | None:
    """Each table in every format, all or none; says which files, or ``None``, and why on standard error."""
    files = {
        f"{name}.{suffix}": writer(table).encode()
        for name, table in tables.items()
        for suffix, writer in _WRITERS.items()
    }
    return _saved(files, out, remedy)


def _saved(files: dict[str, bytes], out: Path, remedy: str = _ANOTHER) -> str | None:
    """The files below a folder, all or none; says which, or ``None``, and why on standard error."""
    paths = {out / name: content for name, content in files.items()}
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_together(paths)
    except OSError as error:
        _say_unwritable(out, error, remedy)
        return None
    return f"Written: {', '.join(map(str, paths))}"


def _say_unwritable(out: Path, error: OSError, remedy: str = _ANOTHER) -> None:
    print(f"{out}: expected a folder that can be written, got {error}; {remedy}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="triaccel-tables",
        description="Build Tables 1 and 2 from run records, beside the paper's figures, or audit both.",
    )
    parser.add_argument(
        "command",
        nargs="?",
        choices=("tables", "figures", "report", "audit", "verdicts", "replay", "pack", "boxes"),
        default="tables",
        help="tables (the default); figures: pictures of the records and their traces; report: all of it as one page "
        "that opens offline; audit: the paper's numbers recomputed from one another, and its figures and the records' "
        "beside lower bounds; verdicts: results/README.md, the paper claim by claim beside what the records say; "
        "replay: every decision of runs derived again from what it saw; pack: this box's records, checked, into "
        "results/reference/<box>; boxes: what was measured on which device there",
    )
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="replay: folders of runs, or their run.json")
    parser.add_argument(
        "--results",
        nargs="+",
        type=Path,
        metavar="DIR",
        default=_RUNS,
        help="folders searched for run.json (default: results/runs)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where tables and audit are written as .md, .csv and .tex (default: results/tables), figures as .png "
        "and .svg (default: results/figures), or report.html or verdicts as README.md (default: results)",
    )
    parser.add_argument(
        "--margin",
        type=_points,
        metavar="POINTS",
        help=f"of tables and report: accuracy that may be lost and still count as not inferior (default: {MARGIN})",
    )
    parser.add_argument(
        "--box", type=_box, metavar="NAME", help="of pack: how this machine is called, such as t4-colab"
    )
    parser.add_argument(
        "--device",
        metavar="TEXT",
        help="of pack and verdicts: part of the device's name, where --results holds several",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
