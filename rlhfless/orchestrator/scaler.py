"""The scaling policy of a run: pass events of the run to the policy, and carry out its actions.

The simulator runs the same policies on a virtual clock; `rlhfless.scaling.assignment` decides for both which actions
are refused. A policy fault stops the simulator, but must not stop a run: actions before the fault stay in effect,
samples without a slot are split evenly, and the policy is asked again at the next event. The first fault is logged with
its traceback, and all are counted. In a resumed run the policy has seen all response lengths in the trace."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rlhfless.fleet.replica import ReplicaLost
from rlhfless.orchestrator.fleet_slots import FleetFigures, FleetSlots
from rlhfless.orchestrator.prompt_kv import PrefillActors
from rlhfless.orchestrator.stage_samples import AssignedSamples
from rlhfless.records import Decision, ReplicaState, StepRecord, Work
from rlhfless.scaling.latency.fitted import EngineSpeeds
from rlhfless.scaling.policies.contract import CheapestUnderDeadline, RunContract, contract_for_step
from rlhfless.scaling.policy import (
    Action,
    Answered,
    Assign,
    Event,
    FleetView,
    Idle,
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
from rlhfless.util.clock import unix_s

log = logging.getLogger(__name__)

UP = (ReplicaState.STALE, ReplicaState.SERVING)
"""States of an actor that serves, or will serve once it has loaded the step's weights."""


@dataclass(slots=True)
class _Step:
    """A step in progress: the policy's view of it, and its metrics."""

    table: AssignedSamples
    view: FleetView
    """The fleet at the start of the step."""
    figures: dict[str, float] = field(default_factory=lambda: {"moved_samples": 0.0})
    ended: bool = False


class PolicyRunner:
    """Runs one policy for a run or a stage. Several steps can be in progress."""

    def __init__(
        self,
        policy: Policy,
        fleet: FleetSlots,
        note: Callable[[Decision], None],
    ) -> None:
        self._policy = policy
        self._fleet = fleet
        self._note = note
        self._feasible = True
        self._steps: dict[int, _Step] = {}
        self._faults = 0

    def figures(self, step: int) -> Mapping[str, float]:
        """Return the metrics of a step; empty if the policy was not asked about it."""
        asked = self._steps.get(step)
        if asked is None:
            return {}
        return {**asked.figures, **asked.table.replayed.figures(), "policy_faults": float(self._faults)}

    def begin(self, table: AssignedSamples) -> None:
        """Start a step, and ask the policy for its plan. Raises as `ask`."""
        self._steps = {number: known for number, known in self._steps.items() if not known.ended}
        step = self._steps[table.step] = _Step(table, self._fleet.view())
        if (prefixes := table.prefixes_decision(unix_s())) is not None:
            self._note(prefixes)
        self.ask(StepBegan(), table.step)
        step.figures["actors_wanted"] = float(len(table.assignment.occupied))

    def end(self, event: StepEnded, number: int) -> None:
        """End a step: send the policy the event, and never ask about the step again."""
        self.ask(event, number)
        if (step := self._steps.get(number)) is not None:
            if step.table.replayed.tokens and not step.ended:
                self._note(step.table.replayed.decision(number, unix_s()))
            step.ended = True

    def ask(self, event: Event, number: int) -> None:
        """Ask the policy about an event in a step, and carry out its actions. Does nothing if the step has ended or was
        never started.

        Raises ReplicaLost if samples are unfinished and no actor is up or starting.
        """
        step = self._steps.get(number)
        if step is None or step.ended:
            return
        table = step.table
        try:
            answer = self._policy.decide(unix_s(), event, self._seen(step))
            for action in answer:
                self._carry_out(action, step)
            if isinstance(event, Answered):
                self._hand_back(event, step)
            if any(map(self._fleet.expects, range(table.assignment.slots))):
                table.assignment.check_assigned()
            table.assignment.check_served(answer, self._fleet.expects)
        except Exception as fault:
            self._count_fault(event, fault)
        self._split_rest(step)

    def _seen(self, step: _Step) -> StepView:
        return step.table.view(step.view, self._fleet.slots(step.table))

    def _carry_out(self, action: Action, step: _Step) -> None:
        """Carry out an action. Raises PolicyFault if it is refused; it then has no effect."""
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
        """Record a step's plan. Warn only at the first step of a row in which the contract is infeasible."""
        inputs = decision.inputs
        if "step_s" in inputs:
            step.figures["planned_generation_s"] = float(inputs["step_s"])
        feasible = inputs.get("feasible") is not False
        if self._feasible and not feasible:
            what = "step %d: no plan for generation keeps its part of the contract (%s); the nearest is kept: %s"
            log.warning(what, decision.step, inputs["reason"], inputs["nearest"])
        self._feasible = feasible

    def _hand_back(self, answered: Answered, step: _Step) -> None:
        """Let samples return to the slots that they had before they were parked. If no actor is up or starting, start
        one there."""
        table = step.table
        rest = np.isin(answered.samples, table.unassigned)
        for slot in np.unique(answered.slots[rest]).tolist():
            if not any(map(self._fleet.expects, range(table.assignment.slots))):
                self._fleet.start(slot, None, table.step)
            if self._fleet.expects(slot):
                table.give(answered.samples[rest & (answered.slots == slot)], slot)
        for assign in split_evenly(self._seen(step), table.unassigned):
            table.give(assign.samples, assign.slot)

    def _split_rest(self, step: _Step) -> None:
        """Split samples without a slot, or whose slot expects no actor, evenly over the actors."""
        table = step.table
        for slot in table.assignment.occupied:
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
                "the scaling policy failed at %s; unassigned samples are split evenly, then and whenever "
                "it fails again (metric policy_faults)",
                type(event).__name__,
                exc_info=fault,
            )


class EvenSplit:
    """A policy without forecasts, for evaluations. It assigns each prompt, new or lost, to the actor with the fewest
    samples, and moves half the difference from the busiest actor to an actor that joins.

    It starts and releases no actors, and assigns samples to starting actors only if none is up.
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
    """Assign samples to the actors that are up, prompt by prompt, each to the actor with the fewest samples.

    If no actor is up, the first starting actor gets all samples. If none is starting, the result is empty.
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
    # Take the last samples: siblings have consecutive numbers, so these are mostly whole groups.
    return [Move(busiest, joined, view.samples_at(busiest)[-lead:])] if lead > 0 else []


def _slots(view: StepView, *states: ReplicaState) -> list[int]:
    return [slot for slot in view.fleet.generation() if view.slots[slot].state in states]


class StepDue:
    """The deadline of the step in progress under the run's contract. It orders the turns of runs that share devices."""

    def __init__(self, run: RunContract) -> None:
        self._run = run
        self._first_s = self._began_s = unix_s()
        self._steps = 0

    def end_step(self, end_s: float) -> None:
        """Record the end of a step, which is the start of the next one."""
        self._steps, self._began_s = self._steps + 1, end_s

    def left_s(self) -> float:
        """Return the seconds until the deadline: negative if late, infinite without a deadline."""
        spec, left = self._run.of_step(self._steps), self._run.steps_left(self._steps)
        contract = contract_for_step(spec, steps_left=left, spent_s=self._began_s - self._first_s)
        if not isinstance(contract, CheapestUnderDeadline):
            return math.inf
        return self._began_s + contract.deadline_s - unix_s()


class Scaler:
    """Runs the policy for training steps, and splits evaluations evenly."""

    def __init__(
        self,
        policy: Policy,
        fleet: FleetSlots,
        speeds: EngineSpeeds | None,
        ledger: FleetFigures,
        due: StepDue,
        prefill: PrefillActors | None = None,
    ) -> None:
        """`speeds`: None if the speeds of the engines are known, as in a simulation."""
        self.due = due
        self.prefill = prefill
        """The prefill actors, if the spec allows any."""
        self.runner = PolicyRunner(policy, fleet, ledger.add_decision)
        """The runner for training steps."""
        self.fleet = fleet
        self._speeds = speeds
        self._ledger = ledger

    def runner_of(self, step: int, work: Work) -> PolicyRunner:
        """Return the runner that assigns the samples of a stage. Evaluations are split evenly, so that the policy
        learns no lengths from them, and so are steps that are already in the trace, whose lengths it has seen."""
        if work is Work.GENERATE and not self._ledger.has_rollouts_of(step):
            return self.runner
        return self.even_split()

    def even_split(self) -> PolicyRunner:
        """Return a runner that splits samples evenly. A step's redraws use it too: the policy plans a step once."""
        return PolicyRunner(EvenSplit(), self.fleet, self._ledger.add_decision)

    def idle(self, function: str, step: int) -> None:
        """Tell the policy that a function's replicas have finished their work in a step."""
        for slot in self.fleet.slots_of(function):
            self.runner.ask(Idle(slot), step)
            self.fleet.idle(slot, step)

    def learn_speeds(self, step: int) -> None:
        """Update the engines' speeds from a step whose rollouts are in the ledger."""
        if self._speeds is not None and self.runner.figures(step):
            self._speeds.learn(*self._ledger.done_in_step(step), self.fleet.kinds())

    def end_step(self, record: StepRecord) -> None:
        """End a step, for the policy and the deadline."""
        self.runner.end(StepEnded(record.resumed_s, record.end_s), record.step)
        self.due.end_step(record.end_s)
