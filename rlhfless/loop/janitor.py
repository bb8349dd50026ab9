"""Removes a run's weights from shared memory when its driver was killed and could not.

A small process that reads from a pipe whose other end the driver holds: when the driver ends, in whatever way, the pipe
closes. The process has a session of its own, so that a signal to the driver's terminal does not end it first, and
ignores the signals that Slurm sends to every process of a job.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

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


class Janitor:
    """Within the block, the folders are removed if this process dies. The janitor ends with the block.

    `wanted` False: on a joined cluster the folders may be on another machine, where the learner removes them when its
    lease runs out.
    """

    def __init__(self, folders: Sequence[Path], wanted: bool) -> None:
        self._folders = folders
        self._wanted = wanted
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Janitor:
        if self._wanted:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _PROGRAM, *map(str, self._folders)],
                stdin=subprocess.PIPE,
                start_new_session=True,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait(_STOP_S)
