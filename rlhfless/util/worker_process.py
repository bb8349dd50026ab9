"""A worker process for user code: its start, its messages, its environment and its output.

    python -P -m MODULE <socket fd> <parent's pid>

User code gets the locations of Python, libraries and caches, and no secret of the service or run. Its output goes to
the log under its name, up to a limit. What it starts is killed with it, in whatever session: such processes are found
by a variable that they inherit.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import IO, Any

from rlhfless.util import processes
from rlhfless.util.text import legible

REAP_S = 5.0
"""Timeout for a killed process to end."""

MARK = "RLHFLESS_WORKER"
"""Variable of a worker and all that it starts: the parent's identity, and a number."""


class WorkerProcess:
    """One process of a module at a time, in a session of its own."""

    def __init__(self, module: str, name: Callable[[], str]) -> None:
        """`name`: returns the name of the running user code, for its output."""
        self._module = module
        self._output = Output(name)
        self._process: subprocess.Popen[bytes] | None = None
        self.mark = f"{processes.identity()}-{secrets.token_hex(8)}"
        """Value of MARK in its processes."""
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    async def start(self) -> None:
        """Start the process; a running one is killed first, and so is what workers of ended parents have left."""
        self.kill()
        _kill_orphans()
        self._reader, self._writer = await asyncio.open_connection(sock=self._spawn())

    def send(self, message: Any) -> None:
        assert self._writer is not None
        self._writer.write(processes.encode(message))

    async def receive(self) -> Any:
        """Return the next message. Raises EOFError or OSError when the process is gone."""
        return await processes.read(self._reader)

    def end(self) -> str:
        """Describe how the process ended; kill it if it only closed its connection."""
        process = self._process
        assert process is not None
        with suppress(subprocess.TimeoutExpired):
            process.wait(REAP_S)
        code = process.returncode
        self.kill()
        if code is None:
            return "it closed its connection"
        return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"

    def kill(self) -> None:
        """Kill the process and its session. Idempotent."""
        process, self._process = self._process, None
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        if process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(REAP_S)
        processes.kill_started_with(MARK, self.mark, REAP_S)
        processes.end_session(process.pid, 0.0, REAP_S)  # programs that have removed the variable

    def _spawn(self) -> socket.socket:
        """Start the process; return the parent's end of its connection."""
        ours, theirs = socket.socketpair()
        with theirs:
            # -P: the current folder must not hide installed packages; `sys.path` is passed on unchanged instead.
            channel = (str(theirs.fileno()), str(os.getpid()))
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", self._module, *channel],
                env=passed_environment(os.environ)
                | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), MARK: self.mark},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        assert self._process.stdout is not None
        self._output.follow(self._process.stdout)
        return ours


def _kill_orphans() -> None:
    """Kill what the workers of ended processes of this user have left running, as after a SIGKILL of their parent."""
    for mark in set(processes.started_with(MARK).values()):
        if processes.is_gone(mark.rpartition("-")[0]):
            processes.kill_started_with(MARK, mark, REAP_S)


# -- environment and output


KIB = 1024

PRINTED_KIB = 256
"""Output limit of one worker, restarts included."""

LINE_BYTES = 8 * KIB
"""A longer line is split."""

OWN_PREFIX = "RLHFLESS_REWARD_"
"""Variables with this prefix are passed to user code."""

_PASSED = re.compile(
    r"(?i:(https?|all|no)_proxy)|PATH|HOME|USER|LOGNAME|LANG|LANGUAGE|LC_\w+|TZ|TMPDIR|VIRTUAL_ENV|LD_LIBRARY_PATH"
    r"|(SSL_CERT|REQUESTS_CA|CURL_CA|XDG|PYTHON|OMP|MKL|OPENBLAS|NUMBA|CUDA|NVIDIA|TORCH|TRANSFORMERS|NLTK|TIKTOKEN)"
    r"_?\w*|HF_(HOME|HUB_CACHE|HUB_OFFLINE|DATASETS_\w+|ENDPOINT)|RLHFLESS_HOME|" + OWN_PREFIX + r"\w+"
)


def passed_environment(own: Mapping[str, str]) -> dict[str, str]:
    """Return the part of the parent's environment that a worker gets."""
    return {name: value for name, value in own.items() if _PASSED.fullmatch(name)}


class Output:
    """Logs the output of one worker's successive processes."""

    def __init__(self, name: Callable[[], str]) -> None:
        """`name`: returns the name of the running code."""
        self._name = name
        self._left_bytes = PRINTED_KIB * KIB

    def follow(self, stream: IO[bytes]) -> None:
        """Copy a process's output to standard error, in a thread."""
        threading.Thread(target=self._follow, args=(stream,), name="worker-output", daemon=True).start()

    def _follow(self, stream: IO[bytes]) -> None:
        with stream:
            while line := stream.readline(LINE_BYTES):
                was_full, self._left_bytes = self._left_bytes <= 0, self._left_bytes - len(line)
                if not was_full:
                    self._say(line.decode("utf-8", "replace").rstrip("\n"))
                    if self._left_bytes <= 0:
                        self._say(f"has printed more than {PRINTED_KIB} KiB; further output is dropped")

    def _say(self, text: str) -> None:
        print(f"[{self._name()}] {legible(text)}", file=sys.stderr, flush=True)
