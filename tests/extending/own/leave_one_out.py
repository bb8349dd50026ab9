"""REINFORCE with a leave-one-out baseline (Ahmadian et al. 2024, arXiv 2402.14740): an algorithm of one's own."""

from typing import Annotated

import numpy as np
from pydantic import Field

from rlhfless.algorithms.base import LossInputs, LossOutputs
from rlhfless.algorithms.batch import PackedBatch
from rlhfless.records import FloatArray
from rlhfless.spec import Needs, OwnAlgorithmSpec


class Settings(OwnAlgorithmSpec):
    """Its keys in the spec."""

    max_advantage: Annotated[float, Field(gt=0)] = 5.0
    """Clip advantages to this size."""

    @property
    def needs(self) -> Needs:
        return Needs(samples_per_prompt=2)


class LeaveOneOut:
    """A sample's advantage is its reward minus the mean reward of the other samples of its group."""

    Settings = Settings

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def advantages(self, batch: PackedBatch) -> FloatArray:
        """Compute R - (sum - R) / (n - 1) for n samples in a group, and 0 for a single one."""
        assert batch.rewards is not None
        groups, rewards = batch.sequence_groups, batch.rewards
        others = np.bincount(groups)[groups] - 1
        baseline = (np.bincount(groups, rewards)[groups] - rewards) / np.maximum(others, 1)
        limit = self._settings.max_advantage
        return batch.spread(np.where(others > 0, rewards - baseline, 0).clip(-limit, limit))

    def loss(self, inputs: LossInputs) -> LossOutputs:
        """Compute -A log p, a token mean over the optimizer step."""
        loss = -(inputs.advantages * inputs.logprobs).sum() * inputs.scale
        columns = {"logprob": inputs.logprobs.detach(), **inputs.own}
        return LossOutputs(loss, {f"algorithm/{name}": values.sum() * inputs.scale for name, values in columns.items()})
