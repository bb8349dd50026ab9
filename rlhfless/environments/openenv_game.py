"""Environments of an OpenEnv server, over its WebSocket: one session per episode (extra `openenv`).

The model calls one tool, `step`, whose arguments are the server's action. The server runs elsewhere, in an environment
of its own, as its package does not install beside the pins of this one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, ClassVar

from rlhfless.environments.contract import ToolError, Turn

STEP = "step"

_INVALID = "VALIDATION_ERROR"
"""Code of an action that does not fit: the model's fault."""


class OpenEnvGame:
    """Base of an environment on the server at `url`. Override `reset` to explain it, and `_text_of` to describe what
    the model sees."""

    url: ClassVar[str] = ""
    """`http://...` or `ws://...`, without a path."""

    async def reset(self, seed: int, row: dict[str, Any]) -> str:  # noqa: ARG002
        import httpx
        from websockets.asyncio.client import connect

        server = self.url.rstrip("/").removeprefix("ws").removeprefix("http")
        async with httpx.AsyncClient() as client:
            reply = (await client.get(f"http{server}/schema")).raise_for_status()
        self._action = reply.json()["action"]
        self._socket = await connect(f"ws{server}/ws", max_size=None)
        self._over = False
        return self._text_of((await self._ask("reset", {"seed": seed % 2**31}))["observation"])

    async def tools(self) -> list[dict[str, Any]]:
        described = self._action.get("description") or "Take an action."
        parameters = {"type": "object", "properties": {}} | {
            key: value for key, value in self._action.items() if key not in ("title", "description")
        }
        parameters["properties"] = {
            name: value for name, value in parameters["properties"].items() if name != "metadata"
        }
        return [{"type": "function", "function": {"name": STEP, "description": described, "parameters": parameters}}]

    async def call(self, name: str, arguments: dict[str, Any]) -> Turn:  # noqa: ARG002
        """Take an action. Raises ToolError for one that does not fit."""
        if not isinstance(arguments, Mapping):
            raise ToolError(f"the arguments of `{STEP}` must be a JSON object")
        given = await self._ask(STEP, dict(arguments))
        self._over = bool(given.get("done"))
        return Turn(self._text_of(given["observation"]), float(given.get("reward") or 0.0))

    def done(self) -> bool:
        return self._over

    async def close(self) -> None:
        await self._socket.send(json.dumps({"type": "close"}))
        await self._socket.close()

    def _text_of(self, observation: Mapping[str, Any]) -> str:
        """Return the text of an observation with one field; else its JSON."""
        fields = {name: value for name, value in observation.items() if name != "metadata"}
        values = [*fields.values()]
        return values[0] if len(values) == 1 and isinstance(values[0], str) else json.dumps(fields, ensure_ascii=False)

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the data of a reply. Raises ToolError, or RuntimeError: the environment has failed."""
        from websockets.exceptions import ConnectionClosed

        with suppress(ConnectionClosed):  # a full server says so and closes: its message can still be read
            await self._socket.send(json.dumps({"type": kind, "data": data}))
        reply = json.loads(await self._socket.recv())
        answer: Mapping[str, Any] = reply.get("data") or {}
        if reply.get("type") == "error":
            what = f"{answer.get('message')} ({answer.get('code')})"
            raise ToolError(what) if answer.get("code") == _INVALID else RuntimeError(f"{self.url}: {what}")
        return answer


def openenv_game(server: str) -> type[OpenEnvGame]:
    """Return an environment on a server."""

    class Game(OpenEnvGame):
        url = server

    return Game
