"""One rank of a function that computes a column, as a Ray actor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rlhfless.algorithms.batch import PackedBatch
from rlhfless.functions.column.settings import ColumnSettings, ColumnWorker
from rlhfless.functions.ranks.actor import RankActor
from rlhfless.records import FloatArray
from rlhfless.spec.imports import load_target, look_in

if TYPE_CHECKING:
    import torch

PHASE = "logprobs"
"""The phase of the memory plan."""


class ColumnActor(RankActor[ColumnSettings]):
    """A rank; rank 0 gives the values of all."""

    def _load(self, address: str) -> None:
        from rlhfless.functions.ranks.process_group import join_frozen

        settings = self._settings
        self.named = settings.function
        look_in(settings.import_paths)
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
