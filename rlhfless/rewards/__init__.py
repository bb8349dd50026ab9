from rlhfless.rewards.combine import Rewards, checker, combined
from rlhfless.rewards.protocol import Failed, Outcome, RewardError, RewardSample

__all__ = ["Failed", "Outcome", "RewardError", "RewardSample", "Rewards", "checker", "combined"]
