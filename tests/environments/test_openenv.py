"""Games of an OpenEnv server: a server that speaks the protocol of openenv 0.10 (openenv/core/env_server)."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from fakes.local_environments import played, text_of
from rlhfless.environments.contract import EnvironmentSource
from rlhfless.environments.loading import load
from rlhfless.records import EpisodeStatus
from rlhfless.spec import EnvironmentSpec

SCHEMA = {
    "title": "GuessAction",
    "description": "Guess a number.",
    "type": "object",
    "properties": {"number": {"type": "integer"}, "metadata": {"type": "object"}},
    "required": ["number"],
}


class Server:
    """Guess the seed's last digit; at most one session."""

    def __init__(self) -> None:
        self.live = 0
        self.closed = 0

    async def schema(self, _: Request) -> JSONResponse:
        return JSONResponse({"action": SCHEMA, "observation": {}, "state": {}})

    async def session(self, socket_: WebSocket) -> None:
        await socket_.accept()
        if self.live:
            await self._error(socket_, "1 of 1 sessions are taken", "CAPACITY_REACHED")
            await socket_.close()
            return
        self.live += 1
        try:
            await self._plays(socket_)
        except WebSocketDisconnect:
            pass
        finally:
            self.live -= 1

    async def _plays(self, socket_: WebSocket) -> None:
        secret = 0
        while True:
            message = json.loads(await socket_.receive_text())
            match message["type"]:
                case "reset":
                    secret = message["data"]["seed"] % 10
                    await self._observe(socket_, {"text": "Guess a digit.", "metadata": {}}, None, False)
                case "step" if not isinstance(message["data"].get("number"), int):
                    await self._error(socket_, "number: a valid integer is needed", "VALIDATION_ERROR")
                case "step" if message["data"]["number"] < 0:
                    await self._error(socket_, "division by zero", "EXECUTION_ERROR")
                case "step":
                    right = message["data"]["number"] == secret
                    seen = {"text": "right" if right else "wrong", "tries": 1}
                    await self._observe(socket_, seen, 1.0 if right else -0.25, right)
                case "close":
                    self.closed += 1
                    return

    async def _observe(self, socket_: WebSocket, seen: dict[str, Any], reward: float | None, done: bool) -> None:
        data = {"observation": seen, "reward": reward, "done": done}
        await socket_.send_text(json.dumps({"type": "observation", "data": data}))

    async def _error(self, socket_: WebSocket, message: str, code: str) -> None:
        await socket_.send_text(json.dumps({"type": "error", "data": {"message": message, "code": code}}))


@pytest.fixture
async def served() -> AsyncIterator[tuple[Server, str]]:
    game = Server()
    app = Starlette(routes=[Route("/schema", game.schema), WebSocketRoute("/ws", game.session)])
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_level="warning"))
        task = asyncio.create_task(server.serve(sockets=[listening]))
        yield game, f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = server.force_exit = True
        await task


def code_of(url: str) -> Any:
    return load(EnvironmentSource.of(EnvironmentSpec.model_validate({"type": "openenv", "url": url}))).code


def step(number: object) -> str:
    return f'<tool_call>{{"name": "step", "arguments": {{"number": {json.dumps(number)}}}}}</tool_call><|im_end|>'


async def test_an_episode_is_a_session_of_the_server(served: tuple[Server, str]) -> None:
    game, url = served
    texts = [step("x"), *map(step, range(10))]
    episode, _, _ = await played(code_of(url), *texts, seed=3)
    assert episode.status is EpisodeStatus.DONE, episode.cause
    answers = [call.answer for call in episode.calls]
    assert (answers[0].outcome, answers[0].text) == ("refused", "number: a valid integer is needed (VALIDATION_ERROR)")
    assert (answers[-1].text, answers[-1].done) == ('{"text": "right", "tries": 1}', True)
    assert episode.reward == 1 - 0.25 * (len(answers) - 2)
    text = text_of(episode.token_ids)
    assert '{"number": {"type": "integer"}}' in text
    assert "GuessAction" not in text
    assert "user\nGuess a digit.<|im_end|>" in text
    assert (game.live, game.closed) == (0, 1)


async def test_errors_of_the_server_are_failures(served: tuple[Server, str]) -> None:
    game, url = served
    episode, _, _ = await played(code_of(url), step(-1), retries=0)
    assert episode.status is EpisodeStatus.FAILED
    assert "division by zero (EXECUTION_ERROR)" in episode.cause
    game.live = 1
    episode, _, _ = await played(code_of(url), step(1), retries=0)
    assert (episode.status, "CAPACITY_REACHED" in episode.cause) == (EpisodeStatus.FAILED, True), episode.cause


def test_its_address_is_checked() -> None:
    with pytest.raises(ValueError, match="write `http://host:port`"):
        EnvironmentSpec.model_validate({"type": "openenv", "url": "host:8000"})
    with pytest.raises(ValueError, match="`url` is missing, and type openenv needs it"):
        EnvironmentSpec.model_validate({"type": "openenv"})
