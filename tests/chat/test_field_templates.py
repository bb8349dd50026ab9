"""What is learned of a conversation, to the token, with chat templates of the field.

The right values are written by hand in `fakes.field_templates`, and found in what transformers renders by themselves:
this test shares no code with what it tests.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fakes.field_templates import BY_NAME, FIELD, FieldTemplate
from rlhfless.prepare.examples import load_examples
from rlhfless.prepare.prompts import load_prompts
from rlhfless.records.rollouts import Example
from rlhfless.spec import PromptsSpec, RunSpec, SizesSpec
from rlhfless.spec.data import DATA

SYSTEM = {"role": "system", "content": "Answer in one line."}
QUESTIONS = ["What is the capital of France?", "And 12 + 34?", "Thanks! Say hello."]
ANSWERS = ["The capital is Paris.", "It is 46, as\n\n  12 + 34 = 46", "Hello there, user!"]


def conversation(template: FieldTemplate, turns: int, *, system: bool) -> list[dict[str, Any]]:
    messages = [dict(SYSTEM)] if system and template.system else []
    for question, answer in list(zip(QUESTIONS, ANSWERS, strict=True))[:turns]:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    if template.name == "deepseek_r1":  # its prompts open a thought
        messages[-1]["content"] = f"<think>\nlet me see\n</think>\n\n{messages[-1]['content']}"
    return messages


def load(folder: Path, run_type: str, template: FieldTemplate, rows: list[dict[str, Any]], **data: Any) -> Any:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = {DATA[run_type]: {"path": str(file), "chat_template": True, **data}}  # type: ignore[index]
    spec = RunSpec.model_validate({"type": run_type, "model": {"path": "m"}, **section})
    return load_examples(spec, template.policy())


def pieces(tokenizer: Any, example: Example, index: int = 0) -> list[tuple[bool, str]]:
    """The sequence as text, in parts that are learned or not."""
    tokens, mask = example.sequences[index], example.learned(index)
    cuts = [0, *(at for at in range(1, len(tokens)) if mask[at] != mask[at - 1]), len(tokens)]
    texts = [tokenizer.decode(tokens[:cut]) for cut in cuts]
    return [(mask[cuts[i]], texts[i + 1].removeprefix(texts[i])) for i in range(len(cuts) - 1)]


def expected(template: FieldTemplate, messages: list[dict[str, Any]], *, only_last: bool = False) -> list[str]:
    said = [message["content"] for message in messages if message["role"] == "assistant"]
    parts = [template.before.format(text) for text in said[:-1]] + [template.last.format(said[-1])]
    if template.name == "deepseek_r1":
        parts[-1] = parts[-1].removeprefix("<think>\n")
    return parts[-1:] if only_last else parts


@pytest.mark.parametrize("turns", [1, 2, 3])
@pytest.mark.parametrize("template", FIELD, ids=lambda template: template.name)
def test_what_the_assistant_said_is_learned_to_the_token(tmp_path: Path, template: FieldTemplate, turns: int) -> None:
    tokenizer = template.tokenizer()
    messages = conversation(template, turns, system=turns != 2)
    given = {"prompt_field": "messages", "response_field": None}
    for learned_turns in ("all", "last"):
        sets = load(tmp_path, "sft", template, [{"messages": messages}], learned_turns=learned_turns, **given)
        (example,) = sets.train
        parts = pieces(tokenizer, example)
        assert [text for learned, text in parts if learned] == expected(
            template, messages, only_last=learned_turns == "last"
        )
        assert parts[-1][0], "nothing follows what is learned"
        if template.name != "deepseek_r1":
            rendered = tokenizer.apply_chat_template(messages, tokenize=False)
            whole = "".join(text for _, text in parts)
            assert whole.removesuffix(template.eos).rstrip() in rendered
            assert rendered.startswith(whole.removesuffix(template.eos).rstrip())
            ids = tokenizer(whole, add_special_tokens=False)["input_ids"]
            assert list(example.sequences[0]) == ids, "as the tokenizer writes the whole"


@pytest.mark.parametrize(
    ("questions", "answers"),
    [
        (["ok", "ok", "ok"], ["ok", "ok", "ok"]),
        (["user", "assistant", "model"], ["assistant", "user", "system"]),
        (["4", "44", "{}"], ["444", "4", '{"4": None}']),
        (["Assistant: x", "USER: y", "a"], ["USER: z\n\nASSISTANT: w", "\\n {{ x }}", "def f():\n    return 1"]),
    ],
    ids=["the same", "roles", "numbers", "headers"],
)
@pytest.mark.parametrize("template", FIELD, ids=lambda template: template.name)
def test_turns_are_found_by_their_place_and_not_by_their_text(
    tmp_path: Path, template: FieldTemplate, questions: list[str], answers: list[str]
) -> None:
    messages = conversation(template, 3, system=False)
    for index, (question, answer) in enumerate(zip(questions, answers, strict=True)):
        messages[2 * index]["content"] = question
        messages[2 * index + 1]["content"] = answer
    if template.name == "deepseek_r1":
        messages[-1]["content"] = f"<think>\n{answers[0]}\n</think>\n\n{answers[-1]}"
    given = {"prompt_field": "messages", "response_field": None}
    (example,) = load(tmp_path, "sft", template, [{"messages": messages}], **given).train
    parts = pieces(template.tokenizer(), example)
    assert [text for learned, text in parts if learned] == expected(template, messages)


@pytest.mark.parametrize("template", FIELD, ids=lambda template: template.name)
def test_a_prompt_is_what_transformers_makes_of_it(tmp_path: Path, template: FieldTemplate) -> None:
    tokenizer = template.tokenizer()
    messages = conversation(template, 2, system=True)[:-1]
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": messages}) + "\n")
    spec = PromptsSpec(path=str(file), chat_template=True)
    policy = template.policy()
    (prompt,) = load_prompts(
        spec, tokenizer, max_context_tokens=None, seed=0, sizes=SizesSpec(), end_token_ids=policy.end_token_ids
    ).train
    right = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert list(prompt.token_ids) == right
    assert all(message["content"] in prompt.text for message in messages)
    assert prompt.token_ids[-1] not in (tokenizer.eos_token_id, *policy.end_token_ids) or template.name == "phi3"


@pytest.mark.parametrize("template", FIELD, ids=lambda template: template.name)
def test_a_pair_of_whole_conversations_shares_its_prompt(tmp_path: Path, template: FieldTemplate) -> None:
    chosen = conversation(template, 2, system=True)
    rejected = [*chosen[:-1], {"role": "assistant", "content": chosen[-1]["content"] + " I guess."}]
    (example,) = load(tmp_path, "dpo", template, [{"chosen": chosen, "rejected": rejected}]).train
    for index, messages in enumerate((chosen, rejected)):
        parts = pieces(template.tokenizer(), example, index)
        assert [text for learned, text in parts if learned] == expected(template, messages, only_last=True)
        assert example.sequences[index][: len(example.token_ids)] == example.token_ids


def test_the_mask_is_that_of_generation_marks(tmp_path: Path) -> None:
    template = BY_NAME["smollm3"]
    messages = conversation(template, 3, system=True)
    given = {"prompt_field": "messages", "response_field": None}
    (example,) = load(tmp_path, "sft", template, [{"messages": messages}], **given).train
    right = template.tokenizer().apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    length = len(example.sequences[0])
    assert list(example.sequences[0]) == right["input_ids"][:length]
    assert list(map(int, example.learned(0))) == right["assistant_masks"][:length]
    assert not any(right["assistant_masks"][length:])
