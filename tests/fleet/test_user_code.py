"""The modules that a spec names are found and copied with their neighbouring modules, and nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rlhfless.fleet import each_node as user_code
from rlhfless.fleet.each_node import CodeNotThere, gather_modules, import_faults, node_faults, targets
from rlhfless.spec import RunSpec


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create the current folder with a module, a package, and many other files."""
    folder = tmp_path / "mine"
    (folder / "travelling_package").mkdir(parents=True)
    (folder / "travelling_reward.py").write_text(
        "from travelling_package.words import SCORE\ndef score(**_): return SCORE"
    )
    (folder / "travelling_package" / "__init__.py").write_text("")
    (folder / "travelling_package" / "words.py").write_text("SCORE = 0.5")
    for name in ("travelling_package/table.json", "secrets.yaml", "prompts.txt", "model.pt"):
        (folder / name).write_text("{}")
    for name in (".git/config.json", "venv/lib/site.py", "__pycache__/x.py", "model/model.safetensors"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    (folder / "venv" / "pyvenv.cfg").write_text("")
    (folder / "large.py").write_bytes(b" " * (user_code.MOST_FILE_BYTES + 1))
    monkeypatch.syspath_prepend(folder)
    return folder


def spec(*rewards: str) -> RunSpec:
    named = [{"type": "python", "name": f"r{i}", "target": target} for i, target in enumerate(rewards)]
    return RunSpec.model_validate(
        {"model": {"path": "m"}, "prompts": {"path": "p.jsonl"}, "rewards": [{"type": "exact_match"}, *named]}
    )


def test_the_modules_travel_with_what_lies_beside_them(folder: Path, tmp_path: Path) -> None:
    run = spec("travelling_reward:score", "travelling_package.words:SCORE.real")
    assert targets(run) == ("travelling_package.words:SCORE.real", "travelling_reward:score")
    code = gather_modules(run, tmp_path / "run")
    assert code is not None
    assert code.stat().st_mode & 0o7777 == 0o700
    assert sorted(str(file.relative_to(code)) for file in code.rglob("*") if file.is_file()) == [
        "travelling_package/__init__.py",
        "travelling_package/words.py",
        "travelling_reward.py",
    ]


def test_what_is_installed_stays(tmp_path: Path) -> None:
    assert targets(spec()) == ()
    assert gather_modules(spec("json:dumps", "numpy:mean"), tmp_path) is None


def test_too_much_is_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_code, "MOST_FILES", 2)
    with pytest.raises(CodeNotThere, match=r"mine.*has more than 2 files"):
        gather_modules(spec("travelling_reward:score"), tmp_path / "run")


def test_what_a_node_cannot_import_is_said(folder: Path) -> None:
    assert import_faults(["travelling_reward:score"]) is None
    assert "there is no module 'not_there'" in str(import_faults(["travelling_reward:score", "not_there:score"]))


def test_what_another_user_has_changed_on_a_node_is_not_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = spec("travelling_reward:score")
    code = gather_modules(run, tmp_path / "run")
    assert code is not None
    sent = user_code._digests(code)
    unpacked = tmp_path / "working_dir_files" / "package"
    shutil.copytree(code, unpacked)
    (unpacked / "__pycache__").mkdir()
    monkeypatch.chdir(unpacked)
    assert node_faults(targets(run), sent) is None
    assert not (unpacked / "__pycache__").exists()
    for name in ("travelling_reward.py", "added.py"):
        before = (unpacked / name).read_bytes() if (unpacked / name).exists() else None
        (unpacked / name).write_text("import os; os.abort()")
        assert f"has changed what Ray unpacked in {unpacked}: {name}" in str(node_faults(targets(run), sent))
        (unpacked / name).unlink() if before is None else (unpacked / name).write_bytes(before)
