"""The learner function: a front that owns 1..N rank actors.

The front is the Serve replica; ranks are plain Ray actors that form a torch.distributed group and share the model's
parameters. One rank takes the same path as many. Each call goes to all ranks, `learn` with the whole batch; a rank
works on its share of the sequences. Rank 0 writes what is published. `learn` is idempotent by step: a repeated call
gets the first call's answer, so a retry can never take a second optimiser step. A lost rank breaks the whole group: the
fleet starts a new learner, which continues from a checkpoint.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Mapping
from typing import Any

import ray

from rlhfless.algorithms.batch import PackedBatch
from rlhfless.functions.base import Call, Function, ReplicaInfo, Reply, Usage
from rlhfless.functions.learner.group import RankGroup
from rlhfless.functions.learner.settings import LearnerSettings
from rlhfless.records import FloatArray, PublishedWeights


class LearnerFunction(Function):
    """The learner's front."""

    async def __init__(self, settings: LearnerSettings) -> None:  # type: ignore[misc]
        super().__init__(settings)
        self._settings = settings
        self._learning: tuple[Call, asyncio.Task[Reply[Mapping[str, float]]]] | None = None
        self._step = 0
        """The last training step of the weights."""
        self._asked = asyncio.Event()
        """Set, and replaced, when a step is to be learned."""
        ranks = [self._rank_actor(rank) for rank in range(settings.learner.world_size)]
        self._group = RankGroup(ranks, settings.call_timeout_s)
        with self.starting():
            # Rank 0 opens the rendezvous on its own node; the others need its address.
            on_one_node = len(set(await self._group.all("node"))) == 1
            address = await self._group.first("rendezvous", on_one_node)
            await self._group.all("start", address, on_one_node)

    def _rank_actor(self, rank: int) -> Any:
        from rlhfless.functions.learner.actor import RankActor

        options = {
            "num_cpus": 0,
            "num_gpus": 0,
            "label_selector": {"ray.io/node-id": self._settings.rank_bindings[rank].node},
            "max_restarts": 0,
            # A thread of its own, so that a rank that computes still answers `alive`.
            "concurrency_groups": {"signs_of_life": 1},
        }
        make: Any = ray.remote(**options)  # type: ignore[call-overload]  # Ray's types do not know every option
        return make(RankActor).remote(self._settings, rank)

    async def describe(self, call: Call) -> Reply[ReplicaInfo]:
        """The description of this replica; `pids` are the ranks'. Raises FunctionBroken if a rank is lost."""
        self.admit(call)
        start_s = time.time()
        pids = await self._group.all("pid")
        return self.reply(self.info(tuple(pids), self._step), start_s)

    async def renew(self, call: Call) -> Reply[None]:
        """See Function.renew; silent while a rank is."""
        self.admit(call)
        start_s = time.time()
        await self._group.all("alive")
        return self.reply(None, start_s)

    async def evaluate(self, call: Call, batch: PackedBatch) -> Reply[FloatArray]:
        """Old logprobs `[tokens]`: the policy before the first update of the step."""
        self.admit(call)
        start_s = time.time()
        values = (await self._group.all("evaluate", ray.put(batch)))[0]
        return self.reply(values, start_s, Usage(input_tokens=len(batch.tokens), sequences=batch.sequences))

    async def learn(self, call: Call, batch: PackedBatch, mini_batches: int) -> Reply[Mapping[str, float]]:
        """One training step: an optimiser step per mini-batch. Returns the metrics.

        Idempotent by step: a repeated call, even during the first, gets the answer of the first.
        """
        self.admit(call)
        if self._learning is None or self._learning[0] != call:
            self._learning = (call, asyncio.create_task(self._learn(call, batch, mini_batches)))
            self._asked.set()
            self._asked = asyncio.Event()
        return await asyncio.shield(self._learning[1])

    async def _learn(self, call: Call, batch: PackedBatch, mini_batches: int) -> Reply[Mapping[str, float]]:
        start_s = time.time()
        metrics = dict((await self._group.all("learn", ray.put(batch), mini_batches))[0])
        self._step = call.step
        shared = int(metrics.pop("shared_prompt_tokens", 0))
        usage = Usage(input_tokens=len(batch.tokens), cached_tokens=shared, sequences=batch.sequences)
        return self.reply(metrics, start_s, usage)

    async def meets(self, call: Call, token: str) -> Reply[tuple[str, ...]]:
        """What keeps ranks from reading a file that the run has written, and from writing beside it; empty if all
        can."""
        self.admit(call)
        start_s = time.time()
        found: list[str | None] = await self._group.all("meets", token)
        return self.reply(tuple(sorted({fault for fault in found if fault})), start_s)

    async def restore(self, call: Call, location: str) -> Reply[None]:
        """Go on from a checkpoint, as if its step were the last that was learned. Idempotent."""
        self.admit(call)
        start_s = time.time()
        await self._group.all("restore", location)
        self._learning, self._step = None, call.step
        return self.reply(None, start_s)

    async def publish(self, call: Call, *, perturbed: bool = False) -> Reply[PublishedWeights]:
        """Write the weights to the store as the version of `call`'s step, with a probe.

        If it is called together with the step's `learn`, it runs after that; raises what `learn` raised, or
        TimeoutError if `learn` is not called. `perturbed`: a version in which every tensor is slightly off, for the
        proof that loads reach every tensor.
        """
        self.admit(call)
        await self._learned(call.step)
        start_s = time.time()
        version, location, size_bytes, tensors = (
            await self._group.all("publish", call.run_id, call.attempt, call.step, perturbed)
        )[0]
        # From the last rank: the answers of all ranks are equal, and rank 0 has written the file that they check.
        probe = (await self._group.all("probe", perturbed))[-1]
        published = PublishedWeights(version, location, size_bytes, tensors, probe)
        usage = Usage(size_bytes=published.size_bytes, version=published.version.label)
        return self.reply(published, start_s, usage)

    async def _learned(self, step: int) -> None:
        """Returns when the weights have taken a step."""
        while self._step < step:
            if self._learning is not None and self._learning[0].step == step:
                await asyncio.shield(self._learning[1])
                continue
            limit_s = self._settings.call_timeout_s
            try:
                await asyncio.wait_for(self._asked.wait(), limit_s)
            except TimeoutError:
                raise TimeoutError(f"publish: no call asked to learn step {step} within {limit_s:.0f} s") from None

    async def checkpoint(self, call: Call, location: str, notes: Mapping[str, Any]) -> Reply[str]:
        """Save model, optimiser and the run's `notes`, beside and renamed. Returns the location."""
        self.admit(call)
        start_s = time.time()
        await self._group.all("save", location, notes)
        return self.reply(location, start_s)

    async def stop(self, call: Call) -> Reply[None]:
        """End the ranks; the front cannot work after that."""
        self.admit(call)
        start_s = time.time()
        self._group.end()
        return self.reply(None, start_s)

    def clean_up(self) -> None:
        """Remove the store: its files outlive processes, and no function of the run reads them any more."""
        shutil.rmtree(self._settings.store.folder, ignore_errors=True)
