"""What actors have still to do, by hand: lengths that are known, on a grid of 0, 4, 8, 12, 15, 19, 20 iterations."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from fakes.views import MODEL
from rlhfless.scaling.plan import DeviceOption
from rlhfless.scaling.policies.cost_aware.completion import (
    EngineTable,
    Unfinished,
    alive,
    grid_to,
    longest_response,
    queue_iterations,
)
from rlhfless.scaling.policies.cost_aware.forecasters import RemainingLengths
from rlhfless.scaling.policies.cost_aware.migration import MigrationState, part_of

DEVICE = DeviceOption("h100", MODEL, 10_000, 8, 0.001, ())
"""An iteration takes 10 ms, and 0.5 ms more for each sequence."""

FREED = np.array([0.001, 0.001])


def known(left: Sequence[int], home: Sequence[int], begun: bool = True) -> Unfinished:
    """Samples of which it is known how many tokens they have left, each with 5 tokens of context."""
    count = len(left)
    lengths = RemainingLengths(np.arange(count), np.array([0.5]), np.arange(count), np.array(left, float)[:, None])
    return Unfinished(lengths, np.array(home), np.full(count, 5), np.full(count, begun))


def state_of(rows: Unfinished, confidence: float = 0.5) -> MigrationState:
    engines = EngineTable([DEVICE, DEVICE])
    count = np.bincount(rows.home, minlength=2)
    state = MigrationState(engines, np.ones(2), alive(rows, 2, engines.most), np.zeros(2), FREED, count)
    state.judge(np.arange(2), confidence)
    return state


def test_what_is_alive_after_so_many_iterations() -> None:
    state = state_of(known([10, 20], [0, 0]))
    assert state.grid.tolist() == [0, 4, 8, 12, 15, 19, 20]
    sequences, context, unended = state.columns[:, 0]
    assert sequences.tolist() == [2, 2, 2, 1, 1, 1, 0]  # the end of the first lies between 8 and 12
    assert context.tolist() == [10, 18, 26, 17, 20, 24, 0]
    each = -math.log(0.001)  # a sample is never quite certain to be alive
    assert unended == pytest.approx([2 * each, 2 * each, 2 * each, each, each, each, 0])
    assert not state.columns[:, 1].any()


def test_how_long_an_actor_works_and_when_it_has_ended() -> None:
    state = state_of(known([10, 20], [0, 0]))
    to_19_s = 8 * 0.011 + 4 * 0.01075 + 7 * 0.0105
    assert state.hold_s[0] == pytest.approx(to_19_s + 0.0105 / 2, rel=1e-3)
    each = -math.log(0.001)
    assert state.end_s[0] == pytest.approx(to_19_s + 0.0105 * (each - math.log(2)) / each, rel=1e-9)
    assert state.end_s[1] == 0.0
    assert state.chance(state.end_s[0]) == pytest.approx(0.5)
    assert state.chance(10.0) == 1.0
    assert state.iteration_s(np.array([0])) == pytest.approx([0.011])


def test_samples_that_wait_come_in_from_long_to_short() -> None:
    """One sequence at a time: the second when the first is half of its own length ahead, the third behind both."""
    rows = known([10, 20, 30], [0, 0, 0], begun=False)
    assert queue_iterations(rows, np.array([1]), np.array([3])).tolist() == [50 - 5, 30 - 10, 0]
    assert queue_iterations(rows, np.array([3]), np.array([3])).tolist() == [0, 0, 0]
    rows.begun[0] = True  # the shortest runs already, and ends before the longest would be half done
    assert queue_iterations(rows, np.array([1]), np.array([3])).tolist() == [0, 40 - 10, 0]


def test_a_sample_holds_context_from_when_it_is_admitted() -> None:
    """One sequence at a time, as above: the sample of 30 tokens is admitted at once, that of 20 after 20 iterations,
    that of 10 after 45. So they end after 30, 40 and 55 iterations: on the grid, at 30, 48 and 55."""
    rows = known([10, 20, 30], [0, 0, 0], begun=False)
    grid = np.array([0.0, 4, 8, 12, 15, 19, 24, 30, 38, 48, 55])
    found = alive(rows, 1, np.array([1]), grid=grid)
    sequences, context, unended = found.columns[:, 0]
    assert sequences.tolist() == [3, 3, 3, 3, 3, 3, 3, 2, 2, 1, 0]
    first = 5 + np.array([0, 4, 8, 12, 15, 19, 24, 0, 0, 0, 0])  # it begins with 5 tokens, and has ended at 30
    first[7:] = 0
    second = np.array([0, 0, 0, 0, 0, 0, 5 + 24 - 20, 5 + 30 - 20, 5 + 38 - 20, 0, 0])
    third = np.array([0, 0, 0, 0, 0, 0, 0, 0, 0, 5 + 48 - 45, 0])
    assert context.tolist() == (first + second + third).tolist()
    each = -math.log(0.001)
    assert unended == pytest.approx(each * sequences)


def test_where_samples_wait_the_grid_is_as_fine_at_the_end_as_in_the_middle() -> None:
    """40 samples of 20 tokens, one at a time: the last one waits for 39, but for half of what runs. Points are half a
    response apart where the grid would be coarser: from 48, a quarter of which is 12."""
    rows = known([20] * 40, [0] * 40, begun=False)
    assert queue_iterations(rows, np.array([1]), np.array([40])).max() == 39 * 20 - 10
    grid = alive(rows, 1, np.array([1])).grid
    assert grid.tolist() == [0, 4, 8, 12, 15, 19, 24, 30, 38, *range(48, 790, 10), 39 * 20 - 10 + 20]
    assert alive(rows, 1, np.array([40])).grid.tolist() == grid_to(20.0).tolist()


def test_how_long_the_longest_response_is_does_not_depend_on_waits() -> None:
    """Three samples, one at a time or all at once: none has more than 12 tokens to draw but two, of 20 and of 30, and
    the grid ends at 30 tokens, though the last of them ends after 55 iterations."""
    rows = known([10, 20, 30], [0, 0, 0], begun=False)
    tokens, unended = longest_response(rows, 1)
    assert tokens.tolist() == [0, 4, 8, 12, 15, 19, 24, 30]
    each = -math.log(0.001)
    assert unended == pytest.approx([3 * each, 3 * each, 3 * each, 2 * each, 2 * each, 2 * each, each, 0])
    assert alive(rows, 1, np.array([1])).grid[-1] == 55


def test_samples_that_leave_a_queue_let_the_others_come_in_sooner() -> None:
    """16 samples of 20 tokens, 8 at a time, end after 40 iterations; without half of them, after 20, which the grid
    knows as 19 to 24. An iteration of 8 takes 14 ms."""
    rows = known([20] * 16, [0] * 16, begun=False)
    state = state_of(rows)
    assert state.end_s[0] > 34 * 0.014
    part = part_of(rows, np.arange(8), state)
    left = state.trial(np.array([0]), -part.freed, 0.0, 0.5)[1, 0]
    alone = state.trial(np.array([1]), part.columns, 0.0, 0.5)[1, 0]
    assert left == pytest.approx(alone)
    assert 19 * 0.014 < left < 24 * 0.014
    state.take(0, 1, part)
    state.judge(np.arange(2), 0.5)
    assert state.end_s.tolist() == pytest.approx([left, alone])
    assert state.count.tolist() == [8, 8]
