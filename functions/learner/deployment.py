"""The learner function: a front that owns 1..N rank actors.

The front is the Serve replica; ranks are plain Ray actors that form a torch.distributed group. One rank takes the
same path as many. Each call goes to all ranks with the whole batch; a rank works on its share of the sequences and
sums gradients with the others. Rank 0 publishes. `learn` is idempotent by step: a repeated call gets the first
call's answer, so a retry can never take a second optimiser step.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import ray

from rlhfless.algorithms.batch import PackedBatch
from rlhfless.functions.base import Call, Function, ReplicaInfo, Reply, Usage
from rlhfless.functions.learner.settings import LearnerSettings
from rlhfless.records import FloatArray, PublishedWeights


class LearnerFunction(Function):
    """The learner's front."""

    async def __init__(self, settings: LearnerSettings) -> None:  # type: ignore[misc]
        super().__init__(settings.run_id)
        self._settings = settings
        self._learned: tuple[Call, Mapping[str, float], Usage] | None = None
        self._ranks = [self._rank_actor(rank) for rank in range(settings.learner.ranks)]
        # Rank 0 opens the rendezvous on its own node; the others need its address.
        address = await self._ranks[0].rendezvous.remote()
        await self._all("start", address)

    def _rank_actor(self, rank: int) -> Any:
        from rlhfless.functions.learner.actor import RankActor

        options = {"num_cpus": 0, "resources": self._settings.rank_resources[rank], "max_restarts": 0}
        return ray.remote(RankActor).options(**options).remote(self._settings, rank)

    async def _all(self, method: str, *arguments: object) -> list[Any]:
        """One call to every rank, at the same time; large arguments are stored once."""
        refs = [getattr(rank, method).remote(*arguments) for rank in self._ranks]
        return await asyncio.wait_for(asyncio.gather(*refs), self._settings.call_timeout_s)

    async def describe(self, call: Call) -> Reply[ReplicaInfo]:
        """Who this replica is; `pids` are those of the ranks."""
        self.admit(call)
        start_s = time.time()
        pids = await self._all("pid")
        return self.reply(self.info(tuple(pids)), start_s)

    async def evaluate(self, call: Call, batch: PackedBatch) -> Reply[FloatArray]:
        """Old logprobs `[tokens]`: the policy before the first update of the step."""
        self.admit(call)
        start_s = time.time()
        values = (await self._all("evaluate", ray.put(batch)))[0]
        return self.reply(values, start_s, Usage(input_tokens=len(batch.tokens), sequences=batch.sequences))

    async def learn(self, call: Call, batch: PackedBatch, mini_batches: int) -> Reply[Mapping[str, float]]:
        """One training step: an optimiser step per mini-batch. Returns the metrics."""
        self.admit(call)
        start_s = time.time()
        if self._learned is None or self._learned[0] != call:
            metrics = (await self._all("learn", ray.put(batch), mini_batches))[0]
            usage = Usage(input_tokens=len(batch.tokens), sequences=batch.sequences)
            self._learned = (call, metrics, usage)
        return self.reply(self._learned[1], start_s, self._learned[2])

    async def publish(self, call: Call, *, perturbed: bool = False) -> Reply[PublishedWeights]:
        """Write the weights to the store as the version of `call`'s step, with a probe.

        `perturbed`: a version in which every tensor is slightly off, for the proof that loads reach every tensor.
        """
        self.admit(call)
        start_s = time.time()
        published: PublishedWeights = await asyncio.wait_for(
            self._ranks[0].publish.remote(call.run_id, call.attempt, call.step, perturbed),
            self._settings.call_timeout_s,
        )
        usage = Usage(size_bytes=published.size_bytes, version=published.version.label)
        return self.reply(published, start_s, usage)

    async def checkpoint(self, call: Call, folder: str) -> Reply[str]:
        """Save model and optimiser, in Hugging Face format, beside and renamed. Returns the folder."""
        self.admit(call)
        start_s = time.time()
        await asyncio.wait_for(self._ranks[0].save.remote(folder), self._settings.call_timeout_s)
        return self.reply(folder, start_s)

    async def stop(self, call: Call) -> Reply[None]:
        """End the ranks; the front answers nothing useful after that."""
        self.admit(call)
        start_s = time.time()
        for rank in self._ranks:
            ray.kill(rank)
        return self.reply(None, start_s)
