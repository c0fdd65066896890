"""The rules of the house: imports go down the levels, and the light entry points import no torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LEVELS = {
    -1: {"life", "files"},
    0: {
        "settings",
        "records",
        "paper",
        "sources",
        "lanczos",
        "shortage",
        "checkpointing",
        "weights",
        "deadline",
        "leases",
        "bounds",
    },
    1: {
        "parsing",
        "identity",
        "hardware",
        "data",
        "models",
        "schedule",
        "probe",
        "graphs",
        "rungs",
        "buckets",
        "snapshot",
        "reading",
        "resumption",
        "gram",
        "convolution",
        "stats",
        "compare",
        "packs",
        "findings",
        "recording",
        "labels",
        "layout",
        "outcomes",
        "scratch",
        "style",
        "tracker",
    },
    2: {
        "vegalite",
        "captures",
        "meters",
        "precision",
        "control",
        "cells",
        "results",
        "terminal",
        "configuration",
        "progress",
        "divergence",
        "fisher",
        "hessian",
        "jacobian",
    },
    3: {"tuning", "claims", "audit", "preflight", "engine", "footers", "sheet", "curvature", "reference", "replay"},
    4: {
        "inspection",
        "pace",
        "anatomy",
        "ledger",
        "methods",
        "openloop",
        "tables",
        "differences",
        "boxes",
        "recovery",
        "series",
        "split",
    },
    5: {"assembly", "loop", "charts", "scenes", "pages", "evidence"},
    6: {"trainer", "figures", "plots", "verdicts", "targets"},
    7: {"worker", "report", "verdict_tables"},
    8: {"child", "verdict_page"},
    9: {"runner"},
    10: {"launching"},
    11: {"cli", "tables_cli"},
    12: {"reproduction"},
}
LEVEL_OF = {name: level for level, names in LEVELS.items() for name in names} | {"kernels": 0}


def own_imports(path: Path) -> set[str]:
    """Names of our modules that a file imports, wherever in it the import stands."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "triaccel_bench":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("triaccel_bench."):
            found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("triaccel_bench.")}
    return found & LEVEL_OF.keys()


def modules() -> list[Path]:
    return sorted(path for path in (ROOT / "triaccel_bench").glob("*.py") if path.stem != "__init__")


def test_every_module_has_a_level():
    assert {path.stem for path in modules()} == set().union(*LEVELS.values())


@pytest.mark.parametrize("path", modules(), ids=lambda path: path.stem)
def test_imports_go_down(path):
    above = {name for name in own_imports(path) if LEVEL_OF[name] >= LEVEL_OF[path.stem]}
    assert not above, f"{path.name} (level {LEVEL_OF[path.stem]}) imports {above}"


def test_kernels_import_nothing_of_ours_but_kernels():
    for path in (ROOT / "kernels").glob("*.py"):
        assert own_imports(path) <= {"kernels"}, path


def test_files_are_one_room():
    long = {path.name: n for path in modules() if (n := len(path.read_text().splitlines())) > 400}
    assert not long


@pytest.mark.parametrize("module", ["triaccel_bench", "triaccel_bench.cli", "triaccel_bench.tables_cli"])
def test_light_entries_import_no_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
