"""From values of tokens to the loss of an optimiser step: three ways to weigh tokens (`algorithm.aggregation`).

Each divides by numbers of the whole step, so what micro-batches and ranks give adds up.
"""

from __future__ import annotations

from typing import assert_never

import torch

from rlhfless.algorithms.base import LossInputs
from rlhfless.algorithms.sequences import drawn_tokens
from rlhfless.spec import PolicyLossSpec


def aggregated(inputs: LossInputs, values: torch.Tensor, settings: PolicyLossSpec) -> torch.Tensor:
    """`values` [tokens] -> this micro-batch's share of the step's loss, `[]`.

    With B sequences of l_i tokens that the model drew:

        token     sum over all tokens / sum of l_i            DAPO, arXiv 2503.14476, eq. 8
        sequence  1/B sum over i of (1/l_i sum over t)        GRPO, arXiv 2402.03300, eq. 3
        constant  1/B sum over i of (1/constant_tokens sum over t)   Dr. GRPO, arXiv 2503.20783, section 3.2
    """
    match settings.aggregation:
        case "token":
            return values.sum() * inputs.scale
        case "sequence":
            return (values / drawn_tokens(inputs)).sum() * inputs.sequence_scale
        case "constant":
            return values.sum() * inputs.sequence_scale / settings.constant_tokens
        case _:
            assert_never(settings.aggregation)
