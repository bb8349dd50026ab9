"""Shared prefixes go to an actor before the samples that begin with them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from rlhfless.fleet.replica import CallTimeout, Replica
from rlhfless.functions.generation.messages import PrecomputeRequest, SampleItem
from rlhfless.loop.rollout_request import RolloutRequest
from rlhfless.prefixes.precompute import to_precompute
from rlhfless.records import Work

log = logging.getLogger(__name__)


class Precomputation:
    """Of one generation stage, and so of one weight version."""

    def __init__(self, request: RolloutRequest, limit_s: float) -> None:
        """`limit_s` bounds each call to an actor."""
        self._request = request
        self._limit_s = limit_s
        self._known: dict[str, set[tuple[int, ...]]] = {}
        """Prefixes that each actor has been asked for."""

    async def before(self, actor: Replica, items: Sequence[SampleItem]) -> None:
        """Compute the prefixes that the prompts of these samples share, unless the actor has them from an earlier
        request. An actor that joins, or takes samples over, thus gets them first.

        It only saves time, so a call that takes too long is no fault: the engine computes the prefix with the first
        sample. Raises ReplicaLost, or what the actor raised.
        """
        if self._request.work is not Work.GENERATE:
            return
        prompts = list(dict.fromkeys(item.prompt_token_ids for item in items))
        known = self._known.setdefault(actor.name, set())
        prefixes = tuple(prefix for prefix in to_precompute(prompts) if prefix not in known)
        if not prefixes:
            return
        known.update(prefixes)
        asked = PrecomputeRequest(prefixes, self._request.version, actor.name)
        try:
            await actor.call(
                "precompute",
                self._request.call,
                asked,
                timeout_s=self._limit_s,
                waiting_for="shared prefixes",
                work=Work.PRECOMPUTE,
            )
        except CallTimeout as error:
            log.warning("%s; the samples are drawn without that", error)
