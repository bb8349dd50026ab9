"""The host's memory that is free."""

from __future__ import annotations

from pathlib import Path

import psutil

COPIES_SHARE = 0.5
"""The share of a node's free memory that copies of a state may take: the rest is for what works beside."""

_CGROUP = Path("/sys/fs/cgroup")


def free_bytes() -> int:
    """Memory that this process can get: of the machine, or of its container if that has less."""
    free = psutil.virtual_memory().available
    try:
        limit, used = ((_CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return free if limit == "max" else min(free, int(limit) - int(used))
    except (OSError, ValueError):  # not in a container of version 2
        return free
