"""What a policy is told of the lengths to come."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from fakes.views import UP, fleet_of, replica_slot, view_of
from rlhfless.scaling.lengths.levels import QUANTILE_LEVELS
from rlhfless.scaling.policies.cost_aware.forecasts import PredictedLengths, RemainingLengths, even_ranks
from rlhfless.scaling.policy import StepView
from rlhfless.sim.experiment.run import Clairvoyant

FLEET = fleet_of(replica_slot(0), replica_slot(1))


def view(step: int, prompts: Sequence[str], tokens: Sequence[int], finished: Sequence[bool]) -> StepView:
    """Two samples of each prompt."""
    count = len(prompts)
    return view_of(
        FLEET, [UP, UP], prompts=count, siblings=2, tokens=tokens, finished=finished, step=step, prompt_ids=prompts
    )


def through(lengths: PredictedLengths, step: int, prompts: Sequence[str]) -> bool:
    """A step from its begin to its end; whether it revisits prompts."""
    begun = view(step, prompts, [0] * 2 * len(prompts), [False] * 2 * len(prompts))
    lengths.begin(begun)
    revisits = lengths.revisits(begun)
    lengths.end(view(step, prompts, [20, 30] * len(prompts), [True] * 2 * len(prompts)))
    return revisits


def test_a_step_revisits_prompts_if_most_of_them_were_in_a_step_that_has_ended() -> None:
    lengths = PredictedLengths()
    assert not through(lengths, 1, "ab")
    assert not through(lengths, 2, "ac")  # half of them is not most
    assert through(lengths, 3, "abx")


def test_a_step_that_is_begun_anew_has_not_been_seen() -> None:
    lengths, begun = PredictedLengths(), view(1, "ab", [0] * 4, [False] * 4)
    for _ in range(2):
        lengths.begin(begun)
        assert not lengths.revisits(begun)


def test_siblings_that_have_drawn_as_much_are_one_kind() -> None:
    lengths = PredictedLengths()
    lengths.begin(view(1, "abc", [0] * 6, [False] * 6))
    ahead = lengths.look(view(1, "abc", [5, 5, 5, 9, 20, 7], [False, False, False, False, True, False]))
    assert ahead.samples.tolist() == [0, 1, 2, 3, 5]
    assert ahead.kind.tolist() == [0, 0, 1, 2, 3]
    assert ahead.table.shape == (4, QUANTILE_LEVELS.size)
    assert ahead.means[0] == ahead.means[1]


def test_known_lengths_are_never_alike() -> None:
    known = Clairvoyant(lambda _: np.array([10, 10, 30, 40])).look(view(1, "ab", [0] * 4, [False] * 4))
    assert known.kind.tolist() == [0, 1, 2, 3]


def even(*, alike: bool) -> RemainingLengths:
    """Four samples that are over by 1, 2, ..., 100 tokens with equal chances; as one kind, or each for itself."""
    levels = np.linspace(0.005, 0.995, 100)
    kind = np.zeros(4, np.int64) if alike else np.arange(4)
    return RemainingLengths(np.arange(4), levels, kind, np.tile(np.arange(1.0, 101.0), (1 if alike else 4, 1)))


@pytest.mark.parametrize("alike", [True, False])
def test_when_all_have_ended(alike: bool) -> None:
    """Each of four has ended after n tokens with a chance of (n - 0.5) %: all four after 50.5 with one of 1/16."""
    lengths = even(alike=alike)
    at = np.array([0.0, 50.5, 100.0])
    unended = lengths.unended(at)[lengths.kind].sum(axis=0)
    assert unended[1:] == pytest.approx([math.log(16), 0.0])
    assert RemainingLengths.crossing(at, unended, 1 / 16) == pytest.approx(50.5)
    grid = lengths.grid()
    middle = RemainingLengths.crossing(grid, lengths.unended(grid)[lengths.kind].sum(axis=0), 0.5)
    assert middle == pytest.approx(100 * 0.5**0.25, rel=0.02)


def test_a_known_length_ends_when_it_does() -> None:
    known = Clairvoyant(lambda _: np.array([10, 20])).look(view(1, "a", [0] * 2, [False] * 2))
    assert known.unended(np.array([9.0, 10.0, 20.0])).argmin(axis=1).tolist() == [1, 2]


def test_ranks_of_any_stretch_are_spread_evenly() -> None:
    ranks = even_ranks(64)
    for begin in range(0, 56, 4):
        assert np.sort(ranks[begin : begin + 8]) == pytest.approx((np.arange(8) + 0.5) / 8, abs=0.07)
