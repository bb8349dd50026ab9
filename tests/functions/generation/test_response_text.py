"""What rewards see of a response: its decoded tokens, without what closes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlhfless.functions.generation.engine import Sampled, SampleRequest
from rlhfless.functions.generation.response_text import closing_ids, closing_stops, response_text, with_text
from rlhfless.records import FinishReason, VersionSpan
from rlhfless.rewards import RewardSample
from rlhfless.rewards.builtin import Format, Regex
from rlhfless.spec import FormatSpec, RegexSpec

SPECIAL = ["<bos>", "<eos>", "<pad>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<answer>", "</answer>"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """One token for each character; the tags of the answer are special tokens."""
    words = {word: number for number, word in enumerate([*SPECIAL, *map(chr, range(32, 127)), "\n"])}
    made = Tokenizer(models.WordLevel(words, "<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        additional_special_tokens=SPECIAL[3:],
        clean_up_tokenization_spaces=True,
        chat_template=CHATML,
    )


ANSWERED = "<think>8 x 7</think><answer>56</answer>"


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (ANSWERED + "<eos>", ANSWERED),
        (ANSWERED + "<|im_end|>", ANSWERED),  # by the chat template
        (ANSWERED + "<|im_end|><eos><pad><pad>", ANSWERED),
        (ANSWERED, ANSWERED),
        (ANSWERED + " bye<eos>", ANSWERED + " bye"),
        ("a<eos>b<eos>", "a<eos>b"),  # in the midst of it, it is text
        ("<pad>a<eos>", "<pad>a"),
        ("<|im_start|>user<eos>", "<|im_start|>user"),
        ("a , b . don 't \n<eos>", "a , b . don 't \n"),  # no spaces are cleaned
        ("<eos>", ""),
        ("", ""),
    ],
)
def test_only_what_closes_a_response_is_left_out_of_its_text(tokenizer: Any, written: str, text: str) -> None:
    ids = tokenizer(written, add_special_tokens=False)["input_ids"]
    assert response_text(tokenizer, ids, closing_ids(tokenizer)) == text


def test_rewards_see_tags_that_are_special_tokens(tokenizer: Any) -> None:
    """Regex, format and math gave 0 for what they gave 1 for with plain tokens."""
    ids = tokenizer(ANSWERED + "<eos>", add_special_tokens=False)["input_ids"]
    seen = response_text(tokenizer, ids, closing_ids(tokenizer))
    sample = RewardSample("8 x 7?", seen, len(ids), FinishReason.STOP, {"answer": "56"})
    by_tags = FormatSpec.model_validate({"type": "format"})
    by_pattern = RegexSpec.model_validate(
        {"type": "regex", "pattern": "<answer>(.*?)</answer>$", "answer_field": "answer"}
    )
    assert (Format(by_tags).value(sample), Regex(by_pattern).value(sample)) == (1.0, 1.0)


def test_closing_tokens_are_the_models_ends_and_not_its_tags(tokenizer: Any) -> None:
    ids = tokenizer.convert_tokens_to_ids
    assert closing_ids(tokenizer) == {ids("<eos>"), ids("<pad>"), ids("<|im_end|>")}
    assert closing_ids(tokenizer, [ids("</answer>")]) > {ids("</answer>")}, "the model's generation_config says so"


@pytest.mark.parametrize(
    ("template", "closes"),
    [
        (None, False),
        ("{{ messages[1]['content'] }} <|im_end|>", True),
        ("{{ messages[1]['content'] }}\nEnd", False),
        ("{{ raise_exception('no') }}", False),
    ],
)
def test_what_a_template_writes_after_the_assistant_closes(tokenizer: Any, template: str, closes: bool) -> None:
    before, tokenizer.chat_template = tokenizer.chat_template, template
    try:
        ends = closing_ids(tokenizer) - {1, 2}
    finally:
        tokenizer.chat_template = before
    assert ends == ({tokenizer.convert_tokens_to_ids("<|im_end|>")} if closes else frozenset())


@pytest.mark.parametrize(
    ("name", "closes"),
    [
        ("<|im_end|>", True), ("<eos>", True), ("<|eot_id|>", True), ("<end_of_turn>", True), ("<|endoftext|>", True),
        ("<|end|>", True), ("<｜end▁of▁sentence｜>", True), ("<|end_of_text|>", True), ("</s>", True),  # noqa: RUF001
        ("</answer>", False), ("</think>", False), ("<|end_of_solution|>", False), ("a", False),
    ],
)  # fmt: skip
def test_stop_tokens_that_close_a_turn(name: str, closes: bool) -> None:
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, "<unk>")))
    if name != "a":
        made.add_special_tokens({"additional_special_tokens": [name]})
    token = made.convert_tokens_to_ids(name)
    assert closing_stops(made, [token]) == ({token} if closes else frozenset())


class Letters:
    """Token n is the letter n of the alphabet; token 0 ends. Two tokens of 26 are one letter, as bytes are."""

    def decode(self, token_ids: Sequence[int], **_options: bool) -> str:
        text = "".join("." if token == 0 else chr(96 + token) for token in token_ids)
        return text.replace("zz", "é")


def sampled(tokens: tuple[int, ...], stops: tuple[str, ...], drawn: tuple[int, ...] = ()) -> Sampled:
    """A prompt of one token, then what was drawn before, and now these tokens."""
    spans = (VersionSpan("v1", 0, 1), VersionSpan("v2", 1, len(tokens))) if tokens else ()
    logprobs = tuple(-float(token) for token in tokens)
    part = Sampled("r", tokens, logprobs, FinishReason.LENGTH, spans, 0, "part")
    request = SampleRequest("r", (9, *drawn), 1, 10, 1.0, stop=stops, drawn_tokens=len(drawn))
    return with_text(part, request, Letters(), {0})


@pytest.mark.parametrize("before", range(6))
@pytest.mark.parametrize(
    ("tokens", "stops", "text", "end"),
    [
        ((1, 2, 3, 4, 5, 0), (), "abcde", 6),
        ((1, 26, 26, 2, 3, 4), (), "aébcd", 6),  # decoded in two parts it would be azzb
        ((1, 2, 3, 4, 5, 6), ("fx", "cdef"), "abcdef", 6),  # the stop text is part of the response
        ((1, 2, 3, 4, 5, 6), ("x",), "abcdef", 6),
        ((1, 2, 3, 4, 5, 0), ("e.",), "abcde", 6),
    ],
)
def test_a_response_that_moved_has_the_text_of_one_that_did_not(
    tokens: tuple[int, ...], stops: tuple[str, ...], text: str, end: int, before: int
) -> None:
    found = sampled(tokens[before:], stops, tokens[:before])
    assert (found.text, before + len(found.token_ids)) == (text, end)


def test_a_stop_text_that_another_engine_began_ends_the_response() -> None:
    found = sampled((3, 4, 5), ("bc",), drawn=(1, 2))
    assert (found.text, found.token_ids, found.logprobs) == ("abc", (3,), (-3.0,))
    assert found.version_spans == (VersionSpan("v1", 0, 1),)
    assert found.finish_reason is FinishReason.STOP


def test_otherwise_the_text_is_whole_and_the_rest_as_it_was_drawn() -> None:
    found = sampled((3, 4, 5), ("xy",), drawn=(1, 2))
    assert (found.text, found.token_ids, found.finish_reason) == ("abcde", (3, 4, 5), FinishReason.LENGTH)


def test_a_stop_text_at_the_very_start_is_the_text() -> None:
    assert (sampled((1,), ("a",)).text, sampled((), ()).text) == ("a", "")
