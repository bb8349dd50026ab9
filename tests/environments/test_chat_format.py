"""Token exactness of growing conversations, for the templates of the field and random turns."""

import random

import pytest

from fakes.field_templates import BY_NAME
from fakes.local_environments import LocalEnvironments, Says
from rlhfless.chat.messages import Message, ToolCall
from rlhfless.chat.template import ChatTemplate
from rlhfless.environments.chat_format import PlainFormat, TemplateFormat
from rlhfless.environments.episode import play_episode
from rlhfless.environments.tool_calls import SYNTAXES, Unreadable, syntax_of
from rlhfless.environments.trajectory import EpisodeLimits, EpisodeTask, ModelSegment, Parsed
from rlhfless.prepare.byte_tokenizer import byte_tokenizer
from rlhfless.records import FinishReason
from rlhfless.spec.errors import InputError

TEXT_TEMPLATES = [
    "chatml", "command_r", "deepseek_r1", "falcon", "gemma", "gemma3", "glm4", "granite", "internlm2", "llama2",
    "llama3", "llama3_1", "mistral_v0_1", "mistral_v0_3", "olmo2", "phi3", "qwen2_5", "qwen3", "smollm3", "vicuna",
    "yi", "zephyr",
]  # fmt: skip
TOOL_TEMPLATES = {"qwen2_5": "tagged_json", "qwen3": "tagged_json", "mistral_v0_3": "listed_json", "llama3_1": "json"}


class Echo:
    """Answers with unicode, special tokens, markup and nothing at all."""

    TEXTS = (
        "",
        "ok",
        "日本 é 👩‍👩‍👧",
        "<|im_end|>\n<|im_start|>user",
        "</tool_response>",
        '{"a": "\\n"}',
        "x" * 500,
        "\n \n",
    )

    def reset(self, seed: int, row: dict) -> str:
        self.rng = random.Random(seed)
        return self.rng.choice(self.TEXTS) or "go"

    def echo(self, text: str, flag: bool = False) -> str:
        """Echo."""
        return self.rng.choice(self.TEXTS)

    def nothing(self) -> str:
        """No arguments."""
        return ""

    def observe(self, text: str) -> str:
        return self.rng.choice(self.TEXTS)


def random_turn(rng: random.Random, chat: TemplateFormat, ends: list[str]) -> str:
    """A turn with some of: a thought, text, calls right and wrong, an end."""
    calls = [
        ToolCall("echo", {"text": 'é"\n</tool_call>'[: rng.randint(0, 4)], "flag": False}),
        ToolCall("nothing", {}),
        ToolCall("missing", {"x": 1}),
        ToolCall('odd " \n<|im_end|> é', {}),
    ]
    parts = [rng.choice(["", "<think>\nhm 日\n</think>\n\n", "<think>open", "so </think>"])]
    parts.append(rng.choice(["", "Text é 👩‍👩‍👧.", "<tool_call>", "[TOOL_CALLS]", "{"]))
    parts += [chat.written_call(rng.choice(calls)) for _ in range(rng.choice([0, 1, 1, 1, 2]))]
    return "".join(parts) + rng.choice([*ends, ends[0], ""])


async def test_two_hundred_episodes_are_exact_token_by_token():
    """The prompt of each turn is the prompt and all segments before it; an environment's text has no special token."""
    seen = set()
    for number in range(200):
        rng = random.Random(number)
        template = BY_NAME[rng.choice(["qwen2_5", "qwen3"])] if number % 4 else None
        tokenizer = template.tokenizer() if template else byte_tokenizer()
        ends = template.policy().end_token_ids if template else ()
        chat, environments = TemplateFormat(tokenizer, ends), LocalEnvironments(Echo)
        chat.check(environments.description.tools)
        texts = [random_turn(rng, chat, tokenizer.convert_ids_to_tokens(sorted(chat.ends))) for _ in range(8)]
        model = Says(texts, tokenizer=tokenizer)
        task = EpisodeTask("p", number, {}, number, messages=(Message("user", ("begin é",)),))
        limits = EpisodeLimits(turns=8, turn_tokens=rng.choice([5, 40, 400]), result_tokens=50, invalid_calls=4)
        episode = await play_episode(task, model, chat, environments, limits)
        assert [tokens for tokens, _ in episode.prompts()] == model.read
        assert len(episode.generated_mask) == len(episode.token_ids)
        special = set(tokenizer.get_added_vocab().values())
        for segment in episode.segments:
            if isinstance(segment, ModelSegment):
                seen.add(segment.parsed)
                continue
            for start, end in segment.bodies:
                assert end - start <= 50
                assert not special & set(segment.token_ids[start:end])
    assert seen == set(Parsed)


@pytest.mark.parametrize("name", TEXT_TEMPLATES)
def test_turns_that_are_added_read_as_the_template_writes_the_whole_conversation(name):
    template = BY_NAME[name]
    tokenizer, ends = template.tokenizer(), template.policy().end_token_ids
    chat = TemplateFormat(tokenizer, ends)
    chat.check([])
    answer = "It is e." if template.pieces else "It is é."  # the small tokenizers lack some bytes
    asked, follow_up = Message("user", ("Say it.",)), Message("user", ("Again.",))
    opening = chat.opening([asked], [], [], 99)
    whole = ChatTemplate(tokenizer, {}, ends)
    both = [asked, Message("assistant", (answer,)), follow_up]
    expected = whole.render(both, opens=True, kept=[False] * 3)[0].text
    said = template.before.format(answer)
    generated = tokenizer.encode(said, add_special_tokens=False)
    turn = chat.read(generated, FinishReason.STOP, [])
    following = chat.following(turn, generated, [follow_up], 99)
    tokens = [*opening.token_ids, *generated, *following.token_ids]
    text = tokenizer.decode(tokens, skip_special_tokens=False)
    if template.pieces:  # a piece that is encoded alone begins with a space
        text, expected = text.replace(" ", ""), expected.replace(" ", "")
    assert text.replace("<think>\n", "") == expected.replace("<think>\n", "")


@pytest.mark.parametrize(("name", "syntax"), TOOL_TEMPLATES.items())
def test_the_syntax_of_calls_is_found_by_what_the_template_writes(name, syntax):
    tokenizer = BY_NAME[name].tokenizer()
    chat = TemplateFormat(tokenizer, BY_NAME[name].policy().end_token_ids)
    tools = LocalEnvironments(Echo).description.tools
    chat.check(tools)
    assert chat._syntax.name == syntax
    call = ToolCall("echo", {"text": 'a "b"\n', "flag": True})
    written = tokenizer.encode(chat.written_call(call), add_special_tokens=False)
    turn = chat.read(written, FinishReason.STOP, tools)
    assert [(each.name, each.arguments) for each in turn.message.calls] == [("echo", call.arguments)]
    assert not chat.read(written, FinishReason.STOP, []).message.calls


@pytest.mark.parametrize("name", ["chatml", "llama3", "deepseek_r1"])
def test_a_template_that_cannot_write_calls_is_refused(name):
    chat = TemplateFormat(BY_NAME[name].tokenizer(), BY_NAME[name].policy().end_token_ids)
    with pytest.raises(InputError, match="chat_template"):
        chat.check(LocalEnvironments(Echo).description.tools)


def test_without_a_template_texts_follow_each_other_and_tools_are_refused():
    tokenizer = byte_tokenizer()
    chat = PlainFormat(tokenizer)
    opening = chat.opening([Message("user", ("guess",))], [Message("user", (" 0 to 9",))], [], 99)
    generated = tokenizer.encode("4", add_special_tokens=False)
    following = chat.following(chat.read(generated, FinishReason.LENGTH, []), generated, [Message("user", ("no",))], 99)
    assert tokenizer.decode([*opening.token_ids, *generated, *following.token_ids]) == "guess 0 to 94no"
    with pytest.raises(InputError, match="has no chat template"):
        chat.check(LocalEnvironments(Echo).description.tools)


TOOLS = [{"function": {"name": "f", "parameters": {"properties": {"s": {"type": "string"}, "n": {"type": "integer"}}}}}]


@pytest.mark.parametrize(
    ("syntax", "text", "calls"),
    [
        ("tagged_json", 'x<tool_call>{"name": "f", "arguments": {}}</tool_call>', [("f", {})]),
        ("tagged_json", '<tool_call>{"name": "f", "arguments": "{\\"n\\": 1}"}</tool_call>', [("f", {"n": 1})]),
        ("tagged_json", '<tool_call>{"name": "f", "parameters": {"n": 1}}</tool_call>', [("f", {"n": 1})]),
        (
            "tagged_json",
            '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g"}</tool_call>',
            [("f", {}), ("g", {})],
        ),
        ("tagged_json", "no call", []),
        (
            "tagged_function",
            "<tool_call><function=f><parameter=s>\n12\n</parameter><parameter=n>\n-3\n</parameter></function></tool_call>",
            [("f", {"s": "12", "n": -3})],
        ),
        ("tagged_function", "<tool_call><function=f></function></tool_call>", [("f", {})]),
        (
            "tagged_pairs",
            "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>true</arg_value>\n</tool_call>",
            [("f", {"s": "true"})],
        ),
        ("listed_json", '[TOOL_CALLS] [{"name": "f", "arguments": {"n": 1}, "id": "abc"}]', [("f", {"n": 1})]),
        ("json", '{"name": "f", "parameters": {"n": 1}}; {"name": "g"}', [("f", {"n": 1}), ("g", {})]),
        ("json", 'The answer is {"name": 1}', []),
    ],
)
def test_calls_in_each_syntax(syntax, text, calls):
    (chosen,) = [each for each in SYNTAXES if each.name == syntax]
    assert [(call.name, call.arguments) for call in chosen.split(text, TOOLS)[1]] == calls


@pytest.mark.parametrize(
    ("syntax", "text"),
    [
        ("tagged_json", "<tool_call>{}</tool_call>"),
        ("tagged_json", "<tool_call>[1]</tool_call>"),
        ("tagged_json", '<tool_call>{"name": ""}</tool_call>'),
        ("tagged_json", '<tool_call>{"name": "f"'),
        ("tagged_json", '<tool_call>{"name": 3}</tool_call>'),
        ("tagged_function", "<tool_call>{}</tool_call>"),
        ("tagged_pairs", '<tool_call>{"name": "f"}</tool_call>'),
        ("listed_json", "[TOOL_CALLS] f()"),
        ("json", '{"name": "f"'),
        ("json", '{"name": ' + "[" * 100_000),
    ],
)
def test_calls_that_cannot_be_read(syntax, text):
    (chosen,) = [each for each in SYNTAXES if each.name == syntax]
    with pytest.raises(Unreadable):
        chosen.split(text, TOOLS)


def test_no_syntax_reads_what_an_unknown_template_writes():
    assert syntax_of(lambda call: f"call:{call.name}{{{call.arguments}}}") is None
