"""A process and its child: messages over a stream socket (eight bytes of length, then a pickle), and a common end."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import pickle
import select
import signal
import socket
import time
from pathlib import Path
from typing import Any

_LENGTH_BYTES = 8

_GONE_POLL_S = 0.02

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4  # linux/prctl.h


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent, which has this pid, ends: a process that is stopped, or hangs
    in native code, would not see that its channel has closed."""
    with contextlib.suppress(OSError, AttributeError):  # Linux only; elsewhere the channel has to do
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # it died before the line above


def die_with_spawner() -> None:
    """`die_with` for a process that its parent started by `spawn`, which tells it no pid.

    Both must be of one session, which the parent is of from its start: so a process that has another parent by now
    sees it.
    """
    parent = os.getppid()
    die_with(parent)
    try:
        alive = os.getsid(parent) == os.getsid(0)
    except OSError:
        alive = False
    if not alive:
        os._exit(1)


def session_members(session: int) -> tuple[int, ...]:
    """Processes of a session that run, by number; not one of which only the exit code is left."""
    members = []
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdecimal()):
        with contextlib.suppress(OSError):
            # The name, in parentheses, may hold anything; state, parent, group and session follow it (man 5 proc).
            state, _, _, of = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:4]
            if int(of) == session and state not in "ZX":
                members.append(pid)
    return tuple(members)


def end_session(session: int, grace_s: float, timeout_s: float) -> bool:
    """Wait for the end of all processes of a session whose first one has ended; kill them after `grace_s`.

    Returns whether they were gone `timeout_s` later.
    """
    began_s = time.monotonic()
    while members := session_members(session):
        waited_s = time.monotonic() - began_s
        if waited_s > grace_s + timeout_s:
            return False
        for pid in members if waited_s > grace_s else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_GONE_POLL_S)
    return True


def hide_from_others() -> None:
    """Give /proc/<pid>/{environ,mem,maps,fd} of this process to root with its capabilities: other processes of its
    user cannot read them any more. Debuggers of that user, and core dumps, are lost with it."""
    with contextlib.suppress(OSError, AttributeError):  # Linux only
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def encode(message: object) -> bytes:
    """One frame."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


def send(channel: socket.socket, message: object) -> None:
    """Blocks until the message is in the socket's buffer."""
    channel.sendall(encode(message))


def receive(channel: socket.socket) -> Any:
    """Blocks until a message is there. Raises EOFError when the other side is gone."""
    length = int.from_bytes(_read_exactly(channel, _LENGTH_BYTES), "big")
    return pickle.loads(_read_exactly(channel, length))


def is_waiting(channel: socket.socket) -> bool:
    """A message, or the end of the stream, can be read without blocking."""
    return bool(select.select([channel], [], [], 0)[0])


async def read(reader: asyncio.StreamReader) -> Any:
    """`receive` for asyncio. Raises asyncio.IncompleteReadError (an EOFError) when the other side is gone."""
    length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
    return pickle.loads(await reader.readexactly(length))


def _read_exactly(channel: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = channel.recv_into(view)
        if count == 0:
            raise EOFError("the other side closed the channel")
        view = view[count:]
    return data
