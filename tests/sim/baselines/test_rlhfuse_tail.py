"""RLHFuse's migration of the tail: once a step, to the fewest actors that decode it about as fast."""

from __future__ import annotations

import dataclasses

import pytest

from fakes.views import ABSENT, ENGINE, UP, fleet_of, homes, learner, replica_slot, view_of
from rlhfless.scaling.policy import (
    Assign,
    Generated,
    Heartbeat,
    Idle,
    Lost,
    Move,
    Note,
    Policy,
    Release,
    SlotView,
    Start,
    StepBegan,
    StepView,
)
from rlhfless.sim.policies import make_policy

ALONE = fleet_of(replica_slot(0), replica_slot(1), replica_slot(2), learner(9))
SHARED = fleet_of(replica_slot(0), replica_slot(1), replica_slot(2), learner(1, 2))


def view(left: dict[int, list[int]], slots: tuple[SlotView, ...] = (UP,) * 4, fleet: object = ALONE) -> StepView:
    """Ten prompts of one sample each, of which those in `left` (slot: samples) have not ended."""
    home = homes(left, 10)
    done = [slot == -1 for slot in home]
    return view_of(fleet, slots, prompts=10, siblings=1, tokens=[5] * 10, finished=done, home=home)  # type: ignore[arg-type]


def begun(fleet: object = ALONE) -> Policy:
    policy = make_policy("rlhfuse_tail")
    fresh = view_of(fleet, [ABSENT, ABSENT, ABSENT, UP], prompts=10, siblings=1)  # type: ignore[arg-type]
    actions = policy.decide(0.0, StepBegan(), fresh)
    assert [a.slot for a in actions if isinstance(a, Start)] == [0, 1, 2]
    assert [a.samples.tolist() for a in actions if isinstance(a, Assign)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]]
    return policy


def test_the_tail_goes_once_to_the_actor_that_has_most_of_it() -> None:
    policy = begun()
    assert list(policy.decide(1.0, Heartbeat(), view({0: [1], 1: [3], 2: [9]}))) == []  # 3 of 10: no tail yet
    actions = list(policy.decide(2.0, Heartbeat(), view({0: [1], 2: [9]})))
    moved = [a for a in actions if isinstance(a, Move)]
    assert [(a.source, a.target, a.samples.tolist()) for a in moved] == [(2, 0, [9])]
    assert [a.decision.choice for a in actions if isinstance(a, Note)] == ["1 actors keep the tail"]
    assert list(policy.decide(3.0, Heartbeat(), view({0: [1, 9]}))) == []


@pytest.mark.parametrize(("kv_tokens", "moves"), [(219, 0), (220, 1)])
def test_a_tail_that_would_not_fit_into_one_memory_stays_with_two(kv_tokens: int, moves: int) -> None:
    """Two samples of prompts of 10 tokens may grow to 100 each: 220 tokens."""
    engine = dataclasses.replace(ENGINE, kv_capacity_tokens=kv_tokens)
    fleet = fleet_of(*(replica_slot(i, engine=engine) for i in range(3)), learner(9))
    actions = begun(fleet).decide(2.0, Heartbeat(), view({0: [1], 2: [9]}, fleet=fleet))
    assert len([a for a in actions if isinstance(a, Move)]) == moves


def test_no_device_is_given_up() -> None:
    policy = begun()
    assert not [a for a in policy.decide(2.0, Heartbeat(), view({0: [1], 2: [9]})) if isinstance(a, Release)]
    assert list(policy.decide(3.0, Generated(), view({}))) == []
    assert list(policy.decide(4.0, Idle(3), view({}))) == []


def test_lost_samples_go_to_the_actors_with_least_while_their_place_starts_again() -> None:
    policy = begun()
    states = (ABSENT, UP, UP, UP)
    lost = view({1: [3, 4, 5], 2: [9]}, states)
    actions = list(policy.decide(1.0, Lost(0, lost.group[:2]), lost))
    assert actions[0] == Start(0)
    assert [(a.slot, a.samples.tolist()) for a in actions if isinstance(a, Assign)] == [(2, [0, 1])]
