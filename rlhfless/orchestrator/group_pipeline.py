"""Score groups and compute their per-token outputs while generation continues.

Each stage sends all waiting groups in one call. Before the call it waits WINDOW_S for more groups, because groups
complete in bursts; after the last group it does not wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Generic, TypeVar

import numpy as np

from rlhfless.records import Experience, FloatArray, Group, Score
from rlhfless.util.tasks import gather_or_cancel

T = TypeVar("T")

WINDOW_S = 0.03
"""Seconds that a stage waits for more groups after the first. A call costs about 4 ms of transport on cores that
generation needs. Most of a step's 32 groups complete within 30 ms of another one, and a step takes seconds."""

ScoredGroups = Sequence[Sequence[Score]]
ScoreGroups = Callable[[Sequence[Group]], Awaitable[ScoredGroups]]
ComputeOutput = Callable[[Sequence[Group]], Awaitable[Sequence[Sequence[FloatArray]]]]


async def collect(
    groups: AsyncIterator[Group], count: int, score: ScoreGroups, outputs: Mapping[str, ComputeOutput]
) -> Experience:
    """Run `score` and each of `outputs` on groups as they complete, and return all groups with the results.

    After `count` groups the stages do not wait for more, even if the stream has not ended. Raises RuntimeError if the
    stream ends earlier, or the error of a stage or the stream, which cancels the other stages.
    """
    complete: dict[str, Group] = {}
    stages: dict[str, _Stage[Any]] = {name: _Stage(work) for name, work in {"score": score, **outputs}.items()}

    async def feed() -> None:
        async for group in groups:
            complete[group.prompt.prompt_id] = group
            for stage in stages.values():
                stage.put(group, last=len(complete) == count)
        if len(complete) < count:
            raise RuntimeError(f"the stream of groups ended after {len(complete)} of {count} groups")

    await gather_or_cancel(feed(), *(stage.run() for stage in stages.values()))

    return Experience(
        tuple(
            complete[prompt_id].adding(**{name: stage.results[prompt_id] for name, stage in stages.items()})
            for prompt_id in sorted(complete)
        )
    )


async def with_outputs(experience: Experience, outputs: Mapping[str, ComputeOutput]) -> Experience:
    """Compute per-token outputs of complete experience, and add them to it."""
    groups = experience.groups
    for name, compute in outputs.items():
        values = await compute(groups)
        groups = tuple(group.adding(None, **{name: of}) for group, of in zip(groups, values, strict=True))
    return replace(experience, groups=groups)


def zeros_of(group: Group, width: int = 1) -> list[FloatArray]:
    """Return the output for a group that a function does not compute. `width`: see FunctionSpec."""
    more = () if width == 1 else (width,)
    return [np.zeros((sample.model_tokens, *more), np.float32) for sample in group.samples]


class _Stage(Generic[T]):
    """A consumer of groups that computes a T for each sample, in batches."""

    def __init__(self, work: Callable[[Sequence[Group]], Awaitable[Sequence[Sequence[T]]]]) -> None:
        self._work = work
        self._waiting: list[Group] = []
        self._any, self._ended = asyncio.Event(), asyncio.Event()
        self.results: dict[str, Sequence[T]] = {}

    def put(self, group: Group, *, last: bool) -> None:
        self._waiting.append(group)
        self._any.set()
        if last:
            self._ended.set()

    async def run(self) -> None:
        while self._waiting or not self._ended.is_set():
            await self._any.wait()
            with suppress(TimeoutError):
                async with asyncio.timeout(WINDOW_S):
                    await self._ended.wait()
            batch, self._waiting = self._waiting, []
            self._any.clear()
            results = await self._work(batch)
            for group, result in zip(batch, results, strict=True):
                self.results[group.prompt.prompt_id] = result
