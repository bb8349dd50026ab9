"""The size of a test's folder on the disk, measured from outside while the test runs."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_BLOCK_BYTES = 512  # the unit of st_blocks


@dataclass(frozen=True, slots=True)
class Folder:
    """The folder of the process `pid`. It is empty if the process has a file system of its own, with its own limits. A
    removed file counts as long as the process has it open, if the kernel shows that (it does not to a root without
    CAP_SYS_PTRACE whose tests run as another user)."""

    path: Path
    pid: int
    most_bytes: int
    most_files: int
    known: frozenset[int] = frozenset()
    """Inodes of nameless files that the process was given."""

    def excess(self) -> str:
        """The limit that the folder exceeds; empty if it exceeds none."""
        taken, files = 0, 0
        folders = [str(self.path)]
        while folders:
            with suppress(OSError), os.scandir(folders.pop()) as entries:  # it may be removed meanwhile
                for entry in entries:
                    files += 1
                    if files > self.most_files:
                        return f"the test's folder holds more than folder_files ({self.most_files}) files and folders"
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    with suppress(OSError):
                        taken += entry.stat(follow_symlinks=False).st_blocks * _BLOCK_BYTES
        if taken + self._removed_bytes() > self.most_bytes:
            return f"the test's folder holds more than folder_mib ({self.most_bytes // 2**20} MiB)"
        return ""

    def _removed_bytes(self) -> int:
        """Size of the files that are open but have no name any more."""
        taken, seen = 0, set(self.known)
        with suppress(OSError):
            for name in os.listdir(f"/proc/{self.pid}/fd"):
                with suppress(OSError):
                    file = os.stat(f"/proc/{self.pid}/fd/{name}")
                    if stat.S_ISREG(file.st_mode) and not file.st_nlink and file.st_ino not in seen:
                        seen.add(file.st_ino)
                        taken += file.st_blocks * _BLOCK_BYTES
        return taken
