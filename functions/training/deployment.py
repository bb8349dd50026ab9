"""The base of functions whose model is trained: a front whose ranks share the model and the batch
(rlhfless.functions.ranks).

`learn` goes to all ranks with the whole batch. It is idempotent by step: a repeated call gets the first call's answer,
so a retry can never take a second optimiser step. After a lost rank a new replica continues from a checkpoint.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any, TypeAlias

import ray

from rlhfless.algorithms.batch import PackedBatch
from rlhfless.algorithms.passes import Passes
from rlhfless.functions.base import Call, CallUsage, Reply
from rlhfless.functions.ranks.front import RankedFunction
from rlhfless.functions.training.settings import TrainedSettings

Learned: TypeAlias = Reply[Mapping[str, float]]
"""The metrics of a training step."""


class TrainedFunction(RankedFunction):
    """The front of a trained model; `actor` is a TrainingActor."""

    async def __init__(self, settings: TrainedSettings) -> None:  # type: ignore[misc]
        self._learning: tuple[Call, asyncio.Task[Learned]] | None = None
        self._step = 0
        """The last training step of the weights."""
        self._asked = asyncio.Event()
        """Set, and replaced, when a step is to be learned."""
        await super().__init__(settings)  # type: ignore[misc]  # Serve awaits constructors

    @property
    def _step_of_weights(self) -> int:
        return self._step

    async def learn(self, call: Call, batch: PackedBatch, passes: Passes) -> Learned:
        """One training step: an optimiser step per mini-batch of each pass. Returns the metrics.

        Idempotent by step: a repeated call, even during the first, gets the answer of the first.
        """
        self.admit(call)
        if self._learning is None or self._learning[0] != call:
            self._learning = (call, asyncio.create_task(self._learn(call, batch, passes)))
            self._asked.set()
            self._asked = asyncio.Event()
        return await asyncio.shield(self._learning[1])

    async def _learn(self, call: Call, batch: PackedBatch, passes: Passes) -> Learned:
        start_s = time.time()
        metrics = dict((await self._group.all("learn", ray.put(batch), passes))[0])
        self._step = call.step
        shared = int(metrics.pop("shared_prompt_tokens", 0))
        tokens, sequences = passes.epochs * len(batch.tokens), passes.epochs * batch.sequences
        usage = CallUsage(input_tokens=tokens, cached_tokens=shared, sequences=sequences)
        return self.reply(metrics, start_s, usage)

    async def check_shared_storage(self, call: Call, token: str) -> Reply[tuple[str, ...]]:
        """Why ranks cannot read a file that the run has written, or write beside it; empty if all can."""
        self.admit(call)
        start_s = time.time()
        answers: list[str | None] = await self._group.all("check_shared_storage", token)
        return self.reply(tuple(sorted({fault for fault in answers if fault})), start_s)

    async def restore(self, call: Call, location: str) -> Reply[None]:
        """Go on from a checkpoint, as if its step were the last that was learned. Idempotent."""
        return await self._take_state(call, "restore", location)

    async def _take_state(self, call: Call, method: str, place: str) -> Reply[None]:
        """Go on from a state, which a method of the ranks reads from a place."""
        self.admit(call)
        start_s = time.time()
        await self._group.all(method, place)
        self._learning, self._step = None, call.step
        return self.reply(None, start_s)

    async def checkpoint(self, call: Call, location: str, notes: Mapping[str, Any], background: bool) -> Reply[bool]:
        """Save model, optimiser and the run's `notes`, beside and renamed. Returns whether it is still being written:
        with `background`, and where there is memory for a copy of the state."""
        self.admit(call)
        start_s = time.time()
        later: list[bool] = await self._group.all("save", location, notes, background)
        return self.reply(all(later), start_s)

    async def wait_written(self, call: Call) -> Reply[None]:
        """Wait until the checkpoint that was begun is complete. Raises CheckpointError."""
        self.admit(call)
        start_s = time.time()
        await self._group.all("wait_written")
        return self.reply(None, start_s)
