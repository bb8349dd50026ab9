"""One policy, asked on the wall clock: what happens to a run's generation becomes its events, and its answers are done.

The simulator asks the same policies on a virtual clock; `rlhfless.scaling.assignment` says for both which answers are
refused. A fault of the policy stops the simulator; here it must not cost a run. The actions before the fault stand,
samples that it leaves unassigned are split evenly, and the policy is asked again at the next event. The first fault is
logged with its traceback, and all are counted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from rlhfless.autoscaling.even_split import split_evenly
from rlhfless.autoscaling.sample_table import SampleTable
from rlhfless.fleet.replica import ReplicaLost
from rlhfless.records import Decision
from rlhfless.scaling.policy import (
    UNASSIGNED,
    Action,
    Assign,
    Event,
    FleetView,
    Move,
    Note,
    Policy,
    Release,
    SlotView,
    Start,
    StepBegan,
    StepEnded,
    StepView,
)

log = logging.getLogger(__name__)


class Fleet(Protocol):
    """What a policy sees of a fleet, and may do to it."""

    def view(self) -> FleetView:
        """The slots, with the best figures that are known by now."""

    def slots(self, table: SampleTable) -> tuple[SlotView, ...]:
        """The state of each slot, and how many samples it has."""

    def expects(self, slot: int) -> bool:
        """Whether a generation actor is up at a slot, or has been asked to come up."""

    def start(self, slot: int, at_s: float | None, step: int) -> None:
        """See rlhfless.scaling.policy.Start. Raises PolicyFault."""

    def release(self, slot: int, tier: str | None, step: int) -> None:
        """See rlhfless.scaling.policy.Release. Raises PolicyFault."""


@dataclass(slots=True)
class _Step:
    """What the policy is shown of a step, and what came of its answers."""

    table: SampleTable
    view: FleetView
    """As it was when the step began."""
    figures: dict[str, float] = field(default_factory=lambda: {"moved_samples": 0.0})
    ended: bool = False


class PolicyRunner:
    """Asks one policy for one run, or for one stage. Several steps can be under way."""

    def __init__(
        self,
        policy: Policy,
        fleet: Fleet,
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
        """Metrics of a step; none if the policy was not asked about it."""
        asked = self._steps.get(step)
        return {} if asked is None else {**asked.figures, "policy_faults": float(self._faults)}

    def begin(self, table: SampleTable) -> None:
        """A step begins. Raises as `ask` does."""
        self._steps = {number: known for number, known in self._steps.items() if not known.ended}
        step = self._steps[table.step] = _Step(table, self._fleet.view())
        self.ask(StepBegan(), table.step)
        step.figures["actors_wanted"] = float(len(set(table.home[table.left].tolist())))

    def end(self, event: StepEnded, number: int) -> None:
        """A step has ended, and the policy is not asked about it any more."""
        self.ask(event, number)
        if number in self._steps:
            self._steps[number].ended = True

    def ask(self, event: Event, number: int) -> None:
        """Asks what to do now, in the step with this number, and does it. Does nothing for a step that has ended, or
        that the policy was not asked about when it began.

        Raises ReplicaLost if samples are left, and no actor is there to draw them or will be.
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
            self._faulted(event, fault)
        self._split_rest(step)

    def _seen(self, step: _Step) -> StepView:
        return step.table.view(step.view, self._fleet.slots(step.table))

    def _carry_out(self, action: Action, step: _Step) -> None:
        """Does what an action says. Raises PolicyFault, and does nothing, if that cannot be done."""
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
            case Release(slot, tier):
                table.assignment.check_release(slot)
                self._fleet.release(slot, tier, table.step)
            case Note(decision):
                self._note(decision)
                if decision.kind == "plan":
                    self._planned(decision, step)

    def _planned(self, decision: Decision, step: _Step) -> None:
        """A step's plan. That no plan can keep the contract is logged when it begins to be so, not at every step."""
        inputs = decision.inputs
        if "step_s" in inputs:
            step.figures["planned_generation_s"] = float(inputs["step_s"])
        feasible = inputs.get("feasible") is not False
        if self._feasible and not feasible:
            what = "step %d: no plan for generation keeps its part of the contract (%s); the nearest is kept: %s"
            log.warning(what, decision.step, inputs["reason"], inputs["nearest"])
        self._feasible = feasible

    def _split_rest(self, step: _Step) -> None:
        """Splits what is unassigned, or waits where no actor will be, evenly: every sample has a slot after this."""
        table = step.table
        for slot in sorted(set(table.home[table.left].tolist()) - {UNASSIGNED}):
            if not self._fleet.expects(slot):
                table.lose(slot)
        if not table.unassigned.size:
            return
        for assign in split_evenly(self._seen(step), table.unassigned):
            table.give(assign.samples, assign.slot)
        if left := table.unassigned.size:
            raise ReplicaLost(f"no generation actor is left for {left} unfinished samples")

    def _faulted(self, event: Event, fault: Exception) -> None:
        self._faults += 1
        if self._faults == 1:
            log.error(
                "the scaling policy failed at %s; samples without a slot are split evenly, there and whenever "
                "it fails again (metric policy_faults)",
                type(event).__name__,
                exc_info=fault,
            )
