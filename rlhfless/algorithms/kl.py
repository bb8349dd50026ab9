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

import torch

Estimator = Literal["k1", "k2", "k3"]

MAX_LOG_RATIO = 20.0
"""e^20 = 5e8. One token with a broken logprob would overflow to inf and turn the whole gradient into NaN; no
token of a policy worth training is this far from its reference, so the clamp never acts on sound data."""


def kl_estimate(logprobs: torch.Tensor, reference_logprobs: torch.Tensor, estimator: Estimator) -> torch.Tensor:
    """KL per token, `[tokens]`, from the policy's and the reference's logprobs `[tokens]` of the same tokens.

    A clamped token has no gradient.
    """
    x = (reference_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    match estimator:
        case "k1":
            return -x
        case "k2":
            return x.square() / 2
        case "k3":
            return torch.expm1(x) - x  # e^x - 1 by its own name: e^x - x - 1 loses all digits where x is small
        case _:
            assert_never(estimator)
