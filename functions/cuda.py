"""A function that was given GPUs computes on them, or says why it cannot: torch by itself would take the CPU."""

from __future__ import annotations

import os
import re
from pathlib import Path

from rlhfless.spec.errors import UserError

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
        + _mend(driver, wheel)
    )


def cuda_fault(trace: str) -> NoCuda | None:
    """The NoCuda that ended a process with this trace; None if it ended for another reason."""
    reasons = re.findall(rf"\.{NoCuda.__name__}: ([^\n]*)", trace)
    return NoCuda(reasons[-1]) if reasons else None


def _driver() -> str:
    """Its version; empty if there is none."""
    try:
        match = re.search(r"\b\d{3,}\.\d+(?:\.\d+)?", DRIVER_VERSION.read_text())
    except OSError:
        return ""
    return match[0] if match else ""


def _mend(driver: str, wheel: str | None) -> str:
    if wheel is None:
        return WHEELS
    if not driver:
        return CONTAINER
    least = LEAST_DRIVER.get(wheel.partition(".")[0], 0)
    if int(driver.partition(".")[0]) < least:
        return f"CUDA {wheel} needs driver {least} or newer: update the driver, or install wheels for an older CUDA"
    return "the driver is new enough: `nvidia-smi` there shows whether it works and has these GPUs"
