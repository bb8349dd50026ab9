"""Stacks of Python processes on this machine, read from outside by py-spy: also of processes that hang."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

STACKS_S = 10.0
"""Time limit for the stacks of a process. Reading them takes a tenth of a second; a busy machine needs more."""

MOST_CHARACTERS = 20_000
"""Longest text kept of a process: about 300 frames."""


def stacks_of(pid: int) -> str:
    """Return the stacks of all threads of a process, or why they cannot be read."""
    py_spy = Path(sys.executable).with_name("py-spy")
    try:
        command = [str(py_spy), "dump", "--nonblocking", "--pid", str(pid)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=STACKS_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"process {pid}: py-spy cannot read it: {error}"
    if done.returncode:
        return f"process {pid}: py-spy cannot read it: {done.stderr.strip()}"
    return done.stdout[:MOST_CHARACTERS]


async def all_stacks(pids: Iterable[int]) -> str:
    """Return the stacks of several processes, read at the same time."""
    return "\n".join(await asyncio.gather(*(asyncio.to_thread(stacks_of, pid) for pid in pids)))
