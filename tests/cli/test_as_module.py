"""`python -m rlhfless` is the command."""

from __future__ import annotations

import subprocess
import sys

from rlhfless import __version__


def test_the_package_runs_as_the_command() -> None:
    def output(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "rlhfless", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert output("--version").stdout == f"rlhfless {__version__}\n"
    usage = output("runs", "--help").stdout
    assert "Usage: python -m rlhfless runs" in usage
    wrong = output("rnu")
    assert wrong.returncode == 2
    assert "__main__" not in wrong.stderr + usage
