"""KL to the reference policy: estimators, KL as part of the reward, and a coefficient that follows a target.

Estimators of KL(policy || reference) from the policy's own samples (http://joschu.net/blog/kl-approx.html), with
x = log p_reference - log p_policy of a sampled token:

    k1 = -x             unbiased, high variance, may be negative
    k2 = x^2 / 2        biased, low variance, never negative
    k3 = e^x - x - 1    unbiased, low variance, never negative

As a term of the loss, only k2 has the gradient of this divergence on average: the gradient of k1 averages to zero, and
that of k3 to the gradient of KL(reference || policy). As part of the reward, all three are sound.
"""

from __future__ import annotations

from typing import Literal, assert_never

import numpy as np
import numpy.typing as npt
import torch

from rlhfless.algorithms.batch import PackedBatch
from rlhfless.spec import AlgorithmSpec, KLSpec, RewardKLSpec

Estimator = Literal["k1", "k2", "k3"]
FloatLike = npt.NDArray[np.floating]
Float64Array = npt.NDArray[np.float64]

MAX_LOG_RATIO = 20.0
"""e^20 = 5e8. A single broken logprob would overflow to inf and turn the whole gradient into NaN. No token of a useful
policy is this far from its reference, so the clamp never acts on sound data."""

MAX_ERROR = 0.2
"""Bound on the relative error of `next_kl_coefficient`, as published."""


def kl_estimate(logprobs: torch.Tensor, reference_logprobs: torch.Tensor, estimator: Estimator) -> torch.Tensor:
    """Estimate KL per token, `[tokens]`, from the policy's and the reference's logprobs `[tokens]` of the same tokens.

    A clamped token has no gradient.
    """
    x = bounded(reference_logprobs - logprobs)
    match estimator:
        case "k1":
            return -x
        case "k2":
            return x.square() / 2
        case "k3":
            return torch.expm1(x) - x  # e^x - x - 1 would lose all digits where x is small
        case _:
            assert_never(estimator)


def bounded(log_ratio: torch.Tensor) -> torch.Tensor:
    """Clamp log ratios so that their exponential is finite."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def old_kl_to_reference(batch: PackedBatch, estimator: Estimator) -> Float64Array:
    """Estimate KL of the *old* policy to the reference, `[generated tokens]`.

    Uses the learner's logprobs from before the step's first update. The engine's logprobs come from other kernels and,
    in overlapped schedules, from other weights. Raises ValueError if the batch lacks old or reference logprobs.
    """
    old, reference, generated = batch.old_logprobs, batch.reference_logprobs, batch.response_mask
    if old is None or reference is None:
        name = "old" if old is None else "reference"
        raise ValueError(f"KL in the reward needs {name} logprobs, and the batch has none")
    kl = kl_estimate(torch.tensor(old[generated]), torch.tensor(reference[generated]), estimator)
    return kl.numpy().astype(np.float64)


def rewards_with_kl(batch: PackedBatch, kl: KLSpec) -> Float64Array:
    """Return rewards `[sequences]`, minus the KL summed over the response if it is part of the reward.

    Raises ValueError if rewards, or the old or reference logprobs for KL, are missing.
    """
    rewards = rewards_of(batch)
    if not kl.in_reward:
        return rewards
    sequence = batch.sequence_id[batch.response_mask]
    summed = np.bincount(sequence, old_kl_to_reference(batch, kl.estimator), minlength=batch.sequences)
    return rewards - kl.coefficient * summed


def token_rewards(batch: PackedBatch, rewards: FloatLike, kl: KLSpec) -> Float64Array:
    """Place `rewards` [sequences] at each sequence's last generated token, `[generated tokens]`.

    Subtracts each token's KL if it is part of the reward; raises ValueError if its old or reference logprobs are
    missing.
    """
    lengths = batch.response_lengths
    per_token = np.zeros(int(lengths.sum()))
    per_token[(np.cumsum(lengths) - 1)[lengths > 0]] = rewards[lengths > 0]
    return per_token - kl.coefficient * old_kl_to_reference(batch, kl.estimator) if kl.in_reward else per_token


def rewards_of(batch: PackedBatch) -> Float64Array:
    """Return the rewards `[sequences]`. Raises ValueError if the batch has none."""
    if batch.rewards is None:
        raise ValueError("advantages need rewards, and the batch has none")
    return batch.rewards


def adaptive_kl(settings: AlgorithmSpec) -> RewardKLSpec | None:
    """Return the KL settings if their coefficient follows a target, else None."""
    kl = getattr(settings, "kl", None)
    return kl if isinstance(kl, RewardKLSpec) and kl.target is not None else None


def next_kl_coefficient(coefficient: float, measured_kl: float, target: float, *, samples: int, horizon: int) -> float:
    """Compute the next step's coefficient from this step's KL per token (arXiv 1909.08593, section 2.2):

    error = clip(KL / target - 1, -0.2, 0.2)        next = coefficient * (1 + error * min(samples / horizon, 1))
    """
    error = min(max(measured_kl / target - 1, -MAX_ERROR), MAX_ERROR)
    return coefficient * (1 + error * min(samples / horizon, 1.0))


def adapt_kl(settings: AlgorithmSpec, batch: PackedBatch) -> AlgorithmSpec:
    """Return the settings for the step after `batch` was learned, with an adapted KL coefficient."""
    kl = adaptive_kl(settings)
    if kl is None or kl.target is None or not batch.denominators.tokens:
        return settings
    measured = float(old_kl_to_reference(batch, kl.estimator).mean())
    samples = batch.denominators.sequences
    following = next_kl_coefficient(kl.coefficient, measured, kl.target, samples=samples, horizon=kl.horizon)
    return with_kl_coefficient(settings, following)


def with_kl_coefficient(settings: AlgorithmSpec, coefficient: float) -> AlgorithmSpec:
    """Return the settings with a new KL coefficient, or unchanged if it follows no target."""
    kl = adaptive_kl(settings)
    if kl is None:
        return settings
    return settings.model_copy(update={"kl": kl.model_copy(update={"coefficient": coefficient})})
