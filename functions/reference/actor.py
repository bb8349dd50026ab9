"""One rank of the reference as a Ray actor."""

from __future__ import annotations

from rlhfless.algorithms.batch import PackedBatch
from rlhfless.functions.ranks.actor import RankActor
from rlhfless.functions.reference.settings import ReferenceSettings
from rlhfless.records import FloatArray


class ReferenceActor(RankActor[ReferenceSettings]):
    """Rank `rank` of the reference; rank 0 gives the values of all."""

    named = "reference"

    def _load(self, address: str) -> None:
        from rlhfless.functions.ranks.process_group import join_frozen
        from rlhfless.functions.reference.model import ReferencePolicy

        settings = self._settings
        with self._memory_told("logprobs"):
            self._policy = ReferencePolicy(
                settings.model,
                dtype=settings.dtype,
                micro_batch_tokens=settings.micro_batch_tokens,
                share_prefixes=settings.share_prefixes,
                logits_elements=settings.logits_elements,
                temperature=settings.temperature,
                threads=self._threads,
                mesh=join_frozen(address, self._number, len(settings.rank_bindings), settings.call_timeout_s),
            )

    def logprobs(self, batch: PackedBatch) -> tuple[FloatArray | None, int]:
        """See ReferencePolicy.logprobs. *Collective.*"""
        with self._memory_told("logprobs"):
            values, shared_tokens = self._policy.logprobs(batch)
        return None if self._number else values, shared_tokens
