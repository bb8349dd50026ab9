"""One rank of the critic: values of complete groups, and its own optimiser steps before those of the policy."""

from __future__ import annotations

from typing import cast

import torch

from rlhfless.algorithms.base import ActorCritic, ValueInputs, algorithm_of
from rlhfless.algorithms.batch import PackedBatch
from rlhfless.algorithms.passes import Passes
from rlhfless.algorithms.ppo import with_explained_variance
from rlhfless.functions.critic.network import load_critic, values_of
from rlhfless.functions.policy import PolicyNetwork, response_outputs
from rlhfless.functions.ranks.shares import by_group
from rlhfless.functions.training.rank import TrainingRank
from rlhfless.prefixes.packing import PackedSegments
from rlhfless.records import FloatArray
from rlhfless.spec import AdamWSpec, AlgorithmSpec, CriticSpec, ModelSpec

OF_OPTIMIZER = frozenset({"gradient_norm", "gradient_norm_max", "learning_rate", "skipped_updates"})
"""Metrics that the learner has, too: the critic's are called `critic_<name>`."""


class CriticRank(TrainingRank):
    """See TrainingRank."""

    _training: CriticSpec

    def __init__(
        self,
        model: ModelSpec,
        critic: CriticSpec,
        optimizer: AdamWSpec,
        algorithm: AlgorithmSpec,
        *,
        rank: int,
        world_size: int,
        init_method: str,
        timeout_s: float,
    ) -> None:
        """See TrainingRank. `model`: what it starts from, and the format in which it is saved."""
        self._algorithm = cast(ActorCritic, algorithm_of(algorithm))  # its settings need values
        super().__init__(
            model,
            critic,
            optimizer,
            rank=rank,
            world_size=world_size,
            init_method=init_method,
            timeout_s=timeout_s,
        )

    def _load(self, device: torch.device) -> PolicyNetwork:
        return load_critic(self._spec, self._training, device, self._mesh, new_head=self._training.new_head)

    def values(self, batch: PackedBatch) -> tuple[FloatArray, int]:
        """See by_group. *Collective.*"""
        return by_group(self._policy, batch, values_of(self._policy), self._training.pass_tokens)

    def learn(self, batch: PackedBatch, passes: Passes) -> dict[str, float]:
        """See TrainingRank. The batch has the values from before the step (`values`), and `returns`: raises ValueError
        without. *Collective.*"""
        if batch.values is None or batch.returns is None:
            raise ValueError("the batch has no values or no returns; compute them before `learn`")
        metrics = with_explained_variance(self._updates(passes.over(batch), passes.planned_updates))
        return {f"critic_{name}" if name in OF_OPTIMIZER else name: value for name, value in metrics.items()}

    def _loss(
        self, batch: PackedBatch, packed: PackedSegments | None = None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """See TrainingRank."""
        assert batch.values is not None
        assert batch.returns is not None
        (values,) = response_outputs(self._policy, batch, values_of(self._policy), packed)
        inputs = ValueInputs(
            values,
            self._of_responses(batch, batch.values),
            self._of_responses(batch, batch.returns),
            batch.denominators.tokens,
        )
        return self._share(self._algorithm.value_loss(inputs), values)
