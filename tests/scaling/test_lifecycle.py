"""The life cycle of a replica: the transitions that exist, those that do not, and a ledger without holes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rlhfless.records import FunctionName, Holding, ReplicaState, WeightVersion
from rlhfless.scaling.lifecycle import (
    TRANSITIONS,
    IllegalTransition,
    Lifecycle,
    ReplicaIdentity,
)
from rlhfless.scaling.placement import Allocation, Device

S = ReplicaState
CORES = (Device("cpu-0", "cpu-core", 0), Device("cpu-1", "cpu-core", 1))
IDENTITY = ReplicaIdentity(FunctionName.GENERATION, "generation-0", "a1", Allocation.of(CORES, 0.5))
V1 = WeightVersion("run", 1, 1, "aa")
V2 = WeightVersion("run", 1, 2, "bb")


def serving(at_s: float = 0.0) -> Lifecycle:
    life = Lifecycle(IDENTITY, at_s)
    life.started(at_s)
    life.ask(V1, at_s)
    life.loaded(V1, at_s)
    assert life.state is S.SERVING
    return life


def test_a_whole_life_is_covered_by_holdings() -> None:
    life = Lifecycle(IDENTITY, 100.0)
    closed: list[Holding] = []
    closed += life.started(131.0)
    closed += life.ask(V1, 131.5)
    closed += life.loaded(V1, 133.0)
    closed += life.ask(V2, 140.0)
    closed += life.loaded(V2, 142.0)
    closed += life.drain(150.0)
    closed += life.sleep(151.0)
    closed += life.wake(160.0)
    closed += life.started(162.0)
    closed += life.drain(163.0)
    closed += life.retire(164.0)
    on_first = [(h.state, h.start_s, h.end_s) for h in closed if h.device == "cpu-0"]
    assert on_first == [
        (S.STARTING, 100.0, 131.0),
        (S.STALE, 131.0, 133.0),
        (S.SERVING, 133.0, 140.0),
        (S.STALE, 140.0, 142.0),
        (S.SERVING, 142.0, 150.0),
        (S.DRAINING, 150.0, 151.0),
        (S.SLEEPING, 151.0, 160.0),
        (S.STARTING, 160.0, 162.0),
        (S.STALE, 162.0, 163.0),
        (S.DRAINING, 163.0, 164.0),
    ]
    assert [(h.state, h.start_s, h.end_s) for h in closed if h.device == "cpu-1"] == on_first
    assert {(h.incarnation, h.share, h.device_kind) for h in closed} == {("a1", 0.5, "cpu-core")}


def test_a_load_overtaken_by_a_newer_ask_opens_nothing() -> None:
    life = Lifecycle(IDENTITY, 0.0)
    life.started(1.0)
    life.ask(V1, 2.0)
    life.ask(V2, 3.0)
    assert life.loaded(V1, 4.0) == ()
    assert life.state == S.STALE
    life.loaded(V2, 5.0)
    assert str(life.state) == "serving"


def test_asking_for_what_is_loaded_changes_nothing() -> None:
    life = serving()
    assert life.ask(V1, 5.0) == ()
    assert life.state is S.SERVING


def test_nothing_can_be_loaded_before_it_is_asked_for() -> None:
    life = Lifecycle(IDENTITY, 0.0)
    life.started(1.0)
    assert life.loaded(V1, 2.0) == ()
    assert life.state is S.STALE


def test_a_suspect_comes_back_through_stale_only() -> None:
    life = serving()
    life.suspect(10.0)
    with pytest.raises(IllegalTransition, match="from suspect to serving"):
        life.loaded(V1, 11.0)
    (first, _) = life.recovered(12.0)
    assert (first.state, first.start_s, first.end_s) == (S.SUSPECT, 10.0, 12.0)
    assert life.state == S.STALE
    life.loaded(V1, 13.0)
    assert str(life.state) == "serving"


def test_a_start_ends_by_starting_and_a_suspicion_by_a_probe() -> None:
    life = Lifecycle(IDENTITY, 0.0)
    with pytest.raises(IllegalTransition, match="from starting to stale"):
        life.recovered(1.0)
    life.suspect(1.0)
    with pytest.raises(IllegalTransition, match="from suspect to stale"):
        life.started(2.0)


def test_a_known_death_is_suspicion_and_verdict_at_once() -> None:
    life = serving()
    (first, _) = life.died(7.0)
    assert (first.state, first.end_s) == (S.SERVING, 7.0)
    assert life.state is S.DEAD


@pytest.mark.parametrize("event", ["started", "drain", "sleep", "wake", "retire", "suspect", "recovered", "died"])
def test_the_dead_never_return(event: str) -> None:
    life = serving()
    life.died(7.0)
    with pytest.raises(IllegalTransition, match="this life is over"):
        getattr(life, event)(8.0)
    with pytest.raises(IllegalTransition):
        life.ask(V2, 8.0)
    with pytest.raises(IllegalTransition):
        life.loaded(V1, 8.0)
    assert life.cut(9.0) == ()
    assert life.state is S.DEAD


def test_an_illegal_event_names_both_states_and_changes_nothing() -> None:
    life = serving()
    with pytest.raises(IllegalTransition) as caught:
        life.sleep(9.0)
    assert str(caught.value) == (
        "generation-0 (incarnation a1) cannot go from serving to sleeping; "
        "from serving it can go to draining, stale, suspect"
    )
    assert (caught.value.before, caught.value.after) == (S.SERVING, S.SLEEPING)
    assert (life.state, life.since_s) == (S.SERVING, 0.0)


def test_a_cut_closes_the_span_and_goes_on() -> None:
    life = serving()
    assert [(h.start_s, h.end_s) for h in life.cut(5.0)] == [(0.0, 5.0)] * 2
    assert life.cut(5.0) == ()
    assert [(h.state, h.start_s, h.end_s) for h in life.drain(8.0)] == [(S.SERVING, 5.0, 8.0)] * 2


def test_a_clock_that_steps_back_gives_no_negative_span() -> None:
    life = Lifecycle(IDENTITY, 100.0)
    assert life.started(90.0) == ()
    assert life.since_s == 100.0


@pytest.mark.parametrize("state", [S.SERVING, S.SLEEPING, S.DEAD])
def test_a_life_begins_starting_or_stale(state: ReplicaState) -> None:
    with pytest.raises(ValueError, match=f"cannot start as {state}"):
        Lifecycle(IDENTITY, 0.0, state)


def test_the_table_has_one_door_to_traffic_and_one_way_to_die() -> None:
    into = {state: {before for before in S if state in TRANSITIONS[before]} for state in S}
    assert into[S.SERVING] == {S.STALE}
    assert into[S.DEAD] == {S.SUSPECT}
    assert into[S.SUSPECT] == {state for state in S if state.holds_device} - {S.SUSPECT}
    assert TRANSITIONS[S.DEAD] == TRANSITIONS[S.RETIRED] == frozenset()
    assert all(state not in TRANSITIONS[state] for state in S)


class AnyLife(RuleBasedStateMachine):
    """Whatever happens to a replica, the ledger has no hole and no traffic reaches other weights."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 50.0
        self.life = Lifecycle(IDENTITY, self.now)
        self.closed: list[Holding] = []
        self.in_memory: WeightVersion | None = None

    @rule(
        event=st.sampled_from(["started", "drain", "sleep", "wake", "retire", "suspect", "recovered", "died"]),
        passed_s=st.floats(-1, 10),
    )
    def happen(self, event: str, passed_s: float) -> None:
        self.now += passed_s
        before = self.life.state
        try:
            self.closed += getattr(self.life, event)(self.now)
        except IllegalTransition:
            assert self.life.state is before

    @rule(version=st.sampled_from([V1, V2]), passed_s=st.floats(0, 10))
    def ask(self, version: WeightVersion, passed_s: float) -> None:
        self.now += passed_s
        if TRANSITIONS[self.life.state]:
            self.closed += self.life.ask(version, self.now)

    @rule(version=st.sampled_from([V1, V2]), passed_s=st.floats(0, 10))
    def load(self, version: WeightVersion, passed_s: float) -> None:
        self.now += passed_s
        if self.life.state is S.STALE:
            self.in_memory = version
            self.closed += self.life.loaded(version, self.now)

    @invariant()
    def holdings_are_contiguous(self) -> None:
        spans = [holding for holding in self.closed if holding.device == "cpu-0"]
        assert len(spans) * 2 == len(self.closed)
        assert all(span.duration_s > 0 and span.state.holds_device for span in spans)
        assert all(first.end_s == second.start_s for first, second in pairwise(spans))
        if spans:
            assert spans[0].start_s == 50.0
            assert spans[-1].end_s == self.life.since_s

    @invariant()
    def serving_means_the_version_asked_for(self) -> None:
        if self.life.state is S.SERVING:
            assert self.life.asked == self.in_memory


test_any_life = AnyLife.TestCase
test_any_life.settings = settings(max_examples=30)
