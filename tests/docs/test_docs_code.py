"""The examples of the docs, as someone who copies them would find them: names are imported, and files can be read."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from fakes.repository import ROOT
from rlhfless.sim.scenarios import Scenario

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RUFF = shutil.which("ruff") or str(Path(sys.executable).with_name("ruff"))
DEFINES = ("extending.md", "rewards.md")
"""Pages whose examples define parts: they are executed. The others call a service, or read a run."""


def blocks(language: str) -> list[Any]:
    found = []
    for page in PAGES:
        text = page.read_text("utf-8")
        for match in re.finditer(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            line = text.count("\n", 0, match.start()) + 1
            found.append(pytest.param(page.name, match[1], id=f"{page.name}:{line}"))
    return found


def is_excerpt(code: str) -> bool:
    """A method alone, which tests/extending/test_documented.py finds in a file that runs."""
    return code.startswith(" ")


@pytest.mark.parametrize(("page", "code"), blocks("python"))
def test_python_is_whole(page: str, code: str) -> None:
    """Every name is defined or imported, and definitions can be executed."""
    if is_excerpt(code):
        compile(f"class Excerpt:\n{code}", page, "exec")
        return
    lint = [RUFF, "check", "--isolated", "--select", "F821", "--output-format", "concise", "-"]
    done = subprocess.run(lint, input=code, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    if page in DEFINES:
        exec(compile(code, page, "exec"), {"__name__": "example"})


@pytest.mark.parametrize(("page", "text"), blocks("yaml"))
def test_yaml_can_be_read(page: str, text: str) -> None:
    found = yaml.safe_load(text)
    assert isinstance(found, dict | list)
    if page == "simulate.md" and "policies" in found and "cluster" in found:
        Scenario.model_validate(found)


@pytest.mark.parametrize(
    "code", ["advantages: FloatArray = None", "class A(OwnAlgorithmSpec): ...", "rlhfless.Client()"]
)
def test_what_lacks_its_import_would_be_found(code: str) -> None:
    with pytest.raises(AssertionError, match="Undefined name"):
        test_python_is_whole("extending.md", code)


def test_there_are_examples() -> None:
    assert len(blocks("python")) >= 9
    assert sum(is_excerpt(block.values[1]) for block in blocks("python")) <= 1


@pytest.mark.parametrize("name", ["RLHFLESS_URL", "RLHFLESS_API_KEY", "--url", "Client("])
def test_the_address_of_a_service_is_documented(name: str) -> None:
    assert name in (ROOT / "docs" / "control.md").read_text("utf-8")
