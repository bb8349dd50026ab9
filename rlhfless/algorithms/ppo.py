"""Proximal policy optimisation with a critic (arXiv 1707.06347): a value per token in place of a group's mean.

The actor's advantages and the critic's returns may have different lambdas (decoupled GAE, arXiv 2503.01491): the
critic learns without bias from lambda 1, and the actor from a smaller one has less variance. Advantages are whitened
over the step, returns are not.
"""

from __future__ import annotations

import numpy as np
import torch

from rlhfless.algorithms.base import LossOutputs, ValueInputs
from rlhfless.algorithms.batch import PackedBatch
from rlhfless.algorithms.explained_variance import explained_variance_parts
from rlhfless.algorithms.gae import gae
from rlhfless.algorithms.kl import FloatLike, rewards_of, token_rewards
from rlhfless.algorithms.policy_loss import ClippedLoss
from rlhfless.algorithms.statistics import whitened
from rlhfless.records import FloatArray
from rlhfless.spec import PPOSpec


class PPO(ClippedLoss[PPOSpec]):
    """The algorithm `ppo` (see rlhfless.algorithms.base)."""

    def advantages(self, batch: PackedBatch) -> FloatArray:
        """Generalised advantages, `[tokens]`. Raises ValueError if the batch lacks rewards or values."""
        settings, alpha = self._settings, self._settings.length_adaptive
        lambda_: FloatLike | float = settings.lambda_actor
        if alpha is not None:
            lambda_ = np.maximum(0, 1 - 1 / (alpha * np.maximum(batch.response_lengths, 1)))
        advantages = self._gae(batch, lambda_)
        return batch.placed(whitened(advantages) if settings.whiten else advantages).astype(np.float32)

    def returns(self, batch: PackedBatch) -> FloatArray:
        """What the critic learns, `[tokens]`: values and advantages, before these are whitened. Raises as
        `advantages`."""
        lambda_ = self._settings.lambda_critic
        if lambda_ is None:
            lambda_ = 1.0 if self._settings.length_adaptive else self._settings.lambda_actor
        advantages = self._gae(batch, lambda_)
        return batch.placed(advantages + _drawn_values(batch)).astype(np.float32)

    def _gae(self, batch: PackedBatch, lambda_: FloatLike | float) -> FloatLike:
        rewards = token_rewards(batch, rewards_of(batch), self._settings.kl)
        return gae(rewards, _drawn_values(batch), batch.response_lengths, self._settings.gamma, lambda_)

    def value_loss(self, inputs: ValueInputs) -> LossOutputs:
        """The critic's loss, token mean: 0.5 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2), c = `value_clip`,
        as in the authors' implementation (arXiv 2005.12729, section 3)."""
        squares, clipped = (inputs.values - inputs.returns).square(), None
        if (clip := self._settings.value_clip) is not None:
            near = inputs.old_values + (inputs.values - inputs.old_values).clamp(-clip, clip)
            clipped = (near - inputs.returns).square()
        loss = 0.5 * (squares if clipped is None else torch.maximum(squares, clipped)).sum() * inputs.scale
        metrics = {"value_loss": loss} | explained_variance_parts(inputs)
        if clipped is not None:
            metrics["value_clipped"] = (clipped > squares).sum() * inputs.scale
        return LossOutputs(loss, metrics)


def _drawn_values(batch: PackedBatch) -> FloatLike:
    if batch.values is None:
        raise ValueError("advantages need the critic's values, and the batch has none")
    return batch.values[batch.response_mask]
