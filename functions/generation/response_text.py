"""The text of a response, as rewards, traces and the web page see it.

Text and tokens agree: the text is the decoded tokens, including special tokens. Only tokens that close a response
(end of sequence, end of turn, padding) are dropped, and only at its end. A stop text is part of the response,
because its tokens are, and the policy learns them.
"""

from __future__ import annotations

import contextlib
import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from rlhfless.functions.generation.engine import Sampled, SampleRequest
from rlhfless.records import FinishReason, VersionSpan, routes_within

_CLOSES_A_TURN = re.compile(
    r"</s>|\W*(eos|eot|eom|im_end|end|return|call|pad|end[_▁]?of[_▁]?(turn|text|sentence|sequence|utterance|message))"
    r"([_▁]?(id|token))?\W*",
    re.IGNORECASE,
)
"""Names of such tokens in common tokenizers. `</answer>` is not one of them: it is part of the answer."""

_SAID = "said by the assistant"


def response_text(tokenizer: Any, token_ids: Sequence[int], end_ids: Collection[int]) -> str:
    """Decode `token_ids` [response] without trailing `end_ids`."""
    count = len(token_ids)
    while count and token_ids[count - 1] in end_ids:
        count -= 1
    return _decoded(tokenizer, token_ids[:count])


def closing_ids(tokenizer: Any, eos_token_ids: Iterable[int] = ()) -> frozenset[int]:
    """Return the tokens that close a response of a model.

    These are end of sequence (the tokenizer's, and `eos_token_ids` of the model's generation_config.json), padding,
    and the token that the chat template writes after an assistant's message.
    """
    ids = {tokenizer.eos_token_id, tokenizer.pad_token_id, *eos_token_ids}
    if getattr(tokenizer, "chat_template", None):
        with contextlib.suppress(Exception):  # a template is a program by the model's author, and may raise any error
            messages = [{"role": "user", "content": "asked"}, {"role": "assistant", "content": _SAID}]
            after = str(tokenizer.apply_chat_template(messages, tokenize=False)).rpartition(_SAID)[2].strip()
            first = tokenizer(after, add_special_tokens=False)["input_ids"][:1]
            ids |= {token for token in first if _is_special(tokenizer, token)}
    return frozenset(ids - {None})


def closing_stops(tokenizer: Any, stop_token_ids: Iterable[int]) -> frozenset[int]:
    """Return the stop tokens that close a turn, such as `<|im_end|>`; other stop tokens are part of the response."""
    return frozenset(
        token
        for token in stop_token_ids
        if _is_special(tokenizer, token) and _CLOSES_A_TURN.fullmatch(_decoded(tokenizer, [token]).strip())
    )


def with_text(sampled: Sampled, request: SampleRequest, tokenizer: Any, end_ids: Collection[int]) -> Sampled:
    """Add the text of the whole response, including the tokens of a request that it continues.

    The response is cut after the token that completes the first stop text: an engine that continues a response
    cannot see a stop text that started in earlier tokens.
    """
    drawn = request.token_ids[len(request.token_ids) - request.drawn_tokens :]
    whole = drawn + sampled.token_ids
    end = max(_stopped_at(tokenizer, whole, request.stop) - len(drawn), min(len(sampled.token_ids), 1))
    text = response_text(tokenizer, whole[: len(drawn) + end], end_ids)
    if end >= len(sampled.token_ids):
        return replace(sampled, text=text)
    spans = (VersionSpan(s.version, s.start, min(s.end, end)) for s in sampled.version_spans if s.start < end)
    return replace(
        sampled,
        text=text,
        token_ids=sampled.token_ids[:end],
        logprobs=sampled.logprobs[:end],
        version_spans=tuple(spans),
        routes=routes_within(sampled.routes, 0, end),
        finish_reason=FinishReason.STOP,
    )


def _stopped_at(tokenizer: Any, token_ids: Sequence[int], stops: Sequence[str]) -> int:
    """Return how many tokens complete the first stop text, or all if there is none."""

    def stopped(tokens: int) -> bool:
        text = _decoded(tokenizer, token_ids[:tokens])
        return any(stop in text for stop in stops)

    if not stops or not stopped(len(token_ids)):
        return len(token_ids)
    return bisect_left(range(len(token_ids)), True, key=stopped)


def _decoded(tokenizer: Any, token_ids: Sequence[int]) -> str:
    # Cleaning would remove spaces that the policy wrote, such as the one in `a = b . c`.
    return str(tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _is_special(tokenizer: Any, token_id: int) -> bool:
    added = getattr(tokenizer, "added_tokens_decoder", {}).get(token_id)
    return token_id in tokenizer.all_special_ids or (added is not None and bool(added.special))
