"""One generate request on one engine: samples run side by side, groups come out as they are complete."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from rlhfless.functions.base import Reply, Usage
from rlhfless.functions.generation.messages import (
    GenerateRequest,
    GenerationEvent,
    GroupFinished,
    Progress,
    SampleItem,
    SampleKey,
    StreamEnd,
)
from rlhfless.functions.generation.vllm.adapter import Engine
from rlhfless.functions.generation.vllm.messages import Sampled, SampleRequest
from rlhfless.records import FinishReason, IntArray, Rollout, VersionSpan


class RequestRun:
    """The samples of one request, from submission to the last group."""

    def __init__(self, engine: Engine, request: GenerateRequest, incarnation: str) -> None:
        self._engine = engine
        self._request = request
        self._incarnation = incarnation
        self._start_s = time.time()
        self._missing = Counter(item.prompt_id for item in request.items)
        self._finished: dict[str, list[Rollout]] = {prompt_id: [] for prompt_id in self._missing}
        self._usage = Usage(version=request.version)
        self._ids = {item.key: f"{incarnation}-{id(self):x}-{i}" for i, item in enumerate(request.items)}
        self._queue: asyncio.Queue[Rollout | BaseException] = asyncio.Queue()
        self._tasks = [asyncio.create_task(self._sample(item)) for item in request.items]

    async def events(self) -> AsyncIterator[GenerationEvent]:
        """Finished groups as they end, a beat each interval, and a StreamEnd.

        Raises what a sample raised, or TimeoutError naming how many samples were still running.
        """
        deadline = self._start_s + self._request.timeout_s
        beat_s = time.time() + self._request.progress_interval_s
        while self._missing:
            try:
                rollout = await asyncio.wait_for(self._queue.get(), max(0.0, beat_s - time.time()))
            except TimeoutError:
                if time.time() > deadline:
                    raise TimeoutError(self._overdue()) from None
                beat_s = time.time() + self._request.progress_interval_s
                yield self._progress()
                continue
            if isinstance(rollout, BaseException):
                raise rollout
            group = self._add(rollout)
            if group is not None:
                yield group
        yield StreamEnd(Reply(self._incarnation, None, self._start_s, time.time(), self._usage))

    async def abort(self, keys: Sequence[SampleKey] | None) -> int:
        """Ask the engine to stop samples; each still comes out of `events`, with the tokens so far."""
        wanted = self._ids.keys() if keys is None else self._ids.keys() & set(keys)
        ids = [self._ids[key] for key in wanted]
        await self._engine.abort(ids)
        return len(ids)

    async def cancel(self) -> None:
        """Drop what is still running; used when nobody reads the events any more."""
        running = [task for task in self._tasks if not task.done()]
        if running:
            await self._engine.abort(list(self._ids.values()))
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _sample(self, item: SampleItem) -> None:
        sampling, prior = self._request.sampling, item.prior
        drawn = () if prior is None else tuple(int(token) for token in prior.token_ids)
        started_s = time.time()
        try:
            sampled = await self._engine.sample(
                SampleRequest(
                    request_id=self._ids[item.key],
                    token_ids=item.prompt_token_ids + drawn,
                    seed=item.seed,
                    max_tokens=sampling.max_tokens - len(drawn),
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                    top_k=sampling.top_k,
                    stop=sampling.stop,
                    stop_token_ids=sampling.stop_token_ids,
                    cache_salt=self._request.version,
                )
            )
        except Exception as error:
            self._queue.put_nowait(error)
            return
        self._queue.put_nowait(self._rollout(item, sampled, started_s))

    def _rollout(self, item: SampleItem, sampled: Sampled, started_s: float) -> Rollout:
        token_ids = np.asarray(sampled.token_ids, dtype=np.int64)
        logprobs = np.asarray(sampled.logprobs, dtype=np.float32)
        spans, text = sampled.version_spans, sampled.text
        prior = item.prior
        if prior is not None:
            shift = len(prior.token_ids)
            token_ids = np.concatenate([prior.token_ids, token_ids])
            logprobs = np.concatenate([prior.logprobs, logprobs])
            moved = (VersionSpan(s.version, s.start + shift, s.end + shift) for s in spans)
            spans = prior.version_spans + tuple(moved)
            text = self._text(token_ids)
        self._usage = Usage(
            input_tokens=self._usage.input_tokens + len(item.prompt_token_ids),
            output_tokens=self._usage.output_tokens + len(sampled.token_ids),
            cached_tokens=self._usage.cached_tokens + sampled.cached_tokens,
            sequences=self._usage.sequences + 1,
            version=self._request.version,
        )
        return Rollout(
            prompt_id=item.prompt_id,
            sample_index=item.sample_index,
            seed=item.seed,
            token_ids=token_ids,
            logprobs=logprobs,
            text=text,
            finish_reason=FinishReason(sampled.finish_reason),
            version_spans=spans,
            actor=self._request.actor,
            started_s=started_s if prior is None else prior.started_s,
            finished_s=time.time(),
            cached_tokens=sampled.cached_tokens,
        )

    def _text(self, token_ids: IntArray) -> str:
        """The text of a response that two actors drew: decoding the parts one by one could differ at the seam."""
        settings = self._engine.settings
        text = _tokenizer(settings.tokenizer, settings.trust_remote_code).decode(token_ids, skip_special_tokens=True)
        ends = [text.find(stop) for stop in self._request.sampling.stop if stop in text]
        return text[: min(ends)] if ends else text

    def _add(self, rollout: Rollout) -> GroupFinished | None:
        """Count a rollout in; returns its group if it was the last one missing."""
        prompt_id = rollout.prompt_id
        self._finished[prompt_id].append(rollout)
        self._missing[prompt_id] -= 1
        if self._missing[prompt_id]:
            return None
        del self._missing[prompt_id]
        rollouts = sorted(self._finished.pop(prompt_id), key=lambda rollout: rollout.sample_index)
        return GroupFinished(self._incarnation, tuple(rollouts))

    def _progress(self) -> Progress:
        tokens = self._engine.progress()
        running = {key: tokens[name] for key, name in self._ids.items() if name in tokens}
        return Progress(self._incarnation, running)

    def _overdue(self) -> str:
        left = sum(self._missing.values())
        return (
            f"{self._request.actor}: {left} of {len(self._request.items)} samples still running after "
            f"{self._request.timeout_s:.0f} s (timeouts.generate_s)"
        )


@lru_cache(maxsize=1)
def _tokenizer(path: str, trust_remote_code: bool) -> Any:
    """Loaded when the first moved response ends: most replicas never need it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
