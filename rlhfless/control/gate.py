"""Checks before a request reaches the application: its origin, its size, and its sender's request rate.

This is ASGI middleware, because it must not delay streams.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from limits import RateLimitItemPerMinute
from limits.aio.storage import MemoryStorage
from limits.aio.strategies import FixedWindowRateLimiter
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rlhfless.control.errors import ApiError
from rlhfless.control.keys import hashed
from rlhfless.control.settings import ServiceSettings
from rlhfless.functions.loopback import is_loopback

REFUSALS_PER_MINUTE = 60
"""Requests with a wrong key that an address may send. Further requests are refused until the next minute."""

FREE = ("/healthz", "/readyz", "/internal/")
"""Paths without a rate limit: probes, and drivers, whose number the service limits."""

_PORTS = {"http": 80, "https": 443}

_ORIGIN = re.compile(r"(https?)://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::([0-9]{1,5}))?", re.IGNORECASE)

STREAM = b"text/event-stream"


class Gate:
    def __init__(self, app: ASGIApp, settings: ServiceSettings, open_to_all: Callable[[], bool]) -> None:
        """`open_to_all`: whether the service needs no key, so that it must refuse requests of other sites' pages."""
        self._app = app
        self._settings = settings
        self._open_to_all = open_to_all
        # The synchronous storage would start a thread per request, which takes a third of a second when all cores are
        # busy.
        self._limiter = FixedWindowRateLimiter(MemoryStorage())
        self._requests = RateLimitItemPerMinute(settings.requests.requests_per_minute)
        self._refusals = RateLimitItemPerMinute(REFUSALS_PER_MINUTE)
        self._streams = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        try:
            await self._check(scope, headers)
            if b"transfer-encoding" in headers:
                receive = await self._read_first(receive)
        except ApiError as error:
            response = error.response()
            if error.status == 413:
                response.headers["connection"] = "close"
            await response(scope, receive, send)
            return
        is_stream = STREAM in headers.get(b"accept", b"") or scope["path"] == "/v1/events"
        self._streams += is_stream
        try:
            await self._count_refusals(scope, receive, send)
        finally:
            self._streams -= is_stream

    async def _check(self, scope: Scope, headers: Mapping[bytes, bytes]) -> None:
        """Check a request's origin, URL, size and rate. Raises ApiError."""
        if self._open_to_all() and not scope["path"].startswith(FREE):
            self._check_origin(scope["server"][1] if scope.get("server") else None, headers)
        if "\0" in scope["path"] or b"%00" in scope["query_string"]:
            raise ApiError(422, "invalid_request", "a NUL character is in the URL; no name has one")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._settings.requests.body_bytes:
            raise self._too_large()
        if scope["path"].startswith(FREE):
            return
        address = _address(scope)
        if not await self._limiter.test(self._refusals, address):
            raise await _too_many("too many requests with a wrong API key", self._limiter, self._refusals, address)
        authorization = headers.get(b"authorization", b"").decode("latin-1")
        name = hashed(authorization) if authorization else address
        if not await self._limiter.hit(self._requests, name):
            limit = self._settings.requests.requests_per_minute
            raise await _too_many(f"more than {limit} requests a minute", self._limiter, self._requests, name)
        if self._streams >= self._settings.requests.streams and STREAM in headers.get(b"accept", b""):
            raise ApiError(429, "too_many_streams", f"{self._streams} streams are open", retry_after_s=5.0)

    def _check_origin(self, port: int | None, headers: Mapping[bytes, bytes]) -> None:
        """Refuse requests of other sites' pages, which may reach loopback by a name that resolves to it.

        `port` is the connection's own port. Raises ApiError (403).
        """
        host = headers.get(b"host", b"").decode("latin-1")
        if not any(self._is_own(f"{scheme}://{host}", port) for scheme in _PORTS):
            hint = "ask it under its own address; behind a tunnel or a proxy, start it with --public-url"
            raise ApiError(403, "wrong_host", f"{host!r} is not this service; {hint}", "Host")
        origin = headers.get(b"origin", b"").decode("latin-1")
        if origin and not self._is_own(origin, port):
            raise ApiError(403, "wrong_origin", f"requests of pages of {origin!r} are refused", "Origin")

    def _is_own(self, origin: str, port: int | None) -> bool:
        address = _host_and_port(origin)
        if address is None:
            return False
        local = address[1] == port and (is_loopback(address[0]) or address[0] == self._settings.host)
        return local or address == _host_and_port((self._settings.public_url or "").rstrip("/"))

    def _too_large(self) -> ApiError:
        most = self._settings.requests.body_bytes
        return ApiError(413, "too_large", f"a body may have {most:,} bytes; name prompts and models by path")

    async def _count_refusals(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request, and count its answer if it is a 401."""

        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 401:
                await self._limiter.hit(self._refusals, _address(scope))
            await send(message)

        await self._app(scope, receive, send_counted)

    async def _read_first(self, receive: Receive) -> Receive:
        """Read a body without a declared length before the application does. Raises ApiError (413)."""
        parts, left, more = list[Message](), self._settings.requests.body_bytes, True
        while more:
            message = await receive()
            parts.append(message)
            more = message["type"] == "http.request" and message.get("more_body", False)
            left -= len(message.get("body", b""))
            if left < 0:
                raise self._too_large()
        buffered = iter(parts)

        async def receive_again() -> Message:
            return next(buffered, None) or await receive()

        return receive_again


def _host_and_port(origin: str) -> tuple[str, int] | None:
    """Return host and port of `http://host:port`; None for any other text.

    URL parsers are too lenient: they find a host in `http://127.0.0.1:80.evil.example` and
    `http://evil.example@127.0.0.1`.
    """
    match = _ORIGIN.fullmatch(origin)
    if match is None:
        return None
    scheme, host, port = match.groups()
    return host.lower().strip("[]"), int(port or _PORTS[scheme.lower()])


def _address(scope: Scope) -> str:
    client: tuple[str, int] | None = scope.get("client")
    return client[0] if client else "?"


async def _too_many(what: str, limiter: FixedWindowRateLimiter, item: Any, name: str) -> ApiError:
    reset_s = (await limiter.get_window_stats(item, name)).reset_time - time.time()
    return ApiError(429, "too_many_requests", f"{what}; ask again later", retry_after_s=max(reset_s, 1.0))
