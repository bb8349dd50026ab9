"""Which weights a draw gets: engines that load between two draws have one version for all of them.

    async with versions.drawing(oldest=3) as published:
        ...   # the engines may be brought to `published`, and stay there

A draw of the version that others draw with joins them. A draw of another version waits until they have ended, and the
draws that come after it wait for it, so that none waits for ever. The version is the newest when the wait is over.

Engines that load in flight need none of this: each draw may begin at once, and goes on with newer weights. But weights
that are no version of the run, such as their average, are never mixed with others.

A new learner takes earlier steps again, and publishes their weights again. Meanwhile a draw of a later step, for which
they are too old, waits beside the others: those steps may have something to draw.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from rlhfless.records import PublishedWeights, WeightVersion


class OneVersion:
    """The newest weights of a run, and the draws that are under way."""

    def __init__(self, *, in_flight: bool = False) -> None:
        self._in_flight = in_flight
        self._newest: PublishedWeights | None = None
        self._drawn_with: PublishedWeights | None = None
        self._apart = False
        """Whether the draws under way are with weights that are no version of the run."""
        self._draws = 0
        self._entrance = asyncio.Lock()  # which serves in the order of arrival
        self._changed = asyncio.Event()

    @property
    def newest(self) -> PublishedWeights:
        """The weights that were published last."""
        assert self._newest is not None, "the first version is published before anything is drawn"
        return self._newest

    @newest.setter
    def newest(self, published: PublishedWeights) -> None:
        self._newest = published
        self._changed.set()

    @contextlib.asynccontextmanager
    async def drawing(self, oldest: int, apart: PublishedWeights | None = None) -> AsyncIterator[PublishedWeights]:
        """Within the block no draw of another version is under way; gives the version to draw with, which is of the
        step `oldest` or a later one, or `apart`."""
        published = None
        while published is None:
            await self._until(lambda: self.newest.version.step >= oldest)
            published = await self._enter(oldest, apart)
        try:
            yield published
        finally:
            self._draws -= 1
            self._changed.set()

    async def newer_than(self, version: WeightVersion) -> PublishedWeights:
        """Wait for a version that the learner has trained further; a new learner publishes earlier ones again."""
        await self._until(lambda: self.newest.version.step > version.step)
        return self.newest

    async def _enter(self, oldest: int, apart: PublishedWeights | None) -> PublishedWeights | None:
        """Begin a draw when it may draw with the newest version; None if that has become too old meanwhile."""
        async with self._entrance:
            mixed = self._in_flight and apart is None
            await self._until(
                lambda: not self._draws or self._drawn_with == (apart or self.newest) or (mixed and not self._apart)
            )
            if self.newest.version.step < oldest:
                return None
            self._drawn_with, self._apart = apart or self.newest, apart is not None
            self._draws += 1
            return self._drawn_with

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()
