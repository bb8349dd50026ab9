"""Run a command, then kill its remaining descendants in any session: a script without imports of rlhfless.

    python -I -S reap_children.py <command> [<argument> ...]

Used between a worker and a test's process if the kernel takes no system-call filter, so the test can start processes.
With privileges the command is the first process of a process namespace, which the kernel ends with it; else this
process adopts orphans (child subreaper) and kills them. SIGTERM, or the parent's death, ends the command. Exits with
its exit code.
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
