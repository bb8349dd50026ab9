"""Whether a function can compute on the GPUs that it was given: torch by itself would take the CPU, and a GPU may take
one process alone."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhfless.util.errors import UserError

DRIVER_VERSION = Path("/proc/driver/nvidia/version")
"""Written by the kernel module of NVIDIA's driver."""

LEAST_DRIVER = {"12": 525, "13": 580}
"""Oldest driver for wheels of a major version of CUDA (NVIDIA's release notes of CUDA, "minor version
compatibility")."""

WHEELS = "install the wheels of requirements/gpu.txt in this environment"

CONTAINER = (
    "install NVIDIA's driver on the node, and start a container with its devices (Docker: --gpus all; Kubernetes: "
    "runtimeClassName: nvidia)"
)


ALLOCATOR = "PYTORCH_ALLOC_CONF"
"""The variable with the settings of torch's allocators. Must be set before the process's first use of CUDA."""

PINNED = "pinned_max_round_threshold_mb:1"
"""For every process that pins host memory through torch: without it each pinned block is rounded up to a power of two
(`CachingHostAllocator.h` of torch 2.13), and what sleeps on the host takes up to twice the planned bytes."""

EXPANDABLE = "expandable_segments:True"
"""For ranks, whose micro-batches have rows of many lengths: fixed segments of the allocator fragment, by 10 to 25 % of
what is in use. Not where memory is shared with engines by CUDA IPC, nor in engines: vLLM's sleep excludes it."""


FLASHINFER = "RLHFLESS_FLASHINFER"
"""The variable that says whether an engine's processes may use FlashInfer: 1, or 0."""


def hide_flashinfer() -> None:
    """Make FlashInfer not importable in this process, if the variable says so. vLLM takes it where it finds an nvcc of
    whatever version (`has_flashinfer`, vllm/utils/flashinfer.py), so kernels would differ from node to node."""
    if os.environ.get(FLASHINFER) == "0":
        modules: dict[str, Any] = sys.modules  # type: ignore[assignment]
        modules["flashinfer"] = None


class NoCuda(UserError):
    """A process was given GPUs, and torch reaches none of them."""


def require_cuda() -> None:
    """Raises NoCuda, which names driver, wheel and hint, if torch reaches no GPU in this process."""
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
    """The NoCuda that ended a process with this trace; None if it ended for another reason."""
    reasons = re.findall(rf"\.{NoCuda.__name__}: ([^\n]*)", trace)
    return NoCuda(reasons[-1]) if reasons else None


def _driver() -> str:
    """The version of NVIDIA's driver; empty if there is none."""
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
"""Longest wait for nvidia-smi: a driver that keeps no state between calls takes seconds to see each GPU."""

MPS_FOLDER = "/tmp/nvidia-mps"
"""The folder of NVIDIA's multi-process service, where CUDA_MPS_PIPE_DIRECTORY names no other: it shares GPUs in any
mode."""


class GpuNotShared(UserError):
    """A GPU takes one process alone, and several functions of the run are to use it."""


def require_shareable(ids: Sequence[str]) -> None:
    """Raises GpuNotShared if one of these GPUs, entries of CUDA_VISIBLE_DEVICES, is in another compute mode than
    Default. Passes if the mode is not known."""
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
    """The compute mode of each GPU, in the order of `ids`; empty if nvidia-smi is missing or does not know them."""
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
