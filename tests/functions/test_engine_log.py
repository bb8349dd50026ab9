"""The file of an engine's log: in the run's folder where that is, else in the user's own on the actor's machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhfless.functions.generation.engine_log import log_file


def test_in_the_runs_folder(tmp_path: Path) -> None:
    file = log_file(str(tmp_path), "demo-1", "demo-1-generation-3")
    assert file == tmp_path / "engines" / "generation-3.log"
    assert file.parent.is_dir()


def test_on_a_machine_without_the_runs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHFLESS_HOME", str(tmp_path / "home"))
    file = log_file(str(tmp_path / "elsewhere" / "demo-1"), "demo-1", "demo-1-generation-3")
    assert file == tmp_path / "home" / "logs" / "demo-1" / "generation-3.log"
    assert file.parent.is_dir()
    assert not (tmp_path / "elsewhere").exists()
