"""From a prompt to a finished sample: what stands between the samples of a request and the engine.

A rollouter draws once or several times; `draw` gives it one response of the model to the tokens so far. The first one
draws a single turn. A rollouter of several turns puts an environment's tokens between two draws.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Protocol

from rlhfless.functions.generation.engine import Sampled
from rlhfless.functions.generation.messages import SampleItem
from rlhfless.records import VersionSpan

Draw = Callable[[tuple[int, ...], int], Awaitable[Sampled]]
"""`draw(token_ids, drawn_tokens)`: the model's response to `token_ids` with the item's seed and the request's sampling;
the last `drawn_tokens` of them were drawn with that seed before, and count against `max_tokens`."""


class Rollouter(Protocol):
    """How one sample comes about."""

    async def finish(self, item: SampleItem, draw: Draw) -> Sampled:
        """The whole response of a sample, with what an earlier actor had drawn of it. Raises what `draw` raises."""
        ...


class SingleTurn:
    """One response to the prompt, continued where an earlier actor stopped."""

    async def finish(self, item: SampleItem, draw: Draw) -> Sampled:
        prior = item.prior
        if prior is None:
            return await draw(item.prompt_token_ids, 0)
        before = tuple(int(token) for token in prior.token_ids)
        rest = await draw(item.prompt_token_ids + before, len(before))
        moved = (
            VersionSpan(span.version, span.start + len(before), span.end + len(before)) for span in rest.version_spans
        )
        return replace(
            rest,
            token_ids=before + rest.token_ids,
            logprobs=(*prior.logprobs.tolist(), *rest.logprobs),
            version_spans=(*prior.version_spans, *moved),
        )
