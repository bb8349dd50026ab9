"""The process in which one test of a `code` reward runs. A script of its own: it imports nothing of rlhfless.

    python -I -S confined.py <config fd> <result fd>

It reads its config (JSON) to the end, gives up what it can, runs the code, and writes the config's `token` to the
result fd once code and tests have run to their end: an early `exit(0)` is no pass. Without code it writes, as JSON,
which protections took hold.

What it gives up: life without its parent; the network (a network namespace of its own, and no sockets); other
processes (no fork, no signals to others); CPU time, memory, file size, open files. Whatever the kernel does not
allow is left out and reported. It can still read files that its user can read: no sandbox.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import signal
import struct
import sys

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP = 1, 38, 22
_SECCOMP_MODE_FILTER = 2
_CLONE_NEWUSER, _CLONE_NEWNET, _CLONE_THREAD = 0x10000000, 0x40000000, 0x10000
_ALLOW, _REFUSE, _UNKNOWN = 0x7FFF0000, 0x00050000 | 1, 0x00050000 | 38  # allow; EPERM; ENOSYS
_LOAD, _EQUAL, _AT_LEAST, _HAS_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_X32_BIT = 0x40000000

# Architecture of a system call as seccomp names it, numbers of clone and clone3, and those that are refused: socket,
# fork, vfork, kill, ptrace, process_vm_writev, io_uring_setup (which opens sockets too), unshare, setns.
_SYSTEM_CALLS = {
    "x86_64": (0xC000003E, 56, 435, (41, 57, 58, 62, 101, 311, 425, 272, 308)),
    "aarch64": (0xC00000B7, 220, 435, (198, 129, 117, 271, 425, 97, 268)),
}


def confine(config: dict[str, int]) -> dict[str, bool]:
    """Give up what can be given up. Returns which protections took hold: {"network": bool, "processes": bool}."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != config["parent"]:
        os._exit(1)  # it died before the line above
    # Root needs no user namespace for it; others get one, in which they are allowed to.
    own_network = libc.unshare(_CLONE_NEWNET) == 0 or libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) == 0
    for kind, most in (
        (resource.RLIMIT_CPU, config["cpu_s"]),
        (resource.RLIMIT_AS, config["memory_bytes"]),
        (resource.RLIMIT_FSIZE, config["file_bytes"]),
        (resource.RLIMIT_NOFILE, config["open_files"]),
        (resource.RLIMIT_CORE, 0),
    ):
        _limit(kind, most)
    filtered = _filter_system_calls(libc)
    if not filtered and os.getuid() != 0:  # root is not counted
        _limit(resource.RLIMIT_NPROC, 0)
    return {"network": own_network or filtered, "processes": filtered or os.getuid() != 0}


def _limit(kind: int, most: int) -> None:
    hard = resource.getrlimit(kind)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, most))


def _filter_system_calls(libc: ctypes.CDLL) -> bool:
    """No sockets, no processes beside this one; threads are fine. Returns whether the kernel took the filter."""
    known = _SYSTEM_CALLS.get(platform.machine())
    if known is None:
        return False
    architecture, clone, clone3, refused = known
    program = [
        (_LOAD, 0, 0, 4),  # the architecture
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _REFUSE),
        (_LOAD, 0, 0, 0),  # the number of the call
        (_AT_LEAST, 0, 1, _X32_BIT),
        (_RETURN, 0, 0, _REFUSE),
        (_EQUAL, 0, 1, clone3),  # its flags lie in memory, out of the filter's sight: libc falls back to clone
        (_RETURN, 0, 0, _UNKNOWN),
    ]
    for number in refused:
        program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _REFUSE)]
    program += [
        (_EQUAL, 0, 3, clone),
        (_LOAD, 0, 0, 16),  # its flags: the first argument
        (_HAS_BITS, 1, 0, _CLONE_THREAD),
        (_RETURN, 0, 0, _REFUSE),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code = b"".join(struct.pack("HBBI", *line) for line in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(buffer))
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    return bool(libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0) == 0)


def main() -> None:
    """Run what the config says."""
    config_fd, result_fd = int(sys.argv[1]), int(sys.argv[2])
    with os.fdopen(config_fd, "rb") as stream:
        config = json.load(stream)
    sys.argv[:] = ["solution.py"]
    sys.path.append(config["packages"])
    held = confine(config)
    if config["code"] is None:
        os.write(result_fd, json.dumps(held).encode())
        return
    namespace = {"__name__": "__main__", "__builtins__": __builtins__}
    for name in ("code", "tests"):
        exec(compile(config[name], f"<{name}>", "exec"), namespace)
    sys.stdout.flush()
    os.write(result_fd, config["token"].encode())


if __name__ == "__main__":
    main()
