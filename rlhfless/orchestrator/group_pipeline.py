"""From a stream of groups to experience: scores and columns are computed while generation is still going on.

Each stage sends all waiting groups in one call. Before the call it waits WINDOW_S for more groups, because groups end
in bursts; after the end of generation it does not wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Generic, TypeVar

from rlhfless.records import Experience, FloatArray, Group, Score
from rlhfless.util.tasks import gather_or_cancel

T = TypeVar("T")

WINDOW_S = 0.03
"""How long a stage waits for more groups after the first. A call costs some 4 ms of transport on cores that generation
needs. Most of a step's 32 groups come within 30 ms of another group, and a step takes seconds."""

ScoredGroups = Sequence[Sequence[Score]]
ScoreGroups = Callable[[Sequence[Group]], Awaitable[ScoredGroups]]
ComputeColumn = Callable[[Sequence[Group]], Awaitable[Sequence[Sequence[FloatArray]]]]


async def collect(
    groups: AsyncIterator[Group], count: int, score: ScoreGroups, columns: Mapping[str, ComputeColumn]
) -> Experience:
    """Run `score` and each of `columns` on groups as they come; returns when all groups have passed them, with the
    results added to each sample.

    Once `count` groups have come, the stages do not wait for more: the stream has no further groups, though it may not
    have ended. Raises RuntimeError if the stream ends before that, and what a stage or the stream raised; then the
    other stages are cancelled.
    """
    drawn: dict[str, Group] = {}
    stages: dict[str, _Stage[Any]] = {name: _Stage(work) for name, work in {"score": score, **columns}.items()}

    async def feed() -> None:
        async for group in groups:
            drawn[group.prompt.prompt_id] = group
            for stage in stages.values():
                stage.put(group, last=len(drawn) == count)
        if len(drawn) < count:
            raise RuntimeError(f"the stream of groups ended after {len(drawn)} of {count} groups")

    await gather_or_cancel(feed(), *(stage.run() for stage in stages.values()))

    return Experience(
        tuple(
            drawn[prompt_id].adding(**{name: stage.results[prompt_id] for name, stage in stages.items()})
            for prompt_id in sorted(drawn)
        )
    )


async def with_columns(experience: Experience, columns: Mapping[str, ComputeColumn]) -> Experience:
    """The experience with columns that are computed when all of its groups are there."""
    groups = experience.groups
    for name, compute in columns.items():
        values = await compute(groups)
        groups = tuple(group.adding(None, **{name: of}) for group, of in zip(groups, values, strict=True))
    return replace(experience, groups=groups)


class _Stage(Generic[T]):
    """One consumer of groups, which adds a T to each sample."""

    def __init__(self, work: Callable[[Sequence[Group]], Awaitable[Sequence[Sequence[T]]]]) -> None:
        self._work = work
        self._queue: asyncio.Queue[Group] = asyncio.Queue()
        self._ended = asyncio.Event()
        self.results: dict[str, Sequence[T]] = {}

    def put(self, group: Group, *, last: bool) -> None:
        self._queue.put_nowait(group)
        if last:
            self._ended.set()

    async def run(self) -> None:
        while not (self._ended.is_set() and self._queue.empty()):
            batch = [await self._queue.get()]
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), WINDOW_S)
            while not self._queue.empty():
                batch.append(self._queue.get_nowait())
            results = await self._work(batch)
            for group, result in zip(batch, results, strict=True):
                self.results[group.prompt.prompt_id] = result
