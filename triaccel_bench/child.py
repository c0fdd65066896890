"""A call in a process of its own: what it says, how it ends, and its end where it says nothing any more.

Children come from a fork server that imports torch once and never touches CUDA, so that one starts in milliseconds
and with a clean device. Imports no torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import Any

from triaccel_bench import life
from triaccel_bench.deadline import Deadline
from triaccel_bench.outcomes import LAST_WORDS

SECONDS_TO_END = 20.0
"""What a child that was asked to end gets to do so: it needs 10 s at most, and Slurm kills after 30 s."""

_SLICE = 1.0
_SECONDS_TO_DUMP = 2.0
_SECONDS_TO_DIE = 10.0


@dataclass(frozen=True)
class Ended:
    """How a call has ended.

    Attributes:
        verdict: its last message, ``("device" | "refused" | "finished", payload)``; ``None``: it ended without one.
        words: lines that it left as it crashed, or the stack of its threads as it hung.
        silence: seconds without a sign of life for which it was ended; ``None``: not for that.
        out_of_time: it was asked to stop because the deadline is near.
    """

    verdict: tuple[str, Any] | None
    exit_code: int | None = None
    words: tuple[str, ...] = ()
    silence: float | None = None
    out_of_time: bool = False

    @property
    def how(self) -> str:
        """For a call without a verdict."""
        if self.silence is not None:
            where = "" if self.words else ", and it did not even tell where"
            return (
                f"it hung: no step, evaluation batch or other sign of life for {self.silence:.0f} s{where}; "
                "if it was only slow, raise runner.timeout"
            )
        if self.exit_code is None:
            return "it did not start: the server that forks children was killed"
        if self.out_of_time and self.exit_code == -signal.SIGKILL:
            return "it did not stop in time and was killed"
        if self.exit_code == -signal.SIGKILL:
            return "signal SIGKILL, as when the machine's memory runs out: lower method.batch.max or evaluation.batch"
        if self.exit_code < 0:
            return f"signal {signal.Signals(-self.exit_code).name}"
        return f"exit code {self.exit_code}"


def call(
    entry: str,
    arguments: tuple,
    receive: Callable[[str, Any], None],
    timeout: float | None = None,
    deadline: Deadline | None = None,
) -> Ended:
    """Call ``worker.<entry>`` in a child and pass on its messages.

    Args:
        timeout: seconds without any message after which it counts as hung: it is asked where it is, to end, and killed.
        deadline: it is asked to stop in time for it, as by any interruption.
    """
    # Threads that spin while they wait cost a busy two-core machine a factor of ten; the setting is read at start-up.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    context = fork_server()
    here, there = context.Pipe(duplex=False)
    words_here, words_there = context.Pipe(duplex=False)
    child = context.Process(target=_enter, args=(entry, there, words_there, arguments), daemon=True)
    # Ctrl-C reaches the whole process group, and so may Slurm's signals (submitit's is SIGUSR2); the parent decides and
    # ends the child. The fork server, started here, is deaf to them, as nobody else can tell whether its children live,
    # and hands its mask down to them; a child listens when it can stop in good order. The resource tracker comes before
    # the two signals that its start unblocks.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGUSR2})
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        child.start()
    except (EOFError, OSError):
        # The fork server was killed; the next child starts a new one.
        here.close()
        words_here.close()
        return Ended(None)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        there.close()
        words_there.close()
    return _Watch(child, here, words_here, receive, timeout, deadline).until_its_end()


def fork_server() -> BaseContext:
    """What makes children; whoever asks it first settles what it has imported for all others."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["triaccel_bench.worker"])
    return context


class _Watch:
    """Listens to one child until it has ended, and sees to it that it does."""

    def __init__(
        self,
        child: multiprocessing.Process,
        messages: Connection,
        words: Connection,
        receive: Callable[[str, Any], None],
        timeout: float | None,
        deadline: Deadline | None,
    ) -> None:
        self._child, self._messages, self._receive = child, messages, receive
        self._timeout, self._deadline = timeout, deadline or Deadline(None)
        self._words: Connection | None = words
        self._said = bytearray()
        self._silence = 0.0
        self._longest = [0.0, 0.0]
        """Silences in the epoch before the one under way, and in that."""
        self._asked_at: float | None = None
        self._hung = False
        self._verdict: tuple[str, Any] | None = None

    def until_its_end(self) -> Ended:
        try:
            while self._listen():
                if self._timeout is not None and self._silence >= self._timeout:
                    self._hung = True
                    self._ask_where_it_is()
                    break
                self._mind_the_time()
            else:
                self._child.join(timeout=5)
        finally:
            if self._verdict is None and self._child.is_alive():
                self._end()
            # One that has told all may still hang on its way out, and one within a driver does not even die at once.
            self._child.join(_SECONDS_TO_DIE)
            if self._child.is_alive():
                self._child.kill()
                self._child.join(_SECONDS_TO_DIE)
            self._hear_words(0.0)
            self._messages.close()
            if self._words is not None:
                self._words.close()
        lines = self._said.decode(errors="replace").splitlines()[-LAST_WORDS:]
        silence = self._silence if self._hung else None
        return Ended(self._verdict, self._child.exitcode, tuple(lines), silence, self._asked_at is not None)

    def _listen(self) -> bool:
        """Take what is there to be taken, or wait for it a while; whether there may be more."""
        begun = time.monotonic()
        heard = self._hear_words(_SLICE)
        # Ctrl-Z stops this process too, and for as long the child has not been silent.
        self._silence += min(time.monotonic() - begun, 2 * _SLICE)
        if not heard:
            return True
        try:
            kind, payload = self._messages.recv()
        except EOFError:
            return False
        self._longest[1] = max(self._longest[1], self._silence)
        self._silence = 0.0
        if kind in ("device", "refused", "finished"):
            self._verdict = kind, payload
        elif kind != "alive":
            if kind == "epoch":
                self._longest = [self._longest[1], 0.0]
            self._receive(kind, payload)
        return True

    def _hear_words(self, wait: float) -> bool:
        """Take what comes out of a crash, so that it never blocks the one that crashes; whether a message is there."""
        while True:
            ready = connection.wait([self._messages, *([self._words] if self._words is not None else [])], wait)
            if self._words not in ready:
                return self._messages in ready
            taken = os.read(self._words.fileno(), 1 << 16)
            self._said += taken
            if not taken:
                self._words.close()
                self._words = None

    def _ask_where_it_is(self) -> None:
        """Its threads' stacks, which a handler in C tells even where Python runs no handlers any more."""
        self._said.clear()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._child.pid, signal.SIGQUIT)
        until = time.monotonic() + _SECONDS_TO_DUMP
        while self._words is not None and connection.wait([self._words], 0.2 if self._said else _SECONDS_TO_DUMP):
            taken = os.read(self._words.fileno(), 1 << 16)
            self._said += taken
            if not taken or time.monotonic() > until:
                break

    def _mind_the_time(self) -> None:
        if self._verdict is not None:
            return
        if self._asked_at is None:
            if self._deadline.near(max(*self._longest, self._silence)):
                self._asked_at = time.monotonic()
                self._child.terminate()
        elif time.monotonic() - self._asked_at > SECONDS_TO_END and self._deadline.left <= 0:
            self._child.kill()

    def _end(self) -> None:
        """Ask the child to end, which then writes a checkpoint, and kill it if that takes too long.

        Whoever interrupts may do so again, as ``timeout`` and Slurm do: that does not cut the wait short.
        """
        asked_again = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
        here = threading.current_thread() is threading.main_thread()
        # A call that does nothing, because Python complains of signals that come before they are ignored.
        handlers = {number: signal.signal(number, lambda *_: None) for number in asked_again} if here else {}
        try:
            self._child.terminate()
            until = time.monotonic() + SECONDS_TO_END
            with contextlib.suppress(EOFError, OSError):
                while (left := until - time.monotonic()) > 0 and self._messages.poll(left):
                    # Taken from it, or a child with much to say would wait for ever.
                    self._messages.recv()
            self._child.join(timeout=max(1.0, until - time.monotonic()))
            if self._child.is_alive():
                self._child.kill()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


def _enter(entry: str, pipe: Connection, words: Connection, arguments: tuple) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Into a pipe and no file: it works with a full disk, and one process writes the record.
    faulthandler.enable(words.fileno())
    faulthandler.register(signal.SIGQUIT, words.fileno())
    try:
        from triaccel_bench import worker

        if entry != "run_seed":
            # It has nothing to keep.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        with life.watched(lambda: pipe.send(("alive", None))):
            getattr(worker, entry)(pipe, *arguments)
    except BaseException:
        os.write(words.fileno(), traceback.format_exc().encode())
        raise


def _end_with_parent() -> None:
    """A parent killed outright cannot end its child; without this the child would train on, unseen, on the device."""
    multiprocessing.parent_process().join()
    os._exit(1)
