"""The queue before a shared engine: parts worked by hand, and properties of random mixes of runs."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless.functions.generation.fair_queue import FairQueue, Ticket


class Engine:
    """Runs what the queue admits, until the test ends it."""

    def __init__(self, sequences: int, kv_tokens: int = 0) -> None:
        self.queue = FairQueue(sequences, kv_tokens)
        self.tickets: list[Ticket] = []
        self.blocks: dict[Ticket, tuple[object, list[int]]] = {}

    def enter(self, run_id: str, count: int = 1, prompt: int = 1, tokens: int = 10) -> list[Ticket]:
        new = [self.queue.enter(run_id, (0,) * prompt, tokens) for _ in range(count)]
        self.tickets += new
        self.take()
        return new

    def take(self) -> None:
        for ticket in self.tickets:
            if ticket.is_admitted and ticket not in self.blocks:
                block = self.queue.running(ticket)
                self.blocks[ticket] = block, block.__enter__()

    def end(self, ticket: Ticket, tokens: int) -> None:
        block, generated = self.blocks[ticket]
        generated.append(tokens)
        self.tickets.remove(ticket)
        block.__exit__(None, None, None)  # type: ignore[attr-defined]
        self.take()

    def running(self, run_id: str) -> int:
        return self.queue.counts(run_id)[1]

    def waiting(self, run_id: str) -> int:
        return self.queue.counts(run_id)[0]


async def test_a_run_alone_has_the_whole_engine() -> None:
    engine = Engine(4)
    first = engine.enter("a", 6)
    assert (engine.running("a"), engine.waiting("a")) == (4, 2)
    engine.end(first[0], 10)
    assert (engine.running("a"), engine.waiting("a")) == (4, 1)


async def test_a_run_that_joins_gets_what_becomes_free_until_both_have_half() -> None:
    engine = Engine(4)
    old = engine.enter("a", 8)
    engine.enter("b", 4)
    assert engine.running("b") == 0, "nothing is taken from a run"
    for number, expected in enumerate(((3, 1), (2, 2))):
        engine.end(old[number], 10)
        assert (engine.running("a"), engine.running("b")) == expected
    engine.end(old[2], 10)
    assert (engine.running("a"), engine.running("b")) == (2, 2), "each keeps its half"


async def test_what_a_run_does_not_need_goes_to_the_other() -> None:
    engine = Engine(6)
    engine.enter("b", 1)
    engine.enter("a", 8)
    assert (engine.running("a"), engine.running("b")) == (5, 1)


async def test_long_responses_do_not_bring_a_run_more_than_its_tokens() -> None:
    """One place, responses of 30 and of 10 tokens, which the queue learns: three short ones for each long one."""
    engine, served = Engine(1), {"long": 0, "short": 0}
    length = {"long": 300, "short": 100}
    for run_id in length:
        engine.enter(run_id, 400, tokens=300)
    for _ in range(300):
        (ticket,) = engine.blocks.keys() & set(engine.tickets)
        served[ticket.run_id] += length[ticket.run_id]
        engine.end(ticket, length[ticket.run_id])
    assert served["long"] == pytest.approx(served["short"], rel=0.1)


async def test_the_kv_cache_limits_what_is_admitted_and_a_prompt_counts_once() -> None:
    engine = Engine(100, kv_tokens=100)
    engine.enter("a", 9, prompt=50, tokens=20)  # 10 expected tokens each
    assert (engine.running("a"), engine.waiting("a")) == (5, 4)
    one = Engine(100, kv_tokens=100)
    one.enter("a", 1, prompt=500, tokens=20)
    assert one.running("a") == 1, "one always runs"


async def test_a_request_that_is_called_off_or_cancelled_leaves_its_place() -> None:
    engine = Engine(1)
    running, waits, cancelled, last = engine.enter("a", 4)
    assert engine.queue.call_off(waits)
    assert waits.admitted.result() is False
    assert not engine.queue.call_off(running)
    cancelled.admitted.cancel()
    engine.end(running, 3)
    assert not cancelled.is_admitted
    assert last.admitted.result() is True
    engine.end(last, 3)
    engine.queue.drop("a")
    assert engine.queue.counts("a") == (0, 0)


@settings(max_examples=60, deadline=None)
@given(
    sequences=st.integers(1, 8),
    kv_tokens=st.sampled_from((0, 40, 200)),
    counts=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
def test_all_requests_are_served_and_the_engine_never_idles(
    sequences: int, kv_tokens: int, counts: list[int], seed: int
) -> None:
    async def serve() -> None:
        engine, random_ = Engine(sequences, kv_tokens), random.Random(seed)
        for number, count in enumerate(counts):
            for _ in range(count):
                engine.enter(f"run{number}", prompt=random_.randint(1, 30), tokens=random_.randint(1, 30))
        left = sum(counts)
        while left:
            running = [ticket for ticket in engine.tickets if ticket in engine.blocks]
            assert 0 < len(running) <= sequences
            if not kv_tokens:
                assert len(running) == min(sequences, left)
            engine.end(random_.choice(running), random_.randint(0, 30))
            left -= 1

    asyncio.run(serve())
