"""One rank of the critic: values of complete groups, and its optimiser steps before those of the policy.

The network is a decoder like the policy's with a single-output head, the value. The value at a response token is V of
the tokens before it: it is computed from the same hidden state as the token's logprob, in the same kind of pass
(rlhfless.functions.policy).
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import linear
from transformers import AutoModelForSequenceClassification

from rlhfless.algorithms.base import ActorCritic, ValueInputs, algorithm_of
from rlhfless.algorithms.batch import PackedBatch
from rlhfless.algorithms.passes import Passes
from rlhfless.algorithms.ppo import with_explained_variance
from rlhfless.functions.base import RankPlace
from rlhfless.functions.lm_head import OutputHead, at_least_float32
from rlhfless.functions.policy import Outputs, PolicyNetwork, response_outputs
from rlhfless.functions.policy_loading import Form
from rlhfless.functions.shares import by_group
from rlhfless.functions.training.rank import TrainingRank, load_trained
from rlhfless.prefixes.packing import PackedSegments
from rlhfless.records import FloatArray
from rlhfless.spec import AdamWSpec, AlgorithmSpec, CriticSpec, ModelSpec, TrainingSpec
from rlhfless.spec.errors import InputError, Problem

OF_OPTIMIZER = frozenset({"gradient_norm", "gradient_norm_max", "learning_rate", "skipped_updates"})
"""Metrics that the learner has as well: the critic's are called `critic_<name>`."""


class CriticRank(TrainingRank):
    """A rank of the critic (see TrainingRank)."""

    _training: CriticSpec

    def __init__(
        self, place: RankPlace, model: ModelSpec, critic: CriticSpec, optimizer: AdamWSpec, algorithm: AlgorithmSpec
    ) -> None:
        """`model`: the initial model, whose format is also the saved one. See TrainingRank for the rest."""
        self._algorithm = cast(ActorCritic, algorithm_of(algorithm))  # its settings need values
        super().__init__(place, model, critic, optimizer)

    def _load(self, device: torch.device) -> PolicyNetwork:
        return load_critic(self._spec, self._training, device, self._mesh, new_head=self._training.new_head)

    def compute(self, batch: PackedBatch) -> tuple[FloatArray, int]:
        """Return values `[tokens]` of the whole batch, and the prompt tokens saved (see by_group). *Collective.*"""
        return by_group(self._policy, batch, values_of(self._policy), self._training.pass_tokens)

    def learn(self, batch: PackedBatch, passes: Passes) -> dict[str, float]:
        """Take a training step (see TrainingRank). *Collective.*

        Raises ValueError unless the batch has `returns` and the `values` from before the step.
        """
        if batch.values is None or batch.returns is None:
            raise ValueError("the batch has no values or no returns; compute them before `learn`")
        metrics = with_explained_variance(self._updates(passes.over(batch), passes.planned_updates))
        return {f"critic_{name}" if name in OF_OPTIMIZER else name: value for name, value in metrics.items()}

    def _loss(
        self, batch: PackedBatch, packed: PackedSegments | None = None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
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


def load_critic(
    source: ModelSpec,
    critic: TrainingSpec,
    device: torch.device,
    mesh: DeviceMesh,
    experts: DeviceMesh | None = None,
    *,
    new_head: bool,
) -> PolicyNetwork:
    """Load the critic's initial model, split over `mesh`; with `new_head`, its head is all zeros. *Collective.*

    Raises InputError if its head does not have one output, and the errors of load_trained.
    """
    form = NEW_VALUES if new_head else VALUES
    return load_trained(source, critic, device, mesh, experts=experts, form=form)


def values_of(critic: PolicyNetwork) -> Outputs:
    """Return the head's values `[positions]` in float32: in bfloat16 a value has two digits."""
    return partial(_values, critic.head.linear)


def _values(head: torch.nn.Linear, hidden: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor]:
    bias = None if head.bias is None else at_least_float32(head.bias)
    return (linear(at_least_float32(hidden), at_least_float32(head.weight), bias).squeeze(-1),)


def _value_head(model: Any, chunk_elements: int | None) -> OutputHead:
    inside = f"{model.base_model_prefix}."
    heads = [
        module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and not name.startswith(inside)
    ]
    if [head.out_features for head in heads] != [1]:
        what = f"{model.name_or_path!r} has {model.config.num_labels} labels; a critic has one, its value"
        hint = "name a reward model, or leave it out to start from the policy with a new head"
        raise InputError("the critic", [Problem("critic.model", what, hint)])
    return OutputHead(heads[0], 1.0, None, chunk_elements)


VALUES = Form(AutoModelForSequenceClassification, "critic.model", _value_head)
NEW_VALUES = dataclasses.replace(VALUES, config={"num_labels": 1}, new_head=True)
"""Form of files without a value head."""
