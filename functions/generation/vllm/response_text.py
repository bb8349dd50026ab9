"""The text of a response that two actors drew, as one actor would have made it. Pure, but for the tokenizer."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rlhfless.functions.generation.engine import Sampled, SampleRequest
from rlhfless.records import FinishReason, VersionSpan


def as_one(sampled: Sampled, request: SampleRequest, tokenizer: Any) -> Sampled:
    """What was drawn for a request that continues a response, with the text of the whole response; cut where a stop
    text ends that another engine began."""
    drawn = request.token_ids[len(request.token_ids) - request.drawn_tokens :]
    text, tokens = text_and_end(tokenizer, drawn + sampled.token_ids, request.stop)
    end = tokens - len(drawn)
    if end >= len(sampled.token_ids):
        return replace(sampled, text=text)
    spans = (VersionSpan(s.version, s.start, min(s.end, end)) for s in sampled.version_spans if s.start < end)
    return replace(
        sampled,
        text=text,
        token_ids=sampled.token_ids[:end],
        logprobs=sampled.logprobs[:end],
        version_spans=tuple(spans),
        finish_reason=FinishReason.STOP,
    )


def text_and_end(tokenizer: Any, token_ids: Sequence[int], stops: Sequence[str]) -> tuple[str, int]:
    """The text of a response of `token_ids` [response], and how many of these tokens it has.

    Decoding the two parts separately could give another text where they meet, and a stop text may span them, so that
    neither engine has seen it whole: the response ends with the token that completes it, and the text before it.
    """

    def text_of(tokens: int) -> str:
        return str(tokenizer.decode(token_ids[:tokens], skip_special_tokens=True))

    def stopped(tokens: int) -> bool:
        return any(stop in text_of(tokens) for stop in stops)

    if not stops or not stopped(len(token_ids)):
        return text_of(len(token_ids)), len(token_ids)
    end = bisect_left(range(len(token_ids)), True, key=stopped)
    text = text_of(end)
    return text[: min(text.find(stop) for stop in stops if stop in text)], end
