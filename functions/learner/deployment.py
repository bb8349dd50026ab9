"""The learner function: the policy that is trained (rlhfless.functions.training), and publishes. Rank 0 writes what is
published."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import ray

from rlhfless.algorithms.batch import PackedBatch
from rlhfless.functions.base import Call, CallUsage, Reply
from rlhfless.functions.launching import Launch
from rlhfless.functions.learner.actor import LearnerActor, LearnerSettings, StoreHome, SupervisedActor
from rlhfless.functions.training.deployment import TrainedFunction
from rlhfless.records import FloatArray, PublishedWeights, WeightVersion
from rlhfless.scaling.function_specs import FunctionSpec
from rlhfless.scaling.memory import kept_versions
from rlhfless.scaling.placement import Allocation

EXPORTED = "exported-state"
"""Folder of a state that passes from one group of ranks to the next, inside that of the weights."""

OWNER = ".owner"
"""In the store: the incarnation of the learner that was called last."""


class LearnerFunction(TrainedFunction):
    """The learner's front."""

    named = "learner"
    actor = LearnerActor

    async def __init__(self, settings: LearnerSettings) -> None:  # type: ignore[misc]
        self._settings = settings
        self._owns = False
        await super().__init__(settings)  # type: ignore[misc]  # Serve awaits constructors

    def actor_of(self, settings: LearnerSettings) -> type:
        """See RankedFunction."""
        return LearnerActor if settings.run_type == "rlhf" else SupervisedActor

    @staticmethod
    def settings_of(launch: Launch, kind: FunctionSpec, allocation: Allocation) -> LearnerSettings:
        """The settings of a replica in an allocation whose devices are bound."""
        spec = launch.spec
        return LearnerSettings(
            run_id=launch.run_id,
            lease=launch.lease,
            model=launch.within_context(spec.model),
            training=spec.learner,
            optimizer=spec.optimizer,
            algorithm=spec.algorithm,
            run_type=spec.type,
            dpo=spec.dpo,
            temperature=spec.generation.temperature,
            quantization=spec.generation.quantization,
            probe_token_ids=launch.probe_token_ids,
            read_back=spec.weights.read_back,
            store=StoreHome(
                str(launch.store_folder),
                launch.store_token,
                launch.store.transport,
                spec.scaling.generation.most_actors * spec.generation.engine.devices_per_actor,
            ),
            kept_versions=kept_versions(spec.schedule.steps_ahead),
            rank_bindings=launch.rank_bindings(kind, allocation),
            call_timeout_s=spec.timeouts.call_s,
            planned=launch.planned(kind, allocation),
        )

    async def export_state(self, call: Call) -> Reply[bool]:
        """Write the ranks' state beside the weights, in shared memory. Returns False if there is no room for it."""
        self.admit(call)
        start_s = time.time()
        written: list[bool] = await self._group.all("export_state", self._exported)
        return self.reply(all(written), start_s)

    async def import_state(self, call: Call) -> Reply[None]:
        """Continue from the state that the previous group exported after `call`'s step, and delete it. Idempotent."""
        if self._step == call.step:
            self.admit(call)
            return self.reply(None, time.time())
        reply = await self._take_state(call, "restore", self._exported)
        shutil.rmtree(self._exported, ignore_errors=True)
        return reply

    @property
    def _exported(self) -> str:
        return str(Path(self._settings.store.folder) / EXPORTED)

    async def evaluate(self, call: Call, batch: PackedBatch) -> Reply[FloatArray]:
        """Logprobs `[tokens]` of the current policy: before the first update of a step they are the old ones. Of a
        reward model, scores (rlhfless.functions.learner.supervised)."""
        self.admit(call)
        start_s = time.time()
        values = (await self._group.all("evaluate", ray.put(batch)))[0]
        return self.reply(values, start_s, CallUsage(input_tokens=len(batch.tokens), sequences=batch.sequences))

    async def publish(self, call: Call, *, perturbed: bool = False, averaged: bool = False) -> Reply[PublishedWeights]:
        """Write the weights to the store as the version of `call`'s step, with a probe.

        If it is called together with the step's `learn`, it runs after that; raises what `learn` raised, or
        TimeoutError if `learn` is not called. `perturbed`: a version in which every tensor is slightly off, for the
        proof that loads reach every tensor. `averaged`: the average of the weights (`learner.ema_decay`).
        """
        self.admit(call)
        await self._wait_learned(call.step)
        start_s = time.time()
        ((written,), *_) = await self._group.all("publish", call.run_id, call.attempt, call.step, perturbed, averaged)
        # From the last rank: the answers of all ranks are equal, and rank 0 has written the file that they check.
        logprobs = (await self._group.all("probe", perturbed, averaged))[-1]
        published = replace(written, probe=replace(written.probe, logprobs=logprobs))
        usage = CallUsage(size_bytes=published.size_bytes, version=published.version.label)
        return self.reply(published, start_s, usage)

    async def offers(self, call: Call, version: WeightVersion) -> Reply[bool]:
        """Whether `feed` can give a version: the weights have taken its step, and learn no other."""
        self.admit(call)
        return self.reply(self._offers(version), time.time())

    def _offers(self, version: WeightVersion) -> bool:
        learning = self._learning is not None and not self._learning[1].done()
        return version.step == self._step and not learning

    async def feed(self, call: Call, version: WeightVersion, workers: Sequence[int]) -> Reply[tuple[int, ...]]:
        """See LearnerActor.feed. Returns how many workers have taken the version on each GPU; nothing if it is not
        offered any more."""
        self.admit(call)
        start_s = time.time()
        taken: list[int] = await self._group.all("feed", version, tuple(workers)) if self._offers(version) else []
        return self.reply(tuple(taken), start_s)

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

    def admit(self, call: Call) -> None:
        """See Function. The first call makes the store this learner's."""
        super().admit(call)
        if not self._owns:
            with contextlib.suppress(OSError):  # the ranks have not made it yet
                (Path(self._settings.store.folder) / OWNER).write_text(self.incarnation)
                self._owns = True

    def clean_up(self) -> None:
        """Remove the store: its files outlive processes, and no function of the run reads them any more. Not that of a
        learner which has come in the place of this one, after Serve had restarted it."""
        folder = Path(self._settings.store.folder)
        with contextlib.suppress(OSError):
            if (folder / OWNER).read_text() != self.incarnation:
                return
        shutil.rmtree(folder, ignore_errors=True)
