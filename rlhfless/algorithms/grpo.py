"""Group relative policy optimisation (arXiv 2402.03300), by default with the token mean and the clip of DAPO
(2503.14476).

Advantages say how much better a response was than the others of its group. They are computed in float64 and by
sequence, and spread over the response tokens.
"""

from __future__ import annotations

from rlhfless.algorithms.base import LossInputs, LossOutputs
from rlhfless.algorithms.batch import PackedBatch
from rlhfless.algorithms.kl import FloatLike, rewards_with_kl
from rlhfless.algorithms.policy_loss import clipped_policy_loss
from rlhfless.algorithms.statistics import STD_FLOOR, centred, group_std
from rlhfless.records import FloatArray, IntArray
from rlhfless.spec import GRPOSpec


class GRPO:
    """The algorithm `grpo` (see rlhfless.algorithms.base)."""

    def __init__(self, settings: GRPOSpec) -> None:
        self._settings = settings

    def advantages(self, batch: PackedBatch) -> FloatArray:
        """Group relative advantages, `[tokens]`. Raises ValueError if the batch has no rewards, or one that is not
        finite."""
        rewards = rewards_with_kl(batch, self._settings.kl)
        return batch.spread(grpo_advantages(rewards, batch.sequence_groups, normalize_std=self._settings.normalize_std))

    def loss(self, inputs: LossInputs) -> LossOutputs:
        """PPO's clipped loss."""
        return clipped_policy_loss(inputs, self._settings)


def grpo_advantages(rewards: FloatLike, group_id: IntArray, *, normalize_std: bool) -> FloatArray:
    """Group relative advantages `[sequences]` (arXiv 2402.03300, section 4.1.2).

    `rewards` and `group_id` are `[sequences]`. A = R - mean of the group, divided by its (unbiased) standard
    deviation + 1e-6 unless `normalize_std` is False (Dr. GRPO, arXiv 2503.20783). A group whose rewards are
    all equal, or that has one sample, gives no signal: its advantages are exactly 0.
    """
    values = centred(rewards, group_id)
    return (values / (group_std(values, group_id) + STD_FLOOR) if normalize_std else values).astype("float32")
