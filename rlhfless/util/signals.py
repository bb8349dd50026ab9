"""Clean shutdown on Ctrl-C, SIGTERM (Kubernetes, Slurm, `docker stop`, a shell's `kill`) and SIGHUP (a closed
terminal). A signal that is ignored at the start, as `nohup` ignores SIGHUP, stays ignored.

A run shuts down cleanly on the first signal, within `timeouts.stop_s`. A second signal only shows how to force the
exit, because launchers often forward the same signal twice (`timeout`, a terminal with a wrapper in between). The third
signal, or the timeout, kills the run and every process it has started, so no process is left behind.

Python's defaults do not suit a run: asyncio answers a second Ctrl-C with an exception in the middle of the clean-up,
SIGTERM ends the interpreter without any clean-up, and Ray turns it into an abort.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn, TypeVar

import psutil

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

AT_ONCE = 3
"""Number of the signal, counted from 1, that aborts the clean shutdown."""

UNHEARD_S = 1.0
"""Delay after which a run whose event loop has not handled the first signal is considered busy with one long
computation, and that computation is interrupted."""

KILL_ROUNDS = 5
KILL_S = 2.0
"""A killed process is gone within milliseconds. A process that it was just starting is found in the next round."""

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_SHOW_CURSOR = "\x1b[?25h"

_ended_by = signal.SIGINT
"""The signal that ended a command other than `run`."""

_is_command = False
"""Whether this process runs only the command."""


def exit_code() -> int:
    """Return the exit code of an interrupted command: 128 + the number of the signal."""
    return 128 + _ended_by


def ignore() -> None:
    """Ignore signals after a command other than `run` has cleaned up, because a signal would only change its exit code.

    Does nothing in a process that has called the command as a function.
    """
    for number in SIGNALS if _is_command else ():
        signal.signal(number, signal.SIG_IGN)


def terminate_as_ctrl_c() -> None:
    """Make SIGTERM and SIGHUP act like Ctrl-C, each with its own exit code: KeyboardInterrupt triggers all clean-up."""

    def received(number: int, frame: FrameType | None) -> None:
        global _ended_by
        _ended_by = signal.Signals(number)
        ctrl_c = signal.getsignal(signal.SIGINT)
        if callable(ctrl_c):
            ctrl_c(signal.SIGINT, frame)
        else:  # shells make background commands ignore SIGINT
            raise KeyboardInterrupt

    global _is_command
    _is_command = True
    for number in (signal.SIGTERM, signal.SIGHUP):
        if number is signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, received)


def hangups_blocked() -> None:
    """Block SIGHUP in this thread and in all processes that it starts.

    A closed terminal sends SIGHUP to each process of the run, but a clean shutdown needs these processes.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})


class Interrupted(Exception):
    """A signal stopped the run, and it has shut down cleanly."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number

    @property
    def exit_code(self) -> int:
        return 128 + self.number


class OrderlyStop:
    """Runs a coroutine, once, that the signals of this process cancel."""

    def __init__(self, grace_s: float, say: Callable[[str], None], at_once: Callable[[], None]) -> None:
        """`say` shows a line to the user; `at_once` removes files that no process can remove after all are killed."""
        self._grace_s = grace_s
        self._say = say
        self._at_once = at_once
        self._count = 0
        self._first: int | None = None
        self._heard = threading.Event()
        """Set when nothing is left to interrupt: the event loop has handled the first signal, or has ended."""
        self._task: asyncio.Task[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine like `asyncio.run`. Raises Interrupted if a signal stopped it, regardless of errors in the
        clean-up."""
        with self._handled():
            try:
                return asyncio.run(self._main(main))
            except BaseException as error:
                if self._first is None:
                    raise
                raise Interrupted(self._first) from error
            finally:
                self._heard.set()

    async def _main(self, main: Coroutine[Any, Any, T]) -> T:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        if self._first is not None:  # the signal came before the event loop existed
            main.close()
            raise asyncio.CancelledError
        return await main

    @contextmanager
    def _handled(self) -> Iterator[None]:
        """Handle the signals within the block. An ignored SIGINT stays ignored, as in a shell's background commands."""
        taken = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._received) for number in taken}
        try:
            yield
        finally:
            # If the end of the interpreter hangs, the next signal or the timer ends it.
            if self._first is None:
                for number, handler in before.items():
                    signal.signal(number, handler)

    def _received(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGHUP and self._count:
            return  # both shell and kernel send it; it is no request to hurry
        # While Ray starts, its own handler runs first and sets an alarm that would abort this process.
        signal.alarm(0)
        self._count += 1
        if self._count == 1:
            self._first = number
            _after(self._grace_s, self._end, f"the stop took longer than {self._grace_s:g} s")
            _after(UNHEARD_S, self._break_off, threading.get_ident())
            self._in_loop(self._stop)
        elif self._count < AT_ONCE:
            self._in_loop(lambda: self._say("already shutting down; one more signal kills all processes at once"))
        else:
            self._end("stopped at once")

    def _in_loop(self, act: Callable[[], None]) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has already ended
                self._loop.call_soon_threadsafe(act)

    def _stop(self) -> None:
        assert self._task is not None
        self._answer()
        self._task.cancel()

    def _answer(self) -> None:
        assert self._first is not None
        if not self._heard.is_set():
            self._heard.set()
            self._say(f"{signal.Signals(self._first).name}: shutting down, for at most {self._grace_s:g} s")

    def _break_off(self, thread: int) -> None:
        """Raise CancelledError in the current computation of the event loop's thread, so that its task ends as if
        cancelled."""
        if not self._heard.is_set():
            self._answer()
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(asyncio.CancelledError))

    def _end(self, why: str) -> NoReturn:
        # No print and no log: the interrupted thread may hold one of their locks.
        cursor = _SHOW_CURSOR if sys.stderr.isatty() else ""
        with suppress(OSError):
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"{cursor}{why}\n".encode())
        try:
            kill_offspring()
            self._at_once()
        finally:
            os._exit(128 + (self._first or signal.SIGINT))


def _after(wait_s: float, act: Callable[..., object], *given: object) -> None:
    clock = threading.Timer(wait_s, act, given)
    clock.daemon = True
    clock.start()


def kill_offspring() -> None:
    """Kill all descendants of this process, in any session."""
    # Make orphans children of this process, so that no process escapes when its parent dies.
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for _ in range(KILL_ROUNDS):
        children = psutil.Process().children(recursive=True)
        if not children:
            return
        for process in children:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(children, timeout=KILL_S)
