"""Rollouters turn a prompt into a finished sample, between the samples of a request and the engine.

A rollouter calls `draw` once or several times; each call returns one model response to the tokens so far. A
multi-turn rollouter inserts an environment's tokens between two calls.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Protocol

from rlhfless.functions.generation.engine import Sampled
from rlhfless.functions.generation.messages import SampleItem
from rlhfless.records import VersionSpan

Draw = Callable[[tuple[int, ...], int], Awaitable[Sampled]]
"""`draw(token_ids, drawn_tokens)` returns the model's response to `token_ids` with the item's seed and the request's
sampling; the last `drawn_tokens` of them were generated earlier with that seed and count against `max_tokens`."""


class Rollouter(Protocol):
    """Generates one sample, in one turn or several."""

    async def finish(self, item: SampleItem, draw: Draw) -> Sampled:
        """Return the whole response of a sample, including an earlier actor's tokens. Raises the errors of `draw`."""
        ...


def kept_tokens(item: SampleItem) -> int:
    """Return how many tokens of an earlier actor a sample keeps: all but the last.

    The last is generated again to verify that both engines agree (rlhfless.orchestrator.in_flight_samples.Replayed).
    """
    return 0 if item.prior is None else max(0, len(item.prior.token_ids) - 1)


class SingleTurn:
    """Generates one response to the prompt, resuming where an earlier actor stopped."""

    async def finish(self, item: SampleItem, draw: Draw) -> Sampled:
        prior, kept = item.prior, kept_tokens(item)
        if prior is None:
            return await draw(item.prompt_token_ids, 0)
        rest = await draw(item.prompt_token_ids + tuple(map(int, prior.token_ids[:kept])), kept)
        # A sample aborted while queued has generated nothing, and loses nothing.
        if not rest.token_ids:
            kept, rest = len(prior.token_ids), replace(rest, text=prior.text)
        before = (VersionSpan(s.version, s.start, min(s.end, kept)) for s in prior.version_spans if s.start < kept)
        moved = (VersionSpan(s.version, s.start + kept, s.end + kept) for s in rest.version_spans)
        return replace(
            rest,
            token_ids=(*map(int, prior.token_ids[:kept]), *rest.token_ids),
            logprobs=(*prior.logprobs[:kept].tolist(), *rest.logprobs),
            version_spans=(*before, *moved),
        )
