"""The scoring function: groups in, scores in the same shape out."""

import pytest

from fakes.builders import drawn
from rlhfless.functions.scoring.deployment import score_groups
from rlhfless.records import Group, Prompt
from rlhfless.rewards import RewardError, Rewards
from rlhfless.spec import ExactMatchSpec, LengthPenaltySpec, PythonRewardSpec, ScoringSpec


def group(prompt_id, answer, *responses):
    prompt = Prompt(prompt_id, (1, 2), f"prompt {prompt_id}", {"answer": answer})
    rollouts = (drawn(prompt_id, index, range(len(text)), text=text) for index, text in enumerate(responses))
    return Group.of(prompt, tuple(rollouts))


async def test_scores_come_back_group_by_group_in_the_order_of_the_samples():
    rewards = Rewards(
        [
            ExactMatchSpec(type="exact_match"),
            LengthPenaltySpec(type="length_penalty", free_tokens=0, max_tokens=4, weight=2),
        ],
        ScoringSpec(),
    )
    first, second = await score_groups(rewards, [group("p", "ab", "ab", "abcd"), group("q", 7, "7")])
    assert [score.total for score in first] == [1 - 2 * 0.5, 0 - 2 * 1.0]
    assert [score.total for score in second] == [1 - 2 * 0.25]
    assert second[0].parts == {"exact_match": 1.0, "length_penalty": -0.25}


async def test_no_groups_and_groups_without_samples():
    rewards = Rewards([ExactMatchSpec(type="exact_match")], ScoringSpec())
    assert await score_groups(rewards, []) == []
    assert await score_groups(rewards, [group("p", "ab")]) == [[]]


async def test_a_reward_that_cannot_be_made_stops_the_function_at_its_start():
    rewards = Rewards([PythonRewardSpec(type="python", target="nowhere:score")], ScoringSpec(workers=1))
    with pytest.raises(RewardError, match="no module 'nowhere'"):
        await rewards.start()
    assert rewards.pids == ()
