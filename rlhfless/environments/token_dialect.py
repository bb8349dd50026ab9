"""vLLM's `POST /inference/v1/generate`: clients that render conversations themselves send tokens and get tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhfless.spec.explain import shown


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """A client's request for a turn."""

    token_ids: tuple[int, ...]
    """All tokens of the conversation so far."""
    max_tokens: int | None


_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "features": (None,),
    "content_parts": (None, []),
    "output_mode": (None, "tokens"),
    "stream": (None, False),
    "kv_transfer_params": (None,),
}
"""Keys that episodes do not support, with their values without an effect."""

_UNSUPPORTED_SAMPLING: Mapping[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "stop": (None, [], ""),
    "stop_token_ids": (None, []),
    "prompt_logprobs": (None,),
    "structured_outputs": (None,),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None, []),
}
"""Of `sampling_params`. Temperature and other sampling are those of the run, as the model learns from what it
samples."""


def parsed(body: Mapping[str, Any]) -> TokenRequest:
    """Return a request. Raises ValueError for one that an episode cannot answer as it asks."""
    sampling = body.get("sampling_params") or {}
    if not isinstance(sampling, Mapping):
        raise ValueError(f"`sampling_params` is {shown(sampling)}; it must be an object")
    for given, unsupported in ((body, _UNSUPPORTED), (sampling, _UNSUPPORTED_SAMPLING)):
        for key, usual in unsupported.items():
            if given.get(key) not in usual:
                raise ValueError(f"`{key}` is {shown(given[key])}, which episodes do not support; leave it out")
    tokens = body.get("token_ids")
    if not isinstance(tokens, list) or not tokens or any(type(token) is not int or token < 0 for token in tokens):
        raise ValueError(f"`token_ids` is {shown(tokens)}; it must be a list of token ids")
    return TokenRequest(tuple(tokens), sampling.get("max_tokens"))


def written(token_ids: Sequence[int], logprobs: Sequence[float], is_cut: bool, number: int) -> dict[str, Any]:
    """Return a turn as a response. `logprobs`: those of the sampled tokens."""
    content: list[dict[str, Any]] = [
        {"token_id": token, "logprob": logprob, "rank": None, "top_logprobs": []}
        for token, logprob in zip(token_ids, logprobs, strict=True)
    ]
    choice = {
        "index": 0,
        "token_ids": [*token_ids],
        "logprobs": {"content": content},
        "finish_reason": "length" if is_cut else "stop",
    }
    return {"request_id": f"generate-{number}", "choices": [choice]}
