"""The process in which one test of a `code` reward runs: a script that imports only fast modules, and nothing of
rlhfless.

    python -I -S confined.py <config fd> <result fd>
    python -I -S confined.py reap <command> [<argument> ...]

It reads its config (`marshal`, from rlhfless.rewards.confinement), drops privileges, runs the program and its test
(rlhfless.rewards.tested), and writes the config's `token` and the number of checks to the result fd after both: an
early `exit(0)` does not pass. Without code it reports which protections took effect.

`reap` runs a command, here this script, and then kills its remaining descendants in any session.

Order matters: open paths for Landlock, mount namespace, change of user, user namespace, and last the irrevocable
Landlock and seccomp filters. Protections that the kernel refuses are skipped and reported.
"""

from __future__ import annotations

import builtins
import ctypes
import marshal
import os
import resource
import struct
import sys
from contextlib import suppress
from typing import Any

Config = dict[str, Any]

_LIBC = ctypes.CDLL(None, use_errno=True)
_SIGKILL = 9

# linux/prctl.h, linux/sched.h, linux/mount.h, linux/capability.h
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = (
    0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)  # fmt: skip
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 2, 4, 4096, 16384, 1 << 18
_MNT_DETACH, _AT_FDCWD, _AT_RECURSIVE = 2, -100, 0x8000
_CAPABILITIES_3 = 0x20080522
_SYS_MOUNT_SETATTR, _SYS_LANDLOCK = 442, (444, 445, 446)  # the same on every architecture

# To change the user, and for the parent to end it and remove its folder afterwards: CHOWN, DAC_OVERRIDE, KILL, SETGID,
# SETUID. Containers have them by default.
_NEEDED_TO_DROP = 1 << 0 | 1 << 1 | 1 << 5 | 1 << 6 | 1 << 7

# linux/landlock.h: rights over files, and those that its versions 2 and 3 added
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _MAKE_CHAR, _MAKE_BLOCK = 1, 2, 4, 8, 1 << 6, 1 << 11
_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1}
_SCOPES = 3  # version 6: no abstract sockets and no signals to processes outside


def confine(config: Config) -> dict[str, str]:
    """Drop privileges as far as the kernel allows. Returns the protections in effect, as the fields of Protection."""
    root, folder = os.getuid() == 0, config["folder"]
    paths = {path: os.open(path, os.O_PATH) for path in sys.path if os.path.isdir(path)}
    rules = _landlock_rules(config["readable"]) if config["landlock"] else None
    # Without a filter also the network and System V's memory. With one they cannot be used anyway, and a network
    # namespace takes milliseconds.
    spaces = _CLONE_NEWNS | (0 if config["filter"] else _CLONE_NEWIPC | _CLONE_NEWNET)
    apart = bool(config["namespaces"]) and _LIBC.unshare(spaces) == 0
    rooted = apart and _own_root(config, folder)
    dropped = root and config["first_uid"] is not None and _own_user(config, paths)
    foreign = not apart and bool(config["namespaces"]) and _own_user_namespace(spaces)
    rooted = rooted or (foreign and _own_root(config, folder))
    for descriptor in paths.values():
        if f"/proc/self/fd/{descriptor}" not in sys.path:
            os.close(descriptor)
    _set_limits(config)
    _LIBC.capset((ctypes.c_uint32 * 2)(_CAPABILITIES_3, 0), (ctypes.c_uint32 * 6)())
    _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    landlocked = rules is not None and _landlock(rules, folder)
    filtered = bool(config["filter"]) and _filter_system_calls(config["filter"])
    if not dropped and not rooted and filtered:
        _filter_system_calls(config["filter_of_attributes"])
    if not filtered and (dropped or not root):  # root is not counted
        _set_limit(resource.RLIMIT_NPROC, 0)
    die_with(config["parent"])  # a change of user has cleared it
    held = {
        "network": filtered or (bool(spaces & _CLONE_NEWNET) and (apart or foreign)),
        "processes": filtered or dropped or not root,
        "files": rooted or (landlocked and (dropped or filtered)),  # Landlock lets owners change a file's attributes
        "environment": rooted or landlocked or dropped or foreign,
        "disk": rooted,
    }
    user = "own" if dropped else "root" if root else "same"
    return {"user": user, **{name: "yes" if is_held else "" for name, is_held in held.items()}}


def die_with(parent: int | None) -> None:
    """Have the kernel kill this process when its parent dies. None: the parent's id is unknown (`reap`)."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(1)  # it died before the line above


def _set_limits(config: Config) -> None:
    for kind, most in (
        (resource.RLIMIT_CPU, config["cpu_s"]),
        (resource.RLIMIT_AS, config["memory_bytes"]),
        (resource.RLIMIT_FSIZE, config["file_bytes"]),
        (resource.RLIMIT_NOFILE, config["open_files"]),
        (resource.RLIMIT_CORE, 0),
    ):
        _set_limit(kind, most)
    # Deep recursion through C, as of a function with a cache, needs more than the usual 8 MiB.
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    most = config["memory_bytes"] // 4
    resource.setrlimit(resource.RLIMIT_STACK, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _set_limit(kind: int, most: int) -> None:
    hard = resource.getrlimit(kind)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, most))


def _own_root(config: Config, folder: str) -> bool:
    """Pivot to a root with only the files that Python needs, read-only, and an in-memory `folder`. There is no
    /proc."""
    try:
        _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
        _mount("tmpfs", folder, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    except OSError:
        return False
    try:
        for path, link in config["readable"].items():
            (_show_link if link else _show)(folder + path, link or path)
        inner = folder + folder
        os.makedirs(inner, exist_ok=True)
        attributes = struct.pack("=QQQQ", _MS_RDONLY | _MS_NOSUID, 0, 0, 0)
        _check(_LIBC.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, os.fsencode(folder), _AT_RECURSIVE, attributes, 32))
        size = f"size={config['folder_bytes']},nr_inodes={config['folder_files'] + 1},mode=700"
        _mount("tmpfs", inner, "tmpfs", _MS_NOSUID | _MS_NODEV, size)
        os.chdir(folder)
        _check(_LIBC.pivot_root(b".", b"."))
    except OSError:
        _LIBC.umount2(os.fsencode(folder), _MNT_DETACH)
        os.chdir(folder)
        return False
    _check(_LIBC.umount2(b".", _MNT_DETACH))  # the old root, which lies over the new one
    os.chdir(folder)
    return True


def _show(target: str, path: str) -> None:
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(path, target, None, _MS_BIND | _MS_REC)


def _show_link(target: str, goal: str) -> None:
    if not os.path.lexists(target):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.symlink(goal, target)


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
    _check(_LIBC.mount(*texts[:3], ctypes.c_ulong(flags), texts[3]))


def _check(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), "refused by the kernel")


def _own_user(config: Config, paths: dict[str, int]) -> bool:
    """Switch to a user that owns only the folder, if Python still works. `paths`: `sys.path`, opened."""
    header, data = (ctypes.c_uint32 * 2)(_CAPABILITIES_3, 0), (ctypes.c_uint32 * 6)()
    _LIBC.capget(header, data)
    if data[0] & _NEEDED_TO_DROP != _NEEDED_TO_DROP:
        return False
    folder, groups = config["folder"], os.getgroups()
    for uid in (config["first_uid"] + os.getpid(), config["other_uid"]):
        try:
            os.setgroups([])
            os.chown(folder, uid, uid)
            os.setresgid(uid, uid, 0)
            os.setresuid(uid, uid, 0)  # the saved 0 is the way back
        except OSError:  # this user namespace lacks the number
            reached = False
        else:
            reached = os.access(folder, os.W_OK | os.X_OK) and _keep_reach(paths)
        if reached:
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            return True
        os.setresuid(0, 0, 0)
        os.setresgid(0, 0, 0)
        os.chown(folder, 0, 0)
        os.setgroups(groups)
    return False


def _keep_reach(paths: dict[str, int]) -> bool:
    """Import through open descriptors where a path is closed, such as Python below /root. Returns whether all `paths`
    work."""
    moved: dict[str, str] = {}
    for path, descriptor in paths.items():
        if not os.access(path, os.R_OK | os.X_OK):
            moved[path] = f"/proc/self/fd/{descriptor}"
            if not os.access(moved[path], os.R_OK | os.X_OK):
                return False
    sys.path[:] = [moved.get(path, path) for path in sys.path]
    for module in list(sys.modules.values()) if moved else []:
        if parts := getattr(module, "__path__", None):
            module.__path__ = [_moved(part, moved) for part in parts]
    return True


def _moved(path: str, moved: dict[str, str]) -> str:
    for old, new in moved.items():
        if path.startswith(f"{old}/"):
            return new + path[len(old) :]
    return path


def _own_user_namespace(spaces: int) -> bool:
    """Enter a user namespace, in which this process may create the others."""
    uid, gid = os.getuid(), os.getgid()
    if _LIBC.unshare(_CLONE_NEWUSER | spaces) != 0:
        return False
    _LIBC.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)  # after a change of user /proc/self is root's
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        try:
            with open(f"/proc/self/{name}", "w") as stream:
                stream.write(text)
        except OSError:
            break  # nothing can be mounted then; what remains is the network, and that others are out of reach
    return True


def _landlock_version() -> int:
    return int(_LIBC.syscall(_SYS_LANDLOCK[0], None, 0, 1))


def _landlock_rules(readable: dict[str, str]) -> int | None:
    """Create a ruleset that allows reading `readable`; None without Landlock."""
    version = _landlock_version()
    if version < 1:
        return None
    handled = _RIGHTS[min(version, 3)]
    attributes = struct.pack("=QQQ", handled, 0, _SCOPES) if version >= 6 else struct.pack("=Q", handled)
    rules = _LIBC.syscall(_SYS_LANDLOCK[0], attributes, len(attributes), 0)
    if rules < 0:
        return None
    for path in (path for path, link in readable.items() if not link):
        extra = _READ_DIR if os.path.isdir(path) else _WRITE_FILE if path.startswith("/dev/") else 0
        _allow(rules, path, _READ_FILE | extra)
    return int(rules)


def _landlock(rules: int, folder: str) -> bool:
    """Restrict access to `folder` and the ruleset's paths, without execution."""
    rights = _RIGHTS[min(_landlock_version(), 3)]
    _allow(rules, folder, rights & ~(_EXECUTE | _MAKE_CHAR | _MAKE_BLOCK))
    took = bool(_LIBC.syscall(_SYS_LANDLOCK[2], rules, 0) == 0)
    os.close(rules)
    return took


def _allow(rules: int, path: str, rights: int) -> None:
    """Allow a path. A path that is gone, or that the kernel refuses, stays closed."""
    try:
        beneath = os.open(path, os.O_PATH)
    except OSError:
        return
    _LIBC.syscall(_SYS_LANDLOCK[1], rules, 1, struct.pack("=Qi", rights, beneath), 0)
    os.close(beneath)


def _filter_system_calls(program: list[list[int | None]]) -> bool:
    """Install a seccomp filter; None in an instruction stands for this process's id. Returns whether it took effect."""
    own = os.getpid()
    code = b"".join(struct.pack("HBBI", *(own if part is None else part for part in line)) for line in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(buffer))
    return bool(_LIBC.prctl(_PR_SET_SECCOMP, 2, header, 0, 0) == 0)


def main() -> None:
    """Run as configured."""
    config_fd, result_fd = int(sys.argv[1]), int(sys.argv[2])
    with os.fdopen(config_fd, "rb") as stream:
        config = marshal.load(stream)
    die_with(config["parent"])
    sys.argv[:] = ["solution.py"]
    sys.path.append(config["packages"])
    held = confine(config)
    if config["runner"] is None:
        os.write(result_fd, marshal.dumps(held))
        return
    # Built-in functions of its own: those that the program replaces do not decide about it.
    runner: Config = {"__name__": "tested", "__builtins__": dict(vars(builtins))}
    exec(config["runner"], runner)
    write, flush = os.write, sys.stdout.flush
    checks = runner["run"](config["test"])
    flush()
    write(result_fd, f"{config['token']} {checks}".encode())


def reap(command: list[str]) -> int:
    """Run a command and kill what it leaves behind; return its exit code.

    Used if the kernel takes no system-call filter, so that the test can start processes. With privileges the command is
    the first process of a process namespace, which the kernel ends with it; else this process adopts orphans and kills
    them. SIGTERM, or the parent's death, ends the command.
    """
    import signal  # a millisecond that tests need not spend

    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _LIBC.unshare(_CLONE_NEWPID)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    child = os.fork()
    if not child:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        os.execv(command[0], command)

    def kill(pid: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, _SIGKILL)

    signal.signal(signal.SIGTERM, lambda *_: kill(child))
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    os.closerange(0, 256)  # the reader of its output waits for the last process that holds the pipe
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    while True:
        for pid in _children():
            kill(pid)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return code if code >= 0 else 128 - code


def _children() -> list[int]:
    children = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat") as stream:  # it may be gone
            if int(stream.read().rpartition(")")[2].split()[1]) == os.getpid():
                children.append(int(name))
    return children


if __name__ == "__main__":
    if sys.argv[1] == "reap":
        sys.exit(reap(sys.argv[2:]))
    main()
