"""Whole runs on the machines that users bring: cards without code, kernels or NVML missing, another's card beside one's
own, jobs in any order, and steps that overflow."""

from __future__ import annotations

import os
import pkgutil
import subprocess
import sys
import warnings
from types import ModuleType, SimpleNamespace

import pytest
import torch
from test_hardware import A100, P100, T4, FakeCard, fake_pynvml, machine  # noqa: F401
from tiny import BASE, settings, trainer
from torch import nn

from triaccel_bench import cli, data, kernels, runner, worker
from triaccel_bench.child import Ended
from triaccel_bench.hardware import DeviceError, inspect
from triaccel_bench.meters import open_meter
from triaccel_bench.records import RUN_FILE, read_run
from triaccel_bench.schedule import Schedule
from triaccel_bench.stats import summarise


class Pipe(list):
    def send(self, message):
        self.append(message)


@pytest.fixture
def in_this_process(monkeypatch):
    """What the command asks of children runs here, where a test can pretend to be another machine."""

    def child(entry, arguments, *_):
        pipe = Pipe()
        getattr(worker, entry)(pipe, *arguments)
        return Ended(pipe[-1], 0)

    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setattr(runner, "_child", child)


@pytest.mark.parametrize("look", ["auto", "off", "only"])
@pytest.mark.parametrize("card, builds, needs", [
    (P100, ["sm_70", "sm_75"], "sm_60"), (FakeCard("Tesla K80", 3, 7), ["sm_50", "sm_60"], "sm_37"),
    (FakeCard("NVIDIA B200", 10, 0), ["sm_80", "sm_90"], "sm_100"),
])  # fmt: skip
def test_a_card_that_the_build_has_no_code_for_ends_the_command_before_data_are_read(
    tmp_path, monkeypatch, capfd, machine, in_this_process, card, builds, needs, look  # noqa: F811
):  # fmt: skip
    def read(*_):
        raise AssertionError("data were read")

    machine(card, arch_list=builds)
    monkeypatch.setattr(worker, "load", read)
    monkeypatch.setattr(data, "load", read)
    code = cli.run([*BASE, "device=cuda", f"preflight={look}", f"results.root={tmp_path}"])
    said = capfd.readouterr()
    told = said.out + said.err
    assert code == 2 and "Traceback" not in told
    for part in (card.name, needs, ", ".join(builds), "device=cpu"):
        assert part in told
    assert not list(tmp_path.rglob(RUN_FILE))


def test_a_cpu_is_used_only_when_it_is_asked_for(tmp_path, machine, in_this_process):  # noqa: F811
    machine(P100, arch_list=["sm_70"])
    assert cli.run([*BASE, "device=cpu", "epochs=1", "seeds=[0]", "method=fp32", f"results.root={tmp_path}"]) == 0
    assert [read_run(path).provenance.device for path in tmp_path.rglob(RUN_FILE)] == ["cpu"]


RUN_WITHOUT = """
import importlib, pathlib, pkgutil, sys
sys.path.insert(0, {tests!r})
for name in {blocked!r}:
    sys.modules[name] = None
from triaccel_bench import kernels, worker
for module in pkgutil.iter_modules(kernels.__path__):
    importlib.import_module("triaccel_bench.kernels." + module.name)
from tiny import settings
class Pipe:
    def send(self, message):
        print(message[1]["text"] if message[0] == "note" else message[0])
chosen = settings("memory.meter=vram", "epochs=1", "method=triaccel", "method.batch.initial=32")
worker.run_seed(Pipe(), chosen, 0, "cell", pathlib.Path(sys.argv[1]))
"""


@pytest.mark.parametrize("blocked", [[], ["triton", "pynvml"]], ids=["no driver", "neither Triton nor NVML's binding"])
def test_two_steps_of_tri_accel_without_kernels_or_nvml(tmp_path, blocked):
    code = RUN_WITHOUT.format(tests=os.path.dirname(__file__), blocked=blocked)
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = read_run(tmp_path / RUN_FILE)
    assert (run.status, run.steps) == ("done", 2), run.reason
    assert run.provenance.kernels == "torch" and "no CUDA device" in run.provenance.kernels_reason
    assert done.stdout.count("VRAM monitor off: no CUDA device") == 1
    assert [text for text in run.warnings if "VRAM" in text] == ["VRAM monitor off: no CUDA device"]
    (epoch,) = run.epochs
    unknown = epoch.memory_peak_bytes, epoch.reserved_bytes, epoch.process_bytes, epoch.device_used_bytes
    assert unknown == (None,) * 4 and (epoch.batch_min, epoch.batch_max) == (32, 32)
    assert (summarise(run).score, summarise(run).score_percent) == (None, None)


def test_every_module_of_kernels_is_tried():
    assert {"norm", "update", "moments", "loss"} <= {module.name for module in pkgutil.iter_modules(kernels.__path__)}


@pytest.mark.parametrize("visible", ["1", "1,0", "GPU-bbbb", "GPU-bbbb,GPU-aaaa"])
def test_the_record_and_the_meter_are_of_the_card_that_cuda_uses(monkeypatch, machine, visible):  # noqa: F811
    own, others = 2**30, 15 * 2**30
    machine(FakeCard("A", 8, 0, uuid="aaaa"), FakeCard("B", 8, 0, uuid="bbbb"))
    pynvml: ModuleType = fake_pynvml({"GPU-aaaa": "card A", "GPU-bbbb": "card B"})
    used = {"card A": others, "card B": own}
    pynvml.nvmlDeviceGetMemoryInfo = lambda handle, version=None: SimpleNamespace(used=used[handle])
    pynvml.nvmlMemory_v2 = 2
    pynvml.nvmlDeviceGetComputeRunningProcesses = lambda handle: []
    monkeypatch.setitem(sys.modules, "pynvml", pynvml)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: 0)
    found = inspect("cuda", "auto")
    told = worker.provenance(found)
    assert (told.device_name, told.device_uuid) == ("B", "GPU-bbbb")
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device=None: None)
    assert open_meter("vram", found, 0, nn.Identity()).readings().device_used_bytes == own


def test_a_machine_whose_cards_are_hidden_has_none(monkeypatch, machine):  # noqa: F811
    machine(T4, A100)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(DeviceError, match="device=cpu"):
        inspect("cuda", "auto")


def peaks(root, *sizes: int) -> dict[int, list[int]]:
    choices = ",".join(map(str, sizes))
    many = ["-m"] if len(sizes) > 1 else []
    changes = ["epochs=1", "seeds=[0]", "method=triaccel", f"method.batch.initial={choices}", f"results.root={root}"]
    assert cli.run([*many, *BASE, *changes]) == 0
    runs = [read_run(path) for path in root.rglob(RUN_FILE)]
    return {run.settings["method"]["batch"]["initial"]: [e.memory_peak_bytes for e in run.epochs] for run in runs}


def test_peaks_do_not_depend_on_the_order_of_a_sweep(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    falling, rising = peaks(tmp_path / "falling", 32, 8), peaks(tmp_path / "rising", 8, 32)
    alone = peaks(tmp_path / "alone", 8)
    assert falling == rising and falling[8] == alone[8] and falling[8] < falling[32]


@pytest.mark.parametrize("method", ["amp", "triaccel"])
def test_updates_that_overflow_do_not_move_the_rate_and_are_counted(method):
    changes = ["method.loss_scale.initial=1.0e12", "method.loss_scale.backoff_factor=1.0e-4", "method.dtype=fp16"]
    chosen = settings(
        f"method={method}",
        "method.precision.cpu_executes=requested",
        "method.batch.elastic=false",
        "epochs=2",
        *changes,
    )
    made, run = trainer(chosen)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.*")
        made.train()
    assert run.steps == 8 and run.steps_skipped == 2 == sum(epoch.steps_skipped for epoch in run.epochs)
    assert run.samples_applied == (8 - 2) * 16
    schedule = Schedule(chosen.optimizer.lr, min(chosen.optimizer.warmup_epochs, 2 // 4) * 64, 2 * 64)
    middle = torch.tensor(run.samples_applied - 8, dtype=torch.float64)
    assert run.epochs[-1].learning_rate_last == pytest.approx(schedule(middle).item(), rel=1e-4)
