"""The reference function: logprobs of finished groups under the frozen policy. Not deployed when KL is off."""

from __future__ import annotations

import time

import ray

from rlhfless.algorithms.batch import PackedBatch
from rlhfless.functions.base import Call, Reply, Usage
from rlhfless.functions.ranks.front import RankedFunction
from rlhfless.records import FloatArray


class ReferenceFunction(RankedFunction):
    """One replica with the frozen policy, split over its ranks."""

    named = "reference"

    def _actor(self) -> type:
        from rlhfless.functions.reference.actor import ReferenceActor

        return ReferenceActor

    async def logprobs(self, call: Call, batch: PackedBatch) -> Reply[FloatArray]:
        """Reference logprobs `[tokens]` of a packed batch, 0 on prompt tokens."""
        self.admit(call)
        start_s = time.time()
        answers: list[tuple[FloatArray | None, int]] = await self._group.all("logprobs", ray.put(batch))
        (values,) = (values for values, _ in answers if values is not None)
        shared_tokens = sum(shared for _, shared in answers)
        usage = Usage(input_tokens=len(batch.tokens), cached_tokens=shared_tokens, sequences=batch.sequences)
        return self.reply(values, start_s, usage)
