"""The command line, as a process."""

from __future__ import annotations
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
import psutil
import pytest
import yaml
from fakes.CONF import spec_values
from transformers import AutoModelForCausalLM, AutoTokenizer
from rlhfless.records import FunctionName
from rlhfless.records.traces import read_trace


COMMAND = [str(Path(sys.executable).with_name("rlhfless"))]


def write_spec(assets: Path, folder: Path, **changes: object) -> Path:
    path = folder / "spec.yaml"
    values = spec_values(assets, **{"algorithm": {}, "weights": {}, "output": str(folder / "runs")} | changes)
    path.write_text(yaml.safe_dump(values))
    return path


def start(spec: Path, log: Path, *options: str) -> subprocess.Popen[bytes]:
    """The command in a session of its own, as a terminal would start it: with Ctrl-C not ignored, which a shell
    does to what it starts in the background."""
    with log.open("wb") as output:
        return subprocess.Popen(
            [*COMMAND, "run", str(spec), *options],
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
