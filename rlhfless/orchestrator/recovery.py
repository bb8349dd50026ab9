"""Recover from faults: replace lost replicas, and choose the step to continue from.

A failed step is repeated. This is cheap and does not change its result: finished rollouts come from the journal,
learner and critic repeat their replies for a step that they have already learned, and the ledger counts a step once. If
learner or critic is lost, both restart from the newest checkpoint, and later steps are learned again from the
journal."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from rlhfless.fleet.pool import RECOVERABLE
from rlhfless.functions.calls import Call
from rlhfless.orchestrator.base_run import BaseRun
from rlhfless.records import Decision
from rlhfless.util.clock import unix_s
from rlhfless.util.tasks import gather_or_cancel, is_stopping
from rlhfless.util.text import legible

log = logging.getLogger(__name__)


async def clear(run: BaseRun, call: Call) -> None:
    """Find lost replicas, and free their devices."""
    await gather_or_cancel(*(pool.probe_all(call) for pool in run.pools.values()))
    await gather_or_cancel(*(pool.remove_dead() for pool in run.pools.values()))


@dataclass(frozen=True, slots=True)
class Recovered:
    """The losses of one attempt, and the steps repeated because of them."""

    replicas_lost: int
    """Replicas that died, hung or restarted while the run needed them."""
    steps_again: int
    """Repeated steps: failed ones, and earlier ones that a new learner had to learn again. The loss of an actor repeats
    no step if its samples continued on other actors."""


class Recovery:
    """Recovers a run from faults, a bounded number of times per step."""

    def __init__(self, run: BaseRun) -> None:
        self._run = run
        self._step = 0
        self._count = 0
        self._steps_again = 0

    @property
    def recovered(self) -> Recovered:
        """The recoveries so far. The fault that stops a run does not count; faults during a recovery count once."""
        return Recovered(sum(pool.lost for pool in self._run.pools.values()), self._steps_again)

    async def after(self, step: int, fault: Exception) -> int:
        """Replace lost replicas, and return the step to continue with.

        Raises the fault itself after `recovery.per_step` recoveries without progress, an error that stopped the
        recovery, or CancelledError if the run is stopping.
        """
        if is_stopping():
            raise asyncio.CancelledError from fault
        # Steps repeated before the failed one are no progress.
        self._count = self._count + 1 if step <= self._step else 1
        self._step = max(self._step, step)
        limit = self._run.spec.recovery.per_step
        if self._count > limit:
            raise fault
        log.warning("step %d failed; recovery %d of %d: %s", step, self._count, limit, fault)
        began_s = unix_s()
        try:
            following = await self._recover(step)
        except RECOVERABLE as another:
            return await self.after(step, another)
        inputs: dict[str, float | int | str | bool] = {
            "fault": legible(f"{type(fault).__name__}: {fault}"),
            "recovered_in_s": unix_s() - began_s,
            "next_step": following,
        }
        self._steps_again += step - following + 1
        log.info("recovered in %.1f s; the run continues with step %d", unix_s() - began_s, following)
        self._run.ledger.add_decision(Decision(step, began_s, "recover", "redo the step", inputs))
        return following

    async def _recover(self, step: int) -> int:
        run = self._run
        await clear(run, run.call(step))
        if run.trainers.all_there:
            await run.publish_again(step)
            return step
        restored = await run.restore_and_open()
        # Step 0, the evaluation before the first step, is done if a step was learned or its metrics are known.
        return restored + 1 if restored or run.before else 0
