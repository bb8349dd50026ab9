"""Out-of-memory errors that name the phase, the plan's figure for it, and the observed memory."""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rlhfless.util.errors import UserError, first_line

GIB = 2**30

_TORCH = "OutOfMemoryError"
"""Name of torch's error on a GPU; most users of this module do not import torch, or import it later."""

_TORCH_ON_CPU = "DefaultCPUAllocator: can't allocate memory"
"""Part of the message of torch's error on a CPU, a RuntimeError."""

_ENGINE = re.compile(
    rf"(?:[^\n]*(?:OutOfMemoryError|{_TORCH_ON_CPU}|No available memory for the cache|KV cache is needed|"
    r"[Ff]ree memory on device|MemoryError)[^\n]*)"
)
"""vLLM 0.32's out-of-memory messages at an engine's start (vllm/v1/core/kv_cache_utils.py, vllm/v1/worker)."""

HINT = "`rlhfless plan`, or `POST /v1/runs:plan`, shows the phases and the nearest change that fits"

Planned = Mapping[str, int]
"""Bytes that the memory plan counts on a device, by phase."""


class OutOfMemory(UserError):
    """A device or a machine has too little memory for the spec."""


@contextmanager
def naming_memory_errors(function: str, phase: str, planned: Planned) -> Iterator[None]:
    """Convert memory errors in the block to OutOfMemory with the phase, the plan's figure and the observed memory."""
    try:
        yield
    except Exception as error:
        if isinstance(error, MemoryError) or type(error).__name__ == _TORCH or _TORCH_ON_CPU in str(error):
            raise OutOfMemory(message(function, phase, planned, f"{memory_seen()}; {first_line(error)}")) from error
        raise


def engine_fault(trace: str, planned: Planned) -> OutOfMemory | None:
    """Return the OutOfMemory that ended an engine's process with this traceback, or None."""
    lines = [line for line in _ENGINE.findall(trace) if " INFO " not in line]  # INFO lines report how much there was
    if not lines:
        return None
    return OutOfMemory(message("generation", "generate", planned, lines[-1].strip()))


def message(function: str, phase: str, planned: Planned, what: str) -> str:
    """Return the message of an out-of-memory error: where it occurred, the plan's figure, and how to correct it."""
    figure = (
        f"the memory plan counts {planned[phase] / GIB:.2f} GiB for it" if phase in planned else "it was not planned"
    )
    return f"{function} ran out of memory in `{phase}` ({figure}): {what}. {HINT}"


def memory_seen() -> str:
    """Describe this process's peak memory, on its GPU or else of the machine."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        most = torch.cuda.max_memory_allocated()
        return f"{most / GIB:.2f} GiB were held at most, {free / GIB:.2f} of {total / GIB:.2f} GiB are free"
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB
    return f"{most / GIB:.2f} GiB were held at most"
