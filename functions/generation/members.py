"""A run on a generation actor: the version that it generates with, its requests, and its view of a shared engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from rlhfless.functions.base import LeaseTerms
from rlhfless.functions.generation.engine import (
    EnginePart,
    LoadReport,
    Rest,
    RunEngine,
    Sampled,
    SampleRequest,
    SharedEngine,
)
from rlhfless.functions.generation.episodes import EpisodeRollouter, EpisodeSettings
from rlhfless.functions.generation.fair_queue import FairQueue, Ticket
from rlhfless.functions.generation.sampling import NOTHING_SAMPLED, RequestRun
from rlhfless.prefixes.evicted import CachedBlocks
from rlhfless.records import PublishedWeights, SleepTier, Slept
from rlhfless.weights.address import StoreAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTerms:
    """What a run sets on an actor for itself, also on one that it shares."""

    store: StoreAddress
    probe_tolerance: float
    """Largest difference between engine and learner in the logprob of a probe token."""
    lease: LeaseTerms
    episodes: EpisodeSettings | None = None
    """None in a run without an environment."""


@dataclass(eq=False)
class Member:
    """A run on an actor."""

    engine: RunEngine
    terms: RunTerms
    attempt: int = 0
    """The newest attempt of the run that has called."""
    loaded: PublishedWeights | None = None
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)
    requests: dict[RequestRun, int] = field(default_factory=dict)
    """Running requests, each with the attempt that asked."""
    cached: CachedBlocks = field(init=False)
    rollouter: EpisodeRollouter | None = field(init=False)

    def __post_init__(self) -> None:
        self.cached = CachedBlocks(self.engine.block_tokens)
        episodes = self.terms.episodes
        self.rollouter = None if episodes is None else EpisodeRollouter(episodes, episodes.chat_format())

    async def end_earlier(self, attempt: float) -> None:
        """Drop the samples of attempts before `attempt`.

        A killed driver's stream ends only at its next yield, and the resuming driver may arrive before that.
        """
        for run, asked in list(self.requests.items()):
            if asked < attempt:
                await run.cancel()


class MemberEngine:
    """A shared engine as one of its runs uses it; see RunEngine. Requests wait in the fair queue."""

    def __init__(self, engine: SharedEngine, queue: FairQueue, run_id: str, store: StoreAddress) -> None:
        self._engine = engine
        self._queue = queue
        self._run_id = run_id
        self._store = store
        self._tickets: dict[str, Ticket] = {}
        """Of waiting requests, by their ID."""
        self.rest = Rest()
        self.block_tokens = engine.block_tokens

    async def sample(self, request: SampleRequest) -> Sampled:
        """Generate one response once the run is admitted; see Engine.sample."""
        ticket = self._queue.enter(self._run_id, request.token_ids, request.max_tokens)
        self._tickets[request.request_id] = ticket
        try:
            is_admitted = await ticket.admitted
        except BaseException:
            self._queue.call_off(ticket)
            if ticket.is_admitted:  # and cancelled at the same time
                with self._queue.running(ticket):
                    pass
            raise
        finally:
            self._tickets.pop(request.request_id, None)
        if not is_admitted:
            return replace(NOTHING_SAMPLED, request_id=request.request_id)
        with self._queue.running(ticket) as generated:
            sampled = await self._engine.sample(replace(request, run_id=self._run_id))
            generated.append(len(sampled.token_ids))
            return sampled

    def progress(self) -> Mapping[str, int]:
        return self._engine.progress()

    async def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """End the given requests of the run; see Engine.abort."""
        assert request_ids is not None, "all requests of the engine are not all of the run"
        left = []
        for name in request_ids:
            ticket = self._tickets.get(name)
            if ticket is None or not self._queue.call_off(ticket):
                left.append(name)
        await self._engine.abort(left)

    async def load(self, published: PublishedWeights, *, in_flight: bool = False) -> LoadReport | None:
        """Load the run's adapter; see SharedEngine.load."""
        return await self._engine.load(published, in_flight=in_flight, store=self._store)

    async def logprobs(self, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        return await self._engine.logprobs(token_ids, self._run_id)

    async def sleep(self, tier: SleepTier) -> Slept:
        """Do nothing: a shared engine does not sleep."""
        return Slept(tier, 0, 0)

    async def wake(self, *parts: EnginePart) -> None:
        """Do nothing: a shared engine does not sleep."""

    def require_heartbeat(self, limit_s: float) -> None:
        self._engine.require_heartbeat(limit_s)

    async def leave(self) -> None:
        """Drop the run's adapters and its place in the queue."""
        await self._engine.leave(self._run_id)
        self._queue.drop(self._run_id)
