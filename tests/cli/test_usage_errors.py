"""Usage errors: whole lines, without a box that breaks paths."""

from __future__ import annotations

import subprocess
import sys

import pytest

LONG = "/nowhere/" + "a-very-long-folder/" * 9


@pytest.mark.parametrize(
    "arguments",
    [
        ["keys", "put", "name", "--from", f"{LONG}secret.txt"],
        ["simulate", "--replay", LONG, f"{LONG}scenario.yaml"],
        ["validate", f"{LONG}run.yaml"],
    ],
)
def test_a_path_in_an_error_is_whole(arguments: list[str]) -> None:
    code = "from rlhfless.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert any(LONG.rstrip("/") in line for line in done.stderr.splitlines()), done.stderr
    assert "\u2502" not in done.stderr
