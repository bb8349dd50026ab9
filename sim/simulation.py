"""Run whole RLHF steps: sync, generate, score and reference as groups complete, evaluate, learn, publish.

A service or the learner without a replica is started when it gets work: a service at its first complete group, the
learner when all services have finished the step. Only the policy starts generation actors. Functions that share a
device take turns on it: a turn ends when the function has no work left in its phase and another function has some.

The policy is asked at every event of `rlhfless.scaling.policy`; heartbeats come while samples are generated. Where
steps overlap, the events of a step's services and learner arrive while the next step is generated; their views show
their own step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rlhfless.records import FunctionName, ReplicaState
from rlhfless.records.traces import Trace
from rlhfless.scaling.assignment import PolicyFault
from rlhfless.scaling.policy import (
    Action,
    Assign,
    Event,
    Generated,
    Heartbeat,
    Idle,
    Lost,
    Move,
    Note,
    Policy,
    Release,
    Serving,
    Start,
    StepBegan,
    StepEnded,
)
from rlhfless.scaling.prices import PriceBook
from rlhfless.sim.events import SpotInterrupted, Up, WeightsLoaded, Worked
from rlhfless.sim.fleet import SimulatedFleet, SimulationError
from rlhfless.sim.generation import Generation, SharedEngines
from rlhfless.sim.ledger import SimulatedLedger, SimulatedReplica
from rlhfless.sim.samples import RolloutBatch
from rlhfless.sim.service_work import StepUnderWay, learn, take, update
from rlhfless.sim.setup import Setup
from rlhfless.sim.view import Window, fleet_view, with_waits

MAX_IDLE_QUERIES, MAX_QUERIES = 1_000, 100_000
"""Limits on consecutive policy queries without engine work in between: with no due event, and with one (a policy that
starts and releases replicas in a loop)."""


LOOKS, LOOK_S = 32, 0.001
"""A run notices at once that a step has enough complete groups to learn from. The simulator checks up to LOOKS times
between two events, at intervals of at least LOOK_S, so no more often than an engine ends an iteration."""


class Simulation:
    """A run on the virtual clock, which starts at 0 without replicas."""

    def __init__(self, setup: Setup, policy: Policy, prices: PriceBook) -> None:
        self.setup = setup
        self.ledger = SimulatedLedger()
        self.fleet = SimulatedFleet(setup, self.ledger, self._idle)
        self.now_s = 0.0
        self._policy = policy
        self._prices = prices
        self._fleet_view = fleet_view(setup, prices)
        first = len(setup.actors)
        self._services = dict(enumerate(setup.services, first))
        self._learner = first + len(setup.services)
        self._steps: list[StepUnderWay] = []
        """Steps in progress, oldest first; the last is being generated, or was generated last."""
        self._shared: SharedEngines | None = None
        """The engines of a run that generates several steps at once, loading weights during generation."""
        self._begun = self._learned = 0
        self._heartbeat_s = 0.0
        self._drawn_s = -math.inf
        """The time up to which the current step has been generated."""
        self._queries_without_progress = 0
        """Queries of the policy since an engine or a service last worked."""

    def step(self, batch: RolloutBatch) -> Generation:
        """Generate the samples of a step, and run until the next step may start.

        That is the end of this step or, with N steps ahead, the end of the step N steps earlier.

        Raises SimulationError for a fault of the policy (rlhfless.scaling.assignment), or one that leaves a replica
        waiting forever; ValueError for a response beyond `max_tokens`.
        """
        longest = int(batch.response_tokens.max(initial=0))
        if longest > self.setup.max_tokens:
            raise ValueError(
                f"step {batch.step} has a response of {longest} tokens, above max_tokens ({self.setup.max_tokens})"
            )
        if not self._begun:
            self.fleet.bring_up()
            while self.fleet.agenda.next_s <= self.now_s:
                self._handle_next()
        off = self.setup.schedule.steps_ahead
        if not self._drawn:  # otherwise actors load weights while they generate
            newest = self._learned if self.setup.schedule.in_flight else 0
            self.fleet.require_weights(max(self._begun - off, newest), self.now_s)
        self._begun += 1
        under_way = self._begin(batch)
        while len(self._steps) > off or (under_way.generated_s is None and self._shared is None):
            self._advance()
        return under_way.generation

    def reserve(self, batches: Sequence[RolloutBatch]) -> None:
        """Reserve room for steps as large as the largest of these.

        If steps are generated at once, call it before the first step, unless no later step is larger.
        """
        if self.setup.schedule.in_flight and self.setup.schedule.steps_ahead:
            samples = max(batch.samples for batch in batches)
            nodes = max(batch.groups + len(batch.tree) for batch in batches)
            self._shared = SharedEngines(self.setup.actors, self.setup.schedule.steps_ahead + 1, samples, nodes)

    @property
    def _drawn(self) -> list[StepUnderWay]:
        """The steps that are being generated, oldest first."""
        return [step for step in self._steps if step.generated_s is None]

    @property
    def _current(self) -> list[StepUnderWay]:
        """The steps that are being generated, or the last generated step."""
        return self._drawn or self._steps[-1:]

    def close(self) -> Trace:
        """End the run, release all replicas, and return the trace, without a row per response."""
        while self._steps:
            self._advance()
        self.fleet.close(self.now_s)
        return self.ledger.trace(self._prices, self.fleet.beside(), self.setup.learner.paid_around)

    def _begin(self, batch: RolloutBatch) -> StepUnderWay:
        if self._shared is None:
            self.reserve([batch])
        generation = Generation(self.fleet, batch, self.now_s, self._shared)
        window = Window(with_waits(self._fleet_view, self.fleet, self.now_s), self.fleet, generation)
        groups = generation.progress.whole.groups
        taken = {slot: np.zeros(groups, dtype=np.bool_) for slot in self._services}
        passes = {shape.function: 1 + shape.epochs for shape in self._services.values() if shape.learns}
        passes[FunctionName.LEARNER] = self.setup.learner.epochs
        under_way = StepUnderWay(self._begun, generation, window, self.now_s, taken, passes=passes)
        self._steps.append(under_way)
        self._query([StepBegan()], under_way)
        self.fleet.drawing = True
        self.fleet.wake_actors(self.now_s)
        self.fleet.sync(self.now_s)
        self._heartbeat_s = self.now_s + self.setup.links.heartbeat_s
        self._drawn_s = -math.inf
        return under_way

    def _advance(self) -> None:
        drawn = self._drawn
        until_s = max(self.now_s, min(self.fleet.agenda.next_s, self._heartbeat_s if drawn else math.inf))
        if math.isinf(until_s):
            raise SimulationError(self.fleet.stuck() or "nothing works, and nothing is due")
        if not (drawn and self._draw(drawn, until_s)):
            self.now_s = until_s
            if self.fleet.agenda.next_s <= until_s:
                self._handle_next()
            elif drawn:
                self._heartbeat_s = until_s + self.setup.links.heartbeat_s
                for step in drawn:
                    self._query([Heartbeat()], step)
        self._start_needed()

    def _draw(self, drawn: Sequence[StepUnderWay], until_s: float) -> bool:
        """Advance generation to `until_s`. If a step's generation ended, set the clock to its end and return True."""
        if until_s > self._drawn_s:  # work that starts at an instant ends no iteration in it
            until_s = self._drawn_s = self._drawn_until(drawn[-1].generation, until_s)
            self._start_needed()
        first = min(drawn, key=lambda step: math.inf if step.generation.unfinished else step.generation.end_s)
        return self._end_draw(first, until_s)

    def _drawn_until(self, generation: Generation, until_s: float) -> float:
        """Advance generation to `until_s`, or until a step that defers groups has enough; return the time reached."""
        looks, at_s = 1, self.now_s
        if generation.progress.batch.selected is not None:
            looks = max(min(LOOKS, int((until_s - at_s) / LOOK_S)), 1)
        for look in range(1, looks + 1):
            at_s = until_s if look == looks else self.now_s + look / looks * (until_s - self.now_s)
            generation.advance(at_s)
            if looks > 1 and generation.progress.has_enough:
                break
        return at_s

    def _end_draw(self, current: StepUnderWay, until_s: float) -> bool:
        """End the generation of a step if it has ended by `until_s`, and return whether it has."""
        generation = current.generation
        if generation.progress.has_enough:
            end_s = generation.hand_back(until_s)
        elif generation.unfinished or generation.end_s > until_s:
            return False
        else:
            end_s = generation.end_s
        self.now_s = current.generated_s = max(self.now_s, end_s)
        self.fleet.drawing = bool(self._drawn)
        generation.close()
        for slot in self._services:
            self._take(slot)
        if not self._services:
            current.ready_s = self.now_s
        self._query([Generated()], current)
        self.fleet.pass_turns(self.now_s)
        return True

    def _handle_next(self) -> None:
        at_s, event = self.fleet.agenda.pop()
        if isinstance(event, Worked):
            self._worked(event)
        elif isinstance(event, SpotInterrupted):
            self._interrupted(at_s, event)
        elif isinstance(event, WeightsLoaded):
            self._loaded(at_s, event)
        elif self.fleet.handle(at_s, event) and isinstance(event, Up) and event.slot in self._services:
            self._take(event.slot)
        self.fleet.pass_turns(self.now_s)

    def _loaded(self, at_s: float, event: WeightsLoaded) -> None:
        """Let all actors that loaded the weights at one instant serve before the policy gets the first event."""
        loaded = [event, *self.fleet.agenda.pop_like(at_s, WeightsLoaded)]
        up = [event.slot for event in loaded if self.fleet.handle(at_s, event)]
        for current in self._current:
            for slot in up:
                current.generation.serving(slot, at_s)
            self._query([Serving(slot) for slot in up], current)

    def _idle(self, slot: int) -> bool:
        """Return whether the function of a slot has no work left in its phase."""
        if slot == self._learner:
            return not any(step.learning for step in self._steps)
        if slot in self._services:
            return not any(step.wants(slot) or slot in step.updating for step in self._steps)
        return not self.fleet.drawing

    def _worked(self, event: Worked) -> None:
        self._queries_without_progress = 0
        under_way = next(step for step in self._steps if step.number == event.step)
        if event.slot in under_way.updating:
            under_way.updating.remove(event.slot)
            under_way.updated.add(event.slot)
            under_way.ready_s = self.now_s
            return
        if event.slot != self._learner:
            under_way.served.add(event.slot)
            if len(under_way.served) == len(self._services):
                under_way.ready_s = self.now_s
            self._query([Idle(event.slot)], under_way)
            return
        self.ledger.steps.append(under_way.record(self.now_s))
        self._query([Idle(event.slot)], under_way)
        self._query([StepEnded(under_way.begun_s, self.now_s)], under_way)
        self._steps.remove(under_way)
        under_way.generation.give_back()
        self._learned = under_way.number
        if self.setup.schedule.in_flight and self._drawn:
            self.fleet.load_in_flight(self._learned, self.now_s, self._reload)
            self.fleet.sync(self.now_s)

    def _reload(self, slot: int, at_s: float, load_s: float) -> float:
        """Load weights into an actor while it generates samples of all steps; return when the load starts."""
        return max(step.generation.reload(slot, at_s, load_s) for step in self._drawn)

    def _interrupted(self, at_s: float, event: SpotInterrupted) -> None:
        replica = self.fleet.replicas.get(event.slot)
        if replica is None or replica.number != event.life:
            return
        steps = self._current
        lost = [step.generation.lost(event.slot, at_s) for step in steps]
        self.fleet.handle(max(ended_s for ended_s, _ in lost), event)
        for step, (_, samples) in zip(steps, lost, strict=True):
            self._query([Lost(event.slot, samples)], step)

    def _start_needed(self) -> None:
        """Start the services and the learner that have work but no replica, and give work to a running learner.

        The learner has work once all services have finished a step.
        """
        for slot in self._services:
            if not self.fleet.awake_or_asked(slot):
                since_s = [step.first_s(slot) for step in self._steps if step.wants(slot)]
                if since_s:
                    self.fleet.start(slot, max(min(since_s), self.now_s))
        first = self._steps[0] if self._steps else None
        if first is None or first.ready_s is None or first.learning or self._update_services(first):
            return
        if not self.fleet.awake_or_asked(self._learner):
            self.fleet.start(self._learner, self.now_s)
        elif self.fleet.state(self._learner) is ReplicaState.SERVING:
            replica = self.fleet.replicas[self._learner]
            forward = self.setup.prefixes.forward
            learn(self.setup.learner, replica, first, max(first.ready_s, self._learner_back_s(replica)), forward)
            first.learning = True
            self.fleet.agenda.add(replica.busy_s, Worked(self._learner, first.number))

    def _learner_back_s(self, replica: SimulatedReplica) -> float:
        """Return when the learner can start.

        It can start at once if it keeps its devices, else after it has stored and restored its state. That happens
        during generation, and costs time only where generation is shorter.
        """
        around = self.setup.learner.paid_around
        return replica.busy_s + (sum(around) if around is not None and self._learned else 0.0)

    def _update_services(self, step: StepUnderWay) -> bool:
        """Return whether a learning service, such as a critic, still has to update; start its update if possible."""
        for slot, shape in self._services.items():
            if not shape.learns or slot in step.updated:
                continue
            if not self.fleet.awake_or_asked(slot):
                self.fleet.start(slot, self.now_s)
            elif self.fleet.state(slot) is ReplicaState.SERVING and slot not in step.updating:
                replica, parts = self.fleet.replicas[slot], self.setup.learner.parts
                update(shape, replica, step, max(self.now_s, replica.busy_s), parts, self.setup.prefixes.forward)
                step.updating.add(slot)
                self.fleet.agenda.add(replica.busy_s, Worked(slot, step.number))
            return True
        return False

    def _take(self, slot: int) -> None:
        """Give all complete groups to a running service.

        With the last group of a step, the end of its work is known and scheduled.
        """
        serves = self.fleet.state(slot) is ReplicaState.SERVING
        for step in self._steps:
            if serves:
                forward = self.setup.prefixes.forward
                take(self._services[slot], slot, self.fleet.replicas[slot], step, forward)
            if step.generated_s is not None and step.foresee(slot):
                end_s = max(step.done_s[slot], self.now_s)
                self.fleet.agenda.add(end_s, Worked(slot, step.number))

    def _query(self, events: Sequence[Event], under_way: StepUnderWay) -> None:
        """Send the policy the events of one instant, and carry out its answer to each."""
        view = under_way.window.view()
        for event in events:
            if isinstance(event, Serving) and view.slots[event.slot].state is not ReplicaState.SERVING:
                continue  # the answer to an earlier event released it
            self._check_progress(under_way)
            answer = self._policy.decide(self.now_s, event, view)
            try:
                self._carry_out(answer, event, under_way)
            except PolicyFault as fault:
                raise SimulationError(str(fault)) from fault
            if answer:
                view = under_way.window.view()

    def _check_progress(self, under_way: StepUnderWay) -> None:
        """Raise SimulationError after too many queries of the policy without engine work in between."""
        self._queries_without_progress += 1
        due = math.isfinite(self.fleet.agenda.next_s)
        if self._queries_without_progress <= (MAX_QUERIES if due else MAX_IDLE_QUERIES):
            return
        if under_way.generation.working:
            self._queries_without_progress = 0
            return
        left = under_way.generation.unfinished
        raise SimulationError(
            self.fleet.stuck() or f"{left} samples are left, and no actor serves or will; Start one and give it samples"
        )

    def _carry_out(self, answer: Sequence[Action], event: Event, under_way: StepUnderWay) -> None:
        """Carry out an answer, and check the resulting state. Raises PolicyFault, SimulationError."""
        generation = under_way.generation
        kept = set[int]()
        for action in answer:
            if isinstance(action, Release) and self._others_draw_at(action.slot, under_way):
                kept.add(action.slot)
            elif not (isinstance(action, Start) and action.slot in kept):
                self._do(action, under_way)
        if isinstance(event, StepBegan | Lost):
            generation.assignment.check_assigned()
        generation.assignment.check_served(answer, self.fleet.expects)

    def _others_draw_at(self, slot: int, under_way: StepUnderWay) -> bool:
        """Return whether an actor has samples of other steps that are generated at once, so that it must stay."""
        others = [] if self._shared is None else [step for step in self._current if step is not under_way]
        return any(step.generation.draws_at(slot) for step in others)

    def _do(self, action: Action, under_way: StepUnderWay) -> None:
        if isinstance(action, Note):
            self.ledger.decisions.append(action.decision)
        elif isinstance(action, Assign):
            under_way.generation.assign(action, self.now_s)
        elif isinstance(action, Move):
            under_way.generation.move(action, self.now_s)
        elif isinstance(action, Release):
            self._release(action)
        elif action.at_s is None or action.at_s <= self.now_s:
            self.fleet.start(action.slot, self.now_s)
        else:
            self.fleet.start_later(action.slot, action.at_s)

    def _release(self, release: Release) -> None:
        actors = range(len(self.setup.actors))
        if release.slot in actors and sum(map(self.fleet.expects, actors)) <= self.setup.fewest_actors:
            return
        if release.slot in self._services:
            self._take(release.slot)
        elif release.slot != self._learner:
            for step in self._current:
                step.generation.leave(release.slot)
        self.fleet.release(release.slot, self.now_s)
