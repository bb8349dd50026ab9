"""The session of an episode on an environment replica, as a generation actor sees it.

The session outlives the actor: an episode that is aborted leaves it open, and continues it from another actor.
"""

from __future__ import annotations

import asyncio
import logging
from asyncio import FIRST_COMPLETED
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

from rlhfless.environments.contract import Description
from rlhfless.environments.kept_sessions import GivenAnswer
from rlhfless.environments.protocol import ModelAsked, ModelTurn, Opening, PlayResult
from rlhfless.environments.trajectory import Answer
from rlhfless.functions.calls import ANSWER_S, Call, Reply
from rlhfless.util.errors import class_and_line

log = logging.getLogger(__name__)


class SessionLeft(Exception):
    """The episode leaves its session open: it continues elsewhere."""

    waits = False
    """Whether the environment has not answered yet."""


class SessionParked(SessionLeft):
    """The episode leaves while it waits for its environment."""

    waits = True


SILENT_S = 15.0
"""A call that lasts so long may be waiting for a replica that is gone; the replica is asked whether it is there."""


async def send_to_replica(name: str, call: Call, method: str, *arguments: object) -> Any:
    """Call a method of an environment replica from another function, and return its value.

    Raises the method's own error, or SessionLeft if the replica is lost. If it was lost before, Serve waits for another
    one, for ever.
    """
    from ray import serve  # takes seconds to import
    from ray.exceptions import RayError, RayTaskError
    from ray.serve.exceptions import RayServeException

    try:
        reply: Reply[Any] = await getattr(serve.get_app_handle(name), method).remote(call, *arguments)
    except RayTaskError as error:
        cause: BaseException = error.cause
        raise cause from error
    except (RayError, RayServeException) as error:
        log.warning("environment replica %s is lost: %s", name, class_and_line(error))
        raise SessionLeft from error
    return reply.value


class EnvironmentReplicas:
    """Calls of this process to environment replicas. When one of them finds that a replica is lost, all end, and so do
    further ones until the driver names the replica again."""

    def __init__(self, send: Callable[..., Awaitable[Any]] = send_to_replica) -> None:
        self._send = send
        self._lost: dict[str, asyncio.Event] = {}

    def trust(self, name: str) -> None:
        """Call a replica again: it has answered the driver."""
        if name in self._lost and self._lost[name].is_set():
            del self._lost[name]

    async def ask(self, left: asyncio.Event, name: str, call: Call, method: str, *arguments: object) -> Any:
        """Return the value of a call.

        Raises the method's own error, or SessionLeft if the replica is lost, or `left` is set first: the environment
        then goes on with the call.
        """
        lost = self._lost.setdefault(name, asyncio.Event())
        answer = asyncio.ensure_future(self._send(name, call, method, *arguments))
        ends = [asyncio.create_task(event.wait()) for event in (lost, left)]
        try:
            while not (await asyncio.wait([answer, *ends], timeout=SILENT_S, return_when=FIRST_COMPLETED))[0]:
                await self._require(name, call)
            if not answer.done():
                raise SessionLeft
            return answer.result()
        except SessionLeft:
            if not left.is_set():
                lost.set()
            raise
        finally:
            for task in (answer, *ends):
                task.cancel()

    async def _require(self, name: str, call: Call) -> None:
        """Raises SessionLeft if a replica does not answer a question that costs it nothing."""
        try:
            await asyncio.wait_for(self._send(name, call, "about"), ANSWER_S)
        except TimeoutError:
            log.warning("environment replica %s does not answer within %g s", name, ANSWER_S)
            raise SessionLeft from None


AskReplica = Callable[..., Awaitable[Any]]
"""`ask(method, *arguments)` returns the value of a call to the environment's replica. Raises SessionLeft if the episode
is to stop here, or the replica is lost."""


class RemoteEnvironment:
    """The session of one episode, on an environment replica; an OpenSession."""

    def __init__(self, description: Description, key: str, ask: AskReplica) -> None:
        self.description = description
        self._key, self._ask = key, ask

    @asynccontextmanager
    async def session(self) -> AsyncIterator[RemoteSession]:
        """Open the episode's session. It stays open if the episode leaves it.

        Once the episode is finished, it no longer matters whether the session's replica is lost.
        """
        try:
            yield RemoteSession(self._key, self._ask)
        except SessionLeft:
            raise
        except BaseException:
            await self._ask("end", self._key, False)
            raise
        with suppress(SessionLeft):
            await self._ask("end", self._key, True)


class RemoteSession:
    """See EnvironmentSession."""

    def __init__(self, key: str, ask: AskReplica) -> None:
        self._key, self._ask_replica = key, ask
        self._asked: dict[str, int] = {}
        self._took_s = 0.0
        self.resumed = False

    async def reset(self, seed: int, row: Mapping[str, Any]) -> Opening:
        opening: Opening = await self._ask("reset", 0, seed, row)
        return opening

    async def call(self, number: int, tool: str, arguments: Any) -> Answer:
        answer: Answer = await self._ask("call", number, tool, arguments)
        return replace(answer, took_s=self._took_s)

    async def reward(self) -> float | None:
        number: float | None = await self._ask("reward", 0)
        return number

    async def snapshot(self) -> bytes:
        number = self._asked["snapshot"] = self._asked.get("snapshot", -1) + 1
        state: bytes = await self._ask("snapshot", number)
        return state

    async def restore(self, state: bytes) -> Opening:
        opening: Opening = await self._ask("restore", 0, state)
        return opening

    async def play(self, seed: int, row: Mapping[str, Any], turn: ModelTurn) -> PlayResult:
        number = 0
        asked: ModelAsked | PlayResult = await self._ask("play", 0, seed, row)
        while isinstance(asked, ModelAsked):
            number += 1
            asked = await self._ask("turn", number, await turn(asked))
        return asked

    async def _ask(self, method: str, number: int, *arguments: Any) -> Any:
        given: GivenAnswer = await self._ask_replica("ask", self._key, method, number, *arguments)
        self._took_s = given.took_s
        self.resumed = given.resumed if method in ("reset", "play") else self.resumed
        return given.value
