"""The blocking and the asynchronous client. Each request of rlhfless.client.calls is a method of both."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Generic, ParamSpec, Self, TypeVar, overload

import httpx

from rlhfless.client import calls
from rlhfless.client.calls import RETRIED, STREAM_S, TIMEOUT_S, TRIES, ClientCall, Stream
from rlhfless.client.errors import fault_of
from rlhfless.control.objects import EventObject

T = TypeVar("T")
P = ParamSpec("P")

STREAM_TIMEOUT = httpx.Timeout(TIMEOUT_S, read=STREAM_S)


class _Method(Generic[P, T]):
    """A request as a method. It returns the answer on the blocking client, and a coroutine on the asynchronous one."""

    def __init__(self, request: Callable[P, ClientCall[T]]) -> None:
        self._request = request
        self.__doc__ = request.__doc__

    @overload
    def __get__(self, client: None, owner: type) -> Callable[P, ClientCall[T]]: ...
    @overload
    def __get__(self, client: Client, owner: type) -> Callable[P, T]: ...
    @overload
    def __get__(self, client: AsyncClient, owner: type) -> Callable[P, Coroutine[Any, Any, T]]: ...
    def __get__(self, client: Client | AsyncClient | None, owner: type) -> Any:
        if client is None:
            return self._request

        @functools.wraps(self._request)
        def send(*args: P.args, **kwargs: P.kwargs) -> T | Coroutine[Any, Any, T]:
            return client.send(self._request(*args, **kwargs))

        return send


class _Requests:
    create_run = _Method(calls.create_run)
    get_run = _Method(calls.get_run)
    list_runs = _Method(calls.list_runs)
    cancel_run = _Method(calls.cancel_run)
    pause_run = _Method(calls.pause_run)
    resume_run = _Method(calls.resume_run)
    delete_run = _Method(calls.delete_run)
    events = _Method(calls.events)
    metrics = _Method(calls.metrics)
    checkpoints = _Method(calls.checkpoints)
    usage = _Method(calls.usage)
    rollouts = _Method(calls.rollouts)
    logs = _Method(calls.logs)
    functions = _Method(calls.functions)
    fleets = _Method(calls.fleets)
    plan = _Method(calls.plan)
    compare = _Method(calls.compare)
    test_rewards = _Method(calls.test_rewards)
    simulate = _Method(calls.simulate)
    get_simulation = _Method(calls.get_simulation)


class Client(_Requests):
    """The blocking client of a service.

    Methods raise ApiFault if the service refuses a request, and ServiceAway if it does not answer. Repeatable requests
    are retried while the service is away.
    """

    def __init__(
        self, url: str | None = None, key: str | None = None, timeout_s: float = TIMEOUT_S, data: str | None = None
    ) -> None:
        """Connect to `url`, by default RLHFLESS_URL, else the service of folder `data`, else http://127.0.0.1:8080.

        `key` defaults to RLHFLESS_API_KEY.
        """
        self.url = calls.service_url(url, data)
        self._http = httpx.Client(base_url=self.url, headers=calls.headers(key), timeout=timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def send(self, call: ClientCall[T]) -> T:
        """Send a request of rlhfless.client.calls."""
        for attempt in range(TRIES):
            response = None
            try:
                response = self._http.send(call.request_of(self._http))
                if call.is_last(attempt) or response.status_code not in RETRIED:
                    return call.parsed(response)
            except httpx.TransportError as error:
                if call.is_last(attempt, error):
                    raise calls.away(self.url, error) from error
            time.sleep(calls.wait_s(attempt, response))
        raise AssertionError("the last try returns or raises")

    def watch(self, run_id: str, after: int = 0) -> Iterator[EventObject]:
        """Yield every event of a run after the one with ID `after`, each once and in order, until the run has ended.

        Reconnects a broken connection, with the same limit of tries as `send`.
        """
        stream, failures = Stream(run_id, after), 0
        while not stream.ended:
            stream.begin()
            try:
                headers = stream.headers
                with self._http.stream("GET", stream.path, headers=headers, timeout=STREAM_TIMEOUT) as response:
                    if response.status_code not in RETRIED and not response.is_success:
                        response.read()
                        raise fault_of(response)
                    for line in response.iter_lines():
                        failures = 0
                        yield from stream.feed(line)
                if response.is_success and calls.is_ended(self.get_run(run_id)):
                    return
            except httpx.TransportError as error:
                failures += 1
                if failures == TRIES:
                    raise calls.away(self.url, error) from error
            time.sleep(calls.wait_s(failures, None))


class AsyncClient(_Requests):
    """The asynchronous client of a service. Otherwise like Client."""

    def __init__(
        self, url: str | None = None, key: str | None = None, timeout_s: float = TIMEOUT_S, data: str | None = None
    ) -> None:
        """Connect to a service (see Client)."""
        self.url = calls.service_url(url, data)
        self._http = httpx.AsyncClient(base_url=self.url, headers=calls.headers(key), timeout=timeout_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def send(self, call: ClientCall[T]) -> T:
        """Send a request of rlhfless.client.calls."""
        for attempt in range(TRIES):
            response = None
            try:
                response = await self._http.send(call.request_of(self._http))
                if call.is_last(attempt) or response.status_code not in RETRIED:
                    return call.parsed(response)
            except httpx.TransportError as error:
                if call.is_last(attempt, error):
                    raise calls.away(self.url, error) from error
            await asyncio.sleep(calls.wait_s(attempt, response))
        raise AssertionError("the last try returns or raises")

    async def watch(self, run_id: str, after: int = 0) -> AsyncIterator[EventObject]:
        """Yield every event of a run (see Client.watch)."""
        stream, failures = Stream(run_id, after), 0
        while not stream.ended:
            stream.begin()
            try:
                headers = stream.headers
                async with self._http.stream("GET", stream.path, headers=headers, timeout=STREAM_TIMEOUT) as response:
                    if response.status_code not in RETRIED and not response.is_success:
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
