"""Paths of this repository, and its pinned lists."""

from __future__ import annotations

from pathlib import Path

from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
EXAMPLES = ROOT / "examples"
SCENARIOS = EXAMPLES / "scenarios"


REQUIREMENTS = ROOT / "requirements"


def pinned(name: str) -> dict[str, str]:
    """Return the version of each distribution that a list names."""
    lines = [line.strip() for line in (REQUIREMENTS / name).read_text().splitlines()]
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    assert all(len(pair) == 2 for pair in pairs), f"{name} has a line that pins nothing"
    return {canonicalize_name(package): version for package, version in pairs}
