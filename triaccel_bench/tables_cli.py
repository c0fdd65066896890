"""``triaccel-tables``: Tables 1 and 2 from run records, and the audit of the paper's own numbers. Imports no torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from triaccel_bench import replay
from triaccel_bench.layout import to_csv, to_latex, to_markdown
from triaccel_bench.records import write_atomically
from triaccel_bench.results import Results, read_results
from triaccel_bench.stats import why_excluded
from triaccel_bench.tables import audit_table, table1, table2
from triaccel_bench.terminal import render_terminal, silence_output

DONE, NOTHING_USABLE, REFUSED = 0, 1, 2

_WRITERS = {"md": to_markdown, "csv": to_csv, "tex": to_latex}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print and write the tables, print the audit, or replay decisions (exit codes: ``replay.report``).

    0: done, with unfinished seeds and unreadable files named below the tables; 1: there are
    records but none is of a finished run; 2: no records, nowhere to write, or a bad command line.
    A reader that closes the pipe early has seen enough: that is no fault.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if (options.command == "replay") != bool(options.runs):
        parser.error("replay takes the folders of runs, or their run.json, and the other commands take none")
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
        render_terminal(audit_table())
        return DONE
    if options.command == "replay":
        lines, code = replay.report(options.runs)
        print(*lines, sep="\n")
        return code
    results = read_results(options.results)
    if results.runs:
        return _write_tables(results, options.out)
    if len(results.problems) > sum(not folder.is_dir() for folder in options.results):
        print(*results.problems, sep="\n", file=sys.stderr)
        return NOTHING_USABLE
    print(
        f"No run records below {', '.join(map(str, options.results))}; `triaccel-bench +experiment=demo` makes some "
        "on any CPU, and --results names another folder.",
        file=sys.stderr,
    )
    return REFUSED


def _write_tables(results: Results, out: Path) -> int:
    tables = {"table1": table1(results), "table2": table2(results)}
    try:
        out.mkdir(parents=True, exist_ok=True)
        written = [
            write_atomically(out / f"{name}.{suffix}", writer(table).encode())
            for name, table in tables.items()
            for suffix, writer in _WRITERS.items()
        ]
    except OSError as error:
        print(f"{out}: expected a folder that can be written, got {error}; name another by --out", file=sys.stderr)
        return REFUSED
    for table in tables.values():
        render_terminal(table)
        print()
    print(f"Written: {', '.join(map(str, written))}")
    if any(why_excluded(run) is None for run in results.runs):
        return DONE
    print("No finished run among the records: the tables hold no figures.", file=sys.stderr)
    return NOTHING_USABLE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="triaccel-tables",
        description="Build Tables 1 and 2 from run records, beside the paper's figures.",
    )
    parser.add_argument(
        "command",
        nargs="?",
        choices=("tables", "audit", "replay"),
        default="tables",
        help="tables (the default); audit: the paper's claims recomputed from its own printed numbers; or "
        "replay: every decision of runs derived again from what it saw",
    )
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="replay: folders of runs, or their run.json")
    parser.add_argument(
        "--results",
        nargs="+",
        type=Path,
        metavar="DIR",
        default=[Path("results/runs")],
        help="folders searched for run.json (default: results/runs)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        default=Path("results/tables"),
        help="where table1 and table2 are written as .md, .csv and .tex (default: results/tables)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
