"""What actors have still to do, by hand: lengths that are known, on a grid of 0, 4, 8, 12, 15, 19, 20 iterations."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from views import MODEL

from rlhfless.scaling.plan import DeviceOption
from rlhfless.scaling.policies.forecasters import Ahead
from rlhfless.scaling.policies.migration import Aim, Board, dissolve
from rlhfless.scaling.policies.outlook import Engines, Rows, alive, queue_tokens

DEVICE = DeviceOption("h100", MODEL, 10_000, 8, 0.001, ())
"""An iteration takes 10 ms, and 0.5 ms more for each sequence."""

FREED = np.array([0.001, 0.001])


def known(left: Sequence[int], home: Sequence[int], begun: bool = True) -> Rows:
    """Samples of which it is known how many tokens they have left, each with 5 tokens of context."""
    count = len(left)
    ahead = Ahead(np.arange(count), np.array([0.5]), np.arange(count), np.array(left, float)[:, None])
    return Rows(ahead, np.array(home), np.full(count, 5), np.full(count, begun))


def board_of(rows: Rows, confidence: float = 0.5) -> Board:
    engines = Engines([DEVICE, DEVICE])
    count = np.bincount(rows.home, minlength=2)
    board = Board(engines, np.ones(2), alive(rows, 2, engines.most), np.zeros(2), FREED, count)
    board.judge(np.arange(2), confidence)
    return board


def test_who_is_alive_after_so_many_iterations() -> None:
    board = board_of(known([10, 20], [0, 0]))
    assert board.grid.tolist() == [0, 4, 8, 12, 15, 19, 20]
    sequences, context, nobody = board.columns[:, 0]
    assert sequences.tolist() == [2, 2, 2, 1, 1, 1, 0]  # the end of the first lies between 8 and 12
    assert context.tolist() == [10, 18, 26, 17, 20, 24, 0]
    each = -math.log(0.001)  # a sample is never quite certain to be alive
    assert nobody == pytest.approx([2 * each, 2 * each, 2 * each, each, each, each, 0])
    assert not board.columns[:, 1].any()


def test_how_long_an_actor_works_and_when_it_has_ended() -> None:
    board = board_of(known([10, 20], [0, 0]))
    to_19_s = 8 * 0.011 + 4 * 0.01075 + 7 * 0.0105
    assert board.hold_s[0] == pytest.approx(to_19_s + 0.0105 / 2, rel=1e-3)
    each = -math.log(0.001)
    assert board.end_s[0] == pytest.approx(to_19_s + 0.0105 * (each - math.log(2)) / each, rel=1e-9)
    assert board.end_s[1] == 0.0
    assert board.chance(board.end_s[0]) == pytest.approx(0.5)
    assert board.chance(10.0) == 1.0
    assert board.iteration_s(np.array([0])) == pytest.approx([0.011])


def test_who_waits_comes_in_from_long_to_short() -> None:
    """With one slot: the second when the first is half of its own length ahead, the third behind both."""
    rows = known([10, 20, 30], [0, 0, 0], begun=False)
    assert queue_tokens(rows, np.array([1]), np.array([3])).tolist() == [50 - 5, 30 - 10, 0]
    assert queue_tokens(rows, np.array([3]), np.array([3])).tolist() == [0, 0, 0]
    rows.begun[0] = True  # the shortest runs already, and ends before the longest would be half done
    assert queue_tokens(rows, np.array([1]), np.array([3])).tolist() == [0, 40 - 10, 0]


def test_the_actor_with_less_is_dissolved_if_the_other_ends_in_time() -> None:
    board, recompute_s = board_of(known([20, 20], [0, 1])), np.full(2, 0.001)
    places, worth = np.arange(2), board.hold_s[0] * FREED[0]
    move = dissolve(board, Aim(1.0, 0.0, 0.5, 0.5), places, places, recompute_s)
    assert move is not None
    assert (move.source, move.target) == (0, 1)
    # The other one takes half a millisecond more for each iteration, and what computing the KV again takes.
    assert move.saves_usd == pytest.approx(worth - 0.001 * (0.001 + 20 * 0.0005), rel=0.01)
    assert dissolve(board, Aim(board.last_s, 0.0, 0.5, 0.5), places, places, recompute_s) is None
    assert dissolve(board, Aim(1.0, 1.0, 0.5, 0.5), places, places, recompute_s) is None  # time is worth more
    assert dissolve(board, Aim(1.0, 0.0, 0.5, 0.5), places, places, np.full(2, 1.0)) is None
