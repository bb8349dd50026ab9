"""Check that a function can compute on its devices, and explain why they ran out of memory.

torch would silently use the CPU instead of a GPU, and a GPU may accept only one process. Out-of-memory errors name the
phase, the plan's figure for it, and the observed memory.
"""

from __future__ import annotations

import logging
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhfless.util.errors import UserError, first_line

DRIVER_VERSION = Path("/proc/driver/nvidia/version")
"""Written by the kernel module of NVIDIA's driver."""

LEAST_DRIVER = {"12": 525, "13": 580}
"""Oldest driver for wheels of a CUDA major version (CUDA release notes, "minor version compatibility")."""

WHEELS = "install the wheels of requirements/gpu.txt in this environment"

CONTAINER = (
    "install NVIDIA's driver on the node, and start a container with its devices (Docker: --gpus all; Kubernetes: "
    "runtimeClassName: nvidia)"
)


ALLOCATOR = "PYTORCH_ALLOC_CONF"
"""The variable for the settings of torch's allocators. Set it before the process first uses CUDA."""

PINNED = "pinned_max_round_threshold_mb:1"
"""For every process that pins host memory through torch: otherwise each pinned block is rounded up to a power of two
(`CachingHostAllocator.h` of torch 2.13), and offloaded tensors take up to twice the planned bytes."""

EXPANDABLE = "expandable_segments:True"
"""For ranks, whose micro-batches have rows of many lengths: the allocator's fixed segments fragment, by 10 to 25 %
of the memory in use. Not for memory shared with engines by CUDA IPC, nor in engines: vLLM's sleep is incompatible
with it."""


FLASHINFER = "RLHFLESS_FLASHINFER"
"""The variable that says whether an engine's processes may use FlashInfer: 1 or 0."""


def hide_flashinfer() -> None:
    """Make FlashInfer unimportable in this process if the variable says so.

    vLLM uses it wherever it finds any nvcc (`has_flashinfer`, vllm/utils/flashinfer.py), so kernels would differ
    between nodes.
    """
    if os.environ.get(FLASHINFER) == "0":
        modules: dict[str, Any] = sys.modules  # type: ignore[assignment]
        modules["flashinfer"] = None


class NoCuda(UserError):
    """A process was given GPUs, but torch reaches none of them."""


def require_cuda() -> None:
    """Raise NoCuda, with driver, wheel and a hint, if torch reaches no GPU in this process."""
    import torch

    if torch.cuda.is_available():
        return
    driver, wheel = _driver(), torch.version.cuda
    built = f"torch {torch.__version__} is " + (f"built for CUDA {wheel}" if wheel else "a wheel for CPUs")
    driver_words = f"NVIDIA's driver there is {driver}" if driver else f"no NVIDIA driver is there ({DRIVER_VERSION})"
    mask = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    raise NoCuda(
        f"no CUDA on {os.uname().nodename} for a function that was given its GPUs {mask}: {built}, and {driver_words}; "
        + _hint(driver, wheel)
    )


def cuda_fault(trace: str) -> NoCuda | None:
    """Return the NoCuda that ended a process with this traceback, or None."""
    reasons = re.findall(rf"\.{NoCuda.__name__}: ([^\n]*)", trace)
    return NoCuda(reasons[-1]) if reasons else None


def _driver() -> str:
    """Return the version of NVIDIA's driver, or an empty string."""
    try:
        match = re.search(r"\b\d{3,}\.\d+(?:\.\d+)?", DRIVER_VERSION.read_text())
    except OSError:
        return ""
    return match[0] if match else ""


def _hint(driver: str, wheel: str | None) -> str:
    if wheel is None:
        return WHEELS
    if not driver:
        return CONTAINER
    least = LEAST_DRIVER.get(wheel.partition(".")[0], 0)
    if int(driver.partition(".")[0]) < least:
        return f"CUDA {wheel} needs driver {least} or newer: update the driver, or install wheels for an older CUDA"
    return "the driver is new enough: `nvidia-smi` there shows whether it works and has these GPUs"


log = logging.getLogger(__name__)

ASK_S = 30.0
"""Longest wait for nvidia-smi, in seconds: without persistence mode the driver takes seconds per GPU."""

MPS_FOLDER = "/tmp/nvidia-mps"
"""Default folder of NVIDIA's multi-process service (see CUDA_MPS_PIPE_DIRECTORY), which shares GPUs in any mode."""


class GpuNotShared(UserError):
    """A GPU accepts only one process, but several functions of the run are to use it."""


def require_shareable(ids: Sequence[str]) -> None:
    """Raise GpuNotShared if one of these GPUs is in a compute mode other than Default.

    `ids` are entries of CUDA_VISIBLE_DEVICES. Passes if the mode is unknown.
    """
    if (Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", MPS_FOLDER)) / "control").exists():
        return
    for gpu, mode in zip(ids, _modes(ids), strict=False):
        if mode != "Default":
            raise GpuNotShared(
                f"GPU {gpu} of {os.uname().nodename} is in compute mode {mode}, which lets one process use it, but "
                f"functions of the run share it. Run `nvidia-smi -i {gpu} -c DEFAULT` there as root, or NVIDIA's "
                "multi-process service (MPS)"
            )


def _modes(ids: Sequence[str]) -> list[str]:
    """Return the compute mode of each GPU, in the order of `ids`; empty if nvidia-smi is missing or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--id={','.join(ids)}", "--query-gpu=compute_mode", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        log.info("the compute mode of GPUs %s is not known: %s", ",".join(ids), error)
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


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
