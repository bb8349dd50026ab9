"""Run one generate request on one engine: samples run concurrently, and groups are emitted when complete."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from rlhfless.functions.calls import Call, CallUsage, Reply
from rlhfless.functions.generation.engine import (
    EngineError,
    RunEngine,
    Sampled,
    SampleRequest,
)
from rlhfless.functions.generation.messages import (
    Ended,
    GenerateRequest,
    GenerationEvent,
    GroupsFinished,
    Progress,
    SampleItem,
    SampleKey,
    StreamEnd,
)
from rlhfless.functions.generation.rollouter import Response, Rollouter, SampleTask, SingleTurn
from rlhfless.prefixes.evicted import CachedBlocks
from rlhfless.records import FinishReason, Rollout
from rlhfless.records.ledger import added
from rlhfless.records.routes import name_of
from rlhfless.util.text import storable

NOTHING_SAMPLED = Sampled("", (), (), FinishReason.ABORT, (), 0, "")
"""What a sample that is to leave generates."""


@dataclass(slots=True, eq=False)
class _Running:
    """A sample that has not ended."""

    name: str
    turn: int = 0
    """Number of the turn in the engine, from 1; 0 before the first."""
    tokens: int = 0
    """Response tokens, without those that the engine generates now."""
    aborted: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def request_id(self) -> str:
        return f"{self.name}-{self.turn}"


class RequestRun:
    """The samples of one request, from submission to the last group."""

    def __init__(
        self,
        engine: RunEngine,
        request: GenerateRequest,
        call: Call,
        incarnation: str,
        cached: CachedBlocks | None = None,
        rollouter: Rollouter | None = None,
        *,
        routes: bool = False,
    ) -> None:
        """`cached`: the prompts that the engine computed before this request, used only to count evictions. `routes`:
        the engine records routes."""
        self._engine = engine
        self._call = call
        self._rollouter = rollouter or SingleTurn()
        self._request = request
        self._incarnation = incarnation
        self._records_routes = routes
        self._start_s = time.time()
        self._missing = Counter(item.prompt_id for item in request.items)
        self._finished: dict[str, list[Rollout]] = {prompt_id: [] for prompt_id in self._missing}
        self._usage = CallUsage(version=request.version)
        self._name = f"{incarnation}-{id(self):x}"
        self._running: dict[SampleKey, _Running] = {}
        """Samples that have not ended."""
        self._earlier = dict(request.earlier)
        """For prompts without a submitted sample."""
        self._queue: asyncio.Queue[Rollout | BaseException] = asyncio.Queue()
        items = () if cached is None else request.items
        self._expected = {item.key: cached.add(item.prompt_token_ids) for item in items} if cached is not None else {}
        """Tokens of each sample that are cached when it is admitted, unless they were evicted."""
        for number, item in enumerate(request.items):
            self._running[item.key] = _Running(f"{self._name}-{number}")
        self._tasks = [asyncio.create_task(self._sample(item)) for item in request.items]

    async def events(self) -> AsyncIterator[GenerationEvent]:
        """Yield finished groups, a heartbeat per interval, and a StreamEnd.

        Raises a sample's error, or TimeoutError with the number of samples still running.
        """
        deadline = self._start_s + self._request.timeout_s
        heartbeat_s = time.time() + self._request.progress_interval_s
        while self._missing:
            try:
                first = await asyncio.wait_for(self._queue.get(), max(0.0, heartbeat_s - time.time()))
            except TimeoutError:
                if time.time() > deadline:
                    raise TimeoutError(self._overdue()) from None
                self._engine.require_heartbeat(self._request.heartbeat_s)
                heartbeat_s = time.time() + self._request.progress_interval_s
                yield self._progress()
                continue
            if groups := tuple(self._add(self._with_waiting(first))):
                yield GroupsFinished(self._incarnation, groups)
        yield StreamEnd(Reply(self._incarnation, None, self._start_s, time.time(), self._usage))

    async def abort(self, keys: Sequence[SampleKey] | None) -> int:
        """Ask the engine to stop samples; `events` still yields each, with its tokens so far."""
        chosen = [each for key, each in self._running.items() if keys is None or key in keys]
        for running in chosen:
            running.aborted.set()
        await self._engine.abort([running.request_id for running in chosen])
        return len(chosen)

    async def cancel(self) -> None:
        """Drop the running samples; call this once no more events will be read."""
        running = [task for task in self._tasks if not task.done()]
        if running:
            with contextlib.suppress(EngineError):  # an error of the abort must not hide the cause of the cancellation
                await self._engine.abort([each.request_id for each in self._running.values()])
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _sample(self, item: SampleItem) -> None:
        started_s, running = time.time(), self._running[item.key]

        async def generate(
            token_ids: tuple[int, ...], *, seed: int, max_tokens: int, generated: int, response: int
        ) -> Sampled:
            if running.aborted.is_set():
                return NOTHING_SAMPLED
            running.turn, running.tokens = running.turn + 1, response
            request = self._asked(item, running.request_id, token_ids, seed, max_tokens, generated)
            sampled = await self._engine.sample(request)
            running.tokens += len(sampled.token_ids)
            self._count(item, len(token_ids), sampled)
            return sampled

        try:
            task = SampleTask(item, self._request, self._call, generate, running.aborted)
            response = await self._rollouter.finish(task)
            self._queue.put_nowait(self._rollout(item, response, started_s))
        except Exception as error:
            self._queue.put_nowait(error)
        finally:
            del self._running[item.key]

    def _asked(
        self, item: SampleItem, name: str, token_ids: tuple[int, ...], seed: int, max_tokens: int, generated: int
    ) -> SampleRequest:
        sampling = self._request.sampling
        return SampleRequest(
            request_id=name,
            token_ids=token_ids,
            seed=seed,
            max_tokens=max_tokens - generated,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop=sampling.stop,
            stop_token_ids=sampling.stop_token_ids,
            cache_salt=self._request.version,
            drawn_tokens=generated,
            routes=name_of(self._call.step) if self._records_routes else "",
            earlier=tuple(tuple(response.tolist()) for response in self._earlier.pop(item.prompt_id, ())),
        )

    def _count(self, item: SampleItem, context_tokens: int, sampled: Sampled) -> None:
        # A sample aborted while queued has not used the cache.
        evicted = max(self._expected.pop(item.key, 0) - sampled.cached_tokens, 0) if sampled.token_ids else 0
        self._usage = CallUsage(
            input_tokens=self._usage.input_tokens + context_tokens,
            output_tokens=self._usage.output_tokens + len(sampled.token_ids),
            cached_tokens=self._usage.cached_tokens + sampled.cached_tokens,
            evicted_tokens=self._usage.evicted_tokens + evicted,
            sequences=self._usage.sequences + 1,
            version=self._request.version,
            drafted=added(self._usage.drafted, sampled.drafted),
            accepted=added(self._usage.accepted, sampled.accepted),
            draft_s=self._usage.draft_s + sampled.draft_s,
            verify_s=self._usage.verify_s + sampled.verify_s,
        )

    def _rollout(self, item: SampleItem, response: Response, started_s: float) -> Rollout:
        sampled = response.sampled
        return Rollout(
            prompt_id=item.prompt_id,
            sample_index=item.sample_index,
            seed=item.seed,
            token_ids=np.asarray(sampled.token_ids, dtype=np.int64),
            logprobs=np.asarray(sampled.logprobs, dtype=np.float32),
            text=storable(sampled.text),
            finish_reason=FinishReason(sampled.finish_reason),
            version_spans=sampled.version_spans,
            actor=self._request.actor,
            started_s=started_s if item.prior is None else item.prior.started_s,
            finished_s=time.time(),
            cached_tokens=sampled.cached_tokens,
            episode=response.episode,
            routes=sampled.routes,
        )

    def _with_waiting(self, first: Rollout | BaseException) -> list[Rollout]:
        """Return `first` and the rollouts waiting in the queue. Raises a sample's error."""
        rollouts = []
        while True:
            if isinstance(first, BaseException):
                raise first
            rollouts.append(first)
            if self._queue.empty():
                return rollouts
            first = self._queue.get_nowait()

    def _add(self, rollouts: Sequence[Rollout]) -> Iterator[tuple[Rollout, ...]]:
        """Count rollouts; yield a prompt's group once complete, or as soon as one of its rollouts was aborted."""
        for rollout in rollouts:
            self._finished[rollout.prompt_id].append(rollout)
        self._missing.subtract(rollout.prompt_id for rollout in rollouts)
        for prompt_id in dict.fromkeys(rollout.prompt_id for rollout in rollouts):
            finished = self._finished[prompt_id]
            if self._missing[prompt_id] == 0:
                del self._missing[prompt_id]
            elif all(rollout.finish_reason != FinishReason.ABORT for rollout in finished):
                continue
            self._finished[prompt_id] = []
            yield tuple(sorted(finished, key=lambda rollout: rollout.sample_index))

    def _progress(self) -> Progress:
        tokens = self._engine.progress()
        running = {
            key: each.tokens + tokens.get(each.request_id, 0) for key, each in self._running.items() if each.turn
        }
        ended = {
            rollout.key: Ended(len(rollout.token_ids), rollout.finish_reason == FinishReason.LENGTH)
            for siblings in self._finished.values()
            for rollout in siblings
        }
        return Progress(self._incarnation, running, ended)

    def _overdue(self) -> str:
        left = sum(self._missing.values())
        return (
            f"{self._request.actor}: {left} of {len(self._request.items)} samples still running after "
            f"{self._request.timeout_s:.0f} s (timeouts.generate_s)"
        )
