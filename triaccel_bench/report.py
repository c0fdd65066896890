"""All records as one HTML file that opens offline: tables, pictures with values under the pointer, a page for each run.

The same records give the same bytes with one version of the libraries. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from triaccel_bench import charts, pages, plots, series
from triaccel_bench.audit import audit_table, records_table
from triaccel_bench.differences import MARGIN, differences
from triaccel_bench.footers import NOT_MEASURED
from triaccel_bench.labels import method_label
from triaccel_bench.results import Results
from triaccel_bench.series import Group, Stems, Traces
from triaccel_bench.sheet import Sheet
from triaccel_bench.tables import table1, table2
from triaccel_bench.vegalite import Picture

FILE = "report.html"
MAX_BYTES = 6_000_000
OVERVIEW_BYTES = 4_000_000
"""Of these the most that all but the runs' pages takes, where thinning out can bring that about."""
_SENTENCES = 1000
"""Kept for what is said of pages that have no room."""
LIBRARIES = {"jinja2": "jinja2", "vl_convert": "vl-convert-python", "itables": "itables"}
"""Packages by the module that each brings: the page, what draws in it, what sorts in it."""

_PAGE = Path(__file__).parent / "page"
_FIGURE = re.compile(r"[-+−]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?(?![\w.])")


class NoLibrary(Exception):
    """The message says what to install."""


@dataclass(frozen=True)
class _Overview:
    """The most of everything of which there may be any number."""

    points: int
    """Of a line in a picture, and columns of a map of layers."""
    rows: int
    """Of a table."""


@dataclass(frozen=True)
class _Run:
    """The same of one run's page."""

    points: int
    epochs: int
    decisions: int
    settings: bool
    """Whether all of them are listed."""


_OVERVIEWS = (_Overview(400, 10**6), *(_Overview(200 // 2**n, 10**6 if n < 3 else 4000 // 2**n) for n in range(7)))
_RUNS = (_Run(200, 400, 120, True), _Run(100, 100, 60, False), _Run(50, 30, 20, False), _Run(20, 10, 8, False))
"""From all that is of use to the least."""


def report(results: Results, margin: float = MARGIN) -> bytes:
    """The page, of ``MAX_BYTES`` at most; where that takes thinning out, it says so.

    Raises:
        NoLibrary: what the page is made with is not installed.
    """
    environment, traces, sheet = _environment(), Traces(results), Sheet(results, method_label)
    groups, runs = series.groups(sheet), pages.run_pages(sheet, traces)
    anchors = [page.anchor for page in runs]
    told = _told(results, margin, runs) | {"groups": groups, "sheet": sheet, "traces": traces}
    for most in _OVERVIEWS:
        frame = _framed(environment, told, most, anchors, [])
        if len(frame) <= OVERVIEW_BYTES:
            break
    for detail in _RUNS:
        written = list(_fitting(environment, runs, groups, detail, MAX_BYTES - len(frame)))
        if len(written) == len(runs):
            break
    if 0 < (count := len(written)) < len(runs):
        # What was the next run has no page.
        written[-1] = _written(environment, runs[:count], count - 1, groups, detail)
    return _framed(environment, told, most, anchors[:count], written)


def _fitting(
    environment: Any, runs: Sequence[pages.RunPage], groups: Sequence[Group], detail: _Run, room: int
) -> Iterator[str]:
    """Pages, until the next one has no room."""
    for place in range(len(runs)):
        text = _written(environment, runs, place, groups, detail)
        room -= len(text.encode()) + 1
        if room < _SENTENCES:
            return
        yield text


def _told(results: Results, margin: float, runs: Sequence[pages.RunPage]) -> dict[str, Any]:
    """What is the same at any detail."""
    first, second = table1(results), table2(results)
    return {
        "libraries": _libraries(),
        "style": (_PAGE / "report.css").read_text(encoding="utf-8"),
        "script": (_PAGE / "report.js").read_text(encoding="utf-8"),
        "problems": results.problems,
        "devices": sorted({run.provenance.device_name for run in results.runs if run.provenance}),
        "statuses": _counted([run.status for run in results.runs]),
        "count": len(runs),
        "environments": pages.environments(results.runs),
        "unknown_machines": sum(run.provenance is None for run in results.runs),
        "table1": first,
        "table2": second,
        "differences": differences(results, margin),
        "bars1": list(plots.tables(charts.table1_charts(first))),
        "bars2": list(plots.tables(charts.table2_charts(second))),
        "audit": audit_table(),
        "audit_records": records_table(results),
        "index": pages.index(runs),
    }


def _framed(
    environment: Any, told: dict[str, Any], most: _Overview, anchors: Sequence[str], written: Sequence[str]
) -> bytes:
    """The overview with these runs' pages; runs beyond ``anchors`` have none."""
    groups, sheet, traces = told["groups"], told["sheet"], told["traces"]
    text = environment.get_template("report.html").render(
        told,
        accuracy=[plots.accuracy(group, sheet, most.points) for group in groups],
        memory=[plots.memory(group, sheet, traces, most.points) for group in groups],
        layers=list(_layers(groups, sheet, traces, most.points)),
        most_rows=most.rows,
        anchors=anchors,
        runs=written,
    )
    return text.encode()


def _written(environment: Any, runs: Sequence[pages.RunPage], place: int, groups: Sequence[Group], detail: _Run) -> str:
    """One run's page."""
    page = runs[place]
    group, member = next((group, member) for group in groups for member in group.members if member.cell is page.cell)
    picture = None
    if page.run.epochs:
        picture = plots.memory_of_run(f"memory-{page.anchor}", member, page.run, page.trace, detail.points)
    return environment.get_template("run.html").render(
        page=page,
        before=runs[place - 1].anchor if place else None,
        after=runs[place + 1].anchor if place + 1 < len(runs) else None,
        facts=pages.facts(page),
        differing=pages.differing_settings(page, [member.cell for member in group.members]),
        settings=pages.all_settings(page) if detail.settings else None,
        epochs=pages.epochs(page, detail.epochs),
        picture=picture,
        decisions=pages.decisions(page, detail.decisions),
        time=pages.time_parts(page),
        memory=pages.memory_parts(page),
    )


def _layers(groups: Sequence[Group], sheet: Sheet, traces: Traces, most: int) -> Iterator[Picture]:
    stem = Stems()
    for group in groups:
        for member in group.members:
            labels = member.cell.dataset, member.cell.model, member.cell.method
            if series.adapts_precision(member.cell):
                yield plots.precision(stem("precision", *labels), member, group, sheet, traces, most)
            if series.reads_curvature(member.cell):
                yield plots.curvature(stem("curvature", *labels), member, group, sheet, traces, most)


def _counted(words: Sequence[str]) -> str:
    counts = {word: words.count(word) for word in dict.fromkeys(words)}
    return ", ".join(f"{count} {word}" for word, count in counts.items())


def _environment() -> Any:
    for module, package in LIBRARIES.items():
        if find_spec(module) is None:
            raise NoLibrary(
                f"{package}: expected it to be installed for the report, got none; pip install 'triaccel-bench[report]'"
            )
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_PAGE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["columns"] = _columns
    environment.filters["order"] = _order
    # In the order that they are given in: values are listed in it.
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False, "separators": (",", ":"), "ensure_ascii": False}
    return environment


@cache
def _libraries() -> dict[str, str]:
    """The scripts of the libraries, fit to stand in a script element."""
    import vl_convert

    (folder,) = find_spec("itables").submodule_search_locations
    # Of itables only the script that it ships is of use: DataTables as one module.
    scripts = {
        "vega": vl_convert.javascript_bundle(),
        "tables": Path(folder, "html", "dt_bundle.js").read_text(encoding="utf-8"),
    }
    return {name: _embedded(script) for name, script in scripts.items()}


def _embedded(script: str) -> str:
    """The same program without what would end its script element, or hide its end; both stand in texts alone."""
    return script.replace("<!--", r"\x3C!--").replace("</script", r"<\/script")


def _columns(rows: Sequence[Sequence[str]]) -> list[bool]:
    """Of each column whether it is sorted by figures: all of its cells begin with one, or have none."""
    return [
        any(cell not in ("", "-", NOT_MEASURED) for cell in column)
        and all(cell in ("", "-", NOT_MEASURED) or _FIGURE.match(cell) for cell in column)
        for column in zip(*rows)
    ]


def _order(cell: str) -> str:
    """The figure that a cell begins with, as JavaScript reads it; empty where there is none."""
    found = _FIGURE.match(cell)
    return found.group().replace(",", "").replace("−", "-").lstrip("+") if found else ""
