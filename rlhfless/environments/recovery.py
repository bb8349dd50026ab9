"""Sessions that survive a failure of the environment, if it can be restored or repeated."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from rlhfless.environments.protocol import (
    EnvironmentFailed,
    EnvironmentSession,
    ModelTurn,
    Opening,
    OpenSession,
    PlayResult,
)
from rlhfless.environments.trajectory import Answer, EpisodeLimits, EpisodeTask

T = TypeVar("T")


class NotReplayable(EnvironmentFailed):
    """An environment says that it is replayable, and is not."""

    def __init__(self, number: int, tool: str) -> None:
        """`number`: of the call that gave another answer; 0: what `reset` gave was different."""
        what = f"`{tool or 'observe'}` (call {number}) gave another answer" if number else "`reset` gave another text"
        super().__init__(f"is not replayable: {what} when it was repeated")


class RecoveredEnvironment:
    """An environment that survives the loss of its session, by its last snapshot or by repeating its calls."""

    def __init__(
        self, environments: OpenSession, task: EpisodeTask, limits: EpisodeLimits, failures: list[str]
    ) -> None:
        self._environments, self._task, self._limits, self._failures = environments, task, limits, failures
        self._description = environments.description
        self._stack = AsyncExitStack()
        self._session: EnvironmentSession
        self._state: bytes | None = None
        self._since: list[tuple[int, str, Any, str]] = []
        """Calls since the last snapshot, or since the reset, with the digests of their answers."""
        self.is_open = False
        """Whether its session can be asked for a reward."""

    async def __aenter__(self) -> None: ...

    async def __aexit__(self, *error: Any) -> None:
        await self._stack.__aexit__(*error)  # the session learns how the episode ended

    @property
    def resumed(self) -> bool:
        """See EnvironmentSession."""
        return self._session.resumed

    async def open(self) -> Opening:
        """Return what the environment says first."""
        await self._new_session()
        opening = await self._session.reset(self._task.environment_seed, self._task.row)
        self.is_open = True
        await self._save()
        return opening

    async def play(self, turn: ModelTurn) -> PlayResult:
        await self._new_session()
        return await self._session.play(self._task.environment_seed, self._task.row, turn)

    async def answer(self, number: int, tool: str, arguments: Any) -> Answer:
        """Answer a call, or an observation (tool `""`)."""
        answer = await self.run(lambda session: session.call(number, tool, arguments))
        self._since.append((number, tool, arguments, answer.digest))
        await self._save()
        return answer

    async def run(self, question: Callable[[EnvironmentSession], Awaitable[T]]) -> T:
        """Ask the session; after a failure, ask again once it is as it was before."""
        while True:
            try:
                return await question(self._session)
            except EnvironmentFailed as error:
                can_recover = self._description.snapshots or self._description.replayable
                if not can_recover or len(self._failures) >= self._limits.retries:
                    raise
                self._failures.append(str(error))
                await self._recover()
            except BaseException:
                self.is_open = False
                raise

    async def _new_session(self) -> None:
        await self._stack.aclose()
        self.is_open = False
        self._session = await self._stack.enter_async_context(self._environments.session())

    async def _save(self) -> None:
        if self._description.snapshots:
            self._state = await self.run(lambda session: session.snapshot())
            self._since.clear()

    async def _recover(self) -> None:
        """Bring a new session to the state after the last answer."""
        await self._new_session()
        if self._state is None:
            await self._session.reset(self._task.environment_seed, self._task.row)
        else:
            await self._session.restore(self._state)
        self.is_open = True
        for number, tool, arguments, digest in self._since:
            repeated = await self._session.call(number, tool, arguments)
            if repeated.digest != digest:
                raise NotReplayable(number, tool)
