"""Off-policy corrections between the engine, which drew the tokens, and the learner's policy before the update.

With d = log p_old - log p_rollout of a token, a ratio is exp(d) at the level of a token, exp(sum of d) of a sequence,
and exp(mean of d) at the geometric level: the sequence's ratio without its dependence on length. A weight multiplies
the loss of each token, a rejection leaves it out. Both are constants to the gradient, and neither changes a
denominator: what is left out is left out of the sum alone, so that a step with much of it is a small step.

The metrics show the need for a correction, so they are there without one, too.
"""

from __future__ import annotations

from typing import assert_never

import torch

from rlhfless.algorithms.base import LossInputs, by_staleness, largest
from rlhfless.algorithms.kl import bounded
from rlhfless.algorithms.sequences import sequence_mean, sequence_sum
from rlhfless.spec import PolicyLossSpec
from rlhfless.spec.losses import Level


def correction(inputs: LossInputs, settings: PolicyLossSpec) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
    """The factor of each token's loss `[tokens]`, None if there is no correction, and metrics, each `[]`."""
    difference = (inputs.old - inputs.rollout_logprobs).detach()
    factor, metrics = None, _metrics(inputs, difference)
    if (importance := settings.importance) is not None:
        ratio = _ratio(inputs, difference, importance.level)
        outside = (ratio < importance.low) | (ratio > importance.high)
        bound = ratio.clamp(importance.low, importance.high)
        factor = bound if importance.outside == "truncate" else torch.where(outside, 0, ratio)
        metrics["importance_outside"] = outside.sum() * inputs.scale
    if (rejection := settings.rejection) is not None:
        ratio = _ratio(inputs, difference, rejection.level)
        kept = (ratio >= rejection.low) & (ratio <= rejection.high)
        factor = kept.to(ratio.dtype) if factor is None else factor * kept
        metrics["rejected"] = (~kept).sum() * inputs.scale
    return factor, metrics


def _ratio(inputs: LossInputs, difference: torch.Tensor, level: Level) -> torch.Tensor:
    match level:
        case "token":
            of_level = difference
        case "sequence":
            of_level = sequence_sum(inputs, difference)
        case "geometric":
            of_level = sequence_mean(inputs, difference)
        case _:
            assert_never(level)
    return bounded(of_level).exp()


def _metrics(inputs: LossInputs, difference: torch.Tensor) -> dict[str, torch.Tensor]:
    log_weight = bounded(difference)
    weight = log_weight.exp()
    # k3 of KL(engine || learner): never negative, and exact to the second order.
    kl = torch.expm1(log_weight) - log_weight
    return {
        "importance_weight": weight.sum() * inputs.scale,
        "importance_weight_max": largest(weight),
        "rollout_kl": kl.sum() * inputs.scale,
        "sequence_log_ratio_max": largest(sequence_sum(inputs, difference).abs()),
        "geometric_log_ratio_max": largest(sequence_mean(inputs, difference).abs()),
        **by_staleness(inputs, tokens=torch.ones_like(weight), importance_weight=weight, rollout_kl=kl),
    }
