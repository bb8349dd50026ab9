"""The machine that figures were measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def machine() -> str:
    """Processor, cores that this process may use, and system."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    cpu = names[0] if names else platform.processor()
    return f"{cpu}, {len(os.sched_getaffinity(0))} cores, {platform.system()} {platform.machine()}"
