"""HTTP rewards of a service reach no loopback, link-local or metadata address, however it is written."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from fakes.builders import samples_of
from rlhfless.rewards import Failed, Outcome
from rlhfless.rewards.endpoint import ForbiddenAddress, Guarded, forbidden, refusal
from rlhfless.rewards.http import HttpReward
from rlhfless.spec import HttpSpec


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "127.8.8.8",
        "0.0.0.0",
        "0.1.2.3",
        "169.254.169.254",
        "::1",
        "::",
        "::ffff:127.0.0.1",
        "::ffff:169.254.169.254",
        "fe80::1",
        "fd00:ec2::254",
        "64:ff9b::7f00:1",
        "2002:7f00:1::",
        "224.0.0.1",
        "255.255.255.255",
        "100.100.100.200",
    ],
)
def test_these_are_forbidden(address: str) -> None:
    assert forbidden(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", ["10.0.0.5", "192.168.1.1", "8.8.8.8", "2001:4860:4860::8888", "fd12::5"])
def test_these_are_allowed(address: str) -> None:
    assert not forbidden(ipaddress.ip_address(address))


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        seen: list[str] = self.server.seen  # type: ignore[attr-defined]
        seen.append(f"{self.headers['Host']}{self.path}")
        if self.path == "/away":
            self.send_response(302)
            self.send_header("Location", f"http://127.0.0.1:{self.server.server_address[1]}/secret")
            self.end_headers()
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"here")

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    found = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.seen = []  # type: ignore[attr-defined]
    threading.Thread(target=found.serve_forever, daemon=True).start()
    yield found
    found.shutdown()
    found.server_close()


async def get(url: str, *hosts: str) -> httpx.Response:
    async with httpx.AsyncClient(transport=Guarded(hosts)) as client:
        return await client.get(url)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "2130706433", "0x7f000001", "127.1", "[::ffff:127.0.0.1]", "0.0.0.0", "[::1]"]
)
async def test_no_way_of_writing_loopback_reaches_it(server: Any, host: str) -> None:
    with pytest.raises(httpx.ConnectError):
        await get(f"http://{host}:{server.server_address[1]}/")
    assert server.seen == []


async def test_a_host_that_is_allowed_is_reached_and_redirects_are_not_followed(server: Any) -> None:
    port = server.server_address[1]
    assert (await get(f"http://127.0.0.1:{port}/", f"127.0.0.1:{port}")).text == "here"
    answer = await get(f"http://127.0.0.1:{port}/away", f"127.0.0.1:{port}")
    assert answer.status_code == 302
    assert server.seen == [f"127.0.0.1:{port}/", f"127.0.0.1:{port}/away"]


async def test_a_name_that_changes_its_address_gains_nothing(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """DNS rebinding: a harmless address when it is looked at, loopback a moment later. Only the first answer counts."""
    answers = iter(["10.255.255.1", "127.0.0.1"])

    async def resolve(*_: Any, **__: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (next(answers), 0))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
    reached: list[str] = []

    async def connect(self: Any, request: httpx.Request) -> httpx.Response:
        reached.append(f"{request.url.host} {request.headers['Host']} {request.extensions['sni_hostname']}")
        return httpx.Response(200)

    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", connect)
    await get("http://rebinds.example/")
    assert reached == ["10.255.255.1 rebinds.example rebinds.example"]
    with pytest.raises(ForbiddenAddress, match=r"rebinds.example is 127.0.0.1 \(loopback\)"):
        await get("http://rebinds.example/")


async def test_one_forbidden_address_among_several_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    async def resolve(*_: Any, **__: Any) -> list[Any]:
        return [(socket.AF_INET, 1, 6, "", (address, 0)) for address in ("8.8.8.8", "169.254.169.254")]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
    with pytest.raises(ForbiddenAddress, match="link-local"):
        await get("http://both.example/")


def test_a_forbidden_address_is_told_before_a_run() -> None:
    assert refusal("http://127.0.0.1:8080/score", ()).startswith("127.0.0.1 (loopback): a run may not reach it")
    assert "localhost is " in refusal("http://localhost/score", ())
    assert refusal("http://127.0.0.1:8080/score", ("127.0.0.1:8080",)) == ""
    assert refusal("http://10.0.0.1/score", ()) == ""
    assert refusal("https://not-there.invalid/score", ()) == "", "it may have an address when the run asks"


async def test_a_forbidden_address_is_not_tried_again(server: Any) -> None:
    spec = HttpSpec(type="http", url=f"http://127.0.0.1:{server.server_address[1]}/", retries=3)
    reward = HttpReward(spec, ())
    assert reward.problems([])[0].startswith("127.0.0.1 (loopback)")
    found: dict[int, Outcome] = {}
    await reward(samples_of("a"), found.__setitem__)
    assert isinstance(found[0], Failed)
    assert "(loopback)" in found[0].cause
    assert "attempts" not in found[0].cause
