"""Output that nobody reads any more: `| head`, `| less` and q, a closed terminal."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fakes.repository import SCENARIOS
from rlhfless.telemetry.console import Console

# A console whose pipe is closed after its first line, in a process of its own.
PROGRAM = """
import logging, sys, time
from rlhfless.telemetry.console import Console

logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(message)s")
console = Console("lines", "run r", 3)
sys.stdin.readline()
for step in (1, 2, 3):
    console.emit(step, {"step_s": 1.0, "reward_mean": 0.5})
    with console.waiting("saving"):
        pass
console.show("the end")
console.close()
print("and more")
"""


def run_without_reader(*command: str, first: str = "") -> tuple[int, str]:
    """Exit code and stderr of a command whose standard output is closed after its first line."""
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stderr is not None
    if first:
        assert process.stdout.readline().startswith(first)
    process.stdout.close()
    process.stdin.write("go\n")
    process.stdin.close()
    errors = process.stderr.read()
    return process.wait(timeout=60), errors


def test_a_run_goes_on_without_a_reader_and_says_so_once() -> None:
    code, errors = run_without_reader(sys.executable, "-c", PROGRAM, first="run r")
    assert code == 0
    assert errors.splitlines() == [
        "INFO the output is closed ([Errno 32] Broken pipe); from here on progress is only logged"
    ]


@pytest.mark.parametrize(
    ("words", "first"),
    [
        (["simulate", str(SCENARIOS / "gsm8k-3b-h100.yaml"), "--help"], ""),
        (["validate", "--help"], ""),
        (["devices"], ""),
        (["runs", "--help"], ""),
    ],
)
def test_other_commands_end_without_a_word(words: list[str], first: str) -> None:
    command = str(Path(sys.executable).with_name("rlhfless"))
    code, errors = run_without_reader(command, *words, first=first)
    assert (code, errors) == (141, "")


class Gone(io.StringIO):
    """A terminal that was closed."""

    def write(self, _: str) -> int:
        raise OSError(5, "Input/output error")


@pytest.mark.parametrize("mode", ["lines", "live"])
def test_a_terminal_that_is_gone_stops_nothing(mode: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "rlhfless"):
        console = Console(mode, "run r", 3, stream=Gone())
        console.emit(1, {"step_s": 1.0})
        console.show("text")
        console.close()
    assert console.closed_by_reader
    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_a_closed_file_stops_nothing_either() -> None:
    stream = io.StringIO()
    console = Console("lines", "run r", 3, stream=stream)
    stream.close()
    console.show("text")
    assert console.closed_by_reader
