"""Group relative policy optimisation (arXiv 2402.03300), token mean over the step as in DAPO (2503.14476).

Advantages say how much better a response was than the others of its group. They are computed in float64 and by
sequence, and spread over the response tokens.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from rlhfless.algorithms.base import LossInputs, LossOutputs, largest
from rlhfless.algorithms.batch import PackedBatch
from rlhfless.algorithms.kl import FloatLike, bounded, kl_estimate, rewards_with_kl
from rlhfless.records import FloatArray, IntArray
from rlhfless.spec import GRPOSpec

STD_FLOOR = 1e-6
"""Added to the standard deviation, as usual: it bounds the advantage if rewards hardly differ."""


class GRPO:
    """The algorithm `grpo` (see rlhfless.algorithms.base)."""

    def __init__(self, settings: GRPOSpec) -> None:
        self._settings = settings

    def advantages(self, batch: PackedBatch) -> FloatArray:
        """Group relative advantages, `[tokens]`. Raises ValueError if the batch has no rewards."""
        if batch.rewards is None:
            raise ValueError("advantages need rewards, and the batch has none")
        rewards, kl = batch.rewards, self._settings.kl
        if kl.in_reward:
            rewards = rewards_with_kl(rewards, batch, kl.coefficient, kl.estimator)
        values = grpo_advantages(rewards, batch.sequence_groups, normalize_std=self._settings.normalize_std)
        return batch.spread(values)

    def loss(self, inputs: LossInputs) -> LossOutputs:
        return grpo_loss(inputs, self._settings)


def grpo_advantages(rewards: FloatLike, group_id: IntArray, *, normalize_std: bool) -> FloatArray:
    """Group relative advantages `[sequences]` (arXiv 2402.03300, section 4.1.2).

    `rewards` and `group_id` are `[sequences]`. A = R - mean of the group, divided by its (unbiased) standard
    deviation + 1e-6 unless `normalize_std` is False (Dr. GRPO, arXiv 2503.20783). A group whose rewards are
    all equal, or that has one sample, gives no signal: its advantages are exactly 0.
    Raises ValueError if a reward is not finite.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(values).all():
        at = int(np.flatnonzero(~np.isfinite(values))[0])
        raise ValueError(f"the reward of sequence {at} is {values[at]}; rewards must be finite")
    groups = int(group_id.max(initial=-1)) + 1
    counts = np.bincount(group_id, minlength=groups)
    means = np.bincount(group_id, values, minlength=groups) / np.maximum(counts, 1)
    centred = values - means[group_id]
    if normalize_std:
        squares = np.bincount(group_id, centred**2, minlength=groups)
        std = np.sqrt(squares / np.maximum(counts - 1, 1))
        centred = centred / (std[group_id] + STD_FLOOR)
    return np.where(_constant(values, group_id, groups)[group_id], 0, centred).astype(np.float32)


def grpo_loss(inputs: LossInputs, algorithm: GRPOSpec) -> LossOutputs:
    """Clipped policy loss, token mean over the optimiser step, plus KL if it is part of the loss.

    Per token, with r = exp(current - old) and w the truncated importance weight:

        w * max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) + beta * KL

    With a dual clip c (arXiv 1912.09729, eq. 8) the max is at most -c A where A < 0: the first clip leaves a ratio that
    has grown unbounded there.
    The clip is PPO's (arXiv 1707.06347, eq. 7) with DAPO's two bounds and token mean (2503.14476, eq. 8).
    Raises ValueError if KL is part of the loss and there are no reference logprobs.
    """
    current, scale = inputs.logprobs, inputs.scale
    log_ratio = bounded(current - inputs.old)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
    policy = torch.maximum(-inputs.advantages * ratio, -inputs.advantages * clipped)
    if algorithm.dual_clip is not None:
        bound = -algorithm.dual_clip * inputs.advantages
        policy = torch.where(inputs.advantages < 0, torch.minimum(policy, bound), policy)
    weight, metrics = _importance(inputs, algorithm.importance_cap)
    if weight is not None:
        policy = policy * weight
    loss = policy.sum() * scale
    metrics |= _policy_metrics(log_ratio, ratio, inputs.advantages, algorithm, scale)
    metrics["policy_loss"] = loss
    if inputs.reference_logprobs is not None:
        kl = kl_estimate(current, inputs.reference_logprobs, algorithm.kl.estimator).sum() * scale
        metrics["reference_kl"] = kl
    if algorithm.kl.on and algorithm.kl.where == "loss":
        if inputs.reference_logprobs is None:
            raise ValueError("KL in the loss needs reference logprobs, and the batch has none")
        loss = loss + algorithm.kl.coefficient * kl
    return LossOutputs(loss, metrics)


def _importance(inputs: LossInputs, cap: float | None) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
    """Truncated importance weight `[tokens]` of the learner's old policy against the engine's, with metrics.

    The engine and the learner compute the same weights with different kernels, so tokens were drawn from a
    slightly different policy than the one that is differentiated. w = min(exp(old - rollout), cap), a
    constant to the gradient. The metrics are there with the correction off, too: they show its need.
    """
    weight = bounded((inputs.old - inputs.rollout_logprobs).detach()).exp()
    metrics = {"importance_weight": weight.sum() * inputs.scale, "importance_weight_max": largest(weight)}
    if cap is None:
        return None, metrics
    metrics["importance_capped"] = (weight > cap).sum() * inputs.scale
    return weight.clamp(max=cap), metrics


def _policy_metrics(
    log_ratio: torch.Tensor,
    ratio: torch.Tensor,
    advantages: torch.Tensor,
    algorithm: GRPOSpec,
    scale: float,
) -> dict[str, torch.Tensor]:
    """A token counts as clipped if the clip removes its gradient, not whenever r is out of range."""
    low = (ratio < 1 - algorithm.clip_low) & (advantages < 0)
    high = (ratio > 1 + algorithm.clip_high) & (advantages > 0)
    metrics = {
        "ratio": ratio.sum() * scale,
        "clipped_low": low.sum() * scale,
        "clipped_high": high.sum() * scale,
        # k3 of KL(old || current): never negative, and exact to the second order.
        "old_kl": (ratio - 1 - log_ratio).sum() * scale,
    }
    if algorithm.dual_clip is not None:
        metrics["clipped_dual"] = ((ratio > algorithm.dual_clip) & (advantages < 0)).sum() * scale
    return metrics


def _constant(values: npt.NDArray[np.float64], group_id: IntArray, groups: int) -> npt.NDArray[np.bool_]:
    """Whether all rewards of each group are equal, `[groups]`.

    Found by comparison, because the mean of equal numbers may have a rounding error.
    """
    low = np.full(groups, np.inf)
    high = np.full(groups, -np.inf)
    np.minimum.at(low, group_id, values)
    np.maximum.at(high, group_id, values)
    return low >= high
