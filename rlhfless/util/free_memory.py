"""The host's memory that is free."""

from __future__ import annotations

from pathlib import Path

import psutil

COPIES_SHARE = 0.5
"""The share of a node's free memory that copies of a state may take: the rest is for what works beside."""

_CGROUP = Path("/sys/fs/cgroup")


def free_bytes() -> int:
    """Return the bytes that this process can still allocate: of the machine, or of its container if that has less.

    The kernel drops inactive page cache before it kills anything, so files that were read or written once do not count
    as used; kubelet's working set leaves them out, too. Shared memory is not in `inactive_file` and counts.
    """
    free = psutil.virtual_memory().available
    try:
        limit, used, stat = ((_CGROUP / name).read_text() for name in ("memory.max", "memory.current", "memory.stat"))
        if limit.strip() == "max":
            return free
        counters = dict(line.split() for line in stat.splitlines())
        return min(free, int(limit) - int(used) + int(counters["inactive_file"]))
    except (OSError, ValueError, KeyError):  # not in a container of cgroup version 2
        return free
