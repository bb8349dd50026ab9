"""`rlhfless init`: recipes are valid specs that fit on their devices, and nothing is overwritten."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from rlhfless.cli.init import notes_of, recipes
from rlhfless.cli.main import app
from rlhfless.spec.load import load_spec


def typed(*words: str) -> Result:
    return CliRunner().invoke(app, ["init", *words])


@pytest.mark.parametrize("name", recipes())
def test_a_recipe_is_a_valid_spec_with_the_commands_that_run_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = typed(name, "--out", "run.yaml")
    assert result.exit_code == 0, result.output
    assert f"next: rlhfless plan run.yaml --devices {notes_of(recipes()[name])['devices']}" in result.stdout
    text = Path("run.yaml").read_text()
    assert "rlhfless run run.yaml" in text
    assert "# devices" not in text
    spec = load_spec(Path("run.yaml"))
    needs = {"math": "rlhfless[data,math]", "python": "rlhfless[reasoning-gym]"}
    assert all(needs[reward.type] in text for reward in spec.rewards if reward.type in needs)
    if spec.environment is not None and ":" in spec.environment.type:
        assert Path(spec.environment.type.partition(":")[0] + ".py").exists()


def test_nothing_is_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("guess.py").write_text("mine")
    result = typed("agent")
    assert result.exit_code == 2
    assert "guess.py is there already" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["guess.py"]
    assert Path("guess.py").read_text() == "mine"


def test_without_a_name_the_recipes_are_listed_and_a_wrong_name_is_refused() -> None:
    assert all(name in typed().stdout for name in recipes())
    result = typed("countdwon")
    assert result.exit_code == 2
    assert "did you mean `countdown`?" in result.stderr
