"""A worker process: loads one environment, and holds one session at a time until its parent closes the connection.

    python -P -m rlhfless.environments.worker <socket fd> <parent's pid>

All user code runs in one task of the main thread, so that a session may keep connections open between calls. The parent
limits the time, and replaces a worker that hangs or dies. When a parent dies, the kernel kills its workers.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import resource
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from rlhfless.chat.messages import DataFault, Message, conversation
from rlhfless.environments.contract import Environment, EpisodeOver, InvalidCall, ToolError, Turn
from rlhfless.environments.conversation import ConversationModel
from rlhfless.environments.loading import load
from rlhfless.environments.protocol import (
    Ask,
    EnvironmentFailed,
    EnvironmentLoaded,
    Load,
    ModelAnswer,
    ModelAsked,
    ModelTurn,
    Opening,
    PlayResult,
    WorkerReply,
)
from rlhfless.environments.trajectory import Answer, AnswerOutcome
from rlhfless.spec.errors import InputError
from rlhfless.spec.explain import nearest, shown
from rlhfless.spec.imports import cause
from rlhfless.util import processes
from rlhfless.util.text import storable, tolerant

MAX_REWARD = 1e9
"""As of rewards (rlhfless.rewards.protocol)."""


class LocalSession:
    """A session in this process. Every method raises EnvironmentFailed."""

    resumed = False

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._object: Any = None
        self._tools: tuple[Mapping[str, Any], ...] = ()
        self._last: tuple[int, Answer] | None = None

    async def reset(self, seed: int, row: Mapping[str, Any]) -> Opening:
        self._object, self._last = await self._run("its constructor", self._environment.code), None
        opened = await self._run("reset", self._object.reset, seed=seed, row=dict(row))
        messages = () if opened is None else self._messages("reset", opened)
        return Opening(messages, await self._offered())

    async def call(self, number: int, tool: str, arguments: Any) -> Answer:
        if self._last is None or self._last[0] != number:
            answer = await (self._called(tool, arguments) if tool else self._observed(arguments))
            self._last = (number, answer)
        return self._last[1]

    async def _called(self, tool: str, arguments: Any) -> Answer:
        try:
            if tool in self._environment.tools:
                values = self._environment.tools[tool].checked(arguments)
                result = await self._run(tool, getattr(self._object, tool), **values)
            elif tool in (names := [each["function"]["name"] for each in self._tools]):
                result = await self._run(tool, self._object.call, tool, arguments)
            else:
                hint = nearest(tool, names) + f"The tools are {', '.join(names) or 'none'}"
                raise InvalidCall(f"there is no tool `{tool}`; {hint}")
        except InvalidCall as error:
            return Answer(storable(str(error)), AnswerOutcome.INVALID)
        except ToolError as error:
            return await self._answer(tool, str(error), AnswerOutcome.REFUSED)
        if result is None:
            raise EnvironmentFailed(f"`{tool}` returned None; a tool returns text for the model")
        return await self._answer(tool, result)

    async def _observed(self, text: str) -> Answer:
        try:
            result = await self._run("observe", self._object.observe, text)
        except ToolError as error:
            return await self._answer("observe", str(error), AnswerOutcome.REFUSED)
        return Answer(None, done=True) if result is None else await self._answer("observe", result)

    async def reward(self) -> float | None:
        if not self._environment.has("reward"):
            return None
        return _number("reward", await self._run("reward", self._object.reward))

    async def snapshot(self) -> bytes:
        state = await self._run("snapshot", self._object.snapshot)
        if not isinstance(state, bytes):
            raise EnvironmentFailed(f"`snapshot` returned {shown(state)}, not bytes")
        return state

    async def restore(self, state: bytes) -> Opening:
        self._object, self._last = await self._run("its constructor", self._environment.code), None
        await self._run("restore", self._object.restore, state)
        return Opening((), await self._offered())

    async def play(self, seed: int, row: Mapping[str, Any], turn: ModelTurn) -> PlayResult:
        task, model = SimpleNamespace(row=dict(row), seed=seed), ConversationModel(turn)
        try:
            result = await self._run("play", self._environment.code, task, model)
        except EpisodeOver:  # the user's loop may also catch it, and return a reward
            result = None
        if not model.turns and not model.is_over:
            raise EnvironmentFailed("`play` ended without a turn of the model, so there is nothing to learn")
        return _played(result)

    async def close(self) -> None:
        done, self._object = self._object, None
        if done is not None and self._environment.has("close"):
            await self._run("close", done.close)

    async def _offered(self) -> tuple[Mapping[str, Any], ...]:
        self._tools = tuple(tool.schema for tool in self._environment.tools.values())
        if self._environment.has("tools"):
            self._tools += tuple(await self._run("tools", self._object.tools))
        return self._tools

    async def _answer(self, method: str, result: Any, outcome: AnswerOutcome = AnswerOutcome.RESULT) -> Answer:
        reward = None
        if isinstance(result, Turn):
            result, reward = result.text, _number(method, result.reward)
        if not isinstance(result, str):
            try:
                result = json.dumps(result, ensure_ascii=False, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise EnvironmentFailed(f"`{method}` returned {shown(result)}, neither text nor JSON") from error
        done = bool(await self._run("done", self._object.done)) if self._environment.has("done") else False
        return Answer(storable(result), outcome, reward, done)

    def _messages(self, method: str, given: Any) -> tuple[Message, ...]:
        try:
            return tuple(conversation(given, method))
        except DataFault as error:
            raise EnvironmentFailed(f"`{method}` gave no messages: {error}") from error

    async def _run(self, what: str, function: Any, /, *given: Any, **named: Any) -> Any:
        """Call user code, which may be async and raise any error."""
        try:
            result = function(*given, **named)
            return await result if inspect.isawaitable(result) else result
        except (ToolError, InvalidCall, EpisodeOver, EnvironmentFailed):
            raise
        except MemoryError as error:
            raise EnvironmentFailed(f"`{what}` needed more memory than memory_mib allows ({cause(error)})") from error
        except (Exception, SystemExit) as error:
            raise EnvironmentFailed(f"`{what}` raised {cause(error)}") from error


def _played(result: Any) -> PlayResult:
    """Return what a user's own loop returned: a reward, None, or a mapping with `reward` and other numbers."""
    if not isinstance(result, Mapping):
        return PlayResult(None if result is None else _number("play", result))
    if "reward" not in result:
        raise EnvironmentFailed(f"`play` returned {shown(result)}, which has no `reward`; None leaves it to `rewards`")
    parts = {str(name): _number("play", value) for name, value in result.items() if name != "reward"}
    return PlayResult(None if result["reward"] is None else _number("play", result["reward"]), parts)


def _number(method: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = float("nan")
    if not abs(number) <= MAX_REWARD or isinstance(value, str):
        raise EnvironmentFailed(f"`{method}` gave the reward {shown(value)}, not a number from -1e9 to 1e9")
    return number


async def _serve(channel: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=channel)

    async def model_turn(asked: ModelAsked) -> ModelAnswer | None:
        writer.write(processes.encode(asked))
        answer: ModelAnswer | None = await processes.read(reader)
        return answer

    order: Load = await processes.read(reader)
    try:
        environment = load(order.source)
    except InputError as error:
        writer.write(processes.encode(EnvironmentLoaded(None, error.problems)))
        await writer.drain()
        return
    _limit_memory(order.memory_bytes)
    writer.write(processes.encode(EnvironmentLoaded(environment.description)))
    session = LocalSession(environment)
    while True:
        ask: Ask = await processes.read(reader)
        arguments = (*ask.arguments, model_turn) if ask.method == "play" else ask.arguments
        try:
            reply = WorkerReply(await getattr(session, ask.method)(*arguments))
        except (EnvironmentFailed, ToolError, InvalidCall) as error:
            reply = WorkerReply(None, str(error) or type(error).__name__)
        writer.write(processes.encode(reply))


def _limit_memory(more_bytes: int) -> None:
    with open("/proc/self/statm") as stream:
        pages = int(stream.read().split()[0])
    limit = pages * resource.getpagesize() + more_bytes
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def main() -> None:
    processes.die_with(int(sys.argv[2]))
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)  # not for processes that environments start
    tolerant(sys.stdout)  # output of environments goes to the log, and must not make them fail
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    with suppress(EOFError):
        asyncio.run(_serve(channel))
    # Threads of the user's code must not keep the process alive.
    os._exit(0)


if __name__ == "__main__":
    main()
