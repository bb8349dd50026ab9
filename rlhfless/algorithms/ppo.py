"""Per-token advantages: PPO with a critic, and REINFORCE++, which whitens returns instead.

An environment's tokens are skipped: the step after a generated token is the next generated token, because the model
makes no decision in between.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from rlhfless.algorithms.base import LossOutputs, ValueInputs
from rlhfless.algorithms.batch import PackedBatch
from rlhfless.algorithms.group_based import centred
from rlhfless.algorithms.kl import Float64Array, FloatLike, rewards_of, token_rewards
from rlhfless.algorithms.losses import ClippedLoss
from rlhfless.records import FloatArray, IntArray
from rlhfless.spec import PPOSpec, ReinforcePlusPlusSpec

VARIANCE_FLOOR = 1e-8
"""Added to the variance when whitening."""

EXPLAINED_VARIANCE = "explained_variance"

_RETURN, _RETURN_SQUARE, _ERROR, _ERROR_SQUARE = PARTS = (
    "return",
    "return_square",
    "value_error",
    "value_error_square",
)
"""Token means behind the explained variance of `with_explained_variance`. Telemetry does not report them."""


class PPO(ClippedLoss[PPOSpec]):
    """Proximal policy optimization with a critic (arXiv 1707.06347).

    The actor's advantages and the critic's returns may use different lambdas (decoupled GAE, arXiv 2503.01491): with
    lambda 1 the critic learns without bias; a smaller lambda reduces the variance of the actor's advantages.
    """

    def advantages(self, batch: PackedBatch) -> FloatArray:
        """Compute generalized advantages, `[tokens]`, whitened over the step if configured.

        Raises ValueError if the batch lacks rewards or values.
        """
        settings, alpha = self._settings, self._settings.length_adaptive
        lambda_: FloatLike | float = settings.lambda_actor
        if alpha is not None:
            lambda_ = np.maximum(0, 1 - 1 / (alpha * np.maximum(batch.response_lengths, 1)))
        advantages = self._gae(batch, lambda_)
        return batch.placed(whitened(advantages) if settings.whiten else advantages).astype(np.float32)

    def returns(self, batch: PackedBatch) -> FloatArray:
        """Compute the critic's targets, `[tokens]`: values plus unwhitened advantages.

        Raises ValueError if the batch lacks rewards or values.
        """
        lambda_ = self._settings.lambda_critic
        if lambda_ is None:
            lambda_ = 1.0 if self._settings.length_adaptive else self._settings.lambda_actor
        advantages = self._gae(batch, lambda_)
        return batch.placed(advantages + _generated_values(batch)).astype(np.float32)

    def _gae(self, batch: PackedBatch, lambda_: FloatLike | float) -> FloatLike:
        rewards = token_rewards(batch, rewards_of(batch), self._settings.kl)
        return gae(rewards, _generated_values(batch), batch.response_lengths, self._settings.gamma, lambda_)

    def value_loss(self, inputs: ValueInputs) -> LossOutputs:
        """Compute the critic's loss, a token mean, with c = `value_clip`:

            0.5 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2)

        Source: the PPO authors' implementation (arXiv 2005.12729, section 3).
        """
        squares, clipped = (inputs.values - inputs.returns).square(), None
        if (clip := self._settings.value_clip) is not None:
            near = inputs.old_values + (inputs.values - inputs.old_values).clamp(-clip, clip)
            clipped = (near - inputs.returns).square()
        loss = 0.5 * (squares if clipped is None else torch.maximum(squares, clipped)).sum() * inputs.scale
        metrics = {"value_loss": loss} | explained_variance_parts(inputs)
        if clipped is not None:
            metrics["value_clipped"] = (clipped > squares).sum() * inputs.scale
        return LossOutputs(loss, metrics)


class ReinforcePlusPlus(ClippedLoss[ReinforcePlusPlusSpec]):
    """REINFORCE++ (arXiv 2501.03262): the return of each token, whitened over the tokens of the step.

        G_t = r_t + gamma G_{t+1}        A_t = (G_t - mean of G) / std of G

    r_t is the response's reward at its last generated token, else 0, minus the KL of token t if it is part of the
    reward. `group_baseline` first subtracts the group mean from the reward (REINFORCE++-baseline).
    """

    def advantages(self, batch: PackedBatch) -> FloatArray:
        """Compute whitened returns, `[tokens]`. Raises ValueError if the batch has no rewards."""
        rewards = rewards_of(batch)
        if self._settings.group_baseline:
            rewards = centred(rewards, batch.sequence_groups)
        by_token = token_rewards(batch, rewards, self._settings.kl)
        # Without values and with lambda 1, an advantage is the return.
        returns = gae(by_token, np.zeros(len(by_token)), batch.response_lengths, self._settings.gamma, 1.0)
        return batch.placed(whitened(returns)).astype(np.float32)


def gae(
    rewards: FloatLike, values: FloatLike, lengths: IntArray, gamma: float, lambda_: FloatLike | float
) -> FloatLike:
    """Compute generalized advantage estimates (arXiv 1506.02438, eq. 16), `[generated tokens]` in float64:

        delta_t = r_t + gamma V_{t+1} - V_t        A_t = delta_t + gamma lambda A_{t+1}

    `rewards` and `values` are `[generated tokens]`, one sequence after another. `lengths` [sequences] are the generated
    tokens per sequence. `lambda_` is one number or `[sequences]`. After the last token, V and A are 0.
    """
    longest_first = np.argsort(-lengths, kind="stable")
    last = (np.cumsum(lengths) - 1)[longest_first]
    discount = gamma * np.broadcast_to(np.asarray(lambda_, dtype=np.float64), lengths.shape)[longest_first]
    # Backwards, all sequences at once: k tokens before the end, only the first `count` sequences are long enough.
    longer = np.searchsorted(-lengths[longest_first], -np.arange(int(lengths.max(initial=0))))
    advantages = np.zeros(len(rewards))
    next_values = next_advantages = np.zeros(len(lengths))
    for k, count in enumerate(longer):
        at = last[:count] - k
        delta = rewards[at] + gamma * next_values[:count] - values[at]
        next_advantages = delta + discount[:count] * next_advantages[:count]
        next_values = values[at].astype(np.float64)
        advantages[at] = next_advantages
    return advantages


def whitened(values: FloatLike) -> Float64Array:
    """Shift and scale `values` to mean 0 and unbiased variance 1, in float64; a single value becomes 0."""
    wide = np.asarray(values, dtype=np.float64)
    if not len(wide):
        return wide
    shifted = wide - wide.mean()
    return np.asarray(shifted / np.sqrt((shifted**2).sum() / max(len(wide) - 1, 1) + VARIANCE_FLOOR))


def _generated_values(batch: PackedBatch) -> FloatLike:
    if batch.values is None:
        raise ValueError("advantages need the critic's values, and the batch has none")
    return batch.values[batch.response_mask]


def explained_variance_parts(inputs: ValueInputs) -> dict[str, torch.Tensor]:
    """Compute the micro-batch's share of each of `PARTS`, `[]`, in float64 because variances are small differences.

    A variance does not add up over micro-batches; these token means do.
    """
    returns = inputs.returns.detach().double()
    errors = returns - inputs.old_values.detach().double()
    parts = (returns, returns.square(), errors, errors.square())
    return {name: part.sum() * inputs.scale for name, part in zip(PARTS, parts, strict=True)}


def with_explained_variance(metrics: Mapping[str, float]) -> dict[str, float]:
    """Replace `PARTS` in a step's metrics with 1 - Var(R - V) / Var(R), where V are the values behind the advantages.

    It is 1 for a critic that predicts every return, and 0 for one that predicts their mean. Omits the metric if all
    returns are equal.
    """
    kept = {name: value for name, value in metrics.items() if name not in PARTS}
    if not metrics.keys() >= set(PARTS):
        return kept
    variance = metrics[_RETURN_SQUARE] - metrics[_RETURN] ** 2
    unexplained = metrics[_ERROR_SQUARE] - metrics[_ERROR] ** 2
    if variance <= 1e-12 * metrics[_RETURN_SQUARE]:  # rounding
        return kept
    return kept | {EXPLAINED_VARIANCE: 1 - max(unexplained, 0.0) / variance}
