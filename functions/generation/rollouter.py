"""From a prompt to a finished sample: the step between the samples of a request and the engine.

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
    """Draws one sample, in one turn or several."""

    async def finish(self, item: SampleItem, draw: Draw) -> Sampled:
        """The whole response of a sample, with what an earlier actor had drawn of it. Raises what `draw` raises."""
        ...


def kept_tokens(item: SampleItem) -> int:
    """Tokens of an earlier actor that a sample keeps: the last one is drawn again, which shows whether both engines
    draw the same (rlhfless.orchestrator.in_flight_samples.Replayed)."""
    return 0 if item.prior is None else max(0, len(item.prior.token_ids) - 1)


class SingleTurn:
    """One response to the prompt, continued where an earlier actor stopped."""

    async def finish(self, item: SampleItem, draw: Draw) -> Sampled:
        prior, kept = item.prior, kept_tokens(item)
        if prior is None:
            return await draw(item.prompt_token_ids, 0)
        rest = await draw(item.prompt_token_ids + tuple(map(int, prior.token_ids[:kept])), kept)
        # A sample that was aborted in the queue has drawn nothing, and loses nothing.
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
