"""The model of a judge with a `path`, checked before the run."""

from __future__ import annotations

import json
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest

from fakes.repository import ROOT
from rlhfless.prepare.rewards import reward_problems
from rlhfless.records import Prompt
from rlhfless.spec import RunSpec

PROMPTS = [Prompt("a", (), "2 + 2?", {"question": "2 + 2?"}, where="train.jsonl:1")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("judge")
    runpy.run_path(str(ROOT / "examples/judges/tiny_judge.py"))["write"](str(folder))
    return folder


@pytest.fixture
def own(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "own"))


def problems(path: Path, **judge: Any) -> list[str]:
    judge = {"type": "judge", "path": str(path), "template": "{question} {response}", "verdict": "yes_no"} | judge
    run = RunSpec.model_validate({"model": {"path": "x"}, "prompts": {"path": "p"}, "rewards": [judge]})
    return [problem.what for problem in reward_problems(run, PROMPTS)]


def test_a_whole_model_with_a_chat_template_can_judge(model: Path) -> None:
    assert problems(model) == []


def test_the_question_and_an_answer_must_fit_into_the_context(model: Path) -> None:
    (what,) = problems(model, max_context_tokens=300)
    assert "the question about train.jsonl:1, without a response" in what
    assert "the judge reads 300" in what
    assert problems(model, verdict="number", max_tokens=3000) == []
    (what,) = problems(model, verdict="number", max_tokens=4000)
    assert "the judge reads 4096; shorten the template, or lower max_tokens" in what


def test_heads_are_split_evenly(model: Path) -> None:
    (what,) = problems(model, tensor_parallel_size=3)
    assert "tensor_parallel_size 3 does not divide the 2 heads" in what


def test_a_chat_template_argument_is_one_that_the_template_reads(model: Path) -> None:
    (what,) = problems(model, body={"chat_template_kwargs": {"enable_thinking": False}})
    assert "the chat template never reads 'enable_thinking'" in what


def test_the_template_must_write_the_system_message(own: Path) -> None:
    (own / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    (what,) = problems(own)
    assert "the chat template drops a text" in what
    assert what.endswith("take a judge whose chat template writes a system and a user message")


def test_a_model_without_a_chat_template_cannot_judge(own: Path) -> None:
    (own / "chat_template.jinja").unlink()
    (what,) = problems(own)
    assert "has no chat template" in what


def test_a_verdict_by_logprobs_needs_its_words_as_tokens(own: Path) -> None:
    (own / "tokenizer.json").write_text((own / "tokenizer.json").read_text("utf-8").replace('"yes"', '"ja"'), "utf-8")
    (what,) = problems(own)
    assert "is 'yes', which verdict yes_no needs" in what
    assert problems(own, verdict="number") == []


def test_weights_are_compared_with_the_config(own: Path) -> None:
    config = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    assert any("mlp" in what for what in problems(own)), problems(own)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    (what,) = problems(tmp_path / "none")
    assert "none" in what
