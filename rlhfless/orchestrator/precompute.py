"""Gives actors the KV of prompts before their samples: whole prompts from actors that only prefill, where there are any
(rlhfless.orchestrator.prefill), or the prefixes that several prompts share.

The actor computes a shared prefix, or gets its KV from another actor of the stage where that is possible and takes
less time (rlhfless.scaling.engine_speeds). A transfer takes two calls: the actor that has the KV offers it, and the
other one takes it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from rlhfless.fleet.replica import CallTimeout, Replica, ReplicaLost
from rlhfless.functions.generation.messages import KvOffer, PrecomputeRequest, SampleItem
from rlhfless.orchestrator.in_flight_samples import RolloutRequest
from rlhfless.orchestrator.prefill import PrefillActors
from rlhfless.prefixes.precompute import CPU_BLOCK_TOKENS, to_precompute
from rlhfless.records import Work
from rlhfless.scaling.engine_speeds import PrefixMoves

log = logging.getLogger(__name__)

Prefix = tuple[int, ...]


class Precomputation:
    """The prefixes that are computed ahead for one generation stage."""

    def __init__(
        self,
        request: RolloutRequest,
        limit_s: float,
        moves: PrefixMoves | None = None,
        *,
        prefill: PrefillActors | None = None,
        in_flight: bool = False,
    ) -> None:
        """`limit_s` bounds each call to an actor. Without `moves` each actor computes its own prefixes. `in_flight`: an
        actor may load newer weights at any time."""
        self._prefill = prefill
        self._in_flight = in_flight
        self._request = request
        self._limit_s = limit_s
        self._moves = moves
        self._asked: dict[tuple[str, str], set[Prefix]] = {}
        """Prefixes and prompts that each actor has been asked for, by weight version."""
        self._have: dict[tuple[str, Prefix], list[Replica]] = {}
        """Actors that have computed a prefix with a version, or got it."""

    async def before(self, actor: Replica, items: Sequence[SampleItem], version: str) -> None:
        """Give an actor that serves `version` the prompts of these samples, or the prefixes that they share, unless it
        has them from an earlier request. An actor that joins, or takes samples over, thus gets them first.

        It only saves time, so a call that takes too long is no fault: the engine computes the prefix with the first
        sample. Raises ReplicaLost if this actor is lost, or what it raised.
        """
        if self._request.work is not Work.GENERATE:
            return
        prompts = list(dict.fromkeys(item.prompt_token_ids for item in items))
        asked = self._asked.setdefault((actor.name, version), set())
        if self._prefill is not None and await self._take_prompts(self._prefill, actor, prompts, version, asked):
            return
        prefixes = tuple(prefix for prefix in to_precompute(prompts) if prefix not in asked)
        if not prefixes:
            return
        asked.update(prefixes)
        try:
            start_s = time.monotonic()
            offers = [await self._offer(actor, prefix, version) for prefix in prefixes]
            await self._call(actor, prefixes, version, tuple(offers))
        except CallTimeout as error:
            log.warning("%s; the samples are drawn without that", error)
            return
        if self._moves is not None and all(offer is not None for offer in offers):
            self._moves.learn(max(map(len, prefixes)), time.monotonic() - start_s)
        for prefix in prefixes:
            self._have.setdefault((version, prefix), []).append(actor)

    async def _take_prompts(
        self,
        prefill: PrefillActors,
        actor: Replica,
        prompts: Sequence[Prefix],
        version: str,
        asked: set[Prefix],
    ) -> bool:
        """Give an actor the prompts from those that prefill; False if none of these has computed them. A prompt of less
        than a block has no KV that could be given."""
        new = tuple(prompt for prompt in prompts if len(prompt) > CPU_BLOCK_TOKENS and prompt not in asked)
        if not new:
            return True
        async with prefill.offers(self._request.call, new, version) as offers:
            if not offers:
                return False
            asked.update(new)
            try:
                start_s = time.monotonic()
                await self._call(actor, new, version, offers)
            except CallTimeout as error:
                log.warning("%s; the samples are drawn without that", error)
                return True
        if self._moves is not None and all(offer is not None for offer in offers):
            self._moves.learn(sum(map(len, new)), time.monotonic() - start_s)
        return True

    async def _offer(self, actor: Replica, prefix: Prefix, version: str) -> KvOffer | None:
        """The offer of an actor that has the prefix; None if to compute it takes less time."""
        others = [other for other in self._have.get((version, prefix), []) if other is not actor]
        others = [other for other in others if other.served == version]
        if not others or self._moves is None:
            return None
        if not self._moves.pay(actor.allocation.devices[0].kind, len(prefix), 0):
            return None
        try:
            (offer,) = await self._call(others[-1], (prefix,), version, (), offer=True)
        except (CallTimeout, ReplicaLost) as error:
            log.warning("%s; %s computes the prefix", error, actor.name)
            return None
        return offer

    async def _call(
        self,
        actor: Replica,
        prefixes: tuple[Prefix, ...],
        version: str,
        offers: tuple[KvOffer | None, ...],
        *,
        offer: bool = False,
    ) -> tuple[KvOffer | None, ...]:
        asked = PrecomputeRequest(prefixes, version, actor.name, offers, offer, self._in_flight)
        answers: tuple[KvOffer | None, ...] = await actor.call(
            "precompute",
            self._request.call,
            asked,
            timeout_s=self._limit_s,
            waiting_for="shared prefixes",
            work=Work.PRECOMPUTE,
        )
        return answers
