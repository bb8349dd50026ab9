"""A function that computes a column of the batch from complete groups, such as reference logprobs: its ranks and their
front."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import ray

from rlhfless.algorithms.batch import PackedBatch
from rlhfless.functions.base import Call, CallUsage, Reply
from rlhfless.functions.column.settings import ColumnSettings, ColumnWorker
from rlhfless.functions.launching import Launch
from rlhfless.functions.ranks.actor import RankActor
from rlhfless.functions.ranks.front import RankedFunction
from rlhfless.records import FloatArray
from rlhfless.scaling.function_specs import FunctionSpec
from rlhfless.scaling.placement import Allocation
from rlhfless.spec.imports import add_import_paths, import_paths, load_target

if TYPE_CHECKING:
    import torch

PHASE = "logprobs"
"""The phase of the memory plan."""


class ColumnActor(RankActor[ColumnSettings]):
    """A rank; rank 0 gives the values of all."""

    def _load(self, address: str) -> None:
        from rlhfless.functions.sharding import join_frozen

        settings = self._settings
        self.named = settings.function
        add_import_paths(settings.import_paths)
        with self._at_work(PHASE):
            mesh = join_frozen(address, self._number, len(settings.rank_bindings), settings.call_timeout_s)
            self._worker: ColumnWorker = load_target(settings.worker)(settings, self._threads, mesh)

    def kept_on_device(self) -> Iterable[torch.Tensor]:
        return self._worker.kept_on_device()

    def compute(self, batch: PackedBatch) -> tuple[FloatArray | None, int]:
        """See ColumnWorker.compute. *Collective.*"""
        with self._at_work(PHASE):
            values, shared_tokens = self._worker.compute(batch)
        return None if self._number else values, shared_tokens


class ColumnFunction(RankedFunction):
    """One replica, split over its ranks."""

    actor = ColumnActor

    async def __init__(self, settings: ColumnSettings) -> None:  # type: ignore[misc]
        self.named = settings.function
        await super().__init__(settings)  # type: ignore[misc]  # Serve awaits constructors

    @staticmethod
    def settings_of(launch: Launch, kind: FunctionSpec, allocation: Allocation) -> ColumnSettings:
        """The settings of a replica in an allocation whose devices are bound."""
        spec = launch.spec
        return ColumnSettings(
            run_id=launch.run_id,
            lease=launch.lease,
            function=kind.name,
            worker=kind.worker,
            model=launch.within_context(spec.model),
            dtype=spec.learner.dtype,
            micro_batch_tokens=spec.learner.pass_tokens,
            share_prefixes=spec.learner.share_prefixes,
            logits_elements=spec.learner.logits_elements,
            temperature=spec.generation.temperature,
            rank_bindings=launch.rank_bindings(kind, allocation),
            call_timeout_s=spec.timeouts.call_s,
            planned=launch.planned(kind, allocation),
            own=kind.settings,
            import_paths=import_paths(),
        )

    async def compute(self, call: Call, batch: PackedBatch) -> Reply[FloatArray]:
        """The column `[tokens]` of a packed batch, 0 on tokens that the model did not draw."""
        self.admit(call)
        start_s = time.time()
        answers: list[tuple[FloatArray | None, int]] = await self._group.all("compute", ray.put(batch))
        (values,) = (values for values, _ in answers if values is not None)
        shared_tokens = sum(shared for _, shared in answers)
        usage = CallUsage(input_tokens=len(batch.tokens), cached_tokens=shared_tokens, sequences=batch.sequences)
        return self.reply(values, start_s, usage)
