"""A worker process: creates its rewards once, and scores samples until its parent closes the connection.

    python -P -m rlhfless.rewards.worker <socket fd> <parent's pid>

Everything runs in the main thread, where libraries may use SIGALRM. The parent alone limits time and replaces a worker
that hangs or dies. When a parent dies, the kernel kills its workers.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress

from rlhfless.rewards.combine import verifier
from rlhfless.rewards.protocol import RewardError, Verifier, VerifierSpec
from rlhfless.rewards.workers import Broken, End, Ready, Task
from rlhfless.util import processes
from rlhfless.util.text import tolerant


def main() -> None:
    processes.die_with(int(sys.argv[2]))
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)  # not for processes that rewards start
    tolerant(sys.stdout)  # output of rewards goes to the log, and must not make them fail
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    with suppress(EOFError):
        verifiers = _make(channel, processes.receive(channel))
        while verifiers is not None:
            task: Task = processes.receive(channel)
            for event in verifiers[task.reward].run(task.samples):
                processes.send(channel, event)
            processes.send(channel, End())
    # Threads of the user's code must not keep the process alive.
    os._exit(0)


def _make(channel: socket.socket, specs: Sequence[VerifierSpec]) -> list[Verifier] | None:
    try:
        verifiers = [verifier(spec) for spec in specs]
        for each in verifiers:
            each.prepare()
    except RewardError as error:
        processes.send(channel, Broken(error.reward, error.what))
        return None
    processes.send(channel, Ready(tuple(each.whole for each in verifiers)))
    return verifiers


if __name__ == "__main__":
    main()
