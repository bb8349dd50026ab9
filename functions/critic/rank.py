"""One rank of the critic: values of complete groups, and its own optimiser steps before those of the policy."""

from __future__ import annotations

import dataclasses
from typing import cast

import numpy as np
import torch

from rlhfless.algorithms.base import ActorCritic, ValueInputs, algorithm_of
from rlhfless.algorithms.batch import PackedBatch, mini_batches, select
from rlhfless.algorithms.explained_variance import with_explained_variance
from rlhfless.functions.batching import MicroBatch, prompt_tokens
from rlhfless.functions.critic.network import load_critic, values_of
from rlhfless.functions.packing_rate import with_measured_rates
from rlhfless.functions.policy import PolicyNetwork, outputs_of, response_outputs
from rlhfless.functions.ranks.shares import of_all_ranks
from rlhfless.functions.training.rank import TrainingRank
from rlhfless.prefixes.packing import PackedSegments
from rlhfless.records import FloatArray, IntArray
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
        critic = load_critic(self._spec, self._training, device, self._mesh)
        return with_measured_rates(critic, self._training.micro_batch_tokens)

    def values(self, batch: PackedBatch) -> tuple[FloatArray, int]:
        """Values `[tokens]` of the whole batch, 0 on prompt tokens, on every rank; and the prompt tokens of this rank's
        share that were not computed, because a sequence with the same prefix had computed them. *Collective.*

        Groups are computed each by itself, and dealt to the ranks whole: the values of a group are the same bits
        whatever other groups came with it, so a step that is done again has the same advantages.
        """
        parts: list[MicroBatch] = []
        saved = 0
        for group in self._groups_of_rank(batch):
            own = select(batch, group)
            cut = self._cut(own)
            parts += [dataclasses.replace(part, indices=group[part.indices]) for part in cut.parts]
            saved += prompt_tokens(own) - cut.prompt_tokens
        values = outputs_of(self._policy, batch, values_of(self._policy), parts)
        return of_all_ranks(self._policy, values), saved

    def _groups_of_rank(self, batch: PackedBatch) -> list[IntArray]:
        """The sequences of each group of this rank: the largest groups first, so that all ranks have equal work."""
        groups = batch.sequence_groups
        tokens = np.bincount(groups, batch.lengths)
        order = np.argsort(-tokens, kind="stable")[self._mesh.get_rank() :: self._mesh.size()]
        return [np.flatnonzero(groups == group) for group in order]

    def learn(self, batch: PackedBatch, count: int) -> dict[str, float]:
        """See TrainingRank. The batch has the values from before the step (`values`), and `returns`: raises ValueError
        without. *Collective.*"""
        if batch.values is None or batch.returns is None:
            raise ValueError("the batch has no values or no returns; compute them before `learn`")
        metrics = with_explained_variance(self._updates(mini_batches(batch, count)))
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
