"""Prompt files of reasoning-gym's tasks, and their scorers as a reward. `pip install 'rlhfless[reasoning-gym]'` first:
without it all but one test is skipped."""

import importlib.util
import json

import pytest
import yaml
from typer.testing import CliRunner

from rlhfless.cli.main import app
from rlhfless.rewards.reasoning_gym import entry_of, score
from rlhfless.spec import RunSpec

INSTALLED = importlib.util.find_spec("reasoning_gym") is not None
needs_it = pytest.mark.skipif(not INSTALLED, reason="the package reasoning-gym is not installed")


def made(*options):
    return CliRunner().invoke(app, ["prompts", "reasoning-gym", *map(str, options)])


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.skipif(INSTALLED, reason="the package reasoning-gym is installed")
def test_the_command_says_what_to_install(tmp_path):
    result = made("countdown", "--out", tmp_path / "x")
    assert result.exit_code == 2
    assert "pip install 'rlhfless[reasoning-gym]'" in result.output
    assert not (tmp_path / "x").exists()


@needs_it
def test_prompts_by_hand_and_their_scores(tmp_path):
    result = made("countdown", "--out", tmp_path, "--rows", 5, "--held-out", 2, "--set", "max_numbers=4", "--seed", 3)
    assert result.exit_code == 0, result.output
    train, held_out = rows_of(tmp_path / "train.jsonl"), rows_of(tmp_path / "heldout.jsonl")
    assert (len(train), len(held_out)) == (5, 2)
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
    for row in train:
        assert "between <answer> and </answer>" in row["prompt"]
        assert len(entry_of(row["entry"])["metadata"]["numbers"]) <= 4
        assert (
            score(f"<think>no</think> <answer>1</answer> or <answer> {row['answer']} </answer>.", row["entry"]) == 1.0
        )
        assert score(f"<think>1</think>\n{row['answer']}\n", row["entry"]) == 1.0
        assert score(f"I say {row['answer']}", row["entry"]) < 1.0
        assert score("<answer>0</answer>", row["entry"]) < 0.1
    section = yaml.safe_load(result.output)
    spec = RunSpec.model_validate({"model": {"path": "a/b"}, "steps": 1, **section})
    assert spec.rewards[0].target == "rlhfless.rewards.reasoning_gym:score"
    again = made(
        "countdown", "--out", tmp_path / "again", "--rows", 5, "--held-out", 2, "--set", "max_numbers=4", "--seed", 3
    )
    assert again.exit_code == 0
    assert rows_of(tmp_path / "again" / "train.jsonl") == train


@needs_it
@pytest.mark.parametrize("task", ["arc_agi", "rush_hour", "word_sorting", "sudoku", "graph_color", "game_of_life"])
def test_entries_are_scored_from_a_file_as_in_memory(task, tmp_path):
    """Some have tuples, whose scorers would fail on the lists of JSON."""
    import reasoning_gym

    assert made(task, "--out", tmp_path, "--rows", 3, "--held-out", 0, "--plain").exit_code == 0
    entries = reasoning_gym.create_dataset(task, seed=0, size=3)
    for row, entry in zip(rows_of(tmp_path / "train.jsonl"), entries, strict=True):
        assert row["prompt"] == entry["question"]
        assert entry_of(row["entry"]) == entry
        for answer in (row["answer"], "nonsense"):
            assert score(f"<answer>{answer}</answer>", row["entry"]) == entries.score_answer(answer, entry)


@needs_it
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["countdwn"], "did you mean `countdown`?"),
        (["composite"], "Must specify at least one dataset"),
        (["knights_knaves"], "hold objects that a file cannot"),
        (["countdown", "--set", "most=3"], "unexpected keyword argument 'most'"),
        (["countdown", "--set", "most"], "got 'most'"),
    ],
)
def test_what_cannot_be_made_is_refused(options, words, tmp_path):
    result = made(*options, "--out", tmp_path)
    assert result.exit_code == 2
    assert words in result.output


def test_an_entry_that_is_no_literal_is_refused():
    with pytest.raises(ValueError, match="malformed"):
        entry_of("__import__('os').getcwd()")
