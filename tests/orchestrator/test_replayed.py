"""The number of tokens that differ after a move: the last token before it is generated again and compared."""

from __future__ import annotations

from fakes.builders import drawn
from fakes.fake_run import SPEC, draw
from rlhfless.orchestrator.in_flight_samples import InFlightSamples, Replayed
from rlhfless.records import FinishReason, Rollout
from rlhfless.telemetry.metrics import METRICS


def rollout(tokens: list[int], logprob: float, reason: FinishReason) -> Rollout:
    return drawn("p", 0, tokens, [logprob] * len(tokens), seed=1, reason=reason)


def table() -> InFlightSamples:
    return InFlightSamples(draw("p", samples=1), SPEC, slots=1)


def came_back(samples: InFlightSamples, *rollouts: Rollout) -> Replayed:
    for one in rollouts:
        samples.request_of[0] = 0
        samples.take_back(one)
    return samples.replayed


ABORT, STOP = FinishReason.ABORT, FinishReason.STOP


def test_the_last_token_before_a_move_is_compared_with_the_one_drawn_after_it() -> None:
    assert came_back(table(), rollout([1, 2], -1.0, STOP)) == Replayed(0, 0, 0.0)  # never moved
    assert came_back(table(), rollout([1, 2], -1.0, ABORT), rollout([1, 2, 3], -1.25, STOP)) == Replayed(1, 0, 0.25)
    assert came_back(table(), rollout([1, 2], -1.0, ABORT), rollout([1, 9, 3], -9.0, STOP)) == Replayed(1, 1, 0.0)
    # Two moves are two comparisons; a sample that returned from a queue has generated nothing.
    moves = (rollout([1, 2], -1.0, ABORT), rollout([1, 2], -1.0, ABORT), rollout([1, 2, 3], -1.0, ABORT))
    assert came_back(table(), *moves, rollout([1, 2, 4], -1.0, STOP)) == Replayed(2, 1, 0.0)


def test_it_is_a_row_of_the_trace() -> None:
    row = Replayed(12, 1, 0.5).decision(3, 10.0)
    assert (row.kind, row.choice) == ("replayed", "1 of 12 tokens differ")
    assert row.inputs == {"tokens": 12, "differ": 1, "logprob_difference": 0.5}
    assert Replayed().figures() == {}
    assert Replayed(12, 1, 0.5).figures().keys() <= METRICS.keys()
