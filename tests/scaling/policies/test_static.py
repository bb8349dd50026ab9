"""Dealing out and rescue: small fleets by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.views import ABSENT, ASLEEP, UP, fleet_of, learner, replica_slot, view_of
from rlhfless.records import ReplicaState
from rlhfless.scaling.policies.fleet import Layout, shares_to_least
from rlhfless.scaling.policy import (
    Assign,
    Generated,
    Idle,
    Lost,
    SlotView,
    Start,
    StepBegan,
    StepEnded,
)
from rlhfless.sim.policies import POLICIES, make_policy
from rlhfless.spec.fleet import CostAwareSpec, StaticSpec

COLOCATED = fleet_of(replica_slot(0), replica_slot(1), learner(0, 1))
APART = fleet_of(replica_slot(0), replica_slot(1), learner(2))


def dealt(actions: object) -> dict[int, list[int]]:
    return {a.slot: a.samples.tolist() for a in actions if isinstance(a, Assign)}  # type: ignore[attr-defined]


def test_shares_are_equal_and_siblings_stay_together() -> None:
    view = view_of(APART, [ABSENT, ABSENT, ABSENT], prompts=3, siblings=2)
    actions = make_policy("static_disaggregated").decide(0.0, StepBegan(), view)
    assert [a for a in actions if isinstance(a, Start)] == [Start(0), Start(1)]
    assert dealt(actions) == {0: [0, 1], 1: [2, 3, 4, 5]}


def test_a_static_fleet_of_so_many_actors() -> None:
    view = view_of(APART, [UP, UP, UP], prompts=3, siblings=2)
    actions = make_policy("static", StaticSpec(actors=1)).decide(0.0, StepBegan(), view)
    assert len(actions) == 1
    assert dealt(actions) == {0: [0, 1, 2, 3, 4, 5]}


def test_nothing_is_ever_released() -> None:
    policy = make_policy("static_colocated")
    view = view_of(COLOCATED, [UP, UP, ASLEEP], prompts=2, siblings=1)
    assert [list(policy.decide(9.0, event, view)) for event in (Generated(), Idle(2), StepEnded(0.0, 9.0))] == [[]] * 3
    starting = view_of(COLOCATED, [SlotView(ReplicaState.STARTING), ABSENT, ASLEEP], prompts=2, siblings=1)
    assert list(policy.decide(9.0, Generated(), starting)) == []


def test_prompts_that_were_seen_are_dealt_by_the_lengths_of_their_responses() -> None:
    policy = make_policy("static")
    seen = {"prompts": 4, "siblings": 2, "prompt_ids": ["a", "b", "c", "d"], "finished": [True] * 8}
    tokens = [8, 12, 45, 35, 15, 25, 60, 60]  # means 10, 40, 20, 60
    policy.decide(9.0, Generated(), view_of(APART, [UP, UP, UP], tokens=tokens, **seen))
    names = ["a", "b", "c", "e"]  # e: the mean of all, 32.5
    again = view_of(APART, [UP, UP, UP], prompts=4, siblings=2, prompt_ids=names, step=2)
    # b (40) to 0, e (32.5) to 1, c (20) to 1, a (10) to 0; the longest first.
    assert dealt(policy.decide(10.0, StepBegan(), again)) == {0: [2, 3, 0, 1], 1: [6, 7, 4, 5]}


def test_lost_samples_go_to_the_actors_with_the_least() -> None:
    fleet = fleet_of(*(replica_slot(i) for i in range(4)), learner(5))
    home = [0] * 3 + [2] * 1 + [-1] * 4
    view = view_of(fleet, [UP, ABSENT, UP, ABSENT, UP], prompts=8, siblings=1, home=home)
    actions = make_policy("static").decide(3.0, Lost(1, np.arange(4, 8)), view)
    assert actions[0] == Start(1)
    assert {slot: len(samples) for slot, samples in dealt(actions).items()} == {0: 1, 2: 3}
    alone = view_of(fleet, [ABSENT] * 5, prompts=8, siblings=1)
    assert dealt(make_policy("static").decide(3.0, Lost(1, np.arange(4, 8)), alone)) == {1: [4, 5, 6, 7]}


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.integers(0, 50))
def test_shares_level_the_loads(loads: list[int], samples: int) -> None:
    shares = shares_to_least(samples, np.array(loads))
    assert shares.sum() == samples
    assert shares.min() >= 0
    after = np.array(loads) + shares
    assert after[shares > 0].max(initial=0) <= after.min() + 1


def test_a_fleet_without_actors_is_refused() -> None:
    with pytest.raises(ValueError, match="no slot holds a generation actor"):
        Layout.of((learner(0),))


def test_the_factory_names_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="did you mean `static`"):
        make_policy("statik")
    with pytest.raises(ValueError, match="static takes StaticSpec, got CostAwareSpec"):
        make_policy("static", CostAwareSpec())
    for name, kind in POLICIES.items():
        assert make_policy(name, kind.settings()) is not None
