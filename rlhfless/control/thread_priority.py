"""Real-time priority for the service's threads, where the machine allows it.

A run keeps all cores busy with more threads than cores. Any woken thread then waits tens of milliseconds on two cores,
whatever its niceness, while an answer takes a tenth of a millisecond. A real-time thread does not wait, and uses no
more CPU time. All threads that take Python's global lock must be real-time threads: a thread that holds the lock while
it waits for a core stops the others.
"""

from __future__ import annotations

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor

PRIORITY = 1
"""The lowest real-time priority, so that other real-time services of the machine come first."""

WORKERS = 8
"""Number of threads for work that would block the event loop: processes, files, curves of long runs."""


def raise_priority() -> bool:
    """Make this thread a real-time thread, and return whether the machine allows it (root, CAP_SYS_NICE or
    RLIMIT_RTPRIO). Its children have the default priority."""
    if not hasattr(os, "SCHED_RR"):
        return False
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(PRIORITY))
        return True
    return False


def service_threads() -> ThreadPoolExecutor:
    """Return the executor of `asyncio.to_thread`."""
    return ThreadPoolExecutor(WORKERS, "service", initializer=raise_priority)
