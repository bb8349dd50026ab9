"""The generation stage: samples go to actors, finished groups come back, and work can move while it runs.

Samples of a prompt go to one actor, where they share the prompt's KV. Work moves in one way only: samples are aborted
where they run, come back with the tokens so far, and go on elsewhere from there. Draining an actor, giving a new one
something to do, and losing one are all that same move; nothing that was drawn is drawn again, except what a dead actor
had not delivered. Finished samples go into the journal before they count, and what the journal has is not drawn.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, replace

from rlhfless.fleet.pool import Pool
from rlhfless.fleet.replica import Replica, ReplicaLost
from rlhfless.functions.base import Call
from rlhfless.functions.generation.messages import (
    GenerateRequest,
    GroupFinished,
    Progress,
    SampleItem,
    SampleKey,
    Sampling,
    StreamEnd,
)
from rlhfless.records import FinishReason, Group, Prompt, Rollout, Work, sample_seed
from rlhfless.records.journal import Journal
from rlhfless.spec import RunSpec

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Draw:
    """What one generation stage is asked to draw."""

    call: Call
    prompts: tuple[Prompt, ...]
    samples_per_prompt: int
    sampling: Sampling
    version: str
    work: Work
    seed: int
    seed_step: int
    """Enters the seeds: the step, or one number for all evaluations, which then differ by the weights alone."""

    def items(self, prompt: Prompt) -> tuple[SampleItem, ...]:
        """The samples of one prompt. Their seeds do not depend on where they are drawn."""
        return tuple(
            SampleItem(
                prompt.prompt_id,
                index,
                prompt.token_ids,
                sample_seed(self.seed, self.seed_step, prompt.prompt_id, index),
            )
            for index in range(self.samples_per_prompt)
        )


def sampling_of(spec: RunSpec, *, greedy: bool = False) -> Sampling:
    """The spec's sampling settings, or their greedy variant."""
    generation = spec.generation
    return Sampling(
        max_tokens=generation.max_tokens,
        temperature=0.0 if greedy else generation.temperature,
        top_p=1.0 if greedy else generation.top_p,
        top_k=0 if greedy else generation.top_k,
        stop=generation.stop,
        stop_token_ids=generation.stop_token_ids,
    )


def assign(prompts: Sequence[Prompt], actors: Sequence[str]) -> dict[str, tuple[Prompt, ...]]:
    """Which prompts go to which actor: in turn, so that the actors get equally many."""
    return {actor: tuple(prompts[i :: len(actors)]) for i, actor in enumerate(actors)}


class GenerationStage:
    """One stage's generation over the actors of a pool."""

    def __init__(self, pool: Pool, draw: Draw, spec: RunSpec, journal: Journal | None = None) -> None:
        self._pool = pool
        self._draw = draw
        self._spec = spec
        self._journal = journal
        self._prompts = {prompt.prompt_id: prompt for prompt in draw.prompts}
        self._finished: dict[str, list[Rollout]] = {prompt_id: [] for prompt_id in self._prompts}
        self._where: dict[SampleKey, tuple[str, SampleItem]] = {}
        self._events: asyncio.Queue[_Event] = asyncio.Queue()
        self._streams: set[asyncio.Task[None]] = set()
        self.progress: dict[SampleKey, int] = {}
        """Tokens so far of the samples that are running, by the last beats."""

    @property
    def step(self) -> int:
        return self._draw.call.step

    async def groups(self) -> AsyncIterator[Group]:
        """Groups as they are complete. Raises what an actor raised, JournalError, or ReplicaLost if none is left."""
        try:
            for group in self._recall():
                yield group
            unfinished = self._unfinished()
            actors = [actor.name for actor in self._pool.serving()]
            if unfinished and not actors:
                raise ReplicaLost(f"no generation actor is there for {len(unfinished)} prompts")
            for name, prompts in assign(unfinished, actors).items():
                self._submit(name, [item for prompt in prompts for item in self._missing(prompt)])
            while self._finished:
                for group in self._handle(await self._events.get()):
                    yield group
            # Each stream still has its end to deliver, which carries the call's entry in the ledger.
            await asyncio.gather(*self._streams)
        finally:
            await self._stop_streams()

    def _recall(self) -> Iterable[Group]:
        """Take what the journal has of this draw; yields the groups that are complete with it."""
        if self._journal is None:
            return
        seeds = {item.key: item.seed for prompt in self._draw.prompts for item in self._draw.items(prompt)}
        for rollout in self._journal.rollouts(self._draw.call.step):
            # Another seed means another draw, such as one of a data set that has been edited since.
            if seeds.get(rollout.key) == rollout.seed:
                self._finished[rollout.prompt_id].append(rollout)
        for prompt in self._draw.prompts:
            yield from self._completed(prompt.prompt_id)

    def _unfinished(self) -> list[Prompt]:
        return [prompt for prompt in self._draw.prompts if prompt.prompt_id in self._finished]

    def _missing(self, prompt: Prompt) -> list[SampleItem]:
        there = {rollout.sample_index for rollout in self._finished[prompt.prompt_id]}
        return [item for item in self._draw.items(prompt) if item.sample_index not in there]

    async def drain(self, actor: Replica) -> None:
        """Take an actor out of the stage: its samples go on elsewhere. It gets no new ones from here on."""
        actor.drain()
        await self._abort(actor, [key for key, (name, _) in self._where.items() if name == actor.name])

    async def rebalance(self) -> None:
        """Move running samples from the busiest actor to the idlest, such as one that has just joined."""
        load = Counter({actor.name: 0 for actor in self._pool.serving()})
        load.update(name for name, _ in self._where.values() if name in load)
        if len(load) < 2:
            return
        (busiest, most), (_, least) = load.most_common()[0], load.most_common()[-1]
        keys = [key for key, (name, _) in self._where.items() if name == busiest]
        # The last ones: whole groups, since the samples of a prompt were submitted one after the other.
        moving = keys[len(keys) - (most - least) // 2 :]
        if moving:
            await self._abort(self._pool[busiest], moving)

    async def _abort(self, actor: Replica, keys: Sequence[SampleKey]) -> None:
        if keys:
            await actor.call(
                "abort", self._draw.call, keys, timeout_s=self._spec.timeouts.sync_s, waiting_for="an abort"
            )

    def _submit(self, name: str, items: Sequence[SampleItem]) -> None:
        if not items:
            return
        self._where.update((item.key, (name, item)) for item in items)
        request = GenerateRequest(
            items=tuple(items),
            sampling=self._draw.sampling,
            version=self._draw.version,
            actor=name,
            progress_interval_s=self._spec.generation.progress_interval_s,
            beat_s=self._spec.recovery.beat_s,
            timeout_s=self._spec.timeouts.generate_s,
        )
        task = asyncio.create_task(self._stream(self._pool[name], request))
        self._streams.add(task)
        task.add_done_callback(self._streams.discard)

    async def _stream(self, actor: Replica, request: GenerateRequest) -> None:
        try:
            events = actor.stream(
                self._draw.work, "generate", self._draw.call, request, timeout_s=self._spec.recovery.beat_s
            )
            async for event in events:
                self._events.put_nowait(event)
        except ReplicaLost as lost:
            self._events.put_nowait(_Lost(actor.name, [item.key for item in request.items], lost))
        except Exception as error:
            self._events.put_nowait(error)

    def _handle(self, event: _Event) -> Iterable[Group]:
        match event:
            case GroupFinished(rollouts=rollouts):
                yield from self._take(rollouts)
            case Progress(tokens=tokens):
                self.progress.update(tokens)
            case _Lost(actor=name, keys=keys, error=error):
                self._move_lost(name, keys, error)
            case Exception():
                raise event

    def _take(self, rollouts: Sequence[Rollout]) -> Iterable[Group]:
        """Keep what has ended, and let go on elsewhere what was aborted; yields the group if it is complete."""
        ended = [rollout for rollout in rollouts if rollout.finish_reason != FinishReason.ABORT]
        if self._journal is not None and ended:
            self._journal.add(self._draw.call.step, ended)
        unfinished = []
        for rollout in rollouts:
            _, item = self._where.pop(rollout.key)
            self.progress.pop(rollout.key, None)
            if rollout.finish_reason == FinishReason.ABORT:
                unfinished.append(replace(item, prior=rollout if len(rollout.token_ids) else item.prior))
            else:
                self._finished[rollout.prompt_id].append(rollout)
        self._continue(unfinished)
        yield from self._completed(rollouts[0].prompt_id)

    def _completed(self, prompt_id: str) -> Iterable[Group]:
        """The prompt's group, once, when all of its samples are there."""
        if len(self._finished[prompt_id]) == self._draw.samples_per_prompt:
            complete = sorted(self._finished.pop(prompt_id), key=lambda rollout: rollout.sample_index)
            yield Group(self._prompts[prompt_id], tuple(complete))

    def _continue(self, items: Sequence[SampleItem]) -> None:
        """Submit items to the actor that has least to do."""
        if items:
            load = Counter({actor.name: 0 for actor in self._pool.serving()})
            if not load:
                raise ReplicaLost(f"no generation actor is left for {len(items)} unfinished samples")
            load.update(name for name, _ in self._where.values() if name in load)
            self._submit(load.most_common()[-1][0], items)

    def _move_lost(self, name: str, keys: Sequence[SampleKey], error: ReplicaLost) -> None:
        items = [self._where.pop(key)[1] for key in keys if key in self._where]
        log.warning("%s was lost with %d samples, which go to other actors: %s", name, len(items), error)
        self._continue(items)

    async def _stop_streams(self) -> None:
        streams = list(self._streams)
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class _Lost:
    actor: str
    keys: Sequence[SampleKey]
    error: ReplicaLost


_Event = GroupFinished | Progress | StreamEnd | _Lost | Exception
