"""`rlhfless trace samples`: what was drawn, as rewards saw it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fakes.builders import drawn
from rlhfless.cli import main
from rlhfless.records import Prompt, Score
from rlhfless.records.traces import TraceMeta, TraceWriter

THOUGHT = "<think>8 x 7 = 56</think><answer>56</answer>"


def record(folder: Path, record_tokens: bool = True) -> Path:
    with TraceWriter(folder / "trace", TraceMeta("demo", 1, {}, {}, {}), record_tokens) as writer:
        for prompt_id, text in (("sum-1", "<|user|>1 + 1?\x1b[2J"), ("product", "<|user|>8 x 7?")):
            writer.add_prompt(Prompt(prompt_id, (1, 2), text, {"answer": "56"}))
        for step in (1, 2):
            writer.add_rollout(step, drawn("sum-1", 0, [1, 2], text=f"two at {step}"), Score(0.0, {"math": 0.0}), 2)
            failed = Score(1.0, {"format": 1.0}, {"judge": "no answer in 30 s"})
            writer.add_rollout(step, drawn("product", 1, [3], text=THOUGHT), failed, 2)
    return folder


def run(*arguments: str) -> str:
    result = CliRunner().invoke(main.app, ["trace", "samples", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def objects(*arguments: str) -> list[tuple[int, str]]:
    lines = [json.loads(line) for line in run(*arguments, "--json").splitlines()]
    return [(one["step"], one["prompt_id"]) for one in lines]


def test_prompts_and_responses_are_printed_with_their_special_tokens(tmp_path: Path) -> None:
    output = run(str(record(tmp_path)), "--step", "2")
    assert "step 2, prompt product\n<|user|>8 x 7?\n" in output
    assert f"\n{THOUGHT}\n" in output
    assert "sample 1: reward 1.000 (format 1.000), 1 tokens, stop\njudge failed: no answer in 30 s\n" in output
    assert "\\x1b[2J" in output, "a response may not steer the terminal"
    assert "step 1" not in output


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], [(1, "product"), (1, "sum-1"), (2, "product"), (2, "sum-1")]),
        (["--prompt", "sum"], [(1, "sum-1"), (2, "sum-1")]),
        (["--search", "<THINK>"], [(1, "product"), (2, "product")]),
        (["--search", "1 + 1"], [(1, "sum-1"), (2, "sum-1")]),
        (["--search", "two at 2"], [(2, "sum-1")]),
        (["--failed", "--step", "1"], [(1, "product")]),
        (["--limit", "1"], [(1, "product")]),
        (["--step", "9"], []),
    ],
)
def test_samples_are_filtered(tmp_path: Path, options: list[str], expected: list[tuple[int, str]]) -> None:
    assert objects(str(record(tmp_path)), *options) == expected


def test_json_has_what_rewards_got(tmp_path: Path) -> None:
    line = json.loads(run(str(record(tmp_path)), "--search", "<think>", "--limit", "1", "--json"))
    assert line["response"] == THOUGHT
    assert line["columns"] == {"answer": "56"}
    assert (line["rewards"], line["failures"]) == ({"format": 1.0}, {"judge": "no answer in 30 s"})


def test_a_trace_without_texts_names_the_key(tmp_path: Path) -> None:
    result = CliRunner().invoke(main.app, ["trace", "samples", str(record(tmp_path, record_tokens=False))])
    assert result.exit_code == 2
    assert "logging.record_tokens" in result.output
