"""A Ray with three devices that outlives the drivers that join it."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest


@contextlib.contextmanager
def started(**settings: str) -> Iterator[str]:
    """Start Ray, and yield its address. `settings`: its environment variables."""
    # Any other private Ray that starts replaces the token in the user's home.
    settings |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    with pytest.MonkeyPatch.context() as environment:
        for name, value in settings.items():
            environment.setenv(name, value)
        with _head() as address:
            yield address


@contextlib.contextmanager
def _head() -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Separate from the folder of a private Ray that other tests may be running. Ray's sockets need a short path.
    folder = f"/tmp/rlhfless-ray-{port}"
    ray = str(Path(sys.executable).with_name("ray"))
    command = [ray, "start", "--head", "--node-ip-address=127.0.0.1", f"--port={port}"]
    try:
        # More devices than cores: an actor on a device without its own core is simply not pinned.
        subprocess.run(
            [*command, "--include-dashboard=false", "--num-cpus=3", f"--temp-dir={folder}"],
            check=True,
            timeout=240,
            capture_output=True,
        )
        yield f"127.0.0.1:{port}"
    finally:
        for process in psutil.process_iter(["cmdline"]):
            if folder in " ".join(process.info["cmdline"] or ()):
                process.kill()
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def believed_gpu(address: str, kind: str, folder: Path) -> Iterator[None]:
    """Add a node with a GPU that only Ray believes in: replicas there compute on the CPU.

    `folder`: for the module that disables the check for CUDA.
    """
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import rlhfless.functions.devices as cuda\ncuda.require_cuda = lambda: None\n"
    )
    ray = str(Path(sys.executable).with_name("ray"))
    command = [ray, "start", f"--address={address}", "--node-ip-address=127.0.0.2", "--num-cpus=0", "--num-gpus=1"]
    labels = f"--labels=ray.io/accelerator-type={kind}"
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        subprocess.run([*command, labels], check=True, timeout=240, capture_output=True)
        yield


def replicas(run_id: str) -> dict[str, psutil.Process]:
    """Return the run's replica processes, by name."""
    names = {process: " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])}
    found = {name.split(":")[3]: process for process, name in names.items() if name.startswith("ray::ServeReplica:")}
    return {name.split(".")[0]: process for name, process in found.items() if name.startswith(run_id)}
