"""Whole RLHF steps: sync, generate, score and reference as groups complete, evaluate, learn, publish.

`sync`          the next step's generation begins when the weights of this one are published
`one_step_off`  it begins when this step's generation ends, with the weights of the step before: generation and learning
                overlap, so they must not share a device

Functions that share a slot take turns on it: a service with a slot of a generation actor begins when generation ends.
All others overlap with it, group by group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rlhfless.records import FunctionName, StepRecord, Work
from rlhfless.records.traces import Trace, TraceMeta
from rlhfless.scaling.placement import Seat
from rlhfless.scaling.prices import PriceBook
from rlhfless.sim.fleet import Fleet, Place, Transport
from rlhfless.sim.generation import Generation, Links
from rlhfless.sim.kernel import Floats, Ints
from rlhfless.sim.ledger import Ledger, Replica, version_of
from rlhfless.sim.policy import Policy
from rlhfless.sim.samples import RolloutBatch


@dataclass(frozen=True, slots=True)
class ServiceShape:
    """Scoring, a reward model or the reference: one replica that takes complete groups, first come, first served."""

    function: FunctionName
    work: Work
    seat: Seat
    start_s: float
    group_s: float
    """Per group, whatever its size."""
    token_s: float
    """Per token of prompt and response."""


@dataclass(frozen=True, slots=True)
class LearnerShape:
    """The learner: seconds of a fixed part and per token of prompt and response."""

    seat: Seat
    start_s: float
    fixed_s: float
    evaluate_token_s: float
    """0: one update per batch needs no pass before it."""
    learn_token_s: float
    publish_s: float


@dataclass(frozen=True, slots=True)
class Setup:
    """A fleet and how it is used. Raises ValueError for one_step_off on shared devices."""

    places: tuple[Place, ...]
    services: tuple[ServiceShape, ...]
    learner: LearnerShape
    transport: Transport
    links: Links
    schedule: Literal["sync", "one_step_off"]
    node_s: float
    """Until a node is there that nobody has used yet."""
    seed: int

    def __post_init__(self) -> None:
        if self.schedule == "one_step_off" and self.shares(self.learner.seat):
            raise ValueError("schedule one_step_off overlaps generation and learning; give them devices of their own")

    def shares(self, seat: Seat) -> bool:
        """Whether a generation actor may sit on one of these slots."""
        generation = {slot.name for place in self.places for slot in place.seat.slots}
        return any(slot.name in generation for slot in seat.slots)


class Simulation:
    """A run on the virtual clock, which starts at 0 with an actor starting at every place."""

    def __init__(self, setup: Setup, policy: Policy) -> None:
        self.setup = setup
        self.ledger = Ledger()
        self.fleet = Fleet(setup.places, setup.transport, setup.node_s, self.ledger, np.random.SeedSequence(setup.seed))
        self._policy = policy
        self._services = [self._replica(shape.function, shape.seat, shape.start_s) for shape in setup.services]
        self._learner = self._replica(FunctionName.LEARNER, setup.learner.seat, setup.learner.start_s)
        self._generated_s = 0.0
        self._published_s = [0.0, setup.learner.start_s]
        """When the weights of the last two steps were there."""
        self._steps = 0
        for place in range(len(setup.places)):
            self.fleet.start(place, 0.0)

    def step(self, batch: RolloutBatch, plan: Mapping[int, Ints]) -> tuple[StepRecord, Generation]:
        """One step: `plan` gives each place its samples. Raises what Generation.run raises."""
        off = self.setup.schedule == "one_step_off"
        start_s = max(self._generated_s, self._published_s[-2 if off else -1])
        interrupted = self.fleet.settle(start_s)
        self.fleet.sync(max(self._steps - off, 0), start_s)
        generation = Generation(self.fleet, batch, self._policy, self.setup.links)
        self._generated_s = generation.run(plan, start_s, interrupted)
        ready_s = self._serve(generation)
        end_s = self._learn(batch, max(ready_s, self._published_s[-1]))
        self._published_s = [self._published_s[-1], end_s]
        self._steps += 1
        table = generation.progress.table
        metrics = {
            "generation_s": self._generated_s - start_s,
            "response_tokens": float(table.tokens.sum()),
            "responses": float(batch.samples),
        }
        record = StepRecord(batch.step, start_s, end_s, metrics)
        self.ledger.steps.append(record)
        return record, generation

    def close(self, prices: PriceBook) -> Trace:
        """Ends the run, gives everything back, and returns what happened, without a row per response."""
        end_s = max(self._generated_s, self._published_s[-1])
        self.fleet.settle(end_s)
        self.fleet.close(end_s)
        for replica in (*self._services, self._learner):
            replica.end(max(end_s, replica.life.since_s))
        meta = TraceMeta("simulated", 1, prices.snapshot(), {}, {})
        ledger = self.ledger
        return Trace(meta, tuple(ledger.holdings), tuple(ledger.invocations), steps=tuple(ledger.steps))

    def _serve(self, generation: Generation) -> float:
        """Scores and reference logprobs of all groups. Returns when all are there."""
        batch, table = generation.progress.batch, generation.progress.table
        complete_s = np.zeros(batch.groups)
        np.maximum.at(complete_s, batch.group, table.finish_s)
        tokens = np.bincount(batch.group, table.prompt + table.target, minlength=batch.groups)
        ends_s = [self._generated_s]
        for shape, replica in zip(self.setup.services, self._services, strict=True):
            earliest_s = max(shape.start_s, self._generated_s if self.setup.shares(shape.seat) else 0.0)
            order = np.argsort(complete_s, kind="stable")
            arrival_s = np.maximum(complete_s[order], earliest_s)
            service_s = np.asarray(shape.group_s + shape.token_s * tokens, dtype=np.float64)[order]
            spans = first_come_first_served(arrival_s, service_s)
            for start_s, end_s in spans:
                replica.called(shape.work, batch.step, start_s, end_s)
            ends_s.append(spans[-1][1])
        return max(ends_s)

    def _learn(self, batch: RolloutBatch, ready_s: float) -> float:
        """Evaluate, learn, publish, from `ready_s` on. Returns when the weights are published."""
        shape = self.setup.learner
        tokens = int(batch.prompt_tokens[batch.group].sum() + batch.response_tokens.sum())
        now_s = max(ready_s, shape.start_s)
        for work, spent_s in (
            (Work.EVALUATE, shape.evaluate_token_s * tokens),
            (Work.LEARN, shape.fixed_s + shape.learn_token_s * tokens),
            (Work.PUBLISH, shape.publish_s),
        ):
            if spent_s > 0:
                self._learner.called(work, batch.step, now_s, now_s + spent_s)
            now_s += spent_s
        return now_s

    def _replica(self, function: FunctionName, seat: Seat, start_s: float) -> Replica:
        replica = Replica(self.ledger, function, str(function), seat, 0.0)
        replica.serve(version_of(0), start_s)
        return replica


def first_come_first_served(arrival_s: Floats, service_s: Floats) -> list[tuple[float, float]]:
    """When one server works, as disjoint spans: jobs that follow each other without a pause are one.

    `arrival_s` ascends. The end of job i is the largest, over j <= i, of arrival j plus all service from j to i.
    """
    before_s = np.cumsum(service_s) - service_s
    start_s = np.maximum.accumulate(arrival_s - before_s) + before_s
    end_s = start_s + service_s
    opens = np.concatenate([[True], arrival_s[1:] > end_s[:-1]])
    closes = np.concatenate([opens[1:], [True]])
    return list(zip(start_s[opens].tolist(), end_s[closes].tolist(), strict=True))
