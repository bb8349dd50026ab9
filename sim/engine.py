"""One engine: continuous batching of a step's samples in closed form (`sim.kernel`), priced by an EngineModel.

An engine is always at a boundary between two iterations, at `now_s`; the iteration after it may be under way. What
comes from outside takes effect when that one ends, as in a real engine: samples that arrive wait for it, and an abort
waits for it too. Only a crash does not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlhfless.scaling.engine_model import EngineModel
from rlhfless.sim import kernel
from rlhfless.sim.kernel import Costs, Floats, Ints, Limits, State
from rlhfless.sim.samples import Progress

PRICES = 1 << 16
"""Room for prefill prices; when it is half full, it is emptied."""


@dataclass(frozen=True, slots=True)
class EngineShape:
    """What fits into an engine, and how it prefills.

    Raises ValueError for a figure that no engine has.
    """

    max_sequences: int
    kv_blocks: int
    block_tokens: int
    chunk_tokens: int | None
    """Token budget of an iteration, decoding included; None: prompts are prefilled whole, while nobody decodes."""
    prefill_only: bool = False
    """Samples leave after their first token, to decode on another actor."""

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
        """Blocks that so many tokens of one sequence fill."""
        return -(-tokens // self.block_tokens)

    @property
    def limits(self) -> Limits:
        return Limits(self.max_sequences, self.block_tokens, self.chunk_tokens or 0, self.prefill_only)


class PricedModel:
    """An EngineModel as the kernel reads it. Engines with the same model and shape share one.

    Its prefill prices are asked for once each, when they are first needed.
    """

    def __init__(self, model: EngineModel, max_sequences: int) -> None:
        self.model = model
        iteration_s = np.array([0.0] + [model.iteration_s(count) for count in range(1, max_sequences + 1)])
        self.costs = Costs(iteration_s, model.context_s, np.full(PRICES, -1, dtype=np.int64), np.zeros(PRICES))
        self._known = 0

    def ask(self, tokens: int, context: int) -> None:
        """Adds the price of prefilling `tokens` behind `context`."""
        keys = self.costs.price_key
        if self._known >= PRICES // 2:
            keys.fill(-1)
            self._known = 0
        place = kernel.find_price(keys, tokens, context)
        keys[place] = kernel.price_key_of(tokens, context)
        self.costs.price_s[place] = self.model.prefill_s(tokens, context)
        self._known += 1


class Engine:
    """One engine, from its first sample to its last."""

    def __init__(
        self, shape: EngineShape, prices: PricedModel, progress: Progress, at_s: float, slowdown: float = 1.0
    ) -> None:
        """`slowdown` stretches every iteration: 1 for a sound device, more for a straggler."""
        self.shape = shape
        self.progress = progress
        self._prices = prices
        self._limits = shape.limits
        self._periods: list[tuple[float, float]] = []
        self._working_since_s: float | None = None
        samples, places = progress.batch.samples, shape.max_sequences
        self._state = State(
            clock=np.array([at_s, slowdown]),
            counts=np.zeros(kernel.COUNTS, dtype=np.int64),
            heap=np.empty(places, dtype=np.int64),
            filling=np.empty(places, dtype=np.int64),
            left=np.empty(places, dtype=np.int64),
            done=np.empty(places, dtype=np.int64),
            queue=np.empty(max(samples, 1), dtype=np.int64),
            phase=np.zeros(shape.block_tokens, dtype=np.int64),
            residents=np.zeros(progress.batch.groups, dtype=np.int64),
            finished=np.empty(samples, dtype=np.int64),
        )
        self._state.counts[kernel.FREE] = shape.kv_blocks

    @property
    def now_s(self) -> float:
        """The boundary it is at: when its last whole iteration ended."""
        return float(self._state.clock[kernel.NOW])

    @property
    def running(self) -> int:
        """Sequences that decode."""
        return self._count(kernel.RUNNING)

    @property
    def waiting(self) -> int:
        """Sequences that prefill, or are in the queue."""
        return self._count(kernel.FILLING) + self._count(kernel.QUEUED)

    @property
    def free_blocks(self) -> int:
        return self._count(kernel.FREE)

    @property
    def preemptions(self) -> int:
        return self._count(kernel.PREEMPTED)

    @property
    def prefilled_tokens(self) -> int:
        """Prompt tokens computed, those computed again included."""
        return self._count(kernel.PREFILLED)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that a sibling had computed."""
        return self._count(kernel.CACHED)

    @property
    def decoded_tokens(self) -> int:
        """Response tokens drawn."""
        return self._count(kernel.DECODED)

    @property
    def periods(self) -> list[tuple[float, float]]:
        """When it worked, from when to when; the one under way lasts until `now_s`."""
        under_way = [] if self._working_since_s is None else [(self._working_since_s, self.now_s)]
        return self._periods + under_way

    def submit(self, samples: Ints, at_s: float | Floats) -> None:
        """Puts samples at the end of the queue, to arrive at `at_s`. Whoever is queued behind a later one waits for it.

        Raises ValueError if a sample could never fit, even alone.
        """
        table = self.progress.table
        longest = int((table.prompt[samples] + table.target[samples]).max(initial=1)) - 1
        if self.shape.blocks(longest) > self.shape.kv_blocks:
            raise ValueError(
                f"a sample of {longest} tokens needs {self.shape.blocks(longest)} KV blocks of "
                f"{self.shape.block_tokens}, and the engine has {self.shape.kv_blocks}; raise kv_blocks or shorten it"
            )
        count, queue = self._state.counts, self._state.queue
        places = (count[kernel.HEAD] + count[kernel.QUEUED] + np.arange(len(samples))) % len(queue)
        queue[places] = samples
        count[kernel.QUEUED] += len(samples)
        table.arrival_s[samples] = at_s
        self.progress.safe_tokens[samples] = table.tokens[samples]

    def advance(self, until_s: float) -> Ints:
        """Runs all iterations that end at or before `until_s`. Returns the samples that ended, in order."""
        state, table, costs = self._state, self.progress.table, self._prices.costs
        while self._awake(until_s):
            reason = kernel.run(state, table, costs, self._limits, until_s, False)
            if reason == kernel.UNPRICED:
                wanted = state.counts[kernel.WANTED_TOKENS], state.counts[kernel.WANTED_CONTEXT]
                self._prices.ask(int(wanted[0]), int(wanted[1]))
            elif reason == kernel.REACHED:
                break
            else:
                self._rest(self.now_s)
        return self._ended()

    def abort(self, samples: Ints, at_s: float, with_kv: bool = False) -> tuple[float, Ints]:
        """Takes samples out at the first boundary at or after `at_s`; they keep their tokens. `with_kv`: those that
        decode keep their KV too.

        Returns that boundary, and the samples that ended on the way there, as `advance` does.
        """
        ended = self.advance(at_s)
        if self._busy and self.now_s < at_s:
            kernel.run(self._state, self.progress.table, self._prices.costs, self._limits, at_s, True)  # was priced
            ended = np.concatenate([ended, self._ended()])
        decoding = self._state.heap[: self.running] % kernel.STRIDE
        self._take_out(samples)
        if with_kv:
            self.progress.table.has_kv[decoding[np.isin(decoding, samples)]] = True
        if not self._busy:
            self._rest(self.now_s)
        return max(self.now_s, at_s), ended

    def crash(self, at_s: float) -> tuple[Ints, Ints]:
        """Ends at `at_s`: the iteration under way is lost, and so are all tokens that its samples drew here.

        Returns the samples that ended before, and those that it lost.
        """
        ended = self.advance(at_s)
        if self._busy:
            self._rest(at_s)
        lost = self.resident
        self._take_out(lost)
        self.progress.table.tokens[lost] = self.progress.safe_tokens[lost]
        return ended, lost

    @property
    def resident(self) -> Ints:
        """The samples that decode, prefill or wait in it, sorted."""
        state = self._state
        places = (self._count(kernel.HEAD) + np.arange(self._count(kernel.QUEUED))) % len(state.queue)
        running = state.heap[: self.running] % kernel.STRIDE
        filling = state.filling[: self._count(kernel.FILLING)]
        return np.sort(np.concatenate([running, filling, state.queue[places]]))

    @property
    def _busy(self) -> bool:
        return self._count(kernel.RUNNING) + self._count(kernel.FILLING) > 0

    def _count(self, place: int) -> int:
        return int(self._state.counts[place])

    def _awake(self, until_s: float) -> bool:
        """Whether there is anything to do until then. An idle engine's clock goes on to the next arrival."""
        if self._busy:
            return True
        if not self._count(kernel.QUEUED):
            return False
        head = self._state.queue[self._count(kernel.HEAD)]
        start_s = max(self.now_s, float(self.progress.table.arrival_s[head]))
        if start_s > until_s:
            return False
        self._state.clock[kernel.NOW] = start_s
        if self._working_since_s is None:
            self._working_since_s = start_s
        return True

    def _ended(self) -> Ints:
        """What ended since this was asked last."""
        ended: Ints = self._state.finished[: self._count(kernel.FINISHED)].copy()
        self._state.counts[kernel.FINISHED] = 0
        return ended

    def _rest(self, at_s: float) -> None:
        if self._working_since_s is not None:
            self._periods.append((self._working_since_s, at_s))
            self._working_since_s = None

    def _take_out(self, samples: Ints) -> None:
        chosen = np.zeros(self.progress.batch.samples, dtype=np.bool_)
        chosen[samples] = True
        kernel.take_out(self._state, self.progress.table, self._limits, chosen)
