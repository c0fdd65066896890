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
HALVINGS = 12
"""Of the detail, until the page is small enough."""
LIBRARIES = {"jinja2": "jinja2", "vl_convert": "vl-convert-python", "itables": "itables"}
"""Packages by the module that each brings: the page, what draws in it, what sorts in it."""

_PAGE = Path(__file__).parent / "page"
_FIGURE = re.compile(r"[-+−]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?(?![\w.])")


class NoLibrary(Exception):
    """The message says what to install."""


@dataclass(frozen=True)
class Detail:
    """The most of everything of which there may be any number."""

    points: int = 400
    """Of a line in a picture of all runs, and columns of a map of layers."""
    run_points: int = 200
    epochs: int = 400
    decisions: int = 120
    settings: bool = True
    """Whether a run's page lists all of its settings."""
    runs: int = 4000
    """That have a page."""

    def halved(self) -> Detail:
        counts = (self.points, self.run_points, self.epochs, self.decisions)
        points, run_points, epochs, decisions = (max(2, count // 2) for count in counts)
        return Detail(points, run_points, epochs, decisions, settings=False, runs=max(1, self.runs // 2))


def report(results: Results, margin: float = MARGIN) -> bytes:
    """The page, below ``MAX_BYTES``; where that takes thinning out, it says so.

    Raises:
        NoLibrary: what the page is made with is not installed.
    """
    detail, traces = Detail(), Traces(results)
    content = _rendered(results, traces, margin, detail)
    for _ in range(HALVINGS):
        if len(content) < MAX_BYTES:
            break
        detail = detail.halved()
        content = _rendered(results, traces, margin, detail)
    return content


def _rendered(results: Results, traces: Traces, margin: float, detail: Detail) -> bytes:
    environment = _environment()
    sheet = Sheet(results, method_label)
    groups = series.groups(sheet)
    first, second = table1(results), table2(results)
    runs = pages.run_pages(sheet, traces)
    shown = runs[: detail.runs]
    text = environment.get_template("report.html").render(
        libraries=_libraries(),
        style=(_PAGE / "report.css").read_text(encoding="utf-8"),
        script=(_PAGE / "report.js").read_text(encoding="utf-8"),
        problems=results.problems,
        devices=sorted({run.provenance.device_name for run in results.runs if run.provenance}),
        statuses=_counted([run.status for run in results.runs]),
        environments=pages.environments(results.runs),
        unknown_machines=sum(run.provenance is None for run in results.runs),
        table1=first,
        table2=second,
        differences=differences(results, margin),
        bars1=list(plots.tables(charts.table1_charts(first))),
        bars2=list(plots.tables(charts.table2_charts(second))),
        accuracy=[plots.accuracy(group, sheet, detail.points) for group in groups],
        memory=[plots.memory(group, sheet, traces, detail.points) for group in groups],
        layers=list(_layers(groups, sheet, traces, detail.points)),
        audit=audit_table(),
        audit_records=records_table(results),
        index=pages.index(runs),
        anchors=[page.anchor for page in shown] + [None] * (len(runs) - len(shown)),
        runs=[_run(page, groups, detail) for page in shown],
        unshown=len(runs) - len(shown),
    )
    return text.encode()


def _layers(groups: Sequence[Group], sheet: Sheet, traces: Traces, most: int) -> Iterator[Picture]:
    stem = Stems()
    for group in groups:
        for member in group.members:
            labels = member.cell.dataset, member.cell.model, member.cell.method
            if series.adapts_precision(member.cell):
                yield plots.precision(stem("precision", *labels), member, group, sheet, traces, most)
            if series.reads_curvature(member.cell):
                yield plots.curvature(stem("curvature", *labels), member, group, sheet, traces, most)


def _run(page: pages.RunPage, groups: Sequence[Group], detail: Detail) -> dict[str, Any]:
    group = next(group for group in groups if any(member.cell is page.cell for member in group.members))
    member = next(member for member in group.members if member.cell is page.cell)
    picture = None
    if page.run.epochs:
        stem = f"memory-{page.anchor}"
        picture = plots.memory_of_run(stem, member, page.run, page.trace, detail.run_points)
    return {
        "page": page,
        "facts": pages.facts(page),
        "differing": pages.differing_settings(page, [member.cell for member in group.members]),
        "settings": pages.all_settings(page) if detail.settings else None,
        "epochs": pages.epochs(page, detail.epochs),
        "picture": picture,
        "decisions": pages.decisions(page, detail.decisions),
        "time": pages.time_parts(page),
        "memory": pages.memory_parts(page),
    }


def _counted(words: Sequence[str]) -> str:
    counts = {word: words.count(word) for word in dict.fromkeys(words)}
    return ", ".join(f"{count} {word}" for word, count in counts.items())


def _environment() -> Any:
    for module, package in LIBRARIES.items():
        if not _is_there(module):
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


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ValueError:
        # What a name that is set to None in sys.modules gets.
        return False


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
    return {
        name: script.replace("<!--", r"\x3C!--").replace("</script", r"<\/script") for name, script in scripts.items()
    }


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
