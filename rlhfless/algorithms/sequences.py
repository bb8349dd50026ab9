"""Sums and means over the tokens of each sequence of a micro-batch.

A micro-batch has whole sequences (rlhfless.functions.batching), so that a sum over one is complete. Nothing here has a
gradient: sequence-level losses take theirs token by token (GSPO, arXiv 2507.18071, section 4.3). No shape depends on
values, so that the memory plan can rehearse a step without them.
"""

from __future__ import annotations

import torch

from rlhfless.algorithms.base import LossInputs


def drawn_tokens(inputs: LossInputs) -> torch.Tensor:
    """How many tokens of its sequence the model drew, at each token, `[tokens]`."""
    return sequence_sum(inputs, torch.ones_like(inputs.logprobs))


def sequence_sum(inputs: LossInputs, values: torch.Tensor) -> torch.Tensor:
    """`values` [tokens] -> the sum over its sequence at each token, `[tokens]`, without a gradient."""
    wide = values.detach().double()
    # Each sequence has a token, so there are no more sequences than tokens.
    sums = torch.zeros_like(wide).index_add(0, inputs.sequence_id, wide)
    return sums[inputs.sequence_id].to(values.dtype)


def sequence_mean(inputs: LossInputs, values: torch.Tensor) -> torch.Tensor:
    """`values` [tokens] -> the mean over its sequence at each token, `[tokens]`, without a gradient."""
    return sequence_sum(inputs, values) / drawn_tokens(inputs)
