"""Dealing out, sleeping in turn, and rescue: small fleets by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.views import ABSENT, ASLEEP, ENGINE, UP, fleet_of, learner, replica_slot, view_of
from rlhfless.records import ReplicaState
from rlhfless.scaling.policies import POLICIES, make_policy
from rlhfless.scaling.policies.fleet_actions import shares_to_least
from rlhfless.scaling.policies.fleet_layout import Layout
from rlhfless.scaling.policy import (
    Assign,
    Generated,
    Idle,
    Lost,
    Release,
    SlotView,
    Start,
    StepBegan,
)
from rlhfless.spec.policies import CostAwareSpec, StaticSpec

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


def test_a_replica_that_shares_devices_sleeps_when_it_is_done() -> None:
    policy = make_policy("static_colocated")
    view = view_of(COLOCATED, [UP, UP, ASLEEP], prompts=2, siblings=1)
    assert policy.decide(9.0, Generated(), view) == [Release(0, "host"), Release(1, "host")]
    assert policy.decide(9.0, Idle(2), view) == []  # it made way for another replica already
    assert policy.decide(9.0, Idle(2), view_of(COLOCATED, [ASLEEP, ASLEEP, UP], prompts=2, siblings=1)) == [
        Release(2, "host")
    ]
    begun = policy.decide(10.0, StepBegan(), view_of(COLOCATED, [ASLEEP, ASLEEP, UP], prompts=2, siblings=1))
    assert begun[:3] == [Release(2, "host"), Start(0), Start(1)]
    apart = view_of(APART, [UP, UP, UP], prompts=2, siblings=1)
    assert list(policy.decide(9.0, Generated(), apart)) == []
    assert list(policy.decide(9.0, Idle(2), apart)) == []


def test_lost_samples_go_to_the_actors_with_the_least() -> None:
    fleet = fleet_of(*(replica_slot(i) for i in range(4)), learner(5))
    home = [0] * 3 + [2] * 1 + [-1] * 4
    view = view_of(fleet, [UP, ABSENT, UP, ASLEEP, UP], prompts=8, siblings=1, home=home)
    actions = make_policy("static").decide(3.0, Lost(1, np.arange(4, 8)), view)
    assert actions[0] == Start(1)
    assert {slot: len(samples) for slot, samples in dealt(actions).items()} == {0: 1, 2: 3}
    alone = view_of(fleet, [ABSENT] * 5, prompts=8, siblings=1)
    assert dealt(make_policy("static").decide(3.0, Lost(1, np.arange(4, 8)), alone)) == {1: [4, 5, 6, 7]}


def test_one_that_is_lost_with_nothing_to_do_leaves_shared_devices_to_the_others() -> None:
    """After generation the learner wants them; an actor that came up there would keep them until the next step."""
    nothing = np.empty(0, np.int64)
    over = {"prompts": 2, "siblings": 1, "finished": [True, True]}
    shared = view_of(COLOCATED, [ABSENT, ASLEEP, UP], **over)
    assert list(make_policy("static").decide(9.0, Lost(0, nothing), shared)) == []
    apart = view_of(APART, [ABSENT, UP, UP], **over)
    assert list(make_policy("static").decide(9.0, Lost(0, nothing), apart)) == [Start(0)]


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.integers(0, 50))
def test_shares_level_the_loads(loads: list[int], samples: int) -> None:
    shares = shares_to_least(samples, np.array(loads))
    assert shares.sum() == samples
    assert shares.min() >= 0
    after = np.array(loads) + shares
    assert after[shares > 0].max(initial=0) <= after.min() + 1


def test_slots_that_may_be_awake_side_by_side_share_nothing() -> None:
    scoring = replica_slot(2, devices=("gpu-0",), engine=None, beside=True)
    layout = Layout.of((replica_slot(0), scoring, learner(0)))
    assert layout.neighbours == (frozenset({2}), frozenset(), frozenset({0}))
    with pytest.raises(ValueError, match="no slot holds a generation actor"):
        Layout.of((learner(0),))


def test_one_that_still_starts_is_called_off() -> None:
    view = view_of(COLOCATED, [SlotView(ReplicaState.STARTING), ABSENT, ASLEEP], prompts=2, siblings=1)
    assert make_policy("static").decide(1.0, Generated(), view) == [Release(0, None)]


def test_the_factory_names_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="did you mean `static`"):
        make_policy("statik")
    with pytest.raises(ValueError, match="static takes StaticSpec, got CostAwareSpec"):
        make_policy("static", CostAwareSpec())
    for name, kind in POLICIES.items():
        assert make_policy(name, kind.settings()) is not None


def test_prompts_begin_with_actors_that_prefill_only() -> None:
    first = dataclasses.replace(ENGINE, prefill_only=True)
    split = fleet_of(replica_slot(0, engine=first), replica_slot(1), replica_slot(2), learner(3))
    view = view_of(split, [ABSENT] * 4, prompts=2, siblings=2)
    actions = make_policy("static").decide(0.0, StepBegan(), view)
    assert [a for a in actions if isinstance(a, Start)] == [Start(0), Start(1), Start(2)]
    assert dealt(actions) == {0: [0, 1, 2, 3]}
    turns = fleet_of(replica_slot(0, engine=first), replica_slot(1), learner(0, 1))
    view = view_of(turns, [UP, UP, ASLEEP], prompts=2, siblings=2)
    assert make_policy("static").decide(9.0, Generated(), view) == [Release(0, "host"), Release(1, "host")]


def test_an_actor_that_decodes_what_others_prefill_is_started_again_though_it_had_no_samples_yet() -> None:
    first = dataclasses.replace(ENGINE, prefill_only=True)
    turns = fleet_of(replica_slot(0, engine=first), replica_slot(1), learner(0, 1))
    view = view_of(turns, [UP, ABSENT, ABSENT], prompts=2, siblings=2)
    assert make_policy("static").decide(9.0, Lost(1, np.array([], np.int64)), view) == [Start(1)]
    over = dataclasses.replace(view, finished=np.ones(4, np.bool_))
    assert make_policy("static").decide(9.0, Lost(1, np.array([], np.int64)), over) == []
