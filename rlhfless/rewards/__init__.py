"""Rewards: the built-in ones, your own Python callables, and their weighted sum."""

from rlhfless.rewards.combine import Part, Rewards, build, make
from rlhfless.rewards.protocol import Reward, RewardError, Sample

__all__ = ["Part", "Reward", "RewardError", "Rewards", "Sample", "build", "make"]
