"""Folders that one user alone can enter: made so, corrected, or refused; and files that are written whole, or locked.

A folder with a name that another user can guess, below a folder that all users may write to, may be the other user's:
what is in it is not trusted before its owner is checked.
"""

from __future__ import annotations

import fcntl
import os
import stat
import time
from pathlib import Path
from typing import IO

import psutil

from rlhfless.util.errors import UserError

PRIVATE = 0o700

OTHERS = 0o077
"""The rights of the group and of all others; as an umask, what is made has none of them."""


class NotPrivate(UserError):
    """A folder belongs to another user, or another user could put other content in its place."""


_LOCK_POLL_S = 0.01

_IN_MEMORY = ("tmpfs", "ramfs")


def in_memory(folder: Path) -> bool:
    """Whether the folder, which is there, is in a file system that is in memory."""
    path = folder.resolve()
    mounts = [part for part in psutil.disk_partitions(all=True) if path.is_relative_to(part.mountpoint)]
    return bool(mounts) and max(mounts, key=lambda part: len(part.mountpoint)).fstype in _IN_MEMORY


def replace_text(file: Path, text: str) -> None:
    """Write a file that its readers never see half written, readable for its user alone."""
    new = file.with_name(f"{file.name}.{os.getpid()}.new")
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as stream:
        stream.write(text)
    new.replace(file)


def lock(file: Path) -> IO[str] | None:
    """A file, locked until it is closed; None if another process has locked it."""
    stream = file.open("w")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stream.close()
        return None
    return stream


def wait_for_lock(stream: IO[str], how: int, timeout_s: float) -> bool:
    """Locks an open file, shared or exclusively (`fcntl.LOCK_SH`, `LOCK_EX`), until it is closed; waits while another
    process has locked it. Returns False if it is still locked after `timeout_s`. The kernel frees the lock of a process
    that dies."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(stream, how | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                return False
            time.sleep(_LOCK_POLL_S)


def home() -> Path:
    """Where this user's caches, models and logs of engines are on this machine."""
    return Path(os.environ.get("RLHFLESS_HOME") or Path.home() / ".cache" / "rlhfless").absolute()


def private(folder: Path) -> Path:
    """The folder, made if it is missing, with mode 0700, whatever the umask. Raises NotPrivate if it, or the link that
    leads to it, is another user's."""
    folder.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
    for status, what in ((folder.lstat(), "it"), (folder.stat(), "what it leads to")):
        is_link = stat.S_ISLNK(status.st_mode)
        if status.st_uid not in ({os.getuid(), 0} if is_link else {os.getuid()}):
            raise NotPrivate(
                f"{folder} cannot be used: {what} belongs to another user (uid {status.st_uid}); remove it, or name "
                "another folder"
            )
    if stat.S_IMODE(folder.stat().st_mode) != PRIVATE:
        folder.chmod(PRIVATE)
    return folder


def require_safe_place(folder: Path) -> None:
    """Raises NotPrivate if a user other than the owners of the folders above could move it away, and put another in
    its place: a folder above it is writable for all users, and is not sticky as /tmp is."""
    path = folder.absolute()
    above_it = {each.resolve() for each in (*path.parents, *path.resolve().parents) if each.exists()}
    for above in sorted(above_it):
        mode = above.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise NotPrivate(
                f"{folder} cannot be used: any user can replace what is in {above} (mode "
                f"{stat.S_IMODE(mode):04o}); `chmod o-w {above}`, or name another folder"
            )
