"""Simulate one engine: continuous batching of a step's samples in closed form (`sim.kernel`), priced by an EngineModel.

An engine is always at a boundary between two iterations, at `now_s`; the iteration after it may be in progress. Outside
changes, such as arriving samples and aborts, take effect when that iteration ends, as in a real engine. Only a crash
takes effect at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from rlhfless.scaling.accounting import Interval
from rlhfless.scaling.engine_model import EngineModel, ways_of
from rlhfless.sim import kernel
from rlhfless.sim.kernel_state import UNKNOWN, Costs, Floats, Ints, Limits, Pool, Table, pool_of
from rlhfless.sim.samples import Rows, StepProgress

COUNTS = "preempted", "prefilled", "cached", "evicted", "decoded"
"""Counters of an engine: preemptions; prompt tokens computed, counted each time; prompt tokens found in the cache;
prompt tokens recomputed because other sequences had taken their blocks; response tokens."""

PRICES = 1 << 16
"""Size of the table of prefill prices, which is emptied when it is half full."""


@dataclass(frozen=True, slots=True)
class EngineShape:
    """The capacity of an engine, and how it prefills.

    Raises ValueError for an impossible value.
    """

    max_sequences: int
    kv_blocks: int
    block_tokens: int
    chunk_tokens: int | None
    """Token budget of an iteration, decoding included. None: prompts are prefilled whole, while no sequence decodes."""
    park_s: float = math.inf
    """A sample that waits longer for its environment leaves its engine (`environment.park_s`)."""

    def __post_init__(self) -> None:
        for name in ("max_sequences", "kv_blocks", "block_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.chunk_tokens is not None and self.chunk_tokens < self.max_sequences:
            raise ValueError(
                f"chunk_tokens ({self.chunk_tokens}) is below max_sequences ({self.max_sequences}): with all of them "
                "decoding, no prompt would ever be prefilled; raise it"
            )

    def blocks(self, tokens: int) -> int:
        """Return how many blocks `tokens` tokens of one sequence fill."""
        return -(-tokens // self.block_tokens)

    @property
    def limits(self) -> Limits:
        return Limits(self.max_sequences, self.block_tokens, self.chunk_tokens or 0, self.park_s)


class PricedModel:
    """An EngineModel in the kernel's format, shared by engines with the same model and shape.

    Each prefill price is computed once, when it is first needed.
    """

    def __init__(self, model: EngineModel, max_sequences: int) -> None:
        self.model = model
        ways, counts = ways_of(model), range(1, max_sequences + 1)
        iteration_s = np.array([[0.0] + [way.iteration_s(count) for count in counts] for way in ways])
        context_s = np.array([way.context_s for way in ways])
        self.costs = Costs(iteration_s, context_s, np.full(PRICES, -1, dtype=np.int64), np.zeros(PRICES))
        self._known = 0

    def ask(self, tokens: int, context: int) -> None:
        """Add the price of prefilling `tokens` after `context`."""
        keys = self.costs.price_key
        if self._known >= PRICES // 2:
            keys.fill(-1)
            self._known = 0
        cell = kernel.find_price(keys, tokens, context)
        if keys[cell] >= 0:
            return  # another engine has added it
        keys[cell] = kernel.price_key_of(tokens, context)
        self.costs.price_s[cell] = self.model.prefill_s(tokens, context)
        self._known += 1


class EnginePool:
    """The engines of one shape and latency model that generate one or more steps; all advance together."""

    def __init__(self, shape: EngineShape, prices: PricedModel, table: Table, slots: Sequence[int]) -> None:
        """Create one idle engine per slot; `table` holds all samples that they may generate.

        Raises ValueError if the prices cover fewer sequences than an engine may have: the kernel checks no bounds and
        would read past their end.
        """
        priced = prices.costs.iteration_s.shape[1] - 1
        if priced < shape.max_sequences:
            raise ValueError(
                f"an engine has {shape.max_sequences} sequences, and prices are of {priced}; price them all"
            )
        self.shape = shape
        self.slots = np.array(slots, dtype=np.int64)
        self.limits = shape.limits
        self.memory = pool_of(len(slots), self.limits, len(table.tokens), len(table.parent))
        self.table = table
        self._row = {slot: row for row, slot in enumerate(slots)}
        self._lives: dict[int, int] = {}
        """By slot: the life of the replica whose engine is there."""
        self._settled: dict[int, dict[str, int]] = {}
        """By row: the counts at the last `settle`."""
        self._prices = prices
        self._spans: dict[int, list[Interval]] = {}
        """By row: the spans fetched from `Pool.span`."""
        self._next_s = UNKNOWN
        self._ended = 0

    @property
    def running(self) -> Ints:
        """`[engines]`: sequences that decode."""
        return cast(Ints, self.memory.engine["running"])

    @property
    def waiting(self) -> Ints:
        """`[engines]`: sequences that prefill or are queued."""
        return cast(Ints, self.memory.engine["filling"] + self.memory.engine["queued"])

    def open(
        self, slot: int, progress: StepProgress, at_s: float, slowdown: float = 1.0, life: int = 0
    ) -> SimulatedEngine:
        """Return the engine at a slot for a step, resetting it for each new life of the replica there.

        The engine of an earlier life must have no work left. `slowdown` stretches every iteration: 1 for a normal
        device, more for a straggler.
        """
        row = self._row[slot]
        if self._lives.get(slot) == life:
            return SimulatedEngine(self, row, progress)
        self._lives[slot] = life
        self.spans(row)
        self._spans.pop(row, None)
        self._settled.pop(row, None)
        n = self.memory.engine[row]
        self.memory.engine[row] = 0
        self.memory.idle[row] = 0
        n["row"], n["slot"], n["now_s"], n["slowdown"] = row, slot, at_s, slowdown
        self.changed(row)
        n["free"], n["rested_s"] = self.shape.kv_blocks, -math.inf
        return SimulatedEngine(self, row, progress)

    def settle(self, row: int, counts: dict[str, int]) -> dict[str, int]:
        """Return how much an engine's counts have grown since the last call, by name."""
        before, self._settled[row] = self._settled.get(row, {}), counts
        return {name: count - before.get(name, 0) for name, count in counts.items()}

    def advance(self, until_s: float, row: int | None = None, one: bool = False) -> Ints:
        """Run all iterations that end at or before `until_s`, in all engines or one.

        With `one`, run its next iteration, whenever it ends. Returns the table rows that ended, by engine and in order.
        """
        memory, costs, table = self.memory, self._prices.costs, self.table
        first, last = (0, len(self.slots)) if row is None else (row, row + 1)
        memory.totals[kernel.ENDED] = 0
        while (first := kernel.advance(memory, table, costs, self.limits, first, last, until_s, one)) < last:
            if memory.totals[kernel.OVER] == len(memory.span):
                self._fetch()
            self._price()
        ended: Ints = memory.ended[: memory.totals[kernel.ENDED]].copy()
        self._next_s = UNKNOWN
        self._ended += len(ended)
        return ended

    def changed(self, row: int) -> None:
        """Compute an engine's next event again."""
        self.memory.engine[row]["due_s"] = self._next_s = UNKNOWN

    def forget(self, rows: Rows) -> None:
        """Remove the prompts of a step from all caches."""
        self.memory.idle[:, rows.nodes] = 0

    def run(self, until_s: float) -> None:
        """Run the events up to `until_s` of all engines in order, up to the first at which a step has all groups that
        it awaits (`stopped`)."""
        memory = self.memory
        memory.totals[kernel.ENDED] = memory.totals[kernel.STOPPED] = 0
        while (due_s := kernel.run(memory, self.table, self._prices.costs, self.limits, until_s)) == UNKNOWN:
            if memory.totals[kernel.OVER] == len(memory.span):
                self._fetch()
            self._price()
        self._next_s = due_s
        self._ended += int(memory.totals[kernel.ENDED])

    @property
    def next_s(self) -> float:
        """The time of the next event of any engine."""
        if self._next_s == UNKNOWN:
            self.run(-math.inf)
        return self._next_s

    def take_ended(self) -> int:
        """Return how many samples have ended since the last call."""
        ended, self._ended = self._ended, 0
        return ended

    def take_parked(self) -> int:
        """Return how many samples have begun to leave, to wait for their environment, since the last call."""
        parked = int(self.memory.totals[kernel.PARKED])
        self.memory.totals[kernel.PARKED] = 0
        return parked

    @property
    def stopped(self) -> bool:
        """Whether the last `run` ended because a step has all groups that it awaits, or a sample leaves to wait."""
        return bool(self.memory.totals[kernel.STOPPED])

    def prefill_s(self, tokens: int, context_tokens: int) -> float:
        """Return the seconds to prefill `tokens` after `context_tokens`, alone."""
        return self._prices.model.prefill_s(tokens, context_tokens)

    def spans(self, row: int) -> list[Interval]:
        """Return an engine's past spans of work, without the current or last one."""
        self._fetch()
        return self._spans.get(row, [])

    def _price(self) -> None:
        engines = self.memory.engine
        lacking = engines[engines["wanted_tokens"] > 0]
        for tokens, context in lacking[["wanted_tokens", "wanted_context"]].tolist():
            self._prices.ask(tokens, context)
        engines["wanted_tokens"] = 0

    def _fetch(self) -> None:
        count = int(self.memory.totals[kernel.OVER])
        for row, start_s, end_s in self.memory.span[:count].tolist():
            self._spans.setdefault(row, []).append((start_s, end_s))
        self.memory.totals[kernel.OVER] = 0


@dataclass(slots=True)
class Precomputed:
    """A call that put prefixes into an engine's cache."""

    start_s: float
    end_s: float
    computed_tokens: int = 0
    cached_tokens: int = 0
    """Tokens that were already in the cache."""


class SimulatedEngine:
    """One engine of a pool, seen from one step: samples and nodes have the numbers of that step."""

    def __init__(self, pool: EnginePool, row: int, progress: StepProgress) -> None:
        self.shape = pool.shape
        self.progress = progress
        self._pool = pool
        self._row = row
        self.slot = int(pool.slots[row])
        self._n = pool.memory.engine[row]
        batch = progress.batch
        longest = int((batch.context_tokens + batch.response_tokens).max(initial=1)) - 1
        self._fits_all = self.shape.blocks(longest) <= self.shape.kv_blocks
        """Whether every sample of the step fits alone."""

    @property
    def now_s(self) -> float:
        """The time of its boundary: the end of its last completed iteration."""
        return float(self._n["now_s"])

    @property
    def running(self) -> int:
        """Sequences that decode."""
        return self._count("running")

    @property
    def waiting(self) -> int:
        """Sequences that prefill or are queued."""
        return self._count("filling") + self._count("queued")

    @property
    def counts(self) -> dict[str, int]:
        """COUNTS since the engine's life started, over all steps."""
        return {name: self._count(name) for name in COUNTS}

    def settle(self) -> dict[str, int]:
        """Return COUNTS since the last call."""
        return self._pool.settle(self._row, self.counts)

    @property
    def periods(self) -> list[Interval]:
        """Spans of work; the current one lasts until `now_s`. Spans within `kernel.JOIN_S` of each other are joined."""
        if not self._busy and math.isinf(self._n["rested_s"]):
            return []
        end_s = self.now_s if self._busy else float(self._n["rested_s"])
        return [*self._pool.spans(self._row), (float(self._n["since_s"]), end_s)]

    def submit(self, samples: Ints, at_s: float | Floats) -> None:
        """Append samples to the queue, arriving at `at_s`, or when their environment has answered. A sample behind a
        later arrival waits for it.

        Raises ValueError if a sample could never fit, even alone.
        """
        table = self.progress.table
        if not self._fits_all:
            self._check_fit(samples)
        queue = self._pool.memory.queue[self._row]
        table.arrival_s[samples] = at_s
        rows, queued = samples + self.progress.at.first_sample, int(self._n["queued"])
        cells = (self._n["head"] + np.arange(queued + len(samples))) % len(queue)
        if (turns := self.progress.batch.turns) is not None:
            # The environment may not have answered yet, or opened the episode; that of others in the queue, too.
            record, came_s = table.sample[samples], table.arrival_s[samples]
            opened_s = np.where(np.isnan(record["ready_s"]), came_s + turns.reset_s[samples], record["ready_s"])
            table.sample["ready_s"][samples] = opened_s
            table.sample["leaves_s"][samples] = np.nan
            waits = record["turn"] == record["answered"]
            table.arrival_s[samples] = np.maximum(came_s, np.where(waits, opened_s, -math.inf))
            rows = np.concatenate([queue[cells[:queued]], rows])
            rows, queued = rows[np.argsort(self._pool.table.arrival_s[rows], kind="stable")], 0
        queue[cells[queued:]] = rows
        self._n["queued"] += len(samples)
        self._pool.changed(self._row)
        self.progress.safe_tokens[samples] = table.tokens[samples]

    def _check_fit(self, samples: Ints) -> None:
        batch = self.progress.batch
        longest = int((batch.context_tokens + batch.response_tokens)[samples].max(initial=1)) - 1
        if self.shape.blocks(longest) > self.shape.kv_blocks:
            raise ValueError(
                f"a sample of {longest} tokens needs {self.shape.blocks(longest)} KV blocks of "
                f"{self.shape.block_tokens}, and the engine has {self.shape.kv_blocks}; raise kv_blocks or shorten it"
            )

    def has(self, node: int) -> bool:
        """Return whether all of a prompt or shared prefix is in the cache."""
        return not any(map(self._lacks, self.progress.lineage(node)))

    def precompute(self, nodes: Sequence[int], at_s: float, fixed_s: float) -> Precomputed:
        """Put shared prefixes into the cache, each after its parent, in a separate call.

        The call starts at the first boundary at or after `at_s`; `fixed_s` is the time of an empty call. Prefixes that
        do not fit are skipped.
        """
        self._to_boundary(at_s)
        done = Precomputed(max(self.now_s, at_s), max(self.now_s, at_s) + fixed_s)
        for node in nodes:
            for part in self.progress.lineage(node):  # including ancestors that were too short for a call of their own
                self._put(part, done)
            done.cached_tokens += int(self.progress.table.depth[node])
        done.cached_tokens -= done.computed_tokens
        self._n["now_s"] = done.end_s
        self._pool.changed(self._row)
        return done

    def _put(self, node: int, done: Precomputed) -> None:
        """Put the missing blocks of a node into the cache, and add their time and tokens to `done`."""
        table = self.progress.table
        new = self._lacks(node) * self.shape.block_tokens
        if not new or not kernel.put(*self._of(node)):
            return
        done.computed_tokens += new
        done.end_s += self._pool.prefill_s(new, int(table.depth[node]) - new) * float(self._n["slowdown"])

    def _lacks(self, node: int) -> int:
        """Return how many blocks of a node, without its parent's, are not in the cache."""
        return kernel.lacks(*self._of(node))

    def _of(self, node: int) -> tuple[Pool, Table, Limits, int, int]:
        """Return the kernel's arguments for looking up a node."""
        pool = self._pool
        return pool.memory, pool.table, pool.limits, self._row, node + self.progress.at.first_node

    def advance(self, until_s: float) -> Ints:
        """Run all iterations that end at or before `until_s`, and return the rows that ended, in order."""
        return self._pool.advance(until_s, self._row)

    def _to_boundary(self, at_s: float) -> None:
        """Run until the first boundary at or after `at_s`."""
        self.advance(at_s)
        if self._busy and self.now_s < at_s:
            self._pool.advance(at_s, self._row, one=True)

    def abort(self, samples: Ints, at_s: float) -> float:
        """Remove samples at the first boundary at or after `at_s`, keeping their tokens, and return that boundary."""
        self._to_boundary(at_s)
        busy = self._busy
        self._take_out(samples)
        if busy and not self._busy:
            self._n["rested_s"] = self.now_s
        return max(self.now_s, at_s)

    def reload(self, at_s: float, load_s: float) -> float:
        """Load other weights for `load_s` from the first boundary at or after `at_s`, and return that boundary.

        Samples keep their tokens; all KV is lost.
        """
        self._to_boundary(at_s)  # samples may finish in the iteration that ends there
        samples = self.resident
        leave_s = self.abort(samples, at_s)
        self.drop_kv()
        self.submit(samples, leave_s + load_s)
        return leave_s

    def drop_kv(self) -> None:
        """Drop the KV of all prompts and prefixes that no sequence holds."""
        self._pool.memory.idle[self._row] = 0

    def crash(self, at_s: float) -> Ints:
        """Crash at `at_s`: lose the iteration in progress and all tokens that its samples generated here.

        Return the lost samples.
        """
        self.advance(at_s)
        if self._busy:
            self._n["rested_s"] = at_s
        lost = self.resident
        self._take_out(lost)
        self.progress.set_tokens(lost, self.progress.safe_tokens[lost])
        return lost

    @property
    def resident(self) -> Ints:
        """The samples of the step that decode, prefill or wait in the engine, sorted."""
        memory, row, first = self._pool.memory, self._row, self.progress.at.first_sample
        cells = (self._n["head"] + np.arange(self._n["queued"])) % memory.queue.shape[1]
        filling = memory.filling[row, : self._n["filling"]]
        decoding = memory.heap[row, : self.running] % kernel.STRIDE
        rows = np.sort(np.concatenate([decoding, filling, memory.queue[row, cells]]))
        own: Ints = rows[(rows >= first) & (rows < first + self.progress.batch.samples)] - first
        return own

    @property
    def _busy(self) -> bool:
        return self._count("running") + self._count("filling") > 0

    def _count(self, name: str) -> int:
        return int(self._n[name])

    def _take_out(self, samples: Ints) -> None:
        chosen = np.zeros(len(self._pool.table.tokens), dtype=np.bool_)
        chosen[samples + self.progress.at.first_sample] = True
        kernel.take_out(self._pool.memory, self._pool.table, self._pool.limits, self._row, chosen)
        self._pool.changed(self._row)
