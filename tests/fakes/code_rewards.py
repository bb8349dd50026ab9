"""Values of `code` rewards, computed by real sandboxed processes."""

from __future__ import annotations

from typing import Any

from rlhfless.records import FinishReason
from rlhfless.rewards import RewardSample
from rlhfless.rewards.code import CodeReward
from rlhfless.rewards.protocol import Done, Outcome
from rlhfless.spec import CodeSpec


def value(response: str, columns: dict[str, Any], prompt: str = "the prompt", **options: Any) -> Outcome:
    """Return the reward of one response to a row."""
    reward = CodeReward(CodeSpec(type="code", timeout_s=20, **options))
    sample = RewardSample(prompt, response, len(response), FinishReason.STOP, columns, "p-1", 0)
    (outcome,) = [event.outcome for event in reward.run([sample]) if isinstance(event, Done)]
    return outcome
