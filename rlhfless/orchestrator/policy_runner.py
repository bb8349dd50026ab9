"""One policy on the wall clock: changes in a run's generation become its events, and its actions are carried out.

The simulator asks the same policies on a virtual clock; `rlhfless.scaling.assignment` decides for both which actions
are refused. A fault of the policy stops the simulator, but must not stop a run: actions before the fault stay in
effect, samples that it leaves unassigned are split evenly, and the policy is asked again at the next event. The first
fault is logged with its traceback, and all faults are counted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rlhfless.fleet.replica import ReplicaLost
from rlhfless.orchestrator.in_flight_samples import InFlightSamples
from rlhfless.orchestrator.live_fleet import LiveFleet
from rlhfless.records import Decision, ReplicaState
from rlhfless.scaling.policy import (
    UNASSIGNED,
    Action,
    Assign,
    Event,
    FleetView,
    Ints,
    Lost,
    Move,
    Note,
    Policy,
    Release,
    Serving,
    Start,
    StepBegan,
    StepEnded,
    StepView,
)

log = logging.getLogger(__name__)

UP = (ReplicaState.STALE, ReplicaState.SERVING)
"""States of an actor that serves, or will serve as soon as it has loaded the step's weights."""


@dataclass(slots=True)
class _Step:
    """The policy's view of a step, and the effects of its actions."""

    table: InFlightSamples
    view: FleetView
    """The fleet when the step began."""
    figures: dict[str, float] = field(default_factory=lambda: {"moved_samples": 0.0})
    ended: bool = False


class PolicyRunner:
    """Asks one policy for one run, or for one stage. Several steps can be in progress."""

    def __init__(
        self,
        policy: Policy,
        fleet: LiveFleet,
        note: Callable[[Decision], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._policy = policy
        self._fleet = fleet
        self._note = note
        self._clock = clock
        self._feasible = True
        self._steps: dict[int, _Step] = {}
        self._faults = 0

    def figures(self, step: int) -> Mapping[str, float]:
        """The metrics of a step; none if the policy was not asked about it."""
        asked = self._steps.get(step)
        if asked is None:
            return {}
        return {**asked.figures, **asked.table.replayed.figures(), "policy_faults": float(self._faults)}

    def begin(self, table: InFlightSamples) -> None:
        """Begin a step, and ask the policy. Raises as `ask` does."""
        self._steps = {number: known for number, known in self._steps.items() if not known.ended}
        step = self._steps[table.step] = _Step(table, self._fleet.view())
        if (prefixes := table.prefixes_decision(self._clock())) is not None:
            self._note(prefixes)
        self.ask(StepBegan(), table.step)
        step.figures["actors_wanted"] = float(len(set(table.slot_of[table.left].tolist())))

    def end(self, event: StepEnded, number: int) -> None:
        """End a step: the policy gets the event, and is not asked about the step again."""
        self.ask(event, number)
        if (step := self._steps.get(number)) is not None:
            if step.table.replayed.tokens and not step.ended:
                self._note(step.table.replayed.decision(number, self._clock()))
            step.ended = True

    def ask(self, event: Event, number: int) -> None:
        """Asks the policy about an event in the step with this number, and carries out its actions. Does nothing if the
        step has ended, or if the policy was not asked at its begin.

        Raises ReplicaLost if samples are left, and no actor is up or starting to draw them.
        """
        step = self._steps.get(number)
        if step is None or step.ended:
            return
        table = step.table
        try:
            answer = self._policy.decide(self._clock(), event, self._seen(step))
            for action in answer:
                self._carry_out(action, step)
            if any(map(self._fleet.expects, range(table.assignment.slots))):
                table.assignment.check_assigned()
            table.assignment.check_drawn(answer, self._fleet.expects)
        except Exception as fault:
            self._count_fault(event, fault)
        self._split_rest(step)

    def _seen(self, step: _Step) -> StepView:
        return step.table.view(step.view, self._fleet.slots(step.table))

    def _carry_out(self, action: Action, step: _Step) -> None:
        """Carries out an action. Raises PolicyFault, without any effect, if that is not possible."""
        table = step.table
        match action:
            case Assign(slot=slot):
                table.give(table.assignment.checked_assign(action), slot)
            case Move(target=target):
                moving = table.assignment.checked_move(action)
                table.give(moving, target)
                step.figures["moved_samples"] += moving.size
            case Start(slot, at_s):
                self._fleet.start(slot, at_s, table.step)
            case Release(slot):
                table.assignment.check_release(slot)
                self._fleet.release(slot, table.step)
            case Note(decision):
                self._note(decision)
                if decision.kind == "plan":
                    self._note_plan(decision, step)

    def _note_plan(self, decision: Decision, step: _Step) -> None:
        """Notes a step's plan. That no plan can keep the contract is logged when that begins, not at every step."""
        inputs = decision.inputs
        if "step_s" in inputs:
            step.figures["planned_generation_s"] = float(inputs["step_s"])
        feasible = inputs.get("feasible") is not False
        if self._feasible and not feasible:
            what = "step %d: no plan for generation keeps its part of the contract (%s); the nearest is kept: %s"
            log.warning(what, decision.step, inputs["reason"], inputs["nearest"])
        self._feasible = feasible

    def _split_rest(self, step: _Step) -> None:
        """Splits samples evenly that are unassigned, or that wait at a slot without an actor to come. After this every
        sample has a slot."""
        table = step.table
        for slot in sorted(set(table.slot_of[table.left].tolist()) - {UNASSIGNED}):
            if not self._fleet.expects(slot):
                table.lose(slot)
        if not table.unassigned.size:
            return
        for assign in split_evenly(self._seen(step), table.unassigned):
            table.give(assign.samples, assign.slot)
        if left := table.unassigned.size:
            raise ReplicaLost(f"no generation actor is left for {left} unfinished samples")

    def _count_fault(self, event: Event, fault: Exception) -> None:
        self._faults += 1
        if self._faults == 1:
            log.error(
                "the scaling policy failed at %s; samples without a slot are split evenly, there and whenever "
                "it fails again (metric policy_faults)",
                type(event).__name__,
                exc_info=fault,
            )


class EvenSplit:
    """A policy without any forecast, for evaluations. It gives each prompt, new or lost, to the actor with the fewest
    samples; an actor that joins gets half of the difference to the busiest actor.

    It starts and releases no actor, and gives samples only to actors that are up.
    """

    def decide(self, at_s: float, event: Event, view: StepView) -> Sequence[Action]:  # noqa: ARG002
        """See rlhfless.scaling.policy.Policy."""
        match event:
            case StepBegan():
                return split_evenly(view, np.flatnonzero(~view.finished))
            case Lost(samples=samples):
                return split_evenly(view, samples)
            case Serving(slot):
                return _share(view, slot)
        return ()


def split_evenly(view: StepView, samples: Ints) -> list[Assign]:
    """Gives unassigned samples to the actors that are up, a prompt at a time, each to the actor with the fewest.

    If no actor is up, the first starting actor gets all of them; if none is starting, the answer is empty.
    """
    slots = _slots(view, *UP) or _slots(view, ReplicaState.STARTING)[:1]
    load = {slot: view.samples_at(slot).size for slot in slots}
    given: dict[int, list[Ints]] = {slot: [] for slot in slots}
    if not slots or not samples.size:
        return []
    for siblings in np.split(samples, np.flatnonzero(np.diff(view.group[samples])) + 1):
        slot = min(slots, key=lambda slot: (load[slot], slot))
        load[slot] += siblings.size
        given[slot].append(siblings)
    return [Assign(slot, np.concatenate(blocks)) for slot, blocks in given.items() if blocks]


def _share(view: StepView, joined: int) -> list[Action]:
    load = {slot: view.samples_at(slot).size for slot in _slots(view, *UP)}
    busiest = max(load, key=lambda slot: (load[slot], -slot), default=joined)
    lead = (load.get(busiest, 0) - load.get(joined, 0)) // 2
    # The last samples: these are whole groups, because siblings have consecutive numbers.
    return [Move(busiest, joined, view.samples_at(busiest)[-lead:])] if lead > 0 else []


def _slots(view: StepView, *states: ReplicaState) -> list[int]:
    return [slot for slot in view.fleet.generation() if view.slots[slot].state in states]
