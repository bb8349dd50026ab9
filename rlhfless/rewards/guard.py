"""Keeps HTTP rewards of a service's users away from the service's own machine and its cloud's metadata.

The address is checked when the connection is made: a name is resolved once, and the connection goes to the address that
was checked, so a name that resolves to another address a moment later gains nothing. Redirects are not followed.
Addresses of private networks are allowed, because reward services of a cluster have such addresses.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Collection, Iterable
from typing import Any

import httpx

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_TRANSLATED = ipaddress.ip_network("64:ff9b::/96")
"""NAT64 (RFC 6052): the last 32 bits are an IPv4 address."""

METADATA = frozenset(map(ipaddress.ip_address, ("fd00:ec2::254", "100.100.100.200", "192.0.0.192")))
"""Metadata services of clouds that are not link-local."""


class ForbiddenAddress(httpx.ConnectError):
    """An HTTP reward may not reach this address."""


def forbidden(address: Address) -> str:
    """Why an address may not be reached, also in one of IPv6's forms of it; empty if it may."""
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
    """Why a URL may not be reached, before a run; empty if it may, or if its name has no address yet."""
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
    """The addresses in a result of getaddrinfo."""
    return [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in resolved]


def _refused(host: str, addresses: Iterable[Address]) -> str:
    """Why a host may not be reached: one forbidden address among several is enough; empty if it may."""
    for address in addresses:
        if why := forbidden(address):
            name = f"{host} ({why})" if host == str(address) else f"{host} is {address} ({why})"
            return f"{name}: HTTP rewards may not reach it; the operator of the service can allow it by host and port"
    return ""


class Guarded(httpx.AsyncBaseTransport):
    """Connects to allowed addresses only. `hosts`: `host:port` that may be reached whatever their address is."""

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
