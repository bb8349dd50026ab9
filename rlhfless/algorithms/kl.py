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
from rlhfless.spec import KLSpec

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


def old_kl_to_reference(batch: PackedBatch, estimator: Estimator) -> npt.NDArray[np.float64]:
    """KL of the *old* policy to the reference, `[drawn tokens]`: of the learner's own logprobs before the first update
    of the step, whatever the schedule and the number of updates. The engine's logprobs are of other kernels, and in
    overlapped schedules of other weights.

    Raises ValueError if the batch has no old or no reference logprobs.
    """
    old, reference, drawn = batch.old_logprobs, batch.reference_logprobs, batch.response_mask
    if old is None or reference is None:
        name = "old" if old is None else "reference"
        raise ValueError(f"KL in the reward needs {name} logprobs, and the batch has none")
    return kl_estimate(torch.tensor(old[drawn]), torch.tensor(reference[drawn]), estimator).numpy().astype(np.float64)


def rewards_with_kl(batch: PackedBatch, kl: KLSpec) -> npt.NDArray[np.float64]:
    """Rewards `[sequences]`, minus the KL to the reference summed over the response if it is part of the reward.

    Raises ValueError if the batch has no rewards, or old or reference logprobs are missing.
    """
    rewards = rewards_of(batch)
    if not kl.in_reward:
        return rewards
    sequence = batch.sequence_id[batch.response_mask]
    summed = np.bincount(sequence, old_kl_to_reference(batch, kl.estimator), minlength=batch.sequences)
    return rewards - kl.coefficient * summed


def token_rewards(batch: PackedBatch, rewards: FloatLike, kl: KLSpec) -> npt.NDArray[np.float64]:
    """Rewards `[drawn tokens]`: the sequence's, of `rewards` [sequences], at its last drawn token, minus each token's
    KL if it is part of the reward. A sequence without drawn tokens has none. Raises ValueError if old or
    reference logprobs are missing."""
    lengths = batch.response_lengths
    per_token = np.zeros(int(lengths.sum()))
    per_token[(np.cumsum(lengths) - 1)[lengths > 0]] = rewards[lengths > 0]
    return per_token - kl.coefficient * old_kl_to_reference(batch, kl.estimator) if kl.in_reward else per_token


def rewards_of(batch: PackedBatch) -> npt.NDArray[np.float64]:
    """The rewards `[sequences]`. Raises ValueError if the batch has none."""
    if batch.rewards is None:
        raise ValueError("advantages need rewards, and the batch has none")
    return batch.rewards
