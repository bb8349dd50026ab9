"""Episodes that fail are as if they had never been: the advantages of the others are the same, bit for bit."""

import random
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest

from fakes.local_environments import played, sample_of
from rlhfless.algorithms.batch import pack
from rlhfless.algorithms.group_based import GRPO, RLOO
from rlhfless.environments.trajectory import EpisodeStatus, ModelSegment, Trajectory
from rlhfless.orchestrator.experience import without_failures
from rlhfless.records import Experience, Group, Prompt
from rlhfless.spec import GRPOSpec, RLOOSpec, ScoringSpec

FAILING = 0.3


class Loses:
    """A tool that gives points, and fails at random when a call is made for the first time."""

    chance = random.Random(3)
    share = FAILING
    failed = 0
    made: ClassVar[set[tuple[str, int]]] = set()
    replayable = True

    def reset(self, seed: int, row: dict) -> str:
        self.key, self.points, self.calls = row["key"], 0, 0
        return "Draw."

    def draw(self, number: int) -> str:
        """Draw a number."""
        self.calls += 1
        is_first = (self.key, self.calls) not in self.made
        self.made.add((self.key, self.calls))
        if is_first and self.chance.random() < self.share:
            type(self).failed += 1
            raise ConnectionError("the server is gone")
        self.points += number
        return str(self.points)

    def done(self) -> bool:
        return self.points > 6

    def reward(self) -> float:
        return self.points / 10


def calls(rng: random.Random) -> list[str]:
    numbers = [rng.randrange(1, 6) for _ in range(7)]
    return [f'<tool_call>{{"name": "draw", "arguments": {{"number": {n}}}}}</tool_call><|im_end|>' for n in numbers]


async def episodes(retries: int) -> dict[tuple[str, int], Trajectory]:
    rng, found = random.Random(5), {}
    Loses.made.clear()
    for prompt in "abcdef":
        for index in range(8):
            episode, _, _ = await played(
                Loses, *calls(rng), row={"key": f"{prompt}{index}"}, seed=index, retries=retries
            )
            segments = tuple(
                replace(part, generated=replace(part.generated, logprobs=(-0.5,) * len(part.token_ids)))
                if isinstance(part, ModelSegment)
                else part
                for part in episode.segments
            )
            found[prompt, index] = replace(episode, key=(prompt, index), segments=segments)
    return found


def experience_of(played: dict[tuple[str, int], Trajectory]) -> Experience:
    prompts = dict.fromkeys(prompt for prompt, _ in played)
    groups = [
        Group(Prompt(name, (1,), ""), tuple(sample_of(each) for (prompt, _), each in played.items() if prompt == name))
        for name in prompts
    ]
    return Experience(tuple(groups))


@pytest.mark.parametrize("algorithm", [GRPO(GRPOSpec()), RLOO(RLOOSpec())])
async def test_the_others_have_the_advantages_that_they_would_have_without_them(algorithm) -> None:
    whole = await episodes(retries=0)
    ended = {key: each for key, each in whole.items() if each.status is not EpisodeStatus.FAILED}
    assert 10 < len(ended) < 40
    assert all(
        "the server is gone" in each.cause and each.reward is None for key, each in whole.items() if key not in ended
    )
    used = without_failures(experience_of(whole), ScoringSpec(max_failed=1.0), 1)
    assert {sample.key for sample in used.samples} == ended.keys()
    batch, alone = pack(used.groups), pack(experience_of(ended).groups)
    advantages = algorithm.advantages(batch)
    assert np.any(advantages)
    assert np.array_equal(advantages, algorithm.advantages(alone))
    assert np.array_equal(batch.tokens, alone.tokens)
    assert batch.denominators == alone.denominators


async def test_calls_that_fail_and_are_repeated_change_nothing(monkeypatch) -> None:
    whole = await episodes(retries=1000)
    assert Loses.failed > 10
    monkeypatch.setattr(Loses, "share", 0.0)
    undisturbed = await episodes(retries=0)
    assert all(each.failures == () for each in undisturbed.values())
    for key, episode in whole.items():
        assert (episode.token_ids, episode.reward) == (undisturbed[key].token_ids, undisturbed[key].reward)
