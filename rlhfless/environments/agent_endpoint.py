"""An HTTP endpoint for the program of one episode: OpenAI's chat completions, Anthropic's messages, vLLM's generation
from tokens.

It listens on this machine only, with a key of its own. Each request is a turn of the episode (`model.chat`).
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rlhfless.environments import anthropic_dialect, openai_dialect, token_dialect
from rlhfless.environments.contract import EpisodeOver
from rlhfless.environments.conversation import ConversationModel
from rlhfless.util.text import parsed_json

MODEL = "policy"
"""Name of the model. Requests may name any."""

_REFUSED = 400
"""Not 409, 429 or 5xx: clients would repeat the request."""


class AgentEndpoint:
    """Serves the model of one episode while it is entered."""

    def __init__(self, model: ConversationModel) -> None:
        self._model = model
        self._key = secrets.token_urlsafe(24)

    async def __aenter__(self) -> AgentEndpoint:
        self._socket = socket.create_server(("127.0.0.1", 0))
        app = Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/v1/chat/completions", self._completions, methods=["POST"]),
                Route("/v1/messages", self._messages, methods=["POST"]),
                Route("/inference/v1/generate", self._generate, methods=["POST"]),
            ]
        )
        settings = uvicorn.Config(app, lifespan="off", access_log=False, log_level="warning", ws="none")
        self._server = uvicorn.Server(settings)
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.should_exit = self._server.force_exit = True
        await self._task

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that clients read."""
        host, port = self._socket.getsockname()
        url = f"http://{host}:{port}"
        return {
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_BASE": f"{url}/v1",
            "OPENAI_API_KEY": self._key,
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": self._key,
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
        }

    async def _models(self, request: Request) -> Response:
        if not self._is_allowed(request):
            return _problem(401, "the API key is not that of this episode", "invalid_api_key")
        shown = {"id": MODEL, "object": "model", "type": "model", "display_name": MODEL, "owned_by": "rlhfless"}
        return JSONResponse({"object": "list", "data": [{**shown, "created": 0}], "has_more": False})

    async def _completions(self, request: Request) -> Response:
        return await self._answered(request, openai_dialect)

    async def _messages(self, request: Request) -> Response:
        return await self._answered(request, anthropic_dialect)

    async def _generate(self, request: Request) -> Response:
        async def answer(body: Mapping[str, Any]) -> Response:
            asked = token_dialect.parsed(body)
            turn = await self._model.generate(asked.token_ids, asked.max_tokens)
            written = token_dialect.written(turn.token_ids, turn.logprobs, turn.is_cut, self._model.turns)
            return JSONResponse(written)

        return await self._guarded(request, answer)

    async def _answered(self, request: Request, dialect: Any) -> Response:
        return await self._guarded(request, lambda body: self._chat(body, dialect))

    async def _guarded(self, request: Request, answer: Callable[[Mapping[str, Any]], Awaitable[Response]]) -> Response:
        """Answer a request. An ended episode is status 400, too: the client must not repeat the request."""
        if not self._is_allowed(request):
            return _problem(401, "the API key is not that of this episode", "invalid_api_key")
        try:
            body = parsed_json(await request.body())
            if not isinstance(body, Mapping):
                raise ValueError("the body is no JSON object")
            return await answer(body)
        except EpisodeOver as error:
            return _problem(_REFUSED, str(error), "episode_over")
        except ValueError as error:
            return _problem(_REFUSED, str(error), "invalid_request")

    async def _chat(self, body: Mapping[str, Any], dialect: Any) -> Response:
        asked = dialect.parsed(body)
        message = await self._model.chat(asked.messages, asked.tools, asked.max_tokens)
        named = str(body.get("model") or MODEL)
        if body.get("stream"):
            with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
            events = dialect.streamed(message, named, self._model.turns, with_usage)
            return Response("".join(events), media_type="text/event-stream")
        return JSONResponse(dialect.written(message, named, self._model.turns))

    def _is_allowed(self, request: Request) -> bool:
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        given = request.headers.get("x-api-key") or bearer
        return hmac.compare_digest(given.encode(), self._key.encode())


def _problem(status: int, text: str, code: str) -> JSONResponse:
    """Return an error as clients of both APIs read it."""
    kind = "authentication_error" if status == 401 else "invalid_request_error"
    return JSONResponse(
        {"type": "error", "error": {"type": kind, "message": text, "code": code, "param": None}}, status_code=status
    )
