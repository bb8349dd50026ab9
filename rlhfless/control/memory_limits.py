"""Memory limits of the processes beside the service: a process that needs more ends alone, and says why.

Without a limit the kernel would kill any process of the machine. The limit is RLIMIT_DATA: a process's private memory,
without shared memory, mapped files and address space that is only reserved.
"""

from __future__ import annotations

import os
import resource
import traceback
from pathlib import Path

SHARE = 4
"""A process may have one part in so many of the machine's, or container's, memory: two jobs and some drivers run beside
the service, and on a single machine beside replicas."""

RESERVE = 16
"""One part in so many of a driver's limit is kept back, for its report that it is out of memory."""

DRIVER_LEAST_BYTES = 4 << 30
"""The least limit of a driver. Ray's threads reserve 1.5 GiB of it on two cores, and use little of that."""

CONTAINER = Path("/sys/fs/cgroup/memory.max")

SIGNS = (b"MemoryError", b"std::bad_alloc", b"memory allocation of ", b"out of memory")
"""Messages of Python, C++, Rust and LLVM that are out of memory; the last three abort after theirs."""

TAIL_BYTES = 16 << 10


def memory_bytes(machine: int, container: str, least: int) -> int:
    """Return the limit of a process in bytes, at least `least`. `container`: the text of CONTAINER; `max` or empty
    without a limit."""
    present = min(machine, int(container)) if container.strip().isdecimal() else machine
    return max(present // SHARE, least)


def _share_bytes(least: int) -> int:
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return memory_bytes(machine, CONTAINER.read_text() if CONTAINER.exists() else "", least)


def limit_memory(least: int) -> int:
    """Limit this process to its share of the memory; return the bytes."""
    limit = _share_bytes(least)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    return limit


def limit_driver(limit_gib: float | None) -> None:
    """Limit this driver process to `limit_gib`, or its share of the memory, beyond its imports: the threads of
    libraries reserve far more for each core than they use."""
    limit = _share_bytes(DRIVER_LEAST_BYTES) if limit_gib is None else int(limit_gib * 2**30)
    status = Path("/proc/self/status").read_text("utf-8")
    limit += int(status.partition("VmData:")[2].split(maxsplit=1)[0]) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (limit - limit // RESERVE, limit))


def use_reserve(error: MemoryError) -> None:
    """Free the memory that the error's traceback holds, and raise the limit by the reserve."""
    traceback.clear_frames(error.__traceback__)
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def says_out_of_memory(log: Path, start: int) -> bool:
    """Return whether the end of a process's log reports lack of memory. `start`: the log's size when the process
    started."""
    try:
        with log.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(start, size - TAIL_BYTES))
            tail = stream.read()
    except OSError:
        return False
    return any(sign in tail for sign in SIGNS)
