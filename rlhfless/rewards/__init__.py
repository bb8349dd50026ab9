from rlhfless.rewards.combine import Rewards, checker, combined
from rlhfless.rewards.protocol import Failed, Outcome, RewardError, Sample

__all__ = ["Failed", "Outcome", "RewardError", "Rewards", "Sample", "checker", "combined"]
