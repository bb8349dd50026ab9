"""Every page that the code names exists, and docs/metrics.md has every metric."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from fakes.places import ROOT

PATH = re.compile(r"(?<![\w/.-])(?:docs|examples|deploy|scripts)/[\w./-]*[\w]")
KEPT_ELSEWHERE = {"docs/about/performance-summary.md", "docs/fft/qwen3-8b-delta-sync-benchmark.md"}
"""Pages of other projects, each named with its repository."""


def named_in(folder: str) -> dict[str, Path]:
    """The paths of this repository that texts in the files of a folder name, each with one file that does."""
    files = (path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".js", ".yaml"))
    return {name.rstrip("."): file for file in files for name in PATH.findall(file.read_text("utf-8"))}


def test_pages_and_files_that_the_code_names_exist() -> None:
    named = {
        name: file for folder in ("rlhfless", "functions", "sim", "examples") for name, file in named_in(folder).items()
    }
    assert {"docs/metrics.md", "docs/extending.md", "docs/faults.md"} <= named.keys()
    dead = {name: file for name, file in named.items() if name not in KEPT_ELSEWHERE and not (ROOT / name).exists()}
    assert dead == {}


def test_the_list_of_metrics_is_up_to_date() -> None:
    script = ROOT / "scripts" / "metrics_reference.py"
    result = subprocess.run([sys.executable, script, "--check"], timeout=120, check=False)
    assert result.returncode == 0, "run scripts/metrics_reference.py"
