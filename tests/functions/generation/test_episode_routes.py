"""The routes of an episode's turns go with its tokens, to its record and on to another actor."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rlhfless.environments.trajectory import ContextSegment, GeneratedTurn, ModelSegment, Origin, Parsed, Trajectory
from rlhfless.functions.generation.episodes import past_of, response_of
from rlhfless.records import EpisodeStatus, FinishReason, Rollout, RouteSpan, Sample
from rlhfless.records.rollouts import GivenSegment, Source

FIRST = (RouteSpan("step-000001/a.npy", 0, 2),)
MOVED = (RouteSpan("step-000001/b.npy", 0, 1), RouteSpan("step-000001/c.npy", 1, 3))


def turn(number: int, tokens: tuple[int, ...], routes: tuple[RouteSpan, ...], reason: FinishReason) -> ModelSegment:
    generated = GeneratedTurn(tokens, reason, (-1.0,) * len(tokens), (), "a", routes=routes)
    return ModelSegment(number, number, generated, "", Parsed.TEXT, 0.0, 1.0)


def trajectory(status: EpisodeStatus, last: FinishReason) -> Trajectory:
    """A turn of three tokens, an answer of two, and a turn of four that two actors generated."""
    segments = (
        ContextSegment(Origin.PROMPT, (1, 2)),
        turn(0, (5, 6, 7), FIRST, FinishReason.STOP),
        ContextSegment(Origin.TOOL, (40, 41)),
        turn(1, (8, 9, 10, 11), MOVED, last),
    )
    return Trajectory(("p", 0), segments, (), status, None)


def rollout_of(played: Trajectory) -> Rollout:
    response = response_of(played, "a")
    sampled = response.sampled
    return Rollout(
        "p", 0, 0, np.array(sampled.token_ids), np.array(sampled.logprobs, np.float32), "", sampled.finish_reason, (),
        "a", 0.0, 1.0, episode=response.episode, routes=sampled.routes,
    )  # fmt: skip


def test_the_record_has_them_at_the_tokens_of_each_turn() -> None:
    rollout = rollout_of(trajectory(EpisodeStatus.DONE, FinishReason.STOP))
    assert rollout.routes == (
        RouteSpan("step-000001/a.npy", 0, 2),
        RouteSpan("step-000001/b.npy", 5, 6),
        RouteSpan("step-000001/c.npy", 6, 8),
    )
    sample = Sample.of(GivenSegment(Source.PROMPT, np.array([1, 2])), rollout)
    first, second = sample.rollouts
    assert (first.routes, second.routes) == (FIRST, MOVED)
    # By number of generated token: the answer of the environment is none.
    assert [(span.start, span.end) for span in sample.routes] == [(0, 2), (3, 4), (4, 6)]


def test_an_aborted_turn_goes_on_with_those_it_has() -> None:
    rollout = rollout_of(trajectory(EpisodeStatus.RUNNING, FinishReason.ABORT))
    events, prior = past_of(rollout)
    assert prior.token_ids == (8, 9, 10, 11)
    assert prior.routes == MOVED
    whole = next(event for event in events if isinstance(event, ModelSegment))
    assert whole.generated.routes == FIRST
    cut = replace(prior, token_ids=prior.token_ids[:2])
    assert cut.kept == 1
