"""A program of the user's as an environment: it is a client of OpenAI's or Anthropic's API, and knows nothing of us.

Each episode starts it with the address and key of an endpoint of its own (rlhfless.environments.agent_endpoint). Its
last line of output may be the reward: `{"reward": 1.0}`.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from rlhfless.environments.agent_endpoint import AgentEndpoint
from rlhfless.environments.conversation import ConversationModel
from rlhfless.environments.protocol import EnvironmentFailed
from rlhfless.spec.explain import nearest
from rlhfless.util import processes
from rlhfless.util.text import parsed_json

PREFIX, WORK = "rlhfless-agent-", "work"
"""Of an episode's folder, and the folder in it in which the program starts."""

TAIL_BYTES = 16 * 1024
"""Of the program's output that is kept, for its reward and for the cause of a failure."""

SHOWN_CHARACTERS = 500
"""Of the output that a failure shows."""

CLOSE_S = 2.0
"""Timeout for the output of an ended program, which a process that it left may hold open."""

TASK = "RLHFLESS_TASK"
"""Variable with the file of the task: its own for each episode, so that it also tells what the program has started."""

_COLUMN = re.compile(r"(?<!\$)\{([A-Za-z_]\w*)\}")


def agent_program(command: Sequence[str], folder: str | None) -> Callable[..., Awaitable[Any]]:
    """Return an own loop that runs a program per episode. `folder`: where; None: in a new folder."""

    async def play(task: Any, model: ConversationModel) -> Any:
        arguments = filled(command, task.row)
        with _folder() as own:
            described = _describe(task, own)
            async with AgentEndpoint(model) as endpoint:
                variables = {**_environment(command), **endpoint.variables, TASK: described}
                code, printed, said = await _run(arguments, folder or os.path.join(own, WORK), variables)
        result = result_of(printed)
        if code and not (model.is_over and result is None):
            raise EnvironmentFailed(_cause(command, code, said))
        return result

    return play


def _folder() -> tempfile.TemporaryDirectory[str]:
    """Return a new folder; remove those of processes that were killed."""
    for other in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        pid = other.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdecimal() and not os.path.exists(f"/proc/{pid}"):
            shutil.rmtree(other, ignore_errors=True)
    return tempfile.TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}-", ignore_cleanup_errors=True)


def _describe(task: Any, own: str) -> str:
    """Write a task for the program; return the file."""
    os.mkdir(os.path.join(own, WORK))
    path = Path(own, "task.json")
    path.write_text(json.dumps({"row": task.row, "seed": task.seed}, ensure_ascii=False, default=str), "utf-8")
    return str(path)


def filled(command: Sequence[str], row: Mapping[str, Any]) -> list[str]:
    """Return the arguments with the row's columns in place of `{column}`. Raises EnvironmentFailed."""

    def value(found: re.Match[str]) -> str:
        if found[1] not in row:
            hint = nearest(found[1], row) + f"The row has {', '.join(row) or 'no columns'}"
            raise EnvironmentFailed(f"`command` has {found[0]}, which is no column; {hint}")
        column = row[found[1]]
        return column if isinstance(column, str) else json.dumps(column, ensure_ascii=False, default=str)

    arguments = [_COLUMN.sub(value, argument) for argument in command]
    return [sys.executable if arguments[0] == "python" else arguments[0], *arguments[1:]]


def result_of(printed: str) -> Any:
    """Return the JSON object in the last line that a program has printed, if it has a `reward`; else None."""
    lines = printed.strip().splitlines()
    with suppress(ValueError):
        value = parsed_json(lines[-1]) if lines else None
        if isinstance(value, dict) and "reward" in value:
            return value
    return None


def _environment(command: Sequence[str]) -> dict[str, str]:
    """Return the variables of a program: those of this process, without the run's packages for a foreign Python."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH" or command[0] == "python"}


class _Program(asyncio.SubprocessProtocol):
    """A running program: its output is copied to the log, which limits it, and its end is kept.

    asyncio's own streams report the end of a program only when all processes that it has left close its output.
    """

    def __init__(self) -> None:
        self.printed, self.said = bytearray(), bytearray()
        self.has_ended, self.is_closed = asyncio.Event(), asyncio.Event()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        sys.stdout.write(data.decode("utf-8", "replace"))
        sys.stdout.flush()
        for tail in (self.printed, self.said) if fd == 1 else (self.said,):
            tail += data
            del tail[:-TAIL_BYTES]

    def process_exited(self) -> None:
        self.has_ended.set()

    def connection_lost(self, exc: BaseException | None) -> None:  # noqa: ARG002
        self.is_closed.set()


async def _run(arguments: Sequence[str], folder: str, variables: Mapping[str, str]) -> tuple[int, str, str]:
    """Run a program to its end; return its exit code, and the ends of its output and of all that it said.

    `variables`: its environment; TASK is one of them.
    """
    try:
        transport, program = await asyncio.get_running_loop().subprocess_exec(
            _Program,
            *arguments,
            cwd=folder,
            env=variables,
            stdin=asyncio.subprocess.DEVNULL,
            process_group=0,
            preexec_fn=partial(processes.die_with, os.getpid()),  # a killed worker ends it too
        )
    except (OSError, ValueError) as error:
        raise EnvironmentFailed(f"`command` cannot be started: {error}") from error
    try:
        await program.has_ended.wait()
    finally:  # what it has left running must not outlive the episode
        with suppress(ProcessLookupError):
            os.killpg(transport.get_pid(), signal.SIGKILL)
        processes.kill_started_with(TASK, variables[TASK], CLOSE_S)
    with suppress(TimeoutError):
        await asyncio.wait_for(program.is_closed.wait(), CLOSE_S)
    code = transport.get_returncode()
    transport.close()
    assert code is not None, "it has ended"
    return code, program.printed.decode("utf-8", "replace"), program.said.decode("utf-8", "replace")


def _cause(command: Sequence[str], code: int, said: str) -> str:
    end = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"`{' '.join(command)[:SHOWN_CHARACTERS]}` ended with {end}: {said.strip()[-SHOWN_CHARACTERS:]}"
