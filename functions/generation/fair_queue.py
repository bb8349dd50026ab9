"""A queue before an engine that several runs share: who is admitted next.

Deficit round robin (Shreedhar and Varghese, SIGCOMM 1995) by tokens: runs with waiting requests take turns; in its turn
a run earns QUANTUM_TOKENS, and its first request is admitted once it has earned what that costs: its prompt, and the
response tokens that it is expected to generate. What a response differs from that is settled when it ends, so runs with
long responses get no more than their part.

The engine admits `sequences` requests, and those whose expected tokens fit in the KV cache. While other runs wait, each
run has at most an equal part of both; what they do not need goes to the others. So the engine's own queue, which knows
no runs and would let running ones overtake others, stays empty.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

QUANTUM_TOKENS = 512

NEWEST = 0.1
"""Weight of a response's length in the run's expected length."""

FIRST_GUESS = 0.5
"""Expected length of a run's first responses, as a fraction of their limit."""


@dataclass(eq=False, slots=True)
class Ticket:
    """A request that waits or runs."""

    run_id: str
    prompt: tuple[int, ...]
    expected_tokens: int
    """Of the response."""
    admitted: asyncio.Future[bool]
    """True once it is admitted; False if it was called off before."""

    @property
    def is_admitted(self) -> bool:
        return self.admitted.done() and not self.admitted.cancelled() and self.admitted.result()

    @property
    def cost(self) -> int:
        return len(self.prompt) + self.expected_tokens


@dataclass(slots=True)
class _Run:
    waiting: deque[Ticket] = field(default_factory=deque)
    deficit: float = 0.0
    running: int = 0
    response_tokens: int = 0
    """Expected tokens of running responses."""
    prompts: Counter[tuple[int, ...]] = field(default_factory=Counter)
    """Of running requests: they have their KV in common."""
    mean_tokens: float | None = None

    @property
    def kv_tokens(self) -> int:
        return self.response_tokens + sum(map(len, self.prompts))

    def expected(self, max_tokens: int) -> int:
        guess = FIRST_GUESS * max_tokens if self.mean_tokens is None else self.mean_tokens
        return max(1, min(round(guess), max_tokens))


class FairQueue:
    """Admits the requests of several runs to one engine."""

    def __init__(self, sequences: int, kv_tokens: int) -> None:
        """`sequences`: most requests that the engine runs at the same time. `kv_tokens`: capacity of its KV cache; 0 if
        it is unknown."""
        self._sequences = sequences
        self._kv_tokens = kv_tokens
        self._runs: dict[str, _Run] = {}
        self._turns: deque[str] = deque()
        """Runs with waiting requests, in the order of their turns."""

    def enter(self, run_id: str, prompt: tuple[int, ...], max_tokens: int) -> Ticket:
        """Queue a request; wait for `Ticket.admitted`."""
        run = self._runs.setdefault(run_id, _Run())
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        ticket = Ticket(run_id, prompt, run.expected(max_tokens), future)
        if not run.waiting:
            self._turns.append(run_id)
        run.waiting.append(ticket)
        self._admit()
        return ticket

    def call_off(self, ticket: Ticket) -> bool:
        """Remove a request that has not been admitted; return whether that was so."""
        run = self._runs[ticket.run_id]
        if ticket not in run.waiting:
            return False
        run.waiting.remove(ticket)
        if not run.waiting:
            self._end_turns(ticket.run_id)
        if not ticket.admitted.done():
            ticket.admitted.set_result(False)
        return True

    @contextmanager
    def running(self, ticket: Ticket) -> Iterator[list[int]]:
        """Run an admitted request within the block. The caller puts the number of generated tokens into the list."""
        generated: list[int] = []
        try:
            yield generated
        finally:
            self._leave(ticket, generated[0] if generated else 0)

    def _leave(self, ticket: Ticket, generated: int) -> None:
        run = self._runs[ticket.run_id]
        run.running -= 1
        run.response_tokens -= ticket.expected_tokens
        run.prompts[ticket.prompt] -= 1
        run.prompts += Counter()
        run.deficit += ticket.expected_tokens - generated
        before = run.mean_tokens
        run.mean_tokens = float(generated) if before is None else before + NEWEST * (generated - before)
        self._admit()

    def drop(self, run_id: str) -> None:
        """Forget a run without requests."""
        run = self._runs.get(run_id)
        if run is not None and not run.waiting and not run.running:
            del self._runs[run_id]

    def counts(self, run_id: str) -> tuple[int, int]:
        """Return how many of a run's requests wait, and how many run."""
        run = self._runs.get(run_id, _Run())
        return len(run.waiting), run.running

    # -- turns

    def _admit(self) -> None:
        """Admit requests while the engine has room."""
        while self._turns and sum(run.running for run in self._runs.values()) < self._sequences:
            run_id = self._next()
            if run_id is None:
                return
            run = self._runs[run_id]
            ticket = run.waiting.popleft()
            if not run.waiting:
                self._end_turns(run_id)
            if ticket.admitted.done():  # its caller was cancelled
                continue
            run.deficit -= ticket.cost
            run.running += 1
            run.response_tokens += ticket.expected_tokens
            run.prompts[ticket.prompt] += 1
            ticket.admitted.set_result(True)

    def _next(self) -> str | None:
        """Return the run whose first request is next; None if none fits."""
        fitting = [run_id for run_id in self._turns if self._fits(run_id)]
        if not fitting:
            return None
        below = [run_id for run_id in fitting if not self._has_its_part(run_id)]
        choice = below or fitting  # what runs do not need goes to the others
        while True:
            run_id = self._turns[0]
            run = self._runs[run_id]
            if run_id in choice:
                if run.waiting[0].cost <= run.deficit:
                    return run_id
                run.deficit += QUANTUM_TOKENS
            self._turns.rotate(-1)

    def _fits(self, run_id: str) -> bool:
        """Return whether the KV cache has room for a run's first request, or nothing runs."""
        used = sum(run.kv_tokens for run in self._runs.values())
        return not self._kv_tokens or not used or used + self._more(run_id) <= self._kv_tokens

    def _has_its_part(self, run_id: str) -> bool:
        run, runs = self._runs[run_id], sum(1 for each in self._runs.values() if each.waiting or each.running)
        part = max(self._sequences // runs, 1)
        kv_part = self._kv_tokens / runs
        over_kv = bool(self._kv_tokens) and bool(run.running) and run.kv_tokens + self._more(run_id) > kv_part
        return run.running >= part or over_kv

    def _more(self, run_id: str) -> int:
        """Return the expected KV tokens of a run's first request, without a prompt that is there already."""
        run = self._runs[run_id]
        first = run.waiting[0]
        return first.expected_tokens + (0 if run.prompts[first.prompt] else len(first.prompt))

    def _end_turns(self, run_id: str) -> None:
        """Take a run without waiting requests out of the turns. It saves nothing for later."""
        self._turns.remove(run_id)
        self._runs[run_id].deficit = min(self._runs[run_id].deficit, 0.0)
