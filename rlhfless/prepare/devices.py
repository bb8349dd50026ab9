"""The devices of this machine. Without Ray, so that a spec can be checked before Ray is imported."""

from __future__ import annotations

import os

import torch

from rlhfless.scaling.placement import CPU_KIND, Device


def local_devices() -> list[Device]:
    """The devices of this machine: its GPUs, or the CPU cores this process may use where it has none."""
    if torch.cuda.is_available():
        return [
            Device(f"gpu-{i}", gpu_kind(torch.cuda.get_device_name(i)), i) for i in range(torch.cuda.device_count())
        ]
    return [Device(f"cpu-{i}", CPU_KIND, i) for i in sorted(os.sched_getaffinity(0))]


def gpu_kind(device_name: str) -> str:
    """Price book key of a GPU: `NVIDIA H100 80GB HBM3` is `h100`."""
    words = device_name.lower().replace("-", " ").split()
    return next((word for word in words if any(c.isdigit() for c in word)), words[-1])
