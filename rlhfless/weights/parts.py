"""The bytes of a version in several files, so that several threads write them at once.

The kernel lets one thread at a time write to a file, which limits a publication to a fraction of the memory's
bandwidth. So a version is a folder, over whose files its bytes are striped as RAID 0 does it: STRIPE_BYTES to each in
turn. Its manifest says how. A reader maps all stripes side by side and sees the bytes as they were written, without a
copy. Nothing outside of this module knows that there are parts.

The writer fills a temporary folder, syncs it and renames it: a version that can be seen is complete. (`fsync` is what
makes that true after a power cut as well. On tmpfs, such as /dev/shm, it does nothing and costs nothing.) A version is
never changed after its rename, so readers may map it. The files of a version that was dropped are written over if no
reader has them open or mapped any more (`spare`): to get fresh memory from the kernel takes longer than to fill it.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO
from uuid import uuid4

from rlhfless.util.folders import private
from rlhfless.weights.digest import MOST_THREADS

PARTS = MOST_THREADS
"""Files of a version: one for each thread that writes, because each has its own lock in the kernel."""

STRIPE_BYTES = 16 << 20
"""Bytes of a version in one file before those in the next. Short enough that the few tensors which are written at the
same time lie in different files, and long enough that a reader needs few mappings (9,000 for 70 B parameters; Linux
allows 65,000). A version of fewer bytes is one file."""

TEMPORARY_PREFIX = ".writing-"
_SPARE = TEMPORARY_PREFIX + "spare"
_MANIFEST = "manifest.json"
_MAP_NORESERVE = 0x4000  # of Linux; Python's mmap has no name for it before 3.13
_MAP_FIXED = 0x10

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *([ctypes.c_int] * 3), ctypes.c_int64]


class TornVersion(Exception):
    """A version's files are not those that its manifest names."""


@dataclass(frozen=True, slots=True)
class Stripes:
    """Which byte is in which file."""

    parts: int = field(default_factory=lambda: PARTS)
    stripe_bytes: int = field(default_factory=lambda: STRIPE_BYTES)

    def over(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Part, first byte in its file, and length of each piece of the bytes from `start` to `end`."""
        while start < end:
            stripe, within = divmod(start, self.stripe_bytes)
            length = min(self.stripe_bytes - within, end - start)
            yield stripe % self.parts, stripe // self.parts * self.stripe_bytes + within, length
            start += length

    def sizes(self, size_bytes: int) -> list[int]:
        """Bytes of each file of a version; without those that have none."""
        stripes, rest = divmod(size_bytes, self.stripe_bytes)
        sizes = [len(range(part, stripes, self.parts)) * self.stripe_bytes for part in range(self.parts)]
        sizes[stripes % self.parts] += rest
        return [size for size in sizes if size]


class Draft:
    """A version that is being written. Threads may write at the same time."""

    def __init__(self, folder: Path, path: Path | None) -> None:
        self.folder = folder
        self.path = path
        """The name that it will take; None to drop it."""
        self._stripes = Stripes()
        self._turns = [threading.Lock() for _ in range(self._stripes.parts)]
        self._files: dict[int, IO[bytes]] = {}

    def put(self, data: bytes | memoryview, place: int) -> None:
        """Write all of `data` at `place`."""
        view = memoryview(data)
        for part, offset, length in self._stripes.over(place, place + len(view)):
            with self._turns[part]:  # the others would wait for the kernel's lock at work
                put(self._file(part).fileno(), view[:length], offset)
            view = view[length:]

    def finish(self, size_bytes: int) -> None:
        """Make it a version of `size_bytes`, which have been written. It can be read by its `folder` from now on."""
        sizes = self._stripes.sizes(size_bytes)
        for part, size in enumerate(sizes):
            os.truncate(self._file(part).fileno(), size)
        for file in self.folder.iterdir():
            if file.name not in map(str, range(len(sizes))):
                file.unlink()
        (self.folder / _MANIFEST).write_text(json.dumps({"size_bytes": size_bytes, **asdict(self._stripes)}))

    def sync(self) -> None:
        """Close its files, and wait until they are on the disk."""
        for file in self._files.values():
            os.fsync(file.fileno())
        self.close()
        for path in (self.folder / _MANIFEST, self.folder):
            opened = os.open(path, os.O_RDONLY)
            os.fsync(opened)
            os.close(opened)

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _file(self, part: int) -> IO[bytes]:
        if part not in self._files:
            self._files[part] = _open_blank(self.folder / str(part))
        return self._files[part]


def put(file: int, data: bytes | memoryview, place: int) -> None:
    """Write all of `data` at `place` of an open file; the kernel may take less at once."""
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, place)
        view, place = view[written:], place + written


@contextmanager
def drafting(folder: Path, path: Path | None = None) -> Iterator[Draft]:
    """Gives a draft in `folder` to fill and finish; it takes its `path` there if the block succeeds."""
    private(folder)  # weights may be secret, and a process that can write them controls the actors' weights
    temporary = folder / (TEMPORARY_PREFIX + uuid4().hex)
    try:
        folder.joinpath(_SPARE).rename(temporary)
    except FileNotFoundError:
        private(temporary)
    draft = Draft(temporary, path)
    try:
        yield draft
        draft.sync()
        if draft.path is not None:
            spare(draft.path)  # a damaged version of the same name
            temporary.rename(draft.path)
    finally:
        draft.close()
        shutil.rmtree(temporary, ignore_errors=True)


def spare(path: Path) -> None:
    """Drop a version, if it is there; its files wait for the next one. Readers that have them open keep what they
    hold."""
    dropped, kept = path.with_name(TEMPORARY_PREFIX + uuid4().hex), path.with_name(_SPARE)
    with suppress(FileNotFoundError):
        path.rename(dropped)
        shutil.rmtree(kept, ignore_errors=True)
        dropped.rename(kept)


def _open_blank(path: Path) -> IO[bytes]:
    """A file at `path` to write to: the one that is there, if it is this process's alone, or else a new one."""
    try:
        file = path.open("rb+")
    except FileNotFoundError:
        return path.open("xb+")
    try:
        # The kernel grants it if no one else has the file open or mapped. Nobody can from now on: its old name is gone.
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        file.close()
        path.unlink()
        return path.open("xb+")
    return file


class OpenVersion:
    """A version whose files are open, so that they stay what they are; a context manager."""

    def __init__(self, path: Path) -> None:
        """Raises FileNotFoundError if it is not there, and TornVersion if it is damaged."""
        with ExitStack() as opened:
            try:
                said = json.loads((path / _MANIFEST).read_text())
                self.size_bytes: int = said.pop("size_bytes")
                self._stripes = Stripes(**said)
                sizes = self._stripes.sizes(self.size_bytes)
                # By the version's name each: once it is dropped, the parts that are not open yet cannot be found.
                self._files = [opened.enter_context((path / str(part)).open("rb")) for part in range(len(sizes))]
            except (NotADirectoryError, ValueError, TypeError, KeyError, AttributeError) as error:
                raise TornVersion(f"its manifest is damaged: {error}") from error
            for part, (file, size) in enumerate(zip(self._files, sizes, strict=True)):
                if (found := os.fstat(file.fileno()).st_size) != size:
                    raise TornVersion(f"part {part} has {found:,} bytes and should have {size:,}")
            self._opened = opened.pop_all()

    def __enter__(self) -> OpenVersion:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def pieces(self, start: int, end: int) -> Iterator[tuple[IO[bytes], int, int]]:
        """File, first byte there, and length of each piece of the bytes from `start` to `end`."""
        for part, offset, length in self._stripes.over(start, end):
            yield self._files[part], offset, length

    def mapped(self) -> mmap.mmap:
        """All bytes side by side; it stays valid when the version is closed or dropped. What is written there, no one
        else sees."""
        access = mmap.PROT_READ | mmap.PROT_WRITE
        reserved = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        memory = mmap.mmap(-1, max(self.size_bytes, 1), flags=reserved, prot=access)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        how = mmap.MAP_PRIVATE | _MAP_NORESERVE | _MAP_FIXED
        for file, offset, length in self.pieces(0, self.size_bytes):
            # Over a piece of the reserved range, which Python unmaps as a whole when nothing refers to it any more.
            if _libc.mmap(address, length, access, how, file.fileno(), offset) != address:
                number = ctypes.get_errno()
                raise OSError(number, f"a part of a version cannot be mapped: {os.strerror(number)}")
            address += length
        return memory


def mapped(path: Path) -> mmap.mmap:
    """All bytes of a version. Raises FileNotFoundError and TornVersion."""
    with OpenVersion(path) as version:
        return version.mapped()
