"""Advantages: how much better a response was than the others of its group.

Computed in float64 and by sequence; `PackedBatch.with_advantages` spreads them over the response tokens.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from rlhfless.algorithms.batch import PackedBatch
from rlhfless.algorithms.kl import Estimator, kl_estimate
from rlhfless.records import FloatArray, IntArray
from rlhfless.spec import GRPOSpec

STD_FLOOR = 1e-6
"""Added to the standard deviation, as is usual: it bounds the advantage where rewards hardly differ."""

FloatLike = npt.NDArray[np.floating]


def grpo_advantages(rewards: FloatLike, group_id: IntArray, *, normalize_std: bool) -> FloatArray:
    """Group relative advantages `[sequences]` (arXiv 2402.03300, section 4.1.2).

    `rewards` and `group_id` are `[sequences]`. A = R - mean of the group, divided by its (unbiased) standard
    deviation + 1e-6 unless `normalize_std` is False (Dr. GRPO, arXiv 2503.20783). A group whose rewards are
    all the same, or which has one sample, says nothing about what was good: its advantages are exactly 0.
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


def rewards_with_kl(
    rewards: FloatLike, batch: PackedBatch, coefficient: float, estimator: Estimator
) -> npt.NDArray[np.float64]:
    """`rewards` [sequences] minus `coefficient` x the KL to the reference, summed over the response.

    It is the KL of the *old* policy, the one that is known before the update. Where the batch has no old
    logprobs (one mini-batch per step) the rollout logprobs stand for them: the same weights, computed by
    the engine.
    Raises ValueError if the batch has no reference logprobs.
    """
    if batch.reference_logprobs is None:
        raise ValueError("KL in the reward needs reference logprobs, and the batch has none")
    policy = batch.rollout_logprobs if batch.old_logprobs is None else batch.old_logprobs
    kl = kl_estimate(torch.tensor(policy), torch.tensor(batch.reference_logprobs), estimator).numpy()
    per_sequence = np.bincount(batch.sequence_id, np.where(batch.response_mask, kl, 0), minlength=batch.sequences)
    return np.asarray(rewards, dtype=np.float64) - coefficient * per_sequence


def with_grpo_advantages(batch: PackedBatch, rewards: FloatLike, algorithm: GRPOSpec) -> PackedBatch:
    """The batch with the advantages that `algorithm` asks for. `rewards` is `[sequences]`, in batch order."""
    if algorithm.kl.in_reward:
        rewards = rewards_with_kl(rewards, batch, algorithm.kl.coefficient, algorithm.kl.estimator)
    values = grpo_advantages(rewards, batch.sequence_groups, normalize_std=algorithm.normalize_std)
    return batch.with_advantages(values)


def _constant(values: npt.NDArray[np.float64], group_id: IntArray, groups: int) -> npt.NDArray[np.bool_]:
    """Which groups have one reward only, `[groups]`.

    Found by comparison, because the mean of equal numbers may be a bit off.
    """
    low = np.full(groups, np.inf)
    high = np.full(groups, -np.inf)
    np.minimum.at(low, group_id, values)
    np.maximum.at(high, group_id, values)
    return low >= high
