"""Ask an HTTP endpoint with retries, a deadline, and a guard against forbidden addresses.

In a service, `Guarded` keeps users' rewards and teachers away from the service's own machine and its cloud's metadata:
the address is checked at the connection, so DNS rebinding gains nothing, and redirects are not followed. Private
networks are allowed, because services of a cluster are there.
"""

from __future__ import annotations

import asyncio
import datetime
import email.utils
import ipaddress
import json
import math
import os
import socket
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol, TypeVar

import httpx

from rlhfless.rewards.protocol import Failed, quote

LEAST_PAUSE_S, FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 0.5, 30.0
"""Delay before the second attempt, doubled before each further one, and its limits."""

_BUSY = frozenset({408, 429})

# Longest wait that `Retry-After` is read as, in seconds: a century, so that no date overflows.
_LONGEST_S = 3.2e9

T = TypeVar("T")


class Asked(Protocol):
    """What a spec says about requests to an endpoint."""

    @property
    def token_env(self) -> str | None: ...
    @property
    def concurrency(self) -> int: ...
    @property
    def timeout_s(self) -> float: ...


class Endpoint:
    """An endpoint, asked by at most `spec.concurrency` requests at a time."""

    def __init__(self, spec: Asked, url: str, hosts: Collection[str] | None, retries: int | None) -> None:
        """`hosts`: see ScoringSpec.http_hosts. With `retries`, `timeout_s` is for each attempt; with None, for all
        attempts of a request together, as many as there is time for."""
        self._spec = spec
        self._url = url
        self._hosts = hosts
        self._attempts = math.inf if retries is None else retries + 1
        self._limit = asyncio.Semaphore(spec.concurrency)
        self._next_s = 0.0
        """When the endpoint may be asked again (monotonic clock): its `Retry-After` holds for all requests."""

    def problems(self) -> list[str]:
        """Check the token and the URL, without asking the endpoint."""
        name = self._spec.token_env
        problems = [f"the environment variable {name!r} is not set"] if name and not os.environ.get(name) else []
        if self._hosts is not None and (why := refusal(self._url, self._hosts)):
            problems.append(why)
        return problems

    def client(self) -> httpx.AsyncClient:
        """Return a client with the token; close it after use."""
        token = os.environ.get(self._spec.token_env or "")
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        guard = None if self._hosts is None else Guarded(self._hosts)
        # httpx takes no proxy from the environment where a transport is given.
        return httpx.AsyncClient(headers=headers, timeout=self._spec.timeout_s, transport=guard)

    async def ask(
        self, client: httpx.AsyncClient, method: str, path: str, body: Any, read: Callable[[httpx.Response], T]
    ) -> T | Failed:
        """Return what `read` makes of an answer; the last cause if there is none.

        Asks again while the endpoint is away or busy, or `read` raises ValueError, TypeError or LookupError.
        """
        # ASCII, so that texts that are not valid Unicode can be sent.
        content = None if body is None else json.dumps(body).encode("ascii")
        most_s = self._spec.timeout_s
        async with self._limit:
            end_s = time.monotonic() + most_s if self._attempts == math.inf else math.inf
            cause, attempt, wait_s, pause_s = "", 0, 0.0, FIRST_PAUSE_S
            while attempt < self._attempts:
                now_s = time.monotonic()
                await asyncio.sleep(min(max(wait_s, self._next_s - now_s), max(end_s - now_s, 0.0)))
                if (left_s := min(most_s, end_s - time.monotonic())) <= 0:
                    break
                attempt, wait_s, pause_s = attempt + 1, pause_s, min(2 * pause_s, LONGEST_PAUSE_S)
                try:
                    # httpx limits each read only; a server that sends a byte now and then would never time out.
                    async with asyncio.timeout(left_s):
                        reply = await client.request(method, self._url + path, content=content)
                    if reply.is_success:
                        return read(reply)
                    cause, asked_s = self._refused(reply)
                    if asked_s == math.inf:
                        break
                    wait_s = wait_s if asked_s is None else max(asked_s, LEAST_PAUSE_S)
                except (httpx.TimeoutException, TimeoutError):
                    # The last attempt before `end_s` may be cut short; what was answered before says more.
                    if not cause or left_s == most_s:
                        cause = f"no answer within timeout_s ({most_s:g} s)"
                except ForbiddenAddress as error:
                    cause = str(error)
                    break
                except httpx.HTTPError as error:
                    cause = f"{type(error).__name__}: {error}"
                except (ValueError, TypeError, LookupError) as error:
                    cause = f"an answer that cannot be used: {type(error).__name__}: {error}"
            return self.failed(cause, attempt)

    async def post(self, client: httpx.AsyncClient, body: Any) -> httpx.Response | Failed:
        """POST JSON; return the answer, or the last cause if there is none."""
        return await self.ask(client, "POST", "", body, lambda reply: reply)

    def failed(self, cause: str, attempts: int = 1) -> Failed:
        """Return the failure of a request, with the URL."""
        times = "" if attempts == 1 else f" ({attempts} attempts)"
        return Failed(f"{self._url}: {cause}{times}")

    def _refused(self, reply: httpx.Response) -> tuple[str, float | None]:
        """Return the cause and the seconds until the next request: None if not stated, inf for never."""
        cause = f"status {reply.status_code}: {quote(reply.text)}"
        if reply.status_code not in _BUSY and reply.status_code < 500:
            return cause, math.inf
        asked_s, most_s = retry_after_s(reply.headers.get("Retry-After", "")), self._spec.timeout_s
        if asked_s is None:
            return cause, None
        if asked_s > most_s:
            asked = f"it asks for {asked_s:.0f} s until the next request (Retry-After)"
            return f"{cause}; {asked}, and timeout_s allows {most_s:g} s", math.inf
        self._next_s = max(self._next_s, time.monotonic() + asked_s)
        return cause, asked_s


def retry_after_s(header: str) -> float | None:
    """Parse `Retry-After`, a number or a date, as seconds from now; None if it is neither."""
    try:
        seconds = float(header)
    except ValueError:
        try:
            until = email.utils.parsedate_to_datetime(header)
        except (ValueError, TypeError, OverflowError):
            return None
        until = until if until.tzinfo else until.replace(tzinfo=datetime.UTC)
        seconds = until.timestamp() - time.time()
    return min(max(seconds, 0.0), _LONGEST_S) if not math.isnan(seconds) else None


Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_TRANSLATED = ipaddress.ip_network("64:ff9b::/96")
"""NAT64 (RFC 6052): the last 32 bits are an IPv4 address."""

METADATA = frozenset(map(ipaddress.ip_address, ("fd00:ec2::254", "100.100.100.200", "192.0.0.192")))
"""Cloud metadata services that are not link-local."""


class ForbiddenAddress(httpx.ConnectError): ...


def forbidden(address: Address) -> str:
    """Say why an address may not be reached, also embedded in IPv6; empty if it may."""
    inner: Address | None = None
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
        if address in _TRANSLATED:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    if inner is not None:
        return forbidden(inner)
    kinds = {
        "loopback": address.is_loopback,
        "link-local": address.is_link_local,
        "unspecified": address.is_unspecified or address in ipaddress.ip_network("0.0.0.0/8"),
        "multicast": address.is_multicast,
        "broadcast": address == ipaddress.ip_address("255.255.255.255"),
        "a metadata service": address in METADATA,
    }
    return next((kind for kind, is_it in kinds.items() if is_it), "")


def refusal(url: str, hosts: Collection[str]) -> str:
    """Say why a URL may not be reached, before a run; empty if it may, or does not resolve yet."""
    host, port = _end(httpx.URL(url))
    if f"{host}:{port}" in hosts:
        return ""
    try:
        addresses = _addresses(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    except (OSError, UnicodeError):  # the latter of a name with a label that is too long
        return ""
    return _refused(host, addresses)


def _end(url: httpx.URL) -> tuple[str, int]:
    return url.host, url.port or {"https": 443}.get(url.scheme, 80)


def _addresses(resolved: Iterable[tuple[Any, ...]]) -> list[Address]:
    """Extract addresses from getaddrinfo's result."""
    return [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in resolved]


def _refused(host: str, addresses: Iterable[Address]) -> str:
    """Say why a host may not be reached: any forbidden address is enough; empty if it may."""
    for address in addresses:
        if why := forbidden(address):
            name = f"{host} ({why})" if host == str(address) else f"{host} is {address} ({why})"
            return f"{name}: a run may not reach it; the operator of the service can allow it by host and port"
    return ""


class Guarded(httpx.AsyncBaseTransport):
    """Connect to allowed addresses only. `hosts`: `host:port` that are always allowed."""

    def __init__(self, hosts: Collection[str]) -> None:
        self._hosts = frozenset(hosts)
        # No proxy of the environment: it would connect in our place, unguarded.
        self._transport = httpx.AsyncHTTPTransport(trust_env=False)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Raises ForbiddenAddress."""
        host, port = _end(request.url)
        if f"{host}:{port}" not in self._hosts:
            address = await self._checked(host, port)
            # The Host header is set by now; the certificate is checked against the name.
            request.extensions = {**request.extensions, "sni_hostname": host}
            request.url = request.url.copy_with(host=str(address))
        return await self._transport.handle_async_request(request)

    async def _checked(self, host: str, port: int) -> Address:
        try:
            resolved = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise httpx.ConnectError(f"{host} cannot be resolved: {error}") from error
        addresses = _addresses(resolved)
        if why := _refused(host, addresses):
            raise ForbiddenAddress(why)
        return addresses[0]

    async def aclose(self) -> None:
        await self._transport.aclose()
