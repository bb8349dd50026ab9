"""The data of `sim.kernel`: one row per sample, per group and per engine.

All engines of one shape and latency model are rows of one pool, so that one call advances all of them. Values that are
read together are stored together: a record per sample, a record per engine.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Records = npt.NDArray[np.void]

SPANS = 1024
"""Spans of work that a pool keeps before they are fetched."""

UNKNOWN = -1.0
"""The time of an engine's next event after a change from outside."""

SAMPLE = np.dtype(
    [
        ("prompt", np.int64),
        ("target", np.int64),  # response tokens at the end of its turn
        ("group", np.int64),
        ("leaf", np.int64),  # the node whose blocks it holds: its prompt or, with several turns, a node of its own
        ("turn", np.int64),  # its turn, as a row of the turns
        ("last", np.int64),  # its last turn
        ("answered", np.int64),  # the turn after the last one that the environment was asked about
        ("admitted", np.int64),  # its position in its engine's order of admission
        ("ready_s", np.float64),  # when the environment has answered the last call
        ("waited_s", np.float64),  # for its environment, with the wait in progress
        ("leaves_s", np.float64),  # when it leaves its engine to wait longer; NaN: it does not
        ("arrival_s", np.float64),
        ("start_s", np.float64),
        ("finish_s", np.float64),
        ("cached", np.int64),
        ("cut", np.bool_),  # ends by length, not by itself; no policy sees it before
    ],
    align=True,
)

ENGINE = np.dtype(
    [
        ("now_s", np.float64),
        ("due_s", np.float64),  # end of its next event; infinite: it has none; UNKNOWN: to be computed
        ("jump", np.int64),  # decode iterations of that event; 0: a sequence prefills, or it is idle
        ("way", np.int64),  # in which they run, see Costs
        ("slowdown", np.float64),
        ("since_s", np.float64),  # start of its last span of work
        ("rested_s", np.float64),  # end of that span, unless it is working; -inf before the first
        ("row", np.int64),  # in the pool
        ("slot", np.int64),
        ("iteration", np.int64),
        ("context", np.int64),  # tokens of the decoding sequences
        ("running", np.int64),  # decoding sequences
        ("filling", np.int64),  # prefilling sequences
        ("head", np.int64),  # of the queue
        ("queued", np.int64),
        ("free", np.int64),  # blocks
        ("admitted", np.int64),
        ("preempted", np.int64),
        ("prefilled", np.int64),  # tokens
        ("cached", np.int64),  # tokens
        ("evicted", np.int64),  # tokens that were cached, evicted and needed again
        ("taken", np.int64),  # blocks that sequences have taken from the free ones
        ("decoded", np.int64),  # tokens
        ("wanted_tokens", np.int64),  # tokens of the prefill without a price; 0: none
        ("wanted_context", np.int64),
    ]
)

SPAN = np.dtype([("engine", np.int64), ("start_s", np.float64), ("end_s", np.float64)])


class Limits(NamedTuple):
    """The limits of a batch."""

    max_sequences: int
    block_tokens: int
    chunk_tokens: int
    """Token budget of a mixed iteration; 0: prompts are prefilled whole, in iterations in which no sequence decodes."""
    park_s: float
    """A sample that waits longer for its environment leaves its engine."""


class Costs(NamedTuple):
    """An EngineModel as numbers."""

    iteration_s: Floats  # [ways, max_sequences + 1]
    context_s: Floats  # [ways]
    price_key: Ints  # [prices]: open addressing; -1 is empty
    price_s: Floats  # [prices]


class Table(NamedTuple):
    """All samples of a step, or of the steps that are generated at once; the engines share it."""

    sample: Records  # [samples] of SAMPLE
    tokens: Ints
    """`[samples]`: generated so far; for a decoding sequence, as of when its engine last stopped advancing."""
    finished: Flags  # [samples]
    truncated: Flags  # [samples]: finished by length
    home: Ints  # [samples]: the slot that each belongs to
    actor: Ints  # [samples]: the slot that generated the end of each
    parent: Ints
    """`[nodes]`: the node of the next shorter shared prefix, or NONE. The prompts of groups are the first nodes, the
    shared prefixes come after them, then those of the samples with several turns."""
    depth: Ints  # [nodes]: tokens of each that can be cached, counted from the first
    left: Ints  # [nodes]: of a prompt, its unfinished samples
    complete_s: Floats  # [nodes]: when the last of its finished samples ended
    step: Ints  # [nodes]: the number of its step's rows
    turn_end: Ints  # [turns]: response tokens at its end
    turn_given: Ints  # [turns]: tokens that the environment writes after it
    turn_wait_s: Floats  # [turns]: how long the environment takes for that
    awaited: Ints
    """`[steps]`: complete groups until all engines stop, see `kernel.run`."""

    @property
    def prompt(self) -> Ints:
        return cast(Ints, self.sample["prompt"])

    @property
    def target(self) -> Ints:
        return cast(Ints, self.sample["target"])

    @property
    def group(self) -> Ints:
        return cast(Ints, self.sample["group"])

    @property
    def arrival_s(self) -> Floats:
        return cast(Floats, self.sample["arrival_s"])

    @property
    def finish_s(self) -> Floats:
        return cast(Floats, self.sample["finish_s"])

    def part(self, samples: slice, nodes: slice) -> Table:
        """Return views of these rows."""
        by_node = self.parent, self.depth, self.left, self.complete_s, self.step
        columns: list[Any] = [*(column[samples] for column in self[:6]), *(column[nodes] for column in by_node)]
        columns += [self.turn_end, self.turn_given, self.turn_wait_s, self.awaited]
        return Table(*columns)

    def copied(self) -> Table:
        columns: list[Any] = [column.copy() for column in self]
        return Table(*columns)


def table_of(samples: int, nodes: int, turns: int = 0, steps: int = 1) -> Table:
    """Create empty rows for `steps` steps of `samples` samples, `nodes` nodes and `turns` turns each."""
    samples, nodes, turns, step = steps * samples, steps * nodes, steps * turns, np.repeat(np.arange(steps), nodes)
    return Table(
        sample=np.zeros(samples, dtype=SAMPLE),
        tokens=np.zeros(samples, dtype=np.int64),
        finished=np.zeros(samples, dtype=np.bool_),
        truncated=np.zeros(samples, dtype=np.bool_),
        home=np.zeros(samples, dtype=np.int64),
        actor=np.zeros(samples, dtype=np.int64),
        parent=np.zeros(nodes, dtype=np.int64),
        depth=np.zeros(nodes, dtype=np.int64),
        left=np.zeros(nodes, dtype=np.int64),
        complete_s=np.zeros(nodes),
        step=step,
        turn_end=np.zeros(turns, dtype=np.int64),
        turn_given=np.zeros(turns, dtype=np.int64),
        turn_wait_s=np.zeros(turns),
        awaited=np.zeros(steps, dtype=np.int64),
    )


class Pool(NamedTuple):
    """Engines of one shape and model that generate one or more steps."""

    engine: Records  # [engines] of ENGINE
    heap: Ints  # [engines, max_sequences]: decoding sequences, by the iteration at which they end
    filling: Ints  # [engines, max_sequences]: prefilling samples, in order of admission
    left: Ints  # [engines, max_sequences]: tokens they have yet to prefill
    done: Ints  # [engines, max_sequences]: tokens of each that are in the cache
    queue: Ints  # [engines, samples]: a ring
    phase: Ints  # [engines, block_tokens]: number of decoding sequences, by `(context - iteration) mod block`
    residents: Ints  # [engines, nodes]: sequences that start with the node and hold its blocks
    idle: Ints  # [engines, nodes]: its blocks that no sequence holds, but that can still be found in the cache
    evicts: Ints  # [engines, nodes]: the `taken` at which these start to be reused, the last of them first
    ended: Ints  # [samples]: samples that ended, in order, during the current advance
    span: Records  # [SPANS] of SPAN: past work
    totals: Ints
    """`[4]`: number of ended samples, number of spans, whether all awaited groups of a step are complete, and number of
    samples that leave to wait."""


class State(NamedTuple):
    """One engine: its rows of a pool, and the arrays that the pool's engines share."""

    n: Any
    heap: Ints
    filling: Ints
    left: Ints
    done: Ints
    queue: Ints
    phase: Ints
    residents: Ints
    idle: Ints
    evicts: Ints
    ended: Ints
    span: Records
    totals: Ints


def pool_of(engines: int, limits: Limits, samples: int, nodes: int) -> Pool:
    """Create a pool of idle engines."""

    def columns(width: int) -> Ints:
        return np.empty((engines, width), dtype=np.int64)

    sequences, engine = limits.max_sequences, np.zeros(engines, dtype=ENGINE)
    engine["due_s"] = np.inf
    return Pool(
        engine=engine,
        heap=columns(sequences),
        filling=columns(sequences),
        left=columns(sequences),
        done=columns(sequences),
        queue=columns(max(samples, 1)),
        phase=np.zeros((engines, limits.block_tokens), dtype=np.int64),
        residents=np.zeros((engines, nodes), dtype=np.int64),
        idle=np.zeros((engines, nodes), dtype=np.int64),
        evicts=np.zeros((engines, nodes), dtype=np.int64),
        ended=np.empty(samples, dtype=np.int64),
        span=np.empty(SPANS, dtype=SPAN),
        totals=np.zeros(4, dtype=np.int64),
    )
