"""Every text of a prompt's messages is in its rendering, or the row is refused by its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors

from fakes.field_templates import BY_NAME
from rlhfless.prepare.prompts import PromptSets, load_prompts
from rlhfless.spec import PromptsSpec, SizesSpec
from rlhfless.spec.errors import InputError

CALL = {
    "id": "123456789",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Paris", "days": 3}'},
}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {}}}]


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def said(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def load(folder: Path, template: str, row: Any, tokenizer: Any = None, **given: Any) -> PromptSets:
    file = folder / "train.jsonl"
    file.write_text(json.dumps({"prompt": [user("first")]}) + "\n" if given.get("chat_template", True) else "")
    with file.open("a") as stream:
        stream.write(json.dumps(row if isinstance(row, dict) else {"prompt": row}) + "\n")
    policy = BY_NAME[template].policy()
    spec = PromptsSpec(path=str(file), **{"chat_template": True, **given})
    return load_prompts(
        spec,
        tokenizer or policy.tokenizer,
        max_context_tokens=None,
        seed=0,
        sizes=SizesSpec(),
        end_token_ids=policy.end_token_ids,
    )


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


@pytest.mark.parametrize(
    ("template", "content", "written"),
    [
        ("chatml", [part("one")], "user\none<|im_end|>"),
        ("chatml", [part("one"), part("two")], "user\none\ntwo<|im_end|>"),
        ("chatml", ["one", "two"], "user\none\ntwo<|im_end|>"),
        ("chatml", [{"type": "input_text", "text": "one"}], "user\none<|im_end|>"),
        ("chatml", [{**part("one"), "image_url": None}], "user\none<|im_end|>"),
        ("gemma3", [part("one"), part("two")], "user\nonetwo<end_of_turn>"),
        ("qwen3", [part("one"), part("two")], "user\none\ntwo<|im_end|>"),
        ("llama3_1", [part("one"), part("two")], "\n\none\ntwo<|eot_id|>"),
        ("chatml", "['type': 'text']", "user\n['type': 'text']<|im_end|>"),
        ("chatml", "it is None", "user\nit is None<|im_end|>"),
        ("llama3", "  spaces around \n", "\n\nspaces around<|eot_id|>"),
    ],
)
def test_text_parts_are_written_as_the_template_reads_them(
    tmp_path: Path, template: str, content: Any, written: str
) -> None:
    prompt = load(tmp_path, template, [user(content)]).train[-1]
    assert written in prompt.text


def test_a_template_for_lists_of_parts_gets_them(tmp_path: Path) -> None:
    tokenizer = BY_NAME["chatml"].tokenizer()
    tokenizer.chat_template, before = (
        "{% for m in messages %}{{ m.role }}:{% for p in m.content %}{{ p.text }}{% endfor %};{% endfor %}bot:",
        tokenizer.chat_template,
    )
    try:
        assert load(tmp_path, "chatml", "hello", tokenizer).train[-1].text == "user:hello;bot:"
    finally:
        tokenizer.chat_template = before


@pytest.mark.parametrize(
    ("template", "row", "parts"),
    [
        ("chatml", [user([{"type": "image", "url": "x"}, part("a")])], ["part 1: of type `image`", "message 1"]),
        (
            "chatml",
            [user([part("a"), {"type": "image_url", "image_url": {"url": "x"}}])],
            ["part 2: of type `image_url`"],
        ),
        ("chatml", [user([{"type": "input_audio", "input_audio": {}}])], ["of type `input_audio`"]),
        ("chatml", [user([{"type": "video", "video": "v"}])], ["of type `video`"]),
        ("chatml", [user([{"type": "tool_result", "content": "x"}])], ["of type `tool_result`"]),
        ("chatml", [{**user("a"), "images": ["x"]}], ["more than text", "`images`"]),
        ("chatml", [user(None)], ["message without content", "message 1 (user)"]),
        ("chatml", [user("")], ["`prompt` is empty"]),
        ("chatml", [user([part(" ")])], ["`prompt` is empty"]),
        ("chatml", [user([])], ["message without content"]),
        ("chatml", [user([None])], ["part 1: None"]),
        ("chatml", [[user("a")]], ["not a list of chat messages"]),
        ("chatml", [{**user("a"), "reasoning_content": "b"}], ["a thought or a tool call of another role"]),
        ("qwen3", {"prompt": "a", "tools": "{bad"}, ["`tools` is not JSON"]),
        ("chatml", [{"role": "user"}], ["message without content"]),
        ("chatml", [{"role": "system", "content": None}, user("a")], ["message 1 (system) has none"]),
        ("chatml", [user("a"), said(None), user("b")], ["message 2 (assistant) has none"]),
        ("chatml", [user({"a": 1})], ["a content that is not text", "{'a': 1}", "as its JSON"]),
        ("chatml", [user(7)], ["a content that is not text", "has 7"]),
        ("chatml", [user("a"), said(None, tool_calls=[CALL]), user("b")], ["drops a text", "'get_weather'"]),
        (
            "chatml",
            [user("a"), said(None, tool_calls=[{"function": 1}]), user("b")],
            ["a tool call that cannot be read"],
        ),
        ("chatml", [user("a"), said("b", reasoning_content="because"), user("c")], ["reasoning_content of message 2"]),
        ("chatml", [{**user("a"), "thought": "secret"}], ["`thought` of message 1 (user), 'secret'"]),
        ("gemma", [{"role": "system", "content": "s"}, user("a")], ["System role not supported"]),
        ("yi", [user("a"), {"role": "tool", "content": "20 degrees"}, user("b")], ["'20 degrees'", "message 2 (tool)"]),
        ("command_r", [user("a"), {"role": "system", "content": "be kind"}, user("b")], ["'be kind'"]),
        ("falcon", [user("a"), {"role": "developer", "content": "be kind"}, user("b")], ["(developer), 'be kind'"]),
        ("llama3_1", [user("a"), said("I look", tool_calls=[CALL]), user("b")], ["content of message 2", "'I look'"]),
        (
            "mistral_v0_3",
            [{"role": "system", "content": "be kind"}, user("a"), said("b"), {"role": "tool", "content": "t"}],
            ["'be kind'"],
        ),
        ("chatml", [user("a"), said("b")], ["ends with a message of the assistant", "message 2 is 'b'", "type: sft"]),
        ("qwen3", [user("a"), said("b", reasoning_content="t")], ["ends with a message of the assistant"]),
        ("yi", [user("a"), {"from": "gpt", "value": "b"}], ["ends with a message of the assistant"]),
        ("chatml", {"prompt": [user("a")], "tools": TOOLS}, ["drops the column `tools`", "'get_weather'"]),
        (
            "mistral_v0_3",
            {"prompt": [user("a"), said("", tool_calls=[CALL]), {"role": "tool", "content": "12"}], "tools": TOOLS},
            ["drops the column `tools`", "'get_weather'"],
        ),
        ("chatml", {"prompt": [user("use get_weather")], "tools": TOOLS}, ["drops the column `tools`"]),
        ("chatml", json.dumps([user("a")]), ["the JSON of messages", "parse the field"]),
        ("chatml", [user("a <|im_end|> b")], ["control token", "'<|im_end|>'"]),
        ("llama3", [user("a <|begin_of_text|> b")], ["control token", "'<|begin_of_text|>'"]),
        ("llama3", [user("a <|eot_id|> b")], ["control token"]),
        (
            "chatml",
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
            ["already rendered", "prompts.chat_template"],
        ),
        ("chatml", [{"from": "alien", "value": "a"}], ["an unknown role", "'alien'"]),
        ("chatml", [{"from": "human", "value": None}], ["message without content"]),
        ("chatml", {"messages": [user("a")]}, ["no field `prompt`", "did you mean `messages`?"]),
    ],
)
def test_what_the_policy_would_not_see_is_refused(tmp_path: Path, template: str, row: Any, parts: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        load(tmp_path, template, row)
    assert "in 1 of 2 rows, first at train.jsonl:2" in str(caught.value)
    assert all(each in str(caught.value) for each in parts), str(caught.value)


@pytest.mark.parametrize(
    ("template", "row", "texts"),
    [
        (
            "qwen2_5",
            [user("w?"), said(None, tool_calls=[CALL]), {"role": "tool", "content": "20\nok"}],
            ["Paris", "20\nok"],
        ),
        ("llama3_1", [user("w?"), said(None, tool_calls=[CALL]), {"role": "tool", "content": "20\nok"}], ['"20\\nok"']),
        ("qwen3", {"prompt": [user("a")], "tools": json.dumps(TOOLS)}, ["<tools>\n{", "get_weather"]),
        (
            "chatml",
            {"prompt": [{"role": "system", "content": "You may call get_weather."}, user("a")], "tools": TOOLS},
            ["You may call get_weather.", "user\na<"],
        ),
        ("qwen3", {"prompt": "a", "tools": TOOLS}, ["get_weather"]),
        ("chatml", [{"from": "system", "value": "s"}, {"from": "human", "value": "h"}], ["system\ns<", "user\nh<"]),
        ("chatml", {"prompt": [{"from": "human", "value": "h"}], "system": "be kind"}, ["system\nbe kind<|im_end|>"]),
        ("chatml", [{**user("a"), "name": "bob", "id": "7", "weight": None}], ["user\na<"]),
        ("chatml", [user("same"), said("same"), user("same")], ["same"]),
        ("chatml", [user('quotes " and \\ and {{ x }} <b>&amp;</b>')], ['quotes " and \\ and {{ x }} <b>&amp;</b>']),
        ("qwen3", [user("why <think> and </think>?")], ["why <think> and </think>?"]),
        ("deepseek_r1", [user("w?"), said(None, tool_calls=[CALL]), user("so?")], ['```json\n{"city": "Paris"']),
        ("mistral_v0_3", [{"role": "system", "content": "s1"}, user("a"), said("b"), user("c")], ["[INST] s1\n\nc"]),
        ("qwen3", {"prompt": "a", "tools": "hammer"}, ["user\na<"]),
        ("qwen3", {"prompt": "a", "tools": json.dumps(TOOLS[0])}, ["get_weather"]),
    ],
)
def test_messages_of_all_roles_are_rendered(tmp_path: Path, template: str, row: Any, texts: list[str]) -> None:
    sets = load(tmp_path, template, row)
    assert all(text in sets.train[-1].text for text in texts), sets.train[-1].text
    assert "None" not in sets.train[-1].text
    assert sets.warnings == ()


def test_a_lost_message_is_found_where_another_says_the_same(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"content of message 2 \(tool\), 'hello'"):
        load(tmp_path, "yi", [user("hello"), {"role": "tool", "content": "hello"}, user("hello")])


@pytest.mark.parametrize("answer", [said("a", reasoning_content="hm"), said("<think>hm</think>a")], ids=["key", "tags"])
def test_earlier_thoughts_that_a_template_leaves_out_are_told(tmp_path: Path, answer: dict[str, Any]) -> None:
    sets = load(tmp_path, "qwen3", [user("q"), answer, user("r")])
    assert "hm" not in sets.train[-1].text
    (warning,) = sets.warnings
    assert "leaves out earlier thoughts in 1 of 2 rows, first at train.jsonl:2" in warning


@pytest.mark.parametrize(
    ("template", "text", "right"),
    [
        ("llama3", "hello", "<|begin_of_text|>hello"),
        ("llama3", "<|begin_of_text|>hello", "<|begin_of_text|>hello"),
        ("chatml", "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", None),
    ],
)
@pytest.mark.parametrize("adds_end", [False, True])
def test_a_text_begins_once_and_has_no_end(
    tmp_path: Path, template: str, text: str, right: str | None, adds_end: bool
) -> None:
    tokenizer = _adding(template, adds_end=adds_end)
    prompt = load(tmp_path, template, text, tokenizer, chat_template=False).train[-1]
    assert tokenizer.decode(prompt.token_ids) == (right or text)


@pytest.mark.parametrize(
    ("text", "said_of_it"),
    [
        ("<|begin_of_text|><|begin_of_text|>hi", "starts with '<|begin_of_text|>' twice"),
        ("hi<|end_of_text|>", "ends with the end-of-sequence token '<|end_of_text|>'"),
        ("hi<|eot_id|>", "ends with the end-of-sequence token '<|eot_id|>'"),
    ],
)
def test_a_text_with_a_special_token_too_many_is_refused(tmp_path: Path, text: str, said_of_it: str) -> None:
    with pytest.raises(InputError) as caught:
        load(tmp_path, "llama3", text, _adding("llama3", adds_end=False), chat_template=False)
    assert said_of_it in str(caught.value)
    assert "train.jsonl:1" in str(caught.value)


def _adding(template: str, *, adds_end: bool) -> Any:
    """A tokenizer that begins texts with bos, and may end them with eos, as Llama's do."""
    import copy

    tokenizer = copy.deepcopy(BY_NAME[template].tokenizer())
    begin, end = tokenizer.bos_token, tokenizer.eos_token
    if begin is None:
        return tokenizer
    single = f"{begin} $A {end}" if adds_end else f"{begin} $A"
    special = [(begin, tokenizer.bos_token_id), (end, tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
    return tokenizer


def test_a_rendered_prompt_has_the_one_beginning_of_its_template(tmp_path: Path) -> None:
    tokenizer = _adding("llama3", adds_end=True)
    prompt = load(tmp_path, "llama3", [user("hi")], tokenizer).train[-1]
    assert prompt.token_ids.count(tokenizer.bos_token_id) == 1
    assert prompt.token_ids[0] == tokenizer.bos_token_id
    assert prompt.text.endswith("<|start_header_id|>assistant<|end_header_id|>\n\n")


def test_a_template_without_a_beginning_is_told(tmp_path: Path) -> None:
    (warning,) = load(tmp_path, "zephyr", [user("hi")], _adding("zephyr", adds_end=False)).warnings
    assert "the chat template writes no beginning in 2 of 2 rows" in warning


def test_a_template_that_does_not_open_the_turn_is_refused(tmp_path: Path) -> None:
    import copy

    tokenizer = copy.deepcopy(BY_NAME["chatml"].tokenizer())
    tokenizer.chat_template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    with pytest.raises(InputError) as caught:
        load(tmp_path, "chatml", [user("hi")], tokenizer)
    assert "does not open the assistant's turn" in str(caught.value)
    assert "'<|im_start|>assistant\\n'" in str(caught.value)


def test_arguments_reach_the_template(tmp_path: Path) -> None:
    sets = load(tmp_path, "qwen3", [user("hi")], chat_template_kwargs={"enable_thinking": False})
    assert sets.train[-1].text.endswith("assistant\n<think>\n\n</think>\n\n")
    sets = load(tmp_path, "harmony", [user("hi")], chat_template_kwargs={"reasoning_effort": "high"})
    assert "Reasoning: high" in sets.train[-1].text


@pytest.mark.parametrize(
    ("template", "given", "parts"),
    [
        (
            "qwen3",
            {"enable_thinkin": False},
            ["chat_template_kwargs.enable_thinkin: False", "did you mean `enable_thinking`?"],
        ),
        ("chatml", {"enable_thinking": False}, ["never reads 'enable_thinking'", "It reads no further arguments"]),
        ("qwen3", {"reasoning_content": "x"}, ["never reads 'reasoning_content'"]),
        ("smollm3", {"reasoning_mode": "x"}, ["never reads 'reasoning_mode'", "enable_thinking"]),
    ],
)
def test_an_argument_that_the_template_never_reads_is_refused(
    tmp_path: Path, template: str, given: dict[str, Any], parts: list[str]
) -> None:
    with pytest.raises(InputError) as caught:
        load(tmp_path, template, [user("hi")], chat_template_kwargs=given)
    assert all(each in str(caught.value) for each in parts), str(caught.value)


@pytest.mark.parametrize(
    ("given", "said_of_it"),
    [
        ({"chat_template_kwargs": {"enable_thinking": False}}, "needs `chat_template: true`"),
        ({"chat_template": True, "chat_template_kwargs": {"enable_thinking": "false"}}, "write it without quotes"),
        ({"chat_template": True, "chat_template_kwargs": {"tools": []}}, "'tools', which the run itself gives"),
        ({"chat_template": True, "chat_template_kwargs": {"add_generation_prompt": False}}, "'add_generation_prompt'"),
        ({"chat_template": True, "chat_template_kwargs": {"bos_token": ""}}, "'bos_token'"),
        ({"chat_template": True, "chat_template_kwargs": {"return_dict": True}}, "'return_dict'"),
    ],
)
def test_arguments_that_are_not_the_users_are_refused(given: dict[str, Any], said_of_it: str) -> None:
    with pytest.raises(ValueError, match="chat_template_kwargs") as caught:
        PromptsSpec(path="/rows.jsonl", **given)
    assert said_of_it in str(caught.value)
