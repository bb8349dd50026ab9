"""Samples of several conversations, as of agents with sub-agents: each is read by itself, and together they are one
sequence of the loss."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fakes.tiny_learner import VOCABULARY, save_tiny_model, token_logprobs
from rlhfless.algorithms.batch import Denominators, PackedBatch, by_sample, pack, select
from rlhfless.algorithms.group_based import GRPO, RLOO, DrGRPO
from rlhfless.functions.batching import cut, prompt_tokens
from rlhfless.functions.policy import PolicyNetwork, response_logprobs
from rlhfless.functions.policy_loading import load_policy
from rlhfless.records import (
    Episode,
    EpisodeStatus,
    EpisodeTurn,
    FinishReason,
    GivenSegment,
    Group,
    Prompt,
    Rollout,
    Sample,
    Score,
    Source,
    VersionSpan,
)
from rlhfless.spec import DrGRPOSpec, GRPOSpec, ModelSpec, RLOOSpec


def turn(start: int, end: int, conversation: int) -> EpisodeTurn:
    return EpisodeTurn(start, end, start, "stop", "", "text", float(start), float(end), conversation=conversation)


def rollout(index: int, tokens: list[int], turns: list[EpisodeTurn]) -> Rollout:
    episode = Episode((1, 2, 3), tuple(turns), (), EpisodeStatus.DONE, float(index), "e", "d")
    logprobs = np.zeros(len(tokens), np.float32)
    for each in turns:
        logprobs[each.start : each.end] = -0.1 * np.arange(each.start, each.end)
    spans = (VersionSpan("v", 0, len(tokens)),)
    return Rollout(
        "p", index, 0, np.array(tokens), logprobs, "", FinishReason.STOP, spans, "actor", 0.0, 1.0, episode=episode
    )


@pytest.fixture
def group() -> Group:
    """The first sample writes 4 5, calls a sub-agent (opening 6 7, which writes 8 and, told 9, 10), and goes on: told
    11, it writes 12 13. The second writes 14 at once."""
    tokens = [4, 5, 6, 7, 8, 9, 10, 11, 12, 13]
    several = rollout(0, tokens, [turn(0, 2, 0), turn(4, 5, 1), turn(6, 7, 1), turn(8, 10, 0)])
    single = rollout(1, [14], [turn(0, 1, 0)])
    return Group.of(Prompt("p", (1, 2, 3), ""), [several, single])


def test_a_sample_has_its_conversations_one_after_another(group: Group) -> None:
    first, second = group.samples
    described = [
        (segment.source.value if isinstance(segment, GivenSegment) else "model", segment.token_ids.tolist())
        for segment in first.segments
    ]
    assert described == [
        ("prompt", [1, 2, 3]), ("model", [4, 5]), ("environment", [11]), ("model", [12, 13]),
        ("prompt", [6, 7]), ("model", [8]), ("environment", [9]), ("model", [10]),
    ]  # fmt: skip
    assert (first.finish_reason, first.scored.total, second.scored.total) == (FinishReason.STOP, 0.0, 1.0)
    assert first.episode is not None
    assert (first.episode.conversations, first.episode.contexts()) == (2, [3, 2, 4, 6])


def test_a_batch_by_hand(group: Group) -> None:
    batch = pack([group])
    assert batch.tokens.tolist() == [1, 2, 3, 4, 5, 11, 12, 13, 6, 7, 8, 9, 10, 1, 2, 3, 14]
    assert batch.positions.tolist() == [*range(8), *range(5), *range(4)]
    assert batch.sequence_id.tolist() == [0] * 13 + [1] * 4
    assert batch.denominators == Denominators(tokens=7, sequences=2, groups=1)
    np.testing.assert_allclose(
        batch.rollout_logprobs[batch.response_mask], [0, -0.1, -0.8, -0.9, -0.4, -0.6, 0], atol=1e-6
    )
    each = batch.conversations
    assert (each.lengths.tolist(), each.starts.tolist(), each.rewards) == ([8, 5, 4], [0, 8, 13], None)
    assert (batch.lengths.tolist(), batch.starts.tolist()) == ([13, 4], [0, 13])
    turned = select(batch, np.array([1, 0]))
    assert turned.positions.tolist() == [*range(4), *range(8), *range(5)]
    assert turned.conversations.lengths.tolist() == [4, 8, 5]
    one = select(batch, np.array([1]))
    assert one.conversations is one
    assert prompt_tokens(batch) == 3 + 2 + 3


def test_an_episode_weighs_one_however_many_conversations_it_has(group: Group) -> None:
    advantages = GRPO(GRPOSpec(normalize_std=False)).advantages(pack([group]))
    assert advantages.tolist() == [0, 0, 0, -0.5, -0.5, 0, -0.5, -0.5, 0, 0, -0.5, 0, -0.5, 0, 0, 0, 0.5]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> PolicyNetwork:
    path = save_tiny_model(tmp_path_factory.mktemp("tiny"))
    return load_policy(ModelSpec(path=path), parameter_dtype="float32", compute_dtype="float32")


def alone(group: Group) -> PackedBatch:
    """Return each conversation as a sample of its own."""
    samples = []
    for sample in group.samples:
        begins = [
            number
            for number, segment in enumerate(sample.segments)
            if isinstance(segment, GivenSegment) and segment.source is Source.PROMPT
        ]
        for start, end in zip(begins, [*begins[1:], len(sample.segments)], strict=True):
            samples.append(Sample(sample.segments[start:end], Score(0.0, {})))
    return pack([Group(Prompt(f"{number:02}", (1,), ""), (each,)) for number, each in enumerate(samples)])


def many(count: int) -> Group:
    """Return samples of up to three conversations, whose turns lie among each other."""
    rng, rollouts = np.random.default_rng(4), []
    for index in range(count):
        tokens: list[int] = []
        turns = []
        for of in (0, 1, 0, 2, 1)[: 1 + index]:
            tokens += rng.integers(0, VOCABULARY, int(rng.integers(1, 5))).tolist()
            start = len(tokens)
            tokens += rng.integers(0, VOCABULARY, int(rng.integers(1, 5))).tolist()
            turns.append(turn(start, len(tokens), of))
        rollouts.append(rollout(index, tokens, turns))
    return Group.of(Prompt("p", (1, 2, 3), ""), rollouts)


@pytest.mark.parametrize("budget", [16, 1000])
def test_each_conversation_is_read_by_itself(policy: PolicyNetwork, budget: int) -> None:
    """Logprobs and gradient are those of the conversations as samples of their own, in micro-batches of any size."""
    group = many(5)
    batch, apart = pack([group]), alone(group)
    assert batch.tokens.tolist() == apart.tokens.tolist()
    assert batch.positions.tolist() == apart.positions.tolist()
    values = token_logprobs(policy, batch, 0.7, micro_batch_tokens=budget)
    expected = token_logprobs(policy, apart, 0.7, micro_batch_tokens=1000)
    np.testing.assert_allclose(values, expected, atol=2e-6)
    assert [len(each) for each in by_sample(batch, values, [group])[0]] == batch.response_lengths.tolist()
    parts = cut(batch, budget, packing=policy.packing)
    assert sorted(np.concatenate([part.indices for part in parts.parts]).tolist()) == list(range(5))
    gradients = []
    for one in (batch, apart):
        policy.model.zero_grad()
        torch.sum(response_logprobs(policy, one, 0.7).logprobs).backward()
        gradients.append(policy.head.linear.weight.grad.clone())
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-5)


def rewarded(group: Group, *rewards: list[float | None]) -> Group:
    """Return the group with rewards of its turns, which are the episodes' rewards together."""
    rollouts = []
    for sample, of_turns in zip(group.samples, rewards, strict=True):
        assert sample.episode is not None
        turns = tuple(replace(each, reward=value) for each, value in zip(sample.episode.turns, of_turns, strict=True))
        total = sum(value or 0.0 for value in of_turns)
        rollouts.append(replace(sample.rollout, episode=replace(sample.episode, turns=turns, reward=total)))
    return Group.of(group.prompt, rollouts)


def test_a_turn_has_the_return_from_it_on_with_the_baseline_of_whole_episodes(group: Group) -> None:
    """Rewards 1, 0, 2, none of the turns in time, of conversations 0, 1, 1, 0: the returns from each on are 3, 2, 2 and
    0. The other episode has 1. The mean of the episodes is 2, and their deviation the root of 2."""
    batch = pack([rewarded(group, [1.0, 0.0, 2.0, None], [1.0])])
    whole = GRPO(GRPOSpec(normalize_std=False)).advantages(batch)
    assert whole[batch.response_mask].tolist() == [1, 1, 1, 1, 1, 1, -1]
    turns = GRPO(GRPOSpec(normalize_std=False, turn_returns=True)).advantages(batch)
    assert turns[batch.response_mask].tolist() == [1, 1, -2, -2, 0, 0, -1]
    assert not turns[~batch.response_mask].any()
    normal = GRPO(GRPOSpec(turn_returns=True)).advantages(batch)
    np.testing.assert_allclose(normal, turns / np.sqrt(2), atol=1e-5)
    others = RLOO(RLOOSpec(turn_returns=True)).advantages(batch)
    assert others[batch.response_mask].tolist() == [2, 2, -1, -1, 1, 1, -2]
    published = DrGRPO(DrGRPOSpec(turn_returns=True)).advantages(batch)
    assert published.tolist() == turns.tolist()


def test_episodes_with_equal_rewards_have_no_signal_for_grpo(group: Group) -> None:
    batch = pack([rewarded(group, [1.0, 0.0, 0.0, None], [1.0])])
    assert not GRPO(GRPOSpec(turn_returns=True)).advantages(batch).any()
