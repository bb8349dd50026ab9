"""`rlhfless environments test`: exit codes, transcript, JSON, policies."""

import json
import sys

import pytest
from typer.testing import CliRunner

from rlhfless.bundled.model import build_random
from rlhfless.cli.main import app

GAME = '''
class Count:
    """Count to row["goal"]."""
    replayable = True

    def reset(self, seed: int, row: dict) -> str:
        self.goal, self.n = row.get("goal", 2), 0
        return f"Count to {self.goal}."

    def add(self, number: int) -> str:
        """Add a number."""
        self.n += number
        return f"now {self.n}"

    def done(self) -> bool:
        return self.n >= self.goal

    def reward(self) -> float:
        return float(self.n == self.goal)

class Broken(Count):
    def add(self, number: int) -> str:
        """Add a number."""
        return 1 / 0

class Words:
    def reset(self, seed: int, row: dict) -> str:
        return "7"

    def observe(self, text: str) -> str | None:
        return None if text == "7" else "8"
'''


@pytest.fixture
def command(tmp_path, monkeypatch):
    (tmp_path / "game.py").write_text(GAME)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Please:", "goal": 3}\n{"prompt": "Now:", "goal": 5}\n')
    script = [[{"name": "add", "arguments": {"number": 1}}, {"name": "add", "arguments": {"number": 2}}], ["I stop."]]
    (tmp_path / "script.jsonl").write_text("".join(json.dumps(turns) + "\n" for turns in script))
    monkeypatch.chdir(tmp_path)
    return lambda *options: CliRunner().invoke(app, ["environments", "test", *options])


def test_a_scripted_game_is_played_as_written(command):
    result = command(
        "game.py:Count", "--rows", "rows.jsonl", "--episodes", "2", "--policy", "scripted:script.jsonl", "--json"
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    first, second = found["episodes"]
    assert (first["status"], first["reward"], first["turns"], first["calls"][1]["answer"]) == ("done", 1.0, 2, "now 3")
    assert (second["status"], second["reward"], second["turns"]) == ("done", 0.0, 1)
    speakers = ["prompt", "model, turn 1", "tool", "model, turn 2", "last answer, which ends the episode"]
    assert [part["from"] for part in first["transcript"]] == speakers
    assert "Please:<|im_end|>\n<|im_start|>user\nCount to 3.<|im_end|>" in first["transcript"][0]["text"]
    assert found["tools"][0]["name"] == "add"
    assert found["faults"] == {}


def test_a_fault_ends_with_one_and_is_named(command):
    result = command("game.py:Broken", "--policy", "scripted:script.jsonl", "--episodes", "5")
    assert result.exit_code == 1
    assert "fault (3x): `add` raised ZeroDivisionError: division by zero (" in result.stdout
    assert "game.py:" in result.stdout
    assert "stopped after 3 failed episodes" in result.stdout
    assert '{"name": "add", "description": "Add a number."' in result.stdout


def test_the_random_policy_makes_calls_of_the_right_types(command):
    found = json.loads(command("game.py:Count", "--json").stdout)
    arguments = [call["arguments"] for episode in found["episodes"] for call in episode["calls"]]
    assert arguments
    assert all(isinstance(each["number"], int) for each in arguments)
    assert len(found["episodes"]) == 10


def test_a_model_without_a_chat_template_plays_a_game_of_text(command, tmp_path):
    build_random(tmp_path / "model", 0)
    result = command(
        "game.py:Words", "--model", "model", "--policy", "model", "--episodes", "1", "--turns", "2", "--json"
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["episodes"][0]["generated_tokens"] > 0
    assert "has no chat template" in command("game.py:Count", "--model", "model").stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["game.py"], "it has 3: Count, Broken, Words"),
        (["game.py:Count", "--policy", "clever"], "write random, scripted:FILE"),
        (["game.py:Count", "--policy", "model"], "model with --model"),
        (["game.py:Count", "--policy", "scripted:rows.jsonl"], "line 1: got"),
        (["game.py:Count", "--policy", "scripted:missing"], "No such file"),
        (["game.py:Count", "--rows", "missing.jsonl"], "no such file"),
    ],
)
def test_what_cannot_be_played_ends_with_two(command, options, words):
    result = command(*options)
    assert result.exit_code == 2
    assert words in result.stderr


AGENT = """
import json, os, sys, urllib.request

row = json.load(open(os.environ["RLHFLESS_TASK"]))["row"]
body = json.dumps({"messages": [{"role": "user", "content": sys.argv[1]}]}).encode()
key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, key)
with urllib.request.urlopen(request) as turn:
    said = json.load(turn)["choices"][0]["message"]["content"]
print(json.dumps({"reward": len(said) - row["goal"]}))
"""


def test_a_spec_names_a_program_that_is_played(command, tmp_path):
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "run.yaml").write_text(
        "model: {path: a/b}\nprompts: {path: rows.jsonl}\nsteps: 1\n"
        f"environment: {{type: process, command: [{sys.executable}, agent.py, '{{prompt}}'], folder: ., call_s: 60}}\n"
    )
    (tmp_path / "script.jsonl").write_text('["seven"]\n')
    options = ("--rows", "rows.jsonl", "--episodes", "2", "--policy", "scripted:script.jsonl", "--json")
    result = command("run.yaml", *options)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [each["reward"] for each in found["episodes"]] == [2.0, 0.0]
    assert "Please:<|im_end|>" in found["episodes"][0]["transcript"][0]["text"]


def test_a_loop_of_ones_own_is_played(command, tmp_path):
    (tmp_path / "loop.py").write_text(
        "async def play(task, model):\n"
        "    said = await model.turn(task.row['prompt'])\n"
        "    return {'reward': len(said.content), 'tokens': said.tokens}\n"
    )
    (tmp_path / "script.jsonl").write_text('["seven"]\n')
    result = command(
        "loop.py", "--rows", "rows.jsonl", "--episodes", "1", "--policy", "scripted:script.jsonl", "--json"
    )
    assert result.exit_code == 0, result.output
    (episode,) = json.loads(result.stdout)["episodes"]
    assert (episode["reward"], episode["parts"]) == (5.0, {"tokens": 6.0})


def test_a_spec_without_an_environment_is_refused(command, tmp_path):
    (tmp_path / "run.yaml").write_text(
        "model: {path: a/b}\nprompts: {path: rows.jsonl}\nsteps: 1\nrewards: [{type: exact_match}]\n"
    )
    result = command("run.yaml")
    assert result.exit_code == 2
    assert "environment: is missing" in result.output.replace("\n", " ")
