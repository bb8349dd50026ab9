"""Orchestrator and fleet read the time from the run's event loop only, so that they also run on a simulated clock."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from fakes.repository import ROOT

PACKAGES = ("rlhfless/orchestrator", "rlhfless/fleet")
OTHER_CLOCKS = ("time", "datetime")
MAY_SLEEP = ("cluster.py", "leave_node.py", "private_ray.py")
"""Files whose code runs in threads or other processes, where it may wait with `time.sleep`."""


def clocks_in(source: str) -> Iterator[str]:
    """Yield the uses of clocks other than the run's in a source text."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in OTHER_CLOCKS:
            yield f"from {node.module} import {', '.join(each.name for each in node.names)}"
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in OTHER_CLOCKS:
            yield ast.unparse(node)


def test_no_other_clock_is_read() -> None:
    used: dict[Path, list[str]] = {}
    for package in PACKAGES:
        for file in sorted((ROOT / package).glob("**/*.py")):
            allowed = {"time.sleep"} if file.name in MAY_SLEEP else set()
            if others := [use for use in clocks_in(file.read_text("utf-8")) if use not in allowed]:
                used[file] = others
    assert not used, "read unix_s or monotonic_s of rlhfless.util.clock instead"


def test_uses_are_found() -> None:
    source = "import time\nfrom time import monotonic\nfrom datetime import datetime\nf(clock=time.time)\ntime.sleep(1)"
    imports = ["from datetime import datetime", "from time import monotonic"]
    assert sorted(clocks_in(source)) == [*imports, "time.sleep", "time.time"]
