"""A pool of generation actors without Ray and vLLM: tokens come when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlhfless.fleet.replica import ReplicaLost
from rlhfless.functions.generation.messages import GenerateRequest, GroupFinished, SampleItem, SampleKey
from rlhfless.records import FinishReason, Group, Prompt, ReplicaState, Rollout


def prompt(name: str) -> Prompt:
    return Prompt(name, (1, 2, 3), f"prompt {name}")


def rollout(item: SampleItem, actor: str, tokens: int, reason: FinishReason = FinishReason.STOP) -> Rollout:
    """A rollout of `tokens` tokens in all; those that the item brought along are kept."""
    prior = [] if item.prior is None else list(item.prior.token_ids)
    token_ids = np.array(prior + [7] * (tokens - len(prior)), dtype=np.int64)
    return Rollout(
        item.prompt_id,
        item.sample_index,
        item.seed,
        token_ids,
        np.zeros(len(token_ids), np.float32),
        "text",
        reason,
        (),
        actor,
        0.0,
        1.0,
    )


def group(name: str, samples: int = 1) -> Group:
    items = [SampleItem(name, i, (1, 2, 3), seed=i) for i in range(samples)]
    return Group(prompt(name), tuple(rollout(item, "a", 2) for item in items))


@dataclass
class FakeActor:
    """An actor that holds what it was given until it is told to finish it."""

    name: str
    state: ReplicaState = ReplicaState.SERVING
    requests: list[GenerateRequest] = field(default_factory=list)
    running: dict[SampleKey, SampleItem] = field(default_factory=dict)
    queues: list[asyncio.Queue[Any]] = field(default_factory=list)
    queue_of: dict[SampleKey, asyncio.Queue[Any]] = field(default_factory=dict)

    async def stream(self, work: Any, method: str, call: Any, request: Any, timeout_s: float) -> AsyncIterator[Any]:
        assert method == "generate"
        queue: asyncio.Queue[Any] = asyncio.Queue()
        self.requests.append(request)
        self.queues.append(queue)
        self.running |= {item.key: item for item in request.items}
        self.queue_of |= {item.key: queue for item in request.items}
        left = len(request.items)
        while left:
            event = await queue.get()
            if isinstance(event, Exception):
                raise event
            left -= len(event.rollouts)
            yield event

    async def call(self, method: str, call: Any, keys: Sequence[SampleKey], **_: Any) -> int:
        assert method == "abort"
        for prompt_id in dict.fromkeys(key[0] for key in keys):
            self._deliver([key for key in keys if key[0] == prompt_id], 5, FinishReason.ABORT)
        return len(keys)

    def drain(self) -> None:
        self.state = ReplicaState.DRAINING

    def finish(self, *prompt_ids: str, tokens: int = 9) -> None:
        """End all samples of these prompts, or of all."""
        for prompt_id in prompt_ids or sorted({key[0] for key in self.running}):
            self._deliver([key for key in self.running if key[0] == prompt_id], tokens, FinishReason.STOP)

    def _deliver(self, keys: Sequence[SampleKey], tokens: int, reason: FinishReason) -> None:
        done = tuple(rollout(self.running.pop(key), self.name, tokens, reason) for key in keys)
        self.queue_of[keys[0]].put_nowait(GroupFinished("x", done))

    def fail(self, error: Exception) -> None:
        for queue in self.queues:
            queue.put_nowait(error)

    def die(self) -> None:
        self.state = ReplicaState.DEAD
        self.fail(ReplicaLost(f"{self.name} died"))


class FakePool:
    """The part of a Pool that a generation stage uses."""

    def __init__(self, *names: str) -> None:
        self.actors = {name: FakeActor(name) for name in names}

    def __getitem__(self, name: str) -> FakeActor:
        return self.actors[name]

    def serving(self) -> tuple[FakeActor, ...]:
        return tuple(actor for actor in self.actors.values() if actor.state == ReplicaState.SERVING)

    def join(self, name: str) -> FakeActor:
        self.actors[name] = FakeActor(name)
        return self.actors[name]
