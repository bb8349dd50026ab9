"""Fewer actors for episodes that wait, by hand. An iteration takes 10 ms, and 0.5 ms more for each sequence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fakes.views import ABSENT, MODEL, UP, fleet_of, replica_slot, view_of
from rlhfless.scaling.policies.cost_aware.consolidate import actors_to_keep, give_to, leave_for
from rlhfless.scaling.policies.cost_aware.estimates import StartTimes
from rlhfless.scaling.policies.cost_aware.forecasts import RemainingLengths
from rlhfless.scaling.policies.cost_aware.group_times import ActorType
from rlhfless.scaling.policies.cost_aware.rebalance import Actors, Goal
from rlhfless.scaling.policies.fleet import Layout, PolicyContext
from rlhfless.scaling.policy import UNASSIGNED, Assign, Move, Note, SlotView

LEFT = 100
NO_LIMIT = float("inf")


def context_of(
    home: Sequence[int], wait_token_s: float, slots: Sequence[SlotView] = (UP, UP), kv_tokens: int = 10_000
) -> tuple[PolicyContext, Actors]:
    """Samples with 100 tokens left, on actors that cost $0.001 per second."""
    engine = replica_slot(0).engine
    fleet = fleet_of(*(replica_slot(slot) for slot in range(len(slots))))
    count = len(home)
    view = view_of(fleet, slots, prompts=count, siblings=1, tokens=[5] * count, home=home)
    now = PolicyContext(0.0, view, Layout.of(fleet.replica_slots))
    lengths = RemainingLengths(np.arange(count), np.array([0.5]), np.arange(count), np.full((count, 1), float(LEFT)))
    device = ActorType("h100", MODEL, kv_tokens, 8, 0.001)
    assert engine is not None
    return now, Actors(now, lengths, dict.fromkeys(now.layout.generation, device), StartTimes(), wait_token_s)


def test_two_actors_stay_while_their_batches_work() -> None:
    """Without waits eight take 1.4 s on one actor for $0.0014, and 1.2 s on two for $0.0024. If time is worth $0.01 per
    second, that is $0.0154 against $0.0144: less than a tenth."""
    now, actors = context_of([0] * 4 + [1] * 4, 0.0)
    assert actors_to_keep(now, actors, Goal(NO_LIMIT, 0.01, 0.5)) == (0, 1)
    assert actors_to_keep(now, actors, Goal(NO_LIMIT, 0.0, 0.5)) == (0,), "if only cost counts"
    assert actors_to_keep(now, actors, Goal(1.3, 0.0, 0.5)) == (0, 1), "the limit is kept"


def test_one_actor_is_enough_for_those_that_wait() -> None:
    """100 s of waiting hide the difference of 0.2 s."""
    now, actors = context_of([0] * 4 + [1, 1] + [UNASSIGNED] * 2, 1.0)
    assert actors_to_keep(now, actors, Goal(NO_LIMIT, 0.001, 0.5)) == (0,)
    assert actors_to_keep(now, actors, Goal(0.0, 0.0, 0.5)) == (0, 1), "where time alone counts"
    move, reason = leave_for(now, actors, (0,))
    assert isinstance(move, Move)
    assert (move.source, move.target, move.samples.tolist()) == (1, 0, [4, 5])
    assert isinstance(reason, Note)
    assert actors.home.tolist() == [0] * 6 + [UNASSIGNED] * 2


def test_the_kv_of_all_sessions_has_to_fit() -> None:
    """Each of 1,000 sessions has 15 tokens: two actors with room for 10,000 hold them, one does not."""
    now, actors = context_of([0] * 500 + [1] * 500, 100.0)
    assert actors_to_keep(now, actors, Goal(NO_LIMIT, 0.0, 0.5)) == (0, 1)


def test_absent_actors_are_not_kept_and_answers_go_to_those_that_are() -> None:
    now, actors = context_of([0, 0, 1, UNASSIGNED, UNASSIGNED], 1.0, (UP, UP, ABSENT))
    assert actors_to_keep(now, actors, Goal(NO_LIMIT, 0.001, 0.5)) == (0,)
    answered = np.array([3, 4])
    for slots, kept, expected in (
        ([1, 0], (0,), [(0, [3, 4])]),
        ([2, 2], (0, 1), [(1, [3, 4])]),  # it had one, the other two
        ([2, 0], (0, 1), [(0, [4]), (1, [3])]),
    ):
        given = give_to(now, answered, np.array(slots), kept)
        assert [(each.slot, each.samples.tolist()) for each in given if isinstance(each, Assign)] == expected
