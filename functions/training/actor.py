"""One rank of a trained model as a Ray actor."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
import ray

from rlhfless.algorithms.batch import PackedBatch
from rlhfless.algorithms.passes import Passes
from rlhfless.functions.ranks.actor import RankActor
from rlhfless.functions.training.handing_over import files_at, piece_at
from rlhfless.functions.training.settings import TrainedSettings

if TYPE_CHECKING:
    import torch

    from rlhfless.functions.training.rank import TrainingRank

S = TypeVar("S", bound=TrainedSettings)
R = TypeVar("R", bound="TrainingRank")


class TrainingActor(RankActor[S]):
    """Rank `rank` of the model."""

    _rank: TrainingRank
    """Set by `_load`."""

    def _joined(self, address: str, rank: Callable[..., R], *own: Any) -> R:
        """The rank, of the class `rank`, which has met the others at an address; `own`: what its class takes beside the
        settings of every trained model. *Collective.*"""
        settings, training = self._settings, self._settings.training
        if training.threads is None and settings.rank_bindings[self._number].kind == "cpu":
            training = training.model_copy(update={"threads": self._threads})
        with self._at_work("learn"):
            return rank(
                settings.model,
                training,
                settings.optimizer,
                *own,
                rank=self._number,
                world_size=len(settings.rank_bindings),
                init_method=address,
                timeout_s=settings.call_timeout_s,
            )

    def kept_on_device(self) -> list[torch.Tensor]:
        return self._rank.kept_on_device()

    def learn(self, batch: PackedBatch, passes: Passes) -> Mapping[str, float]:
        """See TrainingRank.learn; with `shared_prompt_tokens`, of this call. *Collective.*"""
        before = self._rank.shared_prompt_tokens
        with self._at_work("learn"):
            metrics = self._rank.learn(batch, passes)
        return metrics | {"shared_prompt_tokens": float(self._rank.shared_prompt_tokens - before)}

    def save(self, location: str, notes: Mapping[str, Any], background: bool) -> bool:
        """See TrainingRank.save. *Collective.*"""
        with self._at_work("checkpoint"):
            return self._rank.save(location, notes, background=background)

    @ray.method(concurrency_group="waits")
    def wait_written(self) -> None:
        """See TrainingRank.wait_written."""
        self._rank.wait_written()

    def hand_over(self, folder: str) -> bool:
        """See TrainingRank.hand_over; to this node's part of `folder`. *Collective.*"""
        with self._at_work("checkpoint"):
            return self._rank.hand_over(self._part_of(folder))

    def handed_over(self, folder: str) -> Mapping[str, int]:
        """The files that ranks of this node have handed over, with their bytes."""
        return files_at(self._part_of(folder))

    @ray.method(concurrency_group="waits")
    def give(self, folder: str, name: str, start: int) -> npt.NDArray[np.uint8]:
        """A piece of one of these files, from its byte `start` on."""
        return piece_at(self._part_of(folder) / name, start)

    def take_over(self, folder: str) -> None:
        """Go on from what was handed over to this node; it is gone after that. *Collective.*"""
        with self._at_work("restore"):
            self._rank.restore(self._part_of(folder))
        self.drop_handed_over(folder, ())

    def drop_handed_over(self, folder: str, kept: Sequence[str]) -> None:
        """Remove what was handed over, but on the nodes `kept`."""
        if self._node_id not in kept:
            shutil.rmtree(self._part_of(folder), ignore_errors=True)

    def _part_of(self, folder: str) -> Path:
        return Path(folder) / self._node_id

    def restore(self, location: str) -> None:
        """See TrainingRank.restore. *Collective.*"""
        with self._at_work("restore"):
            self._rank.restore(location)

    def check_shared_storage(self, token: str) -> str | None:
        """Why a file of the run cannot be read on this node, or another written beside it; None if both can."""
        from rlhfless.records.checkpoints import files_of

        files, path = files_of(token)
        answer = f"{path}-{self.named.replace(' ', '-')}-{self._number}"
        try:
            files.pipe_file(answer, files.cat_file(path))
            files.rm_file(answer)
        except Exception as error:  # every kind of store has errors of its own
            return f"node {self.node()}: {type(error).__name__}: {error}"
        return None
