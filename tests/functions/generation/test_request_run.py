"""What comes out of a request, and when: whole groups, what was aborted at once, and beats that count all tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fakes.builders import drawn
from rlhfless.functions.base import LeaseTerms
from rlhfless.functions.calls import Call
from rlhfless.functions.generation.deployment import GenerationFunction
from rlhfless.functions.generation.engine import Rest, Sampled, SampleRequest
from rlhfless.functions.generation.members import Member, RunTerms
from rlhfless.functions.generation.messages import (
    Ended,
    GenerateRequest,
    GroupsFinished,
    Progress,
    SampleItem,
    Sampling,
    StreamEnd,
)
from rlhfless.functions.generation.sampling import RequestRun
from rlhfless.prefixes.evicted import CachedBlocks
from rlhfless.records import FinishReason, Probe, PublishedWeights, VersionSpan, WeightVersion
from rlhfless.weights.address import StoreAddress, StoreNotShared


class FakeEngine:
    """Draws when the test says so. Samples are known by their seed here."""

    block_tokens = 16
    rest = Rest()

    def __init__(self) -> None:
        self.asked: dict[int, SampleRequest] = {}
        self._futures: dict[str, asyncio.Future[Sampled]] = {}
        self.drawn: dict[int, int] = {}
        self.text = "text"
        self.drafts: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        """By seed: drafted and accepted."""

    async def sample(self, request: SampleRequest) -> Sampled:
        assert request.seed is not None
        self.asked[request.seed] = request
        self._futures[request.request_id] = asyncio.get_running_loop().create_future()
        try:
            return await self._futures[request.request_id]
        finally:
            del self._futures[request.request_id]

    def progress(self) -> dict[str, int]:
        running = {seed: asked.request_id for seed, asked in self.asked.items() if asked.request_id in self._futures}
        return {name: self.drawn.get(seed, 0) for seed, name in running.items()}

    def require_heartbeat(self, limit_s: float) -> None: ...

    async def abort(self, request_ids: Iterable[str]) -> None:
        for seed, request in self.asked.items():
            if request.request_id in request_ids and request.request_id in self._futures:
                self._end(seed, self.drawn.get(seed, 0), FinishReason.ABORT)

    def finish(self, *seeds: int, tokens: int, reason: FinishReason = FinishReason.STOP) -> None:
        for seed in seeds:
            self._end(seed, tokens, reason)

    def _end(self, seed: int, tokens: int, reason: FinishReason) -> None:
        name = self.asked[seed].request_id
        drafted, accepted = self.drafts[seed] if self.drafts else ((), ())
        sampled = Sampled(
            name,
            (7,) * tokens,
            (-1.0,) * tokens,
            reason,
            (),
            0,
            self.text,
            None,
            drafted,
            accepted,
            draft_s=0.25 * len(drafted),
            verify_s=0.5 * len(drafted),
        )
        self._futures[name].set_result(sampled)


def request(items: Sequence[SampleItem], interval_s: float = 60.0) -> GenerateRequest:
    return GenerateRequest(tuple(items), Sampling(100, 1.0), "v", "a", interval_s, 60.0, 60.0)


CALL = Call("run", 1, 1)
ITEMS = [SampleItem("p", 0, (1,), seed=0), SampleItem("p", 1, (1,), seed=1), SampleItem("p", 2, (1,), seed=2)]


async def groups_of(events: Any, count: int) -> list[list[tuple[int, FinishReason]]]:
    """(sample, reason) of the next groups."""
    found: list[list[tuple[int, FinishReason]]] = []
    while len(found) < count:
        event = await anext(events)
        assert isinstance(event, GroupsFinished)
        found += [[(rollout.sample_index, rollout.finish_reason) for rollout in group] for group in event.groups]
    return found


async def test_a_group_comes_when_its_last_sample_has_ended() -> None:
    engine = FakeEngine()
    events = RequestRun(engine, request(ITEMS), CALL, "i").events()
    await asyncio.sleep(0)
    engine.finish(2, 0, tokens=4)
    engine.finish(1, tokens=5)
    assert await groups_of(events, 1) == [[(i, FinishReason.STOP) for i in range(3)]]


async def test_what_was_aborted_comes_at_once_with_those_that_had_ended() -> None:
    engine = FakeEngine()
    run = RequestRun(engine, request(ITEMS), CALL, "i")
    events = run.events()
    await asyncio.sleep(0)
    engine.finish(0, tokens=4)
    engine.drawn = {1: 3}
    await run.abort([("p", 1)])
    assert await groups_of(events, 1) == [[(0, FinishReason.STOP), (1, FinishReason.ABORT)]]
    engine.finish(2, tokens=9)  # the one that stayed
    assert await groups_of(events, 1) == [[(2, FinishReason.STOP)]]


async def test_samples_aborted_together_come_together() -> None:
    engine = FakeEngine()
    run = RequestRun(engine, request(ITEMS), CALL, "i")
    events = run.events()
    await asyncio.sleep(0)
    await run.abort([("p", 1), ("p", 2)])
    await asyncio.sleep(0)
    assert await groups_of(events, 1) == [[(1, FinishReason.ABORT), (2, FinishReason.ABORT)]]


async def test_groups_that_are_aborted_together_come_in_one_message() -> None:
    """One each made as many requests of the actor where they continued: 64 of them, and its aborts and heartbeats
    queued."""
    engine = FakeEngine()
    items = [SampleItem(prompt, 0, (1,), seed=seed) for seed, prompt in enumerate("abc")]
    run = RequestRun(engine, request(items), CALL, "i")
    events = run.events()
    await asyncio.sleep(0)
    await run.abort(None)
    await asyncio.sleep(0)
    event = await anext(events)
    assert isinstance(event, GroupsFinished)
    assert [[rollout.prompt_id for rollout in group] for group in event.groups] == [["a"], ["b"], ["c"]]


async def test_beats_count_what_was_brought_along_and_name_those_that_wait_for_siblings() -> None:
    prior = drawn("p", 1, [7] * 10, seed=1, reason=FinishReason.ABORT, actor="b")
    items = [ITEMS[0], SampleItem("p", 1, (1,), seed=1, prior=prior), ITEMS[2]]
    engine = FakeEngine()
    events = RequestRun(engine, request(items, interval_s=0.01), CALL, "i").events()
    await asyncio.sleep(0)
    engine.drawn = {1: 3, 2: 6}
    engine.finish(0, tokens=100, reason=FinishReason.LENGTH)
    beat = await anext(events)
    assert beat == Progress("i", {("p", 1): 12, ("p", 2): 6}, {("p", 0): Ended(100, truncated=True)})


async def test_a_moved_sample_keeps_its_tokens_and_draws_the_last_one_again() -> None:
    spans = (VersionSpan("v", 0, 10),)
    prior = drawn("p", 0, range(10), [-2.0] * 10, seed=1, reason=FinishReason.ABORT, spans=spans, actor="b")
    engine = FakeEngine()
    events = RequestRun(engine, request([SampleItem("p", 0, (1,), seed=0, prior=prior)]), CALL, "i").events()
    await asyncio.sleep(0)
    asked = engine.asked[0]
    assert (asked.token_ids, asked.drawn_tokens, asked.max_tokens) == ((1, *range(9)), 9, 91)
    engine.finish(0, tokens=3)
    event = await anext(events)
    assert isinstance(event, GroupsFinished)
    ((after,),) = event.groups
    assert after.token_ids.tolist() == [*range(9), 7, 7, 7]
    assert after.logprobs.tolist() == [-2.0] * 9 + [-1.0] * 3
    assert after.version_spans == (VersionSpan("v", 0, 9),)

    events = RequestRun(engine, request([SampleItem("p", 0, (1,), seed=0, prior=prior)]), CALL, "i").events()
    await asyncio.sleep(0)
    engine.finish(0, tokens=0, reason=FinishReason.ABORT)  # in the queue
    event = await anext(events)
    assert isinstance(event, GroupsFinished)
    assert event.groups[0][0].token_ids.tolist() == list(range(10))
    assert event.groups[0][0].version_spans == spans


async def test_a_text_of_the_engine_that_no_file_can_hold_is_shown_as_escapes() -> None:
    engine = FakeEngine()
    engine.text = "a\ud800\0"
    events = RequestRun(engine, request(ITEMS[:1]), CALL, "i").events()
    await asyncio.sleep(0)
    engine.finish(0, tokens=4)
    event = await anext(events)
    assert isinstance(event, GroupsFinished)
    assert [rollout.text for rollout in event.groups[0]] == ["a\\ud800\\x00"]


async def test_tokens_that_were_cached_and_are_computed_again_are_counted() -> None:
    """The fake engine finds nothing in its cache: the second sibling's block was there, and is gone."""
    engine = FakeEngine()
    items = [SampleItem("p", number, tuple(range(20)), seed=number) for number in range(2)]
    events = RequestRun(engine, request(items), CALL, "i", CachedBlocks(16)).events()
    await asyncio.sleep(0)
    engine.finish(0, 1, tokens=3)
    *_, end = [event async for event in events]
    assert isinstance(end, StreamEnd)
    assert (end.reply.usage.input_tokens, end.reply.usage.evicted_tokens) == (40, 16)


async def test_each_prompt_s_earlier_responses_go_to_the_engine_once() -> None:
    """With the first sample that asks; its siblings have them from there."""
    engine = FakeEngine()
    asked = replace(request(ITEMS), earlier={"p": (np.array([4, 5], np.int32), np.array([6], np.int32))})
    run = RequestRun(engine, asked, CALL, "i")
    await asyncio.sleep(0)
    assert [engine.asked[seed].earlier for seed in range(3)] == [((4, 5), (6,)), (), ()]
    await run.cancel()


async def test_drafts_are_counted_by_their_place() -> None:
    engine = FakeEngine()
    engine.drafts = [((4, 3), (2, 1)), ((), ()), ((1, 1), (1, 0))]
    events = RequestRun(engine, request(ITEMS), CALL, "i").events()
    await asyncio.sleep(0)
    engine.finish(0, 1, 2, tokens=3)
    *_, end = [event async for event in events]
    assert isinstance(end, StreamEnd)
    assert (end.reply.usage.drafted, end.reply.usage.accepted) == ((5, 4), (3, 1))
    assert (end.reply.usage.draft_s, end.reply.usage.verify_s) == (1.0, 2.0)


def member_of(engine: Any, folder: Path) -> Member:
    terms = RunTerms(store=StoreAddress("file", str(folder)), probe_tolerance=1e-4, lease=LeaseTerms(60, 60))
    return Member(engine, terms)


async def test_a_driver_that_takes_over_finds_no_samples_of_the_one_before() -> None:
    """The stream to a driver that was killed ends only when it next yields: its samples would still be running."""
    engine: Any = FakeEngine()
    member = member_of(engine, Path())
    earlier, own = (RequestRun(engine, request([SampleItem("p", i, (1, 2), seed=i)]), CALL, "replica") for i in (0, 1))
    member.requests = {earlier: 1, own: 2}
    await asyncio.sleep(0)
    await member.end_earlier(2)
    assert list(engine.progress()) == [engine.asked[1].request_id]
    await own.cancel()


async def test_a_load_from_a_folder_that_is_not_the_learners_names_the_node(tmp_path: Path) -> None:
    function = GenerationFunction.__new__(GenerationFunction)
    function._alone = member_of(FakeEngine(), tmp_path)
    published = PublishedWeights(WeightVersion("run", 1, 2, "digest"), str(tmp_path / "w"), 1, 1, Probe((), ()))
    with pytest.raises(StoreNotShared, match="is not the folder that the learner writes to"):
        await GenerationFunction.load.__wrapped__(function, Call("run", 1, 2), published)  # type: ignore[attr-defined]
