"""Free memory of the host."""

from __future__ import annotations

from pathlib import Path

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
