"""Checks of a single node: driver, imports, compiler, folders, memory, and the speed of moving weights."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from rlhfless.functions.devices import require_cuda
from rlhfless.planning.host_memory import Needed, room_at, room_problems, store_base
from rlhfless.scaling.memory import GIB, stored_versions, version_bytes
from rlhfless.scaling.placement import CPU_KIND
from rlhfless.selftest.check import Measured, Subject, Wrong, check
from rlhfless.weights.digest import digest_of
from rlhfless.weights.files import TensorStream, write_file
from rlhfless.weights.http import HttpStore, HttpStoreServer
from rlhfless.weights.store import FolderStore

IMPORTS = ("torch", "transformers", "ray", "vllm")
GPU_IMPORTS = ("cuda.bindings", "triton")

IMPORT_S = 300.0
"""Longest wait for all imports, on a cold disk."""

CACHES = {
    "RLHFLESS_HOME": "~/.cache/rlhfless",
    "VLLM_CACHE_ROOT": "~/.cache/vllm",
    "TRITON_CACHE_DIR": "~/.triton/cache",
    "HF_HOME": "~/.cache/huggingface",
}
"""Folders written at startup, by the environment variable that relocates each."""

CACHE_GIB = 2.0
"""Size of compiled kernels and graphs; vLLM takes some hundred MB per model and shape."""


@check(
    "driver",
    "install a driver as new as the wheels want (CUDA 13: 580 or newer), or wheels for the driver's CUDA; in a pod "
    "check runtimeClassName; `nvidia-smi -c DEFAULT` ends the exclusive mode",
    gpus=1,
)
def driver(_: Subject) -> Measured:
    """Run `torch.cuda.is_available()` in this process; later checks cover ranks and the engine's core."""
    query = ["nvidia-smi", "--query-gpu=driver_version,compute_mode,name,memory.total", "--format=csv,noheader"]
    # Images without NVIDIA's tools can still compute.
    output = ""
    if shutil.which(query[0]):
        output = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False).stdout
    measured = {"nvidia_smi": output.splitlines()}
    require_cuda()
    if "Exclusive" in output:
        raise Wrong("a GPU is in exclusive mode, which refuses a second process", **measured)
    return measured


@check("imports", "install requirements/gpu.txt (GPUs) or requirements/cpu.txt into an empty environment")
def imports(subject: Subject) -> Measured:
    """Import all libraries in a separate process, because vLLM and numba do not start in one process."""
    names = (*IMPORTS, *(GPU_IMPORTS if subject.gpus else ()))
    code = "import importlib, sys\nfor name in sys.argv[1:]: print(name, flush=True); importlib.import_module(name)"
    done = subprocess.run(
        [sys.executable, "-c", code, *names], capture_output=True, text=True, timeout=IMPORT_S, check=False
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["it crashed"])[-1]
        raise Wrong(f"`import {(done.stdout.split() or names)[-1]}` fails: {reason}")
    return {name: getattr(importlib.import_module(name), "__version__", "there") for name in ("torch", "transformers")}


@check(
    "compiler",
    "install gcc and Python's headers (`apt-get install build-essential python3-dev`), or name a compiler in CC",
)
def compiler(subject: Subject) -> Measured:
    """Compile C code. vLLM on CPUs, Triton and torch.compile call a C compiler on first start; Triton (on GPUs) builds
    a Python extension with it."""
    path = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if path is None:
        raise Wrong("no C compiler is on the path")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "a.c"
        extension = "#include <Python.h>\n" if subject.gpus else ""
        source.write_text(extension + "int answer(void) { return 42; }\n")
        headers = f"-I{sysconfig.get_path('include')}"
        command = [path, "-shared", "-fPIC", headers, str(source), "-o", str(source.with_suffix(".so"))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise Wrong(f"{path} compiles nothing: {done.stderr.strip()}")
    return {"compiler": path}


@check("caches", "make the folder writable, or move it with the variable that is named")
def caches(_: Subject) -> Measured:
    """Write a file in each cache folder and measure its free space."""
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


@check("room", "free the memory that is named, or set weights.folder to a folder with more room")
def room(subject: Subject) -> Measured:
    """Compare free shared memory and host memory with the plan's versions and processes."""
    spec, asked = subject.spec, subject.asked
    free_bytes = room_at(str(store_base(spec)))
    size = version_bytes(asked.shape, spec.model.dtype)
    loading = 0 if subject.kind == CPU_KIND else asked.plan().host_bytes
    needed = Needed(size, stored_versions(spec), loading)
    measured = {
        "folder": free_bytes.folder,
        "folder_free_gib": free_bytes.store_bytes / GIB,
        "versions_gib": needed.versions * size / GIB,
        "host_free_gib": free_bytes.memory_bytes / GIB,
        "loading_gib": loading / GIB,
    }
    if problems := room_problems(needed, free_bytes):
        raise Wrong("; ".join(f"{problem.what} ({problem.hint})" for problem in problems), **measured)
    return measured


TENSORS = 32

MOST_BYTES, FEWEST_BYTES = 2**30, 2**27
"""Bounds on the size of the synthetic weights, which is otherwise the model's."""

SHARE = 8
"""Divisor of the folder's free memory: four versions and a cache of them then fit with room to spare."""

SLOWEST_SHARE = 0.5
"""Lowest accepted rate of publishing, as a share of the rate of hashing, then writing. Publishing overlaps the two, so
a lower rate means that it waits for something."""


@contextmanager
def _timed(rates: dict[str, float], name: str, size_bytes: int) -> Iterator[None]:
    began_s = time.perf_counter()
    yield
    rates[f"{name}_gb_per_s"] = size_bytes / (time.perf_counter() - began_s) / 1e9


@check("weights", "put weights.folder on a faster disk or in shared memory; look for other work on the machine")
def weights(subject: Subject) -> Measured:
    """Measure copy, hash and write; publish and read through the folder; read over HTTP on loopback."""
    wanted = version_bytes(subject.asked.shape, subject.spec.model.dtype)
    free = shutil.disk_usage(subject.folder).free // SHARE
    size = min(max(wanted, FEWEST_BYTES), MOST_BYTES, free) // TENSORS // 4 * 4
    tensors = {f"layer.{number}": torch.randn(size // 4) for number in range(TENSORS)}
    rates: dict[str, float] = {}
    size *= TENSORS
    copies = [tensor.clone() for tensor in tensors.values()]  # so that the copy below touches no new page
    with _timed(rates, "copy", size):
        for copy, tensor in zip(copies, tensors.values(), strict=True):
            copy.copy_(tensor)
    del copies
    with _timed(rates, "hash", size):
        digest_of(tensors.items())
    with (subject.folder / "plain").open("wb") as file, _timed(rates, "write", size):
        write_file(file, TensorStream.of(tensors), {})
    (subject.folder / "plain").unlink()
    folder = FolderStore(subject.folder / "rates")
    with HttpStoreServer(folder.folder) as store:
        with _timed(rates, "publish", size):
            stored = store.put("selftest", 0, 0, tensors)
        with _timed(rates, "read", size):
            _drain(folder.read, str(folder.path(stored.version)))
        with _timed(rates, "http", size):
            _drain(HttpStore(store.token, subject.folder / "cache").read, stored.location)
    for name in ("rates", "cache"):
        shutil.rmtree(subject.folder / name)
    in_a_row = 1 / (1 / rates["hash_gb_per_s"] + 1 / rates["write_gb_per_s"])
    if rates["publish_gb_per_s"] < SLOWEST_SHARE * in_a_row:
        what = f"publishing has less than {SLOWEST_SHARE:.0%} of the rate of hashing and writing in a row"
        raise Wrong(what, size_bytes=size, **rates)
    return {"size_bytes": size, **rates}


def _drain(read: Callable[[str], Iterator[tuple[str, torch.Tensor]]], location: str) -> None:
    """Read a version like an engine does, hashing every byte."""
    digest_of(read(location))
