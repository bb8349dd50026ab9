"""Private folders (created, corrected or refused), and files that are written atomically or locked.

If another user can guess a folder's name, and all users may write to its parent, the folder may belong to that user.
Its contents are not trusted before its owner is checked.
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
"""The permissions of group and others. As an umask, it removes them from new files."""


class NotPrivate(UserError):
    """A folder belongs to another user, or another user could replace its contents."""


_LOCK_POLL_S = 0.01

_IN_MEMORY = ("tmpfs", "ramfs")


def in_memory(folder: Path) -> bool:
    """Return whether the existing folder is in an in-memory file system."""
    path = folder.resolve()
    mounts = [part for part in psutil.disk_partitions(all=True) if path.is_relative_to(part.mountpoint)]
    return bool(mounts) and max(mounts, key=lambda part: len(part.mountpoint)).fstype in _IN_MEMORY


def replace_text(file: Path, text: str) -> None:
    """Replace a file atomically, with permissions for its user only."""
    new = file.with_name(f"{file.name}.{os.getpid()}.new")
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as stream:
        stream.write(text)
    new.replace(file)


def lock(file: Path) -> IO[str] | None:
    """Return the file, locked until it is closed; None if another process has locked it."""
    stream = file.open("w")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stream.close()
        return None
    return stream


def wait_for_lock(stream: IO[str], how: int, timeout_s: float) -> bool:
    """Lock an open file, shared or exclusively (`fcntl.LOCK_SH`, `LOCK_EX`), until it is closed.

    Return False if another process still holds the lock after `timeout_s`. The kernel releases the lock of a process
    that dies.
    """
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
    """Return the folder of this user's caches, models and engine logs on this machine."""
    return Path(os.environ.get("RLHFLESS_HOME") or Path.home() / ".cache" / "rlhfless").absolute()


def private(folder: Path) -> Path:
    """Return the folder with mode 0700 whatever the umask, created if missing.

    Raises NotPrivate if another user owns the folder or the link to it.
    """
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
    """Require that no other user can replace the folder.

    Raises NotPrivate if a folder above it is writable for all users and not sticky, unlike /tmp.
    """
    path = folder.absolute()
    above_it = {each.resolve() for each in (*path.parents, *path.resolve().parents) if each.exists()}
    for above in sorted(above_it):
        mode = above.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise NotPrivate(
                f"{folder} cannot be used: any user can replace files in {above} (mode "
                f"{stat.S_IMODE(mode):04o}); `chmod o-w {above}`, or name another folder"
            )
