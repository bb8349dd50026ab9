"""`python -m rlhfless` is the command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from rlhfless import __version__


def test_the_package_runs_as_the_command() -> None:
    def output(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "rlhfless", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert output("--version").stdout == f"rlhfless {__version__}\n"
    usage = output("runs", "--help").stdout
    assert "Usage: python -m rlhfless runs" in usage
    wrong = output("rnu")
    assert wrong.returncode == 2
    assert "__main__" not in wrong.stderr + usage


def test_modules_of_the_specs_folder_come_before_those_of_the_current_folder(
    tmp_path: Path, model_folder: Path
) -> None:
    """Python puts the current folder first for `-m`: a module there was taken in place of that beside run.yaml."""
    project, current = tmp_path / "project", tmp_path / "current"
    for folder, value in ((project, 1.0), (current, 99.0)):
        folder.mkdir()
        (folder / "own_rewards.py").write_text(f"def score(response): return {value}\n")
    (current / "numpy.py").write_text("raise SystemExit('a file of the user hid an installed package')\n")
    (project / "run.yaml").write_text(
        f"model: {{path: {model_folder}}}\n"
        "prompts: {path: p.jsonl}\nrewards: [{type: python, name: own, target: 'own_rewards:score'}]\n"
    )
    (project / "samples.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    command = [sys.executable, "-m", "rlhfless", "rewards", "test", "../project/run.yaml", "../project/samples.jsonl"]
    done = subprocess.run([*command, "--json"], cwd=current, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["samples"][0]["parts"] == {"own": 1.0}
