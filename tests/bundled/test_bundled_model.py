"""The bundled tokenizer and network load like any Hugging Face model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhfless.bundled.model import ModelSize, build_model, build_random, build_tokenizer
from rlhfless.bundled.task import TaskProblem, TaskRecipe


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("random")
    build_random(path, 3)
    return path


def test_decode_gives_the_response_back(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for problem in (TaskProblem(0, 150), TaskProblem(110, 5), TaskProblem(9, 13)):
        response = f"sure {problem.answer}"
        ids = tokenizer.encode(response)
        assert len(ids) == len(response.split())
        assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == response


def test_encode_adds_nothing(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer.convert_ids_to_tokens(tokenizer.encode(TaskProblem(7, 23).prompt))
    assert tokens == ["count", "from", "7", "up", "to", "23", ":"]


def test_special_tokens_are_different(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id]
    assert ids == [0, 1, 2, 3]


def test_random_model_loads_and_runs(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.architectures == ["Qwen3ForCausalLM"]
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    with torch.no_grad():
        logits = model(torch.tensor([[4, 5, 6]])).logits
    assert logits.shape == (1, 3, len(tokenizer))
    assert torch.isfinite(logits).all()


def test_weights_depend_on_the_seed_and_leave_the_global_state_alone() -> None:
    tokenizer = build_tokenizer(TaskRecipe(), 256)
    state = torch.random.get_rng_state()
    first, again, other = (build_model(tokenizer, ModelSize(), seed).lm_head.weight for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_every_response_fits_the_model() -> None:
    task, size = TaskRecipe(), ModelSize()
    prompt_tokens, opening, end_token = 7, 1, 1
    assert prompt_tokens + opening + task.longest_distance + 1 + end_token <= size.max_positions
