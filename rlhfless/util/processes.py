"""A process and its child: messages over a stream socket (eight bytes of length, then a pickle), and their joint
end."""

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
    """Have the kernel kill this process when its parent `parent` ends.

    A process that is stopped or hangs in native code would not notice that its channel has closed.
    """
    with contextlib.suppress(OSError, AttributeError):  # Linux only; elsewhere the closed channel has to suffice
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # the parent died before the prctl call


def die_with_spawner() -> None:
    """Call `die_with` in a process that its parent started by `spawn` without passing a pid.

    Parent and child must be in the same session, so a process that already has another parent detects it.
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
    """Return the pids of a session's running processes, in ascending order and without zombies."""
    members = []
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdecimal()):
        with contextlib.suppress(OSError):
            # The name, in parentheses, may contain anything; state, parent, group and session follow it (man 5 proc).
            state, _, _, of = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:4]
            if int(of) == session and state not in "ZX":
                members.append(pid)
    return tuple(members)


def end_session(session: int, grace_s: float, timeout_s: float) -> bool:
    """Wait until all processes of a session whose leader has ended are gone; kill them after `grace_s`.

    Return False if some remain `timeout_s` later.
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


def started_with(name: str) -> dict[int, str]:
    """Return the value of an environment variable by pid, of all other running processes that were started with it.

    Children inherit it, in whatever session or group they are, and whoever has adopted them.
    """
    found = {}
    for pid in (int(entry) for entry in os.listdir("/proc") if entry.isdecimal() and int(entry) != os.getpid()):
        with contextlib.suppress(OSError):  # it has ended, or is another user's; zombies have none
            for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                if variable.startswith(os.fsencode(f"{name}=")):
                    found[pid] = os.fsdecode(variable).partition("=")[2]
    return found


def kill_started_with(name: str, value: str, timeout_s: float) -> bool:
    """Kill all other processes that were started with an environment variable of this value. Return whether none
    remains.

    They are stopped first, as a process that starts others all the time would be faster than the kills.
    """
    end_s = time.monotonic() + timeout_s
    stopped: set[int] = set()
    while time.monotonic() < end_s:
        members = [pid for pid, given in started_with(name).items() if given == value]
        if not members:
            return True
        running = set(members) - stopped
        for pid in running or stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP if running else signal.SIGKILL)
        stopped |= running
        if not running:
            time.sleep(_GONE_POLL_S)
    return False


def identity() -> str:
    """Return a name of this process that no other one gets: its pid namespace, its pid, and its start."""
    return f"{_namespace()}-{os.getpid()}-{_start_of(os.getpid())}"


def is_gone(identity: str) -> bool:
    """Return whether a process with this `identity` has ended; False if it is of another pid namespace."""
    namespace, _, process = identity.partition("-")
    pid, _, start = process.partition("-")
    return namespace == _namespace() and pid.isdecimal() and _start_of(int(pid)) != start


def _namespace() -> str:
    return str(os.stat("/proc/self/ns/pid").st_ino)


def _start_of(pid: int) -> str:
    """Return when a process started, in clock ticks since the machine's start; empty if it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


def hide_from_others() -> None:
    """Restrict /proc/<pid>/{environ,mem,maps,fd} of this process to privileged root, so that other processes of its
    user cannot read them. This also disables that user's debuggers, and core dumps."""
    with contextlib.suppress(OSError, AttributeError):  # Linux only
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def encode(message: object) -> bytes:
    """Return the message as one frame."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


def send(channel: socket.socket, message: object) -> None:
    """Send a message. Blocks until it is in the socket's buffer."""
    channel.sendall(encode(message))


def receive(channel: socket.socket) -> Any:
    """Return the next message. Blocks until one arrives. Raises EOFError when the other side is gone."""
    length = int.from_bytes(_read_exactly(channel, _LENGTH_BYTES), "big")
    return pickle.loads(_read_exactly(channel, length))


def is_waiting(channel: socket.socket) -> bool:
    """Return whether a message, or the end of the stream, can be read without blocking."""
    return bool(select.select([channel], [], [], 0)[0])


async def read(reader: asyncio.StreamReader) -> Any:
    """Return the next message, as `receive` does. Raises asyncio.IncompleteReadError (an EOFError) when the other side
    is gone."""
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
