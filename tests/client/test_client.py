"""The Python clients, against a served application; and a connection that breaks."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

import rlhfless
from fakes.fake_service import RUN, NoDrivers, begun_run
from rlhfless.client import calls
from rlhfless.client.errors import Conflict, Invalid, NotFound, ServiceAway
from rlhfless.control.service import Service


def message(n: int) -> tuple[str, dict[str, Any]]:
    return "message", {"level": "info", "message": f"m{n}"}


ENDED = ("ended", {"status": "succeeded", "reason": "done", "error": None, "retry": False})


class Breaks:
    """A proxy that cuts every connection after some bytes of the answer."""

    def __init__(self, port: int, after_bytes: int) -> None:
        self._to, self._after = port, after_bytes
        self.cuts = 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listening.accept()
                threading.Thread(target=self._carry, args=(connection,), daemon=True).start()

    def _carry(self, connection: socket.socket) -> None:
        with connection, socket.create_connection(("127.0.0.1", self._to)) as service:
            threading.Thread(target=self._copy, args=(connection, service), daemon=True).start()
            left = self._after
            with contextlib.suppress(OSError):
                while left > 0 and (data := service.recv(min(left, 4096))):
                    connection.sendall(data)
                    left -= len(data)
            self.cuts += left <= 0
            for one in (connection, service):
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    @staticmethod
    def _copy(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                target.sendall(data)

    def close(self) -> None:
        self._listening.close()


@pytest.fixture
def breaking(service: tuple[httpx.Client, Service], monkeypatch: pytest.MonkeyPatch) -> Iterator[Breaks]:
    monkeypatch.setattr(calls, "FIRST_WAIT_S", 0.01)
    client, state = service
    assert client.base_url.port is not None
    proxy = Breaks(client.base_url.port, after_bytes=3000)
    object.__setattr__(state.settings, "public_url", f"http://127.0.0.1:{proxy.port}")
    yield proxy
    proxy.close()


def test_a_stream_that_breaks_goes_on_without_loss_or_repeat(
    client: httpx.Client, drivers: NoDrivers, breaking: Breaks
) -> None:
    run, push = begun_run(client, drivers)
    push(*(message(n) for n in range(100)))
    push(ENDED)
    with rlhfless.Client(f"http://127.0.0.1:{breaking.port}") as broken:
        events = list(broken.watch(run))
    assert breaking.cuts >= 5
    assert [event.id for event in events] == list(range(1, len(events) + 1))
    assert [event.message for event in events if event.type == "message"] == [f"m{n}" for n in range(100)]


async def test_the_asynchronous_client_does_the_same(
    client: httpx.Client, drivers: NoDrivers, breaking: Breaks
) -> None:
    run, push = begun_run(client, drivers)
    push(*(message(n) for n in range(40)))
    push(ENDED)
    async with rlhfless.AsyncClient(f"http://127.0.0.1:{breaking.port}") as broken:
        events = [event async for event in broken.watch(run)]
    assert [event.message for event in events if event.type == "message"] == [f"m{n}" for n in range(40)]
    async with rlhfless.AsyncClient(str(client.base_url)) as whole:
        assert (await whole.get_run(run)).status == "succeeded"
        assert (await whole.list_runs(metadata={"no": "such"})).data == []


def test_runs_are_made_steered_and_listed(client: httpx.Client) -> None:
    with rlhfless.Client(str(client.base_url)) as ours:
        run = ours.create_run(RUN | {"metadata": {"team": "a"}}, "once")
        assert ours.create_run(RUN | {"metadata": {"team": "a"}}, "once").id == run.id
        assert [one.id for one in ours.list_runs(metadata={"team": "a"}).data] == [run.id]
        assert ours.pause_run(run.id).status in ("paused", "pausing")
        assert ours.metrics(run.id).series == []
        assert ours.usage(run.id).functions == []
        assert ours.checkpoints(run.id).data == []


def test_errors_have_types_and_name_every_problem(client: httpx.Client) -> None:
    with rlhfless.Client(str(client.base_url)) as ours:
        with pytest.raises(NotFound) as missing:
            ours.get_run("none")
        assert (missing.value.status_code, missing.value.error.code) == (404, "not_found")
        with pytest.raises(Invalid) as wrong:
            ours.create_run(RUN | {"steps": 0, "stepz": 1})
        assert "2 problems" in str(wrong.value)
        assert "- stepz: unknown key" in str(wrong.value)
        ours.create_run(RUN, "key")
        with pytest.raises(Conflict):
            ours.create_run(RUN | {"steps": 9}, "key")


def test_a_service_that_is_away_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "FIRST_WAIT_S", 0.001)
    with rlhfless.Client("http://127.0.0.1:9") as ours, pytest.raises(ServiceAway, match="rlhfless up"):
        ours.get_run("any")


def test_where_the_service_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.delenv(calls.URL, raising=False)
    monkeypatch.chdir(tmp_path)
    assert calls.service_url(None) == calls.DEFAULT_URL
    (tmp_path / "rlhfless-data").mkdir()
    (tmp_path / "rlhfless-data" / "service.json").write_text('{"url": "http://127.0.0.1:1234", "pid": 1}')
    assert calls.service_url(None) == "http://127.0.0.1:1234"
    monkeypatch.setenv(calls.URL, "http://there:1/")
    assert calls.service_url(None) == "http://there:1"
    assert calls.service_url("http://given") == "http://given"


def test_what_takes_long_to_compute_is_not_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "COMPUTE_S", 0.2)
    asked = []

    def accept(listening: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                asked.append(listening.accept()[0])

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=accept, args=(listening,), daemon=True).start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with rlhfless.Client(url) as ours, pytest.raises(ServiceAway, match="it is there"):
            ours.plan(RUN)
    assert len(asked) == 1


@pytest.mark.parametrize("body", [{"error": {"code": "unauthorized", "message": "no key"}}, "a proxy's page"])
def test_a_refused_key_names_the_variable(body: object) -> None:
    """Also where a proxy refuses it."""
    from rlhfless.client.errors import fault_of

    text = str(fault_of(httpx.Response(401, json=body)))
    assert "RLHFLESS_API_KEY" in text
    assert "rlhfless keys create" in text
