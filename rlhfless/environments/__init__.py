"""Environments: tools and games that a policy uses over several turns. What a user's file imports."""

from rlhfless.environments.contract import EpisodeOver, ToolError, Turn

__all__ = ["EpisodeOver", "ToolError", "Turn"]
