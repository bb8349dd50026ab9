"""Removes a run's weights from shared memory when its driver was killed and could not.

A small process that reads from a pipe whose other end the driver holds: when the driver ends, in whatever way, the pipe
closes. The process has a session of its own, so that a signal to the driver's terminal does not end it first, and
ignores the signals that Slurm sends to every process of a job.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_STOP_S = 10.0

# Nothing of ours is imported: the process lasts as long as the run, and should cost next to nothing.
_PROGRAM = """
import shutil, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.stdin.buffer.read()
for folder in sys.argv[1:]:
    shutil.rmtree(folder, ignore_errors=True)
"""


@contextmanager
def janitor(folders: Sequence[Path]) -> Iterator[None]:
    """Within the block, the folders are removed if this process dies."""
    command = [sys.executable, "-I", "-S", "-c", _PROGRAM, *map(str, folders)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(_STOP_S)
