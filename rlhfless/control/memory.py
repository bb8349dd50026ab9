"""The memory that a process beside the service may have: what needs more ends alone, and says so.

Without a limit the kernel would end any process of the machine that it likes. The limit is RLIMIT_DATA: what a process
has for itself, without shared memory, mapped files and what it has only reserved.
"""

from __future__ import annotations

import os
import resource
import traceback
from pathlib import Path

SHARE = 4
"""A process may have this part of the machine's, or the container's, memory: two jobs and some drivers run beside the
service, and on one machine beside replicas."""

RESERVE = 16
"""A driver that is out of memory still has to say so: for that it gets this part of its limit."""

DRIVER_LEAST_BYTES = 4 << 30
"""Ray's threads reserve 1.5 GiB of it, on two cores, and use little of that."""

CONTAINER = Path("/sys/fs/cgroup/memory.max")

SIGNS = (b"MemoryError", b"std::bad_alloc", b"memory allocation of ", b"out of memory")
"""What Python, C++, Rust and LLVM write when they are out of memory, the last three before they abort."""

TAIL_BYTES = 16 << 10


def memory_bytes(machine: int, container: str, least: int) -> int:
    """What a process may have, and at least `least`. `container`: the text of CONTAINER, which is `max` or empty where
    there is no limit."""
    present = min(machine, int(container)) if container.strip().isdecimal() else machine
    return max(present // SHARE, least)


def _share_bytes(least: int) -> int:
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return memory_bytes(machine, CONTAINER.read_text() if CONTAINER.exists() else "", least)


def limit_memory(least: int) -> int:
    """Limit this process to a share of what there is; returns the bytes."""
    limit = _share_bytes(least)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    return limit


def limit_driver(given_gib: float | None) -> None:
    """Limit this process, which drives a run, to `given_gib` or a share of what there is. What its imports have taken
    does not count: threads of their libraries reserve some memory for each core, far more than is used."""
    limit = _share_bytes(DRIVER_LEAST_BYTES) if given_gib is None else int(given_gib * 2**30)
    limit += _data_bytes()
    resource.setrlimit(resource.RLIMIT_DATA, (limit - limit // RESERVE, limit))


def _data_bytes() -> int:
    """What RLIMIT_DATA counts, of this process."""
    status = Path("/proc/self/status").read_text("utf-8")
    return int(status.partition("VmData:")[2].split(maxsplit=1)[0]) << 10


def use_reserve(error: MemoryError) -> None:
    """Let go of what filled the memory, which the error's traceback holds, and make room for what is to be said."""
    traceback.clear_frames(error.__traceback__)
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def says_out_of_memory(log: Path, start: int) -> bool:
    """Whether the last that a process has written says so. `start`: where in the log it began to write."""
    try:
        with log.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(start, size - TAIL_BYTES))
            tail = stream.read()
    except OSError:
        return False
    return any(sign in tail for sign in SIGNS)
