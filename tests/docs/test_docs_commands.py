"""Every `rlhfless ...` of README, CONTRIBUTING, docs and examples names a command and options that there are."""

from __future__ import annotations

import re

import pytest
import typer

from fakes.repository import ROOT
from rlhfless.cli.main import app

FILES = ("*.md", "docs/*.md", "examples/*.yaml", "recipes/*.md", "recipes/*.yaml")
PAGES = [page for pattern in FILES for page in sorted(ROOT.glob(pattern))]
# A line of a code block (perhaps behind `$` or a comment's `#`), or text between back quotes.
COMMAND = re.compile(r"^(?:\s*#)?[ $]*rlhfless +([a-z][^#`|>\n]*)|`rlhfless +([a-z][^`#|>]*)`", re.MULTILINE)


def commands() -> list[str]:
    text = "\n".join(page.read_text("utf-8").replace("\\\n", " ") for page in PAGES)
    return sorted({" ".join((line or quoted).split()) for line, quoted in COMMAND.findall(text)})


@pytest.mark.parametrize("line", commands())
def test_the_command_and_its_options_exist(line: str) -> None:
    command, words = typer.main.get_command(app), line.split()
    while words and hasattr(command, "commands"):
        assert words[0] in command.commands
        command = command.commands[words.pop(0)]
    options = {option for parameter in command.params for option in parameter.opts}
    assert {word.split("=")[0] for word in words if word.startswith("--")} <= options


def test_targets_of_make_exist() -> None:
    text = "\n".join(page.read_text("utf-8") for page in PAGES)
    named = re.findall(r"(?:^ {4}|`)make ([a-z][a-z-]*)", text, re.MULTILINE)
    assert named
    assert set(named) <= set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))


def test_commands_are_found() -> None:
    assert {"up", "run run.yaml", "runs create run.yaml --watch"} <= set(commands())
