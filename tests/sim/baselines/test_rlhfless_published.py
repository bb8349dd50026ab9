"""RLHFless as published, mechanism by mechanism: groups, sweep, cut, release, locality, starts ahead of time."""

from __future__ import annotations

import numpy as np
import pytest

from fakes.views import ABSENT, UP, fleet_of, homes, learner, replica_slot, view_of
from rlhfless.scaling.policy import (
    Action,
    Assign,
    Generated,
    Heartbeat,
    Idle,
    Move,
    Note,
    Policy,
    Release,
    Start,
    StepBegan,
    StepEnded,
    StepView,
)
from rlhfless.sim.baselines.rlhfless_published import RLHFlessPaperSpec
from rlhfless.sim.policies import make_policy

FLEET = fleet_of(
    *(replica_slot(index, start_s=2.0) for index in range(3)), learner(9, node="node-1")
)  # slot 2 is on the learner's node
LENGTHS = np.array([40, 10, 30, 20, 60, 50])


def dealt(actions: object) -> dict[int, list[int]]:
    return {a.slot: a.samples.tolist() for a in actions if isinstance(a, Assign)}  # type: ignore[attr-defined]


def begun(time_weight: float) -> tuple[Policy, list[Action]]:
    """A policy that has seen one step of six prompts with LENGTHS, at the begin of the next."""
    policy = make_policy("rlhfless_published", RLHFlessPaperSpec(time_weight=time_weight))
    fresh = view_of(FLEET, [ABSENT, ABSENT, ABSENT, UP], prompts=6, siblings=1)
    policy.decide(0.0, StepBegan(), fresh)
    over = view_of(FLEET, [UP, UP, UP, UP], prompts=6, siblings=1, tokens=LENGTHS.tolist(), finished=[True] * 6)
    policy.decide(90.0, Generated(), over)
    policy.decide(100.0, StepEnded(0.0, 100.0), over)
    return policy, list(policy.decide(100.0, StepBegan(), fresh))


def view(left: dict[int, list[int]], states: object = (UP, UP, UP, UP)) -> StepView:
    home = homes(left, 6)
    done = [slot == -1 for slot in home]
    return view_of(FLEET, states, prompts=6, siblings=1, tokens=[5] * 6, finished=done, home=home)  # type: ignore[arg-type]


def test_equal_counts_of_similar_lengths_the_longest_beside_the_learner() -> None:
    """Time alone takes all three actors: 60 and 50 tokens, 40 and 30, 20 and 10."""
    _, actions = begun(time_weight=1.0)
    assert dealt(actions) == {2: [4, 5], 0: [0, 2], 1: [1, 3]}
    note = next(a.decision for a in actions if isinstance(a, Note))
    # A start of 2 s, 1 s to load, then 10 of the longest alone and 50 of both.
    assert note.inputs["step_s"] == pytest.approx(3 + 10 * 0.0105 + 50 * 0.011 + 2 * 10 * 1e-5)
    assert note.choice == "3 actors"


def test_cost_alone_takes_one_actor() -> None:
    _, actions = begun(time_weight=0.0)
    assert dealt(actions) == {2: [0, 1, 2, 3, 4, 5]}


def test_new_prompts_get_the_mean_of_all() -> None:
    policy, _ = begun(time_weight=1.0)
    names = ["p0", "p1", "new", "p3", "p4", "p5"]
    fresh = view_of(FLEET, [UP, UP, UP, UP], prompts=6, siblings=1, prompt_ids=names)
    # 40 10 (35) 20 60 50
    assert dealt(policy.decide(100.0, StepBegan(), fresh)) == {2: [4, 5], 0: [0, 2], 1: [1, 3]}


def test_a_tail_is_cut_and_goes_to_an_actor_that_is_through() -> None:
    policy = make_policy("rlhfless_published", RLHFlessPaperSpec(time_weight=1.0, cut_share=0.5))
    fresh = view_of(FLEET, [ABSENT, ABSENT, ABSENT, UP], prompts=6, siblings=1)
    assert dealt(policy.decide(0.0, StepBegan(), fresh)) == {2: [4, 5], 0: [2, 3], 1: [0, 1]}
    # Half of slot 1 is done, but no actor is through that could take the rest.
    assert list(policy.decide(1.0, Heartbeat(), view({2: [4, 5], 0: [2, 3], 1: [1]}))) == []
    # Place 1 is through; it stays, for what may still be cut.
    assert list(policy.decide(2.0, Heartbeat(), view({2: [4, 5], 0: [2, 3]}))) == []
    # Place 0 is cut, its rest goes to 1, and it is released.
    actions = list(policy.decide(3.0, Heartbeat(), view({2: [4, 5], 0: [3]})))
    moved = next(a for a in actions if isinstance(a, Move))
    assert (moved.source, moved.target, moved.samples.tolist()) == (0, 1, [3])
    assert [a for a in actions if isinstance(a, Release)] == [Release(0)]
    # So is slot 2 in its turn, and what was moved once is not moved again.
    actions = list(policy.decide(4.0, Heartbeat(), view({2: [5], 1: [3]}, (ABSENT, UP, UP, UP))))
    assert [(a.source, a.target) for a in actions if isinstance(a, Move)] == [(2, 1)]
    assert Release(2) in actions
    assert list(policy.decide(5.0, Heartbeat(), view({1: [3]}, (ABSENT, UP, ABSENT, UP)))) == []


def test_actors_start_ahead_of_the_next_step() -> None:
    """The shortest step took 100 s, so the next one begins at 200 s at the earliest: 5 s before that they are up."""
    policy, _ = begun(time_weight=1.0)
    actions = policy.decide(150.0, Generated(), view({}, (UP, ABSENT, ABSENT, UP)))
    assert [a for a in actions if isinstance(a, Release)] == [Release(0)]
    assert [a for a in actions if isinstance(a, Start)] == [Start(slot, 193.0) for slot in (2, 0, 1)]
    assert list(policy.decide(160.0, Idle(3), view({}))) == []  # the learner stays


def test_actors_whose_release_saves_nothing_stay() -> None:
    fleet = fleet_of(replica_slot(0, usd_per_s=0.0), replica_slot(1, start_s=2.0), learner(9))
    policy = make_policy("rlhfless_published", RLHFlessPaperSpec(time_weight=1.0))
    policy.decide(0.0, StepBegan(), view_of(fleet, [ABSENT, ABSENT, UP], prompts=2, siblings=1))
    over = view_of(fleet, [UP, UP, UP], prompts=2, siblings=1, tokens=[9, 9], finished=[True, True])
    policy.decide(9.0, Generated(), over)
    policy.decide(10.0, StepEnded(0.0, 10.0), over)
    policy.decide(10.0, StepBegan(), over)
    assert list(policy.decide(19.0, Generated(), over)) == [Release(1), Start(1, pytest.approx(15.0 - 2.0))]
