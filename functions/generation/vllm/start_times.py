"""Collect the seconds of a worker's start phases, as reported by vLLM.

vLLM stores the compilation time in its configuration and logs how long reading the weights and capturing graphs
took. Phases that vLLM does not have (graphs on CPUs) or does not report (a silenced log) are absent.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhfless.records import StartPhase

_SAID = {"Loading weights took": StartPhase.WEIGHTS_CACHE, "Graph capturing finished": StartPhase.GRAPHS}
"""Prefixes of log messages whose first argument is a time in seconds."""

FROM_DISK = 0.5
"""Weights count as read from disk if at least this share of their bytes was, rather than from the page cache."""

WorkerStart = tuple[dict[str, float], int]
"""Seconds of a worker's phases, and the bytes that its process read from disk until its weights were loaded."""


@dataclass
class _Heard(logging.Handler):
    """Collects start times from the log."""

    seconds: dict[str, float] = field(default_factory=dict)
    disk_bytes: int = 0

    def __post_init__(self) -> None:
        super().__init__()
        self._before_bytes = _disk_bytes()

    def emit(self, record: logging.LogRecord) -> None:
        for beginning, phase in _SAID.items():
            if str(record.msg).startswith(beginning) and isinstance(record.args, tuple):
                self.seconds[phase] = self.seconds.get(phase, 0.0) + float(str(record.args[0]))
                self.disk_bytes = _disk_bytes() - self._before_bytes

    __hash__ = logging.Handler.__hash__


def _disk_bytes() -> int:
    """Return the bytes that this process has read from disk; 0 if the kernel does not report them."""
    try:
        lines = Path("/proc/self/io").read_text("ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), 0)


_heard = _Heard()


def listen() -> None:
    """Collect vLLM's log in this process from now on. Idempotent."""
    logging.getLogger("vllm").addHandler(_heard)


def of_worker(vllm_config: Any) -> WorkerStart:
    """Return the collected times of this process, with the compilation time."""
    compilation = vllm_config.compilation_config
    compile_s = float(compilation.compilation_time + compilation.encoder_compilation_time)
    compiled = {str(StartPhase.COMPILE): compile_s} if compile_s else {}
    return {str(phase): seconds for phase, seconds in _heard.seconds.items()} | compiled, _heard.disk_bytes


def phases(build_s: float, workers: Iterable[WorkerStart], weights_bytes: int) -> dict[str, float]:
    """Split an engine's `build_s` into the phases of its workers, which start concurrently, and the remainder."""
    slowest: dict[str, float] = {}
    disk_bytes = 0
    for seconds, read_bytes in workers:
        disk_bytes += read_bytes
        for phase, phase_s in seconds.items():
            slowest[phase] = max(slowest.get(phase, 0.0), phase_s)
    rest_s = max(build_s - sum(slowest.values()), 0.0)
    if weights_bytes > 0 and disk_bytes >= FROM_DISK * weights_bytes and StartPhase.WEIGHTS_CACHE in slowest:
        slowest[str(StartPhase.WEIGHTS_DISK)] = slowest.pop(StartPhase.WEIGHTS_CACHE)
    return slowest | {str(StartPhase.BUILD): rest_s}


def weights_bytes(model: str) -> int:
    """Return the bytes of the weights in a model's folder; 0 if it is not a folder, such as a hub name."""
    return sum(file.stat().st_size for file in Path(model).glob("*.safetensors")) if Path(model).is_dir() else 0
