"""Provide actors with the KV of prompts before their samples. With prefill actors, this is the KV of whole prompts;
otherwise each actor computes the prefixes that several of its prompts share.

`PrefillActors` sends prompts to the prefill actor that would finish them first, estimated from the tokens in its queue
plus the tokens of the prompts that it has not computed yet. Prompts with a common prefix therefore go to the same
actor until its queue is longer than others by more than the prefix. Another prefill actor starts while the expected
wait exceeds the time of a start; actors above `scaling.prefill.min_actors` are released when no prompt waits. Prefill
actors affect only speed: the generating actor computes any prompt that none of them has computed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence

from rlhfless.fleet.pool import ReplicaPool
from rlhfless.fleet.replica import CallTimeout, Replica, ReplicaLost
from rlhfless.functions.calls import Call
from rlhfless.functions.generation.messages import GenerateRequest, KvTransfer, PrecomputeRequest
from rlhfless.orchestrator.rollout_request import RolloutRequest
from rlhfless.prefixes.evicted import CachedBlocks
from rlhfless.prefixes.tree import CPU_BLOCK_TOKENS
from rlhfless.records import Work
from rlhfless.scaling.latency.fitted import EngineSpeeds

log = logging.getLogger(__name__)

Prompt = tuple[int, ...]
Offers = tuple[KvTransfer | None, ...]


class PrefillActors:
    """Sends prompts to the pool of prefill actors, and scales it by the waiting prompts."""

    def __init__(self, pool: ReplicaPool, speeds: EngineSpeeds, start_s: Callable[[], float], limit_s: float) -> None:
        """`start_s` returns the expected seconds of a start. `limit_s` is the timeout of each call."""
        self._pool = pool
        self._speeds = speeds
        self._start_s = start_s
        self._limit_s = limit_s
        self._queue: Counter[str] = Counter()
        """Tokens that each actor has still to compute, by name."""
        self._waiting: Counter[int] = Counter()
        """Number of prompts, by length, whose KV has not reached the actor that generates from them."""
        self._computed: dict[tuple[str, str], CachedBlocks] = {}
        """Blocks that each actor has computed, by name and weight version."""
        self._changed = asyncio.Event()
        pool.watch(self)

    @contextlib.asynccontextmanager
    async def offers(self, call: Call, prompts: Sequence[Prompt], version: str) -> AsyncIterator[Offers]:
        """Compute prompts, and yield an offer of the KV of each, valid within the block; empty if no actor could."""
        lengths = Counter(map(len, prompts))
        self._waiting += lengths
        try:
            self._start_if_it_pays(call)
            yield await self._computed_by_one(call, tuple(prompts), version)
        finally:
            self._waiting -= lengths
            if not self._waiting:
                self._release()

    async def _computed_by_one(self, call: Call, prompts: tuple[Prompt, ...], version: str) -> Offers:
        failed: set[str] = set()
        # The generating actor may have loaded the version before any prefill actor.
        await self._until(lambda: bool(self._able(version)) or not self._pool.up())
        while (actor := self._nearest(prompts, version, failed)) is not None:
            try:
                return await self._compute(actor, call, prompts, version)
            except (CallTimeout, ReplicaLost) as error:
                log.warning("%s; another actor computes the prompts", error)
                failed.add(actor.name)
                self._pool.replace_missing(call)
        return ()

    async def _compute(self, actor: Replica, call: Call, prompts: tuple[Prompt, ...], version: str) -> Offers:
        computed = self._of(actor, version)
        new_tokens = sum(len(prompt) - computed.add(prompt) for prompt in prompts)
        self._queue[actor.name] += new_tokens
        try:
            offers: Offers = await actor.call(
                "precompute",
                call,
                PrecomputeRequest(prompts, version, actor.name, offer=True),
                timeout_s=self._limit_s,
                waiting_for="prompts",
                work=Work.PRECOMPUTE,
            )
        finally:
            self._queue[actor.name] -= new_tokens
            self._changed.set()
        return offers

    def _nearest(self, prompts: Sequence[Prompt], version: str, failed: set[str]) -> Replica | None:
        """Return the actor with the fewest tokens to compute until it has these prompts; None if none is able."""

        def tokens(actor: Replica) -> int:
            computed = self._of(actor, version)
            return self._queue[actor.name] + sum(len(prompt) - computed.held(prompt) for prompt in prompts)

        return min((actor for actor in self._able(version) if actor.name not in failed), key=tokens, default=None)

    def _able(self, version: str) -> list[Replica]:
        return [actor for actor in self._pool.serving() if actor.served == version]

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition, at most `limit_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._limit_s):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()

    def _of(self, actor: Replica, version: str) -> CachedBlocks:
        key = actor.name, version
        if key not in self._computed:
            self._computed = {known: of for known, of in self._computed.items() if known[1] == version}
            self._computed[key] = CachedBlocks(CPU_BLOCK_TOKENS)
        return self._computed[key]

    # -- actors that join and leave (rlhfless.fleet.pool)

    @property
    def over(self) -> bool:
        return False

    def joined(self, slot: int) -> None:  # noqa: ARG002 (see Listener)
        """Recheck which actors serve."""
        self._changed.set()

    def missed(self, slot: int) -> None:  # noqa: ARG002 (see Listener)
        """Recheck which actors are expected."""
        self._changed.set()

    async def drain(self, replica: Replica) -> None:
        """Wait until an actor has computed its queue."""
        await self._until(lambda: not self._queue[replica.name])

    def _start_if_it_pays(self, call: Call) -> None:
        """Start another prefill actor if the present ones need more time for the waiting prompts than a start takes."""
        free = [slot for slot in range(len(self._pool.allocations)) if self._pool.state(slot) is None]
        if not free:
            return
        engine = self._speeds.model(self._pool.allocations[free[0]].devices[0].kind)
        work_s = sum(engine.prefill_s(length) * count for length, count in self._waiting.items())
        wait_s = work_s / max(self._pool.expected, 1)
        if wait_s > self._start_s():
            log.info("%d prompts wait for %.0f s: another prefill actor starts", self._waiting.total(), wait_s)
            self._pool.start(free[0], call)

    def _release(self) -> None:
        # A cancelled start counts as expected until it has ended.
        spare = max(self._pool.expected - self._pool.bounds.fewest, 0)
        there = [slot for slot in range(len(self._pool.allocations)) if self._pool.expects(slot)]
        for slot in there[len(there) - spare :]:
            self._pool.release(slot)


Prefix = tuple[int, ...]


class Precomputation:
    """Computes or transfers the KV of prompts and prefixes for the actors of one generation stage, once per actor."""

    def __init__(
        self,
        request: RolloutRequest,
        limit_s: float,
        *,
        prefill: PrefillActors | None = None,
        in_flight: bool = False,
    ) -> None:
        """`limit_s` is the timeout of each call. `in_flight`: an actor may load newer weights at any time."""
        self._prefill = prefill
        self._in_flight = in_flight
        self._request = request
        self._limit_s = limit_s
        self._asked: dict[tuple[str, str], set[Prefix]] = {}
        """Prefixes and prompts already requested, by actor and weight version."""

    async def before(self, actor: Replica, request: GenerateRequest) -> None:
        """Give an actor the KV of the prompts of a request's samples, or of their shared prefixes, unless an earlier
        request did. This includes actors that join mid-step or get migrated samples.

        A call that times out is only logged: the engine then computes the prefix with the first sample. Raises
        ReplicaLost if this actor is lost, or the actor's own error.
        """
        if self._request.work is not Work.GENERATE:
            return
        version = request.version
        asked = self._asked.setdefault((actor.name, version), set())
        if self._prefill is not None and await self._take_prompts(
            self._prefill, actor, request.prompts, version, asked
        ):
            return
        prefixes = tuple(prefix for prefix in request.prefixes if prefix not in asked)
        if prefixes:
            asked.update(prefixes)
            await self._call(actor, prefixes, version)

    async def _take_prompts(
        self,
        prefill: PrefillActors,
        actor: Replica,
        prompts: Sequence[Prefix],
        version: str,
        asked: set[Prefix],
    ) -> bool:
        """Give an actor the KV of prompts from prefill actors; return False if none could compute them. Prompts of at
        most one block have no KV to transfer."""
        new = tuple(prompt for prompt in prompts if len(prompt) > CPU_BLOCK_TOKENS and prompt not in asked)
        if not new:
            return True
        async with prefill.offers(self._request.call, new, version) as offers:
            if not offers:
                return False
            asked.update(new)
            await self._call(actor, new, version, offers)
        return True

    async def _call(
        self, actor: Replica, prefixes: tuple[Prefix, ...], version: str, offers: tuple[KvTransfer | None, ...] = ()
    ) -> None:
        request = PrecomputeRequest(prefixes, version, actor.name, offers, or_newer=self._in_flight)
        try:
            await actor.call(
                "precompute",
                self._request.call,
                request,
                timeout_s=self._limit_s,
                waiting_for="shared prefixes",
                work=Work.PRECOMPUTE,
            )
        except CallTimeout as error:
            log.warning("%s; the engine computes these prompts with their samples", error)
