"""The scoring function on CPU: groups in, scores out. A plain class; the fleet gives it a process.

All groups of one call are scored together, so a batch reward sees them in one list. A reward model fits the
same protocol (`rlhfless.rewards.Reward`).
"""

from __future__ import annotations

from collections.abc import Sequence

from rlhfless.records import Group, Prompt, Rollout, Score
from rlhfless.rewards import Sample, build
from rlhfless.spec import RewardSpec


class Scorer:
    """Scores finished groups. Raises RewardError if a reward cannot be made."""

    def __init__(self, rewards: Sequence[RewardSpec]) -> None:
        self._rewards = build(rewards)

    async def score(self, groups: Sequence[Group]) -> list[list[Score]]:
        """Scores per group, in the order of its rollouts. Raises RewardError."""
        samples = [_sample(group.prompt, rollout) for group in groups for rollout in group.rollouts]
        scores = iter(await self._rewards.score(samples))
        return [[next(scores) for _ in group.rollouts] for group in groups]


def _sample(prompt: Prompt, rollout: Rollout) -> Sample:
    return Sample(
        prompt=prompt.text,
        response=rollout.text,
        response_tokens=len(rollout.token_ids),
        finish_reason=rollout.finish_reason,
        columns=prompt.columns,
        prompt_id=prompt.prompt_id,
        sample_index=rollout.sample_index,
    )
