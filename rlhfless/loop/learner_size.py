"""A learner whose number of ranks, or kind of devices, changes: between two steps as the contract has it, and after a
fault as there are devices (rlhfless.scaling.learner_ranks decides).

A group of ranks cannot take another rank in. So the ranks write their state to shared memory and end, and a group of
another number reads its own parts of it there. The nodes of the next group that lack parts pull them from the memory of
the others first. Where memory is short, the state goes through a checkpoint of the step. Devices that a larger group
needs are taken first: a group that works is not given up for devices that do not come. What was published before must
be published again, bit for bit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from rlhfless.fleet.cluster import FleetError
from rlhfless.fleet.run_devices import RunDevices
from rlhfless.loop.trained_run import TrainedRun
from rlhfless.planning.host_memory import on_this_node
from rlhfless.planning.inputs import devices_of, rank_counts
from rlhfless.records import Decision, Work
from rlhfless.records.checkpoints import CheckpointError
from rlhfless.scaling.function_kinds import publisher_of
from rlhfless.scaling.learner_ranks import (
    CHANGED_IN_S,
    LEARNER_RANKS,
    GroupSize,
    RankSpeeds,
    SizeChoice,
    StepMeasured,
    after_fault,
    allocations_with,
    choose_size,
    learned_tokens,
    learning,
    rank_rates,
    released_usd_per_s,
    saved_usd_per_s,
)
from rlhfless.scaling.placement import Allocation, Node, Placement
from rlhfless.scaling.plan.contract import contract_for_step

log = logging.getLogger(__name__)

GROW_S = 20.0
"""Longest wait for devices that were free a moment ago."""


@dataclass(frozen=True, slots=True)
class SizeChange:
    """Another size, from the next step on."""

    allocation: Allocation
    choice: SizeChoice


class LearnerSize:
    """The size of a run's learner."""

    def __init__(
        self,
        run: TrainedRun,
        devices: RunDevices,
        candidates: Mapping[GroupSize, Sequence[Allocation]],
        in_memory: bool,
    ) -> None:
        """`candidates`: the allocations that it may have, by size; it begins with the first. `in_memory`: nodes have
        shared memory, in which the folder of the weights is."""
        self._run = run
        self._devices = devices
        self._candidates = candidates
        self._first = next(iter(candidates))
        self._speeds = RankSpeeds(rank_rates({size.kind for size in candidates}))
        self._in_memory = in_memory
        self._since_s: float | None = None
        """Begin of the step that is measured (unix time); None after a fault, until a whole step begins."""
        self._change_s: float | None = None
        """How long the last change took."""
        self._lost_step = -1
        """The last step in which the learner was lost."""

    @property
    def size(self) -> GroupSize:
        """Of the present group, or of the one that starts next."""
        return self._of(self._allocation)

    @property
    def _allocation(self) -> Allocation:
        return self._run.learner.allocations[0]

    def _of(self, allocation: Allocation) -> GroupSize:
        return GroupSize(allocation.ranks or self._first.ranks, allocation.devices[0].kind)

    def resume(self, decisions: Sequence[Decision]) -> None:
        """Let the learner of a resumed run start with the size that it had, if it may have that still: on devices that
        are held, where an earlier driver left some. `decisions`: of the earlier attempts."""
        sizes = [GroupSize.parse(each.choice) for each in decisions if each.kind == LEARNER_RANKS]
        allocations = self._candidates.get(sizes[-1], ()) if sizes else ()
        if allocations and sizes[-1] != self.size:
            held = (each for each in allocations if self._devices.bound(each) is not None)
            self._run.learner.set_allocation(0, next(held, allocations[0]))
            log.info("the learner starts on %s, as it had before", self.size)

    # -- after a fault

    @contextlib.asynccontextmanager
    async def keeping_devices(self) -> AsyncIterator[None]:
        """Within the block the run keeps those devices of a lost learner that are not lost themselves: to give them
        back and ask for them again takes time, in which they seem to be in use."""
        user = f"{self._run.learner.function} that was lost"
        self._devices.add_user(self._allocation, user, lambda _: None)
        try:
            yield
        finally:
            await self._devices.release(user)

    async def after_fault(self, step: int) -> None:
        """Choose the devices that a lost learner starts on again."""
        pool, self._since_s = self._run.learner, None
        if pool.replicas():
            return
        await self._devices.renew()  # which finds devices that are lost
        again, self._lost_step = step <= self._lost_step, max(step, self._lost_step)
        before = self.size
        there = await self._devices.at_hand()
        allocation, reason = after_fault(self._candidates, there, self._first.kind, before if again else None)
        pool.set_allocation(0, allocation)
        if self.size != before:
            log.warning("the learner goes on with %s, after %s: %s", self.size, before, reason)
        self._record(step, time.time(), before, f"a fault: {reason}", {})

    # -- between two steps

    async def choose(self, step: int) -> SizeChange | None:
        """The change that is to be made after a step; None if there is none, or no whole step was measured yet."""
        since_s, self._since_s = self._since_s, time.time()
        if since_s is None:
            return None
        there = await self._devices.at_hand()
        now, possible = self.size, {self.size: self._allocation}
        for size, allocations in self._candidates.items():
            takes = size.kind != now.kind or size.ranks > now.ranks
            if size != now and not (takes and self._devices.waiting):
                free = [allocation for allocation in allocations if there(allocation)]
                if free:
                    possible[size] = max(free, key=self._in_common)
        prices = self._run.ledger.prices
        usd_per_s = {size: saved_usd_per_s(prices, allocation) for size, allocation in possible.items()}
        spec, spent = self._run.spec, self._run.ledger.spent(self._run.pools.values())
        left = spec.steps - step
        contract = contract_for_step(
            spec.scaling.contract, steps_left=left, spent_s=spent.held_s, spent_usd=spent.cost_usd
        )
        choice = choose_size(self._measured(since_s, left), usd_per_s, contract)
        return None if choice.size == now else SizeChange(possible[choice.size], choice)

    def _in_common(self, allocation: Allocation) -> int:
        return len({*allocation.devices} & {*self._allocation.devices})

    def _measured(self, since_s: float, steps_left: int) -> StepMeasured:
        learner, prices, now_s = self._run.learner, self._run.ledger.prices, time.time()
        change_s = self._change_s
        if change_s is None:
            change_s = self._run.ledger.mean_start_s(learner.function) or 0.0
        others = [pool for pool in self._run.pools.values() if pool is not learner]
        own = [one for allocations in self._candidates.values() for one in allocations]
        every = [*own, *(one for pool in others for one in pool.allocations)]
        released_usd = released_usd_per_s(prices, (device for one in every for device in one.devices))
        held_usd = sum(saved_usd_per_s(prices, each.allocation) for pool in others for each in pool.replicas())
        calls, size = self._run.ledger.calls_since(since_s), self.size
        learn_s, alone_s = learning(calls, learner.function, since_s)
        self._speeds.observe(size, learn_s, learned_tokens(calls, learner.function))
        return StepMeasured(
            size=size,
            step_s=now_s - since_s,
            learn_s=learn_s,
            alone_s=alone_s,
            others_usd_per_s=released_usd + held_usd,
            change_s=change_s,
            steps_left=steps_left,
            speeds=self._speeds.relative_to(size.kind),
        )

    async def change(self, step: int, change: SizeChange, save: Callable[[], Awaitable[None]]) -> None:
        """Give the learner another size. `save` writes a checkpoint of the step.

        Raises CheckpointError if the state did not arrive as it was, and what a start or a call raises: then the run
        goes on from its newest checkpoint, as after any loss of the learner.
        """
        began_s, before, digest = time.time(), self.size, self._run.digest
        self._run.clock.interrupt()
        user = f"{self._run.learner.function} on {change.choice.size}"
        try:
            if not await self._taken(change.allocation, user):
                return
            seconds = await self._move(step, change.allocation, save)
        finally:
            await self._devices.release(user)
        moved_s = time.time()
        await self._run.open_weights(step)
        if self._run.digest != digest:
            raise CheckpointError(
                f"the learner's weights were {digest} on {before} and are {self._run.digest} on "
                f"{change.choice.size}: its state was not moved as it was; resume the run from its newest checkpoint"
            )
        self._since_s = time.time()
        self._change_s = self._since_s - began_s
        log.info("the learner is on %s, after %s (%.1f s): %s", self.size, before, self._change_s,
                 change.choice.reason)  # fmt: skip
        seconds |= {"publish_s": self._since_s - moved_s, CHANGED_IN_S: self._change_s}
        self._record(step, began_s, before, change.choice.reason, {**change.choice.figures, **seconds})

    async def _taken(self, allocation: Allocation, user: str) -> bool:
        """Take the devices of a group; whether they came."""
        try:
            async with asyncio.timeout(GROW_S):
                await self._devices.acquire(allocation, user, lambda _: None)
        except (TimeoutError, FleetError) as error:
            log.warning("the learner keeps its size, because devices that were free did not come: %s", error)
            return False
        self._devices.finish_start(user)
        return True

    async def _move(
        self, step: int, allocation: Allocation, save: Callable[[], Awaitable[None]]
    ) -> dict[str, float | str]:
        """End the group, and start one on other devices with the same state; how, and the seconds of each part."""
        run, call, pool = self._run, self._run.call(step), self._run.learner
        begun_s, replica = time.time(), run.keepers.replica(pool)
        before, after = self._nodes(self._allocation), self._nodes(allocation)
        nodes = sorted(after)
        in_memory = bool(self._in_memory and before and nodes) and await run.work(
            replica, Work.CHECKPOINT, "hand_over", call, nodes
        )
        if not in_memory:
            newest = run.checkpoints.newest()
            if newest is None or newest.notes.step != step:
                await save()
        handed_s = time.time()
        await pool.stop(replica)
        ended_s = time.time()
        pool.set_allocation(0, allocation)
        replica = await pool.ready(call)
        started_s = time.time()
        if in_memory:
            await run.work(replica, Work.RESTORE, "take_over", call)
        else:
            await run.work(replica, Work.RESTORE, "restore", call, run.checkpoints.location(step))
        return {
            "through": _way(in_memory, one_node=len(before | after) == 1),
            "hand_over_s": handed_s - begun_s,
            "end_s": ended_s - handed_s,
            "start_s": started_s - ended_s,
            "take_over_s": time.time() - started_s,
        }

    def _nodes(self, allocation: Allocation) -> set[str]:
        """Ray's ids of the nodes of a group's devices; none if they are not held."""
        bound = self._devices.bound(allocation)
        return set() if bound is None else {device.node for device in bound.devices}

    def _record(
        self, step: int, at_s: float, before: GroupSize, reason: str, figures: Mapping[str, float | str]
    ) -> None:
        inputs: dict[str, float | int | str | bool] = {"before": str(before), "reason": reason, **figures}
        self._run.ledger.add_decision(Decision(step, at_s, LEARNER_RANKS, str(self.size), inputs))


def _way(in_memory: bool, *, one_node: bool) -> str:
    """How a state went, for the records."""
    if not in_memory:
        return "a checkpoint"
    return "shared memory" if one_node else "memory, from node to node"


def size_of(
    run: TrainedRun, sequence_tokens: int, nodes: Sequence[Node], placement: Placement, devices: RunDevices
) -> LearnerSize | None:
    """The size of a run's learner; None if it is fixed, by the spec or because memory allows no fewer ranks."""
    spec, most = run.spec, run.spec.learner.world_size
    counts: tuple[int, ...] = (most,)
    if spec.learner.fewest_ranks < most:
        counts = rank_counts(spec, *devices_of(spec, nodes), sequence_tokens)
        if len(counts) == 1:
            log.warning("learner.min_ranks has no effect: the memory of the devices holds no fewer than %d ranks", most)
    whole = placement.allocation(publisher_of(spec), 0)
    kind = whole.devices[0].kind
    candidates = {GroupSize(count, kind): allocations_with(placement, whole, most, count) for count in counts}
    for other in placement.elsewhere:
        candidates[GroupSize(len(other.devices), other.devices[0].kind)] = (other,)
    if len(candidates) == 1:
        return None
    return LearnerSize(run, devices, candidates, on_this_node(spec) == "shared_memory")
