"""Scoring and reference work on groups while others are still being generated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import numpy as np
import pytest

from fakes.fake_cluster import group
from rlhfless.orchestrator import group_pipeline
from rlhfless.orchestrator.group_pipeline import collect
from rlhfless.records import FloatArray, Group, Score


async def test_a_group_is_scored_and_referred_before_the_last_one_is_drawn() -> None:
    scored: list[str] = []
    first_is_through = asyncio.Event()

    async def groups() -> AsyncIterator[Group]:
        yield group("b")
        await asyncio.wait_for(first_is_through.wait(), 30)
        yield group("a")

    async def score(batch: Sequence[Group]) -> list[list[Score]]:
        scored.extend(g.prompt.prompt_id for g in batch)
        return [[Score(1.0, {}) for _ in g.rollouts] for g in batch]

    async def reference(batch: Sequence[Group]) -> list[list[FloatArray]]:
        if scored == ["b"]:
            first_is_through.set()
        return [[np.full(2, -1.0, np.float32) for _ in g.rollouts] for g in batch]

    collected = await collect(groups(), 2, score, {"reference_logprobs": reference})
    assert scored == ["b", "a"]
    assert [g.prompt.prompt_id for g in collected.groups] == ["a", "b"]
    assert [sample.outputs["reference_logprobs"].tolist() for sample in collected.samples] == [[-1.0, -1.0]] * 2
    assert [score.total for score in collected.scores] == [1.0, 1.0]


async def test_groups_that_come_one_after_the_other_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_pipeline, "WINDOW_S", 60.0)
    sizes: list[int] = []

    async def groups() -> AsyncIterator[Group]:
        for name in "abc":
            yield group(name)
            await asyncio.sleep(0.01)

    async def score(batch: Sequence[Group]) -> list[list[Score]]:
        sizes.append(len(batch))
        return [[Score(0.0, {})] for _ in batch]

    # Much sooner than the window: nothing waits after the end of generation.
    await asyncio.wait_for(collect(groups(), 3, score, {}), 30)
    assert sizes == [3]


async def test_what_has_piled_up_is_one_call() -> None:
    sizes: list[int] = []
    scoring, piled_up = asyncio.Event(), asyncio.Event()

    async def groups() -> AsyncIterator[Group]:
        yield group("a")
        await asyncio.wait_for(scoring.wait(), 30)
        for name in "bcd":
            yield group(name)
        piled_up.set()

    async def slow_score(batch: Sequence[Group]) -> list[list[Score]]:
        sizes.append(len(batch))
        scoring.set()
        await asyncio.wait_for(piled_up.wait(), 30)
        return [[Score(0.0, {})] for _ in batch]

    await collect(groups(), 4, slow_score, {})
    assert sizes == [1, 3]


async def test_the_last_group_is_scored_before_the_stream_has_ended() -> None:
    scored = asyncio.Event()

    async def groups() -> AsyncIterator[Group]:
        yield group("a")
        await asyncio.wait_for(scored.wait(), 30)

    async def score(batch: Sequence[Group]) -> list[list[Score]]:
        scored.set()
        return [[Score(0.0, {})] for _ in batch]

    await collect(groups(), 1, score, {})


async def test_a_stream_that_ends_too_soon_is_an_error() -> None:
    async def groups() -> AsyncIterator[Group]:
        yield group("a")

    async def score(batch: Sequence[Group]) -> list[list[Score]]:
        return [[Score(0.0, {})] for _ in batch]

    with pytest.raises(RuntimeError, match="ended after 1 of 2 groups"):
        await asyncio.wait_for(collect(groups(), 2, score, {}), 30)


async def test_a_failing_stage_stops_the_others_and_is_raised_as_itself() -> None:
    stopped = asyncio.Event()

    async def groups() -> AsyncIterator[Group]:
        yield group("a")
        try:
            await asyncio.sleep(60)
        finally:
            stopped.set()

    async def score(_: Sequence[Group]) -> list[list[Score]]:
        raise ValueError("no such answer")

    with pytest.raises(ValueError, match="no such answer"):
        await asyncio.wait_for(collect(groups(), 2, score, {}), 30)
    assert stopped.is_set()
