"""One rank of a trained model as a Ray actor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import ray

from rlhfless.algorithms.batch import PackedBatch
from rlhfless.algorithms.passes import Passes
from rlhfless.functions.ranks.actor import RankActor
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

    def export_state(self, folder: str) -> bool:
        """See TrainingRank.export_state. *Collective.*"""
        with self._at_work("checkpoint"):
            return self._rank.export_state(Path(folder))

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
