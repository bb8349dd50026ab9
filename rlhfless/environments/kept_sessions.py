"""Sessions by key, which outlive their callers: an episode that moves to another actor finds its session again.

Every answer is kept, so a call that is repeated is not executed again: an actor that continues an episode, or plays it
again after a driver was killed, repeats its calls from the first one on. Answers outlive the session by a while: an
actor can be lost with a finished episode that has not reached the driver. A call that its caller no longer waits for
goes on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

from rlhfless.environments.contract import Description
from rlhfless.environments.protocol import EnvironmentFailed, EnvironmentSession, ModelAnswer, ModelAsked, PlayResult
from rlhfless.environments.workers import EnvironmentWorkers

log = logging.getLogger(__name__)

FIRST = ("reset", "restore", "play")
"""Methods that open a session."""


@dataclass(frozen=True, slots=True)
class GivenAnswer:
    """The answer to a call of a session."""

    value: Any
    resumed: bool = False
    """The call had been made before: the session goes on where another actor left it."""
    took_s: float = 0.0
    """Seconds from the first time that the call was made until its answer."""


@dataclass(eq=False)
class _Session:
    attempt: int
    used_s: float
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    on: EnvironmentSession | None = None
    calls: dict[tuple[str, int], tuple[Any, asyncio.Task[Any]]] = field(default_factory=dict)
    """By method and number: the arguments, and the call."""
    took_s: dict[tuple[str, int], float] = field(default_factory=dict)
    """By method and number: seconds until the answer."""
    asked: asyncio.Queue[ModelAsked | PlayResult] = field(default_factory=asyncio.Queue)
    """What the user's own loop asks next, or its result."""
    turns: asyncio.Queue[ModelAnswer | None] = field(default_factory=asyncio.Queue)
    loop: asyncio.Task[None] | None = None


class KeptSessions:
    """Sessions of one environment, each on a worker of its own."""

    def __init__(self, workers: EnvironmentWorkers, idle_s: float) -> None:
        """`idle_s`: a session without a call for so long may be closed when another one needs its worker."""
        self._workers = workers
        self._idle_s = idle_s
        self._sessions: dict[str, _Session] = {}
        self._finished: dict[str, _Session] = {}
        """Sessions of finished episodes, which have no worker any more: their answers."""
        self._releasing: set[asyncio.Task[None]] = set()

    @property
    def description(self) -> Description:
        return self._workers.description

    def __len__(self) -> int:
        return len(self._sessions)

    async def ask(self, key: str, attempt: int, method: str, number: int, *arguments: Any) -> GivenAnswer:
        """Call a method of a session, which its first call opens. `number` counts the calls of this method.

        Raises EnvironmentFailed, after which the session is closed.
        """
        session = self._sessions.get(key) or self._finished.get(key)
        if session is None:
            if method not in FIRST:
                raise EnvironmentFailed(f"`{method}`: the session is gone")
            session = self._sessions[key] = _Session(attempt, time.monotonic())
        session.attempt, session.used_s = max(session.attempt, attempt), time.monotonic()
        known = session.calls.get((method, number))
        if known is None:
            if key in self._finished:
                await self.close(key)
                raise EnvironmentFailed(f"`{method}`: the session has ended")
            known = arguments, asyncio.create_task(self._timed(session, method, number, arguments))
            session.calls[method, number] = known
            known[1].add_done_callback(_retrieved)
            resumed = False
        else:
            resumed = True
        if known[0] != arguments:
            await self.close(key)
            raise EnvironmentFailed(f"`{method}` (call {number}) was made before with other arguments")
        try:
            value = await asyncio.shield(known[1])
        except EnvironmentFailed:
            await self.close(key)
            raise
        except asyncio.CancelledError:
            if known[1].cancelled():
                raise EnvironmentFailed(f"`{method}`: the session was closed") from None
            raise
        session.used_s = time.monotonic()
        return GivenAnswer(value, resumed, session.took_s[method, number])

    async def answered(self, key: str) -> None:
        """Wait until all calls of a session have their answers; return at once for an unknown session."""
        session = self._sessions.get(key)
        if session is not None and (running := [task for _, task in session.calls.values() if not task.done()]):
            await asyncio.wait(running)

    async def end(self, key: str, finished: bool) -> None:
        """End a session, and free its worker. Answers of a `finished` episode are kept for a while."""
        session = self._sessions.get(key)
        if session is not None and finished:
            session.used_s = now_s = time.monotonic()
            old = [each for each, of in self._finished.items() if now_s - of.used_s > self._idle_s]
            for each in old:
                del self._finished[each]
            self._finished[key] = session
        elif not finished:
            self._finished.pop(key, None)
        await self._release(self._sessions.pop(key, None))

    async def close(self, key: str) -> None:
        """End a session, free its worker, and forget its answers. Does nothing for an unknown one."""
        await self.end(key, finished=False)

    async def _release(self, session: _Session | None) -> None:
        """Free the worker of a session, also if the caller leaves."""
        if session is not None:
            releasing = asyncio.create_task(self._released(session))
            self._releasing.add(releasing)
            releasing.add_done_callback(self._releasing.discard)
            await asyncio.shield(releasing)

    async def _released(self, session: _Session) -> None:
        running = [task for _, task in session.calls.values() if not task.done()]
        running += [session.loop] if session.loop is not None and not session.loop.done() else []
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await session.stack.aclose()

    async def _timed(self, session: _Session, method: str, number: int, arguments: tuple[Any, ...]) -> Any:
        asked_s = time.monotonic()
        value = await self._made(session, method, number, arguments)
        session.took_s[method, number] = time.monotonic() - asked_s
        return value

    async def _made(self, session: _Session, method: str, number: int, arguments: tuple[Any, ...]) -> Any:
        if session.on is None:
            await self._make_room(session)
            session.on = await session.stack.enter_async_context(self._workers.session())
        if method == "play":
            session.loop = asyncio.create_task(self._play(session, *arguments))
            return await self._next_asked(session)
        if method == "turn":
            session.turns.put_nowait(arguments[0])
            return await self._next_asked(session)
        if method == "call":
            return await session.on.call(number, *arguments)
        body: Callable[..., Coroutine[Any, Any, Any]] = getattr(session.on, method)
        return await body(*arguments)

    async def _play(self, session: _Session, seed: int, row: Any) -> None:
        async def turn(asked: ModelAsked) -> ModelAnswer | None:
            session.asked.put_nowait(asked)
            return await session.turns.get()

        assert session.on is not None
        session.asked.put_nowait(await session.on.play(seed, row, turn))

    async def _next_asked(self, session: _Session) -> ModelAsked | PlayResult:
        """Return what the user's own loop asks next, or its result. Raises EnvironmentFailed."""
        assert session.loop is not None
        asked = asyncio.create_task(session.asked.get())
        await asyncio.wait([asked, session.loop], return_when=asyncio.FIRST_COMPLETED)
        if asked.done() or session.loop.exception() is None:
            return await asked
        asked.cancel()
        session.loop.result()  # raises
        raise AssertionError("the loop has failed")

    async def _make_room(self, session: _Session) -> None:
        """Close a session that nobody uses any more, if there is no idle worker for a new one."""
        if self._workers.idle:
            return
        now_s, newest = time.monotonic(), max(each.attempt for each in self._sessions.values())
        left = [
            (each.used_s, key)
            for key, each in self._sessions.items()
            if each is not session and each.on is not None and not _works(each)
            and (each.attempt < newest or now_s - each.used_s > self._idle_s)
        ]  # fmt: skip
        if left:
            _, key = min(left)
            log.info("session %s is closed: no call for a while, and another one needs its process", key)
            await self.close(key)

    async def stop(self) -> None:
        """Close all sessions."""
        for key in [*self._sessions]:
            with suppress(EnvironmentFailed):
                await self.close(key)


def _works(session: _Session) -> bool:
    return any(not task.done() for _, task in session.calls.values())


def _retrieved(task: asyncio.Task[Any]) -> None:
    """Do not log the error of a call whose caller has left."""
    if not task.cancelled():
        task.exception()
