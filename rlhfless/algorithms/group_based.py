"""Algorithms that compare the samples of a prompt (a group): GRPO and its relatives.

    type      advantage of a response with reward R             loss of a token
    grpo      (R - group mean) / (group std + 1e-6)             PPO's clip, rlhfless.algorithms.losses
    dapo      as grpo                                           as grpo
    dr_grpo   R - group mean                                    as grpo, divided by a constant
    rloo      R - mean of the others in the group               as grpo
    gspo      as grpo                                           as grpo, with the ratio of the response
    cispo     as grpo                                           a weighted log likelihood
    sapo      as grpo                                           a soft gate in place of the clip

R includes the KL to the reference if it is part of the reward. With `turn_returns`, the advantage of a turn has
R - (what earlier turns have earned) in place of R, and the statistics are still those of R. Statistics are computed in
float64.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import numpy as np
import torch

from rlhfless.algorithms.base import LossInputs, LossOutputs
from rlhfless.algorithms.batch import PackedBatch
from rlhfless.algorithms.kl import Float64Array, FloatLike, bounded, rewards_with_kl
from rlhfless.algorithms.losses import (
    ClippedLoss,
    clip_metrics,
    clipped_loss,
    log_ratio_of,
    policy_loss,
    sequence_mean,
)
from rlhfless.records import FloatArray, IntArray
from rlhfless.spec import (
    CISPOSpec,
    ComparedSpec,
    DAPOSpec,
    DrGRPOSpec,
    GroupRelativeSpec,
    GRPOSpec,
    GSPOSpec,
    RLOOSpec,
    SAPOSpec,
)

STD_FLOOR = 1e-6
"""Added to the standard deviation to bound advantages when rewards hardly differ."""

S = TypeVar("S", bound=GroupRelativeSpec)


def group_advantages(rewards: FloatLike, group_id: IntArray, *, normalize_std: bool) -> FloatArray:
    """Compute GRPO's advantages (arXiv 2402.03300, section 4.1.2) `[sequences]`:

        A = (R - mean of the group) / (std of the group + 1e-6)

    `rewards` and `group_id` are `[sequences]`. The standard deviation is unbiased; without `normalize_std`, A is not
    divided. Groups of one sample or of equal rewards carry no signal: their advantages are exactly 0.
    """
    values = centred(rewards, group_id)
    return (values / _divisor(values, group_id) if normalize_std else values).astype(np.float32)


def _divisor(centred_rewards: Float64Array, group_id: IntArray) -> Float64Array:
    """Return what rewards are divided by, `[sequences]`; infinity in a group without a signal."""
    std = group_std(centred_rewards, group_id)
    return np.asarray(np.where(std > 0, std + STD_FLOOR, np.inf))


def less_earned(batch: PackedBatch, advantages: FloatArray, settings: ComparedSpec, divisor: FloatLike) -> FloatArray:
    """Subtract from `advantages` [tokens] what earlier turns have earned, if the settings want returns of turns.
    `divisor`: what rewards are divided by, `[sequences]`."""
    if not settings.turn_returns or batch.earned is None:
        return advantages
    less: FloatArray = (advantages - batch.earned * batch.spread(1 / np.asarray(divisor))).astype(np.float32)
    return less


def group_sizes(group_id: IntArray) -> IntArray:
    """Count the sequences in the group of each sequence, `[sequences]`."""
    return np.bincount(group_id)[group_id]


def centred(rewards: FloatLike, group_id: IntArray) -> Float64Array:
    """Subtract the group mean from `rewards` [sequences]; exactly 0 in a group of equal rewards."""
    values = np.asarray(rewards, dtype=np.float64)
    means = np.bincount(group_id, values)[group_id] / group_sizes(group_id)
    # Compare for equality, because the mean of equal numbers may have a rounding error.
    groups = int(group_id.max(initial=-1)) + 1
    low, high = np.full(groups, np.inf), np.full(groups, -np.inf)
    np.minimum.at(low, group_id, values)
    np.maximum.at(high, group_id, values)
    return np.where((low >= high)[group_id], 0, values - means)


def group_std(centred_rewards: Float64Array, group_id: IntArray) -> Float64Array:
    """Return the unbiased standard deviation of each sequence's group, `[sequences]`; 0 in a group of one."""
    squares = np.bincount(group_id, centred_rewards**2)[group_id]
    return np.asarray(np.sqrt(squares / np.maximum(group_sizes(group_id) - 1, 1)))


class GroupRelative(Generic[S]):
    """Base class of algorithms with GRPO's advantages."""

    def __init__(self, settings: S) -> None:
        self._settings = settings

    def advantages(self, batch: PackedBatch) -> FloatArray:
        """Compute group-relative advantages, `[tokens]`. Raises ValueError if the batch has no rewards."""
        settings, groups = self._settings, batch.sequence_groups
        rewards = rewards_with_kl(batch, settings.kl)
        values = batch.spread(group_advantages(rewards, groups, normalize_std=settings.normalize_std))
        divisor = _divisor(centred(rewards, groups), groups) if settings.normalize_std else np.ones(batch.sequences)
        return less_earned(batch, values, settings, divisor)


class GRPO(GroupRelative[GRPOSpec], ClippedLoss[GRPOSpec]):
    """Group relative policy optimization (arXiv 2402.03300)."""


class DAPO(GroupRelative[DAPOSpec], ClippedLoss[DAPOSpec]):
    """Decoupled clip and dynamic sampling policy optimization (arXiv 2503.14476).

    GRPO with other defaults. The loop does the dynamic sampling (rlhfless.orchestrator.experience).
    """


class DrGRPO(ClippedLoss[DrGRPOSpec]):
    """GRPO done right (Dr. GRPO, arXiv 2503.20783, section 3.2)."""

    def advantages(self, batch: PackedBatch) -> FloatArray:
        """Subtract the group's mean from each reward, `[tokens]`. Raises ValueError if the batch has no rewards."""
        rewards = rewards_with_kl(batch, self._settings.kl)
        values = batch.spread(centred(rewards, batch.sequence_groups)).astype(np.float32)
        return less_earned(batch, values, self._settings, np.ones(batch.sequences))


class RLOO(ClippedLoss[RLOOSpec]):
    """REINFORCE leave-one-out (arXiv 2402.14740, section 3.3).

    The baseline of a response is the mean reward of the other n - 1 responses to its prompt:

        A_i = R_i - 1/(n-1) sum over j != i of R_j = n/(n-1) (R_i - mean of the group)

    In a step's first update the ratio is 1 and the clipped loss has REINFORCE's gradient. The clip acts later.
    """

    def advantages(self, batch: PackedBatch) -> FloatArray:
        """Subtract the others' mean from each reward, `[tokens]`; 0 in a group of one.

        Raises ValueError if the batch has no rewards.
        """
        groups = batch.sequence_groups
        others = np.maximum(group_sizes(groups) - 1, 1)
        values = centred(rewards_with_kl(batch, self._settings.kl), groups) * (others + 1) / others
        return less_earned(batch, batch.spread(values).astype(np.float32), self._settings, np.ones(batch.sequences))


class GSPO(GroupRelative[GSPOSpec]):
    """Group sequence policy optimization (arXiv 2507.18071).

        s_i = exp(mean over t of (log p - log p_old))        the ratio of token t: sg[s_i] p_t / sg[p_t]

    The tokens of a response share one ratio and are clipped together, but each keeps its own gradient (GSPO-token,
    section 4.3; with one advantage per response this equals GSPO, eq. 5).
    """

    def loss(self, inputs: LossInputs) -> LossOutputs:
        """Compute the policy loss with PPO's clip of the response's ratio."""
        of_sequence = sequence_mean(inputs, inputs.logprobs - inputs.old)
        ratio = bounded(of_sequence + inputs.logprobs - inputs.logprobs.detach()).exp()
        metrics = clip_metrics(inputs, ratio, self._settings)
        return policy_loss(inputs, clipped_loss(inputs, ratio, self._settings), metrics, self._settings)


class CISPO(GroupRelative[CISPOSpec]):
    """Clipped importance sampling policy optimization (MiniMax-M1, arXiv 2506.13585, eq. 4): -sg[clip(r)] A log p.

    Unlike PPO's clip, the weight limits how much a token counts without removing its gradient. The ratios that move
    first belong to unlikely tokens, where reasoning often changes direction.
    """

    def loss(self, inputs: LossInputs) -> LossOutputs:
        """Compute REINFORCE's loss of each token, weighted by its clipped ratio."""
        low, high = self._settings.weight_low, self._settings.weight_high
        ratio = log_ratio_of(inputs).exp().detach()
        per_token = -ratio.clamp(low, high) * inputs.advantages * inputs.logprobs
        metrics = {
            "bounded_low": (ratio < low).sum() * inputs.scale,
            "bounded_high": (ratio > high).sum() * inputs.scale,
        }
        return policy_loss(inputs, per_token, metrics, self._settings)


class SAPO(GroupRelative[SAPOSpec]):
    """Soft adaptive policy optimization (arXiv 2511.20347, eq. 5 and 6).

        -A f(r),  f(r) = 4/tau sigmoid(tau (r - 1)),  tau = `temperature_positive` if A > 0 else `temperature_negative`

    f'(1) = 1: near the old policy this is the policy gradient. It fades as the ratio moves away on either side.
    """

    def loss(self, inputs: LossInputs) -> LossOutputs:
        """Compute the gated loss of each token."""
        settings, advantages = self._settings, inputs.advantages
        positive, negative = map(advantages.new_tensor, (settings.temperature_positive, settings.temperature_negative))
        steepness = torch.where(advantages > 0, positive, negative)
        gate = 4 / steepness * torch.sigmoid(steepness * (log_ratio_of(inputs).exp() - 1))
        return policy_loss(inputs, -gate * advantages, {}, settings)
