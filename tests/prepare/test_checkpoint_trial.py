"""A checkpoint's files and room for it are tried before anything starts."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from rlhfless.prepare import machine
from rlhfless.prepare.machine import checkpoint_problems
from rlhfless.prepare.model import load_policy
from rlhfless.spec import RunSpec

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def spec(model_folder: Path, tmp_path: Path) -> Any:
    folder = shutil.copytree(model_folder, tmp_path / "copied")

    def made(**changes: Any) -> RunSpec:
        values = {
            "model": {"path": str(folder)},
            "prompts": {"path": str(tmp_path / "rows.jsonl")},
            "rewards": [{"type": "exact_match"}],
            "output": str(tmp_path / "runs"),
        }
        return RunSpec.model_validate(values | changes)

    return made


def problems(spec: RunSpec) -> list[str]:
    return [str(problem) for problem in checkpoint_problems(spec, load_policy(spec.model))]


def test_a_model_whose_files_transformers_does_not_write_is_right(spec: Any) -> None:
    folder = Path(spec().model.path)
    (folder / "generation_config.json").write_text('{"temperature": 0.7}')
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"top_k": 5}))
    assert problems(spec()) == []


def test_a_model_whose_files_cannot_be_read_is_refused_by_file(spec: Any) -> None:
    (Path(spec().model.path) / "generation_config.json").write_text('{"num_return_sequences": 4}')
    (problem,) = problems(spec())
    assert "model.path" in problem
    assert "generation_config.json" in problem
    assert "correct that file" in problem


@pytest.mark.parametrize("url", [None, "folder", "s3://bucket/runs"])
def test_room_for_a_checkpoint(spec: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str | None) -> None:
    asked = []

    def usage(path: Path) -> Usage:
        asked.append(path)
        return Usage(2000, 1000, 1000)

    monkeypatch.setattr(machine.shutil, "disk_usage", usage)
    if url is None:
        (problem,) = problems(spec())
        assert "output" in problem
    elif url == "folder":
        (problem,) = problems(spec(checkpoint={"url": str(tmp_path / "kept" / "here")}))
        assert "checkpoint.url" in problem
    else:
        assert problems(spec(checkpoint={"url": url})) == []
        return
    assert asked == [tmp_path]
    assert "has 9.31e-07 GiB free, and a checkpoint takes" in problem
