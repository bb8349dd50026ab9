"""The folder of a private Ray: its sockets, its logs, and the code that it unpacks for its workers.

Ray makes its folders writable for all users (0777, not sticky), by default below /tmp. Another user of the machine
could replace the code there, and the next worker would run it as this user. The folders are therefore placed in a
folder that only this user can enter, in the data folder of a service or in the folder of a run.

    ray/session/            Ray's temporary folder
    ray/short -> /tmp/...   only if the path is too long for sockets: a new folder of this user, with a link `r` to
                            ray/session; Ray gets the path of that link

This module does not import Ray, so that a service can remove the files of its private Ray cheaply.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rlhfless.util.clock import monotonic_s
from rlhfless.util.folders import NotPrivate, private, require_safe_place

FOLDER = "ray"

SOCKET_BYTES = 103 if sys.platform == "darwin" else 107
"""Maximum length of a socket's path in bytes (sun_path of sys/un.h)."""

LONGEST_SOCKET = "session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
"""The longest socket path below Ray's temporary folder; the last number is a process id."""

GONE_S = 5.0
"""Timeout for killed processes to stop writing into the folder."""


def make(owner: Path) -> Path:
    """Create a folder for a private Ray in `owner`, replacing an earlier one, and return the path for Ray's temporary
    folder. Raises NotPrivate."""
    require_safe_place(owner / FOLDER)
    remove(owner)
    home = private(owner / FOLDER)
    session = private(home / "session").absolute()
    if _fits(session):
        return session
    short = next(_short_folders(), None)
    if short is None:
        raise NotPrivate(
            f"the path {session} is too long for Ray's sockets, and there is no temporary folder with a short path "
            "that can be written; give the data folder or the run's folder a path of at most "
            f"{SOCKET_BYTES - len(LONGEST_SOCKET) - 1 - len(f'/{FOLDER}/session')} bytes"
        )
    (home / "short").symlink_to(short)
    (short / "r").symlink_to(session)
    return short / "r"


def _short_folders() -> Iterator[Path]:
    for place in dict.fromkeys((tempfile.gettempdir(), "/tmp")):
        if _fits(Path(place) / "rlhfless-12345678" / "r"):
            with suppress(OSError, NotPrivate):
                require_safe_place(Path(place) / "any")
                yield Path(tempfile.mkdtemp(prefix="rlhfless-", dir=place))  # new, of this user, 0700


def _fits(folder: Path) -> bool:
    return len(os.fsencode(folder / LONGEST_SOCKET)) <= SOCKET_BYTES


def remove(owner: Path) -> None:
    """Remove the private Ray's folder in `owner`, if any. Its processes must have ended, or be about to end."""
    home, end_s = owner / FOLDER, monotonic_s() + GONE_S
    with suppress(OSError):
        if home.lstat().st_uid != os.getuid():
            return
        shutil.rmtree(os.readlink(home / "short"), ignore_errors=True)
    while home.exists() and monotonic_s() < end_s:
        shutil.rmtree(home, ignore_errors=True)
        time.sleep(0.05)
