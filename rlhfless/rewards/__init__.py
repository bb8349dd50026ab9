"""Rewards: score responses."""

from rlhfless.rewards.combine import Rewards, checker, combined
from rlhfless.rewards.protocol import Failed, Outcome, RewardError, RewardSample
