"""This machine: its description, load and free memory."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any

import psutil

COPIES_SHARE = 0.5
"""Maximum share of a node's free memory for copies of a state. The rest is for other processes."""

_CGROUP = Path("/sys/fs/cgroup")


def free_bytes() -> int:
    """Return the bytes that this process can still allocate, limited by the machine and its container.

    The kernel drops inactive page cache before it kills any process, so files that were read or written once do not
    count as used; kubelet's working set excludes them, too. Shared memory is not in `inactive_file`, and counts.
    """
    free = psutil.virtual_memory().available
    try:
        limit, used, stat = ((_CGROUP / name).read_text() for name in ("memory.max", "memory.current", "memory.stat"))
        if limit.strip() == "max":
            return free
        counters = dict(line.split() for line in stat.splitlines())
        return min(free, int(limit) - int(used) + int(counters["inactive_file"]))
    except (OSError, ValueError, KeyError):  # not in a cgroup v2 container
        return free


IDLE = ("idle", "iowait")
IN_OTHERS = ("guest", "guest_nice")
"""Already included in `user` and `nice`."""


class BusyCores:
    """Measures the mean number of busy CPU cores of this machine since construction."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._busy_s = _busy_s()

    def mean(self) -> float:
        passed_s = time.monotonic() - self._began_s
        return (_busy_s() - self._busy_s) / passed_s if passed_s > 0 else 0.0


def _busy_s() -> float:
    times: dict[str, float] = psutil.cpu_times()._asdict()
    return sum(seconds for name, seconds in times.items() if name not in (*IDLE, *IN_OTHERS))


def describe_machine() -> dict[str, Any]:
    """Return the machine's name, system, architecture, Python and number of cores."""
    return {
        "host": platform.node(),
        "system": platform.system(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "cpu_cores": os.cpu_count(),
    }
