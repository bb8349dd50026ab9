"""Checks of a node by itself: driver, imports, compiler, folders, memory."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import torch

from rlhfless.loop.launch import SHARED_MEMORY, serves_by_http
from rlhfless.prepare.memory.formulas import GIB
from rlhfless.selftest.check import Measured, Wrong, check
from rlhfless.selftest.subject import Subject

IMPORTS = ("torch", "transformers", "ray", "vllm")
GPU_IMPORTS = ("cuda.bindings", "triton", "flashinfer")

IMPORT_S = 300.0
"""Longest wait for all imports, on a cold disk."""

CACHES = {
    "RLHFLESS_HOME": "~/.cache/rlhfless",
    "VLLM_CACHE_ROOT": "~/.cache/vllm",
    "TRITON_CACHE_DIR": "~/.triton/cache",
    "HF_HOME": "~/.cache/huggingface",
}
"""Folders that a start writes to, by the variable that moves each."""

CACHE_GIB = 2.0
"""Of compiled kernels and graphs; vLLM's are some hundred MB for each model and shape."""


@check(
    "driver",
    "install a driver as new as the wheels want (CUDA 13: 580 or newer), or wheels for the driver's CUDA; in a pod "
    "check runtimeClassName; `nvidia-smi -c DEFAULT` ends the exclusive mode",
    gpus=1,
)
def driver(_: Subject) -> Measured:
    """`torch.cuda.is_available()` in this process; ranks and the engine's core tell of themselves later."""
    query = ["nvidia-smi", "--query-gpu=driver_version,compute_mode,name,memory.total", "--format=csv,noheader"]
    told = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    measured = {"nvidia_smi": told.stdout.splitlines(), "wheel_cuda": torch.version.cuda or "none"}
    if not torch.cuda.is_available():
        raise Wrong("torch sees no CUDA device", **measured)
    if "Exclusive" in told.stdout:
        raise Wrong("a GPU is in exclusive mode, which refuses a second process", **measured)
    return measured


@check("imports", "install requirements/gpu.txt (GPUs) or requirements/cpu.txt into an empty environment")
def imports(subject: Subject) -> Measured:
    """In a process of its own, as vLLM and numba do not start in one."""
    names = (*IMPORTS, *(GPU_IMPORTS if subject.gpus else ()))
    code = "import importlib, sys\nfor name in sys.argv[1:]: print(name, flush=True); importlib.import_module(name)"
    done = subprocess.run(
        [sys.executable, "-c", code, *names], capture_output=True, text=True, timeout=IMPORT_S, check=False
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["it crashed"])[-1]
        raise Wrong(f"`import {(done.stdout.split() or names)[-1]}` fails: {reason}")
    return {name: getattr(importlib.import_module(name), "__version__", "there") for name in ("torch", "transformers")}


@check("compiler", "install gcc (`apt-get install build-essential`), or name a compiler in CC")
def compiler(_: Subject) -> Measured:
    """vLLM on CPUs, Triton and torch.compile call a C compiler in the first start."""
    found = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if found is None:
        raise Wrong("there is no C compiler on the path")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "a.c"
        source.write_text("int answer(void) { return 42; }\n")
        command = [found, "-shared", "-fPIC", str(source), "-o", str(source.with_suffix(".so"))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise Wrong(f"{found} compiles nothing: {done.stderr.strip()}")
    return {"compiler": found}


@check("caches", "make the folder writable, or move it with the variable that is named")
def caches(_: Subject) -> Measured:
    """A file can be made in each, and there is room."""
    folders = {name: Path(os.environ.get(name) or Path(usual).expanduser()) for name, usual in CACHES.items()}
    for name, folder in folders.items():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise Wrong(f"{folder} ({name}) cannot be written: {error}") from error
    free = {f"{name}_free_gib": shutil.disk_usage(folder).free / GIB for name, folder in folders.items()}
    name, least = min(free.items(), key=lambda item: item[1])
    if least < CACHE_GIB:
        raise Wrong(f"{name} is {least:.1f}, and compiled kernels take up to {CACHE_GIB:g}", **free)
    return free


@check(
    "shared memory", "Docker: --shm-size; Kubernetes: sharedMemory of the group; or set weights.folder to a fast disk"
)
def shared_memory(subject: Subject) -> Measured:
    """Free bytes of the store's folder against the versions that the plan has there."""
    spec, plan = subject.spec, subject.asked.plan()
    folder = Path(spec.weights.folder or SHARED_MEMORY)
    here = folder if folder.exists() else folder.parent
    planned = plan.shared_bytes + (plan.cache_bytes if serves_by_http(spec) else 0)
    return _room(str(folder), shutil.disk_usage(here).free, planned)


@check("host memory", "end other programs, use a larger machine, or turn off learner.offload")
def host_memory(subject: Subject) -> Measured:
    """What is available against the plan's largest phase on this node."""
    return _room("the host", psutil.virtual_memory().available, subject.asked.plan().host_bytes)


def _room(where: str, free: int, planned: int) -> Measured:
    measured = {"free_gib": free / GIB, "planned_gib": planned / GIB}
    if free < planned:
        raise Wrong(f"{where} has {free / GIB:.1f} GiB free, and {planned / GIB:.1f} are planned", **measured)
    return measured
