"""A folder outside the package with parts of one's own, as a user has it, and the tiny learner of its neighbour."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "learner"))

OWN = Path(__file__).with_name("own")
MODULES = [file.stem for file in OWN.glob("*.py")]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder as the current one, with run.yaml; what is imported from it is forgotten at the end."""
    folder = Path(shutil.copytree(OWN, tmp_path / "own"))
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield folder
    for name in MODULES:
        sys.modules.pop(name, None)
