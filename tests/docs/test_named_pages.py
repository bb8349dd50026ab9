"""Paths and modules that docs, docstrings and files of settings name exist, and docs/metrics.md has every metric."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.repository import ROOT

FOLDERS = ("rlhfless", "functions", "sim", "benchmarks", "scripts", "examples", "recipes", "deploy", "tests")
CHART = ROOT / "deploy" / "helm" / "rlhfless"
SUFFIXES = "py|md|yaml|yml|sh|toml|js|sql|csv|txt|json|ipynb"
FILE = re.compile(rf"(?<![\w./:<>-])[a-zA-Z_][\w-]*(?:/[\w.-]+)*/[\w-]+\.(?:{SUFFIXES})(?![\w/])")
PAGE = re.compile(r"(?<![\w/.-])(?:docs|examples|recipes|deploy|scripts)/[\w./-]*[\w]")
MODULE = re.compile(r"(?<![\w./-])rlhfless(?:\.[a-z_]\w*)+")
BASES = ("", "rlhfless", "functions", "sim", "tests", "docs")
"""Folders that a text may leave out: `spec/run.py` is `rlhfless/spec/run.py`."""

ELSEWHERE = {
    "docs/about/performance-summary.md",
    "docs/fft/qwen3-8b-delta-sync-benchmark.md",
    "examples/configs/recipes/llm/performance",
}
"""Pages of other projects, each named with its repository."""

MADE = {"build/coverage.json"}

KEYS = {"rlhfless.table", "rlhfless.trace_version"}
"""Keys in the metadata of Parquet files."""


def written_files() -> Iterator[Path]:
    yield from (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"))
    for folder in FOLDERS:
        yield from (path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".js", ".yaml"))


def prose(file: Path) -> str:
    """The whole of a page or file of settings; of a Python file its docstrings."""
    text = file.read_text("utf-8")
    if file.suffix != ".py":
        return text
    nodes = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr))
    return "\n".join(n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str))


def path_exists(name: str, file: Path) -> bool:
    """Whether a path is one of this repository's, of an installed package's, or an example (`NAME`)."""
    if "NAME" in name or name in ELSEWHERE | MADE:
        return True
    package = importlib.util.find_spec(name.partition("/")[0]) if name.startswith(("vllm/", "ray/", "trans")) else None
    installed = package.submodule_search_locations if package else None
    roots = [*(ROOT / base for base in BASES), CHART, file.parent, *(Path(folder).parent for folder in installed or ())]
    return any((root / name).exists() for root in roots)


def module_exists(name: str) -> bool:
    """Whether a dotted name is a module, or begins with a module that has the rest as an attribute."""
    place, parts = ROOT / "rlhfless", name.split(".")[1:]
    while parts and (place / parts[0]).is_dir():
        place /= parts.pop(0)
    return not parts or (place / f"{parts[0]}.py").exists() or parts[0] in (place / "__init__.py").read_text("utf-8")


def test_paths_that_texts_name_exist() -> None:
    dead = {
        f"{file.relative_to(ROOT)}: {name}"
        for file in written_files()
        for text in [prose(file)]
        for name in {*FILE.findall(text), *(page.rstrip(".") for page in PAGE.findall(text))}
        if not path_exists(name, file)
    }
    assert dead == set()


def test_modules_that_texts_name_exist() -> None:
    dead = {
        f"{file.relative_to(ROOT)}: {name}"
        for file in written_files()
        if "tests" not in file.parts and "deploy" not in file.parts
        for name in MODULE.findall(prose(file))
        if name not in KEYS and not module_exists(name)
    }
    assert dead == set()


@pytest.mark.parametrize("script", ["metrics_reference.py", "recipes_table.py"])
def test_a_table_is_up_to_date(script: str) -> None:
    result = subprocess.run([sys.executable, ROOT / "scripts" / script, "--check"], timeout=240, check=False)
    assert result.returncode == 0, f"run scripts/{script}"
