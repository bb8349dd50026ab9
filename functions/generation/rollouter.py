"""Rollouters turn a prompt into a finished response, between the samples of a request and the engine.

A rollouter calls `generate` once or several times; each call returns one model response to the tokens so far. That of
several turns is in rlhfless.functions.generation.episodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from rlhfless.functions.calls import Call
from rlhfless.functions.generation.engine import Sampled
from rlhfless.functions.generation.messages import GenerateRequest, SampleItem
from rlhfless.records import Episode, RouteSpan, VersionSpan, routes_within


class Generate(Protocol):
    """Generates one turn of a sample."""

    async def __call__(
        self, token_ids: tuple[int, ...], *, seed: int, max_tokens: int, generated: int, response: int
    ) -> Sampled:
        """Return the model's turn after `token_ids`, with the request's sampling.

        The last `generated` of them were generated earlier with this seed, and count against `max_tokens`. The last
        `response` of them are the sample's response so far.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class SampleTask:
    """One sample of a request on this actor."""

    item: SampleItem
    request: GenerateRequest
    call: Call
    generate: Generate
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the sample is to leave this actor; `generate` then returns at once."""


@dataclass(frozen=True, slots=True)
class Response:
    """The whole response of a sample, including an earlier actor's tokens."""

    sampled: Sampled
    episode: Episode | None = None


class Rollouter(Protocol):
    """Generates one sample, in one turn or several."""

    async def finish(self, task: SampleTask) -> Response:
        """Return the response of a sample. Raises the errors of `generate`."""
        ...


@dataclass(frozen=True, slots=True)
class PriorTurn:
    """What an earlier actor generated of a turn."""

    token_ids: tuple[int, ...] = ()
    logprobs: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    version_spans: Sequence[VersionSpan] = ()
    text: str = ""
    routes: tuple[RouteSpan, ...] = ()

    @property
    def kept(self) -> int:
        """Number of tokens that are kept: all but the last, which is generated again to verify that both engines agree
        (rlhfless.orchestrator.in_flight_samples.Replayed)."""
        return max(0, len(self.token_ids) - 1)


async def continued(
    generate: Generate, context: tuple[int, ...], prior: PriorTurn, *, seed: int, max_tokens: int, response: int = 0
) -> Sampled:
    """Return a turn of which an earlier actor generated the beginning. `response`: response tokens in `context`."""
    kept = prior.kept
    rest = await generate(
        context + prior.token_ids[:kept], seed=seed, max_tokens=max_tokens, generated=kept, response=response + kept
    )
    # A turn aborted while queued has generated nothing, and loses nothing.
    if not rest.token_ids and prior.token_ids:
        kept, rest = len(prior.token_ids), replace(rest, text=prior.text)
    before = (VersionSpan(s.version, s.start, min(s.end, kept)) for s in prior.version_spans if s.start < kept)
    moved = (VersionSpan(s.version, s.start + kept, s.end + kept) for s in rest.version_spans)
    return replace(
        rest,
        token_ids=(*prior.token_ids[:kept], *rest.token_ids),
        logprobs=(*prior.logprobs[:kept].tolist(), *rest.logprobs),
        version_spans=(*before, *moved),
        routes=(*routes_within(prior.routes, 0, kept), *routes_within(rest.routes, 0, len(rest.token_ids), kept)),
    )


class SingleTurn:
    """Generates one response to the prompt, resuming where an earlier actor stopped."""

    async def finish(self, task: SampleTask) -> Response:
        """See Rollouter."""
        item, prior = task.item, PriorTurn()
        if item.prior is not None:
            tokens = tuple(map(int, item.prior.token_ids))
            before = item.prior
            prior = PriorTurn(tokens, before.logprobs, before.version_spans, before.text, before.routes)
        max_tokens = task.request.sampling.max_tokens
        return Response(
            await continued(task.generate, item.prompt_token_ids, prior, seed=item.seed, max_tokens=max_tokens)
        )
