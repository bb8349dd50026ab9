"""Priority and memory of the service's threads and child processes.

A run keeps all cores busy with more threads than cores. Any woken thread then waits tens of milliseconds on two cores,
whatever its niceness, while an answer takes a tenth of a millisecond. A real-time thread does not wait, and uses no
more CPU time. All threads that take Python's global lock must be real-time threads: a thread that holds the lock while
it waits for a core stops the others.

A child process that needs too much memory fails alone, and reports why; without a limit the kernel could kill any
process of the machine. The limit is RLIMIT_DATA: a process's private memory, without shared memory, mapped files and
merely reserved address space.
"""

from __future__ import annotations

import contextlib
import os
import resource
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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


# -- memory


SHARE = 4
"""A process may use 1/SHARE of the memory of the machine or container, because two jobs and several drivers run
alongside the service, and on a single machine also replicas."""

RESERVE = 16
"""1/RESERVE of a driver's limit is reserved for its out-of-memory report."""

DRIVER_LEAST_BYTES = 4 << 30
"""Minimum limit of a driver. Ray's threads reserve 1.5 GiB of it on two cores, and use little of that."""

CONTAINER = Path("/sys/fs/cgroup/memory.max")

SIGNS = (b"MemoryError", b"std::bad_alloc", b"memory allocation of ", b"out of memory")
"""Out-of-memory messages of Python, C++, Rust and LLVM. The last three abort after theirs."""

TAIL_BYTES = 16 << 10


def memory_bytes(machine: int, container: str, least: int) -> int:
    """Return the memory limit of a process in bytes, at least `least`.

    `container`: the text of CONTAINER; `max` or empty without a limit.
    """
    present = min(machine, int(container)) if container.strip().isdecimal() else machine
    return max(present // SHARE, least)


def _share_bytes(least: int) -> int:
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return memory_bytes(machine, CONTAINER.read_text() if CONTAINER.exists() else "", least)


def limit_memory(least: int) -> int:
    """Limit this process to its share of the memory, and return the limit in bytes."""
    limit = _share_bytes(least)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    return limit


def limit_driver(limit_gib: float | None) -> None:
    """Limit this driver process to `limit_gib`, or to its share of the memory, in addition to its imports.

    The threads of libraries reserve far more memory per core than they use.
    """
    limit = _share_bytes(DRIVER_LEAST_BYTES) if limit_gib is None else int(limit_gib * 2**30)
    status = Path("/proc/self/status").read_text("utf-8")
    limit += int(status.partition("VmData:")[2].split(maxsplit=1)[0]) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (limit - limit // RESERVE, limit))


def use_reserve(error: MemoryError) -> None:
    """Free the memory held by the error's traceback, and raise the limit by the reserve."""
    traceback.clear_frames(error.__traceback__)
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def says_out_of_memory(log: Path, start: int) -> bool:
    """Return whether the end of a process's log reports lack of memory. `start`: size of the log when the process
    started."""
    try:
        with log.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(start, size - TAIL_BYTES))
            tail = stream.read()
    except OSError:
        return False
    return any(sign in tail for sign in SIGNS)
