"""Puts the KV of prompts into an actor before its samples: of whole prompts where prefill actors compute them
(rlhfless.orchestrator.prefill), else of the prefixes that several prompts share, which the actor computes itself."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from rlhfless.fleet.replica import CallTimeout, Replica
from rlhfless.functions.generation.messages import KvOffer, PrecomputeRequest, SampleItem
from rlhfless.orchestrator.in_flight_samples import RolloutRequest
from rlhfless.orchestrator.prefill import PrefillActors
from rlhfless.prefixes.precompute import CPU_BLOCK_TOKENS, to_precompute
from rlhfless.records import Work

log = logging.getLogger(__name__)

Prefix = tuple[int, ...]


class Precomputation:
    """The prompts and prefixes that each actor has, for one generation stage."""

    def __init__(
        self,
        request: RolloutRequest,
        limit_s: float,
        *,
        prefill: PrefillActors | None = None,
        in_flight: bool = False,
    ) -> None:
        """`limit_s` bounds each call to an actor. `in_flight`: an actor may load newer weights at any time."""
        self._prefill = prefill
        self._in_flight = in_flight
        self._request = request
        self._limit_s = limit_s
        self._asked: dict[tuple[str, str], set[Prefix]] = {}
        """Prefixes and prompts that each actor has been asked for, by weight version."""

    async def before(self, actor: Replica, items: Sequence[SampleItem], version: str) -> None:
        """Give an actor that serves `version` the prompts of these samples, or the prefixes that they share, unless it
        has them from an earlier request. Actors that join in mid-step, or get migrated samples, get them first, too.

        A call that takes too long is logged and otherwise ignored: the engine then computes the prefix with the first
        sample. Raises ReplicaLost if this actor is lost, or what it raised.
        """
        if self._request.work is not Work.GENERATE:
            return
        prompts = list(dict.fromkeys(item.prompt_token_ids for item in items))
        asked = self._asked.setdefault((actor.name, version), set())
        if self._prefill is not None and await self._take_prompts(self._prefill, actor, prompts, version, asked):
            return
        prefixes = tuple(prefix for prefix in to_precompute(prompts) if prefix not in asked)
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
        """Give an actor the KV of prompts from prefill actors; False if none has computed them. Prompts shorter than a
        block have no KV to give."""
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
        self, actor: Replica, prefixes: tuple[Prefix, ...], version: str, offers: tuple[KvOffer | None, ...] = ()
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
