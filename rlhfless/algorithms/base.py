"""The interface of an algorithm: advantages from a batch, and a loss from tensors.

The learner and the loop use only this interface. An algorithm's settings hold its keys of the spec, and declare what
else a step must compute for it, such as reference logprobs (`needs`, see rlhfless.spec.algorithm).

A loss covers the generated tokens of one micro-batch, without padding, model or distributed calls. Every sum is divided
by a denominator of the whole optimizer step, so losses, gradients and metrics of micro-batches and ranks add up however
the tokens were divided. A mean per micro-batch would give the tokens of a short one more weight.
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
    "grpo": "rlhfless.algorithms.group_based:GRPO",
    "dapo": "rlhfless.algorithms.group_based:DAPO",
    "dr_grpo": "rlhfless.algorithms.group_based:DrGRPO",
    "rloo": "rlhfless.algorithms.group_based:RLOO",
    "reinforce_plus_plus": "rlhfless.algorithms.ppo:ReinforcePlusPlus",
    "gspo": "rlhfless.algorithms.group_based:GSPO",
    "cispo": "rlhfless.algorithms.group_based:CISPO",
    "sapo": "rlhfless.algorithms.group_based:SAPO",
    "ppo": "rlhfless.algorithms.ppo:PPO",
    "distill": "rlhfless.algorithms.distill:Distill",
}
"""Import paths of the built-in algorithms by the `type` of their settings."""

MAXIMUM_SUFFIX = "_max"
"""Metrics with this suffix combine by maximum. All others are shares of a token mean and combine by sum."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The generated tokens of a micro-batch of whole sequences. Fields named like a batch column hold that column."""

    logprobs: torch.Tensor  # [tokens], of the current policy, with a gradient
    entropy: torch.Tensor  # [tokens], of the current policy; has a gradient only if `needs.entropy_gradient`
    rollout_logprobs: torch.Tensor  # [tokens]
    advantages: torch.Tensor  # [tokens]
    denominator_tokens: int
    """Generated tokens of the optimizer step, over all micro-batches and ranks."""
    sequence_id: torch.Tensor  # [tokens], int64, from 0
    """Each token's sequence in the micro-batch. A sequence has all its generated tokens; none is empty."""
    denominator_sequences: int
    """Sequences of the optimizer step that have generated tokens."""
    old_logprobs: torch.Tensor | None = None  # [tokens]
    """None in a step with a single update, where the old policy equals the current one."""
    reference_logprobs: torch.Tensor | None = None  # [tokens], if the algorithm needs a reference
    staleness: torch.Tensor | None = None  # [tokens]
    """Versions by which each token's weights were stale; None if all tokens are equally stale."""
    oldest: int = 0
    """The largest staleness in the step's batch."""
    own: Mapping[str, torch.Tensor] = field(default_factory=dict)  # each [tokens]
    """Columns of user-defined functions, by name."""

    @property
    def scale(self) -> float:
        """Factor from a sum over tokens to this micro-batch's share of the optimizer step's mean."""
        return 1.0 / max(self.denominator_tokens, 1)

    @property
    def old(self) -> torch.Tensor:
        """Logprobs of the policy before the step's first update, `[tokens]`, without a gradient."""
        return self.logprobs.detach() if self.old_logprobs is None else self.old_logprobs

    @property
    def sequence_scale(self) -> float:
        """Factor from a sum over sequences to this micro-batch's share of the optimizer step's mean."""
        return 1.0 / max(self.denominator_sequences, 1)


@dataclass(frozen=True, slots=True)
class ValueInputs:
    """Like LossInputs, for a critic: generated tokens only, in any order."""

    values: torch.Tensor  # [tokens], current, with a gradient
    old_values: torch.Tensor  # [tokens], from which the advantages were computed
    returns: torch.Tensor  # [tokens]
    denominator_tokens: int

    @property
    def scale(self) -> float:
        """Factor from a sum over tokens to this micro-batch's share (see LossInputs)."""
        return 1.0 / max(self.denominator_tokens, 1)


@dataclass(frozen=True, slots=True)
class LossOutputs:
    """This micro-batch's share of the step's loss and metrics."""

    loss: torch.Tensor  # []
    metrics: dict[str, torch.Tensor]  # each []
    """The names must not depend on the tokens. Names not declared by telemetry start with `algorithm/`."""


class Algorithm(Protocol):
    """An algorithm, built from its settings in the driver and in every learner rank. Stateless."""

    def __init__(self, settings: Any) -> None: ...

    def advantages(self, batch: PackedBatch) -> FloatArray:
        """Compute advantages `[tokens]` from `rewards` and the columns requested by `needs`.

        `batch.spread` turns a value per sequence into one per token.
        """
        ...

    def loss(self, inputs: LossInputs) -> LossOutputs:
        """Compute this micro-batch's share of the loss to minimize."""
        ...


class ActorCritic(Algorithm, Protocol):
    """An algorithm that needs `values`: its batches have the critic's values, and it defines the critic's loss."""

    def returns(self, batch: PackedBatch) -> FloatArray:
        """Compute the critic's targets, `[tokens]`."""
        ...

    def value_loss(self, inputs: ValueInputs) -> LossOutputs:
        """Compute this micro-batch's share of the critic's loss."""
        ...


def algorithm_of(settings: AlgorithmSpec) -> Algorithm:
    """Build the algorithm for the settings, built in or imported from the user's path."""
    algorithm: Algorithm = make(settings, BUILT_IN)
    return algorithm


def common_metrics(inputs: LossInputs) -> dict[str, torch.Tensor]:
    """Compute the metrics common to all algorithms, each `[]`.

    The engine and the learner run the same weights with different kernels, so `rollout_logprob_difference` is small
    unless the engine has wrong weights.
    """
    magnitude = (inputs.old - inputs.rollout_logprobs).detach().abs()
    return {
        "entropy": inputs.entropy.detach().sum() * inputs.scale,
        "rollout_logprob_difference": magnitude.sum() * inputs.scale,
        "rollout_logprob_difference_max": largest(magnitude),
    }


def combine_metrics(parts: Iterable[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Combine the metrics of the micro-batches of one optimizer step."""
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
"""Separates a metric's name from the staleness of its tokens."""


def by_staleness(inputs: LossInputs, **values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Split the token mean of each of `values` [tokens] by staleness. Empty if all tokens are equally stale.

    Each share is divided by all tokens of the step. Divide it by the share of `tokens` for the mean over these tokens.
    """
    if inputs.staleness is None:
        return {}
    return {
        f"{name}{BY_STALENESS}{behind}": (value * (inputs.staleness == behind)).sum() * inputs.scale
        for name, value in values.items()
        for behind in range(inputs.oldest + 1)
    }


def largest(values: torch.Tensor) -> torch.Tensor:
    """Return the maximum of non-negative values, `[]`; 0 if there are none."""
    return values.max() if values.numel() else values.new_zeros(())
