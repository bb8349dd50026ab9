"""Worker processes that hold environments: bounded in time, memory and processes, killed, and replaced.

User code runs in no other process. A worker that hangs, dies or is cancelled in a call is killed with its children, and
only its own session is lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

from rlhfless.environments.contract import Description, EnvironmentSource
from rlhfless.environments.protocol import (
    Ask,
    EnvironmentFailed,
    EnvironmentLoaded,
    Load,
    ModelAsked,
    ModelTurn,
    Opening,
    PlayResult,
    WorkerReply,
)
from rlhfless.environments.trajectory import Answer
from rlhfless.spec.errors import InputError, Problem
from rlhfless.util import processes
from rlhfless.util.worker_process import MARK, WorkerProcess

logger = logging.getLogger(__name__)

START_S = 120.0
"""Timeout of a worker's start with its imports: torch takes ten seconds on a cold disk."""

MIB = 2**20

MAX_PROCESSES = 512
"""Processes of one session. More are a bomb that would take those of the machine."""

WATCH_S = 1.0
"""Time between two counts of the sessions' processes."""


class EnvironmentWorkers:
    """`count` processes for sessions of one environment, started when needed."""

    def __init__(self, source: EnvironmentSource, count: int, *, call_s: float, memory_mib: int) -> None:
        """`call_s`: seconds of one call. `memory_mib`: memory of one session."""
        self._all = [_Worker(source, call_s, memory_mib * MIB) for _ in range(count)]
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()
        for worker in self._all:
            self._idle.put_nowait(worker)
        self._watching: asyncio.Task[None] | None = None

    @property
    def description(self) -> Description:
        """The environment; `start` comes first."""
        loaded = [worker.description for worker in self._all if worker.description is not None]
        assert loaded, "no worker has been started"
        return loaded[0]

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(worker.process.pid for worker in self._all if worker.process.pid is not None)

    @property
    def idle(self) -> int:
        """Number of workers without a session."""
        return self._idle.qsize()

    async def start(self) -> None:
        """Start the first worker; the others start when they are needed. Raises InputError if the environment breaks
        its contract."""
        await self._all[0].ensure()
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        """Kill workers whose sessions have started too many processes."""
        while True:
            await asyncio.sleep(WATCH_S)
            if self.idle < len(self._all):
                counts = Counter((await asyncio.to_thread(processes.started_with, MARK)).values())
                for worker in self._all:
                    if (count := counts[worker.process.mark]) > MAX_PROCESSES:
                        worker.excess = f"it had {count} processes, more than {MAX_PROCESSES}, and was killed"
                        worker.process.kill()

    def close(self) -> None:
        """Kill all workers."""
        if self._watching is not None:
            self._watching.cancel()
        for worker in self._all:
            worker.process.kill()

    @asynccontextmanager
    async def session(self) -> AsyncIterator[_Worker]:
        """Yield the worker that has been idle longest as a session, so that a failed episode gets another."""
        worker = await self._idle.get()
        try:
            try:
                await worker.ensure()
            except InputError as error:
                raise EnvironmentFailed(str(error)) from error
            yield worker
        finally:
            try:
                with suppress(EnvironmentFailed):
                    await worker.close()
            finally:
                self._idle.put_nowait(worker)


class _Worker:
    """One process at a time, with one session at a time; a lost process is replaced for the next session."""

    resumed = False

    def __init__(self, source: EnvironmentSource, call_s: float, memory_bytes: int) -> None:
        self._source = source
        self._call_s = call_s
        self._memory_bytes = memory_bytes
        self.process = WorkerProcess("rlhfless.environments.worker", lambda: f"environment {source.target}")
        self.description: Description | None = None
        self.excess = ""
        """Why its process was killed, if the process has exceeded a limit."""

    async def ensure(self) -> None:
        """Start the process if it is not running. Raises InputError."""
        if self.process.is_running:
            return
        self.excess = ""
        try:
            async with asyncio.timeout(START_S):
                await self.process.start()
                self.process.send(Load(self._source, self._memory_bytes))
                loaded: EnvironmentLoaded = await self.process.receive()
        except TimeoutError:
            self.process.kill()
            raise self._broken(f"its worker process did not start within {START_S:g} s: an import hangs") from None
        except (EOFError, OSError) as error:
            raise self._broken(f"its worker process died at its start: {self.process.end()}") from error
        except asyncio.CancelledError:
            self.process.kill()
            raise
        if loaded.description is None:
            self.process.kill()
            raise InputError(f"environment {self._source.target!r}", loaded.problems)
        self.description = loaded.description

    def _broken(self, what: str) -> InputError:
        return InputError(f"environment {self._source.target!r}", [Problem("", what)])

    async def reset(self, seed: int, row: Mapping[str, Any]) -> Opening:
        opening: Opening = await self._ask("reset", seed, row)
        return opening

    async def call(self, number: int, tool: str, arguments: Any) -> Answer:
        answer: Answer = await self._ask("call", number, tool, arguments)
        return answer

    async def reward(self) -> float | None:
        number: float | None = await self._ask("reward")
        return number

    async def snapshot(self) -> bytes:
        state: bytes = await self._ask("snapshot")
        return state

    async def restore(self, state: bytes) -> Opening:
        opening: Opening = await self._ask("restore", state)
        return opening

    async def play(self, seed: int, row: Mapping[str, Any], turn: ModelTurn) -> PlayResult:
        result: PlayResult = await self._ask("play", seed, row, turn=turn)
        return result

    async def close(self) -> None:
        """End the session; its process stays for the next one."""
        if self.process.is_running:
            await self._ask("close")

    async def _ask(self, method: str, *arguments: Any, turn: ModelTurn | None = None) -> Any:
        """Return the reply to one call. Raises EnvironmentFailed; a process that does not reply is killed."""
        name = f"`{arguments[1] or 'observe'}`" if method == "call" else f"`{method}`"
        if not self.process.is_running:
            gone = self.excess or "the session's process is gone"
            raise EnvironmentFailed(f"{name}: {gone}")
        try:
            self.process.send(Ask(method, arguments))
            while True:
                reply: WorkerReply | ModelAsked = await self._receive(name)
                if isinstance(reply, WorkerReply):
                    break
                assert turn is not None, "only `play` asks for a turn"
                self.process.send(await turn(reply))
        except BaseException:  # failed or cancelled in the middle of a call: the process may be anywhere in it
            self.process.kill()
            raise
        if reply.failed:
            self.process.kill()  # it may hold memory, threads or half of a change
            raise EnvironmentFailed(reply.failed)
        return reply.value

    async def _receive(self, name: str) -> Any:
        """Return the next message. Raises EnvironmentFailed if none comes within `call_s`, or the process dies."""
        try:
            async with asyncio.timeout(self._call_s):
                return await self.process.receive()
        except TimeoutError:
            self.process.kill()
            what = f"{name} took longer than call_s ({self._call_s:g} s), and its process was killed"
            raise EnvironmentFailed(what) from None
        except (EOFError, OSError) as error:
            what = f"its process died in {name}: {self.excess or self.process.end()}"
            logger.warning("environment %s: %s", self._source.target, what)
            raise EnvironmentFailed(what) from error
