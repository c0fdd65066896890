"""``triaccel-tables``: Tables 1 and 2 from run records, and the audit of the paper and of the records. No torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from triaccel_bench.audit import IMPOSSIBLE, audit_table, check_records, records_table
from triaccel_bench.layout import Table, to_csv, to_latex, to_markdown
from triaccel_bench.records import write_atomically
from triaccel_bench.results import Results, read_results
from triaccel_bench.stats import why_excluded
from triaccel_bench.tables import table1, table2
from triaccel_bench.terminal import render_terminal, silence_output

DONE, NOTHING_USABLE, REFUSED = 0, 1, 2
RECORD_IMPOSSIBLE = 1

_RUNS = [Path("results/runs")]

_WRITERS = {"md": to_markdown, "csv": to_csv, "tex": to_latex}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print and write the tables, or the audit. Returns the exit code.

    0: done, with unfinished seeds and unreadable files named below the tables, and whatever the
    audit found of the paper; 1: there are records but none is of a finished run, or one of them
    lies below a lower bound; 2: no records, nowhere to write, or a bad command line.
    A reader that closes the pipe early has seen enough: that is no fault.
    """
    options = _parser().parse_args(arguments)
    try:
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


def _run(options: argparse.Namespace) -> int:
    if options.command == "audit":
        return _audit(options)
    results = read_results(options.results)
    if not results.runs:
        return _say_what_lacks(results, options.results)
    if not _show({"table1": table1(results), "table2": table2(results)}, options.out):
        return REFUSED
    if any(why_excluded(run) is None for run in results.runs):
        return DONE
    print("No finished run among the records: the tables hold no figures.", file=sys.stderr)
    return NOTHING_USABLE


def _audit(options: argparse.Namespace) -> int:
    """The paper's numbers, and the records' where there are some or where a folder of them was named."""
    named = options.results is not _RUNS
    results = read_results(options.results) if named or _RUNS[0].is_dir() else Results(())
    tables = {"audit": audit_table()} | ({"audit_records": records_table(results)} if results.runs else {})
    if not _show(tables, options.out):
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


def _show(tables: dict[str, Table], out: Path) -> bool:
    """Write each table in every format, then print them; False, and why on standard error, where that cannot be."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        written = [
            write_atomically(out / f"{name}.{suffix}", writer(table).encode())
            for name, table in tables.items()
            for suffix, writer in _WRITERS.items()
        ]
    except OSError as error:
        print(f"{out}: expected a folder that can be written, got {error}; name another by --out", file=sys.stderr)
        return False
    for table in tables.values():
        render_terminal(table)
        print()
    print(f"Written: {', '.join(map(str, written))}")
    return True


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="triaccel-tables",
        description="Build Tables 1 and 2 from run records, beside the paper's figures, or audit both.",
    )
    parser.add_argument(
        "command",
        nargs="?",
        choices=("tables", "audit"),
        default="tables",
        help="tables (the default), or audit: the paper's numbers recomputed from one another, and its figures and the "
        "records' beside lower bounds",
    )
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
        default=Path("results/tables"),
        help="where tables and audit are written as .md, .csv and .tex (default: results/tables)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
