"""One rank of a supervised learner: a policy, or a reward model."""

from __future__ import annotations

from functools import partial

import torch

from rlhfless.algorithms.base import LossOutputs
from rlhfless.algorithms.batch import PackedBatch
from rlhfless.algorithms.passes import Passes
from rlhfless.algorithms.supervised import SupervisedInputs, objective_of
from rlhfless.functions.batching import MicroBatches, cut_pairs, deal_pairs
from rlhfless.functions.critic.rank import load_critic, values_of
from rlhfless.functions.policy import Outputs, PolicyNetwork, logprob_outputs, response_outputs
from rlhfless.functions.ranks.shares import all_reduce_rows, share_outputs
from rlhfless.functions.training.rank import TrainingRank, load_trained_policy
from rlhfless.prefixes.packing import PackedSegments
from rlhfless.records import FloatArray, IntArray
from rlhfless.spec import AdamWSpec, DPOSpec, LearnerSpec, ModelSpec, RunType


class SupervisedRank(TrainingRank):
    """A rank of a supervised learner (see TrainingRank), with batches of rlhfless.algorithms.supervised."""

    _training: LearnerSpec

    def __init__(
        self,
        model: ModelSpec,
        learner: LearnerSpec,
        optimizer: AdamWSpec,
        run_type: RunType,
        dpo: DPOSpec,
        *,
        rank: int,
        world_size: int,
        init_method: str,
        timeout_s: float,
    ) -> None:
        self._type = run_type
        self._objective = objective_of(run_type, dpo, learner.dtype)
        super().__init__(
            model,
            learner,
            optimizer,
            rank=rank,
            world_size=world_size,
            init_method=init_method,
            timeout_s=timeout_s,
        )

    def _load(self, device: torch.device) -> PolicyNetwork:
        if self._type != "reward_model":
            return load_trained_policy(self._spec, self._training, device, self._mesh)
        return load_critic(self._spec, self._training, device, self._mesh, new_head=True)

    @property
    def _outputs(self) -> Outputs:
        """The output per learned token: its logprob, or the score of its sequence."""
        return values_of(self._policy) if self._type == "reward_model" else logprob_outputs(self._policy, 1.0)

    def evaluate(self, batch: PackedBatch) -> FloatArray:
        """Compute outputs `[tokens]` of the whole batch, 0 on tokens that are not learned, on every rank. *Collective.*

        Uses the average of the weights if there is one.
        """
        with self.averaged():
            values, _ = share_outputs(self._policy, batch, self._outputs, self._training.pass_tokens)
            return all_reduce_rows(self._policy, values)

    def learn(self, batch: PackedBatch, passes: Passes) -> dict[str, float]:
        """Take a training step (see TrainingRank). *Collective.*"""
        return self._updates(passes.over(batch), passes.planned_updates)

    def _weight(self, batch: PackedBatch) -> int:
        return batch.denominators.tokens if self._type == "sft" else batch.denominators.groups

    def _sequences_of_rank(self, batch: PackedBatch) -> IntArray:
        if self._type == "sft":
            return super()._sequences_of_rank(batch)
        return deal_pairs(batch, self._mesh.size())[self._mesh.get_rank()]

    def _cut(self, batch: PackedBatch) -> MicroBatches:
        if self._type == "sft":
            return super()._cut(batch)
        return cut_pairs(batch, self._training.pass_tokens, packing=self._policy.packing)

    def _loss(
        self, batch: PackedBatch, packed: PackedSegments | None = None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        outputs, *_ = response_outputs(self._policy, batch, self._outputs, packed)
        of_tokens, reference = partial(self._of_responses, batch), batch.reference_logprobs
        inputs = SupervisedInputs(
            outputs,
            of_tokens(batch.sequence_id),
            batch.denominators.tokens,
            batch.denominators.groups,
            None if reference is None else of_tokens(reference),
        )
        given = self._objective.loss(inputs)
        return self._share(LossOutputs(given.loss, {"loss": given.loss} | given.metrics), outputs)
