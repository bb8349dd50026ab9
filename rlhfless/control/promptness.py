"""The service's threads come before those of runs, where the machine lets them.

A run keeps all cores busy with more threads than there are cores. Linux lets a thread that wakes wait for its turn
behind them, tens of milliseconds on two cores, whatever its niceness; an answer takes a tenth of one. A real-time
thread waits for none of them, and takes no more of the cores than it would otherwise. All threads that hold Python's
lock must be such threads: one that has it, and waits for a core, stops the others.
"""

from __future__ import annotations

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor

PRIORITY = 1
"""The lowest of the real-time ones: other services of the machine that ask for such a priority come first."""

WORKERS = 8
"""Threads for what would hold up the loop: processes, files, curves of long runs."""


def come_first() -> bool:
    """Let this thread come before all that are not real-time threads; returns whether the machine allows it (root,
    CAP_SYS_NICE or RLIMIT_RTPRIO). What this thread starts, processes and threads, has the usual priority."""
    if not hasattr(os, "SCHED_RR"):
        return False
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(PRIORITY))
        return True
    return False


def workers() -> ThreadPoolExecutor:
    """For `asyncio.to_thread`."""
    return ThreadPoolExecutor(WORKERS, "service", initializer=come_first)
