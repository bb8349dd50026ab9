"""Runs that share their generation actors token by token (`placement.share: adapters`), on a virtual clock.

Each engine decodes the samples of all runs in the same iterations: an iteration of B sequences with C tokens of context
takes a(B) + g C, whoever they belong to. Prompts are prefilled when their samples join, each once, while the others
wait. Each run's prompts are dealt to the engines in turn, with all samples of a prompt on one engine. Where samples
wait for room, the runs are admitted in turn. Learners take turns on their devices, first come, first served. Adapters
cost nothing here beyond what the scenario's engine model says: published figures for several adapters in a batch are
1.06 to 1.11 of the time for one.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from rlhfless.scaling.engine_model import EngineModel, decode_s, ways_of
from rlhfless.sim.samples import RolloutBatch

ROUNDING = 1e-6
"""Iterations by which a row may miss its end."""


@dataclass(frozen=True, slots=True)
class FleetEngine:
    """The speed and room of one shared engine."""

    model: EngineModel
    max_sequences: int
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class FleetStep:
    """A step of a run: the samples that it generates, and its learner's work."""

    batch: RolloutBatch
    learn_s: float
    before_s: float = 0.0
    """Time between generation and learning, such as scoring."""


@dataclass(frozen=True, slots=True)
class FleetTimeline:
    """When the runs of a fleet ended, and how long its devices worked."""

    ends_s: tuple[float, ...]
    engines_busy_s: tuple[float, ...]
    """By engine: seconds of iterations."""
    learning_s: float

    @property
    def makespan_s(self) -> float:
        return max(self.ends_s, default=0.0)


@dataclass(order=True, slots=True)
class _Row:
    """A sample in an engine, by the iteration of its last token."""

    end: float
    number: int
    run: int = field(compare=False)
    prompt: tuple[int, int, int] = field(compare=False)
    """Run, step and group."""
    prompt_tokens: int = field(compare=False)
    tokens: int = field(compare=False)


class _Engine:
    """One engine: rows that decode together, and rows that wait, by run."""

    def __init__(self, of: FleetEngine) -> None:
        self._of = of
        self._now_s = 0.0
        self._iterations = 0.0
        self._rows: list[_Row] = []
        self._context = 0.0
        self._kv = 0
        self._prompts: dict[tuple[int, int, int], int] = defaultdict(int)
        """Rows of each prompt that has been prefilled."""
        self._waiting: dict[int, deque[_Row]] = defaultdict(deque)
        self._turns: deque[int] = deque()
        self._paused_s = 0.0
        """Prefill that delays the next iteration."""
        self.busy_s = 0.0

    def add(self, rows: Sequence[_Row], at_s: float) -> None:
        self.advance(at_s)
        for row in rows:
            if not self._waiting[row.run]:
                self._turns.append(row.run)
            self._waiting[row.run].append(row)
        self._admit()

    def _admit(self) -> None:
        while self._turns and len(self._rows) < self._of.max_sequences:
            run = self._turns[0]
            row = self._waiting[run][0]
            known = row.prompt in self._prompts
            room = row.tokens + (0 if known else row.prompt_tokens)
            if self._rows and self._kv + room > self._of.kv_tokens:
                return
            self._waiting[run].popleft()
            self._turns.rotate(-1)
            if not self._waiting[run]:
                self._turns.remove(run)
            if not known:
                self._paused_s += self._of.model.prefill_s(row.prompt_tokens)
            self._kv += room
            self._prompts[row.prompt] += 1
            self._context += row.prompt_tokens
            row.end = self._iterations + row.tokens
            heapq.heappush(self._rows, row)

    def advance(self, to_s: float) -> list[_Row]:
        """Decode until a time, and return the rows that have ended then. It is at most the time of `next_s`."""
        left_s = to_s - self._now_s
        self._now_s = to_s
        if not self._rows:
            return []
        self.busy_s += left_s
        pause_s = min(self._paused_s, left_s)
        self._paused_s -= pause_s
        done = self._in(left_s - pause_s)
        self._iterations += done
        self._context += done * len(self._rows)
        ended = []
        while self._rows and self._rows[0].end <= self._iterations + ROUNDING:
            row = heapq.heappop(self._rows)
            ended.append(row)
            self._context -= row.prompt_tokens + row.tokens
            self._prompts[row.prompt] -= 1
            self._kv -= row.tokens
            if not self._prompts[row.prompt]:
                del self._prompts[row.prompt]
                self._kv -= row.prompt_tokens
        if ended:
            self._admit()
        return ended

    def next_s(self) -> float:
        """Return when the next row ends."""
        if not self._rows:
            return math.inf
        left = max(self._rows[0].end - self._iterations, 0.0)
        return self._now_s + self._paused_s + decode_s(self._of.model, len(self._rows), self._context, left)

    def _in(self, seconds: float) -> float:
        """Return the iterations that take so many seconds: the inverse of `decode_s`."""
        rows, model = len(self._rows), self._of.model
        way = min(ways_of(model), key=lambda each: each.iteration_s(rows) + each.context_s * self._context)
        quadratic = way.context_s * rows / 2
        linear = way.iteration_s(rows) + way.context_s * self._context - quadratic
        if quadratic * seconds < 1e-12 * linear * linear:
            return seconds / linear
        return (math.sqrt(linear * linear + 4 * quadratic * seconds) - linear) / (2 * quadratic)


def share_engines(
    runs: Sequence[Sequence[FleetStep]], engines: Sequence[FleetEngine], sleep_s: float = 0.0, wake_s: float = 0.0
) -> FleetTimeline:
    """Simulate the runs of a fleet, which all start at once. `sleep_s`, `wake_s`: a change of the learner's turn."""
    return _Fleet(runs, engines, sleep_s + wake_s).timeline()


class _Fleet:
    """The state of all runs: each generates, scores, waits for the learner's devices, learns, or has ended."""

    def __init__(self, runs: Sequence[Sequence[FleetStep]], engines: Sequence[FleetEngine], change_s: float) -> None:
        self._runs = runs
        self._engines = [_Engine(each) for each in engines]
        self._change_s = change_s
        self._step = [-1] * len(runs)
        self._left = [0] * len(runs)
        """Samples of each run's step that are not generated yet."""
        self._numbers = count()
        self._events: list[tuple[float, int, str, int]] = []
        self._asked: deque[int] = deque()
        self._learns: int | None = None
        self._awake: int | None = None
        self._learning_s = 0.0
        self._ends_s = [0.0] * len(runs)

    def timeline(self) -> FleetTimeline:
        for run in range(len(self._runs)):
            self._begin(run, 0.0)
        while True:
            engine = min(self._engines, key=_Engine.next_s)
            engine_s = engine.next_s()
            event_s = self._events[0][0] if self._events else math.inf
            if engine_s == event_s == math.inf:
                break
            if engine_s <= event_s:
                self._generated(engine.advance(engine_s), engine_s)
            else:
                at_s, _, what, run = heapq.heappop(self._events)
                if what == "ask":
                    self._asked.append(run)
                else:
                    self._learns = None
                    self._begin(run, at_s)
                self._learn(at_s)
        busy_s = tuple(engine.busy_s for engine in self._engines)
        return FleetTimeline(tuple(self._ends_s), busy_s, self._learning_s)

    def _begin(self, run: int, at_s: float) -> None:
        """Begin a run's next step, or end the run."""
        self._step[run] += 1
        if self._step[run] == len(self._runs[run]):
            self._ends_s[run] = at_s
            return
        batch = self._runs[run][self._step[run]].batch
        self._left[run] = len(batch.response_tokens)
        dealt: list[list[_Row]] = [[] for _ in self._engines]
        for group, tokens in zip(batch.group.tolist(), batch.response_tokens.tolist(), strict=True):
            prompt = run, self._step[run], group
            row = _Row(0.0, next(self._numbers), run, prompt, int(batch.prompt_tokens[group]), tokens)
            dealt[(group + run) % len(dealt)].append(row)
        for engine, rows in zip(self._engines, dealt, strict=True):
            self._generated(engine.advance(at_s), at_s)  # a row may end at this very time
            engine.add(rows, at_s)

    def _generated(self, ended: Sequence[_Row], at_s: float) -> None:
        for row in ended:
            self._left[row.run] -= 1
            if not self._left[row.run]:
                before_s = self._runs[row.run][self._step[row.run]].before_s
                heapq.heappush(self._events, (at_s + before_s, next(self._numbers), "ask", row.run))

    def _learn(self, at_s: float) -> None:
        """Give the learner's devices to the run that has waited longest."""
        if self._learns is not None or not self._asked:
            return
        run = self._learns = self._asked.popleft()
        learn_s = self._runs[run][self._step[run]].learn_s
        change_s = 0.0 if self._awake in (None, run) else self._change_s
        self._awake = run
        self._learning_s += learn_s
        heapq.heappush(self._events, (at_s + change_s + learn_s, next(self._numbers), "learned", run))
