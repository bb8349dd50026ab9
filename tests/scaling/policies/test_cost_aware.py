"""The run's own scaler by hand: plan, rebalance_tail, release, start ahead. Lengths are known, so figures are exact."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

import numpy as np
import pytest

from fakes.views import ABSENT, ENGINE, MODEL, UP, fleet_of, homes, learner, replica_slot, view_of
from rlhfless.records import FunctionName, FunctionRole
from rlhfless.scaling.policies.contract import RunContract
from rlhfless.scaling.policies.cost_aware import CostAware
from rlhfless.scaling.policies.cost_aware.estimates import DeadlineMargin
from rlhfless.scaling.policies.cost_aware.forecasts import PredictedLengths
from rlhfless.scaling.policies.cost_aware.idle import HeldDevices
from rlhfless.scaling.policies.fleet import Contexts
from rlhfless.scaling.policy import (
    Action,
    Assign,
    Generated,
    Heartbeat,
    Lost,
    Move,
    Note,
    Policy,
    Release,
    Serving,
    SlotView,
    Start,
    StepBegan,
    StepEnded,
    StepView,
)
from rlhfless.scaling.prices import RentalTerms
from rlhfless.sim.experiment.run import Clairvoyant
from rlhfless.spec import CheapestSpec, CostAwareSpec, WeightedSpec
from rlhfless.spec.fleet import ContractSpec

FLEET = fleet_of(*(replica_slot(index, start_s=2.0) for index in range(3)), learner(9))
LENGTHS = np.array([40, 10, 30, 20, 60, 50])
ALL_UP = (UP, UP, UP, UP)


def knowing(contract: ContractSpec, steps: int = 8) -> Policy:
    return CostAware(CostAwareSpec(), RunContract(contract, steps), Clairvoyant(lambda step: LENGTHS))


def fresh(slots: Iterable[SlotView] = ALL_UP) -> StepView:
    return view_of(FLEET, list(slots), prompts=6, siblings=1)


def view(left: dict[int, list[int]], tokens: int, slots: Iterable[SlotView] = ALL_UP) -> StepView:
    """All samples have drawn so many tokens or ended; those in `left` (slot: samples) have not."""
    home = homes(left, 6)
    done = [slot == -1 for slot in home]
    drawn = [int(length) if end else tokens for length, end in zip(LENGTHS, done, strict=True)]
    return view_of(FLEET, list(slots), prompts=6, siblings=1, tokens=drawn, finished=done, home=home)


def dealt(actions: Iterable[Action]) -> dict[int, list[int]]:
    return {a.slot: a.samples.tolist() for a in actions if isinstance(a, Assign)}


def notes(actions: Iterable[Action], kind: str) -> list[dict[str, object]]:
    return [dict(a.decision.inputs) for a in actions if isinstance(a, Note) and a.decision.kind == kind]


def test_time_alone_spreads_similar_lengths_and_cost_alone_shares_every_iteration() -> None:
    fast = dealt(knowing(WeightedSpec(time_weight=1.0)).decide(0.0, StepBegan(), fresh()))
    assert len(fast) == 2  # a third would not end it any sooner
    assert sorted(itertools.chain(*fast.values())) == [0, 1, 2, 3, 4, 5]
    assert [4] in fast.values()  # the longest decodes alone: 60 x 10.5 ms and nothing beside it
    for samples in fast.values():
        assert LENGTHS[samples].tolist() == sorted(LENGTHS[samples], reverse=True)
    cheap = list(knowing(WeightedSpec(time_weight=0.0)).decide(0.0, StepBegan(), fresh()))
    (slot,) = dealt(cheap)
    assert dealt(cheap)[slot] == [4, 5, 0, 2, 3, 1]
    # No step has ended yet, so the next use is as far as a start is long: staying and leaving cost the same.
    assert [a for a in cheap if isinstance(a, Release)] == []


def test_a_deadline_is_kept_for_the_least_money() -> None:
    """On one actor, all six take 0.71 s and the load of the weights, 1 s. Of the first
    step's deadline generation gets half where that takes no hurry, because nothing is known of what comes after it."""
    for deadline_s, actors in ((100.0, 1), (2 * 1.66, 1)):
        actions = knowing(CheapestSpec(deadline_s=deadline_s)).decide(0.0, StepBegan(), fresh())
        (made,) = notes(actions, "plan")
        assert made["feasible"] is True
        assert len(dealt(actions)) == actors
    (made,) = notes(knowing(CheapestSpec(deadline_s=0.1)).decide(0.0, StepBegan(), fresh()), "plan")
    assert made["feasible"] is False


def test_the_guess_of_a_first_step_buys_no_hurry() -> None:
    """Half of 3.32 s takes the fastest plan; the whole does not, so time and cost count alike."""
    (made,) = notes(knowing(CheapestSpec(deadline_s=2 * 1.66)).decide(0.0, StepBegan(), fresh()), "plan")
    (even,) = notes(knowing(WeightedSpec(time_weight=0.5)).decide(0.0, StepBegan(), fresh()), "plan")
    assert made["usd"] == even["usd"]


def test_a_tight_deadline_is_kept_with_the_reserve_that_there_is() -> None:
    """Two actors at their fastest take 1.63 s with the load of the weights; the deadline of a second step leaves less
    than its reserve. Nothing comes after generation here."""
    (fastest,) = notes(knowing(WeightedSpec(time_weight=1.0)).decide(0.0, StepBegan(), fresh()), "plan")
    deadline_s = 1.08 * float(fastest["step_s"])  # type: ignore[arg-type]
    assert DeadlineMargin(CostAwareSpec().confidence).of_step(1, revisits=False).reserve > 1.15
    policy = knowing(CheapestSpec(deadline_s=deadline_s))
    policy.decide(0.0, StepBegan(), fresh())
    policy.decide(2.0, Generated(), view({}, tokens=60))
    policy.decide(2.0, StepEnded(0, 2.0), view({}, tokens=60))
    (made,) = notes(policy.decide(2.0, StepBegan(), fresh()), "plan")
    assert made["feasible"] is True
    assert made["step_s"] == pytest.approx(fastest["step_s"])


def test_samples_of_an_unknown_length_are_all_dealt_out() -> None:
    policy = CostAware(CostAwareSpec(), RunContract(WeightedSpec(), 2), PredictedLengths())
    actions = list(policy.decide(0.0, StepBegan(), fresh((ABSENT, ABSENT, ABSENT, UP))))
    given = dealt(actions)
    assert sorted(itertools.chain(*given.values())) == [0, 1, 2, 3, 4, 5]
    assert {a.slot for a in actions if isinstance(a, Start)} >= set(given)


def test_all_actors_that_end_too_late_are_relieved_though_one_alone_would_not_help() -> None:
    """Two sequences take 30 ms an iteration, one takes 20: slot 0 ends after 1.6 s and slot 1 after 1.3 s, both late.
    The third takes the shorter sample of each: 1.2 s, 1.0 s, and itself 30 x 30 + 10 x 20 ms."""
    slow = dataclasses.replace(ENGINE, model=dataclasses.replace(MODEL, sequence_s=0.01))
    fleet = fleet_of(
        replica_slot(0, engine=slow), replica_slot(1, engine=slow), replica_slot(2, engine=slow), learner(9)
    )
    policy = knowing(CheapestSpec(deadline_s=5.0))
    policy.decide(0.0, StepBegan(), dataclasses.replace(fresh(), fleet=fleet))
    late = dataclasses.replace(view({0: [4, 0], 1: [5, 2]}, tokens=0), fleet=fleet)
    actions = policy.decide(10.0, Heartbeat(), late)
    moved = {(a.source, a.target): a.samples.tolist() for a in actions if isinstance(a, Move)}
    assert moved == {(0, 2): [0], (1, 2): [2]}
    assert len(notes(actions, "migrate")) == 2


def test_nothing_moves_where_only_time_counts_and_no_sample_would_end_sooner() -> None:
    policy = knowing(WeightedSpec(time_weight=1.0))
    policy.decide(0.0, StepBegan(), fresh())
    actions = policy.decide(10.0, Heartbeat(), view({0: [4], 1: [5]}, tokens=0))
    assert not [a for a in actions if isinstance(a, Move)]


def test_lost_samples_go_to_actors_that_are_awake_or_wait_for_the_same_slot() -> None:
    policy = knowing(WeightedSpec())
    policy.decide(0.0, StepBegan(), fresh())
    lost = Lost(0, np.array([4, 5]))
    there = policy.decide(1.0, lost, view({1: [0, 1]}, tokens=5, slots=(ABSENT, UP, UP, UP)))
    assert dealt(there) == {2: [4, 5]}
    alone = policy.decide(1.0, lost, view({}, tokens=5, slots=(ABSENT, ABSENT, ABSENT, UP)))
    assert [a for a in alone if isinstance(a, Start)] == [Start(0)]
    assert dealt(alone) == {0: [4, 5]}


def test_an_actor_that_plans_leave_out_is_released_once_that_has_cost_as_much_as_a_start() -> None:
    """Steps of 20 s, for which one actor is cheapest. Another start would take 35 s: when the second step begins, an
    actor has been idle for 20 s and the next step is 11.7 s away; when the third one begins, idle for 40 s."""
    fleet = fleet_of(*(replica_slot(index, start_s=35.0) for index in range(2)), learner(9))
    policy = knowing(WeightedSpec(time_weight=0.0))
    released = []
    for step in range(3):
        begin_s = 20.0 * step
        begun = dataclasses.replace(view_of(fleet, [UP, UP, UP], prompts=6, siblings=1), step=step)
        actions = list(policy.decide(begin_s, StepBegan(), begun))
        assert len(dealt(actions)) == 1
        released.append([a.slot for a in actions if isinstance(a, Release)])
        over = dataclasses.replace(view({}, 0, [UP, UP, UP]), fleet=fleet, step=step)
        policy.decide(begin_s + 10, Generated(), over)
        policy.decide(begin_s + 20, StepEnded(step, begin_s + 20), over)
    assert released == [[], [], [1]]


@pytest.mark.parametrize("learner_is_up", [True, False])
def test_the_learners_own_start_is_no_part_of_the_time_after_generation(learner_is_up: bool) -> None:
    """It ends 100 s after generation, and takes 40 s to start once: the next step begins 100 or 60 s after it. The
    earlier of two such times counts."""
    policy = knowing(WeightedSpec(time_weight=1.0))
    slots = (UP, UP, UP, UP if learner_is_up else ABSENT)
    for begin_s in (0.0, 120.0, 240.0):
        actors = dealt(policy.decide(begin_s, StepBegan(), fresh(slots)))
        actions = policy.decide(begin_s + 20, Generated(), view({}, 0, slots))
        policy.decide(begin_s + 120, StepEnded(0, begin_s + 120), view({}, 0, slots))
        slots = ALL_UP
    again_s = 240 + 20 + (100 if learner_is_up else 60) - 2
    assert {a.slot: a.at_s for a in actions if isinstance(a, Start)} == dict.fromkeys(actors, again_s)


@pytest.mark.parametrize("steps_before", [1, 2])
def test_all_leave_after_generation_and_start_ahead_of_the_next_step(steps_before: int) -> None:
    policy = knowing(WeightedSpec(time_weight=1.0))
    for begin_s in [60.0 * step for step in range(steps_before + 1)]:
        actors = dealt(policy.decide(begin_s, StepBegan(), fresh()))
        actions = list(policy.decide(begin_s + 20, Generated(), view({}, 0)))
        policy.decide(begin_s + 60, StepEnded(begin_s, begin_s + 60), view({}, 0))
    assert [a for a in actions if isinstance(a, Release)] == [Release(slot) for slot in range(3)]
    # The learner took 40 s after generation in the steps before, and a start takes 2 s.
    again_s = 60 * steps_before + 20 + 40 - 2
    assert {a.slot: a.at_s for a in actions if isinstance(a, Start)} == dict.fromkeys(actors, again_s)


def test_a_step_that_waited_for_its_actors_does_not_make_them_start_later() -> None:
    """Each step begins 15 s after the one before has ended, when its actors are up. They were needed at that end, 40 s
    after generation."""
    policy = knowing(WeightedSpec(time_weight=1.0))
    for begin_s in (0.0, 75.0, 150.0):
        actors = dealt(policy.decide(begin_s, StepBegan(), fresh()))
        actions = list(policy.decide(begin_s + 20, Generated(), view({}, 0)))
        policy.decide(begin_s + 60, StepEnded(begin_s, begin_s + 60), view({}, 0))
    again_s = 150 + 20 + 40 - 2
    assert {a.slot: a.at_s for a in actions if isinstance(a, Start)} == dict.fromkeys(actors, again_s)


def test_an_actor_that_waited_for_its_weights_does_not_start_earlier_the_next_time() -> None:
    """Actors are up when their step begins, and serve 10 s later, when its weights are loaded."""
    policy = knowing(WeightedSpec(time_weight=1.0))
    for begin_s in (0.0, 60.0, 120.0, 180.0):
        actors = dealt(policy.decide(begin_s, StepBegan(), fresh()))
        for slot in actors:
            policy.decide(begin_s + 10, Serving(slot), fresh())
        actions = list(policy.decide(begin_s + 20, Generated(), view({}, 0)))
        policy.decide(begin_s + 60, StepEnded(begin_s, begin_s + 60), view({}, 0))
    again_s = 180 + 20 + 40 - 2
    assert {a.slot: a.at_s for a in actions if isinstance(a, Start)} == dict.fromkeys(actors, again_s)


SLOW = fleet_of(*(replica_slot(index, start_s=30.0) for index in range(3)), learner(9), terms=RentalTerms(0, 0, 30.0))
"""Devices are billed by the second. A released one is there again after 30 s, and an actor on it 30 s later."""


def steps_before(contract: ContractSpec, after_s: float, steps: int = 2) -> Policy:
    """Return the policy after steps of 20 s of generation on SLOW and `after_s` of learning."""
    policy = knowing(contract)
    for step in range(steps):
        begin_s = step * (20 + after_s)
        policy.decide(begin_s, StepBegan(), slow(view_of(SLOW, ALL_UP, prompts=6, siblings=1), step))
        policy.decide(begin_s + 20, Generated(), slow(view({}, 0), step))
        policy.decide(begin_s + 20 + after_s, StepEnded(step, begin_s + 20 + after_s), slow(view({}, 0), step))
    return policy


def slow(view: StepView, step: int) -> StepView:
    return dataclasses.replace(view, fleet=SLOW, step=step)


@pytest.mark.parametrize(("after_s", "released"), [(40.0, []), (65.0, [1])])
def test_an_actor_that_has_had_work_in_the_step_was_not_idle_before(after_s: float, released: list[int]) -> None:
    """Slot 1 ends 15 s into generation, and is needed again in about 41 or 66 s. Its device costs 1 a second, and so
    does the learner, which would wait for a start of 60 s: staying costs 41 or 66, leaving 30 + 19 or 30 + 0."""
    policy = steps_before(WeightedSpec(time_weight=0.0), after_s)
    begin_s = 2 * (20 + after_s)
    policy.decide(begin_s, StepBegan(), slow(fresh(), 2))
    policy.decide(begin_s + 10, Heartbeat(), slow(view({0: [4], 1: [5]}, 10), 2))
    actions = list(policy.decide(begin_s + 15, Heartbeat(), slow(view({0: [4]}, 20), 2)))
    assert [a.slot for a in actions if isinstance(a, Release) and a.slot == 1] == released


@pytest.mark.parametrize(
    ("contract", "leave"),
    [
        (WeightedSpec(time_weight=0.0), True),
        (CheapestSpec(deadline_s=1000.0), True),
        (WeightedSpec(time_weight=0.5), False),
        (WeightedSpec(time_weight=1.0), False),
        (CheapestSpec(deadline_s=0.1), False),  # late already
        (CheapestSpec(deadline_s=55.0), False),  # 52 s are planned, and 10 s more are too many
    ],
)
def test_a_release_that_delays_the_next_step_is_worth_that_to_the_contract(contract: ContractSpec, leave: bool) -> None:
    """The next step begins 50 s after generation, and a start takes 60 s. Staying costs 50, leaving 30, and 10 s of
    the learner: 40. By weights a second also costs what the contract gives for it; past a deadline there is no price.
    """
    policy = steps_before(contract, 50.0)
    policy.decide(140.0, StepBegan(), slow(fresh(), 2))
    actions = list(policy.decide(160.0, Generated(), slow(view({}, 0), 2)))
    assert (Release(0) in actions) is leave


def test_a_device_that_another_replica_holds_is_not_waited_for() -> None:
    """The reference is on the learner's device, and stays when the learner ends; on others the learner waits."""
    reference = replica_slot(
        9, function=FunctionName.REFERENCE, role=FunctionRole.ANNOTATES, engine=None, usd_per_s=0.0
    )
    fleet = fleet_of(replica_slot(0), reference, learner(9), terms=RentalTerms(0, 0, 30.0))
    held, contexts = HeldDevices(), Contexts()
    for at_s, slots, waits_s in (
        (0.0, (UP, UP, UP), 0.0),
        (9.0, (UP, UP, ABSENT), 0.0),
        (9.0, (UP,) + 2 * (ABSENT,), 30.0),
    ):
        now = contexts.of(at_s, view_of(fleet, slots, prompts=1, siblings=1))
        held.note_held(now)
        assert held.again_s(now, 2) == waits_s
    assert held.again_s(now, 0) == 30.0, "a release now would give it up"


def test_actors_that_are_idle_in_one_of_two_steps_that_are_drawn_stay() -> None:
    """Both steps are drawn at once, and the first ends."""
    policy = knowing(WeightedSpec(time_weight=1.0))
    for number, begin_s in enumerate((0.0, 60.0, 120.0)):
        policy.decide(begin_s, StepBegan(), dataclasses.replace(fresh(), step=number))
        policy.decide(begin_s + 20, Generated(), dataclasses.replace(view({}, 0), step=number))
        policy.decide(begin_s + 60, StepEnded(begin_s, begin_s + 60), dataclasses.replace(view({}, 0), step=number))
    for number in (3, 4):
        policy.decide(180.0, StepBegan(), dataclasses.replace(fresh(), step=number))
    first = list(policy.decide(200.0, Generated(), dataclasses.replace(view({}, 0), step=3)))
    assert not [a for a in first if isinstance(a, Release | Start)]
    second = list(policy.decide(210.0, Generated(), dataclasses.replace(view({}, 0), step=4)))
    assert [a.slot for a in second if isinstance(a, Release)] == [0, 1, 2]
