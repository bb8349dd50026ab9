"""The engines of all actors, which run in closed form between two timers of the loop.

Before the clock jumps to the next timer, all engines advance to it. Groups that became complete on the way are reported
at their times, at most every REPORT_S, and always when the last sample ends: the clock then stops there.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence

import numpy as np

from rlhfless.sim.engine import EnginePool, EngineShape, PricedModel, SimulatedEngine
from rlhfless.sim.kernel_state import Ints, Table
from rlhfless.sim.samples import RolloutBatch, StepProgress
from rlhfless.sim.setup import ActorShape
from rlhfless.util.clock import unix_s

REPORT_S = 0.25
"""Seconds between two reports of complete groups."""


class StepEngines:
    """The engines of the step that is being generated."""

    def __init__(self, actors: Sequence[ActorShape], heartbeat_s: float) -> None:
        self._actors = actors
        self._heartbeat_s = heartbeat_s
        self.progress: StepProgress | None = None
        self._opened: dict[tuple[int, int], SimulatedEngine] = {}
        self._pools: list[EnginePool] = []
        self._told_s = -math.inf
        self._told = np.zeros(0, np.bool_)
        self._report: Callable[[Ints], None] = lambda _: None
        self._due: asyncio.TimerHandle | None = None
        self._look: Callable[[], None] = lambda: None
        self._next_look: asyncio.TimerHandle | None = None

    @property
    def tokens(self) -> int:
        """The number of tokens that the samples of the step have."""
        return 0 if self.progress is None else int(self.progress.table.tokens.sum())

    def begin(self, batch: RolloutBatch, report: Callable[[Ints], None], look: Callable[[], None]) -> StepProgress:
        """Start a step. `report` is called with the groups that have become complete since its last call, and `look`
        once per heartbeat from the first sample to the last."""
        if self._next_look is not None:
            self._next_look.cancel()
        self._look, self._next_look = look, None
        self.progress = StepProgress(batch, unix_s())
        self._pools = _pools(self._actors, self.progress.at.table)
        self._pool_of = {slot: pool for pool in self._pools for slot in pool.slots.tolist()}
        self._opened.clear()
        self._told = np.zeros(batch.groups, np.bool_)
        self._told_s, self._report = -math.inf, report
        return self.progress

    def engine(self, slot: int, life: int) -> SimulatedEngine:
        """Return the engine of a slot's n-th replica, opened at its first use in the step."""
        known = self._opened.get((slot, life))
        if known is None:
            assert self.progress is not None
            at_s, slowdown = unix_s(), self._actors[slot].slowdown
            known = self._opened[slot, life] = self._pool_of[slot].open(slot, self.progress, at_s, slowdown, life)
        return known

    def submit(self, slot: int, life: int, samples: Ints, at_s: float) -> None:
        """Append samples to an engine's queue. Raises AssertionError if one has ended or is on an engine already."""
        assert self.progress is not None
        newest = {of: engine for (of, _), engine in sorted(self._opened.items())}
        assert not self.progress.table.finished[samples].any(), "a sample that has ended is submitted again"
        for other, engine in newest.items():
            twice = np.intersect1d(engine.resident, samples)
            assert not twice.size, f"samples {twice} are on slot {other} and are submitted to slot {slot}"
        self.engine(slot, life).submit(samples, at_s)
        if self._next_look is None:
            self._next_look = asyncio.get_running_loop().call_later(self._heartbeat_s, self._heartbeat)

    def _heartbeat(self) -> None:
        assert self.progress is not None
        if self.progress.unfinished:
            self._look()
            self._next_look = asyncio.get_running_loop().call_later(self._heartbeat_s, self._heartbeat)

    def run_until(self, at_s: float) -> float:
        """Advance to `at_s`, or to the next report; return the time at which the loop may be next."""
        progress = self.progress
        if progress is None or self._due is not None:
            return at_s
        table = progress.table
        for pool in self._pools:
            pool.advance(at_s)
        new = (table.left == 0) & ~self._told
        if not new.any():
            return at_s
        first_s, ended = float(table.complete_s[new].min()), not table.left.any()
        report_s = max(first_s, self._told_s + REPORT_S)
        if ended:
            report_s = min(report_s, max(float(table.complete_s[new].max()), self._told_s))
        if report_s > at_s:
            return at_s
        self._due = asyncio.get_running_loop().call_at(report_s, self._tell)
        return report_s

    def _tell(self) -> None:
        """Report the groups that have become complete by now."""
        self._due = None
        progress, now_s = self.progress, unix_s()
        if progress is None:
            return
        table = progress.table
        new = np.flatnonzero((table.left == 0) & ~self._told & (table.complete_s <= now_s + 1e-9))
        new = new[np.argsort(table.complete_s[new], kind="stable")]
        self._told[new] = True
        self._told_s = now_s
        self._report(new)


def _pools(actors: Sequence[ActorShape], table: Table) -> list[EnginePool]:
    """Return a pool of engines for each shape and price list."""
    slots: dict[tuple[EngineShape, PricedModel], list[int]] = {}
    for slot, actor in enumerate(actors):
        slots.setdefault((actor.engine, actor.prices), []).append(slot)
    return [EnginePool(shape, prices, table, members) for (shape, prices), members in slots.items()]
