"""The command line as a process: run as this user, or as nobody if the tests run as root."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import psutil
import pytest
import yaml

from fakes.live_runs import spec_values

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
