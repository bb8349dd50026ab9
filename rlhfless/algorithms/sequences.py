"""Sums and means over the tokens of each sequence of a micro-batch.

A micro-batch has whole sequences (rlhfless.functions.batching), so that a sum over one is complete. Nothing here has a
gradient: sequence-level losses take theirs token by token (GSPO, arXiv 2507.18071, eq. 11).
"""

from __future__ import annotations

import torch

from rlhfless.algorithms.base import LossInputs


def drawn_tokens(inputs: LossInputs) -> torch.Tensor:
    """Tokens of each sequence that the model drew, `[sequences]`."""
    return torch.bincount(inputs.sequence_id)


def sequence_sum(inputs: LossInputs, values: torch.Tensor) -> torch.Tensor:
    """`values` [tokens] -> the sum over its sequence at each token, `[tokens]`, without a gradient."""
    wide = values.detach().double()
    sums = wide.new_zeros(len(drawn_tokens(inputs))).index_add(0, inputs.sequence_id, wide)
    return sums[inputs.sequence_id].to(values.dtype)


def sequence_mean(inputs: LossInputs, values: torch.Tensor) -> torch.Tensor:
    """`values` [tokens] -> the mean over its sequence at each token, `[tokens]`, without a gradient."""
    return sequence_sum(inputs, values) / drawn_tokens(inputs)[inputs.sequence_id]
