"""Advantages of groups and of PPO, returns and the value loss, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhfless.algorithms.base import ValueInputs, combine_metrics
from rlhfless.algorithms.batch import PackedBatch, pack
from rlhfless.algorithms.group_based import GRPO, group_advantages
from rlhfless.algorithms.kl import rewards_with_kl, token_rewards
from rlhfless.algorithms.ppo import PARTS, PPO, gae, with_explained_variance
from rlhfless.spec import GRPOSpec, KLSpec, PPOSpec, RewardKLSpec


def test_group_advantages_by_hand():
    # Group 0: mean 2, squares 1 + 0 + 1, unbiased variance 1. Group 1: mean 2.5, variance (2.25 * 2) / 1 = 4.5.
    rewards = np.array([1.0, 2.0, 3.0, 1.0, 4.0])
    groups = np.array([0, 0, 0, 1, 1])
    expected = [-1, 0, 1, -1.5 / math.sqrt(4.5), 1.5 / math.sqrt(4.5)]
    np.testing.assert_allclose(group_advantages(rewards, groups, normalize_std=True), expected, rtol=2e-6)
    plain = group_advantages(rewards, groups, normalize_std=False)
    assert plain.tolist() == [-1, 0, 1, -1.5, 1.5]
    assert plain.dtype == np.float32


@pytest.mark.parametrize("normalize_std", [True, False])
def test_groups_without_signal_get_exactly_zero(normalize_std):
    # 0.1 + 0.1 + 0.1 is not 0.3: a naive mean would give this constant group a small spread.
    rewards = np.array([0.1, 0.1, 0.1, 5.0])
    assert group_advantages(rewards, np.array([0, 0, 0, 1]), normalize_std=normalize_std).tolist() == [0, 0, 0, 0]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.floats(-100, 100)), min_size=1, max_size=30),
    st.floats(-50, 50),
)
def test_advantages_sum_to_zero_in_each_group_and_ignore_a_shift(pairs, shift):
    groups = np.array([group for group, _ in pairs])
    rewards = np.round([reward for _, reward in pairs], 2)
    plain = group_advantages(rewards, groups, normalize_std=False)
    shifted = group_advantages(rewards + np.round(shift, 2), groups, normalize_std=False)
    np.testing.assert_allclose(shifted, plain, atol=1e-4)
    np.testing.assert_allclose(np.bincount(groups, plain), 0, atol=1e-3)


def test_kl_in_the_reward(make_group):
    # Old logprobs -0.1 and -0.2 in the first response, -0.3 in the second; the reference says -0.6 everywhere.
    kl = KLSpec(coefficient=2.0, estimator="k1", where="reward")
    batch = pack([make_group("a", (1,), [[10, 20], [30]])]).with_columns(rewards=np.array([1.0, 2.0]))
    with pytest.raises(ValueError, match="needs old logprobs, and the batch has none"):
        rewards_with_kl(batch, kl)
    batch = batch.with_columns(old_logprobs=batch.rollout_logprobs)
    with pytest.raises(ValueError, match="needs reference logprobs"):
        rewards_with_kl(batch, kl)
    # The engine's logprobs are not read.
    batch = batch.with_columns(
        reference_logprobs=np.full(5, -0.6, np.float32), rollout_logprobs=np.full(5, -9, np.float32)
    )
    np.testing.assert_allclose(rewards_with_kl(batch, kl), [1 - 2 * (0.5 + 0.4), 2 - 2 * 0.3], rtol=1e-6)
    # By token it is the same, with the reward at the last one.
    np.testing.assert_allclose(token_rewards(batch, batch.rewards, kl), [-1, 1 - 0.8, 2 - 0.6], rtol=1e-6)
    old = batch.with_columns(old_logprobs=np.full(5, -0.7, np.float32))
    np.testing.assert_allclose(rewards_with_kl(old, kl), [1.4, 2.2], rtol=1e-6)


def test_algorithm_decides_whether_kl_is_in_the_reward(make_group):
    batch = pack([make_group("a", (1,), [[10, 20], [30]])])
    batch = batch.with_columns(old_logprobs=batch.rollout_logprobs, reference_logprobs=np.full(5, -0.6, np.float32))
    with pytest.raises(ValueError, match="need rewards, and the batch has none"):
        GRPO(GRPOSpec()).advantages(batch)
    batch = batch.with_columns(rewards=np.array([1.0, 2.0]))
    without = GRPO(GRPOSpec(normalize_std=False)).advantages(batch)
    assert without.tolist() == [0, -0.5, -0.5, 0, 0.5]
    in_loss = GRPOSpec(normalize_std=False, kl=KLSpec(coefficient=2.0, estimator="k1", where="loss"))
    assert GRPO(in_loss).advantages(batch).tolist() == without.tolist()
    in_reward = GRPOSpec(normalize_std=False, kl=KLSpec(coefficient=2.0, estimator="k1", where="reward"))
    # Rewards -0.8 and 1.4, mean 0.3.
    np.testing.assert_allclose(GRPO(in_reward).advantages(batch), [0, -1.1, -1.1, 0, 1.1], rtol=1e-6)


def test_gae_by_hand():
    # gamma 1/2, lambda 1/2, rewards 0 and 4, values 2 and 1: the last delta is 4 - 1 = 3, the first 0 + 1/2 - 2 = -3/2,
    # and its advantage -3/2 + 3/4. The second sequence has no generated token, the third one: 1 - 5.
    found = gae(np.array([0.0, 4, 1]), np.array([2.0, 1, 5]), np.array([2, 0, 1]), 0.5, 0.5)
    assert found.tolist() == [-0.75, 3, -4]
    # A lambda for each sequence: with 0 the advantage is the delta.
    found = gae(np.array([0.0, 4, 1]), np.array([2.0, 1, 5]), np.array([2, 0, 1]), 0.5, np.array([0.0, 1, 1]))
    assert found.tolist() == [-1.5, 3, -4]
    assert not len(gae(np.zeros(0), np.zeros(0), np.zeros(2, np.int64), 1.0, 1.0))


def valued(make_group, **columns) -> PackedBatch:
    """Responses of 2 and 1 tokens, with rewards 4 and 1 and values 2, 1 and 5."""
    batch = pack([make_group("a", (1,), [[10, 20], [30]])])
    return batch.with_columns(rewards=np.array([4.0, 1.0]), values=np.array([9, 2, 1, 9, 5], np.float32), **columns)


def test_advantages_and_returns_by_hand(make_group):
    batch = valued(make_group)
    settings = PPOSpec(gamma=0.5, lambda_actor=0.5, whiten=False)
    assert PPO(settings).advantages(batch).tolist() == [0, -0.75, 3, 0, -4]
    assert PPO(settings).returns(batch).tolist() == [0, 1.25, 4, 0, 1]
    # Lambda 1 for the critic alone: the return is the discounted reward.
    apart = settings.model_copy(update={"lambda_critic": 1.0})
    assert PPO(apart).advantages(batch).tolist() == [0, -0.75, 3, 0, -4]
    assert PPO(apart).returns(batch).tolist() == [0, 2, 4, 0, 1]
    # In twelfths -9, 36 and -48, with mean -7 and distances -2, 43 and -41.
    whitened = PPO(PPOSpec(gamma=0.5, lambda_actor=0.5)).advantages(batch)
    std = math.sqrt((2**2 + 43**2 + 41**2) / 2)
    np.testing.assert_allclose(whitened, [0, -2 / std, 43 / std, 0, -41 / std], rtol=1e-6)


def test_lambda_by_length_by_hand(make_group):
    # 1 - 1 / (1 * 2) = 1/2 for two tokens, and 0 for one; for the critic 1.
    settings = PPOSpec(gamma=0.5, length_adaptive=1.0, whiten=False)
    assert PPO(settings).advantages(valued(make_group)).tolist() == [0, -0.75, 3, 0, -4]
    assert PPO(settings).returns(valued(make_group)).tolist() == [0, 2, 4, 0, 1]
    # Where it would be negative it is 0.
    short = PPOSpec(gamma=0.5, length_adaptive=0.05, whiten=False)
    assert PPO(short).advantages(valued(make_group)).tolist() == [0, -1.5, 3, 0, -4]


def test_kl_in_the_reward_of_each_token(make_group):
    # KL 0.5, 0.4 and 0.3 by k1; lambda 1, gamma 1 and values 0: the reward to go.
    settings = PPOSpec(whiten=False, kl=RewardKLSpec(coefficient=2.0))
    columns = {"reference_logprobs": np.full(5, -0.6, np.float32), "values": np.zeros(5, np.float32)}
    batch = valued(make_group)
    batch = batch.with_columns(old_logprobs=batch.rollout_logprobs, **columns)
    np.testing.assert_allclose(PPO(settings).advantages(batch), [0, 4 - 1.8, 4 - 0.8, 0, 1 - 0.6], rtol=1e-6)


def test_a_batch_without_values_is_refused(make_group):
    batch = pack([make_group("a", (1,), [[10]])]).with_columns(rewards=np.array([1.0]))
    with pytest.raises(ValueError, match="need the critic's values"):
        PPO(PPOSpec()).advantages(batch)


def value_inputs(values, old, returns, tokens=None) -> ValueInputs:
    current = torch.tensor(values, requires_grad=True)
    return ValueInputs(current, torch.tensor(old), torch.tensor(returns), tokens or len(values))


def test_value_loss_by_hand():
    # Clip 0.5. From 0 to 2 with return 3: (2 - 3)^2 = 1 against (0.5 - 3)^2 = 6.25, which has no gradient.
    # From 0 to 0.25 with return 1: within the clip, 0.5625. From 0 to 2 with return 0: 4 against 0.25.
    given = value_inputs([2.0, 0.25, 2.0], [0.0] * 3, [3.0, 1.0, 0.0])
    outputs = PPO(PPOSpec(value_clip=0.5)).value_loss(given)
    assert outputs.loss.item() == pytest.approx(0.5 * (6.25 + 0.5625 + 4) / 3)
    assert outputs.metrics["value_clipped"].item() == pytest.approx(1 / 3)
    outputs.loss.backward()
    assert given.values.grad.tolist() == pytest.approx([0, -0.75 / 3, 2 / 3])
    unclipped = PPO(PPOSpec(value_clip=None)).value_loss(value_inputs([2.0, 0.25, 2.0], [0.0] * 3, [3.0, 1.0, 0.0]))
    assert unclipped.loss.item() == pytest.approx(0.5 * (1 + 0.5625 + 4) / 3)
    assert "value_clipped" not in unclipped.metrics


def test_explained_variance_adds_up_and_is_of_the_old_values():
    returns, old = [1.0, 2.0, 3.0, 6.0], [1.0, 2.0, 2.0, 5.0]
    critic = PPO(PPOSpec())
    parts = [
        critic.value_loss(value_inputs([0.0] * (stop - start), old[start:stop], returns[start:stop], 4)).metrics
        for start, stop in ((0, 1), (1, 1), (1, 4))
    ]
    combined = {name: value.item() for name, value in combine_metrics(parts).items()}
    # Errors 0, 0, 1, 1: variance 1/4. Returns: mean 3, variance (4 + 1 + 0 + 9) / 4 = 3.5.
    found = with_explained_variance(combined)
    assert found["explained_variance"] == pytest.approx(1 - 0.25 / 3.5)
    assert not found.keys() & set(PARTS)
    # Equal returns have no variance to explain.
    flat = critic.value_loss(value_inputs([0.0] * 3, [0.0, 1.0, 2.0], [0.1] * 3)).metrics
    assert "explained_variance" not in with_explained_variance({name: part.item() for name, part in flat.items()})
