"""Estimators of KL(policy || reference) from samples of the policy (http://joschu.net/blog/kl-approx.html).

With x = log p_reference - log p_policy of a sampled token:

    k1 = -x             unbiased, high variance, may be negative
    k2 = x^2 / 2        biased, low variance, never negative
    k3 = e^x - x - 1    unbiased, low variance, never negative

As a term of the loss only k2 has, on average, the gradient of this KL divergence: the gradient of k1
averages to zero, and that of k3 to the gradient of KL(reference || policy). As a part of the reward all three
are sound.
"""

from __future__ import annotations

from typing import Literal, assert_never

import numpy as np
import numpy.typing as npt
import torch

from rlhfless.algorithms.batch import PackedBatch

Estimator = Literal["k1", "k2", "k3"]
FloatLike = npt.NDArray[np.floating]

MAX_LOG_RATIO = 20.0
"""e^20 = 5e8. One token with a broken logprob would overflow to inf and turn the whole gradient into NaN; no
token of a policy worth training is this far from its reference, so the clamp never acts on sound data."""


def kl_estimate(logprobs: torch.Tensor, reference_logprobs: torch.Tensor, estimator: Estimator) -> torch.Tensor:
    """KL per token, `[tokens]`, from the policy's and the reference's logprobs `[tokens]` of the same tokens.

    A clamped token has no gradient.
    """
    x = bounded(reference_logprobs - logprobs)
    match estimator:
        case "k1":
            return -x
        case "k2":
            return x.square() / 2
        case "k3":
            return torch.expm1(x) - x  # e^x - 1 by its own name: e^x - x - 1 loses all digits where x is small
        case _:
            assert_never(estimator)


def bounded(log_ratio: torch.Tensor) -> torch.Tensor:
    """Log ratios whose exponential is finite."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def rewards_with_kl(
    rewards: FloatLike, batch: PackedBatch, coefficient: float, estimator: Estimator
) -> npt.NDArray[np.float64]:
    """`rewards` [sequences] minus `coefficient` x the KL to the reference, summed over the response.

    It is the KL of the *old* policy, which is known before the update. If the batch has no old logprobs (one mini-batch
    per step), the rollout logprobs are used: the same weights, computed by
    the engine.
    Raises ValueError if the batch has no reference logprobs.
    """
    if batch.reference_logprobs is None:
        raise ValueError("KL in the reward needs reference logprobs, and the batch has none")
    policy = batch.rollout_logprobs if batch.old_logprobs is None else batch.old_logprobs
    kl = kl_estimate(torch.tensor(policy), torch.tensor(batch.reference_logprobs), estimator).numpy()
    per_sequence = np.bincount(batch.sequence_id, np.where(batch.response_mask, kl, 0), minlength=batch.sequences)
    return np.asarray(rewards, dtype=np.float64) - coefficient * per_sequence
