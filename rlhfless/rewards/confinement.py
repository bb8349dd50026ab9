"""Start confined processes (rlhfless.rewards.confined) and enforce their limits."""

from __future__ import annotations

import ctypes
import marshal
import os
import platform
import selectors
import signal
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from types import CodeType
from typing import IO, Any, Literal

from rlhfless.spec import CodeSpec

MIB, KIB = 2**20, 2**10

FILE_BYTES = 16 * MIB
"""Largest file that a test may write."""

FOLDER_BYTES, FOLDER_FILES = 64 * MIB, 1024
"""Maximum size and number of all files and folders in a test's folder."""

OPEN_FILES = 64
"""Maximum number of files that a test may have open."""

OUTPUT_BYTES = 256 * KIB
"""Maximum output of a test; twice the length of the expected output if that is longer."""

CLEAN_UP_S = 1.0
"""Time to end a test's process and remove its folder: usually milliseconds."""

LOOK_S = 0.05
"""Interval between measurements of a test's folder; a disk can fill some hundred MiB in it."""

# Isolated, and without the start-up files of site-packages: a start takes 10 ms instead of 40.
_COMMAND = (sys.executable, "-I", "-S", "-B", "-X", "utf8", str(Path(__file__).with_name("confined.py")))

# Numbers that no system gives to its users (systemd's table calls 1879048192 to 2147483647 unused), one per process id
# (at most 2^22), so that two tests cannot reach each other. The user `nobody` if a container does not map such numbers.
_FIRST_UID, _NOBODY = 2_000_000_000, 65534

_LIBRARIES = ("/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libx32", "/usr/local/lib", "/lib", "/lib32", "/lib64",
              "/libx32", "/nix/store", "/usr/share/zoneinfo", "/etc/alternatives", "/etc/ld.so.cache",
              "/etc/localtime")  # fmt: skip
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


@dataclass(frozen=True, slots=True)
class Measures:
    """Protections to try: all, except in tests of the protection that remains without one of them."""

    namespaces: bool = True
    """Own root folder, network and IPC; with a user namespace without privileges."""
    landlock: bool = True
    own_user: bool = True
    filters: bool = True


@dataclass(frozen=True, slots=True)
class Protection:
    """Protections in effect for a `code` reward's process on this machine."""

    user: Literal["own", "same", "root"]
    """`own`: a user that owns nothing else. `same`: the run's user. `root`: root without capabilities."""
    network: bool
    """Whether the network is unreachable."""
    processes: bool
    """Whether no other process can be started."""
    files: bool
    """Whether only Python and system libraries are readable, and only its folder is writable."""
    environment: bool
    """Whether other processes' environment and memory are unreadable."""
    disk: bool
    """Whether the kernel limits its folder; otherwise the folder is measured while the test runs."""

    def warnings(self) -> list[str]:
        whose = "every user" if self.user == "own" else "the run's user"
        missing = [] if self.network else ["can reach the network"]
        missing += [] if self.processes else ["can start processes"]
        missing += [] if self.files else [f"can read and write all files that {whose} can"]
        missing += [] if self.environment else ["can read the environment variables of the run's processes"]
        if not self.disk and self.files:
            folder = f"{FOLDER_BYTES // MIB} MiB or {FOLDER_FILES:,} files"
            missing += [f"can fill its folder beyond {folder} for up to {LOOK_S:g} s before it is ended"]
        missing += ["runs as root, without root's capabilities"] if self.user == "root" else []
        if not missing:
            return []
        listed = " and ".join((", ".join(missing[:-1]), missing[-1])) if missing[1:] else missing[0]
        return [f"code that the policy writes {listed} here: the kernel grants no more (docs/rewards.md, Code)"]


@dataclass(frozen=True, slots=True)
class CodeTask:
    """The task of a confined process."""

    code: str | tuple[str, ...] | None
    """The program; of several texts the first that compiles. None: only report protections."""
    token: str = ""
    """Written to the result, with the number of checks, after program and test have run."""
    given: str = ""
    """Standard input."""
    test: Mapping[str, Any] = field(default_factory=lambda: {"kind": "output"})
    """The test for rlhfless.rewards.tested."""
    expected_bytes: int = 0


@dataclass(frozen=True, slots=True)
class CodeEnded:
    """The outcome of a confined process."""

    result: bytes
    output: str | None
    """None if the process was killed at a limit."""
    cause: str = ""
    """The limit at which it was killed."""
    exit_code: int = field(default=0, compare=False)
    """Negative: the signal that ended it."""


@lru_cache(maxsize=1)
def protection() -> Protection:
    """Probe the protections of this machine by starting a confined process."""
    return protection_with(Measures())


def protection_with(measures: Measures) -> Protection:
    ended = run_confined(CodeTask(None), CodeSpec(type="code", timeout_s=30), measures)
    if not ended.result:
        return Protection("root" if os.getuid() == 0 else "same", False, False, False, False, False)
    held = marshal.loads(ended.result)
    return Protection(held.pop("user"), **{name: bool(value) for name, value in held.items()})


def run_confined(task: CodeTask, spec: CodeSpec, measures: Measures = Measures()) -> CodeEnded:
    """Run the process until it ends or reaches a limit."""
    program = filters()[0] if measures.filters else None
    where = os.path.realpath(tempfile.gettempdir())  # the path is made again in the process's own root
    with (
        tempfile.TemporaryDirectory(prefix="rlhfless-code-", dir=where, ignore_cleanup_errors=True) as path,
        _file(task.given.encode(errors="surrogatepass")) as stdin,
        _file(marshal.dumps(_config(task, spec, measures, path))) as settings,
        _result_pipe() as (reading, writing),
    ):
        command = [*_COMMAND, str(settings.fileno()), str(writing.fileno())]
        with writing:
            process = subprocess.Popen(
                command if program else [*_COMMAND, "reap", *command],
                cwd=path,
                # No variable of the parent: the policy's code may see no token.
                env={"PATH": os.defpath, "HOME": path, "TMPDIR": path, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"},
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=(settings.fileno(), writing.fileno()),
                start_new_session=True,
            )
        known = frozenset(os.fstat(file.fileno()).st_ino for file in (stdin, settings))
        folder = Folder(Path(path), process.pid, FOLDER_BYTES, FOLDER_FILES, known)
        most = max(OUTPUT_BYTES, 2 * task.expected_bytes)
        ended = _follow(process, spec, folder, most, orderly=not program)
        return replace(ended, result=reading.read() or b"")


def _config(task: CodeTask, spec: CodeSpec, measures: Measures, folder: str) -> dict[str, Any]:
    program, of_attributes = filters() if measures.filters else (None, None)
    return {
        "runner": None if task.code is None else _runner(),
        "test": {"imports": (), **task.test, "sources": (task.code,) if isinstance(task.code, str) else task.code},
        "token": task.token,
        "parent": os.getpid() if program else None,
        "packages": sysconfig.get_path("purelib"),
        "folder": folder,
        "readable": readable(),
        "namespaces": measures.namespaces,
        "landlock": measures.landlock,
        "first_uid": _FIRST_UID if measures.own_user else None,
        "other_uid": _NOBODY,
        "filter": program,
        "filter_of_attributes": of_attributes,
        "cpu_s": spec.cpu_s,
        "memory_bytes": spec.memory_mib * MIB,
        "file_bytes": FILE_BYTES,
        "open_files": OPEN_FILES,
        "folder_bytes": FOLDER_BYTES,
        "folder_files": FOLDER_FILES,
    }


@lru_cache(maxsize=1)
def _runner() -> CodeType:
    path = Path(__file__).with_name("tested.py")
    return compile(path.read_text(encoding="utf-8"), path.name, "exec", dont_inherit=True)


@lru_cache(maxsize=1)
def readable() -> dict[str, str]:
    """Return the paths that Python needs; links map to their targets. No path is within another."""
    python = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    python.append(sysconfig.get_config_var("LIBDIR") or python[0])
    wanted = [path for path in (*_LIBRARIES, *python, *_DEVICES) if os.path.exists(path)]
    goals = {path: os.path.realpath(path) for path in wanted}
    real: list[str] = []
    for path in sorted(set(goals.values())):  # a folder before its contents
        if not any(path.startswith(f"{other}/") for other in real):
            real.append(path)
    return {**dict.fromkeys(real, ""), **{path: goal for path, goal in goals.items() if path != goal}}


@contextmanager
def _result_pipe() -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Open a pipe that is never waited on: any result is written before the process ends, whoever else holds the write
    end."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    with os.fdopen(reading, "rb", buffering=0) as reader, os.fdopen(writing, "wb", buffering=0) as writer:
        yield reader, writer


def _file(content: bytes) -> IO[bytes]:
    """Create an unnamed file: an argument or a pipe is too small for a long program."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 (the caller closes it)
    file.write(content)
    file.seek(0)
    return file


def _follow(process: subprocess.Popen[bytes], spec: CodeSpec, folder: Folder, most: int, orderly: bool) -> CodeEnded:
    """Read until the process ends, or kill it at a limit, such as `most` output bytes. `orderly`: let it end its
    descendants first."""
    assert process.stdout is not None
    deadline = time.monotonic() + spec.timeout_s
    next_look = time.monotonic() + LOOK_S
    output, closed, cause = bytearray(), False, ""
    with process.stdout as stream, selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        try:
            while not cause and not (closed and _waited(process, LOOK_S)):
                if not closed and selector.select(LOOK_S):
                    chunk = os.read(stream.fileno(), 64 * KIB)
                    closed = not chunk
                    output += chunk
                if len(output) > most:
                    cause = f"the test's output is longer than {most // KIB} KiB"
                elif (now := time.monotonic()) > deadline:
                    cause = f"the test took longer than timeout_s ({spec.timeout_s:g} s)"
                elif now > next_look:
                    cause, next_look = folder.excess(), now + LOOK_S
        finally:
            _end(process, orderly)
    cause = cause or folder.excess()  # the verdict must not depend on the time of the last measurement
    return CodeEnded(b"", None if cause else output.decode(errors="replace"), cause, process.returncode or 0)


def _waited(process: subprocess.Popen[bytes], longest_s: float) -> bool:
    with suppress(subprocess.TimeoutExpired):
        process.wait(longest_s)
        return True
    return False


def _end(process: subprocess.Popen[bytes], orderly: bool) -> None:
    if orderly and process.poll() is None:
        process.send_signal(signal.SIGTERM)
        _waited(process, CLEAN_UP_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    _waited(process, CLEAN_UP_S)


_BLOCK_BYTES = 512  # the unit of st_blocks


@dataclass(frozen=True, slots=True)
class Folder:
    """A test's folder on disk, measured from outside while the test runs.

    It is empty if the process has its own file system. A removed file counts while the process has it open, if the
    kernel shows that (not to root without CAP_SYS_PTRACE whose tests run as another user).
    """

    path: Path
    pid: int
    most_bytes: int
    most_files: int
    known: frozenset[int] = frozenset()
    """Inodes of unnamed files that the process was given."""

    def excess(self) -> str:
        """Return the limit that the folder exceeds, or an empty string."""
        taken, files = 0, 0
        folders = [str(self.path)]
        while folders:
            with suppress(OSError), os.scandir(folders.pop()) as entries:  # it may be removed meanwhile
                for entry in entries:
                    files += 1
                    if files > self.most_files:
                        return f"the test's folder holds more than {self.most_files} files and folders"
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    with suppress(OSError):
                        taken += entry.stat(follow_symlinks=False).st_blocks * _BLOCK_BYTES
        if taken + self._removed_bytes() > self.most_bytes:
            return f"the test's folder holds more than {self.most_bytes // MIB} MiB"
        return ""

    def _removed_bytes(self) -> int:
        """Return the bytes of open files without a name."""
        taken, seen = 0, set(self.known)
        with suppress(OSError):
            for name in os.listdir(f"/proc/{self.pid}/fd"):
                with suppress(OSError):
                    file = os.stat(f"/proc/{self.pid}/fd/{name}")
                    if stat.S_ISREG(file.st_mode) and not file.st_nlink and file.st_ino not in seen:
                        seen.add(file.st_ino)
                        taken += file.st_blocks * _BLOCK_BYTES
        return taken


# -- seccomp filters: lists of [code, jump if true, jump if false, k] of classic BPF


Program = list[list[int | None]]
"""k None stands for the id of the filtered process."""

_ALLOW, _REFUSE, _UNKNOWN = 0x7FFF0000, 0x00050000 | 1, 0x00050000 | 38  # allow; EPERM; ENOSYS
_LOAD, _EQUAL, _AT_LEAST, _HAS_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _SECOND_ARGUMENT = 0, 4, 16, 24  # offsets in struct seccomp_data
_CLONE_THREAD = 0x10000
_X32_BIT = 0x40000000
_NOT_STREAM = 0xE  # bits of a socket's type: SOCK_STREAM is 1, other types have one of these
_GET_ACTION_AVAILABLE = 2

# By machine: its architecture in linux/audit.h, and its place in the tables of system calls below.
_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
_SYS_CLONE, _SYS_CLONE3, _SYS_SOCKETPAIR, _SYS_SECCOMP = (56, 220), 435, (53, 199), (317, 277)

# The network (io_uring opens sockets, too), other processes, and memory that no limit of this process counts.
_REFUSED = {
    "socket": (41, 198), "io_uring_setup": (425, 425), "fork": (57, None), "vfork": (58, None), "kill": (62, 129),
    "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "unshare": (272, 97), "setns": (308, 268), "memfd_create": (319, 279),
    "memfd_secret": (447, 447), "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
    "bpf": (321, 280), "perf_event_open": (298, 241), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219),
}  # fmt: skip

# Their first argument is a process: this one only. C libraries need them to abort and for their own limits.
_OF_OWN_PROCESS = {"tgkill": (234, 131), "prlimit64": (302, 261)}

# Landlock does not hold them: mode, owner, times, extended attributes and (before its version 3) length of files.
_OF_ATTRIBUTES = {
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None),
    "futimesat": (261, None), "utimensat": (280, 88), "truncate": (76, 45), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "setxattrat": (463, 463), "removexattrat": (466, 466),
}  # fmt: skip


@lru_cache(maxsize=1)
def filters() -> tuple[Program | None, Program | None]:
    """Build two filters: one refuses sockets, processes (threads are allowed) and uncounted memory, the other changes
    of file attributes. None without kernel support."""
    if platform.machine() not in _MACHINES:
        return None, None
    architecture, column = _MACHINES[platform.machine()]
    action = ctypes.c_uint32(_REFUSE & 0xFFFF0000)
    if ctypes.CDLL(None).syscall(_SYS_SECCOMP[column], _GET_ACTION_AVAILABLE, 0, ctypes.byref(action)) != 0:
        return None, None
    # clone3's flags are in memory, where the filter cannot read them: the C library falls back to clone.
    lines: Program = [[_EQUAL, 0, 1, _SYS_CLONE3], [_RETURN, 0, 0, _UNKNOWN]]
    lines += _refusals(_REFUSED.values(), column)
    for numbers in _OF_OWN_PROCESS.values():
        lines += [[_EQUAL, 0, 5, numbers[column]], [_LOAD, 0, 0, _FIRST_ARGUMENT], [_EQUAL, 2, 0, 0]]
        lines += [[_EQUAL, 1, 0, None], [_RETURN, 0, 0, _REFUSE], [_RETURN, 0, 0, _ALLOW]]
    # Other pairs of sockets could be connected again, to a local service.
    lines += [[_EQUAL, 0, 4, _SYS_SOCKETPAIR[column]], [_LOAD, 0, 0, _SECOND_ARGUMENT], [_HAS_BITS, 0, 1, _NOT_STREAM]]
    lines += [[_RETURN, 0, 0, _REFUSE], [_RETURN, 0, 0, _ALLOW]]
    lines += [[_EQUAL, 0, 3, _SYS_CLONE[column]], [_LOAD, 0, 0, _FIRST_ARGUMENT], [_HAS_BITS, 1, 0, _CLONE_THREAD]]
    lines += [[_RETURN, 0, 0, _REFUSE]]
    return _program(architecture, lines), _program(architecture, _refusals(_OF_ATTRIBUTES.values(), column))


def _refusals(calls: Iterable[tuple[int | None, int | None]], column: int) -> Program:
    lines: Program = []
    for numbers in calls:
        if numbers[column] is not None:
            lines += [[_EQUAL, 0, 1, numbers[column]], [_RETURN, 0, 0, _REFUSE]]
    return lines


def _program(architecture: int, lines: Program) -> Program:
    """Wrap `lines`, which judge the call's number; calls that they do not refuse are allowed."""
    return [
        [_LOAD, 0, 0, _ARCHITECTURE],
        [_EQUAL, 1, 0, architecture],
        [_RETURN, 0, 0, _REFUSE],
        [_LOAD, 0, 0, _NUMBER],
        [_AT_LEAST, 0, 1, _X32_BIT],
        [_RETURN, 0, 0, _REFUSE],
        *lines,
        [_RETURN, 0, 0, _ALLOW],
    ]
