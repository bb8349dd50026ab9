"""Numbers from an HTTP endpoint: samples are POSTed as JSON, in batches (docs/rewards.md has the protocol).

A batch without a usable answer fails as a whole, because then the endpoint is at fault, not a sample. An endpoint that
cannot score a sample answers null for it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Sequence
from typing import Any

import httpx

from rlhfless.records import Prompt
from rlhfless.rewards.guard import ForbiddenAddress, Guarded, refusal
from rlhfless.rewards.protocol import ARGUMENTS, Failed, Outcome, Report, RewardSample, finite, quote
from rlhfless.spec import HttpSpec

FIRST_PAUSE_S = 0.5
"""Wait before the second attempt; doubled before each further attempt."""

_BUSY = frozenset({408, 429})


class HttpReward:
    """Asks `spec.url`."""

    def __init__(self, spec: HttpSpec, hosts: Collection[str] | None = None) -> None:
        """`hosts`: see ScoringSpec.http_hosts."""
        self._spec = spec
        self._hosts = hosts
        self._limit = asyncio.Semaphore(spec.concurrency)

    def problems(self, prompts: Sequence[Prompt]) -> list[str]:  # noqa: ARG002 (the endpoint says what it needs)
        name = self._spec.token_env
        problems = [f"the environment variable {name!r} is not set"] if name and not os.environ.get(name) else []
        if self._hosts is not None and (why := refusal(self._spec.url, self._hosts)):
            problems.append(why)
        return problems

    async def __call__(self, samples: Sequence[RewardSample], report: Report) -> None:
        size = self._spec.batch_size
        token = os.environ.get(self._spec.token_env or "")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        guard = None if self._hosts is None else Guarded(self._hosts)
        # httpx takes no proxy from the environment where a transport is given.
        async with httpx.AsyncClient(headers=headers, timeout=self._spec.timeout_s, transport=guard) as client:

            async def score(first: int) -> None:
                async with self._limit:
                    outcomes = await self._ask(client, samples[first : first + size])
                for offset, outcome in enumerate(outcomes):
                    report(first + offset, outcome)

            async with asyncio.TaskGroup() as group:
                for first in range(0, len(samples), size):
                    group.create_task(score(first))

    async def _ask(self, client: httpx.AsyncClient, batch: Sequence[RewardSample]) -> list[Outcome]:
        body = {"samples": [_as_json(sample) for sample in batch]}
        cause = ""
        for attempt in range(self._spec.retries + 1):
            if attempt:
                await asyncio.sleep(FIRST_PAUSE_S * 2 ** (attempt - 1))
            try:
                # httpx limits each read only; a server that sends a byte now and then would never time out.
                async with asyncio.timeout(self._spec.timeout_s):
                    reply = await client.post(self._spec.url, json=body)
            except (httpx.TimeoutException, TimeoutError):
                cause = f"no answer within timeout_s ({self._spec.timeout_s:g} s)"
            except ForbiddenAddress as error:
                return self._all_failed(batch, str(error), attempt + 1)
            except httpx.HTTPError as error:
                cause = f"{type(error).__name__}: {error}"
            except (TypeError, ValueError) as error:  # a column that JSON cannot hold
                return self._all_failed(batch, f"the samples cannot be written as JSON: {error}", 1)
            else:
                if reply.is_success:
                    return self._outcomes(reply, batch)
                cause = f"status {reply.status_code}: {quote(reply.text)}"
                if reply.status_code not in _BUSY and reply.status_code < 500:
                    return self._all_failed(batch, cause, attempt + 1)
        return self._all_failed(batch, cause, self._spec.retries + 1)

    def _outcomes(self, reply: httpx.Response, batch: Sequence[RewardSample]) -> list[Outcome]:
        try:
            answer = reply.json()
        except ValueError:
            answer = None
        scores = answer.get("scores") if isinstance(answer, dict) else None
        if not isinstance(scores, list) or len(scores) != len(batch):
            what = f'answered {quote(reply.text)}; {{"scores": [...]}} with {len(batch)} numbers is needed'
            return self._all_failed(batch, what, 1)
        return [self._outcome(score) for score in scores]

    def _outcome(self, score: Any) -> Outcome:
        if (value := finite(score)) is not None:
            return value
        return Failed(f"{self._spec.url} answered {quote(repr(score))}, not a finite number")

    def _all_failed(self, batch: Sequence[RewardSample], cause: str, attempts: int) -> list[Outcome]:
        times = "" if attempts == 1 else f" ({attempts} attempts)"
        return [Failed(f"{self._spec.url}: {cause}{times}")] * len(batch)


def _as_json(sample: RewardSample) -> dict[str, Any]:
    return {name: getattr(sample, name) for name in ARGUMENTS} | {"columns": dict(sample.columns)}
