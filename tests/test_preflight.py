"""Preflight: every check on stand-ins for cards, disks and data, and what a sweep and the command make of them."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch

from triaccel_bench import cli, hardware, inspection, models, pace, preflight, runner, worker
from triaccel_bench.child import Ended
from triaccel_bench.configuration import compose
from triaccel_bench.identity import identity
from triaccel_bench.inspection import look
from triaccel_bench.meters import TensorMeter
from triaccel_bench.preflight import Check, Report
from triaccel_bench.progress import Reporter

GB = 10**9
CIFAR = ["dataset.root=nowhere", "results.root=runs", "device=cuda"]


@dataclass(frozen=True)
class Card:
    name: str
    major: int
    minor: int
    total_memory: int
    uuid: str = "aaaa"


T4, P100 = Card("Tesla T4", 7, 5, 16 * GB), Card("Tesla P100-PCIE-16GB", 6, 0, 16 * GB)
A100, H200 = Card("NVIDIA A100-SXM4-40GB", 8, 0, 42 * GB), Card("NVIDIA H200", 9, 0, 150 * GB)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    if not torch.cuda.is_available():
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # CUDA, once it runs, goes by what it found there
    return tmp_path


@pytest.fixture
def machine(monkeypatch):
    """A machine with these cards, all of their memory free unless told, and an NVML."""

    def install(*cards: Card, archs=("sm_60", "sm_75", "sm_80", "sm_90"), free=None, nvml=True, self_test=None):
        monkeypatch.setattr(hardware, "cuda_device_count", lambda: len(cards))
        monkeypatch.setattr(hardware, "cuda_properties", lambda index: cards[index])
        monkeypatch.setattr(hardware, "cuda_arch_list", lambda: list(archs))
        monkeypatch.setattr(hardware, "cuda_free_bytes", lambda i: cards[i].total_memory if free is None else free)
        monkeypatch.setattr(hardware, "triton_self_test", lambda device: self_test)
        opened = ("handle", None, "570.00") if nvml else (None, "NVML Shared Library Not Found", None)
        monkeypatch.setattr(hardware, "open_nvml", lambda properties: opened)
        monkeypatch.setattr(hardware, "driver_cuda", lambda: ((13, 0), None))

    return install


@cache
def cell(*overrides: str):
    return compose([*CIFAR, *overrides])


def found(report: Report, name: str) -> Check:
    (check,) = [check for check in report.checks if check.name == name]
    return check


def verdicts(report: Report) -> dict[str, str]:
    return {check.name: check.verdict for check in report.checks}


def finish(sent: list) -> list[Check]:
    return sent[-1][1]


class Pipe(list):
    def send(self, message):
        self.append(message)


@pytest.mark.parametrize(
    ("card", "warned"),
    [(T4, {"BF16"}), (P100, {"BF16", "FP16"}), (A100, set()), (H200, set())],
    ids=["t4", "p100", "a100", "h200"],
)
def test_what_a_card_cannot_do_is_a_warning(machine, card, warned):
    machine(card)
    report = look([cell()], thorough=False)
    checks = verdicts(report)
    assert {
        name for name in ("device", "build", "BF16", "FP16", "kernels", "NVML", "memory") if checks[name] != "ok"
    } == warned
    assert not report.obstacles() and report.devices == {("cuda", "auto"): card.name}
    if card is P100:
        assert "Triton needs sm_70" in found(report, "kernels").finding
        assert "preflight=only" in found(report, "FP16").remedy
        assert not any("BF16" in line for line in report.worth_a_line()), "each run says that itself"


def test_dtypes_that_no_cell_asks_for_are_no_concern(machine):
    machine(P100)
    assert not {"BF16", "FP16"} & verdicts(look([cell("method=fp32")], thorough=False)).keys()
    emulated = look([cell("method.precision.bf16_substitute=emulate")], thorough=False)
    assert "emulates it" in found(emulated, "BF16").finding


@pytest.mark.parametrize(
    ("capability", "remedy"),
    [
        ((6, 0), "CUDA 12.6, which still covers sm_60 (https://download.pytorch.org/whl/cu126)"),
        ((7, 0), "CUDA 12.6, which still covers sm_70"),
        ((8, 9), "CUDA 12.6 or later"),
        ((10, 3), "CUDA 12.8 or later"),
        ((11, 0), "CUDA 13.0 or later"),
        ((12, 0), "CUDA 12.8 or later"),
        ((3, 7), "no build of PyTorch 2.6 or later covers sm_37"),
    ],
)
def test_a_build_without_code_for_the_card_names_the_one_that_has(machine, capability, remedy):
    machine(Card("card", *capability, GB), archs=["sm_75"] if capability < (7, 5) else ["sm_60"])
    report = look([cell()], thorough=False)
    check = found(report, "device")
    assert check.verdict == "fails" and remedy in check.remedy and "device=cpu" in check.remedy
    assert "\n" not in check.sentence and report.obstacles() == {0: check.sentence} and not report.devices


@pytest.mark.parametrize(
    ("built", "driver", "words"),
    [
        (
            "13.0",
            (None, "NVML Shared Library Not Found"),
            ["no driver answers: NVML Shared", "nvidia-smi", "device=cpu"],
        ),
        ("13.0", ((12, 2), None), ["up to 12.2, this torch build is for 13.0", "update the driver", "whl/cu126"]),
        ("12.8", ((11, 8), None), ["up to 11.8", "whl/cu118"]),
        ("12.8", ((12, 2), None), ["check the driver with nvidia-smi"]),
        ("12.8", (None, None), ["check the driver with nvidia-smi"]),
        (None, (None, None), ["is built without CUDA", "install a build for CUDA"]),
    ],
)
def test_without_a_device_the_reason_is_named(machine, monkeypatch, built, driver, words):
    machine()
    monkeypatch.setattr(hardware, "driver_cuda", lambda: driver)
    monkeypatch.setattr(torch.version, "cuda", built)
    check = found(look([cell()], thorough=False), "device")
    assert check.verdict == "fails" and all(word in check.sentence for word in words), check.sentence


@pytest.mark.parametrize(("number", "said"), [(12020, (12, 2)), (13000, (13, 0))])
def test_the_driver_tells_its_newest_cuda(monkeypatch, number, said):
    fake = SimpleNamespace(
        nvmlInit=lambda: None, nvmlSystemGetCudaDriverVersion_v2=lambda: number, NVMLError=RuntimeError
    )
    monkeypatch.setitem(__import__("sys").modules, "pynvml", fake)
    assert hardware.driver_cuda() == (said, None)
    fake.nvmlInit = lambda: (_ for _ in ()).throw(RuntimeError("Driver Not Loaded"))
    assert hardware.driver_cuda() == (None, "Driver Not Loaded")


def test_no_nvml_and_a_failed_self_test_are_warnings(machine):
    machine(A100, nvml=False, self_test="Triton's self-test failed (no C compiler)")
    report = look([cell()], thorough=False)
    assert found(report, "NVML").verdict == found(report, "kernels").verdict == "warning"
    assert "no C compiler" in found(report, "kernels").finding and not report.obstacles()
    assert [line for line in report.worth_a_line() if "kernels" in line]


def test_cells_of_several_cards_each_get_their_own(machine):
    machine(T4)
    report = look([cell(), cell("device=cuda:3")], thorough=False)
    assert [c.verdict for c in report.checks if c.name == "device"] == ["ok", "fails"]
    assert list(report.obstacles()) == [1] and "use a number below 1" in report.obstacles()[1]


@pytest.mark.parametrize(
    ("free", "overrides", "verdict", "words"),
    [
        (16 * GB, [], "ok", "cifar10/resnet18/triaccel needs about"),
        (0.5 * GB, ["method=amp"], "ok", "500 MB of 16.0 GB are free on Tesla T4"),
        (0.335 * GB, ["method=amp"], "warning", "at B=96 and would run in smaller batches"),
        (0.35 * GB, [], "fails", "memory.budget=fp32 at B=96"),
        (0.1 * GB, ["method=amp"], "fails", "method.batch.min=32"),
    ],
)
def test_free_memory_is_held_against_what_shapes_need(machine, free, overrides, verdict, words):
    machine(T4, free=int(free))
    check = found(look([cell(*overrides)], thorough=False), "memory")
    assert check.verdict == verdict and words in check.finding, check


def test_the_estimate_is_near_what_an_h200_measured():
    """Peaks of FP32 at batch 96 without the data set, libraries' workspace and all, against the least that shapes need."""
    shapes = inspection._Shapes()
    for model, measured in (("resnet18", 0.219e9), ("efficientnet_b0", 0.247e9)):
        needed = inspection._step_bytes(cell("method=fp32", f"model={model}"), "fp32", shapes, 96)
        assert 0.75 * measured < needed < 1.05 * measured


@pytest.mark.parametrize("checkpointing", ["false", "true"])
def test_what_a_step_saves_is_known_without_making_it(checkpointing):
    settings = tiny.settings(f"model.checkpointing={checkpointing}")
    network = models.build(settings.model, 10)
    meter = TensorMeter(network.module)
    with meter.recording():
        network.module.train()(torch.rand(6, 3, 8, 8)).sum().backward()
    shapes = inspection._Shapes()
    shapes.network(settings.model, 3)
    assert shapes.saved(settings.model, 10, 6) == pytest.approx(meter.largest.saved, rel=0.01)
    shape = shapes.of(settings.model, 10)
    assert (shape.resident, shape.parameters) == (meter.largest.resident, meter.largest.gradients)


def test_data_to_be_fetched_is_announced_with_place_and_size(here, machine):
    check = found(look([cell("device=cpu", "dataset.mirrors=[https://mirror.example/]")], thorough=False), "data")
    assert check.verdict == "warning" and "dataset.path" in check.remedy
    for word in ("cifar-10-python.tar.gz (170 MB)", "https://mirror.example/", "into nowhere"):
        assert word in check.finding
    assert not (here / "nowhere").exists()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["dataset.download=false"], "cifar-10-batches-py: expected the folder of the data set"),
        (["dataset.path=none.npz"], "got no such file"),
        (["dataset=digits", "dataset.path=none.npz"], "remove dataset.path"),
    ],
)
def test_data_that_cannot_be_there_stops_its_cell_alone(overrides, words):
    report = look([cell("device=cpu"), cell("device=cpu", *overrides)], thorough=False)
    assert list(report.obstacles()) == [1] and words in report.obstacles()[1]


def test_a_package_that_is_missing_and_a_disk_that_is_full_stop_a_cell(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sklearn.datasets", None)
    monkeypatch.setattr(inspection.importlib.util, "find_spec", lambda name: None)
    assert "pip install scikit-learn" in found(look([cell("dataset=digits", "device=cpu")], False), "data").remedy
    monkeypatch.setattr(preflight, "free_bytes", lambda path: 300_000_000)
    assert "takes 356 MB" in found(look([cell("device=cpu")], thorough=False), "data").finding
    monkeypatch.setattr(preflight, "can_write", lambda path: False)
    assert "dataset.root" in found(look([cell("device=cpu")], thorough=False), "data").remedy


def test_a_thorough_look_reads_the_data(here):
    labels = np.arange(64) % 10
    np.savez("small.npz", x_train=np.zeros((64, 8, 8, 3), np.uint8), y_train=labels, x_test=np.zeros((32, 8, 8, 3), np.uint8), y_test=labels[:32])  # fmt: skip
    settings = tiny.settings("dataset=cifar10", "dataset.path=small.npz", "dataset.image_size=8")
    assert "64 + 32 images of 10 classes" in found(look([settings], thorough=True), "data").finding
    short = tiny.settings("dataset=cifar10", "dataset.path=small.npz", "dataset.image_size=8", "dataset.train_size=100")
    assert found(look([short], thorough=False), "data").verdict == "ok"
    assert "expected 100 train images" in look([short], thorough=True).obstacles()[0]


def test_cifar_cut_off_is_seen_by_a_thorough_look_alone(here):
    folder = here / "nowhere" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for name in [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch", "batches.meta"]:
        (folder / name).write_bytes(b"cut")
    assert found(look([cell("device=cpu")], thorough=False), "data").verdict == "ok"
    assert "expected md5" in found(look([cell("device=cpu")], thorough=True), "data").finding
    (folder / "test_batch").unlink()
    assert "test_batch: expected a file" in found(look([cell("device=cpu")], thorough=False), "data").finding


def test_weights_are_announced_or_tried(here, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(here))
    check = found(look([cell("device=cpu", "model.weights=imagenet")], thorough=True), "weights")
    assert check.verdict == "warning" and "45 MB will be fetched" in check.finding
    torch.save({"fc.bias": torch.zeros(3)}, "w.pt")
    settings = tiny.settings("model.weights=w.pt")
    assert found(look([settings], thorough=False), "weights").verdict == "ok"
    assert "w.pt: expected the tensors of ResNet8" in look([settings], thorough=True).obstacles()[0]


def test_weights_are_read_once_however_much_methods_run_again(here, monkeypatch):
    torch.save({"fc.bias": torch.zeros(3)}, "w.pt")
    read, load = [], torch.load
    monkeypatch.setattr(torch, "load", lambda *given, **named: read.append(given) or load(*given, **named))
    # In a sweep of a ResNet-18 the files of conf/pair make this difference.
    cells = [tiny.settings("model.weights=w.pt", f"model.checkpointing={again}") for again in ("false", "2")]
    report = look([*cells, tiny.settings()], thorough=True)
    (check,) = [check for check in report.checks if check.name == "weights"]
    assert check.cells == (0, 1) and len(read) == 1
    assert [*report.obstacles()] == [0, 1]


@pytest.mark.parametrize(
    ("overrides", "verdict", "words"),
    [
        ([], "ok", "cheap, jacobian reads all layers at once by 10 backward passes"),
        (["dataset=cifar100"], "ok", "dear, exact reads 21 layers in turn"),
        (["model=efficientnet_b0"], "ok", "dear, difference reads 82 layers in turn"),
        (["model=efficientnet_b0", "method.curvature.product=exact"], "warning", "very slow for grouped"),
        (["method.curvature.product=difference"], "warning", "kinks"),
        (["method.curvature.estimator=fisher"], "ok", "cheap, fisher reads all layers"),
    ],
)
def test_the_price_of_curvature(overrides, verdict, words):
    check = found(look([cell("device=cpu", *overrides)], thorough=True), "curvature")
    assert check.verdict == verdict and words in check.finding and check.finding.count("resnet18") <= 1
    assert verdict == "warning" or "within 10% of training time" in check.finding


def test_a_folder_that_cannot_be_written_stops_every_cell_there(here):
    (here / "runs").touch()
    report = look([cell("device=cpu"), cell("device=cpu", "results.root=other")], thorough=False)
    assert list(report.obstacles()) == [0] and report.obstacles()[0].endswith("name another by results.root")


@pytest.mark.parametrize(("free", "verdict"), [(5, "fails"), (50, "warning"), (500, "ok")])
def test_a_disk_has_room_for_records_and_checkpoints(monkeypatch, free, verdict):
    monkeypatch.setattr(preflight, "free_bytes", lambda path: free * 10**6)
    check = found(look([cell("dataset=synthetic", "device=cpu")], thorough=False), "disk")
    assert check.verdict == verdict and f"{free} MB are free" in check.finding


def test_the_disk_of_a_scratch_folder_is_looked_at_too(monkeypatch, tmp_path):
    free = {"scratch": 1000, "root": 10**12}
    monkeypatch.setattr(preflight, "free_bytes", lambda path: free[path.name])
    folders = [f"results.scratch={tmp_path / 'scratch'}", f"results.root={tmp_path / 'root'}"]
    report = look([cell("dataset=synthetic", "device=cpu", *folders)], thorough=True)
    assert [check.verdict for check in report.checks if check.name == "disk"] == ["fails", "ok"]
    assert "results.scratch" in next(check.remedy for check in report.checks if check.verdict == "fails")


def test_a_report_is_a_table_on_a_terminal_and_whole_lines_elsewhere():
    report = Report((Check("disk", "ok", "much room"), Check("data", "fails", "no file", "add it", (0, 2))))
    assert preflight.lines(report) == [
        "disk  ok       much room", "data  FAILS    no file; add it", "1 check failed, 0 warnings; nothing was run",
    ]  # fmt: skip
    shown = preflight.table(report)
    assert shown.rows[1] == ("data", "FAILS: no file", "add it") and shown.text_columns == 3
    assert report.obstacles() == {0: "no file; add it", 2: "no file; add it"}


def test_it_is_no_part_of_an_identity():
    assert identity(cell("preflight=off"), "card") == identity(cell("preflight=only"), "card")


def test_cells_that_can_run_do_and_the_others_are_named_first(here):
    said = []

    class Listening(Reporter):
        def line(self, text):
            said.append(text)

    good = tiny.settings("preflight=auto", "method=fp32", "epochs=1", "results.root=runs")
    bad = good.model_copy(update={"dataset": good.dataset.model_copy(update={"name": "cifar10", "download": False})})
    outcomes = runner.run_cells([good, bad], Listening())
    assert [outcome.status for outcome in outcomes] == ["done", "refused"]
    assert "cifar10/resnet8/fp32 cannot run: " in said[0] and "dataset.download=true" in said[0]


def test_a_finished_cell_is_reused_though_its_data_are_gone(here, monkeypatch):
    settings = tiny.settings("preflight=auto", "method=fp32", "epochs=1", "results.root=runs")
    runner.run_cells([settings], Reporter())
    report = Report((Check("data", "fails", "gone", "fetch it", (0,)),), {("cpu", "auto"): hardware.cpu_name()})
    monkeypatch.setattr(runner, "_checked", lambda *_: report)
    (outcome,) = runner.run_cells([settings], Reporter())
    assert outcome.reused
    (outcome,) = runner.run_cells([settings.model_copy(update={"seeds": (7,)})], Reporter())
    assert (outcome.status, outcome.reason) == ("refused", "gone; fetch it")


TINY = [*tiny.BASE[:2], *tiny.BASE[3:], "results.root=runs", "preflight=only"]


def test_only_runs_nothing_and_exits_by_what_it_found(here, capfd, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert cli.run([*TINY, "method=amp"]) == 0
    told = capfd.readouterr().out
    assert "ms a step of 16 images" in told and told.endswith("0 checks failed, 0 warnings; nothing was run\n")
    assert not list((here / "runs").iterdir())
    assert cli.run(["-m", *TINY, "device=cpu,cuda"]) == 2
    told = capfd.readouterr()
    assert "FAILS" in told.out and "ms a step of" in told.out and "Traceback" not in told.out + told.err


def test_a_probe_that_dies_is_a_failed_check(monkeypatch):
    report = Report((), {("cpu", "auto"): "cpu"})
    monkeypatch.setattr(runner, "_checked", lambda *_: report)
    monkeypatch.setattr(runner, "_child", lambda *arguments: Ended(None, -9))
    (check,) = runner.preflight([tiny.settings()]).checks
    assert check.verdict == "fails" and "SIGKILL" in check.finding and check.cells == (0,)


@pytest.mark.parametrize(
    ("error", "verdict", "words"),
    [
        (torch.OutOfMemoryError("CUDA out of memory.\nTried"), "warning", "B=16 does not fit (CUDA out of memory.), "),
        (KeyError("lost"), "fails", "a step fails (KeyError: 'lost')"),
        (worker.WeightsError("w.pt: other tensors; save them"), "fails", "w.pt: other tensors"),
    ],
)
def test_a_step_that_fails_is_told_in_a_sentence(monkeypatch, error, verdict, words):
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr(worker, "Trainer", fail)
    pipe = Pipe()
    worker.expect_time(pipe, [(3, tiny.settings())])
    (check,) = finish(pipe)
    assert check.verdict == verdict and check.finding.startswith(words) and check.remedy
    assert check.cells == ((3,) if verdict == "fails" else ())


def test_minutes_are_of_all_seeds_and_cells(monkeypatch):
    first = tiny.settings("seeds=[0,1]", "epochs=3", "method=fp32")
    other = tiny.settings("seeds=[0]", "epochs=5", "dataset.train_size=320")
    data = SimpleNamespace(train_count=64, eval_count=32)
    timed = pace.Pace(batch=16, step_seconds=3.0, evaluation_seconds=0.25)
    check = pace.expectation(timed, data, [first, other])
    # 4 steps and 32 images evaluated: 20 s an epoch; the other one has 20 steps: 68 s.
    assert "3000.00 ms a step of 16 images, 20 s an epoch, 1.0 min a run, 7.7 min for 3 runs" in check.finding
    assert "if the other cells take as long an image" in check.finding and "curvature" not in check.finding
    assert "up to 100% more for curvature" in pace.expectation(timed, data, [other]).finding


@pytest.mark.parametrize(("fp16", "verdict"), [(0.002, "ok"), (0.0029, "warning"), (0.006, "warning")])
def test_a_p100_is_told_whether_fp16_pays(monkeypatch, fp16, verdict):
    plans = []
    engine = SimpleNamespace(network=SimpleNamespace(layers={"a": 0, "b": 0}), set_plan=plans.append)
    monkeypatch.setattr(pace, "_step_seconds", lambda *arguments: fp16 if plans[-1] == ["fp16"] * 2 else 0.003)
    check = pace.does_fp16_pay(engine, None, None, 96, SimpleNamespace(name=P100.name))
    assert check.verdict == verdict and "3.00 ms in FP32" in check.finding
    assert plans == [["fp32"] * 2, ["fp16"] * 2]


@pytest.mark.parametrize(("capability", "asked"), [((6, 0), True), ((7, 5), False)])
def test_cards_without_matrix_units_are_timed_in_both(monkeypatch, capability, asked):
    card = replace(hardware.inspect("cpu", "auto"), capability=capability, fp16_units=capability >= (7, 0))
    monkeypatch.setattr(hardware, "inspect", lambda device, kernels: card)
    monkeypatch.setattr(pace, "STEPS", 2)
    pipe = Pipe()
    worker.expect_time(pipe, [(0, tiny.settings("method=fp32"))])
    assert [check.name for check in finish(pipe)] == ["time", *(["FP16 pays"] if asked else [])]
    json.dumps([check.sentence for check in finish(pipe)])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("method", ["fp32", "amp"])
def test_a_real_card_has_no_obstacle_and_tells_its_pace(method):
    chosen = cell("dataset=synthetic", "model=resnet18", f"method={method}", "seeds=[0]", "epochs=1")
    report = look([chosen], thorough=False)
    assert not report.obstacles() and found(report, "memory").verdict == "ok", report
    pipe = Pipe()
    worker.expect_time(pipe, [(0, chosen)])
    assert finish(pipe)[0].verdict == "ok", finish(pipe)
