"""Pictures: each from fabricated records, the same bytes again, letters that can be read, and what is missing said."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from measured import run, write
from PIL import Image
from traced import epochs, trace, triaccel

from triaccel_bench import style, tables_cli
from triaccel_bench.figures import drawn, figures
from triaccel_bench.records import write_run
from triaccel_bench.results import Results, read_results

matplotlib = pytest.importorskip("matplotlib")


def write_all(folder: Path) -> Path:
    """FP32 and Tri-Accel, two seeds each, traces beside the latter."""
    write(folder, *(run(seed=seed, epochs=epochs(50.0, 70.0 + seed)) for seed in (0, 1)))
    for seed in (0, 1):
        write_run(folder / "traced" / f"seed{seed}", triaccel(seed), trace())
    return folder


def words(results: Results) -> dict[str, list[str]]:
    """All text in each picture, in one string each."""
    from matplotlib.text import Text

    with style.drawing():
        return {
            stem: [text.get_text().replace("\n", " ") for text in figure.findobj(Text) if text.get_text()]
            for stem, figure in drawn(results)
        }


def said(results: Results, stem: str) -> str:
    return " | ".join(words(results)[stem])


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[Path, dict[str, bytes]]:
    folder = write_all(tmp_path_factory.mktemp("runs"))
    return folder, figures(read_results([folder]))


def test_every_picture_is_made_as_png_and_svg(written):
    _, files = written
    kinds = ("table1", "table2", "accuracy", "memory")
    stems = {*(f"{kind}-cifar10-resnet18" for kind in kinds)}
    stems |= {f"{kind}-cifar10-resnet18-triaccel" for kind in ("precision", "curvature")}
    assert set(files) == {f"{stem}.{kind}" for stem in stems for kind in ("png", "svg")}
    for name, content in files.items():
        if name.endswith("png"):
            assert Image.open(io.BytesIO(content)).width == round(style.WIDTH * 200)
        else:
            assert ElementTree.fromstring(content).tag.endswith("svg") and b"date" not in content


def test_same_records_give_the_same_bytes_in_another_process_whatever_its_settings(written, tmp_path):
    folder, files = written
    (tmp_path / "matplotlibrc").write_text("font.size: 20\nsavefig.dpi: 50\nsvg.fonttype: none\naxes.facecolor: red\n")
    code = (
        "import sys; from triaccel_bench.tables_cli import main; "
        f"code = main(['figures', '--results', {str(folder)!r}, '--out', {str(tmp_path / 'out')!r}]); "
        "sys.exit(code or ('torch' in sys.modules) * 9)"
    )
    environment = {
        "MATPLOTLIBRC": str(tmp_path),
        "PYTHONHASHSEED": "7",
        "PATH": "",
        "HOME": str(tmp_path),
        "TZ": "Asia/Tokyo",
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == files


def test_drawing_leaves_settings_as_they_were():
    before = dict(matplotlib.rcParams)
    with style.drawing():
        assert matplotlib.rcParams["svg.hashsalt"]
    assert dict(matplotlib.rcParams) == before


def test_letters_are_8_pt_at_least_and_lie_within_the_picture(tmp_path):
    from matplotlib.text import Text

    folder = write_all(tmp_path)
    long = [
        run(method="triaccel_" + "m" * 40, seed=seed, cell=f"c{seed}", tree={"epochs": 1 + seed}) for seed in (0, 1)
    ]
    names = [run(method=name) for name in ("tf32", "amp", "triaccel_batch", "triaccel_precision")]
    results = read_results([folder, write(tmp_path / "more", *long, *names)])
    with style.drawing():
        for stem, figure in drawn(results):
            figure.draw_without_rendering()
            whole = figure.bbox.padded(2)
            for text in figure.findobj(Text):
                if text.get_text().strip() and text.get_visible() and text.get_window_extent().width:
                    assert text.get_fontsize() >= 8, (stem, text)
                    box = text.get_window_extent()
                    ticks_beyond = _beyond_its_axis(text, figure)
                    assert ticks_beyond or (whole.x0 <= box.x0 and box.x1 <= whole.x1), (stem, text)
                    assert ticks_beyond or (whole.y0 <= box.y0 and box.y1 <= whole.y1), (stem, text)


def _beyond_its_axis(text, figure) -> bool:
    """Labels of ticks outside of the limits, which matplotlib keeps and does not draw."""
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
                if text in (tick.label1, tick.label2):
                    return not low <= tick.get_loc() <= high
    return False


def test_lines_of_a_picture_differ_by_more_than_colour():
    methods = [
        "fp32",
        "tf32",
        "amp",
        "triaccel",
        "triaccel",
        "triaccel_batch",
        "triaccel_precision",
        "triaccel_curvature",
    ]
    looks = style.looks([*methods, *(f"other{n}" for n in range(20))])
    assert len({(str(look.linestyle), look.marker) for look in looks}) == len(looks)
    assert style.looks(["triaccel"]) == [looks[3]]


def test_legend_tells_seeds_and_a_single_one_is_named(tmp_path):
    two = Results((run(seed=0, epochs=epochs(1.0)), run(seed=1, epochs=epochs(2.0))))
    assert "FP32 Baseline (n = 2)" in words(two)["accuracy-cifar10-resnet18"]
    assert "one seed" not in said(two, "accuracy-cifar10-resnet18")
    alone = said(Results((run(),)), "accuracy-cifar10-resnet18")
    assert "(n = 1)" in alone and "one seed, no range" in alone


def test_what_is_missing_is_said():
    found = words(
        Results((triaccel(gb=None, meter="off"), run("digits", "resnet8", "triaccel", epochs=[], status="oom")))
    )
    assert "no trace" in found["precision-cifar10-resnet18-triaccel"]
    assert "no trace" in found["curvature-cifar10-resnet18-triaccel"]
    assert "no memory reading" in found["accuracy-cifar10-resnet18"]
    assert "no memory reading" in found["memory-cifar10-resnet18"]
    assert any("No trace, so peaks and mean batch sizes" in text for text in found["memory-cifar10-resnet18"])
    for kind in ("accuracy", "memory"):
        assert "no finished seed" in found[f"{kind}-digits-resnet8"]
        assert any("seed 0 oom" in text for text in found[f"{kind}-digits-resnet8"])
    assert "no finished seed" in found["precision-digits-resnet8-triaccel"]
    assert "n/a" in found["table1-digits-resnet8"]
    assert any("The paper prints no figures" in text for text in found["table1-digits-resnet8"])


def test_a_partial_sweep_names_the_seeds_that_are_not_drawn():
    partial = run(seed=1, status="interrupted", epochs=epochs(1.0), epochs_planned=3)
    text = said(Results((run(tree={"seeds": [0, 1, 2]}), partial)), "accuracy-cifar10-resnet18")
    assert "(n = 1)" in text and "seed 1 interrupted" in text and "seed 2 missing" in text


def test_live_tensors_are_not_called_vram():
    found = words(Results((run(meter="tensors"),)))
    assert any("not VRAM" in text for text in found["accuracy-cifar10-resnet18"])
    assert any("not VRAM" in text for text in found["table1-cifar10-resnet18"])
    assert "No scores: they need VRAM." in " ".join(found["table1-cifar10-resnet18"])
    assert not any("Peak VRAM" in text for texts in found.values() for text in texts)


def test_charts_write_measured_and_printed_figures():
    results = Results((run(accuracy=80.0, gb=0.2), run(method="amp"), run(method="tf32"), triaccel(gb=0.1)))
    found = words(results)
    assert {"80.00", "77.0", "21.0", "0.200", "0.35", "not printed"} <= set(found["table1-cifar10-resnet18"])
    assert {"baseline", "0.350", "12.3", "-75.0"} <= set(found["table2-cifar10-resnet18"])


def test_budget_and_both_plans_stand_in_the_pictures(written):
    folder, _ = written
    found = words(read_results([folder]))
    assert any("0.35 GB (FP32 Baseline, Tri-Accel)" in text for text in found["memory-cifar10-resnet18"])
    assert {"asked for", "executed", "FP16", "BF16", "FP32", "promoted for its curvature"} <= set(
        found["precision-cifar10-resnet18-triaccel"]
    )
    assert any("One run of Tri-Accel: seed 0 of n = 2" in text for text in found["precision-cifar10-resnet18-triaccel"])
    assert any("λ not read yet" in text for text in found["curvature-cifar10-resnet18-triaccel"])


def test_names_of_users_are_text_and_never_markup():
    odd = run(dataset="cifar10", method="$\\frac{x_1$ <b>&", tree={"dataset": {"path": "/x/$y_{"}})
    files = figures(Results((odd,)))
    assert all(ElementTree.fromstring(content).tag for name, content in files.items() if name.endswith("svg"))


def test_cells_of_one_name_get_files_of_their_own():
    results = Results((triaccel(), run("cifar10", "resnet18", "triaccel", cell="other", tree={"epochs": 7})))
    stems = list(words(results))
    assert "precision-cifar10-resnet18-triaccel-2" in stems and len(stems) == len(set(stems))


def test_command_without_matplotlib_says_in_one_sentence_how_to_get_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    folder = write(tmp_path / "runs", run())
    assert tables_cli.main(["figures", "--results", str(folder), "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr()
    assert "pip install 'triaccel-bench[figures]'" in told.err and told.err.count("\n") == 1 and not told.out
    assert not (tmp_path / "out").exists()


def test_command_without_finished_runs_draws_what_is_missing_and_fails(tmp_path, capsys):
    folder = write(tmp_path / "runs", run(status="failed", epochs=[]))
    assert tables_cli.main(["figures", "--results", str(folder), "--out", str(tmp_path / "out")]) == 1
    assert (tmp_path / "out/accuracy-cifar10-resnet18.png").is_file()
    assert "No finished run" in capsys.readouterr().err


def test_command_without_records_draws_nothing(tmp_path, capsys):
    (tmp_path / "runs").mkdir()
    assert tables_cli.main(["figures", "--results", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 2
    assert "No run records" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tables_cli, "figures", lambda results: {"a.png": b"drawn"})
    folder = write(tmp_path / "runs", run())
    (tmp_path / "out").write_text("a file")
    assert tables_cli.main(["figures", "--results", str(folder), "--out", str(tmp_path / "out")]) == 2
    assert "expected a folder that can be written" in capsys.readouterr().err
