"""The policy loss shared by the built-in algorithms, built around each algorithm's own per-token loss.

    loss = aggregate(per_token * factor) + kl.coefficient * aggregate(kl) - entropy_bonus * mean over tokens of entropy

`per_token` is PPO's clipped loss by default; `factor` corrects for the difference between engine and learner. A
micro-batch holds whole sequences (rlhfless.functions.batching), so a sum over a sequence is complete. No shape depends
on values, because the memory plan rehearses a step with fake tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar, assert_never

import torch

from rlhfless.algorithms.base import LossInputs, LossOutputs, by_staleness, largest
from rlhfless.algorithms.kl import bounded, kl_estimate
from rlhfless.spec import ClippedLossSpec, PolicyLossSpec
from rlhfless.spec.algorithm import Level

S = TypeVar("S", bound=ClippedLossSpec)


class ClippedLoss(Generic[S]):
    """Base class of algorithms with PPO's per-token loss."""

    def __init__(self, settings: S) -> None:
        self._settings = settings

    def loss(self, inputs: LossInputs) -> LossOutputs:
        """Compute the policy loss with PPO's clip of each token's ratio."""
        ratio, settings = log_ratio_of(inputs).exp(), self._settings
        return policy_loss(
            inputs, clipped_loss(inputs, ratio, settings), clip_metrics(inputs, ratio, settings), settings
        )


def policy_loss(
    inputs: LossInputs, per_token: torch.Tensor, own_metrics: Mapping[str, torch.Tensor], settings: PolicyLossSpec
) -> LossOutputs:
    """Correct and aggregate `per_token` [tokens], then add KL and entropy.

    KL in the loss is aggregated like the loss but not corrected. The entropy bonus is always a token mean.
    Raises ValueError if KL is in the loss and reference logprobs are missing.
    """
    factor, metrics = correction(inputs, settings)
    loss = aggregate(inputs, per_token if factor is None else per_token * factor, settings)
    log_ratio = log_ratio_of(inputs).detach()
    metrics["ratio"] = log_ratio.exp().sum() * inputs.scale
    # k3 of KL(old || current): never negative, and exact to second order.
    metrics["old_kl"] = (torch.expm1(log_ratio) - log_ratio).sum() * inputs.scale
    metrics |= {"policy_loss": loss} | dict(own_metrics)
    if inputs.reference_logprobs is not None:
        kl = kl_estimate(inputs.logprobs, inputs.reference_logprobs, settings.kl.estimator)
        metrics["reference_kl"] = kl.sum() * inputs.scale
    if settings.kl.on and settings.kl.where == "loss":
        if inputs.reference_logprobs is None:
            raise ValueError("KL in the loss needs reference logprobs, and the batch has none")
        if settings.kl.unbiased:
            kl = kl * log_ratio_of(inputs).exp()
        loss = loss + settings.kl.coefficient * aggregate(inputs, kl, settings)
    if settings.entropy_bonus:
        loss = loss - settings.entropy_bonus * inputs.entropy.sum() * inputs.scale
    return LossOutputs(loss, metrics)


def log_ratio_of(inputs: LossInputs) -> torch.Tensor:
    """Return the bounded log ratio of the current to the old policy, `[tokens]`."""
    return bounded(inputs.logprobs - inputs.old)


def clipped_loss(inputs: LossInputs, ratio: torch.Tensor, settings: ClippedLossSpec) -> torch.Tensor:
    """Compute PPO's loss of each token, `[tokens]`, from its ratio r and advantage A:

        max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))

    Source: PPO (arXiv 1707.06347, eq. 7) with DAPO's two bounds (2503.14476, eq. 8). A dual clip c (1912.09729, eq. 8)
    limits the loss to -c A where A < 0, because the first clip does not bound an increased ratio there.
    """
    advantages = inputs.advantages
    bound = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    loss = torch.maximum(-advantages * ratio, -advantages * bound)
    if settings.dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -settings.dual_clip * advantages), loss)
    return loss


def clip_metrics(inputs: LossInputs, ratio: torch.Tensor, settings: ClippedLossSpec) -> dict[str, torch.Tensor]:
    """Return clip metrics. A token counts as clipped if the clip removes its gradient."""
    advantages, scale = inputs.advantages, inputs.scale
    low = (ratio < 1 - settings.clip_low) & (advantages < 0)
    high = (ratio > 1 + settings.clip_high) & (advantages > 0)
    metrics = {"clipped_low": low.sum() * scale, "clipped_high": high.sum() * scale}
    if settings.dual_clip is not None:
        metrics["clipped_dual"] = ((ratio > settings.dual_clip) & (advantages < 0)).sum() * scale
    return metrics | by_staleness(inputs, clipped=low | high)


def correction(inputs: LossInputs, settings: PolicyLossSpec) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
    """Correct for the difference between the engine that generated the tokens and the learner before the update.

    Returns a factor per token `[tokens]` (None without a correction) and metrics, each `[]`, which are always computed
    because they show whether a correction is needed. With d = log p_old - log p_rollout of a token:

        token      exp(d)
        sequence   exp(sum of d over the sequence)
        geometric  exp(mean of d over the sequence): independent of its length

    `importance` multiplies a token's loss by this ratio; `rejection` drops the token. Neither has a gradient or changes
    a denominator, so a step with many rejected tokens is a small step.
    """
    difference = (inputs.old - inputs.rollout_logprobs).detach()
    factor, metrics = None, _off_policy_metrics(inputs, difference)
    if (importance := settings.importance) is not None:
        ratio = _off_policy_ratio(inputs, difference, importance.level)
        outside = (ratio < importance.low) | (ratio > importance.high)
        bound = ratio.clamp(importance.low, importance.high)
        factor = bound if importance.outside == "truncate" else torch.where(outside, 0, ratio)
        metrics["importance_outside"] = outside.sum() * inputs.scale
    if (rejection := settings.rejection) is not None:
        ratio = _off_policy_ratio(inputs, difference, rejection.level)
        kept = (ratio >= rejection.low) & (ratio <= rejection.high)
        factor = kept.to(ratio.dtype) if factor is None else factor * kept
        metrics["rejected"] = (~kept).sum() * inputs.scale
    return factor, metrics


def _off_policy_ratio(inputs: LossInputs, difference: torch.Tensor, level: Level) -> torch.Tensor:
    match level:
        case "token":
            log_ratio = difference
        case "sequence":
            log_ratio = sequence_sum(inputs, difference)
        case "geometric":
            log_ratio = sequence_mean(inputs, difference)
        case _:
            assert_never(level)
    return bounded(log_ratio).exp()


def _off_policy_metrics(inputs: LossInputs, difference: torch.Tensor) -> dict[str, torch.Tensor]:
    log_weight = bounded(difference)
    weight = log_weight.exp()
    # k3 of KL(engine || learner): never negative, and exact to second order.
    kl = torch.expm1(log_weight) - log_weight
    return {
        "importance_weight": weight.sum() * inputs.scale,
        "importance_weight_max": largest(weight),
        "rollout_kl": kl.sum() * inputs.scale,
        "sequence_log_ratio_max": largest(sequence_sum(inputs, difference).abs()),
        "geometric_log_ratio_max": largest(sequence_mean(inputs, difference).abs()),
        **by_staleness(inputs, tokens=torch.ones_like(weight), importance_weight=weight, rollout_kl=kl),
    }


def aggregate(inputs: LossInputs, values: torch.Tensor, settings: PolicyLossSpec) -> torch.Tensor:
    """Reduce `values` [tokens] to this micro-batch's share of the step's loss, `[]`.

    With B sequences of l_i generated tokens in the step:

        token     sum over all tokens / sum of l_i            DAPO, arXiv 2503.14476, eq. 8
        sequence  1/B sum over i of (1/l_i sum over t)        GRPO, arXiv 2402.03300, eq. 3
        constant  1/B sum over i of (1/constant_tokens sum over t)   Dr. GRPO, arXiv 2503.20783, section 3.2
    """
    match settings.aggregation:
        case "token":
            return values.sum() * inputs.scale
        case "sequence":
            return (values / generated_tokens(inputs)).sum() * inputs.sequence_scale
        case "constant":
            return values.sum() * inputs.sequence_scale / settings.constant_tokens
        case _:
            assert_never(settings.aggregation)


def generated_tokens(inputs: LossInputs) -> torch.Tensor:
    """Count the generated tokens of each token's sequence, `[tokens]`."""
    return sequence_sum(inputs, torch.ones_like(inputs.logprobs))


def sequence_sum(inputs: LossInputs, values: torch.Tensor) -> torch.Tensor:
    """Sum `values` [tokens] over each token's sequence, `[tokens]`, without a gradient."""
    wide = values.detach().double()
    # Every sequence has at least one token, so there are no more sequences than tokens.
    sums = torch.zeros_like(wide).index_add(0, inputs.sequence_id, wide)
    return sums[inputs.sequence_id].to(values.dtype)


def sequence_mean(inputs: LossInputs, values: torch.Tensor) -> torch.Tensor:
    """Average `values` [tokens] over each token's sequence, `[tokens]`, without a gradient."""
    return sequence_sum(inputs, values) / generated_tokens(inputs)
