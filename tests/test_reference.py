"""Records of other people's boxes: what goes into a pack, what shows once it is packed, and what nobody has measured."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from measured import epoch, provenance, run

from triaccel_bench import reference, tables_cli
from triaccel_bench.boxes import NOT_MEASURED, boxes_table
from triaccel_bench.configuration import compose
from triaccel_bench.identity import RESULTS_VERSION, identity
from triaccel_bench.packs import MANIFEST
from triaccel_bench.records import RUN_FILE, TRACE_FILE, RunRecord, Trace, write_run
from triaccel_bench.reference import NoPack, pack
from triaccel_bench.results import read_results

CARD = "Tesla T4"
ROOT = Path(__file__).resolve().parent.parent


def sound(method: str = "fp32", seed: int = 0, device: str = CARD, **changes) -> RunRecord:
    """A record that a run of this version could have written."""
    chosen = compose([f"method={method}", "epochs=1", "seeds=[0,1]"])
    made = run(
        method=method, seed=seed, results_version=RESULTS_VERSION, cell=identity(chosen, device), steps=10,
        provenance=provenance(device), epochs=[epoch(1, evaluation_samples=10_000)], dataset_fingerprint="a" * 16,
    )  # fmt: skip
    return made.model_copy(update={"settings": chosen.model_dump(mode="json")} | changes)


def write(folder: Path, *runs: RunRecord) -> Path:
    for one in runs:
        write_run(folder / one.cell / f"seed-{one.seed}", one, Trace(layers=["a"]))
    return folder


@pytest.fixture
def packed(tmp_path) -> Path:
    pack([write(tmp_path / "runs", sound(), sound(seed=1), sound("amp"))], tmp_path / "reference" / "t4")
    return tmp_path / "reference" / "t4"


def test_a_pack_reads_as_the_records_it_was_made_of(tmp_path, packed):
    before, after = read_results([tmp_path / "runs"]), read_results([packed])
    assert not after.problems and len(after.runs) == 3
    assert sorted(map(repr, after.runs)) == sorted(map(repr, before.runs))
    alone = read_results([packed / "runs"])
    assert (alone.runs, alone.problems) == (after.runs, after.problems), "also where only its records are named"
    manifest = json.loads((packed / MANIFEST).read_text())
    assert (manifest["box"], manifest["device_name"], len(manifest["files"])) == ("t4", CARD, 6)


def _edit(path: Path) -> None:
    path.write_text(path.read_text().replace("77.0", "78.0"))


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-30])


def _add(path: Path) -> None:
    shutil.copytree(path.parent, path.parent.with_name("seed-7"))


def _edit_trace(path: Path) -> None:
    trace = path.with_name(TRACE_FILE)
    trace.write_bytes(trace.read_bytes() + b" ")


@pytest.mark.parametrize("damage, words, left", [
    (_edit, "changed since it was packed", 2),
    (_edit_trace, f"{TRACE_FILE}: changed since it was packed", 2),
    (_cut, "cut off", 2),
    (lambda path: path.unlink(), "lists it, and it is missing", 2),
    (lambda path: path.with_name(TRACE_FILE).unlink(), f"{TRACE_FILE}: {MANIFEST} lists it, and it is missing", 2),
    (_add, "foreign to this pack", 3),
])  # fmt: skip
def test_what_is_no_longer_as_it_was_packed_is_in_no_table(packed, damage, words, left):
    damage(sorted(packed.rglob(RUN_FILE))[0])
    found = read_results([packed])
    assert len(found.runs) == left and len(found.problems) == 1
    assert words in found.problems[0] and found.problems[0].endswith("as its owner handed it over")


@pytest.mark.parametrize("change, words", [
    ({"device_name": "Tesla P100"}, f"measured on {CARD} in a pack of Tesla P100"),
    ({"results_version": 2}, f"of results version {RESULTS_VERSION} in a pack of 2"),
])  # fmt: skip
def test_records_of_another_box_or_version_are_in_no_table_of_a_pack(packed, change, words):
    path = packed / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    found = read_results([packed])
    assert not found.runs and len(found.problems) == 3 and all(words in problem for problem in found.problems)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "another"}'])
def test_of_a_pack_without_a_manifest_that_can_be_read_nothing_is_used(packed, text):
    (packed / MANIFEST).write_text(text)
    found = read_results([packed])
    assert not found.runs and len(found.problems) == 1 and "none of its records is used" in found.problems[0]


@pytest.mark.parametrize("changes, words", [
    ({"results_version": RESULTS_VERSION - 1}, f"results version {RESULTS_VERSION}, got {RESULTS_VERSION - 1}"),
    ({"status": "failed", "reason": "lost"}, "got failed (lost)"),
    ({"provenance": None}, "no provenance"),
    ({"epochs": []}, "says done after 0 of 1 epochs"),
    ({"epochs_planned": 2, "epochs": [epoch(1), epoch(2)]}, "its settings"),
    ({"seed": 5}, "it holds 5"),
    ({"model": "efficientnet_b0"}, "it names"),
    ({"cell": "0" * 12}, "its settings and device make cell"),
    ({"provenance": provenance("Tesla V100")}, "its settings and device make cell"),
    ({"epochs": [epoch(2, evaluation_samples=10_000)]}, "epoch 2 stands in place 1"),
    ({"epochs": [epoch(1, evaluation_samples=10_000, train_seconds=0.0)]}, "took 0.0 s"),
    ({"epochs": [epoch(1, evaluation_samples=10_000, evaluation_accuracy_percent=77.12345)]}, "images right"),
    ({"steps": 11}, "its epochs have 10 steps, and it 11"),
    ({"settings": dict.fromkeys(("dataset", "model", "method", "memory"), {})}, "its settings are none of this version"),
])  # fmt: skip
def test_what_no_run_of_this_version_writes_is_left_out_in_one_sentence(tmp_path, changes, words):
    runs = write(tmp_path / "runs", sound("amp"))
    write_run(runs / "other" / "seed-0", sound(**changes), Trace(layers=["a"]))
    done = pack([runs], tmp_path / "t4")
    assert done.records == 1 and len(done.refused) == 1
    assert words in done.refused[0] and "\n" not in done.refused[0] and str(runs / "other") in done.refused[0]


@pytest.mark.parametrize("damage", [_cut, lambda path: path.with_name(TRACE_FILE).write_bytes(b"no gzip")])
def test_damaged_files_are_left_out(tmp_path, damage):
    runs = write(tmp_path / "runs", sound(), sound("amp"))
    damage(sorted(runs.rglob(RUN_FILE))[0])
    done = pack([runs], tmp_path / "t4")
    assert (done.records, len(done.refused)) == (1, 1) and "run that seed again" in done.refused[0]


@pytest.mark.parametrize("other, words", [
    (dict(device="Tesla P100"), "records of one device, got Tesla P100, Tesla T4"),
    (dict(method="amp", dataset_fingerprint="b" * 16), "one data set called cifar10"),
])  # fmt: skip
def test_what_does_not_belong_together_is_not_packed_together(tmp_path, other, words):
    runs = write(tmp_path / "runs", sound(), sound(**other))
    with pytest.raises(NoPack, match=words):
        pack([runs], tmp_path / "t4")
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_a_device_is_chosen_by_part_of_its_name(tmp_path):
    runs = write(tmp_path / "runs", sound(), sound(device="AMD EPYC"))
    assert pack([runs], tmp_path / "t4", "t4").records == 1
    assert {one.provenance.device_name for one in read_results([tmp_path / "t4"]).runs} == {CARD}


def test_a_pack_takes_no_other_folders_place_and_is_there_as_a_whole_or_not_at_all(tmp_path, packed, monkeypatch):
    with pytest.raises(NoPack, match="expected a new folder"):
        pack([tmp_path / "runs"], packed)

    def full(path, content):
        if path.name == MANIFEST:
            raise OSError("no space")
        return path.write_bytes(content)

    monkeypatch.setattr(reference, "write_atomically", full)
    with pytest.raises(OSError, match="no space"):
        pack([tmp_path / "runs"], tmp_path / "reference" / "p100")
    assert [path.name for path in (tmp_path / "reference").iterdir()] == ["t4"]


def test_the_command_packs_and_makes_the_boxs_tables(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runs = write(tmp_path / "results" / "runs", sound(), sound(seed=1))
    assert tables_cli.main(["pack", "--box", "t4-colab"]) == 0
    assert "Packed: 2 records" in capsys.readouterr().out
    assert (tmp_path / "results/reference/t4-colab/tables/table1.md").stat().st_size > 0
    assert tables_cli.main(["pack", "--box", "t4-colab"]) == 2
    write_run(runs / "late", sound("amp", status="failed", reason="lost"))
    assert tables_cli.main(["pack", "--box", "again"]) == 1
    assert tables_cli.main(["pack"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 3 and "expected a new folder" in said[0] and said[1].startswith("Left out: ")
    with pytest.raises(SystemExit):
        tables_cli.main(["pack", "--box", "../up"])
    monkeypatch.chdir(tmp_path / "results")
    assert tables_cli.main(["boxes", "--results", str(tmp_path)]) == 2
    assert "--results: expected none" in capsys.readouterr().err
    assert tables_cli.main(["boxes"]) == 2 and not Path("results").exists()
    assert "expected <box>/runs there, got none; run this in the project's folder" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    assert tables_cli.main(["boxes"]) == 0
    assert NOT_MEASURED in (tmp_path / "results/reference/boxes.md").read_text()


def test_what_nobody_has_measured_says_so(packed):
    table = boxes_table(read_results([packed]))
    rows = {row[:4]: row[4:] for row in table.rows}
    measured = rows[CARD, "CIFAR-10", "ResNet-18", "FP32 Baseline"]
    assert measured[:2] == ("77.00 ± 0.00", "21.000 ± 0.000") and NOT_MEASURED not in measured
    assert rows[CARD, "CIFAR-10", "ResNet-18", "Tri-Accel"][:4] == (NOT_MEASURED,) * 4
    assert {row[0] for row in table.rows} == {CARD, "P100"}, "the paper's other card is listed too"
    assert all(value[:4] == (NOT_MEASURED,) * 4 for key, value in rows.items() if key[0] == "P100")
    assert "2 of 24 rows are measured" in table.caption


def test_committed_packs_are_as_they_were_packed():
    assert not read_results(sorted((ROOT / "results" / "reference").glob("*/runs"))).problems
