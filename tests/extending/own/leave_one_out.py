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
    """Advantages are cut to this size."""

    @property
    def needs(self) -> Needs:
        return Needs(samples_per_prompt=2)


class LeaveOneOut:
    """A sample's advantage is its reward minus the mean reward of the other samples of its group."""

    Settings = Settings

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def advantages(self, batch: PackedBatch) -> FloatArray:
        """With n samples in the group: R - (sum - R) / (n - 1), and 0 for a sample that is left alone."""
        assert batch.rewards is not None
        groups, rewards = batch.sequence_groups, batch.rewards
        others = np.bincount(groups)[groups] - 1
        baseline = (np.bincount(groups, rewards)[groups] - rewards) / np.maximum(others, 1)
        limit = self._settings.max_advantage
        return batch.spread(np.where(others > 0, rewards - baseline, 0).clip(-limit, limit))

    def loss(self, inputs: LossInputs) -> LossOutputs:
        """-A log p, token mean over the optimiser step."""
        loss = -(inputs.advantages * inputs.logprobs).sum() * inputs.scale
        columns = {"logprob": inputs.logprobs.detach(), **inputs.own}
        return LossOutputs(loss, {f"algorithm/{name}": values.sum() * inputs.scale for name, values in columns.items()})
