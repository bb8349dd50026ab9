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
from typing import Any

_LENGTH_BYTES = 8

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4  # linux/prctl.h


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent, which has this pid, ends: a process that is stopped, or hangs
    in native code, would not see that its channel has closed."""
    with contextlib.suppress(OSError, AttributeError):  # Linux only; elsewhere the channel has to do
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # it died before the line above


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
