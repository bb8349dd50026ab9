"""Teachers are compared with the policy, and read prompts of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from fakes.tiny_learner import save_tiny_model
from rlhfless.prepare.examples import load_sets
from rlhfless.prepare.model import PolicyModel, TokenizerInfo
from rlhfless.prepare.teachers import teacher_faults
from rlhfless.records import Prompt
from rlhfless.spec import RunSpec
from rlhfless.spec.errors import InputError


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, PolicyModel]:
    path = save_tiny_model(tmp_path_factory.mktemp("models") / "policy")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    tokenizer.backend_tokenizer.pre_tokenizer = WhitespaceSplit()
    return path, PolicyModel(tokenizer, TokenizerInfo(path, len(tokenizer), 0, 0), 64, None, ())


def run_of(policy: tuple[str, PolicyModel], teacher: dict[str, Any], **changes: Any) -> RunSpec:
    values = {"model": {"path": policy[0]}, "prompts": {"path": "p"}, "generation": {"max_tokens": 8}}
    return RunSpec.model_validate(values | {"algorithm": "distill", "teachers": [{"name": "big", **teacher}]} | changes)


def faults(policy: tuple[str, PolicyModel], path: str, prompt_tokens: int = 8) -> list[str]:
    run = run_of(policy, {"path": path})
    prompts = [Prompt("p", (1,) * prompt_tokens, "")]
    return [str(problem) for problem in teacher_faults(run, policy[1], prompts)]


def other(policy: tuple[str, PolicyModel], folder: Path, **special: str) -> tuple[str, PreTrainedTokenizerFast]:
    path = save_tiny_model(folder)
    return path, PreTrainedTokenizerFast.from_pretrained(path, **special)


def test_a_model_of_the_same_tokens_may_teach(policy, tmp_path) -> None:
    assert faults(policy, policy[0]) == []
    assert faults(policy, other(policy, tmp_path / "teacher")[0]) == []
    assert faults(policy, "self") == []


def test_the_first_other_token_is_named(policy, tmp_path) -> None:
    path, tokenizer = other(policy, tmp_path / "teacher")
    file = Path(path) / "tokenizer.json"
    written = json.loads(file.read_text("utf-8"))
    vocabulary = written["model"]["vocab"]
    vocabulary["w7"], vocabulary["w9"] = 9, 7
    file.write_text(json.dumps(written), "utf-8")
    (fault,) = faults(policy, path)
    assert "teachers.0.path" in fault
    assert "its token 7 is 'w9', and the policy's is 'w7'" in fault
    assert "tokenizer" in fault
    tokenizer.add_tokens(["more"])
    tokenizer.save_pretrained(path)
    (fault,) = faults(policy, path)
    assert "its token 40 is 'more', and the policy's is missing" in fault


def test_another_end_token_is_named(policy, tmp_path) -> None:
    path, tokenizer = other(policy, tmp_path / "teacher", eos_token="w5")
    tokenizer.save_pretrained(path)
    (fault,) = faults(policy, path)
    assert "its eos_token is 'w5', and the policy's is None" in fault


def test_what_else_is_wrong_is_named(policy, tmp_path) -> None:
    (missing,) = faults(policy, str(tmp_path / "nowhere"))
    assert "teachers.0.path" in missing
    (context,) = faults(policy, policy[0], prompt_tokens=60)
    assert "reads up to 64 tokens, and prompt and response may have 68" in context
    path = Path(other(policy, tmp_path / "damaged")[0])
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    (damaged,) = faults(policy, str(path))
    assert damaged.startswith("teachers.0.path")


def read(policy: tuple[str, PolicyModel], folder: Path, rows: list[dict], **data: Any) -> tuple[Prompt, ...]:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    teacher = {"path": "self", "prompt_field": "hinted"}
    return load_sets(run_of(policy, teacher, prompts={"path": str(file), **data}), policy[1]).train


def test_a_teacher_reads_its_own_column(policy, tmp_path) -> None:
    rows = [{"prompt": f"w{index}", "hinted": f"w9 w{index}"} for index in (1, 2)]
    first, second = read(policy, tmp_path, rows)
    assert (first.token_ids, first.read_by) == ((1,), {"teacher_big": (9, 1)})
    assert (second.token_ids, second.read_by) == ((2,), {"teacher_big": (9, 2)})


def test_rows_without_the_column_are_refused_or_skipped(policy, tmp_path) -> None:
    rows = [{"prompt": f"w{index}", "hinted": "w9"} for index in range(1, 30)] + [{"prompt": "w30"}]
    with pytest.raises(InputError, match="no field `hinted`"):
        read(policy, tmp_path, rows)
    assert len(read(policy, tmp_path, rows, on_bad_row="skip")) == 29
    long = [{"prompt": "w1", "hinted": "w9 " * 57}]
    with pytest.raises(InputError, match="more than 56 tokens"):
        read(policy, tmp_path, long)
