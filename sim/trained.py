"""What a simulated function has learned: kept in checkpoints, and lost with its replica."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlhfless.functions.calls import Call, Reply

Learn = Callable[[], Awaitable[Reply[Any]]]


@dataclass(frozen=True, slots=True)
class TrainedState:
    """A trained model: the steps from which it has learned."""

    steps: tuple[int, ...] = ()
    digest: int = 0
    """Of the steps, their groups and tokens: equal states have learned the same."""

    @property
    def step(self) -> int:
        """The last step; 0 for the initial model."""
        return self.steps[-1] if self.steps else 0

    def after(self, step: int, groups: Sequence[int], tokens: int) -> TrainedState:
        """Return the state that has learned from one more step.

        Raises AssertionError if it is not the next step, or if a group is there twice.
        """
        assert step == self.step + 1 or not self.steps, f"step {step} is learned after step {self.step}"
        assert len({*groups}) == len(groups), f"step {step} learns twice from a group"
        text = f"{step} {tokens} {sorted(groups)}"
        return TrainedState((*self.steps, step), zlib.crc32(text.encode(), self.digest))


class TrainedModel:
    """The trained model of one replica (see rlhfless.functions.training.controller.TrainedFunction)."""

    def __init__(self) -> None:
        self.state = TrainedState()
        self._learning: tuple[Call, asyncio.Task[Reply[Any]]] | None = None
        self._asked = asyncio.Event()

    async def learn(self, call: Call, batch: Any, work: Learn) -> Reply[Any]:
        """Learn from a batch, which takes as long as `work`. A repeated call gets the first call's answer."""
        if self._learning is None or self._learning[0] != call:
            self._learning = (call, asyncio.create_task(self._learn(call, batch, work)))
            self._asked.set()
            self._asked = asyncio.Event()
        return await asyncio.shield(self._learning[1])

    async def _learn(self, call: Call, batch: Any, work: Learn) -> Reply[Any]:
        reply = await work()
        self.state = self.state.after(call.step, batch.groups, batch.tokens)
        return reply

    async def wait_learned(self, step: int, limit_s: float) -> None:
        """Wait until a step is learned. Raises TimeoutError if no call asks for that."""
        while self.state.step < step:
            if self._learning is not None and self._learning[0].step == step:
                await asyncio.shield(self._learning[1])
            else:
                await asyncio.wait_for(self._asked.wait(), limit_s)

    async def restore(self, state: TrainedState) -> None:
        """Continue from a checkpoint, after the work in progress."""
        if self._learning is not None:
            await asyncio.wait([self._learning[1]])
        self._learning, self.state = None, state

    def close(self) -> None:
        """End the work that is in progress."""
        if self._learning is not None:
            self._learning[1].cancel()
