"""The application behind a real server, in a thread of the test."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from sqlalchemy.orm import Session

from rlhfless.control.api.app import app_of
from rlhfless.control.delivery import DriverOrder
from rlhfless.control.drivers import Handle
from rlhfless.control.service import Service, open_database
from rlhfless.control.settings import ServiceSettings

START_S = 20.0


class NoDrivers:
    """Drivers that are always at work, and do nothing."""

    def start(self, folder: Path, order: DriverOrder) -> Handle:
        return {"pid": 1}

    def alive(self, handle: Handle) -> bool:
        return True

    def ended_by(self, handle: Handle) -> str:
        return "its driver has ended"

    def stop(self, handle: Handle) -> None:
        """Nothing to stop."""

    def kill(self, handle: Handle) -> None:
        """Nothing to kill."""


@dataclass
class Served:
    """A service that answers."""

    url: str
    service: Service
    loop: asyncio.AbstractEventLoop

    def write(self, change: Callable[[Session], Any]) -> Any:
        """Change the database as the service does."""
        return asyncio.run_coroutine_threadsafe(self.service.database.write(change), self.loop).result(START_S)


@contextlib.contextmanager
def served(
    folder: Path,
    fill: Callable[[Session], Any] = lambda _: None,
    change: Callable[[FastAPI], None] = lambda _: None,
    **settings: Any,
) -> Iterator[Served]:
    """Serve a database in `folder`, filled first; `change` may change the application."""
    ready: list[Served] = []
    began = threading.Event()
    servers: list[uvicorn.Server] = []

    async def serve() -> None:
        wanted = ServiceSettings(data=str(folder), port=0, max_drivers=settings.pop("max_drivers", 2), **settings)
        database = open_database(wanted)
        try:
            await database.write(fill)
            with socket.create_server(("127.0.0.1", 0)) as listening:
                listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted ones inherit it
                url = f"http://127.0.0.1:{listening.getsockname()[1]}"
                service = Service(wanted, database, NoDrivers(), url)
                app = app_of(service)
                change(app)
                config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)
                servers.append(uvicorn.Server(config))
                ready.append(Served(url, service, asyncio.get_running_loop()))
                began.set()
                await servers[0].serve(sockets=[listening])
        finally:
            began.set()
            database.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert began.wait(START_S)
    assert ready, "the service has not started"
    try:
        yield ready[0]
    finally:
        servers[0].should_exit = True
        thread.join(START_S)
