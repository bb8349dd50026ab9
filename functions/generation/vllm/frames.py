"""Messages over a stream socket: eight bytes of length, then a pickle. Between two processes of ours."""

from __future__ import annotations

import asyncio
import pickle
import select
import socket
from typing import Any

_LENGTH_BYTES = 8


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
