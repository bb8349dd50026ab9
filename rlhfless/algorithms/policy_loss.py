"""What the losses of all built-in algorithms share: correction, aggregation, KL, entropy and metrics, around the loss
of each token, which is the algorithm's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

import torch

from rlhfless.algorithms.aggregation import aggregated
from rlhfless.algorithms.base import LossInputs, LossOutputs
from rlhfless.algorithms.clip import clip_metrics, clipped, log_ratio_of
from rlhfless.algorithms.correction import correction
from rlhfless.algorithms.kl import kl_estimate
from rlhfless.spec import ClippedLossSpec, PolicyLossSpec

S = TypeVar("S", bound=ClippedLossSpec)


class ClippedLoss(Generic[S]):
    """The part of an algorithm that is PPO's clipped loss of each token."""

    def __init__(self, settings: S) -> None:
        self._settings = settings

    def loss(self, inputs: LossInputs) -> LossOutputs:
        """PPO's clipped loss of each token."""
        return clipped_policy_loss(inputs, self._settings)


def policy_loss(
    inputs: LossInputs, per_token: torch.Tensor, own_metrics: Mapping[str, torch.Tensor], settings: PolicyLossSpec
) -> LossOutputs:
    """The loss of each token `[tokens]`, corrected and aggregated, plus KL if it is part of the loss, aggregated in the
    same way and not corrected, minus the entropy bonus, a token mean.

    Raises ValueError if KL is part of the loss and there are no reference logprobs.
    """
    factor, metrics = correction(inputs, settings)
    loss = aggregated(inputs, per_token if factor is None else per_token * factor, settings)
    metrics |= _ratio_metrics(inputs) | {"policy_loss": loss} | dict(own_metrics)
    if inputs.reference_logprobs is not None:
        kl = kl_estimate(inputs.logprobs, inputs.reference_logprobs, settings.kl.estimator)
        metrics["reference_kl"] = kl.sum() * inputs.scale
    if settings.kl.on and settings.kl.where == "loss":
        if inputs.reference_logprobs is None:
            raise ValueError("KL in the loss needs reference logprobs, and the batch has none")
        if settings.kl.unbiased:
            kl = kl * log_ratio_of(inputs).exp()
        loss = loss + settings.kl.coefficient * aggregated(inputs, kl, settings)
    if settings.entropy_bonus:
        loss = loss - settings.entropy_bonus * inputs.entropy.sum() * inputs.scale
    return LossOutputs(loss, metrics)


def clipped_policy_loss(inputs: LossInputs, settings: ClippedLossSpec) -> LossOutputs:
    """`policy_loss` with PPO's clip of each token's ratio."""
    ratio = log_ratio_of(inputs).exp()
    return policy_loss(inputs, clipped(inputs, ratio, settings), clip_metrics(inputs, ratio, settings), settings)


def _ratio_metrics(inputs: LossInputs) -> dict[str, torch.Tensor]:
    log_ratio = log_ratio_of(inputs).detach()
    return {
        "ratio": log_ratio.exp().sum() * inputs.scale,
        # k3 of KL(old || current): never negative, and exact to the second order.
        "old_kl": (torch.expm1(log_ratio) - log_ratio).sum() * inputs.scale,
    }
