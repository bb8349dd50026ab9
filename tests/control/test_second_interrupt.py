"""A second Ctrl-C ends the service at once, and in order."""

from __future__ import annotations

import asyncio
import socket

import pytest
import uvicorn
from starlette.applications import Starlette

from rlhfless.control.serve import _Server


def test_a_forced_end_logs_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    ended: list[str] = []

    class Lifespan:
        async def __aenter__(self) -> None:
            ended.append("begun")

        async def __aexit__(self, *error: object) -> None:
            ended.append("cancelled" if error[0] else "ended")

    async def run() -> None:
        server = _Server(uvicorn.Config(Starlette(lifespan=lambda _: Lifespan()), log_config=None))
        with socket.create_server(("127.0.0.1", 0)) as listening:
            serving = asyncio.create_task(server.serve(sockets=[listening]))
            while not server.started:
                await asyncio.sleep(0.01)
            server.should_exit = server.force_exit = True
            await serving

    asyncio.run(run())
    assert ended == ["begun", "ended"]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
