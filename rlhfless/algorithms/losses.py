"""The policy loss on the response tokens of one micro-batch. No distributed calls, no model, no padding.

Every sum is divided by a denominator that is handed in and belongs to the whole optimiser step. Losses,
gradients and metrics of micro-batches and ranks therefore simply add up, however the tokens were cut. Means
over a micro-batch, which would weigh a short micro-batch's tokens more, do not exist here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from rlhfless.algorithms.kl import MAX_LOG_RATIO, kl_estimate
from rlhfless.spec import GRPOSpec

MAXIMUM_SUFFIX = "_max"
"""Metrics with this ending combine by maximum; all others are shares of a token mean and combine by sum."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Response tokens only, in any order."""

    logprobs: torch.Tensor  # [tokens], current; the one that carries a gradient
    entropy: torch.Tensor  # [tokens], of the current policy; a metric only
    rollout_logprobs: torch.Tensor  # [tokens]
    advantages: torch.Tensor  # [tokens]
    denominator_tokens: int
    """Response tokens of the optimiser step, over all micro-batches and ranks."""
    old_logprobs: torch.Tensor | None = None  # [tokens]
    """None: this is the first and only update of the step, so the old policy is the current one, exactly."""
    reference_logprobs: torch.Tensor | None = None  # [tokens]; only needed for KL in the loss


@dataclass(frozen=True, slots=True)
class LossOutputs:
    """This micro-batch's share of the step's loss, and of its metrics."""

    loss: torch.Tensor  # []
    metrics: dict[str, torch.Tensor]  # each [], float32, detached


def grpo_loss(inputs: LossInputs, algorithm: GRPOSpec) -> LossOutputs:
    """Clipped policy loss, token mean over the optimiser step, plus KL if it is part of the loss.

    Per token, with r = exp(current - old) and w the truncated importance weight:

        w * max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) + beta * KL

    The clip is PPO's (arXiv 1707.06347, eq. 7) with DAPO's two bounds and token mean (2503.14476, eq. 8).
    Raises ValueError if KL is part of the loss and there are no reference logprobs.
    """
    current = inputs.logprobs
    old = current.detach() if inputs.old_logprobs is None else inputs.old_logprobs
    scale = 1.0 / max(inputs.denominator_tokens, 1)
    log_ratio = _bounded(current - old)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
    policy = torch.maximum(-inputs.advantages * ratio, -inputs.advantages * clipped)
    weight, metrics = _importance(old, inputs.rollout_logprobs, algorithm.importance_cap, scale)
    if weight is not None:
        policy = policy * weight
    loss = policy.sum() * scale
    metrics |= _policy_metrics(log_ratio, ratio, inputs.advantages, algorithm, scale)
    metrics |= {"policy_loss": loss, "entropy": inputs.entropy.sum() * scale}
    if inputs.reference_logprobs is not None:
        kl = kl_estimate(current, inputs.reference_logprobs, algorithm.kl.estimator).sum() * scale
        metrics["reference_kl"] = kl
    if algorithm.kl.on and algorithm.kl.where == "loss":
        if inputs.reference_logprobs is None:
            raise ValueError("KL in the loss needs reference logprobs, and the batch has none")
        loss = loss + algorithm.kl.coefficient * kl
    metrics["loss"] = loss
    return LossOutputs(loss, {name: value.detach().float() for name, value in metrics.items()})


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


def _importance(
    old: torch.Tensor, rollout: torch.Tensor, cap: float | None, scale: float
) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
    """Truncated importance weight `[tokens]` of the learner's old policy against the engine's, with metrics.

    The engine and the learner compute the same weights with different kernels, so tokens were drawn from a
    slightly different policy than the one that is differentiated. w = min(exp(old - rollout), cap), a
    constant to the gradient. The metrics are there with the correction off, too: they show its need.
    """
    difference = (old - rollout).detach()
    weight = _bounded(difference).exp()
    magnitude = difference.abs()
    metrics = {
        "rollout_logprob_difference": magnitude.sum() * scale,
        "rollout_logprob_difference_max": _maximum(magnitude),
        "importance_weight": weight.sum() * scale,
        "importance_weight_max": _maximum(weight),
    }
    if cap is None:
        return None, metrics
    metrics["importance_capped"] = (weight > cap).sum() * scale
    return weight.clamp(max=cap), metrics


def _policy_metrics(
    log_ratio: torch.Tensor,
    ratio: torch.Tensor,
    advantages: torch.Tensor,
    algorithm: GRPOSpec,
    scale: float,
) -> dict[str, torch.Tensor]:
    """A token counts as clipped where the clip takes its gradient away, not wherever r is out of range."""
    low = (ratio < 1 - algorithm.clip_low) & (advantages < 0)
    high = (ratio > 1 + algorithm.clip_high) & (advantages > 0)
    return {
        "ratio": ratio.sum() * scale,
        "clipped_low": low.sum() * scale,
        "clipped_high": high.sum() * scale,
        # k3 of KL(old || current): never negative, and exact to the second order.
        "old_kl": (ratio - 1 - log_ratio).sum() * scale,
    }


def _bounded(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _maximum(values: torch.Tensor) -> torch.Tensor:
    """The largest of values that are at least 0; 0 of none."""
    return values.max() if values.numel() else values.new_zeros(())
