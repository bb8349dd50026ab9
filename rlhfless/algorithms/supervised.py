"""The losses of runs that learn from written responses: SFT, DPO, and the Bradley-Terry loss of a reward model.

They are pure as an algorithm's are (rlhfless.algorithms.base): of the learned tokens of one micro-batch, with the
denominators of the whole optimiser step. A loss of pairs takes micro-batches of whole pairs, whose sequences lie
chosen, rejected, chosen, ... (rlhfless.algorithms.examples).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch
from torch.nn.functional import logsigmoid

from rlhfless.algorithms.base import LossOutputs
from rlhfless.algorithms.batch import PackedBatch
from rlhfless.records import FloatArray
from rlhfless.spec import DPOSpec, DType, RunType

ROUNDING: Mapping[DType, float] = MappingProxyType({"float32": 2**-18, "float16": 2**-11, "bfloat16": 2**-7})
"""Rounding of a token's logprob l, relative to 1 + |l|. Sums over 120 tokens, computed in other batches, differ by at
most 0.02 of what this gives with a random model, and by 0.3 (float32) and 0.8 (bfloat16) with a trained one, whose
logits of 20 are rounded more coarsely."""


@dataclass(frozen=True, slots=True)
class WrittenInputs:
    """The learned tokens of whole sequences."""

    outputs: torch.Tensor  # [tokens], with a gradient
    """Logprobs of the tokens; or of a reward model, of which each sequence has one such token, the score."""
    sequence_id: torch.Tensor  # [tokens], int64, from 0
    denominator_tokens: int
    """Learned tokens of the optimiser step, over all micro-batches and ranks."""
    denominator_examples: int
    """Its examples."""
    reference_logprobs: torch.Tensor | None = None  # [tokens]

    def of_sequences(self, values: torch.Tensor) -> torch.Tensor:
        """The sums of `values` [tokens] over each sequence, `[sequences]`."""
        count = int(self.sequence_id[-1]) + 1 if len(self.sequence_id) else 0
        return values.new_zeros(count).index_add(0, self.sequence_id, values)


class Objective(Protocol):
    """What such a run minimises."""

    def loss(self, inputs: WrittenInputs) -> LossOutputs:
        """This micro-batch's share of the loss, and of its figures."""
        ...


class SFT:
    """Negative log likelihood of the responses, mean over the tokens of the optimiser step."""

    def loss(self, inputs: WrittenInputs) -> LossOutputs:
        """See Objective."""
        return LossOutputs(-inputs.outputs.sum() / max(inputs.denominator_tokens, 1), {})


class DPO:
    """Direct preference optimisation (arXiv 2305.18290, eq. 7), mean over pairs:

        r = beta (log pi(y|x) - log pi_ref(y|x)) of a response y,     loss = -log sigmoid(r_chosen - r_rejected)

    With label smoothing e it is (1 - e) loss(chosen, rejected) + e loss(rejected, chosen).
    """

    def __init__(self, settings: DPOSpec, dtype: DType = "float32") -> None:
        """`dtype`: in which the model computes."""
        self._settings, self._dtype = settings, dtype

    def loss(self, inputs: WrittenInputs) -> LossOutputs:
        """See Objective. Raises ValueError without reference logprobs."""
        if inputs.reference_logprobs is None:
            raise ValueError("DPO needs reference logprobs, and the batch has none")
        log_ratios = inputs.of_sequences(inputs.outputs - inputs.reference_logprobs)
        chosen, rejected = (self._settings.beta * log_ratios).view(-1, 2).unbind(1)
        noise = self._settings.beta * _noise(inputs, self._dtype)
        return _of_pairs(chosen, rejected, noise, inputs, self._settings.label_smoothing)


class BradleyTerry:
    """The loss of a reward model (arXiv 2203.02155, eq. 1), mean over pairs: -log sigmoid(s_chosen - s_rejected)."""

    def __init__(self, dtype: DType = "float32") -> None:
        """`dtype`: in which the model computes."""
        self._dtype = dtype

    def loss(self, inputs: WrittenInputs) -> LossOutputs:
        """See Objective."""
        chosen, rejected = inputs.of_sequences(inputs.outputs).view(-1, 2).unbind(1)
        return _of_pairs(chosen, rejected, _noise(inputs, self._dtype), inputs, 0.0)


def objective_of(run_type: RunType, dpo: DPOSpec, dtype: DType) -> Objective:
    """The objective of a type of run, of a model that computes in `dtype`. Raises ValueError for `rlhf`, which has an
    algorithm."""
    match run_type:
        case "sft":
            return SFT()
        case "dpo":
            return DPO(dpo, dtype)
        case "reward_model":
            return BradleyTerry(dtype)
        case _:
            raise ValueError(f"a run of type {run_type} does not learn from written responses")


def evaluated(objective: Objective, batch: PackedBatch, outputs: FloatArray) -> dict[str, float]:
    """The figures of held-out examples, from what the model gives for their tokens, `outputs` [tokens]."""
    mask, reference = batch.response_mask, batch.reference_logprobs
    inputs = WrittenInputs(
        torch.from_numpy(outputs[mask]).double(),
        torch.from_numpy(batch.sequence_id[mask]),
        batch.denominators.tokens,
        batch.denominators.groups,
        None if reference is None else torch.from_numpy(reference[mask]).double(),
    )
    given = objective.loss(inputs)
    return {name: float(value) for name, value in ({"loss": given.loss} | given.metrics).items()}


def _noise(inputs: WrittenInputs, dtype: DType) -> torch.Tensor:
    """The difference of two responses' sums of outputs that rounding explains, `[pairs]`: two passes with equal weights
    differ, because their batches do. The rounding of each token is independent, so its squares add up."""
    squares = inputs.of_sequences((1 + inputs.outputs.detach().abs()).square())
    return ROUNDING[dtype] * squares.view(-1, 2).sum(1).sqrt()


def _of_pairs(
    chosen: torch.Tensor, rejected: torch.Tensor, noise: torch.Tensor, inputs: WrittenInputs, label_smoothing: float
) -> LossOutputs:
    """From the rewards of both responses, each `[pairs]`. Rewards that differ by no more than `noise` [pairs] are a
    tie, which counts one half in the accuracy."""
    margins, scale = chosen - rejected, 1.0 / max(inputs.denominator_examples, 1)
    losses = -(1 - label_smoothing) * logsigmoid(margins) - label_smoothing * logsigmoid(-margins)
    metrics = {
        "preference_accuracy": torch.where(margins.abs() <= noise, 0.5, (margins > 0).to(margins.dtype)).sum() * scale,
        "preference_margin": margins.detach().sum() * scale,
        "chosen_reward": chosen.detach().sum() * scale,
        "rejected_reward": rejected.detach().sum() * scale,
    }
    return LossOutputs(losses.sum() * scale, metrics)
