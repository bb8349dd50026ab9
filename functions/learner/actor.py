"""One learner rank as a Ray actor, with its end of the weight store; and the settings of the ranks and their front."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlhfless.algorithms.batch import PackedBatch
from rlhfless.functions.training.actor import TrainingActor
from rlhfless.functions.training.settings import TrainedSettings
from rlhfless.records import FloatArray, Probe, PublishedWeights, WeightVersion
from rlhfless.spec import DPOSpec, LearnerSpec, RunType, Transport
from rlhfless.spec.generation import Quantization
from rlhfless.weights.address import StoreAddress

if TYPE_CHECKING:
    from rlhfless.functions.learner.rank import LearnerRank
    from rlhfless.functions.learner.supervised import SupervisedRank
    from rlhfless.weights.store import WeightStore


@dataclass(frozen=True, slots=True)
class StoreHome:
    """The learner's side of the weight store."""

    folder: str
    token: str = field(default="", repr=False)
    """If given, the folder is served by HTTP to requests that carry the token."""
    transport: Transport = "file"
    readers: int = 0
    """Workers of all engines together, which a broadcast goes to."""

    def open(self, host: str) -> WeightStore:
        """The store; if there is a token it is served at `host`, this node's address, from threads of this process as
        long as it lives."""
        # Here, because they bring torch along: seconds of start-up for the front, which never opens the store.
        from rlhfless.weights.broadcast import Broadcaster
        from rlhfless.weights.buckets import BucketStore
        from rlhfless.weights.device_hash import piece_hash_of
        from rlhfless.weights.http_server import HttpStoreServer
        from rlhfless.weights.store import FolderStore

        if not self.token:
            store = BucketStore(self.folder) if self.transport == "cuda_ipc" else FolderStore(self.folder)
            self.mark()
            return store
        join = Broadcaster(self.folder, host, self.readers).join if self.transport == "nccl" else None
        of_piece = piece_hash_of(self.transport)
        return HttpStoreServer(self.folder, host=host, token=self.token, join=join, of_piece=of_piece)

    def mark(self) -> None:
        """Show engines that this folder is the learner's (StoreAddress.require_shared). Again with each version: a
        folder that was lost is made anew."""
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
    """Of the engines."""
    probe_token_ids: tuple[int, ...]
    """The text whose logprobs every published version carries."""
    read_back: bool
    """A published version carries samples of its weights, which engines compare with theirs."""
    store: StoreHome
    kept_versions: int
    """Newest versions that stay in the store: those that steps may still draw with (scaling.memory.kept_versions)."""


PERTURBED_STEP = -1
"""Step number of the perturbed version, which no training step can have."""

PERTURBATION_SEED = 20_000
"""An arbitrary seed: the perturbation only has to be the same for the weights and for the probe."""


class LearnerActor(TrainingActor[LearnerSettings]):
    """Rank `rank` of the learner; rank 0 publishes."""

    named = "learner"
    _rank: LearnerRank
    _store: Any
    """A WeightStore; a BucketStore if engines share the ranks' GPUs."""

    def __init__(self, settings: LearnerSettings, rank: int) -> None:
        super().__init__(settings, rank)
        self._published: list[WeightVersion] = []
        """Versions in the store, those of a group before this one too, in the order in which they were published."""
        self._averaged: WeightVersion | None = None
        """The average that was published last."""

    @property
    def shares_device_memory(self) -> bool:
        """Engines map its bucket."""
        return self._settings.store.transport == "cuda_ipc"

    @property
    def reaches_other_nodes(self) -> bool:
        """Rank 0 makes the group of a broadcast, whose identity is its own socket's address."""
        return self._settings.store.transport == "nccl"

    def _load(self, address: str) -> None:
        from rlhfless.functions.learner.rank import LearnerRank

        settings = self._settings
        self._store = settings.store.open(self.node())
        self._published = [version for version in self._store.versions() if version.step != PERTURBED_STEP]
        self._rank = self._joined(address, LearnerRank, settings.algorithm, settings.temperature, settings.quantization)

    def evaluate(self, batch: PackedBatch) -> FloatArray:
        """See LearnerRank.evaluate. *Collective.*"""
        with self._at_work("learn"):
            return self._rank.evaluate(batch)

    def publish(
        self, run_id: str, attempt: int, step: int, perturbed: bool, averaged: bool
    ) -> tuple[PublishedWeights, ...]:
        """Write the weights to the store; rank 0 returns what it wrote, with samples and no logprobs. *Collective.*"""
        from rlhfless.functions.training.checkpoint import drain

        with self._at_work("publish"), self._as_published(perturbed, averaged):
            tokens = self._settings.probe_token_ids if self._settings.read_back else ()
            stream, samples = self._rank.published(tokens)
            if averaged:
                self._forget_average()
            try:
                if self._number:
                    return ()
                stored = self._store.put(run_id, attempt, PERTURBED_STEP if perturbed else step, stream)
            finally:
                drain(stream)  # also if the store is full: the other ranks wait for each tensor
            self._settings.store.mark()
        if averaged:
            self._averaged = stored.version
        else:
            self._forget_old(stored.version)
        probe = Probe(self._settings.probe_token_ids, (), samples)
        return (PublishedWeights(stored.version, stored.location, stored.size_bytes, stored.tensors, probe),)

    def feed(self, version: WeightVersion, workers: Sequence[int]) -> int:
        """Give the weights, which are those of a version, to engines on the ranks' GPUs (rlhfless.weights.buckets):
        to so many `workers` on each rank's. Also asleep. Returns how many have taken them. *Collective.*"""
        from rlhfless.functions.training.checkpoint import drain

        with self._naming_memory_errors("publish"):
            lent = self._parking.lent if self._parking is not None and self._parking.parked else None
            stream = self._rank.published_everywhere(lent)
            try:
                return self._store.feed(version, workers[self._number], stream)
            finally:
                drain(stream)  # the other ranks wait for each tensor

    def probe(self, perturbed: bool, averaged: bool) -> tuple[float, ...]:
        """The learner's own logprobs of the probe. *Collective.*"""
        with self._at_work("publish"), self._as_published(perturbed, averaged):
            return self._rank.probe_logprobs(self._settings.probe_token_ids)

    def _as_published(self, perturbed: bool, averaged: bool) -> contextlib.AbstractContextManager[None]:
        if averaged:
            return self._rank.averaged()
        return self._rank.perturbed(PERTURBATION_SEED) if perturbed else contextlib.nullcontext()

    def _forget_average(self) -> None:
        """Delete the last average, which no engine loads any more; one of no updates is the same version as the
        weights, and stays."""
        if self._averaged is not None and self._averaged not in self._published:
            self._store.delete(self._averaged)

    def _forget_old(self, version: WeightVersion) -> None:
        """Keep the versions that engines may still load, and the perturbed one for engines that start later."""
        if version.step == PERTURBED_STEP:
            return
        self._published = [*(each for each in self._published if each != version), version]
        while len(self._published) > self._settings.kept_versions:
            self._store.delete(self._published.pop(0))


class SupervisedActor(TrainingActor[LearnerSettings]):
    """Rank `rank` of a learner that learns from written responses. It publishes nothing."""

    named = "learner"
    _rank: SupervisedRank

    def _load(self, address: str) -> None:
        from rlhfless.functions.learner.supervised import SupervisedRank

        self._rank = self._joined(address, SupervisedRank, self._settings.run_type, self._settings.dpo)

    def evaluate(self, batch: PackedBatch) -> FloatArray:
        """See SupervisedRank.evaluate. *Collective.*"""
        with self._at_work("learn"):
            return self._rank.evaluate(batch)
