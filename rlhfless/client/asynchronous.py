"""The asynchronous client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import httpx

from rlhfless.client import calls
from rlhfless.client.calls import AGAIN, STREAM_S, TIMEOUT_S, TRIES, ClientCall, Stream
from rlhfless.client.errors import fault_of
from rlhfless.control.objects import (
    CheckpointObject,
    EventObject,
    ListObject,
    MetricsObject,
    ReplicaObject,
    RolloutObject,
    RunObject,
    SimulationObject,
    UsageObject,
)

T = TypeVar("T")


class AsyncClient:
    """The client of one service. Every method raises ApiFault when the service refuses, and ServiceAway when it does
    not answer.

    Requests that change nothing when they are sent again are sent again while the service is away.
    """

    def __init__(
        self, url: str | None = None, key: str | None = None, timeout_s: float = TIMEOUT_S, data: str | None = None
    ) -> None:
        """`url`: by default RLHFLESS_URL, else the service of the data folder `data`, else http://127.0.0.1:8080.
        `key`: by default RLHFLESS_API_KEY."""
        self.url = calls.service_url(url, data)
        self._http = httpx.AsyncClient(base_url=self.url, headers=calls.headers(key), timeout=timeout_s)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def send(self, call: ClientCall[T]) -> T:
        """Send a request of rlhfless.client.calls."""
        for attempt in range(TRIES):
            response = None
            try:
                response = await self._http.send(call.sent_by(self._http))
                if call.is_last(attempt) or response.status_code not in AGAIN:
                    return call.parsed(response)
            except httpx.TransportError as error:
                if call.is_last(attempt, error):
                    raise calls.away(self.url, error) from error
            await asyncio.sleep(calls.wait_s(attempt, response))
        raise AssertionError("the last try returns or raises")

    async def create_run(self, spec: Mapping[str, Any], idempotency_key: str | None = None) -> RunObject:
        """Queue a run. Sent again with the same `idempotency_key`, it is the same run."""
        return await self.send(calls.create_run(spec, idempotency_key))

    async def get_run(self, run_id: str) -> RunObject:
        """One run."""
        return await self.send(calls.get_run(run_id))

    async def list_runs(
        self,
        after: str | None = None,
        limit: int = 20,
        status: Sequence[str] = (),
        metadata: Mapping[str, str] | None = None,
    ) -> ListObject[RunObject]:
        """Newest first; `after`: the last run of the page before."""
        return await self.send(calls.list_runs(after, limit, status, metadata or {}))

    async def cancel_run(self, run_id: str) -> RunObject:
        """Stop a run for good."""
        return await self.send(calls.act(run_id, "cancel"))

    async def pause_run(self, run_id: str) -> RunObject:
        """Stop a run after its step, with a checkpoint."""
        return await self.send(calls.act(run_id, "pause"))

    async def resume_run(self, run_id: str, limits: Mapping[str, Any] | None = None) -> RunObject:
        """Queue a paused run again; `limits` are put over its spec's; None takes one away."""
        return await self.send(calls.act(run_id, "resume", {"limits": dict(limits)} if limits else None))

    async def delete_run(self, run_id: str) -> None:
        """Remove an ended run, with its folder."""
        await self.send(calls.delete_run(run_id))

    async def events(self, run_id: str, after: int = 0, limit: int = 100) -> ListObject[EventObject]:
        """Oldest first."""
        return await self.send(calls.events(run_id, after, limit))

    async def metrics(
        self,
        run_id: str,
        names: Sequence[str] = (),
        after_step: int | None = None,
        points: int | None = None,
        until_step: int | None = None,
    ) -> MetricsObject:
        """Time series; all without `names`."""
        return await self.send(calls.metrics(run_id, names, after_step, points, until_step))

    async def checkpoints(self, run_id: str) -> ListObject[CheckpointObject]:
        """Newest first."""
        return await self.send(calls.checkpoints(run_id))

    async def usage(self, run_id: str) -> UsageObject:
        """Device-seconds and cost by function."""
        return await self.send(calls.usage(run_id))

    async def rollouts(self, run_id: str, step: int | None = None, limit: int = 20) -> ListObject[RolloutObject]:
        """Samples to read."""
        return await self.send(calls.rollouts(run_id, step, limit))

    async def logs(self, run_id: str, lines: int = 100) -> str:
        """The end of the run's log."""
        return await self.send(calls.logs(run_id, lines))

    async def functions(self) -> ListObject[ReplicaObject]:
        """All replicas, now."""
        return await self.send(calls.functions())

    async def plan(self, spec: Mapping[str, Any], **question: Any) -> dict[str, Any]:
        """What a run would need, take and cost. `question`: devices, lengths_of, deadline_s."""
        return await self.send(calls.compute("/v1/runs:plan", {"spec": dict(spec)} | question))

    async def test_rewards(
        self, rewards: Sequence[Mapping[str, Any]], samples: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Scores of given responses, by part."""
        return await self.send(calls.compute("/v1/rewards:test", {"rewards": list(rewards), "samples": list(samples)}))

    async def simulate(
        self, scenario: Mapping[str, Any] | None = None, run_id: str | None = None, policies: Sequence[str] = ()
    ) -> SimulationObject:
        """Queue a simulation: of a scenario (`policies`: only these labels), or of a run's own steps under other
        policies. Ask for it with `get_simulation` until it has ended."""
        return await self.send(calls.simulate(scenario, run_id, policies))

    async def get_simulation(self, simulation_id: str) -> SimulationObject:
        """One simulation."""
        return await self.send(calls.get_simulation(simulation_id))

    async def watch(self, run_id: str, after: int = 0) -> AsyncIterator[EventObject]:
        """Every event of a run after one of them, each once and in order, until the run has ended. A connection that
        breaks is made anew, for as long as `send` would try."""
        stream, failures = Stream(run_id, after), 0
        while not stream.ended:
            stream.begin()
            try:
                timeout = httpx.Timeout(TIMEOUT_S, read=STREAM_S)
                async with self._http.stream("GET", stream.path, headers=stream.headers, timeout=timeout) as response:
                    if response.status_code not in AGAIN and not response.is_success:
                        await response.aread()
                        raise fault_of(response)
                    async for line in response.aiter_lines():
                        failures = 0
                        for event in stream.feed(line):
                            yield event
                if response.is_success and calls.is_ended(await self.get_run(run_id)):
                    return
            except httpx.TransportError as error:
                failures += 1
                if failures == TRIES:
                    raise calls.away(self.url, error) from error
            await asyncio.sleep(calls.wait_s(failures, None))
