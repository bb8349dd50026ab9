"""The service's threads come before those of runs; nothing that it starts does."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from rlhfless.control.thread_priority import raise_priority, service_threads


def test_a_thread_comes_first_and_what_it_starts_does_not() -> None:
    def look() -> tuple[bool, int, int, int]:
        allowed = raise_priority()
        inner: list[int] = []
        thread = threading.Thread(target=lambda: inner.append(os.sched_getscheduler(0)))
        thread.start()
        thread.join()
        shown = subprocess.run(
            [sys.executable, "-c", "import os; print(os.sched_getscheduler(0))"], capture_output=True, check=True
        )
        return allowed, os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK, inner[0], int(shown.stdout)

    with service_threads() as pool:
        allowed, own, thread, process = pool.submit(look).result(30)
    if not allowed:
        pytest.skip("this machine allows no real-time threads (CAP_SYS_NICE)")
    assert (own, thread, process) == (os.SCHED_RR, os.SCHED_OTHER, os.SCHED_OTHER)


def test_a_machine_that_does_not_allow_it_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    assert not raise_priority()
    monkeypatch.delattr(os, "SCHED_RR")
    assert not raise_priority()
