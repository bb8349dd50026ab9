"""Ends of actors, and moves of samples off the last one, by hand. An iteration takes 10 ms, and 0.5 ms more for each
sequence."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from fakes.views import ABSENT, MODEL, UP, fleet_of, replica_slot, view_of
from rlhfless.scaling.policies.cost_aware.estimates import StartTimes, StepAim, StepMargin
from rlhfless.scaling.policies.cost_aware.forecasts import RemainingLengths
from rlhfless.scaling.policies.cost_aware.group_times import ActorType
from rlhfless.scaling.policies.cost_aware.rebalance import Actors, Goal, goal_of, rebalance_tail
from rlhfless.scaling.policies.fleet import Layout, PolicyContext
from rlhfless.scaling.policy import Move, Note, SlotView, Start

DEVICE = ActorType("h100", MODEL, 10_000, 8, 0.001)
LATE = Goal(0.0, 0.0, 0.5)


def actors_of(
    left: Sequence[int],
    home: Sequence[int],
    slots: Sequence[SlotView] = (UP, UP),
    start_s: float = 40.0,
    device: ActorType = DEVICE,
) -> tuple[PolicyContext, Actors]:
    """Samples of which it is known how many tokens they have left; each has a prompt of 10 tokens, and drew 5."""
    fleet = fleet_of(*(replica_slot(slot, start_s=start_s) for slot in range(len(slots))))
    count = len(left)
    view = view_of(fleet, slots, prompts=count, siblings=1, tokens=[5] * count, home=home)
    now = PolicyContext(0.0, view, Layout.of(fleet.replica_slots))
    every = np.arange(count)
    lengths = RemainingLengths(every, np.array([0.5]), every, np.array(left, float)[:, None])
    devices = dict.fromkeys(now.layout.generation, device)
    return now, Actors(now, lengths, devices, StartTimes())


def test_an_actor_ends_when_its_samples_have_drained() -> None:
    _, actors = actors_of([10, 20, 30], [0, 0, 1])
    actors.compute_ends(0.5)
    assert actors.end_s == {0: pytest.approx(10 * 0.011 + 10 * 0.0105), 1: pytest.approx(30 * 0.0105)}
    assert actors.last() == (1, actors.end_s[1])


def test_more_than_fit_draw_at_the_rate_of_a_full_batch() -> None:
    """Eight at once: 16 equal ones take twice as long."""
    once, twice = (DEVICE.drain_s(np.full(n, 50.0), np.full(n, 15), 50.0) for n in (8, 16))
    assert once == pytest.approx(50 * 0.014)
    assert twice == pytest.approx(2 * once)


def test_one_that_may_take_longer_draws_alone() -> None:
    assert DEVICE.drain_s(np.array([10.0, 20.0]), np.array([15, 15]), 50.0) == pytest.approx(
        10 * 0.011 + 10 * 0.0105 + 30 * 0.0105
    )


def test_half_of_the_last_actors_samples_move_to_one_with_nothing_left() -> None:
    now, actors = actors_of([100] * 8, [0] * 8)
    first, *rest = rebalance_tail(now, actors, LATE)
    assert isinstance(first, Move)
    assert (first.source, first.target, first.samples.size) == (0, 1, 4)
    (reason,) = (action for action in rest if isinstance(action, Note))
    assert reason.decision.choice == "slot 0 to 1: 4 samples"
    # 100 iterations of 12 ms instead of 14, after 10 ms for the move and 60 tokens of prefill.
    assert reason.decision.inputs["gains_s"] == pytest.approx(1.4 - (1.2 + 0.01 + 60e-5))


def test_a_target_that_has_to_start_first_is_started_if_that_pays() -> None:
    """An iteration takes 10 ms more for each sequence: 90 s for eight, 50 s for four after 41 s of start and load."""
    slow = ActorType("h100", dataclasses.replace(MODEL, sequence_s=0.01), 10_000, 8, 0.001)
    assert not rebalance_tail(*actors_of([1000] * 8, [0] * 8, (UP, ABSENT), 40.0, slow), LATE)
    actions = rebalance_tail(*actors_of([1000] * 8, [0] * 8, (UP, ABSENT), 20.0, slow), LATE)
    assert [type(action) for action in actions] == [Start, Move, Note]


def test_nothing_moves_where_it_gains_less_than_a_tenth() -> None:
    now, actors = actors_of([100] * 4, [0] * 4)  # 1.2 s, or 1.1 for each half
    assert not rebalance_tail(now, actors, LATE)


def test_in_time_samples_move_only_if_the_time_is_worth_it() -> None:
    for usd_per_s, moves in ((0.0, False), (0.001, False), (1.0, True)):
        now, actors = actors_of([100] * 8, [0] * 8)
        assert bool(rebalance_tail(now, actors, Goal(10.0, usd_per_s, 0.5))) == moves


def test_the_goal_is_the_limit_less_what_comes_after_generation() -> None:
    now, _ = actors_of([10], [0])
    aim = StepAim(StepMargin(0.9, 1.0, True), limit_s=100.0, after_s=5.0, time_usd_per_s=0.25)
    assert goal_of(now, aim, 7.0, freed=True) == Goal(98.0, 0.25, 0.9)
    assert goal_of(now, aim, 7.0, freed=False) == LATE
