"""The engines of all actors, which run in closed form between two timers of the loop.

Before the clock jumps to the next timer, all engines run up to it, but not beyond the time at which a step has the last
group that it waits for: the clock then stops there, because the run may give work to the engines. Groups that became
complete before are reported at most every REPORT_S. Steps that are generated at once share the engines.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np

from rlhfless.sim.engine import EnginePool, EngineShape, PricedModel, SimulatedEngine
from rlhfless.sim.kernel_state import Ints, Table
from rlhfless.sim.samples import RolloutBatch, StepProgress, rows_of
from rlhfless.sim.setup import ActorShape
from rlhfless.util.clock import unix_s

REPORT_S = 1.0
"""Seconds between two reports of complete groups."""

ROUNDING_S = 1e-9


class GeneratedStep:
    """A step that is being generated, and its messages to the driver."""

    def __init__(self, progress: StepProgress, report: Callable[[Ints], None], park: Callable[[Ints], None]) -> None:
        self.progress = progress
        self._park = park
        self._leaves: asyncio.TimerHandle | None = None
        self.engines: dict[tuple[int, int], SimulatedEngine] = {}
        """By slot and life of its actor: the engines that have had samples of the step."""
        self._report = report
        self._told = np.zeros(progress.batch.groups, np.bool_)
        self._told_s, self._at_once = -math.inf, False
        self._due: asyncio.TimerHandle | None = None

    def report(self) -> float:
        """Schedule the report of the groups that have become complete, if any; return its time."""
        table = self.progress.table
        new = (table.left == 0) & ~self._told
        if not new.any():
            return math.inf
        if self.progress.awaited <= 0:
            self._at_once = True
            self.progress.await_groups(1)  # if the run needs more, it is told of each one at once
        complete_s = table.complete_s[new]
        due_s = max(float(complete_s.min()), self._told_s + REPORT_S)
        if self._at_once:
            due_s = min(due_s, float(complete_s.max()))
        due_s = max(due_s, unix_s())
        if self._due is None or due_s < self._due.when():
            if self._due is not None:
                self._due.cancel()
            self._due = asyncio.get_running_loop().call_at(due_s, self._tell)
        return self._due.when()

    def _tell(self) -> None:
        """Report the groups that have become complete by now."""
        self._due = None
        table, self._told_s = self.progress.table, unix_s()
        new = np.flatnonzero((table.left == 0) & ~self._told & (table.complete_s <= self._told_s + ROUNDING_S))
        new = new[np.argsort(table.complete_s[new], kind="stable")]
        self._told[new] = True
        self._report(new)
        self._at_once &= math.isfinite(self.report())  # engines may be ahead of the clock

    def part(self) -> float:
        """Schedule the message that samples leave to wait for their environment, if any do; return its time."""
        leaves_s = self.progress.table.sample["leaves_s"]
        if np.isnan(leaves_s).all():
            return math.inf
        due_s = max(float(np.nanmin(leaves_s)), unix_s())
        if self._leaves is None or due_s < self._leaves.when():
            if self._leaves is not None:
                self._leaves.cancel()
            self._leaves = asyncio.get_running_loop().call_at(due_s, self._parted)
        return self._leaves.when()

    def _parted(self) -> None:
        self._leaves = None
        leaves_s = self.progress.table.sample["leaves_s"]
        self.let_go(np.flatnonzero(leaves_s <= unix_s() + ROUNDING_S))
        self.part()

    def let_go(self, samples: Ints) -> None:
        """Report samples that leave to wait for their environment."""
        if samples.size:
            self.progress.table.sample["leaves_s"][samples] = np.nan
            self._park(samples)

    def end(self) -> None:
        """Send no more messages."""
        for timer in (self._due, self._leaves):
            if timer is not None:
                timer.cancel()
        self._due = self._leaves = None


class StepEngines:
    """The engines of the steps that are being generated. A step is known by its number, from `begin` to `end`."""

    def __init__(self, actors: Sequence[ActorShape], samples: int, nodes: int, turns: int, steps: int = 1) -> None:
        """Reserve room for `steps` steps at once, each of `samples` samples, `nodes` nodes (RolloutBatch.nodes) and
        `turns` turns."""
        self._free = rows_of(steps, samples, nodes, turns)
        """Rows of the table that belong to no step."""
        self._actors = actors
        self._settled_s = -math.inf
        self._steps: dict[int, GeneratedStep] = {}
        self._pools = _pools(actors, self._free[0].table)
        self._pool_of = {slot: pool for pool in self._pools for slot in pool.slots.tolist()}

    @property
    def tokens(self) -> int:
        """The number of tokens that have been generated."""
        return sum(int(pool.memory.engine["decoded"].sum()) for pool in self._pools)

    def begin(self, batch: RolloutBatch, report: Callable[[Ints], None], park: Callable[[Ints], None]) -> StepProgress:
        """Start a step, or start it again. `report` is called with the groups that have become complete since its last
        call, and `park` with samples that leave their engines to wait for their environment."""
        if batch.step in self._steps:
            self.end(batch.step)
        progress = StepProgress(batch, self._free.pop(0))
        self._steps[batch.step] = GeneratedStep(progress, report, park)
        return progress

    def end(self, step: int) -> None:
        """Forget a step: its rows are used again."""
        ended = self._steps.pop(step)
        ended.end()
        if ended.progress.unfinished:
            for engine in ended.engines.values():
                engine.abort(engine.resident, unix_s())
        for pool in self._pools:
            pool.forget(ended.progress.at)
        self._free.append(ended.progress.at)

    def keep(self, steps: Collection[int]) -> None:
        """Forget all other steps, such as those of an earlier attempt."""
        for step in self._steps.keys() - set(steps):
            self.end(step)

    def progress(self, step: int) -> StepProgress:
        return self._steps[step].progress

    # -- the engine of a slot's n-th replica

    def engine(self, step: int, slot: int, life: int) -> SimulatedEngine:
        """Return the engine for the samples of a step, opened at its first use."""
        known = self._steps[step].engines
        if (slot, life) not in known:
            progress, slowdown = self.progress(step), self._actors[slot].slowdown
            known[slot, life] = self._pool_of[slot].open(slot, progress, unix_s(), slowdown, life)
        return known[slot, life]

    def withdraw(self, engine: SimulatedEngine, samples: Ints) -> None:
        """Take samples out of an engine if it still has any of them."""
        if any(engine in step.engines.values() for step in self._steps.values()):
            engine.abort(np.intersect1d(samples, engine.resident), unix_s())

    def drop_kv(self, slot: int, life: int) -> None:
        """Drop the KV of earlier weights."""
        for engine in self._opened(slot, life):
            engine.drop_kv()

    def reload(self, slot: int, life: int, load_s: float) -> float:
        """Load other weights between two iterations, and compute the KV of all samples again; return when it begins."""
        begins_s = [engine.reload(unix_s(), load_s) for engine in self._opened(slot, life)]
        return max(begins_s, default=unix_s())

    def crash(self, slot: int, life: int) -> None:
        """Lose all samples, and the tokens that were not delivered."""
        for engine in self._opened(slot, life):
            engine.crash(unix_s())

    def _opened(self, slot: int, life: int) -> Iterator[SimulatedEngine]:
        engines = (step.engines.get((slot, life)) for step in self._steps.values())
        return (engine for engine in engines if engine is not None)

    # -- the clock

    def run_until(self, at_s: float) -> float:
        """Run to `at_s`, or to the end of a step; return the time at which the loop may be next."""
        while True:
            self._run(at_s)
            if self._steps and sum(pool.take_ended() for pool in self._pools):
                at_s = min(at_s, *(step.report() for step in self._steps.values()))
            if not sum(pool.take_parked() for pool in self._pools):
                return at_s
            at_s = min([at_s, *(step.part() for step in self._steps.values())])

    def let_go(self, step: int, samples: Ints) -> None:
        """Let samples that leave their engines to wait for their environment do so at once."""
        leaving = ~np.isnan(self.progress(step).table.sample["leaves_s"][samples])
        self._steps[step].let_go(samples[leaving])

    def _run(self, until_s: float) -> None:
        """Run all engines in the order of time."""
        while True:
            pool, then_s = self._next()
            if math.isinf(pool.next_s) or pool.next_s > until_s:
                return
            pool.run(min(until_s, then_s))
            if pool.stopped:
                return

    def _next(self) -> tuple[EnginePool, float]:
        """Return the pool with the next event, and when another pool has one."""
        if len(self._pools) == 1:
            return self._pools[0], math.inf
        first, second, *_ = sorted(self._pools, key=lambda pool: pool.next_s)
        return first, second.next_s

    def settle(self) -> None:
        """Run all engines to this time, so that the tokens of all samples are up to date."""
        if (now_s := unix_s()) > self._settled_s:
            self._settled_s = now_s
            for pool in self._pools:
                pool.advance(now_s)


def _pools(actors: Sequence[ActorShape], table: Table) -> list[EnginePool]:
    """Return a pool of engines for each shape and price list."""
    slots: dict[tuple[EngineShape, PricedModel], list[int]] = {}
    for slot, actor in enumerate(actors):
        slots.setdefault((actor.engine, actor.prices), []).append(slot)
    return [EnginePool(shape, prices, table, members) for (shape, prices), members in slots.items()]
