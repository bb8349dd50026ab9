"""Rewards: the parts of a run's score."""

from rlhfless.rewards.combine import Rewards, checker, combined
from rlhfless.rewards.protocol import Failed, Outcome, RewardError, RewardSample
