"""One GPU a job: which cards are visible, who holds them, and what a child sees of its own. Cards are stand-ins."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import ModuleType

import pytest
from tiny import Listening, settings

from triaccel_bench import deadline, hardware, leases, runner, worker
from triaccel_bench.child import Ended, call, fork_server
from triaccel_bench.leases import Card, Devices, GivenUp, Lease, Unknown, candidates, lease_one, visible_cards
from triaccel_bench.preflight import Check, Report

A, B, OTHER = Card("GPU-aaaa-1", "NVIDIA A100"), Card("GPU-bbbb-2", "NVIDIA A100"), Card("GPU-cccc-3", "Tesla T4")
LEFT, RIGHT = Card("MIG-1111", "NVIDIA A100 MIG 3g.20gb"), Card("MIG-2222", "NVIDIA A100 MIG 3g.20gb")


def fake_nvml(cards: list[Card], slices: dict[str, list[Card | None]] | None = None, error: str | None = None):
    """An NVML of these cards, some divided into slices, with gaps where a slice could be and is not."""
    module, slices = ModuleType("pynvml"), slices or {}

    class NVMLError(Exception):
        pass

    def init() -> None:
        if error is not None:
            raise NVMLError(error)

    def mode(card: Card) -> tuple[int, int]:
        if card.name == "Tesla T4":
            raise NVMLError("Not Supported")
        return (int(card.uuid in slices), 0)

    def slice_of(card: Card, index: int) -> Card:
        if slices[card.uuid][index] is None:
            raise NVMLError("Not Found")
        return slices[card.uuid][index]

    module.NVMLError, module.nvmlInit = NVMLError, init
    module.nvmlDeviceGetCount = lambda: len(cards)
    module.nvmlDeviceGetHandleByIndex = lambda index: cards[index]
    module.nvmlDeviceGetUUID, module.nvmlDeviceGetName = (lambda card: card.uuid), (lambda card: card.name)
    module.nvmlDeviceGetMigMode, module.nvmlDeviceGetMigDeviceHandleByIndex = mode, slice_of
    module.nvmlDeviceGetMaxMigDeviceCount = lambda card: len(slices[card.uuid])
    return module


@pytest.fixture
def machine(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(leases, "FOLDER", tmp_path / "locks")
    monkeypatch.setattr(leases, "POLL_SECONDS", 0.01)

    def install(*cards: Card, **how) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(list(cards), **how))

    return install


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        (None, [A, B, OTHER]),
        ("1", [B]),
        ("1,0", [B, A]),
        ("GPU-bbbb-2", [B]),
        ("GPU-b", [B]),
        ("GPU-bbbb-2, 0", [B, A]),
        ("0,0", [A]),
        ("", []),
        ("-1", []),
        ("1,7,0", [B]),
        ("GPU-none,0", []),
    ],
)
def test_cards_are_counted_as_cuda_counts_them(machine, monkeypatch, named, expected):
    machine(A, B, OTHER)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert visible_cards() == expected


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        (None, [LEFT, RIGHT, B]),
        ("0", [LEFT]),
        ("GPU-aaaa", [LEFT]),
        ("MIG-2222", [RIGHT]),
        ("MIG-2222,MIG-1111,1", [RIGHT, LEFT, B]),
        ("MIG-none", []),
    ],
)
def test_of_a_divided_card_slices_are_leased(machine, monkeypatch, named, expected):
    machine(A, B, slices={A.uuid: [LEFT, None, RIGHT]})
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert visible_cards() == expected


def test_a_card_divided_into_nothing_is_no_card(machine):
    machine(A, B, slices={A.uuid: [None]})
    assert visible_cards() == [B]


def test_cuda_is_any_card_like_the_first_and_a_number_is_that_one():
    assert candidates("cuda", [A, OTHER, B]) == [A, B]
    assert candidates("cuda", []) == []
    assert candidates("cuda:1", [A, OTHER, B]) == [OTHER]
    assert candidates("cuda:3", [A, OTHER, B]) == []


def test_each_of_two_holders_has_a_card_of_its_own_and_the_third_none(machine):
    first, second = lease_one([A, B], shared=False), lease_one([A, B], shared=False)
    assert (first.card, second.card) == (A, B)
    assert lease_one([A, B], shared=False) is None
    first.close()
    assert lease_one([A, B], shared=False).card == A


def test_only_those_who_asked_for_it_share(machine):
    alone = lease_one([A], shared=False)
    assert lease_one([A], shared=True) is None, "a run that is timed alone stays alone"
    assert lease_one([A, B], shared=True).card == B
    alone.close()
    first, second = lease_one([A], shared=True), lease_one([A], shared=True)
    assert first.card == second.card == A
    assert lease_one([A], shared=False) is None
    first.close()
    assert lease_one([A], shared=False) is None
    second.close()
    assert lease_one([A], shared=False) is not None


def test_sharing_runs_take_a_free_card_first(machine):
    kept = [lease_one([A, B], shared=True) for _ in range(2)]
    assert [lease.card for lease in kept] == [A, B]


def hold(folder, pipe) -> None:
    leases.FOLDER = folder
    lease = lease_one([A], shared=False)
    pipe.send(lease.card.uuid)
    time.sleep(60)


def test_the_system_frees_a_card_when_its_holder_is_killed(machine):
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=hold, args=(leases.FOLDER, there))
    process.start()
    assert here.recv() == A.uuid
    assert lease_one([A], shared=False) is None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert lease_one([A], shared=False) is not None


def keep(lease: Lease, pipe) -> None:
    lease.enter()
    pipe.send(os.environ["CUDA_VISIBLE_DEVICES"])
    pipe.recv()


def test_a_child_holds_the_card_as_long_as_it_lives(machine):
    """A parent that dies frees nothing while its child still has memory on the card."""
    lease = lease_one([A], shared=False)
    here, there = multiprocessing.Pipe()
    process = fork_server().Process(target=keep, args=(lease, there))
    process.start()
    assert here.recv() == A.uuid
    lease.close()
    assert lease_one([A], shared=False) is None
    here.send("end")
    process.join()
    assert lease_one([A], shared=False) is not None


class Slow:
    """An argument that its child gets no sooner than there is a file, and others before."""

    def __init__(self, folder: Path, *before: object) -> None:
        self.folder, self.before = folder, before

    def __reduce__(self):
        return _auto, (self.folder, *self.before)


def _auto(folder: Path, *before: object) -> str:
    (folder / "here").touch()
    until = time.monotonic() + 30
    while not (folder / "go").exists() and time.monotonic() < until:
        time.sleep(0.01)
    return "auto"


def test_a_child_that_is_called_holds_the_card_until_it_has_ended(machine, tmp_path):
    lease, ended = lease_one([A], shared=False), []
    arguments = "cuda", Slow(tmp_path, lease), lease
    calling = threading.Thread(
        target=lambda: ended.append(call("inspect_device", arguments, lambda *_: None, timeout=60))
    )
    calling.start()
    until = time.monotonic() + 60
    while not (tmp_path / "here").exists() and time.monotonic() < until:
        time.sleep(0.01)
    lease.close()
    assert (tmp_path / "here").exists() and lease_one([A], shared=False) is None
    (tmp_path / "go").touch()
    calling.join()
    assert ended[0].verdict[0] == "refused", "it sees that card alone, and there is none of that name"
    assert lease_one([A], shared=False) is not None


def test_a_file_that_was_cleared_away_is_no_lock(machine, monkeypatch):
    path, lock, cleared = leases.FOLDER / A.uuid, fcntl.flock, []

    def clear_first(handle: int, how: int) -> None:
        if not cleared:
            cleared.append(path.unlink())
        lock(handle, how)

    monkeypatch.setattr(leases.fcntl, "flock", clear_first)
    lease = lease_one([A], shared=False)
    assert path.exists(), "who comes later must find the file that is locked"
    assert lease_one([A], shared=False) is None
    lease.close()


@pytest.mark.parametrize("fault", ["file", "link", "others may write"])
def test_a_folder_that_others_could_have_made_is_not_used(machine, tmp_path, fault):
    if fault == "file":
        leases.FOLDER.touch()
    elif fault == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        leases.FOLDER.symlink_to(tmp_path / "elsewhere")
    else:
        leases.FOLDER.mkdir()
        leases.FOLDER.chmod(0o777)
    with pytest.raises(Unknown, match="this user's alone"):
        lease_one([A], shared=False)


def test_a_command_holds_one_card_and_keeps_it_while_it_will_do(machine):
    machine(A, B, OTHER)
    with Devices(lambda text: pytest.fail(text)) as devices:
        assert devices.take("cpu", False) is None
        lease = devices.take("cuda:1", False)
        assert lease.card == B
        assert devices.take("cuda", False) is lease
        assert devices.take("cuda:2", False).card == OTHER
        assert lease_one([B], shared=False) is not None, "what is not needed any more is free"
        assert devices.take("cuda:9", False) is None and devices.fault is None
        shared = devices.take("cuda:2", True)
        assert shared.shared and lease_one([OTHER], shared=True) is not None
    assert lease_one([A], shared=False) is not None


@pytest.mark.parametrize(("device", "words"), [("cuda", "all 2 cards are"), ("cuda:1", "the card is")])
def test_who_finds_no_free_card_waits_and_says_so_once(machine, device, words):
    machine(A, B, OTHER)
    held = [lease_one([A], shared=False), lease_one([B], shared=False)]
    said = []

    def hear(text: str) -> None:
        said.append(text)
        threading.Timer(0.1, held[1].close).start()

    with Devices(hear) as devices:
        assert devices.take(device, False).card == B
    assert said == [f"device={device}: {words} in use by other runs; waiting for one to end"]


def test_nobody_waits_for_a_card_beyond_the_time(machine, tmp_path, children, monkeypatch):
    machine(A, B, OTHER)
    busy = lease_one([OTHER], shared=False)
    with (
        Devices(lambda text: None, lambda: True) as devices,
        pytest.raises(GivenUp, match="cuda:2: the card is in use"),
    ):
        devices.take("cuda:2", False)
    monkeypatch.setattr(deadline, "_began", time.monotonic())
    chosen = on_card("cuda:2", "seeds=[0,1]", "runner.max_minutes=0.01", root=tmp_path)
    outcomes = runner.run_cells([chosen], Listening())
    assert [(outcome.seed, outcome.status) for outcome in outcomes] == [(0, "left"), (1, "left")] and not children
    busy.close()


def test_without_nvml_there_are_no_leases_and_a_reason(machine, monkeypatch):
    machine(error="Driver Not Loaded")
    with Devices(lambda text: None) as devices:
        assert devices.take("cuda", False) is None and devices.fault == "NVML is off (Driver Not Loaded)"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with Devices(lambda text: None) as devices:
        assert devices.take("cuda", False) is None and "pynvml cannot be imported" in devices.fault


@pytest.fixture
def children(monkeypatch):
    """What children are asked for, and what they are lent; they answer as on any card."""
    asked = []

    def child(entry, arguments, *_):
        lease = next((part for part in arguments if isinstance(part, Lease)), None)
        asked.append((entry, lease.card.uuid if lease else None))
        if entry == "check_cells":
            check = Check("memory", "fails", "small", "use another", (0,)) if lease and lease.card == OTHER else None
            return Ended(("finished", Report((check,) if check else (), {("cuda", "auto"): "card"})), 0)
        return Ended(("device", "card") if entry == "inspect_device" else ("finished", ("done", None)), 0)

    monkeypatch.setattr(runner, "_child", child)
    return asked


def on_card(device: str, *overrides: str, root):
    return settings(f"device={device}", "memory.meter=vram", f"results.root={root}", "preflight=auto", *overrides)


def test_every_child_gets_the_card_that_its_parent_has_leased(machine, tmp_path, children):
    machine(A, B, OTHER)
    busy = lease_one([A], shared=False)
    cells = [on_card("cuda", "seeds=[0,1]", root=tmp_path), on_card("cuda:2", "seeds=[2]", root=tmp_path)]
    outcomes = runner.run_cells(cells[:1], Listening())
    assert children == [("check_cells", B.uuid), ("run_seed", B.uuid), ("run_seed", B.uuid)]
    assert [outcome.status for outcome in outcomes] == ["done", "done"]
    children.clear()
    outcomes = runner.run_cells(cells, Listening())
    assert children[:2] == [("check_cells", B.uuid), ("check_cells", OTHER.uuid)]
    assert [outcome.status for outcome in outcomes] == ["done", "done", "refused"], "checks keep their cells"
    busy.close()


def test_without_preflight_the_device_is_looked_at_on_the_leased_card(machine, tmp_path, children):
    machine(A, B)
    runner.run_cells([on_card("cuda:1", "seeds=[0]", "preflight=off", root=tmp_path)], Listening())
    assert children == [("inspect_device", B.uuid), ("run_seed", B.uuid)]


def test_the_parent_says_in_one_line_that_nothing_is_leased(machine, tmp_path, children):
    machine(error="Driver Not Loaded")
    listening = Listening()
    runner.run_cells([on_card("cuda", "seeds=[0,1]", root=tmp_path)], listening)
    assert children == [("check_cells", None), ("run_seed", None), ("run_seed", None)]
    assert [text for text in listening.said if "NVML" in text] == [
        "NVML is off (Driver Not Loaded): nothing keeps other runs off the GPU meanwhile"
    ]


def test_a_run_on_a_leased_card_sees_that_card_alone(machine, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    looked = []

    def inspect(device, kernels):
        looked.append((device, os.environ["CUDA_VISIBLE_DEVICES"]))
        raise hardware.DeviceError("seen enough; go home")

    monkeypatch.setattr(hardware, "inspect", inspect)
    chosen, lease = on_card("cuda:1", root=tmp_path), lease_one([B], shared=False)

    class Pipe(list):
        send = list.append

    pipe = Pipe()
    worker.run_seed(pipe, chosen, 0, "cell", tmp_path, lease)
    worker.inspect_device(pipe, "cuda:1", "auto", lease)
    worker.check_cells(pipe, [chosen], False, lease)
    worker.expect_time(pipe, [(0, chosen)], lease)
    assert looked == [("cuda", B.uuid)] * 4
