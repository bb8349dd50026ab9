"""Losses for written responses (SFT, DPO, a reward model's Bradley-Terry loss), and the batch they learn from.

Losses are pure, like an algorithm's (rlhfless.algorithms.base): they cover the learned tokens of one micro-batch, with
the denominators of the whole optimizer step. Each group of a batch is an example. The two sequences of a pair are
adjacent, chosen before rejected, also in a micro-batch: pairwise losses need whole pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import numpy as np
import torch
from torch.nn.functional import logsigmoid

from rlhfless.algorithms.base import LossOutputs
from rlhfless.algorithms.batch import NO_DENOMINATORS, PackedBatch, own_denominators
from rlhfless.records import FloatArray
from rlhfless.records.rollouts import Example
from rlhfless.spec import DPOSpec, DType, RunType

ROUNDING: Mapping[DType, float] = MappingProxyType({"float32": 2**-18, "float16": 2**-11, "bfloat16": 2**-7})
"""Rounding of a token's logprob l, relative to 1 + |l|. Measured differences between sums over 120 tokens, computed in
different batches, were at most 0.02 of this bound with a random model, and 0.3 (float32) and 0.8 (bfloat16) with a
trained one, whose logits of 20 round more coarsely."""


def pack_examples(examples: Sequence[Example]) -> PackedBatch:
    """Pack examples in order.

    `response_mask` marks the learned tokens. Rollout logprobs are 0 because no engine generated the tokens.
    """
    sequences = [tokens for example in examples for tokens in example.sequences]
    learned = [example.learned(index) for example in examples for index in range(len(example.sequences))]
    lengths = np.array([len(tokens) for tokens in sequences])
    sizes = np.array([len(example.sequences) for example in examples])
    positions = np.concatenate([np.arange(length) for length in lengths])
    return own_denominators(
        PackedBatch(
            tokens=np.concatenate([np.array(tokens, dtype=np.int64) for tokens in sequences]),
            positions=positions,
            sequence_id=np.repeat(np.arange(len(sequences)), lengths),
            group_id=np.repeat(np.repeat(np.arange(len(examples)), sizes), lengths),
            response_mask=np.concatenate([np.array(mask, dtype=bool) for mask in learned]),
            denominators=NO_DENOMINATORS,
            rollout_logprobs=np.zeros(len(positions), dtype=np.float32),
        )
    )


@dataclass(frozen=True, slots=True)
class SupervisedInputs:
    """The learned tokens of whole sequences."""

    outputs: torch.Tensor  # [tokens], with a gradient
    """Logprobs of the tokens, or the scores of a reward model, which learns one token per sequence."""
    sequence_id: torch.Tensor  # [tokens], int64, from 0
    denominator_tokens: int
    """Learned tokens of the optimizer step, over all micro-batches and ranks."""
    denominator_examples: int
    """Examples of the optimizer step."""
    reference_logprobs: torch.Tensor | None = None  # [tokens]

    def sequence_sums(self, values: torch.Tensor) -> torch.Tensor:
        """Sum `values` [tokens] over each sequence, `[sequences]`."""
        count = int(self.sequence_id[-1]) + 1 if len(self.sequence_id) else 0
        return values.new_zeros(count).index_add(0, self.sequence_id, values)


class Objective(Protocol):
    """The objective of a run that learns from written responses."""

    def loss(self, inputs: SupervisedInputs) -> LossOutputs:
        """Compute this micro-batch's share of the loss and its metrics."""
        ...


class SFT:
    """Negative log likelihood of the responses, a mean over the tokens of the optimizer step."""

    def loss(self, inputs: SupervisedInputs) -> LossOutputs:
        """Compute the negative log likelihood (see Objective)."""
        return LossOutputs(-inputs.outputs.sum() / max(inputs.denominator_tokens, 1), {})


class DPO:
    """Direct preference optimization (arXiv 2305.18290, eq. 7), a mean over pairs:

        r = beta (log pi(y|x) - log pi_ref(y|x)) of a response y,     loss = -log sigmoid(r_chosen - r_rejected)

    With label smoothing e it is (1 - e) loss(chosen, rejected) + e loss(rejected, chosen).
    """

    def __init__(self, settings: DPOSpec, dtype: DType = "float32") -> None:
        """`dtype`: the dtype of the model's forward pass."""
        self._settings, self._dtype = settings, dtype

    def loss(self, inputs: SupervisedInputs) -> LossOutputs:
        """Compute the DPO loss (see Objective). Raises ValueError without reference logprobs."""
        if inputs.reference_logprobs is None:
            raise ValueError("DPO needs reference logprobs, and the batch has none")
        log_ratios = inputs.sequence_sums(inputs.outputs - inputs.reference_logprobs)
        chosen, rejected = (self._settings.beta * log_ratios).view(-1, 2).unbind(1)
        noise = self._settings.beta * _rounding_noise(inputs, self._dtype)
        return _pairwise_loss(chosen, rejected, noise, inputs, self._settings.label_smoothing)


class BradleyTerry:
    """The loss of a reward model (arXiv 2203.02155, eq. 1), a mean over pairs: -log sigmoid(s_chosen - s_rejected)."""

    def __init__(self, dtype: DType = "float32") -> None:
        """`dtype`: the dtype of the model's forward pass."""
        self._dtype = dtype

    def loss(self, inputs: SupervisedInputs) -> LossOutputs:
        """Compute the pairwise loss (see Objective)."""
        chosen, rejected = inputs.sequence_sums(inputs.outputs).view(-1, 2).unbind(1)
        return _pairwise_loss(chosen, rejected, _rounding_noise(inputs, self._dtype), inputs, 0.0)


def objective_of(run_type: RunType, dpo: DPOSpec, dtype: DType) -> Objective:
    """Build the objective of a run type for a model that computes in `dtype`.

    Raises ValueError for `rlhf`, which has an algorithm.
    """
    match run_type:
        case "sft":
            return SFT()
        case "dpo":
            return DPO(dpo, dtype)
        case "reward_model":
            return BradleyTerry(dtype)
        case _:
            raise ValueError(f"a run of type {run_type} does not learn from written responses")


def evaluate(objective: Objective, batch: PackedBatch, outputs: FloatArray) -> dict[str, float]:
    """Compute loss and metrics of held-out examples from the model's `outputs` [tokens]."""
    mask, reference = batch.response_mask, batch.reference_logprobs
    inputs = SupervisedInputs(
        torch.from_numpy(outputs[mask]).double(),
        torch.from_numpy(batch.sequence_id[mask]),
        batch.denominators.tokens,
        batch.denominators.groups,
        None if reference is None else torch.from_numpy(reference[mask]).double(),
    )
    given = objective.loss(inputs)
    return {name: float(value) for name, value in ({"loss": given.loss} | given.metrics).items()}


def _rounding_noise(inputs: SupervisedInputs, dtype: DType) -> torch.Tensor:
    """Bound the difference between the sums of a pair's two responses that rounding explains, `[pairs]`.

    Two passes with equal weights differ because their batches differ. Tokens round independently, so squares add up.
    """
    squares = inputs.sequence_sums((1 + inputs.outputs.detach().abs()).square())
    return ROUNDING[dtype] * squares.view(-1, 2).sum(1).sqrt()


def _pairwise_loss(
    chosen: torch.Tensor, rejected: torch.Tensor, noise: torch.Tensor, inputs: SupervisedInputs, label_smoothing: float
) -> LossOutputs:
    """Compute the loss from the rewards of both responses, each `[pairs]`.

    Rewards within `noise` [pairs] of each other are a tie, which counts one half in the accuracy.
    """
    margins, scale = chosen - rejected, 1.0 / max(inputs.denominator_examples, 1)
    losses = -(1 - label_smoothing) * logsigmoid(margins) - label_smoothing * logsigmoid(-margins)
    metrics = {
        "preference_accuracy": torch.where(margins.abs() <= noise, 0.5, (margins > 0).to(margins.dtype)).sum() * scale,
        "preference_margin": margins.detach().sum() * scale,
        "chosen_reward": chosen.detach().sum() * scale,
        "rejected_reward": rejected.detach().sum() * scale,
    }
    return LossOutputs(losses.sum() * scale, metrics)
