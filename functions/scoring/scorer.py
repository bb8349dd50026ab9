"""Groups in, scores out, for rewards that need no network and for reward models.

All groups of one call are scored together, so a batch reward sees them in one list.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlhfless.records import Group, Prompt, Sample, Score
from rlhfless.rewards import Rewards, RewardSample


async def score_groups(rewards: Rewards, groups: Sequence[Group]) -> list[list[Score]]:
    """Scores per group, in the order of its samples. A reward that fails marks its sample."""
    return by_group(await rewards.score(samples_of(groups)), groups)


def samples_of(groups: Sequence[Group]) -> list[RewardSample]:
    """All samples, group by group, in the form that rewards get."""
    return [_sample(group.prompt, sample) for group in groups for sample in group.samples]


def by_group(scores: Sequence[Score], groups: Sequence[Group]) -> list[list[Score]]:
    """The scores of `samples_of(groups)`, per group."""
    left = iter(scores)
    return [[next(left) for _ in group.samples] for group in groups]


def _sample(prompt: Prompt, sample: Sample) -> RewardSample:
    return RewardSample(
        prompt=prompt.text,
        response=sample.text,
        response_tokens=sample.model_tokens,
        finish_reason=sample.finish_reason,
        columns=prompt.columns,
        prompt_id=prompt.prompt_id,
        sample_index=sample.sample_index,
    )
