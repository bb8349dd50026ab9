"""A worker process: makes its rewards once, and scores what it is given until its parent hangs up.

    python -P -m rlhfless.rewards.worker <socket fd> <parent's pid>

Everything runs in the main thread, where libraries may use SIGALRM for their time limits. The parent alone limits time
and replaces a worker that hangs or dies. A parent that dies takes its workers along, even busy ones: the kernel kills
them.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import socket
import sys
from collections.abc import Sequence
from typing import IO, Any, cast

from rlhfless.rewards.frames import LENGTH, Broken, End, Ready, Task, frame
from rlhfless.rewards.protocol import RewardError, Verifier
from rlhfless.rewards.verifiers import VerifierSpec, verifier

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve one parent."""
    _die_with(int(sys.argv[2]))
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        connection.set_inheritable(False)  # not for processes that rewards start
        stream = cast(IO[bytes], connection.makefile("rwb"))
        os.dup2(2, 1)  # what rewards print is log
        verifiers = _make(stream, _receive(stream))
        while verifiers is not None and (task := _receive(stream)) is not None:
            _serve(stream, verifiers[task.reward], task)
        # Threads of the user's own must not keep the process.
        os._exit(0)


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # it died before the line above


def _make(stream: IO[bytes], specs: Sequence[VerifierSpec]) -> list[Verifier] | None:
    try:
        verifiers = [verifier(spec) for spec in specs]
        for each in verifiers:
            each.prepare()
    except RewardError as error:
        _send(stream, Broken(error.reward, error.what))
        return None
    _send(stream, Ready(tuple(each.whole for each in verifiers)))
    return verifiers


def _serve(stream: IO[bytes], reward: Verifier, task: Task) -> None:
    for event in reward.run(task.samples):
        _send(stream, event)
    _send(stream, End())


def _send(stream: IO[bytes], message: Any) -> None:
    stream.write(frame(message))
    stream.flush()


def _receive(stream: IO[bytes]) -> Any:
    """The next message; None when the parent has hung up."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    body = stream.read(length)
    return pickle.loads(body) if len(body) == length else None


if __name__ == "__main__":
    main()
