"""The reference function: logprobs of finished groups under the frozen policy. Not deployed when KL is off."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from rlhfless.algorithms.batch import PackedBatch
from rlhfless.functions.base import Call, DeviceBinding, Function, Reply, Usage
from rlhfless.functions.lease import LeaseTerms
from rlhfless.functions.out_of_memory import Planned, memory_told
from rlhfless.records import FloatArray
from rlhfless.spec import DType, ModelSpec


@dataclass(frozen=True, slots=True)
class ReferenceSettings:
    """The settings of a reference replica."""

    run_id: str
    lease: LeaseTerms
    model: ModelSpec
    dtype: DType
    micro_batch_tokens: int
    share_prefixes: bool
    temperature: float
    binding: DeviceBinding
    planned: Planned = field(default_factory=dict)


class ReferenceFunction(Function):
    """One replica with the frozen policy."""

    def __init__(self, settings: ReferenceSettings) -> None:
        super().__init__(settings)
        settings.binding.bind()
        from rlhfless.functions.reference.model import ReferencePolicy

        self._planned = settings.planned
        with self.starting(), memory_told("reference", "logprobs", self._planned):
            self._policy = ReferencePolicy(
                settings.model,
                dtype=settings.dtype,
                micro_batch_tokens=settings.micro_batch_tokens,
                share_prefixes=settings.share_prefixes,
                temperature=settings.temperature,
                threads=len(settings.binding.ids),
            )

    async def logprobs(self, call: Call, batch: PackedBatch) -> Reply[FloatArray]:
        """Reference logprobs `[tokens]` of a packed batch, 0 on prompt tokens."""
        self.admit(call)
        start_s = time.time()
        with memory_told("reference", "logprobs", self._planned):
            values, shared_tokens = await asyncio.to_thread(self._policy.logprobs, batch)
        usage = Usage(input_tokens=len(batch.tokens), cached_tokens=shared_tokens, sequences=batch.sequences)
        return self.reply(values, start_s, usage)
