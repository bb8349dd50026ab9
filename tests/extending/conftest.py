"""A folder outside the package with parts of one's own, as a user has it, and the tiny learner of its neighbour."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlhfless.spec import RunSpec
from rlhfless.spec.load import load_spec

OWN = Path(__file__).with_name("own")
MINIMAL = "model: {path: m}\nprompts: {path: p}\nrewards: [{type: exact_match}]\n"
MODULES = [file.stem for file in OWN.glob("*.py")] + ["second_policy.kind", "second_policy.worker", "second_policy"]


@pytest.fixture
def own_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder as the one that a user starts in, with nothing beside its files."""
    monkeypatch.chdir(OWN)
    monkeypatch.syspath_prepend(OWN)


@pytest.fixture
def load_with(tmp_path: Path, own_folder: None) -> Callable[[str, str], RunSpec]:
    """Loads a spec that goes on with the lines before a value, and the value."""

    def load(before: str, value: str) -> RunSpec:
        path = tmp_path / "run.yaml"
        path.write_text(f"{MINIMAL}{before}{value}\n")
        return load_spec(path)

    return load


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder as the current one, with run.yaml; what is imported from it is forgotten at the end."""
    folder = Path(shutil.copytree(OWN, tmp_path / "own"))
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield folder
    for name in MODULES:
        sys.modules.pop(name, None)
