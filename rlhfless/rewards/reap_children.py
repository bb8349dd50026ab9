"""Starts a command, and at its end kills all its remaining descendants, in whichever session. A script of its own.

    python -I -S reap_children.py <command> [<argument> ...]

It runs between a worker and a test's process if the kernel takes no filter of system calls, so that the test's code can
start processes. With the privileges for it, the command is the first process of a process namespace: the
kernel then ends all others with it. Without them, this process adopts orphans (as a child subreaper) and kills
them. SIGTERM, or the end of the parent, ends the command first. Its exit code is the command's.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_CLONE_NEWPID = 0x20000000  # linux/sched.h


def main() -> None:
    """Run the command, to the end of the last of its descendants."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.unshare(_CLONE_NEWPID)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    child = os.fork()
    if not child:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        os.execv(sys.argv[1], sys.argv[1:])

    def stop(*_: object) -> None:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGTERM, stop)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    os.closerange(0, 256)  # the reader of its output waits for the last process that holds the pipe
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with suppress(ChildProcessError):
        while True:
            _kill_children()
            os.waitpid(-1, 0)
    sys.exit(code if code >= 0 else 128 - code)


def _kill_children() -> None:
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it is gone
            with open(f"/proc/{name}/stat") as stream:
                parent = int(stream.read().rpartition(")")[2].split()[1])
            if parent == os.getpid():
                os.kill(int(name), signal.SIGKILL)


if __name__ == "__main__":
    main()
