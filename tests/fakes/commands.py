"""The command line, as a process."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import yaml

from fakes.live_runs import spec_values

COMMAND = [str(Path(sys.executable).with_name("rlhfless"))]


def write_spec(assets: Path, folder: Path, **changes: object) -> Path:
    path = folder / "spec.yaml"
    values = spec_values(assets, **{"algorithm": {}, "weights": {}, "output": str(folder / "runs")} | changes)
    path.write_text(yaml.safe_dump(values))
    return path


def start(spec: Path, log: Path, *options: str, command: Sequence[str] = COMMAND) -> subprocess.Popen[bytes]:
    """The command in a session of its own, as a terminal would start it: with Ctrl-C not ignored, which a shell
    does to what it starts in the background."""
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
