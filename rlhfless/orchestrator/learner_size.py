"""Change the number of a learner's ranks (`learner.min_ranks`): fewer after a fault, more when devices are free again.

A process group cannot add ranks, so the ranks export their state to shared memory and stop, and a group of
another size imports its shards. The state goes through a checkpoint instead if shared memory has no room, or if the
ranks are on several nodes. The devices of a larger group are acquired first, so that a working group is never given up
for devices that do not arrive. After the change, the weights are published again and must have the same digest."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

from rlhfless.fleet.protocols import FleetError
from rlhfless.fleet.run_devices import RunDevices
from rlhfless.orchestrator.base_run import BaseRun
from rlhfless.planning.host_memory import on_this_node
from rlhfless.planning.resolve import ResolvedRun
from rlhfless.records import Decision, Work
from rlhfless.records.checkpoints import CheckpointError
from rlhfless.scaling.function_specs import publisher_of
from rlhfless.scaling.learner_ranks import LEARNER_RANKS, Candidates, allocations_with, most_ranks
from rlhfless.scaling.placement import Allocation, Placement
from rlhfless.util.clock import unix_s

log = logging.getLogger(__name__)

GROW_S = 20.0
"""Timeout for devices that were free just before."""

Save = Callable[[], Awaitable[None]]
"""Writes a checkpoint of the last finished step."""


class LearnerSize:
    """Changes the number of ranks of a run's learner."""

    def __init__(self, run: BaseRun, devices: RunDevices, candidates: Candidates, in_memory: bool) -> None:
        """`in_memory`: whether the folder of the weights is in shared memory."""
        self._run = run
        self._devices = devices
        self._candidates = candidates
        self._in_memory = in_memory
        self._lost_step = -1
        """The last step in which the learner was lost."""

    @property
    def ranks(self) -> int:
        """Number of ranks of the current group, or of the next one to start."""
        return self._run.learner.allocations[0].ranks or max(self._candidates)

    def resume(self, decisions: Sequence[Decision]) -> None:
        """Set the learner of a resumed run to its last number of ranks, on devices that it still holds, if possible.

        `decisions`: those of the earlier attempts.
        """
        earlier = [int(each.choice) for each in decisions if each.kind == LEARNER_RANKS]
        allocations = self._candidates.get(earlier[-1], ()) if earlier else ()
        if allocations and earlier[-1] != self.ranks:
            held = (each for each in allocations if self._devices.bound(each) is not None)
            self._run.learner.set_allocation(0, next(held, allocations[0]))
            log.info("learner starts with %d ranks, as in the earlier attempt", self.ranks)

    @contextlib.asynccontextmanager
    async def keeping_devices(self) -> AsyncIterator[None]:
        """Keep the surviving devices of a lost learner within the block: released devices look busy for a while."""
        user = f"{self._run.learner.function} that was lost"
        self._devices.add_user(self._run.learner.allocations[0], user, lambda _: None)
        try:
            yield
        finally:
            await self._devices.release(user)

    async def after_fault(self, step: int) -> None:
        """Choose the devices for a lost learner: the most ranks whose devices are available."""
        if self._run.learner.replicas():
            return
        await self._devices.renew()  # detects lost devices
        again, self._lost_step = step <= self._lost_step, max(step, self._lost_step)
        before = self.ranks
        chosen = most_ranks(self._candidates, await self._devices.at_hand(), before if again else None)
        reason = "fault: the most ranks whose devices are there"
        if again:
            reason += f", and fewer than {before}, which was lost twice in this step"
        if chosen is None:
            chosen, reason = self._candidates[max(self._candidates)][0], "fault: no devices are there; wait for all"
        self._run.learner.set_allocation(0, chosen)
        if self.ranks != before:
            log.warning("step %d: learner restarts with %d ranks instead of %d: %s", step, self.ranks, before, reason)
        self._record(step, unix_s(), before, {"reason": reason})

    async def larger(self) -> Allocation | None:
        """Return the allocation of a larger group if its devices are free and no function waits for devices."""
        if self.ranks == max(self._candidates) or self._devices.waiting:
            return None
        chosen = most_ranks(self._candidates, await self._devices.at_hand())
        return chosen if chosen is not None and (chosen.ranks or max(self._candidates)) > self.ranks else None

    async def change(self, step: int, allocation: Allocation, save: Save) -> None:
        """Restart the learner on other devices with the same state, after `step`. Does nothing if they do not arrive.

        Raises CheckpointError if the digest of the weights differs afterwards, and the errors of starts and calls. The
        run then continues from its newest checkpoint, as after any loss of the learner.
        """
        start_s, before, digest = unix_s(), self.ranks, self._run.digest
        self._run.clock.interrupt()
        user = f"{self._run.learner.function} changes its ranks"
        try:
            if not await self._acquire(allocation, user):
                return
            seconds = await self._restart(step, allocation, save)
        finally:
            await self._devices.release(user)
        restarted_s = unix_s()
        await self._run.open_weights(step)
        if self._run.digest != digest:
            raise CheckpointError(
                f"the learner's weights had digest {digest} on {before} ranks and have {self._run.digest} on "
                f"{self.ranks}: its state was not moved intact; resume the run from its newest checkpoint"
            )
        end_s = unix_s()
        log.info("step %d: learner resized %d -> %d ranks in %.1f s", step, before, self.ranks, end_s - start_s)
        seconds |= {"publish_s": end_s - restarted_s, "changed_in_s": end_s - start_s}
        self._record(step, start_s, before, {"reason": "devices are free again", **seconds})

    async def _acquire(self, allocation: Allocation, user: str) -> bool:
        try:
            async with asyncio.timeout(GROW_S):
                await self._devices.acquire(allocation, user, lambda _: None)
        except (TimeoutError, FleetError) as error:
            log.warning("learner keeps %d ranks: devices that were free did not come: %s", self.ranks, error)
            return False
        self._devices.finish_start(user)
        return True

    async def _restart(self, step: int, allocation: Allocation, save: Save) -> dict[str, float | str]:
        """Stop the group, start one on other devices with the same state, and return the seconds of each phase."""
        run, call, pool = self._run, self._run.call(step), self._run.learner
        start_s, replica = unix_s(), run.trainers.replica(pool)
        nodes = self._nodes(pool.allocations[0]) | self._nodes(allocation)
        in_memory = self._in_memory and len(nodes) == 1
        in_memory = in_memory and await run.work(replica, Work.CHECKPOINT, "export_state", call)
        if not in_memory:
            newest = run.checkpoints.newest()
            if newest is None or newest.notes.step != step:
                await save()
        exported_s = unix_s()
        await pool.stop(replica)
        stopped_s = unix_s()
        pool.set_allocation(0, allocation)
        replica = await pool.ready(call)
        started_s = unix_s()
        if in_memory:
            await run.work(replica, Work.RESTORE, "import_state", call)
        else:
            await run.work(replica, Work.RESTORE, "restore", call, run.checkpoints.location(step))
        return {
            "through": "shared memory" if in_memory else "a checkpoint",
            "export_s": exported_s - start_s,
            "stop_s": stopped_s - exported_s,
            "start_s": started_s - stopped_s,
            "import_s": unix_s() - started_s,
        }

    def _nodes(self, allocation: Allocation) -> set[str]:
        """Return the Ray node ids of an allocation's devices; empty if they are not held."""
        bound = self._devices.bound(allocation)
        return set() if bound is None else {device.node for device in bound.devices}

    def _record(self, step: int, at_s: float, before: int, inputs: Mapping[str, float | str]) -> None:
        self._run.ledger.add_decision(
            Decision(step, at_s, LEARNER_RANKS, str(self.ranks), {"before": before, **inputs})
        )


def size_of(
    run: BaseRun, resolved: ResolvedRun | None, placement: Placement, devices: RunDevices
) -> LearnerSize | None:
    """Return the LearnerSize of a run; None if the spec fixes the ranks, or if memory allows no fewer."""
    spec, most = run.spec, run.spec.learner.world_size
    if spec.learner.fewest_ranks >= most or resolved is None:
        return None
    counts = resolved.rank_counts()
    if len(counts) == 1:
        log.warning("learner.min_ranks has no effect: the devices have no memory for fewer than %d ranks", most)
        return None
    whole = placement.allocation(publisher_of(spec), 0)
    candidates = {count: allocations_with(placement, whole, most, count) for count in counts}
    return LearnerSize(run, devices, candidates, on_this_node(spec) == "shared_memory")
