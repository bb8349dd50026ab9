"""After a fault: find out which replicas are lost, replace them, and decide with which step the run goes on.

A step that failed is done again. That costs little and changes nothing: its finished rollouts come from the journal,
learner and critic repeat their answers for a step that they have already taken, and the ledger counts a step once. If
one of the two is lost, both start from the newest checkpoint, and the steps since then are learned again from the
journal. A learner with `min_ranks` continues with the ranks whose devices are there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass

from rlhfless.fleet.pool import RECOVERABLE
from rlhfless.functions.base import Call
from rlhfless.orchestrator.trained_run import TrainedRun
from rlhfless.records import Decision
from rlhfless.util.tasks import gather_or_cancel, is_stopping
from rlhfless.util.text import legible

log = logging.getLogger(__name__)


async def clear(run: TrainedRun, call: Call) -> None:
    """Find out which replicas are lost, and free their allocations."""
    await gather_or_cancel(*(pool.probe_all(call) for pool in run.pools.values()))
    await gather_or_cancel(*(pool.remove_dead() for pool in run.pools.values()))


@dataclass(frozen=True, slots=True)
class Recovered:
    """The losses in one attempt of a run, and the cost of recovering from them."""

    replicas_lost: int
    """Replicas of any function that died, hung or restarted while the run needed them. Their work continued on other
    replicas, and they were replaced if it still needed them."""
    steps_again: int
    """Steps that were done again: the step that failed, and earlier steps that a new learner had to take again. A lost
    actor costs no step if its samples went to other actors."""


class Recovery:
    """Repairs a run's fleet, a bounded number of times per step."""

    def __init__(self, run: TrainedRun) -> None:
        self._run = run
        self._step = 0
        self._count = 0
        self._steps_again = 0

    @property
    def recovered(self) -> Recovered:
        """The recoveries so far. A fault counts when the run has recovered from it: the fault that stops a run does not
        count, and faults during a recovery count once."""
        return Recovered(sum(pool.lost for pool in self._run.pools.values()), self._steps_again)

    async def after(self, step: int, fault: Exception) -> int:
        """Replace lost replicas; returns the step to go on with.

        Raises the fault itself after `recovery.per_step` recoveries without a new step, an error that stopped the
        recovery, or CancelledError if the run is told to stop.
        """
        if is_stopping():
            raise asyncio.CancelledError from fault
        # Learning earlier steps again, before the step that failed, is no progress.
        self._count = self._count + 1 if step <= self._step else 1
        self._step = max(self._step, step)
        limit = self._run.spec.recovery.per_step
        if self._count > limit:
            raise fault
        log.warning("step %d failed and is done again (%d of %d): %s", step, self._count, limit, fault)
        began_s = time.time()
        try:
            following = await self._recover(step)
        except RECOVERABLE as another:
            return await self.after(step, another)
        inputs: dict[str, float | int | str | bool] = {
            "fault": legible(f"{type(fault).__name__}: {fault}"),
            "mended_in_s": time.time() - began_s,
            "next_step": following,
        }
        self._steps_again += step - following + 1
        self._run.ledger.add_decision(Decision(step, began_s, "recover", "redo the step", inputs))
        return following

    async def _recover(self, step: int) -> int:
        run, size = self._run, self._run.learner_size
        async with contextlib.nullcontext() if size is None else size.keeping_devices():
            await clear(run, run.call(step))
            if run.keepers.all_there:
                await run.publish_again(step)
                return step
            if size is not None:
                await size.after_fault(step)
            restored = await run.restore()
        await run.open_weights(restored)
        # Step 0 is the evaluation before the first step; it is done if a step was learned or its figures are known.
        return restored + 1 if restored or run.before else 0
