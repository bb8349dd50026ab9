"""The command line as a process, also as another user, in a user's environment, or with a Ray that it joins."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path

import psutil
import pytest
import yaml

from fakes.live_runs import spec_values
from fakes.repository import pinned

COMMAND = [str(Path(sys.executable).with_name("rlhfless"))]


def write_spec(assets: Path, folder: Path, **changes: object) -> Path:
    path = folder / "spec.yaml"
    values = spec_values(assets, **{"algorithm": {}, "weights": {}, "output": str(folder / "runs")} | changes)
    path.write_text(yaml.safe_dump(values))
    return path


def start(spec: Path, log: Path, *options: str, command: Sequence[str] = COMMAND) -> subprocess.Popen[bytes]:
    """Start the command in its own session, as a terminal would. Resets SIGINT, which a shell ignores for background
    processes."""
    with log.open("wb") as output:
        return subprocess.Popen(
            [*command, "run", str(spec), *options],
            cwd=spec.parent,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )


def wait_for(text: str, log: Path, process: subprocess.Popen[bytes], timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while text not in log.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < end, f"{text!r} did not come within {timeout_s:.0f} s:\n{log.read_text()}"
        time.sleep(0.2)


def offspring(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def assert_nothing_is_left(left: list[psutil.Process], runs: Path) -> None:
    _, alive = psutil.wait_procs(left, timeout=60)
    assert not [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]
    assert not [folder for run in runs.iterdir() for folder in Path("/dev/shm").glob(f"rlhfless-{run.name}*")]
    assert not [run for run in runs.iterdir() if (run / "ray").exists()]


USER = 65534

# In a separate mount namespace, /root is overlaid by a copy that every user may enter. Changes there are discarded.
_SCRIPT = f"""
set -e
mount -t tmpfs tmpfs /mnt
mkdir /mnt/upper /mnt/work
mount -t overlay overlay -o lowerdir=/root,upperdir=/mnt/upper,workdir=/mnt/work /root
chmod 755 /root
exec setpriv --reuid={USER} --regid={USER} --clear-groups -- "$@"
"""


def as_other_user(*command: str) -> list[str]:
    """Return the command line for another user; unchanged if the tests do not run as root."""
    if os.getuid() != 0:
        return list(command)
    if not _possible():
        pytest.skip("root needs unshare, setpriv and CAP_SYS_ADMIN to start something as another user")
    return _wrapped(command)


def _wrapped(command: tuple[str, ...]) -> list[str]:
    return ["unshare", "--mount", "sh", "-c", _SCRIPT, "sh", *command]


@cache
def _possible() -> bool:
    if shutil.which("unshare") is None or shutil.which("setpriv") is None:
        return False
    return subprocess.run(_wrapped((sys.executable, "-c", "")), capture_output=True, timeout=60).returncode == 0


# -- a Ray with three devices that outlives the drivers that join it


@contextlib.contextmanager
def started(cores: int = 3, **settings: str) -> Iterator[str]:
    """Start Ray, and yield its address. `settings`: its environment variables.

    With more cores than the machine has, an actor on a device without a core of its own is simply not pinned.
    """
    # Any other private Ray that starts replaces the token in the user's home.
    settings |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    with pytest.MonkeyPatch.context() as environment:
        for name, value in settings.items():
            environment.setenv(name, value)
        with _head(cores) as address:
            yield address


@contextlib.contextmanager
def _head(cores: int) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Separate from the folder of a private Ray that other tests may be running. Ray's sockets need a short path.
    folder = f"/tmp/rlhfless-ray-{port}"
    ray = str(Path(sys.executable).with_name("ray"))
    command = [ray, "start", "--head", "--node-ip-address=127.0.0.1", f"--port={port}"]
    try:
        subprocess.run(
            [*command, "--include-dashboard=false", f"--num-cpus={cores}", f"--temp-dir={folder}"],
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


def add_node(address: str, place: str) -> None:
    """Add a node with one core to a Ray. `place`: its address, such as 127.0.0.2."""
    ray = str(Path(sys.executable).with_name("ray"))
    command = [ray, "start", f"--address={address}", f"--node-ip-address={place}", "--num-cpus=1"]
    subprocess.run(command, check=True, timeout=240, capture_output=True)


def replicas(run_id: str) -> dict[str, psutil.Process]:
    """Return the run's replica processes, by name."""
    names = {process: " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])}
    found = {name.split(":")[3]: process for process, name in names.items() if name.startswith("ray::ServeReplica:")}
    return {name.split(".")[0]: process for name, process in found.items() if name.startswith(run_id)}


# -- the environment that a user installs: the pinned list without packages that only checks and tests need


def user_environment(folder: Path) -> Path:
    """Create the environment from links into the current one, and return its command `rlhfless`."""
    venv.EnvBuilder(symlinks=True).create(folder)
    (packages,) = (folder / "lib").glob("python3*/site-packages")
    hidden = {place for name in pinned("test.txt") for place in _places(name)}
    for place in Path(sysconfig.get_path("purelib")).iterdir():
        if place.name not in hidden:
            (packages / place.name).symlink_to(place)
    command = folder / "bin" / "rlhfless"
    command.write_text(f"#!{folder}/bin/python\nfrom rlhfless.cli.main import main\nmain()\n")
    command.chmod(0o755)
    return command


def _places(name: str) -> set[str]:
    """Return the folders and files of a distribution in site-packages."""
    return {file.parts[0] for file in metadata.files(name) or () if file.parts[0] not in ("..", "__pycache__")}
