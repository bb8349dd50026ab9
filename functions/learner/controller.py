"""The learner function: its controller, its rank actors, and its side of the weight store."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from rlhfless.algorithms.batch import PackedBatch
from rlhfless.functions.base import CallResult, admitted
from rlhfless.functions.calls import Call, CallUsage, Reply
from rlhfless.functions.launching import Launch
from rlhfless.functions.training.controller import TrainedFunction, TrainedSettings, TrainingActor
from rlhfless.records import FloatArray, Probe, PublishedWeights, WeightVersion
from rlhfless.scaling.function_specs import FunctionSpec
from rlhfless.scaling.memory import kept_versions
from rlhfless.scaling.placement import Allocation
from rlhfless.spec import DPOSpec, LearnerSpec, RunType, Transport
from rlhfless.spec.generation import Quantization
from rlhfless.weights.address import StoreAddress

if TYPE_CHECKING:
    from rlhfless.functions.learner.rank import LearnerRank, SupervisedRank
    from rlhfless.functions.training.checkpoint import Savers
    from rlhfless.weights.store import WeightStore

OWNER = ".owner"
"""File in the store that names the last called incarnation of the learner."""


@dataclass(frozen=True, slots=True)
class StoreHome:
    """The learner's side of the weight store."""

    folder: str
    token: str = field(default="", repr=False)
    """If set, serve the folder over HTTP to requests that carry this token."""
    transport: Transport = "file"
    readers: int = 0
    """Workers of all engines together, the receivers of a broadcast."""

    def open(self, host: str) -> WeightStore:
        """Open the store. With a token, serve it from threads of this process at `host`, this node's address."""
        # Imported here: they import torch, and the controller never opens the store.
        from rlhfless.weights.broadcast import Broadcaster
        from rlhfless.weights.buckets import BucketStore
        from rlhfless.weights.digest import piece_hash_of
        from rlhfless.weights.http import HttpStoreServer
        from rlhfless.weights.store import FolderStore

        if not self.token:
            store = BucketStore(self.folder) if self.transport == "cuda_ipc" else FolderStore(self.folder)
            self.mark()
            return store
        join = Broadcaster(self.folder, host, self.readers).join if self.transport == "nccl" else None
        of_piece = piece_hash_of(self.transport)
        return HttpStoreServer(self.folder, host=host, token=self.token, join=join, of_piece=of_piece)

    def mark(self) -> None:
        """Mark the folder as the learner's (StoreAddress.require_shared), per version in case the folder was lost."""
        if not self.token:
            StoreAddress("file", self.folder).mark()


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSettings(TrainedSettings):
    """Settings of the learner function."""

    training: LearnerSpec
    run_type: RunType
    dpo: DPOSpec
    temperature: float
    quantization: Quantization
    """Quantization of the engines."""
    publishes_adapters: bool
    """Whether a version is an adapter alone."""
    routes_folder: str
    """Folder of the engines' routes."""
    probe_token_ids: tuple[int, ...]
    """Tokens of the probe. Each published version carries the learner's logprobs of them."""
    read_back: bool
    """Publish samples of the weights for engines to compare with their own."""
    store: StoreHome
    kept_versions: int
    """Newest versions to keep in the store for steps that may still generate with them (scaling.memory)."""


LEARNER_PHASES: Mapping[str, str] = {**TrainingActor.phases, "evaluate": "learn", "compute": "learn"}


class LearnerActor(TrainingActor[LearnerSettings]):
    """Rank `rank` of the learner; rank 0 publishes."""

    named = "learner"
    phases = LEARNER_PHASES
    _rank: LearnerRank
    _store: Any
    """A WeightStore, or a BucketStore if engines share the ranks' GPUs."""

    def __init__(self, settings: LearnerSettings, rank: int) -> None:
        super().__init__(settings, rank)
        self._published: list[WeightVersion] = []
        """Versions in the store, oldest first, including those of earlier rank groups."""
        self._averaged: WeightVersion | None = None
        """The last published average of the weights."""

    @property
    def shares_device_memory(self) -> bool:
        """Return whether engines map the bucket of this rank."""
        return self._settings.store.transport == "cuda_ipc"

    @property
    def reaches_other_nodes(self) -> bool:
        """Return whether rank 0 creates a broadcast group, whose ID holds the address of rank 0's socket."""
        return self._settings.store.transport == "nccl"

    def _load(self, address: str) -> None:
        from rlhfless.functions.learner.rank import LearnerRank

        settings = self._settings
        self._store = settings.store.open(self.node())
        self._published = list(self._store.versions())
        self._rank = self._joined(
            address,
            LearnerRank,
            settings.algorithm,
            settings.temperature,
            settings.quantization,
            settings.publishes_adapters,
            settings.routes_folder,
        )

    def publish(self, run_id: str, attempt: int, step: int, averaged: bool) -> tuple[PublishedWeights, ...]:
        """Write the weights to the store. Rank 0 returns the version with samples, without logprobs. *Collective.*"""
        from rlhfless.functions.training.checkpoint import drain
        from rlhfless.functions.training.shared_writing import SharedWriting

        with self._at_work("publish"), self._as_published(averaged):
            tokens = self._settings.probe_token_ids if self._settings.read_back else ()
            writers = self._writers
            stream, samples = self._rank.published(tokens, own_experts=writers is not None)
            together = None if writers is None else SharedWriting(stream, samples, self._store.of_piece, writers)
            # An average that equals a live version, because there were no updates, stays.
            if averaged and self._averaged is not None and self._averaged not in self._published:
                self._store.delete(self._averaged)
            try:
                if self._number:
                    return ()
                stored = self._store.put(run_id, attempt, step, stream, together)
            finally:  # also if the store is full: the other ranks wait for each tensor
                drain(stream) if together is None else together.end()
            self._settings.store.mark()
        if averaged:
            self._averaged = stored.version
        else:
            self._published = [*(each for each in self._published if each != stored.version), stored.version]
            while len(self._published) > self._settings.kept_versions:
                self._store.delete(self._published.pop(0))
        probe = Probe(self._settings.probe_token_ids, (), samples)
        base = self._rank.base(tokens) if self._settings.publishes_adapters else None
        return (PublishedWeights(stored.version, stored.location, stored.size_bytes, stored.tensors, probe, base),)

    @cached_property
    def _writers(self) -> Savers | None:
        """The ranks, if each writes its own experts to the store's folder. *Collective.*"""
        from rlhfless.functions.training.shared_writing import all_see

        writers = None if self._settings.store.transport == "cuda_ipc" else self._rank.writers
        return writers if writers is not None and all_see(Path(self._settings.store.folder), writers) else None

    def feed(self, version: WeightVersion, workers: Sequence[int]) -> int:
        """Feed the weights to `workers[rank]` engine workers on this rank's GPU (rlhfless.weights.buckets).

        Works also while the rank sleeps. Returns the number of workers that took the weights. *Collective.*
        """
        from rlhfless.functions.training.checkpoint import drain

        with self._naming_memory_errors("publish"):
            lent = self._offload.lent if self._offload is not None and self._offload.offloaded else None
            stream = self._rank.published_everywhere(lent)
            try:
                return self._store.feed(version, workers[self._number], stream)
            finally:
                drain(stream)  # the other ranks wait for each tensor

    def probe(self, averaged: bool) -> tuple[float, ...]:
        """Return the logprobs of the probe tokens. *Collective.*"""
        with self._at_work("publish"), self._as_published(averaged):
            return self._rank.probe_logprobs(self._settings.probe_token_ids)

    def _as_published(self, averaged: bool) -> contextlib.AbstractContextManager[None]:
        return self._rank.averaged() if averaged else contextlib.nullcontext()


class SupervisedActor(TrainingActor[LearnerSettings]):
    """Rank `rank` of a supervised learner. Publishes nothing."""

    named = "learner"
    phases = LEARNER_PHASES
    _rank: SupervisedRank

    def _load(self, address: str) -> None:
        from rlhfless.functions.learner.rank import SupervisedRank

        self._rank = self._joined(address, SupervisedRank, self._settings.run_type, self._settings.dpo)


class LearnerFunction(TrainedFunction):
    """The controller of the learner."""

    named = "learner"
    actor = LearnerActor

    async def __init__(self, settings: LearnerSettings) -> None:  # type: ignore[misc]
        self._settings = settings
        self._owns = False
        await super().__init__(settings)  # type: ignore[misc]  # Serve awaits constructors

    def actor_of(self, settings: LearnerSettings) -> type:
        return LearnerActor if settings.run_type == "rlhf" else SupervisedActor

    @staticmethod
    def settings_of(launch: Launch, kind: FunctionSpec, allocation: Allocation) -> LearnerSettings:
        """Return a replica's settings for an allocation with bound devices."""
        spec = launch.spec
        return LearnerSettings(
            model=launch.within_context(spec.model),
            training=spec.learner,
            optimizer=spec.optimizer,
            algorithm=spec.algorithm,
            run_type=spec.type,
            dpo=spec.dpo,
            temperature=spec.generation.temperature,
            quantization=spec.generation.quantization,
            publishes_adapters=spec.publishes_adapters,
            routes_folder=launch.routes_folder,
            probe_token_ids=launch.probe_token_ids,
            read_back=spec.weights.read_back,
            store=StoreHome(
                str(launch.store_folder),
                launch.store_token,
                launch.store.transport,
                spec.scaling.generation.most_actors * spec.generation.engine.devices_per_actor,
            ),
            kept_versions=kept_versions(spec.schedule.steps_ahead),
            **launch.of_ranks(kind, allocation),
        )

    @admitted
    async def evaluate(self, _: Call, batch: PackedBatch) -> CallResult[FloatArray]:
        """Return logprobs `[tokens]` of the current policy, or a reward model's scores (see learner.supervised)."""
        values = (await self._group.call("evaluate", ray.put(batch)))[0]
        return CallResult(values, CallUsage(input_tokens=len(batch.tokens), sequences=batch.sequences))

    async def publish(self, call: Call, *, averaged: bool = False) -> Reply[PublishedWeights]:
        """Write the weights to the store as the version of `call`'s step, with a probe.

        If called together with the step's `learn`, runs after it and raises its error. `averaged` publishes the average
        of the weights (`learner.ema_decay`). Raises TimeoutError if `learn` is never called.
        """
        self.admit(call)
        await self._wait_learned(call.step)
        start_s = time.time()
        ((written,), *_) = await self._group.call_all("publish", call.run_id, call.attempt, call.step, averaged)
        # All ranks give equal answers; the last rank did not write the file, so its answer checks it.
        logprobs = (await self._group.call_all("probe", averaged))[-1]
        published = replace(written, probe=replace(written.probe, logprobs=logprobs))
        usage = CallUsage(size_bytes=published.size_bytes, version=published.version.label)
        return self.reply(published, start_s, usage)

    @admitted
    async def offers(self, _: Call, version: WeightVersion) -> CallResult[bool]:
        """Return whether `feed` can serve a version: it is the current one and no step is being learned."""
        return CallResult(self._offers(version))

    def _offers(self, version: WeightVersion) -> bool:
        learning = self._learning is not None and not self._learning[1].done()
        return version.step == self._step and not learning

    @admitted
    async def feed(self, _: Call, version: WeightVersion, workers: Sequence[int]) -> CallResult[tuple[int, ...]]:
        """Feed the weights to engines (see LearnerActor.feed).

        Returns the number of workers that took the version, per GPU; an empty tuple if it is no longer offered.
        """
        taken: list[int] = await self._group.call_all("feed", version, tuple(workers)) if self._offers(version) else []
        return CallResult(tuple(taken))

    async def _wait_learned(self, step: int) -> None:
        """Wait for a step's `learn` to finish."""
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
        """Admit a call (see Function). The first call claims the store."""
        super().admit(call)
        if not self._owns:
            with contextlib.suppress(OSError):  # the folder does not exist yet
                (Path(self._settings.store.folder) / OWNER).write_text(self.incarnation)
                self._owns = True

    def clean_up(self) -> None:
        """Delete the store, unless another incarnation has claimed it. Its files outlive processes."""
        folder = Path(self._settings.store.folder)
        with contextlib.suppress(OSError):
            if (folder / OWNER).read_text() != self.incarnation:
                return
        shutil.rmtree(folder, ignore_errors=True)
