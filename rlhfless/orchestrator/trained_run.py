"""The parts of a run that do not depend on what it learns from: pools of functions, checkpoints, the ledger."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlhfless.fleet.pool import ReplicaPool
from rlhfless.fleet.replica import Replica
from rlhfless.functions.base import Call
from rlhfless.orchestrator.keepers import Keepers
from rlhfless.orchestrator.ledger import Ledger
from rlhfless.orchestrator.step_context import StepClock
from rlhfless.prepare.prompt_order import PromptOrder
from rlhfless.records import Decision, FunctionRole, Prompt, StepRecord, Work
from rlhfless.records.checkpoints import CheckpointNotes, Checkpoints
from rlhfless.records.journal import Journal
from rlhfless.scaling.placement import Allocation
from rlhfless.spec import RunSpec
from rlhfless.telemetry.sinks import MetricSinks

log = logging.getLogger(__name__)


class ElasticLearner(Protocol):
    """The number of a learner's ranks, where it may change: see rlhfless.orchestrator.learner_size."""

    def resume(self, decisions: Sequence[Decision]) -> None: ...

    def keeping_devices(self) -> AbstractAsyncContextManager[None]: ...

    async def after_fault(self, step: int) -> None: ...

    async def larger(self) -> Allocation | None: ...

    async def change(self, step: int, allocation: Allocation, save: Callable[[], Awaitable[None]]) -> None: ...


@dataclass(kw_only=True)
class TrainedRun:
    """A run in progress."""

    run_id: str
    attempt: int
    spec: RunSpec
    order: PromptOrder
    held_out: Sequence[Prompt]
    pools: Mapping[str, ReplicaPool]
    """By name: the replicas of each function of this run."""
    ledger: Ledger
    sinks: MetricSinks
    journal: Journal
    checkpoints: Checkpoints
    before: Mapping[str, float] = field(default_factory=dict)
    """Held-out figures before the first step."""
    latest: dict[str, float] = field(default_factory=dict)
    """The metrics that were measured last, by name."""
    evaluated: int = -1
    """The step of the last evaluation."""
    clock: StepClock = field(default_factory=StepClock)
    keepers: Keepers = field(init=False)
    learner_size: ElasticLearner | None = None
    """How many ranks the learner has, where that may change."""

    def __post_init__(self) -> None:
        self.keepers = Keepers(self.with_role(FunctionRole.UPDATES), self.spec, self.work)

    def with_role(self, *roles: FunctionRole) -> tuple[ReplicaPool, ...]:
        """The pools of the functions with one of these roles."""
        return tuple(pool for pool in self.pools.values() if pool.kind.role in roles)

    @property
    def learner(self) -> ReplicaPool:
        """See Keepers.publisher."""
        return self.keepers.publisher

    @property
    def _the_learner(self) -> Replica:
        return self.keepers.replica(self.learner)

    @property
    def helpers(self) -> tuple[ReplicaPool, ...]:
        """The pools of functions that work on complete groups, and are idle between two steps."""
        return self.with_role(FunctionRole.SCORES, FunctionRole.COLUMN)

    def call(self, step: int) -> Call:
        """The identity that all calls of a step carry."""
        return Call(self.run_id, self.attempt, step)

    async def work(  # type: ignore[no-untyped-def]
        self, replica: Replica, work: Work, method: str, call: Call, *arguments: object, **keywords: Any
    ):
        """A call of a function, in its turn."""
        calls = 2 if work is Work.PUBLISH else 1  # the call may first wait for `learn`
        async with self.pools[replica.function].turn(call):
            return await replica.call(
                method,
                call,
                *arguments,
                **keywords,
                timeout_s=calls * self.spec.timeouts.call_s,
                waiting_for=f"{work} of step {call.step}",
                work=work,
            )

    # -- checkpoints

    async def checkpoint(self, step: int, begun: asyncio.Event) -> None:
        """Save the state after `step`, with everything that a resumed run needs. `begun` is set when the functions are
        free for the next step. Raises CheckpointError."""
        notes = self._notes(step)
        self.clock.interrupt()
        self.ledger.write(self.pools.values())  # a resumed run does not do these steps again
        call = self.call(step)
        writing = await self.keepers.checkpoint(call, self.checkpoints, notes)
        begun.set()
        await self.keepers.wait_written(writing, call)
        self.checkpoints.prune()
        self.journal.forget(step)

    def _notes(self, step: int) -> CheckpointNotes:
        """The notes of a checkpoint after `step`."""
        return CheckpointNotes(
            run_id=self.run_id,
            attempt=self.attempt,
            step=step,
            digest="",
            score=self.score(step),
            before=self.before,
            metric=self.spec.checkpoint.best.metric,
            parts=self.keepers.parts,
        )

    def score(self, step: int) -> float | None:
        """The value of `checkpoint.best.metric` after `step`; None if it was not measured then."""
        best = self.spec.checkpoint.best
        if best.of_evaluations and self.evaluated != step:
            return None
        return self.latest.get(best.metric)

    def improves(self, step: int) -> bool:
        """Whether the evaluation after `step` has a better score than every checkpoint."""
        best, score = self.spec.checkpoint.best, self.score(step)
        if not best.save or not best.of_evaluations or score is None or math.isnan(score):
            return False
        saved = [self.checkpoints.score(each.notes) for each in self.checkpoints.all()]
        return all(score < each if best.mode == "min" else score > each for each in saved if each is not None)

    async def restore(self) -> int:
        """Go on from the newest checkpoint, or the initial models if there is none; returns its step."""
        newest = self.checkpoints.newest()
        step = newest.notes.step if newest else 0
        await self.keepers.restore(self.call(step), self.checkpoints, newest)
        if newest is not None:
            self.before = newest.notes.before
        return step

    async def open_weights(self, step: int) -> None:
        """Do what the functions need after the learner has been given the weights of `step`."""

    @property
    def digest(self) -> str:
        """The digest of the newest weights; empty in a run that publishes none."""
        return ""

    async def publish_again(self, before: int) -> None:
        """Have the learner write damaged or missing weight files again, of the step before `before`: they may be the
        cause of a fault."""

    async def move_keepers(self) -> None:
        """Start the functions with state whose node leaves on another node, from the newest checkpoint."""
        await self.keepers.stop_leaving()
        await self.open_weights(await self.restore())

    # -- ledger

    def _close(self, record: StepRecord, samples: Mapping[str, Sequence[float]]) -> None:
        """Put the step into the ledger, and show its figures."""
        self.latest.update(record.metrics)
        others_since_s = self.clock.end(record.step, record.end_s)
        if not self.ledger.has_step(record.step):
            self.ledger.add_step(record, others_since_s)
            self.sinks.emit(record.step, record.metrics, samples)
            warn_of_skipped_updates(record)
        self.ledger.catch_up(self.pools.values())


def warn_of_skipped_updates(record: StepRecord) -> None:
    """A run without finite gradients goes on, and learns nothing: nobody should find that out at its end."""
    for prefix, section in (("", "optimizer"), ("critic_", "critic.optimizer")):
        if skipped := record.metrics.get(f"{prefix}skipped_updates"):
            what = "step %d: %d update(s) were left out, as the gradient was not finite; try a lower %s.learning_rate"
            log.warning(what, record.step, skipped, section)
