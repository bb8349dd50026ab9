"""What is learned of written responses has all that the row has: thoughts, tool calls, every turn and its end."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from fakes.field_templates import BY_NAME, FieldTemplate
from rlhfless.prepare.examples import load_examples
from rlhfless.prepare.prompts import PromptSets
from rlhfless.records.rollouts import Example
from rlhfless.spec import RunSpec
from rlhfless.spec.data import DATA
from rlhfless.spec.errors import InputError

CALL = {"id": "123456789", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
RESULT = {"role": "tool", "content": "20 degrees", "tool_call_id": "123456789"}
WHOLE: dict[str, Any] = {"prompt_field": "messages", "response_field": None}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def said(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def load(folder: Path, template: str, row: dict[str, Any], run_type: str = "sft", **data: Any) -> PromptSets:
    file = folder / "rows.jsonl"
    file.write_text("\n" + json.dumps(row) + "\n")
    section = {DATA[run_type]: {"path": str(file), "chat_template": True, **data}}  # type: ignore[index]
    spec = RunSpec.model_validate({"type": run_type, "model": {"path": "m"}, **section})
    return load_examples(spec, BY_NAME[template].policy())


def learned(folder: Path, template: str, row: dict[str, Any], run_type: str = "sft", **data: Any) -> list[str]:
    """The learned text of each sequence."""
    (example,) = load(folder, template, row, run_type, **data).train
    assert isinstance(example, Example)
    tokenizer = BY_NAME[template].tokenizer()
    return [
        tokenizer.decode([token for token, kept in zip(tokens, example.learned(index), strict=True) if kept])
        for index, tokens in enumerate(example.sequences)
    ]


_QWEN3 = "<think>\nI add.\n</think>\n\nIt is 4<|im_end|>"
_R1 = "I add.\n</think>\n\nIt is 4<｜end▁of▁sentence｜>"


@pytest.mark.parametrize(
    ("template", "response", "right"),
    [
        ("qwen3", said("It is 4", reasoning_content="I add."), _QWEN3),
        ("qwen3", said("It is 4", thinking="I add."), _QWEN3),
        ("qwen3", said("It is 4", reasoning="I add."), _QWEN3),
        ("qwen3", said("<think>I add.</think>It is 4"), _QWEN3),
        ("qwen3", said([{"type": "thinking", "thinking": "I add."}, {"type": "text", "text": "It is 4"}]), _QWEN3),
        ("qwen3", said("It is 4", reasoning_content=None), "<think>\n\n</think>\n\nIt is 4<|im_end|>"),
        ("deepseek_r1", said("It is 4", reasoning_content="I add."), _R1),
        ("deepseek_r1", said("<think>\nI add.\n</think>\n\nIt is 4"), _R1),
        ("deepseek_r1", said("<think>I add.</think>It is 4"), _R1),
        ("deepseek_r1", said("I add.</think>It is 4"), _R1),
        ("smollm3", said("It is 4", reasoning_content="I add."), _QWEN3),
        ("chatml", said("<think>I add.</think>It is 4"), "<think>I add.</think>It is 4<|im_end|>"),
        (
            "harmony",
            said("It is 4", reasoning_content="I add."),
            "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant<|channel|>final<|message|>It is 4<|return|>",
        ),
        (
            "qwen3",
            said(None, tool_calls=[CALL], reasoning_content="I look."),
            '<think>\nI look.\n</think>\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n'
            "</tool_call><|im_end|>",
        ),
        (
            "qwen2_5",
            said("I look.", tool_calls=[CALL["function"]]),
            'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>',
        ),
        (
            "mistral_v0_3",
            said(None, tool_calls=[CALL]),
            '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "123456789"}]</s>',
        ),
        (
            "harmony",
            said("", function_call=CALL["function"]),
            ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>',
        ),
    ],
)
def test_thoughts_and_calls_are_learned(tmp_path: Path, template: str, response: Any, right: str) -> None:
    for row in ({"prompt": "2 + 2?", "response": [response]}, {"prompt": [user("2 + 2?")], "response": [response]}):
        assert learned(tmp_path, template, row) == [right]
    assert learned(tmp_path, template, {"messages": [user("2 + 2?"), response]}, **WHOLE) == [right]


OFF = "{% if not think | default(true) %}<think></think>{% endif %}"
"""What the templates of Nemotron Nano add where thoughts are off, and leave out of an answer."""


@pytest.mark.parametrize("content", ["It is 4", "<b>4</b>"])
@pytest.mark.parametrize("earlier", [[], [user("1 + 1?"), said("2")]], ids=["one turn", "two turns"])
def test_an_answer_without_a_thought_follows_the_thought_that_the_template_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, earlier: list[Any]
) -> None:
    """It was refused for a thought that it does not have."""
    policy = BY_NAME["chatml"].policy()
    tokenizer = copy.deepcopy(policy.tokenizer)
    opening, written = "<|im_start|>assistant\n", r"{{ '<|im_start|>assistant\n' }}"
    assert tokenizer.chat_template.count(written) == 1
    tokenizer.chat_template = tokenizer.chat_template.replace(written, written + OFF)
    monkeypatch.setattr(FieldTemplate, "policy", lambda _: dataclasses.replace(policy, tokenizer=tokenizer))
    row = {"prompt": [*earlier, user("2 + 2?")], "response": [said(content)]}
    for off, end in ((False, f"{opening}<think></think>"), (True, opening)):
        (example,) = load(tmp_path, "chatml", row, chat_template_kwargs={"think": off}).train
        assert isinstance(example, Example)
        (sequence,), ((span,),) = example.sequences, example.spans
        assert tokenizer.decode(sequence[: span[0]]).endswith(f"2 + 2?<|im_end|>\n{end}")
        assert tokenizer.decode(sequence[slice(*span)]) == f"{content}<|im_end|>"
        assert example.token_ids == sequence[: span[0]], "as the policy reads it in a run of type rlhf"
    row["response"] = [said(f"<think>hm</think>{content}")]
    with pytest.raises(InputError, match="the chat template ends the thought, and the response has one"):
        load(tmp_path, "chatml", row, chat_template_kwargs={"think": False})


@pytest.mark.parametrize(
    ("template", "response", "data", "parts"),
    [
        ("chatml", said("4", reasoning_content="I add."), {}, ["reasoning_content of message 2", "'I add.'"]),
        ("llama3", said("4", thinking="I add."), {}, ["thinking of message 2", "'I add.'"]),
        ("smollm3", said("4", reasoning="I add."), {"enable_thinking": False}, ["'I add.'"]),
        ("qwen3", said("4", reasoning="I add."), {"enable_thinking": False}, ["ends the thought", "</think>"]),
        ("deepseek_r1", said("4"), {}, ["opens a thought, and the response has none", "reasoning_content"]),
        ("chatml", said(None, tool_calls=[CALL]), {}, ["the name of tool call 1", "'get_weather'"]),
        ("chatml", said("I look", tool_calls=[CALL]), {}, ["'get_weather'"]),
        ("llama3_1", said("I look", tool_calls=[CALL]), {}, ["content of message 2", "'I look'"]),
        ("harmony", said("I look", tool_calls=[CALL], thinking="hm"), {}, ["'I look'"]),
        ("llama3_1", said(None, tool_calls=[CALL, CALL]), {}, ["single tool-calls at once"]),
        ("chatml", said("a<|im_end|>b"), {}, ["control token", "'<|im_end|>'"]),
        ("chatml", said("a", reasoning_content="b", thinking="c"), {}, ["several thoughts"]),
        ("chatml", said(None), {}, ["without content"]),
        ("chatml", said("a", refusal="I will not"), {}, ["`refusal` of message 2", "'I will not'"]),
        ("chatml", said("a", reasoning_details=[{"text": "hm"}]), {}, ["`reasoning_details`", "'hm'"]),
        ("chatml", said("a", reasoning_content=["hm"]), {}, ["`reasoning_content` is not text"]),
        ("chatml", said([{"type": "tool_use", "name": "f"}]), {}, ["of type `tool_use`"]),
        ("qwen3", said("x <think>a</think> y"), {}, ["'x '"]),
        ("deepseek_r1", said("x <think>a</think> y"), {}, ["'x '"]),
        ("chatml", said(" "), {}, ["`response` is not a response"]),
        ("chatml", user("a"), {}, ["`response` is not a response", "starts and ends with the assistant"]),
    ],
)
def test_a_response_that_would_be_learned_in_part_is_refused(
    tmp_path: Path, template: str, response: Any, data: dict[str, Any], parts: list[str]
) -> None:
    with pytest.raises(InputError) as caught:
        learned(tmp_path, template, {"prompt": "2 + 2?", "response": [response]}, chat_template_kwargs=data)
    assert "first at rows.jsonl:2" in str(caught.value)
    assert all(each in str(caught.value) for each in parts), str(caught.value)


def test_each_turn_of_a_conversation_with_tools_is_learned(tmp_path: Path) -> None:
    messages = [
        user("Weather?"),
        said("", reasoning_content="I look.", tool_calls=[CALL]),
        RESULT,
        said("It is warm.", reasoning_content="20 is warm."),
    ]
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>'
    right = f"<think>\nI look.\n</think>\n\n{call}<think>\n20 is warm.\n</think>\n\nIt is warm.<|im_end|>"
    assert learned(tmp_path, "qwen3", {"messages": messages}, **WHOLE) == [right]
    row = {"prompt": messages[:1], "response": messages[1:]}
    assert learned(tmp_path, "qwen3", row) == [right]


def test_a_cut_thought_of_an_earlier_turn_is_refused_or_not_learned(tmp_path: Path) -> None:
    messages = [user("a"), said("b", reasoning_content="hm"), user("c"), said("d", reasoning_content="so")]
    with pytest.raises(InputError, match=r"'hm'.*\n.*learned_turns: last"):
        learned(tmp_path, "qwen3", {"messages": messages}, **WHOLE)
    sets = load(tmp_path, "qwen3", {"messages": messages}, learned_turns="last", **WHOLE)
    assert "leaves out earlier thoughts" in "".join(sets.warnings)
    right = ["<think>\nso\n</think>\n\nd<|im_end|>"]
    assert learned(tmp_path, "qwen3", {"messages": messages}, learned_turns="last", **WHOLE) == right


def test_earlier_turns_are_learned_as_the_template_writes_them(tmp_path: Path) -> None:
    messages = [user("a"), said("b"), user("c"), said("d")]
    given = {"chat_template_kwargs": {"enable_thinking": False}, **WHOLE}
    assert learned(tmp_path, "qwen3", {"messages": messages}, **given) == ["b<|im_end|>d<|im_end|>"]


@pytest.mark.parametrize(
    ("weights", "right"),
    [((1, 1), "b<|im_end|>d<|im_end|>"), ((0, 1), "d<|im_end|>"), ((1, 0), "b<|im_end|>"), ((None, 1.0), None)],
)
def test_messages_of_weight_0_are_not_learned(tmp_path: Path, weights: tuple[Any, Any], right: str | None) -> None:
    messages = [user("a"), said("b", weight=weights[0]), user("c"), said("d", weight=weights[1])]
    assert learned(tmp_path, "chatml", {"messages": messages}, **WHOLE) == [right or "b<|im_end|>d<|im_end|>"]


@pytest.mark.parametrize(("weight", "said_of_it"), [(0.5, "has 0.5"), (0, "no message is learned")])
def test_other_weights_are_refused(tmp_path: Path, weight: float, said_of_it: str) -> None:
    with pytest.raises(InputError, match=said_of_it):
        learned(tmp_path, "chatml", {"messages": [user("a"), said("b", weight=weight)]}, **WHOLE)


# -- ends


@pytest.mark.parametrize(
    ("template", "right"),
    [
        ("phi3", "b<|end|>"),  # the template writes <|end|>, a new line, and <|endoftext|>
        ("gemma", "b<end_of_turn>"),
        ("llama3", "b<|eot_id|>"),
        ("internlm2", "b<|im_end|>"),
        ("qwen2_5", "b<|im_end|>"),
    ],
)
def test_the_first_of_several_end_tokens_is_the_last_token_learned(tmp_path: Path, template: str, right: str) -> None:
    assert learned(tmp_path, template, {"prompt": "a", "response": "b"}) == [right]


def test_an_end_token_is_added_and_told_where_the_template_has_none(tmp_path: Path) -> None:
    sets = load(tmp_path, "nemotron", {"prompt": "a", "response": "b"})
    assert "ends an answer with no end-of-sequence token in 1 of 1 rows, first at rows.jsonl:2" in "".join(
        sets.warnings
    )


@pytest.mark.parametrize(("response", "right"), [("b", "b<|eot_id|>"), ("b<|eot_id|>", "b<|eot_id|>")])
def test_a_text_ends_once(tmp_path: Path, response: str, right: str) -> None:
    given = learned(tmp_path, "llama3", {"prompt": "a ", "response": response}, chat_template=False)
    assert given == [right.replace("<|eot_id|>", "<|end_of_text|>") if response == "b" else right]


def test_a_text_that_goes_on_after_its_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"before its end in 1 of 1 rows, first at rows.jsonl:2"):
        learned(tmp_path, "llama3", {"prompt": "a ", "response": "b<|eot_id|>c"}, chat_template=False)


def test_a_text_needs_a_template_for_thoughts(tmp_path: Path) -> None:
    row = {"prompt": "a", "response": [said("b", reasoning_content="hm")]}
    with pytest.raises(InputError, match=r"`response` has more than a text[^$]*demonstrations.chat_template: true"):
        learned(tmp_path, "llama3", row, chat_template=False)


# -- shapes


def test_sharegpt(tmp_path: Path) -> None:
    row = {
        "conversations": [
            {"from": "human", "value": "Weather?"},
            {"from": "function_call", "value": '{"name": "get_weather", "arguments": {"city": "Paris"}}'},
            {"from": "observation", "value": "20 degrees"},
            {"from": "gpt", "value": "It is warm."},
        ],
        "system": "Be kind.",
        "tools": '[{"name": "get_weather", "parameters": {}}]',
    }
    given = {"prompt_field": "conversations", "response_field": None}
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>'
    assert learned(tmp_path, "qwen2_5", row, **given) == [f"{call}It is warm.<|im_end|>"]
    (example,) = load(tmp_path, "qwen2_5", row, **given).train
    assert example.text.startswith("<|im_start|>system\nBe kind.\n\n# Tools")


def test_a_conversation_that_the_assistant_begins(tmp_path: Path) -> None:
    row = {"messages": [said("Hello!"), user("a"), said("b")]}
    assert learned(tmp_path, "chatml", row, **WHOLE) == ["b<|im_end|>"]
    assert "the conversation starts with the assistant" in "".join(load(tmp_path, "chatml", row, **WHOLE).warnings)


@pytest.mark.parametrize("count", [0, 1, 3], ids=["nothing", "one message", "the user ends"])
def test_a_conversation_without_an_answer_is_refused(tmp_path: Path, count: int) -> None:
    with pytest.raises(InputError, match=r"rows\.jsonl:2"):
        learned(tmp_path, "chatml", {"messages": [user("a"), said("b"), user("c")][:count]}, **WHOLE)


_GOOD, _BAD = said("good"), said("bad")


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": [user("a"), _GOOD], "rejected": [user("a"), _BAD]},
        {"prompt": "a", "chosen": [user("a"), _GOOD], "rejected": [user("a"), _BAD]},
        {"prompt": [user("a")], "chosen": [user("a"), _GOOD], "rejected": [user("a"), _BAD]},
        {"prompt": [user("a")], "chosen": [_GOOD], "rejected": [_BAD]},
        {"prompt": [user("a")], "chosen": "good", "rejected": "bad"},
        {"prompt": "a", "chosen": [_GOOD], "rejected": "bad"},
        {"prompt": [{"from": "human", "value": "a"}], "chosen": {"from": "gpt", "value": "good"}, "rejected": _BAD},
        {
            "chosen": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "good"}],
            "rejected": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "bad"}],
        },
        {
            "chosen": [{"role": "system", "content": "s"}, user("x"), said("y"), user("a"), _GOOD],
            "rejected": [{"role": "system", "content": "s"}, user("x"), said("y"), user("a"), _BAD],
        },
    ],
)
def test_pairs_in_all_shapes(tmp_path: Path, row: dict[str, Any]) -> None:
    assert learned(tmp_path, "chatml", row, "dpo") == ["good<|im_end|>", "bad<|im_end|>"]
    (example,) = load(tmp_path, "chatml", row, "dpo").train
    assert isinstance(example, Example)
    assert example.text.endswith("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n")
    tokenizer = BY_NAME["chatml"].tokenizer()
    (scored,) = load(tmp_path, "chatml", row, "reward_model").train
    texts = [tokenizer.decode(tokens[:-1]) for tokens in scored.sequences]  # type: ignore[attr-defined]
    assert texts == [f"{example.text}good<|im_end|>\n", f"{example.text}bad<|im_end|>\n"]


def test_pairs_that_part_before_the_last_answer(tmp_path: Path) -> None:
    row = {"chosen": [user("a"), said("b"), user("c"), _GOOD], "rejected": [user("a"), said("d"), user("e"), _BAD]}
    assert learned(tmp_path, "chatml", row, "dpo") == ["b<|im_end|>good<|im_end|>", "d<|im_end|>bad<|im_end|>"]


@pytest.mark.parametrize(
    ("row", "parts"),
    [
        ({"prompt": "z", "chosen": [user("a"), _GOOD], "rejected": [user("a"), _BAD]}, ["not a message", "got 'z'"]),
        ({"prompt": [user("z")], "chosen": [user("a"), _GOOD], "rejected": [user("a"), _BAD]}, ["do not start with"]),
        ({"chosen": [user("a"), _GOOD], "rejected": [user("b"), _BAD]}, ["differ before the assistant answers"]),
        ({"chosen": [user("a"), _GOOD], "rejected": [user("a"), _GOOD]}, ["both responses are the same"]),
        ({"chosen": [user("a"), _GOOD, user("c")], "rejected": [user("a"), _BAD]}, ["`chosen` is not a response"]),
        ({"prompt": "a", "chosen": [user("a"), _GOOD], "rejected": "bad"}, ["`chosen` is not a response"]),
        ({"prompt": "a", "chosen": [said("b", reasoning_content="hm")], "rejected": "bad"}, ["'hm'"]),
    ],
)
def test_pairs_that_cannot_be_compared_are_refused(tmp_path: Path, row: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        load(tmp_path, "chatml", row, "dpo")
    assert "rows.jsonl:2" in str(caught.value)
    assert all(each in str(caught.value) for each in parts), str(caught.value)


def test_pairs_of_conversations_need_a_template(tmp_path: Path) -> None:
    row = {"chosen": [user("a"), _GOOD], "rejected": [user("a"), _BAD]}
    with pytest.raises(InputError, match=r"preferences\.chat_template: true"):
        load(tmp_path, "chatml", row, "dpo", chat_template=False)


def test_prompt_and_completion_as_messages(tmp_path: Path) -> None:
    row = {"prompt": [user("a")], "completion": [said("b"), user("c"), said("d")]}
    assert learned(tmp_path, "chatml", row, response_field="completion") == ["b<|im_end|>d<|im_end|>"]
