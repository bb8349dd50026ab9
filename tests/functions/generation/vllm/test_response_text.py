"""The text of a response that two engines drew."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rlhfless.functions.generation.engine import Sampled, SampleRequest
from rlhfless.functions.generation.vllm.response_text import as_one, text_and_end
from rlhfless.records import FinishReason, VersionSpan


class Letters:
    """Token n is the letter n of the alphabet; token 0 is special. Two tokens of 26 are one letter, as bytes are."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        text = "".join("" if token == 0 else chr(96 + token) for token in token_ids)
        return text.replace("zz", "é")


@pytest.mark.parametrize(
    ("tokens", "stops", "text", "end"),
    [
        ([1, 2, 3, 0], (), "abc", 4),
        ([1, 26, 26, 2], (), "aéb", 4),  # decoded in two parts it would be azzb
        ([1, 2, 3, 4, 5], ("cd",), "ab", 4),
        ([1, 2, 3, 4, 5], ("d", "bc"), "a", 3),
        ([1, 2, 3], ("x",), "abc", 3),
    ],
)
def test_text_and_end_by_hand(tokens: list[int], stops: tuple[str, ...], text: str, end: int) -> None:
    assert text_and_end(Letters(), tokens, stops) == (text, end)


def continued(tokens: tuple[int, ...], stops: tuple[str, ...]) -> Sampled:
    """A prompt of one token, `ab` drawn before, and now these tokens."""
    spans = (VersionSpan("v1", 0, 1), VersionSpan("v2", 1, len(tokens)))
    reason = FinishReason.LENGTH
    sampled = Sampled("r", tokens, tuple(-float(token) for token in tokens), reason, spans, 0, "part")
    return as_one(sampled, SampleRequest("r", (9, 1, 2), 1, 10, 1.0, stop=stops, drawn_tokens=2), Letters())


def test_a_stop_text_that_another_engine_began_ends_the_response() -> None:
    found = continued((3, 4, 5), ("bc",))
    assert (found.text, found.token_ids, found.logprobs) == ("a", (3,), (-3.0,))
    assert found.version_spans == (VersionSpan("v1", 0, 1),)
    assert found.finish_reason is FinishReason.STOP


def test_otherwise_the_text_is_whole_and_the_rest_as_it_was_drawn() -> None:
    found = continued((3, 4, 5), ("xy",))
    assert (found.text, found.token_ids, found.finish_reason) == ("abcde", (3, 4, 5), FinishReason.LENGTH)
