"""A sample of two turns, and what stages add to samples."""

from __future__ import annotations

import numpy as np
import pytest

from fakes.builders import drawn
from rlhfless.functions.scoring.deployment import samples_of
from rlhfless.records import Experience, FinishReason, GivenSegment, Group, Prompt, Rollout, Sample, Score, Source


def rollout(index: int, text: str, reason: FinishReason = FinishReason.STOP) -> Rollout:
    tokens = np.arange(len(text))
    return drawn("p", index, tokens, -tokens, text=text, reason=reason)


def two_turns() -> Sample:
    call, answer = rollout(0, "call"), rollout(0, "so it is", FinishReason.LENGTH)
    said = GivenSegment(Source.ENVIRONMENT, np.array([7, 7, 7]))
    return Sample((GivenSegment(Source.PROMPT, np.array([1, 2])), call, said, answer))


def test_what_a_sample_says_of_itself() -> None:
    sample = two_turns()
    assert [len(drawn.token_ids) for drawn in sample.rollouts] == [4, 8]
    assert (sample.tokens, sample.model_tokens) == (2 + 4 + 3 + 8, 12)
    assert (sample.key, sample.sample_index, sample.finish_reason) == (("p", 0), 0, FinishReason.LENGTH)
    assert str(sample) == "sample 0 of prompt 'p'"
    with pytest.raises(ValueError, match="sample 0 of prompt 'p' has no score yet"):
        _ = sample.scored


def test_rewards_see_what_the_model_wrote() -> None:
    (seen,) = samples_of([Group(Prompt("p", (1, 2), "question"), (two_turns(),))])
    assert (seen.prompt, seen.response, seen.response_tokens) == ("question", "callso it is", 12)


def test_stages_add_to_samples() -> None:
    group = Group.of(Prompt("p", (1, 2), ""), [rollout(0, "a"), rollout(1, "b")])
    assert [segment.token_ids.tolist() for segment in group.samples[0].segments] == [[1, 2], [0]]
    scores = [Score(1.0, {}), Score(0.0, {}, {"judge": "gone"})]
    scored = group.adding(score=scores, reference_logprobs=[np.zeros(1), np.ones(1)])
    experience = Experience((scored,))
    assert experience.scores == tuple(scores)
    assert [sample.outputs["reference_logprobs"].tolist() for sample in experience.samples] == [[0], [1]]
    assert [sample.key for sample in experience.failed()] == [("p", 1)]
    assert group.samples[0].score is None, "a group is frozen"
    with pytest.raises(ValueError, match="shorter"):
        group.adding(score=scores[:1])
