"""HTTP rewards: POST samples as JSON in batches (docs/rewards.md has the protocol).

A batch without a usable answer fails as a whole; an endpoint that cannot score a sample answers null for it.
"""

from __future__ import annotations

import asyncio
import datetime
import math
import uuid
from collections.abc import Collection, Mapping, Sequence
from decimal import Decimal
from typing import Any

import httpx
import numpy as np

from rlhfless.records import Prompt
from rlhfless.rewards.endpoint import Endpoint
from rlhfless.rewards.protocol import (
    ARGUMENTS,
    Failed,
    Outcome,
    Report,
    RewardSample,
    Unscorable,
    described,
    finite,
    listed,
    quote,
    unscorable,
)
from rlhfless.spec import HttpSpec


class HttpReward:
    def __init__(self, spec: HttpSpec, hosts: Collection[str] | None = None) -> None:
        """`hosts`: see ScoringSpec.http_hosts."""
        self._spec = spec
        self._endpoint = Endpoint(spec, spec.url, hosts, spec.retries)

    def problems(self, prompts: Sequence[Prompt]) -> list[str]:
        """Check the token, the URL and the columns, without asking the endpoint."""
        problems = self._endpoint.problems()
        if faults := unscorable(prompts, lambda prompt: as_json(prompt.columns)):
            hint = "leave these columns out of the data, or write them as texts"
            problems.append(listed("columns cannot be sent as JSON", faults, len(prompts), hint))
        return problems

    async def __call__(self, samples: Sequence[RewardSample], report: Report) -> None:
        size = self._spec.batch_size
        async with self._endpoint.client() as client:

            async def score(first: int) -> None:
                for offset, outcome in enumerate(await self._ask(client, samples[first : first + size])):
                    report(first + offset, outcome)

            async with asyncio.TaskGroup() as group:
                for first in range(0, len(samples), size):
                    group.create_task(score(first))

    async def _ask(self, client: httpx.AsyncClient, batch: Sequence[RewardSample]) -> list[Outcome]:
        try:
            body = {
                "samples": [
                    {name: getattr(sample, name) for name in ARGUMENTS} | {"columns": as_json(sample.columns)}
                    for sample in batch
                ]
            }
        except Unsendable as error:
            return [self._endpoint.failed(f"the samples cannot be written as JSON: {error}")] * len(batch)
        reply = await self._endpoint.post(client, body)
        return [reply] * len(batch) if isinstance(reply, Failed) else self._outcomes(reply, batch)

    def _outcomes(self, reply: httpx.Response, batch: Sequence[RewardSample]) -> list[Outcome]:
        try:
            answer = reply.json()
        except ValueError:
            answer = None
        scores = answer.get("scores") if isinstance(answer, dict) else None
        if not isinstance(scores, list) or len(scores) != len(batch):
            what = f'answered {quote(reply.text)}; {{"scores": [...]}} with {len(batch)} numbers is needed'
            return [self._endpoint.failed(what)] * len(batch)
        return [
            Failed(f"{self._spec.url} answered {quote(repr(score))}, not a finite number") if value is None else value
            for score, value in zip(scores, map(finite, scores), strict=True)
        ]


class Unsendable(Unscorable):
    """A value that JSON cannot express. The message names column, value and type."""


def as_json(value: Any, path: str = "") -> Any:
    """Convert a column's value: dates as ISO 8601, decimals as text, NaN and infinity as null. Raises Unsendable."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return format(value, "f") if value.is_finite() else None
    if isinstance(value, uuid.UUID):
        return str(value)
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: as_json(item, f"{path}.{key}".lstrip(".")) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item, f"{path}.{index}") for index, item in enumerate(value)]
    raise Unsendable(f"the column `{path}` holds {described(value)}")
