"""The real API, database and supervisor, with fake Ray and drivers."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from rlhfless.control.api.app import make_app
from rlhfless.control.delivery import DriverOrder
from rlhfless.control.drivers import DriverHandle, Drivers
from rlhfless.control.ray_host import RAY_FILE
from rlhfless.control.service import Service, open_database
from rlhfless.control.settings import ServiceSettings

RUN: dict[str, Any] = {
    "name": "small",
    "model": {"path": "some/model"},
    "prompts": {"path": "some/prompts"},
    "rewards": [{"type": "exact_match"}],
    "steps": 5,
}


SAMPLE: dict[str, Any] = {
    "prompt_id": "p", "sample_index": 0, "prompt": "1+1", "response": "2", "finish_reason": "stop",
    "response_tokens": 1, "weights": "v3", "rewards": {}, "reward": 1.0, "failures": {},
}  # fmt: skip
"""A sample as a driver reports it."""


def there_is_ray(folder: Path, cores: int = 2, at: float | None = None) -> None:
    """Write a Ray host's report, dated far in the future because it is not renewed."""
    folder.mkdir(parents=True, exist_ok=True)
    devices = {"cpu-core": cores}
    now = {"address": "127.0.0.1:1", "pid": os.getpid(), "at": at or time.time() + 1e6, "nodes": 1}
    new = folder / "ray.new"
    new.write_text(json.dumps(now | {"devices": devices, "free": devices}))
    new.replace(folder / RAY_FILE)


class NoDrivers(Drivers):
    """Drivers that are "alive" until they are killed, and do nothing."""

    def __init__(self) -> None:
        self.orders: list[DriverOrder] = []
        self.dead: set[int] = set()
        self.stopped: set[int] = set()

    def start(self, folder: Path, order: DriverOrder) -> DriverHandle:
        self.orders.append(order)
        return {"number": len(self.orders) - 1}

    def alive(self, handle: DriverHandle) -> bool:
        return handle["number"] not in self.dead

    def ended_by(self, handle: DriverHandle) -> str:
        return "its driver was ended by SIGKILL"

    def stop(self, handle: DriverHandle) -> None:
        self.stopped.add(handle["number"])

    def kill(self, handle: DriverHandle) -> None:
        self.dead.add(handle["number"])


@contextmanager
def served(settings: ServiceSettings, drivers: Drivers) -> Iterator[tuple[httpx.Client, Service]]:
    """Serve the application on a free port in a thread; yield a client of it and its service."""
    ready, holder = threading.Event(), {}
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as in rlhfless.control.serve
        port = listening.getsockname()[1]

        async def serve() -> None:
            database = open_database(settings)
            service = Service(settings, database, drivers, f"http://127.0.0.1:{port}")
            server = uvicorn.Server(uvicorn.Config(make_app(service), log_config=None, timeout_graceful_shutdown=1))
            server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
            holder.update(server=server, service=service)
            ready.set()
            await server.serve(sockets=[listening])
            database.close()

        thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
        thread.start()
        assert ready.wait(60)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
                yield client, holder["service"]
        finally:
            holder["server"].should_exit = True
            thread.join(30)


class Pushes:
    """Delivers items as a driver does."""

    def __init__(self, client: httpx.Client, order: DriverOrder) -> None:
        self._client = client
        self.order = order
        self.seq = 0

    def __call__(
        self, *items: tuple[str, dict[str, Any]], lease: dict[str, Any] | None = None, reason: str = "", **now: Any
    ) -> Any:
        numbered = []
        for kind, data in items:
            self.seq += 1
            numbered.append(
                {"seq": self.seq, "attempt": self.order.attempt, "at": time.time(), "kind": kind, "data": data}
            )
        return self.again(numbered, lease=lease, reason=reason, **now)

    def again(
        self, items: list[dict[str, Any]], lease: dict[str, Any] | None = None, reason: str = "", **now: Any
    ) -> Any:
        """Deliver items that already have numbers. `now`: other fields of the driver's state."""
        body = {"attempt": self.order.attempt, "items": items, "now": {"reason": reason, "lease": lease, **now}}
        return self._client.post(
            f"/internal/runs/{self.order.run_id}/deliveries",
            json=body,
            headers={"Authorization": f"Bearer {self.order.token}"},
        )


def until(condition: Any, timeout_s: float = 120.0) -> Any:
    """Return the result of `condition` once it is true."""
    end = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
    return found


def begun_run(client: httpx.Client, drivers: NoDrivers) -> tuple[str, Pushes]:
    """Return the id of a new run whose driver has started, and a Pushes for it."""
    run = client.post("/v1/runs", json=RUN).json()["id"]
    until(lambda: drivers.orders)
    return run, Pushes(client, drivers.orders[-1])


def order_of(**changes: Any) -> dict[str, Any]:
    order = DriverOrder(
        run_id="run-1", attempt=1, token="secret", service_file="nowhere", service_url="http://127.0.0.1:9",
        ray_address="auto", one_machine=False, http_hosts=[], spec=RUN,
    )  # fmt: skip
    return order.model_dump() | changes


# -- fixtures of a service with fake drivers and Ray


@pytest.fixture
def settings(tmp_path: Path, request: pytest.FixtureRequest) -> ServiceSettings:
    """Return the service's settings. A test that lowers `sizes` passes them as parameter."""
    given = {"sizes": request.param} if hasattr(request, "param") else {}
    return ServiceSettings(data=str(tmp_path / "data"), port=0, roots=(str(tmp_path),), **given)


@pytest.fixture
def drivers() -> NoDrivers:
    return NoDrivers()


@pytest.fixture
def service(settings: ServiceSettings, drivers: NoDrivers) -> Iterator[tuple[httpx.Client, Service]]:
    there_is_ray(settings.folder)
    with served(settings, drivers) as pair:
        yield pair


@pytest.fixture
def client(service: tuple[httpx.Client, Service]) -> httpx.Client:
    return service[0]


@pytest.fixture(scope="module")
def shared_client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Yield a client of one service for all tests of a module that leave it unchanged, because a start takes longer
    than these tests."""
    folders = tmp_path_factory.mktemp("shared"), tmp_path_factory.getbasetemp()
    settings = ServiceSettings(data=str(folders[0] / "data"), port=0, roots=tuple(map(str, folders)))
    there_is_ray(settings.folder)
    with served(settings, NoDrivers()) as (client, _):
        yield client
