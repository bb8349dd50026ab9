"""Seccomp filters for rlhfless.rewards.confined: lists of [code, jump if true, jump if false, k] of classic BPF.

k None stands for the id of the filtered process.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Mapping, Sequence

Program = list[list[int | None]]

_ALLOW, _REFUSE, _UNKNOWN = 0x7FFF0000, 0x00050000 | 1, 0x00050000 | 38  # allow; EPERM; ENOSYS
_LOAD, _EQUAL, _AT_LEAST, _HAS_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _SECOND_ARGUMENT = 0, 4, 16, 24  # offsets in struct seccomp_data
_CLONE_THREAD = 0x10000
_X32_BIT = 0x40000000
_SYS_CLONE3 = 435  # on every architecture
_GET_ACTION_AVAILABLE = 2

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE = {"x86_64": 56, "aarch64": 220}
_SOCKETPAIR = {"x86_64": 53, "aarch64": 199}
_NOT_STREAM = 0xE  # bits of a socket's type: SOCK_STREAM is 1, other types have one of these
_SYS_SECCOMP = {"x86_64": 317, "aarch64": 277}

# The network (io_uring opens sockets, too), other processes, and memory that no limit of this process counts.
_REFUSED = {
    "x86_64": {
        "socket": 41, "io_uring_setup": 425, "fork": 57, "vfork": 58, "kill": 62, "tkill": 200, "rt_sigqueueinfo": 129,
        "rt_tgsigqueueinfo": 297, "pidfd_send_signal": 424, "pidfd_getfd": 438, "ptrace": 101, "process_vm_readv": 310,
        "process_vm_writev": 311, "unshare": 272, "setns": 308, "memfd_create": 319, "memfd_secret": 447,
        "shmget": 29, "msgget": 68, "semget": 64, "mq_open": 240, "bpf": 321, "perf_event_open": 298,
        "add_key": 248, "request_key": 249, "keyctl": 250,
    },
    "aarch64": {
        "socket": 198, "io_uring_setup": 425, "kill": 129, "tkill": 130, "rt_sigqueueinfo": 138,
        "rt_tgsigqueueinfo": 240, "pidfd_send_signal": 424, "pidfd_getfd": 438, "ptrace": 117, "process_vm_readv": 270,
        "process_vm_writev": 271, "unshare": 97, "setns": 268, "memfd_create": 279, "memfd_secret": 447,
        "shmget": 194, "msgget": 186, "semget": 190, "mq_open": 180, "bpf": 280, "perf_event_open": 241,
        "add_key": 217, "request_key": 218, "keyctl": 219,
    },
}  # fmt: skip

# Their first argument is a process: this one only. C libraries need them to abort and for their own limits.
_OF_OWN_PROCESS = {
    "x86_64": {"tgkill": 234, "prlimit64": 302},
    "aarch64": {"tgkill": 131, "prlimit64": 261},
}

# Landlock does not hold them: mode, owner, times, extended attributes and (before its version 3) length of files.
_OF_ATTRIBUTES = {
    "x86_64": {
        "chmod": 90, "fchmod": 91, "fchmodat": 268, "fchmodat2": 452, "chown": 92, "fchown": 93, "lchown": 94,
        "fchownat": 260, "utime": 132, "utimes": 235, "futimesat": 261, "utimensat": 280, "truncate": 76,
        "setxattr": 188, "lsetxattr": 189, "fsetxattr": 190, "removexattr": 197, "lremovexattr": 198,
        "fremovexattr": 199, "setxattrat": 463, "removexattrat": 466,
    },
    "aarch64": {
        "fchmod": 52, "fchmodat": 53, "fchmodat2": 452, "fchown": 55, "fchownat": 54, "utimensat": 88, "truncate": 45,
        "setxattr": 5, "lsetxattr": 6, "fsetxattr": 7, "removexattr": 14, "lremovexattr": 15, "fremovexattr": 16,
        "setxattrat": 463, "removexattrat": 466,
    },
}  # fmt: skip


def filter_of_processes_and_network() -> Program | None:
    """Build a filter that refuses sockets, processes (threads are allowed) and uncounted memory. None if
    unsupported."""
    machine = platform.machine()
    if machine not in _ARCHITECTURES or not _kernel_filters(machine):
        return None
    # clone3's flags are in memory, where the filter cannot read them: the C library falls back to clone.
    lines: Program = [[_EQUAL, 0, 1, _SYS_CLONE3], [_RETURN, 0, 0, _UNKNOWN]]
    lines += _refusals(_REFUSED[machine])
    for number in _OF_OWN_PROCESS[machine].values():
        lines += [[_EQUAL, 0, 5, number], [_LOAD, 0, 0, _FIRST_ARGUMENT], [_EQUAL, 2, 0, 0], [_EQUAL, 1, 0, None]]
        lines += [[_RETURN, 0, 0, _REFUSE], [_RETURN, 0, 0, _ALLOW]]
    # Other pairs of sockets could be connected again, to a local service.
    lines += [[_EQUAL, 0, 4, _SOCKETPAIR[machine]], [_LOAD, 0, 0, _SECOND_ARGUMENT], [_HAS_BITS, 0, 1, _NOT_STREAM]]
    lines += [[_RETURN, 0, 0, _REFUSE], [_RETURN, 0, 0, _ALLOW]]
    lines += [[_EQUAL, 0, 3, _CLONE[machine]], [_LOAD, 0, 0, _FIRST_ARGUMENT], [_HAS_BITS, 1, 0, _CLONE_THREAD]]
    lines += [[_RETURN, 0, 0, _REFUSE]]
    return _program(machine, lines)


def filter_of_attributes() -> Program | None:
    """Build a filter that refuses changes of file attributes. None if unsupported."""
    machine = platform.machine()
    if machine not in _ARCHITECTURES or not _kernel_filters(machine):
        return None
    return _program(machine, _refusals(_OF_ATTRIBUTES[machine]))


def _kernel_filters(machine: str) -> bool:
    action = ctypes.c_uint32(_REFUSE & 0xFFFF0000)
    return bool(ctypes.CDLL(None).syscall(_SYS_SECCOMP[machine], _GET_ACTION_AVAILABLE, 0, ctypes.byref(action)) == 0)


def _refusals(calls: Mapping[str, int]) -> Program:
    lines: Program = []
    for number in calls.values():
        lines += [[_EQUAL, 0, 1, number], [_RETURN, 0, 0, _REFUSE]]
    return lines


def _program(machine: str, lines: Sequence[list[int | None]]) -> Program:
    """Wrap `lines`, which judge the call's number; calls that they do not refuse are allowed."""
    return [
        [_LOAD, 0, 0, _ARCHITECTURE],
        [_EQUAL, 1, 0, _ARCHITECTURES[machine]],
        [_RETURN, 0, 0, _REFUSE],
        [_LOAD, 0, 0, _NUMBER],
        [_AT_LEAST, 0, 1, _X32_BIT],
        [_RETURN, 0, 0, _REFUSE],
        *lines,
        [_RETURN, 0, 0, _ALLOW],
    ]
