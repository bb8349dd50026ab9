"""The learner function: a front whose ranks share the model and the batch (rlhfless.functions.ranks).

`learn` goes to all ranks with the whole batch. Rank 0 writes what is published. `learn` is idempotent by step: a
repeated call gets the first call's answer, so a retry can never take a second optimiser step. After a lost rank a new
learner continues from a checkpoint.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ray

from rlhfless.algorithms.batch import PackedBatch
from rlhfless.functions.base import Call, CallUsage, Reply
from rlhfless.functions.launching import Launch
from rlhfless.functions.learner.actor import LearnerActor, LearnerSettings, StoreHome
from rlhfless.functions.ranks.front import RankedFunction
from rlhfless.records import FloatArray, PublishedWeights
from rlhfless.scaling.function_kinds import FunctionKind
from rlhfless.scaling.placement import Allocation


class LearnerFunction(RankedFunction):
    """The learner's front."""

    named = "learner"
    actor = LearnerActor

    async def __init__(self, settings: LearnerSettings) -> None:  # type: ignore[misc]
        self._settings = settings
        self._learning: tuple[Call, asyncio.Task[Reply[Mapping[str, float]]]] | None = None
        self._step = 0
        """The last training step of the weights."""
        self._asked = asyncio.Event()
        """Set, and replaced, when a step is to be learned."""
        await super().__init__(settings)  # type: ignore[misc]  # Serve awaits constructors

    @staticmethod
    def settings_of(launch: Launch, kind: FunctionKind, allocation: Allocation) -> LearnerSettings:
        """The settings of a replica in an allocation whose devices are bound."""
        spec = launch.spec
        return LearnerSettings(
            run_id=launch.run_id,
            lease=launch.lease,
            model=spec.model,
            learner=spec.learner,
            optimizer=spec.optimizer,
            algorithm=spec.algorithm,
            temperature=spec.generation.temperature,
            probe_token_ids=launch.probe_token_ids,
            read_back=spec.weights.read_back,
            store=StoreHome(
                str(launch.store_folder),
                launch.store_token,
                launch.store.transport,
                spec.scaling.generation.most_actors * spec.generation.engine.tensor_parallel_size,
            ),
            rank_bindings=launch.rank_bindings(kind, allocation),
            call_timeout_s=spec.timeouts.call_s,
            planned=launch.planned(kind, allocation),
        )

    @property
    def _step_of_weights(self) -> int:
        return self._step

    async def evaluate(self, call: Call, batch: PackedBatch) -> Reply[FloatArray]:
        """Old logprobs `[tokens]`: the policy before the first update of the step."""
        self.admit(call)
        start_s = time.time()
        values = (await self._group.all("evaluate", ray.put(batch)))[0]
        return self.reply(values, start_s, CallUsage(input_tokens=len(batch.tokens), sequences=batch.sequences))

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
        usage = CallUsage(input_tokens=len(batch.tokens), cached_tokens=shared, sequences=batch.sequences)
        return self.reply(metrics, start_s, usage)

    async def check_shared_storage(self, call: Call, token: str) -> Reply[tuple[str, ...]]:
        """Why ranks cannot read a file that the run has written, or write beside it; empty if all can."""
        self.admit(call)
        start_s = time.time()
        answers: list[str | None] = await self._group.all("check_shared_storage", token)
        return self.reply(tuple(sorted({fault for fault in answers if fault})), start_s)

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
        await self._wait_learned(call.step)
        start_s = time.time()
        ((written,), *_) = await self._group.all("publish", call.run_id, call.attempt, call.step, perturbed)
        # From the last rank: the answers of all ranks are equal, and rank 0 has written the file that they check.
        logprobs = (await self._group.all("probe", perturbed))[-1]
        published = replace(written, probe=replace(written.probe, logprobs=logprobs))
        usage = CallUsage(size_bytes=published.size_bytes, version=published.version.label)
        return self.reply(published, start_s, usage)

    async def _wait_learned(self, step: int) -> None:
        """Wait until the weights have taken a step."""
        while self._step < step:
            if self._learning is not None and self._learning[0].step == step:
                await asyncio.shield(self._learning[1])
                continue
            limit_s = self._settings.call_timeout_s
            try:
                await asyncio.wait_for(self._asked.wait(), limit_s)
            except TimeoutError:
                raise TimeoutError(f"publish: no call asked to learn step {step} within {limit_s:.0f} s") from None

    async def checkpoint(self, call: Call, location: str, notes: Mapping[str, Any], background: bool) -> Reply[bool]:
        """Save model, optimiser and the run's `notes`, beside and renamed. Returns whether it is still being written:
        with `background`, and where there is memory for a copy of the state."""
        self.admit(call)
        start_s = time.time()
        later: list[bool] = await self._group.all("save", location, notes, background)
        return self.reply(all(later), start_s)

    async def wait_written(self, call: Call) -> Reply[None]:
        """Wait until the checkpoint that was begun is complete. Raises CheckpointError."""
        self.admit(call)
        start_s = time.time()
        await self._group.all("wait_written")
        return self.reply(None, start_s)

    def clean_up(self) -> None:
        """Remove the store: its files outlive processes, and no function of the run reads them any more."""
        shutil.rmtree(self._settings.store.folder, ignore_errors=True)
