"""Generate the samples of one step: the slot of each sample, and the moves between slots.

Between two events every engine runs independently, in closed form. `rlhfless.scaling.assignment` has the rules: which
slot has which sample, and which answers of the policy are refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rlhfless.records import ReplicaState, Work
from rlhfless.scaling.accounting import clip
from rlhfless.scaling.assignment import Assignment
from rlhfless.scaling.policy import Assign, Move
from rlhfless.sim.engine import EnginePool, EngineShape, PricedModel, SimulatedEngine
from rlhfless.sim.fleet import SimulatedFleet
from rlhfless.sim.kernel_state import Floats, Ints, Table
from rlhfless.sim.ledger import SimulatedReplica
from rlhfless.sim.samples import RolloutBatch, Rows, StepProgress, rows_of
from rlhfless.sim.setup import ActorShape


class SharedEngines:
    """The engines of a fleet that generates several steps at once."""

    def __init__(self, actors: Sequence[ActorShape], steps: int, samples: int, nodes: int) -> None:
        """Reserve rows for `steps` steps, each of `samples` samples and `nodes` prompts and shared prefixes."""
        self.free = rows_of(steps, samples, nodes)
        """Rows that belong to no step."""
        self.pools = _pools(actors, self.free[0].table)

    def give_back(self, rows: Rows) -> None:
        """Return rows for use by another step, removing their prompts from all caches."""
        for pool in self.pools:
            pool.memory.idle[:, rows.nodes] = 0
        self.free.append(rows)


class Generation:
    """The generation of one step, from its first sample to its last."""

    def __init__(
        self, fleet: SimulatedFleet, batch: RolloutBatch, begun_s: float, shared: SharedEngines | None = None
    ) -> None:
        """Create the generation of a step; with `shared`, next to other steps, in rows that `give_back` returns."""
        self._shared = shared
        self.progress = StepProgress(batch, begun_s, None if shared is None else shared.free.pop(0))
        table, links, actors = self.progress.table, fleet.setup.links, fleet.setup.actors
        self.assignment = Assignment(table.home, table.finished, len(actors))
        self.preemptions = 0
        """Preemptions of engines that have been billed."""
        self.computed_tokens = 0
        """Prompt tokens computed by engines that have been billed, including precomputation."""
        self.evicted_tokens = 0
        """Prompt tokens, among those, that the same engine had computed before and evicted from its cache."""
        self._fleet = fleet
        self._links = links
        self._waiting: dict[int, list[tuple[Ints, float | Floats]]] = {}
        """By slot whose actor does not serve yet: the samples that wait for it, and their arrival times."""
        self._engines: dict[tuple[int, int], SimulatedEngine] = {}
        """By slot and life: the engine of a replica that has had samples of the step."""
        self._pools = _pools(actors, self.progress.at.table) if shared is None else shared.pools
        self._pool_of = {slot: pool for pool in self._pools for slot in pool.slots.tolist()}

    @property
    def unfinished(self) -> int:
        """The number of unfinished samples."""
        return self.progress.unfinished

    @property
    def end_s(self) -> float:
        """The end of the last response; valid once all have ended."""
        return float(self.progress.table.finish_s.max(initial=0.0))

    @property
    def working(self) -> bool:
        """Whether any engine has work."""
        return any(pool.running.any() or pool.waiting.any() for pool in self._pools)

    def counts(self) -> tuple[list[int], list[int]]:
        """Return how many samples run and how many wait at each slot, each `[slots]`."""
        running, waiting = np.zeros((2, len(self._fleet.slot_setups)), dtype=np.int64)
        if self._shared is not None:  # the engines also have samples of other steps
            home, begun = self.assignment.home, ~np.isnan(self.progress.table.sample["start_s"])
            np.add.at(running, home[begun & (home >= 0)], 1)
            np.add.at(waiting, home[~begun & (home >= 0)], 1)
            return running.tolist(), waiting.tolist()
        for pool in self._pools:
            running[pool.slots], waiting[pool.slots] = pool.running, pool.waiting
        for slot, held in self._waiting.items():
            for samples, _ in held:
                waiting[slot] += len(samples)
        return running.tolist(), waiting.tolist()

    def advance(self, now_s: float) -> None:
        """Advance all engines to `now_s`."""
        for pool in self._pools:
            pool.advance(now_s)

    def assign(self, assign: Assign, at_s: float) -> None:
        """Assign samples to a slot. Raises PolicyFault for an assignment that rlhfless.scaling.assignment refuses."""
        self._give(assign.slot, self.assignment.checked_assign(assign), at_s)

    def move(self, move: Move, now_s: float) -> None:
        """Move samples to another slot. Raises PolicyFault for a move that rlhfless.scaling.assignment refuses."""
        samples = self.assignment.checked_move(move)
        leave_s, engine = now_s, self._engine_of(move.source)
        if engine is not None and len(samples):
            leave_s = engine.abort(samples, now_s)
        self._take_back(move.source, samples)
        moved = samples[self.assignment.home[samples] == move.source]
        self._give(move.target, moved, leave_s + self._links.move_s)

    def serving(self, slot: int, at_s: float) -> None:
        """Start the samples that wait for an actor that serves from `at_s` on."""
        for samples, there_s in self._waiting.pop(slot, []):
            if len(samples):
                self._submit(slot, samples, np.maximum(there_s, at_s))

    def lost(self, slot: int, at_s: float) -> tuple[float, Ints]:
        """Crash the actor at a slot, unassign its samples, and return when that took effect, and the samples.

        A crash takes effect later than `at_s` if a Move waited for the end of an iteration.
        """
        engine = self._engine_of(slot)
        if engine is not None:
            at_s = max(at_s, engine.now_s)
            engine.crash(at_s)
            self._bill(self._fleet.replicas[slot], engine)
        self._waiting.pop(slot, None)
        return at_s, self.assignment.lose(slot)

    def leave(self, slot: int) -> None:
        """Bill the engine of an actor before its release. Raises PolicyFault if the actor has unfinished samples."""
        self.assignment.check_release(slot)
        engine = self._engine_of(slot)
        if engine is not None:
            self._bill(self._fleet.replicas[slot], engine)

    def hand_back(self, at_s: float) -> float:
        """Take all samples out of the engines, deferring them; return when the last engine stopped."""
        for slot in self._fleet.replicas:
            if (engine := self._engine_of(slot)) is not None:
                at_s = max(at_s, engine.abort(engine.resident, at_s))
        self._waiting.clear()
        self.progress.leave()
        return at_s

    def reload(self, slot: int, at_s: float, load_s: float) -> float:
        """Load weights into the actor at a slot while it generates; return when the load starts."""
        engine = self._engine_of(slot)
        return at_s if engine is None else engine.reload(at_s, load_s)

    def close(self) -> None:
        """Bill all engines, none of which has samples of the step left."""
        for slot, replica in self._fleet.replicas.items():
            engine = self._engine_of(slot)
            if engine is not None:
                self._bill(replica, engine)

    def draws_at(self, slot: int) -> bool:
        """Return whether samples of the step belong to a slot."""
        return bool((self.assignment.home == slot).any())

    def give_back(self) -> None:
        """Release the rows of a learned step for another one, keeping a copy."""
        if self._shared is not None:
            self._shared.give_back(self.progress.at)
            self.progress.table = self.progress.table.copied()

    def _engine(self, slot: int, at_s: float) -> SimulatedEngine:
        """Return the engine of a serving actor, opening one if it has none for this step."""
        engine = self._engine_of(slot)
        if engine is None:
            life, slowdown = self._fleet.replicas[slot].number, self._fleet.setup.actors[slot].slowdown
            engine = self._pool_of[slot].open(slot, self.progress, at_s, slowdown, life)
            self._engines[slot, life] = engine
        return engine

    def _engine_of(self, slot: int) -> SimulatedEngine | None:
        replica = self._fleet.replicas.get(slot)
        return None if replica is None else self._engines.get((slot, replica.number))

    def _give(self, slot: int, samples: Ints, at_s: float | Floats) -> None:
        if not len(samples):
            return
        self.assignment.give(samples, slot)
        if self._fleet.state(slot) is ReplicaState.SERVING:
            self._submit(slot, samples, at_s)
        else:
            self._waiting.setdefault(slot, []).append((samples, at_s))

    def _submit(self, slot: int, samples: Ints, at_s: float | Floats) -> None:
        """Submit samples to a serving actor, after precomputing the prefixes that their prompts share."""
        engine, batch = self._engine(slot, float(np.min(at_s))), self.progress.batch
        if self._fleet.setup.prefixes.planned and len(batch.tree):
            prefixes = [batch.groups + each for each in batch.tree.to_precompute(np.unique(batch.group[samples]))]
            if wanted := [prefix for prefix in prefixes if prefix not in engine.asked]:
                at_s = np.maximum(at_s, self._precompute(slot, engine, wanted, float(np.min(at_s))))
        engine.submit(samples, at_s)

    def _precompute(self, slot: int, engine: SimulatedEngine, prefixes: Sequence[int], at_s: float) -> float:
        """Compute prefixes on an actor in a separate call, and return when it ends."""
        done = engine.precompute(prefixes, at_s, self._links.move_s)
        self.computed_tokens += done.computed_tokens
        self._fleet.replicas[slot].called(
            Work.PRECOMPUTE,
            self.progress.batch.step,
            done.start_s,
            done.end_s,
            input_tokens=done.computed_tokens + done.cached_tokens,
            cached_tokens=done.cached_tokens,
            sequences=len(prefixes),
        )
        return done.end_s

    def _take_back(self, slot: int, samples: Ints) -> None:
        """Remove samples from the queue of a slot that does not serve yet."""
        held = self._waiting.pop(slot, [])
        if held:
            kept = [(waiting, ~np.isin(waiting, samples), there_s) for waiting, there_s in held]
            self._waiting[slot] = [
                (waiting[stays], np.broadcast_to(there_s, len(waiting))[stays]) for waiting, stays, there_s in kept
            ]

    def _bill(self, replica: SimulatedReplica, engine: SimulatedEngine) -> None:
        """Record one call per span of work; the last call has the tokens."""
        step, begun_s, counted = self.progress.batch.step, self.progress.begun_s, engine.settle()
        self.preemptions += counted["preempted"]
        self.computed_tokens += counted["prefilled"]
        self.evicted_tokens += counted["evicted"]
        # With shared engines, an engine may work before and after this step.
        until_s = math.inf if self._shared is None or self.unfinished else self.end_s
        periods = clip(engine.periods, begun_s, until_s)
        for number, (start_s, end_s) in enumerate(periods, 1):
            figures: dict[str, int] = {}
            if number == len(periods):
                figures = {
                    "input_tokens": counted["prefilled"] + counted["cached"],
                    "output_tokens": counted["decoded"],
                    "cached_tokens": counted["cached"],
                }
            replica.called(Work.GENERATE, step, start_s, end_s, **figures)
        replica.busy_s = max(replica.busy_s, engine.now_s)
        self._engines.pop((engine.slot, replica.number))


def _pools(actors: Sequence[ActorShape], table: Table) -> list[EnginePool]:
    """Create one pool for all actors of each shape and latency model."""
    slots: dict[tuple[EngineShape, PricedModel], list[int]] = {}
    for slot, actor in enumerate(actors):
        slots.setdefault((actor.engine, actor.prices), []).append(slot)
    return [EnginePool(shape, prices, table, members) for (shape, prices), members in slots.items()]
