"""The interface of an algorithm: advantages from a batch, and a loss from tensors. One file per algorithm.

The learner and the loop know only this interface. An algorithm's settings say what else a step must compute for it,
such as reference logprobs (`needs`, see rlhfless.spec.algorithm); they also hold the algorithm's own keys of the spec.

The loss covers the response tokens of one micro-batch. No distributed calls, no model, no padding. Every sum is divided
by a given denominator of the whole optimiser step. Losses, gradients and metrics of
micro-batches and ranks therefore simply add up, however the tokens were divided. Means over a micro-batch
do not exist here, because they would give the tokens of a short micro-batch more weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from rlhfless.algorithms.batch import PackedBatch
from rlhfless.records import FloatArray
from rlhfless.spec import AlgorithmSpec
from rlhfless.spec.extension import make

BUILT_IN: Mapping[str, str] = {
    "grpo": "rlhfless.algorithms.grpo:GRPO",
    "dapo": "rlhfless.algorithms.dapo:DAPO",
    "dr_grpo": "rlhfless.algorithms.dr_grpo:DrGRPO",
    "rloo": "rlhfless.algorithms.rloo:RLOO",
    "reinforce_plus_plus": "rlhfless.algorithms.reinforce_plus_plus:ReinforcePlusPlus",
    "gspo": "rlhfless.algorithms.gspo:GSPO",
    "cispo": "rlhfless.algorithms.cispo:CISPO",
    "sapo": "rlhfless.algorithms.sapo:SAPO",
    "ppo": "rlhfless.algorithms.ppo:PPO",
}
"""Import paths of the built-in algorithms, by the `type` of their settings."""

MAXIMUM_SUFFIX = "_max"
"""Metrics with this ending combine by maximum; all others are shares of a token mean and combine by sum."""

OF_LOSS = frozenset({"loss", "policy_loss"})
"""Metrics that are divided as the loss is, and not by tokens."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Response tokens only, of whole sequences. Fields with the name of a batch's column hold that column's values."""

    logprobs: torch.Tensor  # [tokens], current, with a gradient
    entropy: torch.Tensor  # [tokens], of the current policy; with a gradient only if `needs` says so
    rollout_logprobs: torch.Tensor  # [tokens]
    advantages: torch.Tensor  # [tokens]
    denominator_tokens: int
    """Response tokens of the optimiser step, over all micro-batches and ranks."""
    sequence_id: torch.Tensor  # [tokens], int64, from 0
    """The sequence of each token in its micro-batch, which has all response tokens of each and no sequence without."""
    denominator_sequences: int
    """Sequences of the optimiser step that have response tokens."""
    old_logprobs: torch.Tensor | None = None  # [tokens]
    """None: this is the first and only update of the step, so the old policy is the current one, exactly."""
    reference_logprobs: torch.Tensor | None = None  # [tokens]; if the algorithm needs a reference
    staleness: torch.Tensor | None = None  # [tokens]
    """Versions that each token's weights were behind; None where they are alike."""
    oldest: int = 0
    """See PackedBatch."""
    own: Mapping[str, torch.Tensor] = field(default_factory=dict)  # each [tokens]
    """Columns of the user's own functions, by name."""

    @property
    def scale(self) -> float:
        """Factor that makes a sum over tokens this micro-batch's share of the optimiser step's mean."""
        return 1.0 / max(self.denominator_tokens, 1)

    @property
    def old(self) -> torch.Tensor:
        """Logprobs of the policy before the first update of the step, a constant to the gradient, `[tokens]`."""
        return self.logprobs.detach() if self.old_logprobs is None else self.old_logprobs

    @property
    def sequence_scale(self) -> float:
        """As `scale`, of a sum over sequences."""
        return 1.0 / max(self.denominator_sequences, 1)


@dataclass(frozen=True, slots=True)
class ValueInputs:
    """The critic's side of LossInputs: response tokens only, in any order."""

    values: torch.Tensor  # [tokens], current, with a gradient
    old_values: torch.Tensor  # [tokens], those that the advantages were computed from
    returns: torch.Tensor  # [tokens]
    denominator_tokens: int
    """As in LossInputs."""

    @property
    def scale(self) -> float:
        """As in LossInputs."""
        return 1.0 / max(self.denominator_tokens, 1)


@dataclass(frozen=True, slots=True)
class LossOutputs:
    """This micro-batch's share of the step's loss, and of its metrics."""

    loss: torch.Tensor  # []
    metrics: dict[str, torch.Tensor]  # each []
    """The names are the same for any tokens, also for none. Names that telemetry does not declare begin with
    `algorithm/`."""


class Algorithm(Protocol):
    """An algorithm, made from its settings in the driver and in every rank of the learner; it keeps no state."""

    def __init__(self, settings: Any) -> None: ...

    def advantages(self, batch: PackedBatch) -> FloatArray:
        """Advantages `[tokens]`; `batch.spread` turns one value per sequence into one per token. The batch has
        `rewards` and the columns that the settings' `needs` name."""
        ...

    def loss(self, inputs: LossInputs) -> LossOutputs:
        """The loss to minimise, as this micro-batch's share."""
        ...


class ActorCritic(Algorithm, Protocol):
    """An algorithm whose settings need `values`: its batches have the critic's values, and it says what a critic
    learns."""

    def returns(self, batch: PackedBatch) -> FloatArray:
        """What the critic is to predict, `[tokens]`."""
        ...

    def value_loss(self, inputs: ValueInputs) -> LossOutputs:
        """The critic's loss, as this micro-batch's share."""
        ...


def algorithm_of(settings: AlgorithmSpec) -> Algorithm:
    """The algorithm of the settings: a built-in one, or the user's own by its import path."""
    algorithm: Algorithm = make(settings, BUILT_IN)
    return algorithm


def common_metrics(inputs: LossInputs) -> dict[str, torch.Tensor]:
    """Metrics that every algorithm has, each `[]`: of the policy, and of its difference from the engine.

    The engine and the learner compute the same weights with different kernels, so `rollout_logprob_difference` is
    small; a run whose weights are wrong shows there (rlhfless.weights.monitor).
    """
    magnitude = (inputs.old - inputs.rollout_logprobs).detach().abs()
    return {
        "entropy": inputs.entropy.detach().sum() * inputs.scale,
        "rollout_logprob_difference": magnitude.sum() * inputs.scale,
        "rollout_logprob_difference_max": largest(magnitude),
    }


def combine_metrics(parts: Iterable[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The metrics of micro-batches that belong to one optimiser step, taken together."""
    total: dict[str, torch.Tensor] = {}
    for part in parts:
        for name, value in part.items():
            if name not in total:
                total[name] = value
            elif name.endswith(MAXIMUM_SUFFIX):
                total[name] = torch.maximum(total[name], value)
            else:
                total[name] = total[name] + value
    return total


BY_STALENESS = "_by_staleness/"
"""Between a metric's name and the versions that its tokens' weights were behind."""


def by_staleness(inputs: LossInputs, **values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Means over all tokens of `values` [tokens] that are 0 on tokens of another staleness, for each; nothing where all
    tokens are of one. Divided by that of 1 they are means over the tokens of each."""
    if inputs.staleness is None:
        return {}
    return {
        f"{name}{BY_STALENESS}{behind}": (value * (inputs.staleness == behind)).sum() * inputs.scale
        for name, value in values.items()
        for behind in range(inputs.oldest + 1)
    }


def largest(values: torch.Tensor) -> torch.Tensor:
    """The largest of values that are at least 0, `[]`; 0 of none."""
    return values.max() if values.numel() else values.new_zeros(())
