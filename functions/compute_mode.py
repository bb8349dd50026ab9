"""Whether the GPUs of this machine take more than one process, which functions that share them need."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from rlhfless.spec.errors import UserError

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
    Default. Says nothing where that cannot be told."""
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
    """In the order of `ids`; empty if there is no nvidia-smi, or it does not know them."""
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
