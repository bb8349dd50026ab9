"""Group relative advantages, worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless.algorithms.batch import pack
from rlhfless.algorithms.group_relative import group_advantages
from rlhfless.algorithms.grpo import GRPO
from rlhfless.algorithms.kl import rewards_with_kl, token_rewards
from rlhfless.spec import GRPOSpec, KLSpec


def test_by_hand():
    # Group 0: mean 2, squares 1 + 0 + 1, unbiased variance 1. Group 1: mean 2.5, variance (2.25 * 2) / 1 = 4.5.
    rewards = np.array([1.0, 2.0, 3.0, 1.0, 4.0])
    groups = np.array([0, 0, 0, 1, 1])
    expected = [-1, 0, 1, -1.5 / math.sqrt(4.5), 1.5 / math.sqrt(4.5)]
    np.testing.assert_allclose(group_advantages(rewards, groups, normalize_std=True), expected, rtol=2e-6)
    plain = group_advantages(rewards, groups, normalize_std=False)
    assert plain.tolist() == [-1, 0, 1, -1.5, 1.5]
    assert plain.dtype == np.float32


@pytest.mark.parametrize("normalize_std", [True, False])
def test_groups_that_say_nothing_get_exactly_zero(normalize_std):
    # 0.1 added up three times is not 0.3: without care this constant group would have a small spread.
    rewards = np.array([0.1, 0.1, 0.1, 5.0])
    assert group_advantages(rewards, np.array([0, 0, 0, 1]), normalize_std=normalize_std).tolist() == [0, 0, 0, 0]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.floats(-100, 100)), min_size=1, max_size=30),
    st.floats(-50, 50),
)
def test_sum_to_zero_in_each_group_and_ignore_a_shift(pairs, shift):
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
