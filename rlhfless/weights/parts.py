"""Store the bytes of a version in several files, so that several threads can write concurrently.

The kernel allows one writing thread per file, which limits a publication to a fraction of the memory bandwidth. A
version is therefore a folder, and its bytes are striped over the files as in RAID 0, STRIPE_BYTES to each in turn.
The manifest records the layout. A reader maps all stripes side by side and sees the original bytes without a copy.
Only this module knows about parts.

The writer fills a temporary folder, syncs it and renames it, so every visible version is complete. (`fsync` extends
this to power failures. On tmpfs, such as /dev/shm, it does nothing and costs nothing.) A version never changes after
its rename, so readers may map it. The files of a dropped version are overwritten once no reader has them open or
mapped (`spare`): allocating fresh memory from the kernel takes longer than filling it.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO
from uuid import uuid4

from rlhfless.util.folders import private
from rlhfless.weights.digest import MOST_THREADS

PARTS = MOST_THREADS
"""Files per version: one per writing thread, because each file has its own lock in the kernel."""

STRIPE_BYTES = 16 << 20
"""Bytes stored in one file before moving to the next. Short enough that the few tensors written concurrently are in
different files, and long enough that a reader needs few mappings (9,000 for 70 B parameters; Linux allows 65,000). A
smaller version is a single file."""

TEMPORARY_PREFIX = ".writing-"
_SPARE = TEMPORARY_PREFIX + "spare"
_MANIFEST = "manifest.json"
_MAP_NORESERVE = 0x4000  # Linux; Python's mmap exports it only since 3.13
_MAP_FIXED = 0x10

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *([ctypes.c_int] * 3), ctypes.c_int64]


class TornVersion(Exception):
    """The files of a version do not match its manifest."""


@dataclass(frozen=True, slots=True)
class Stripes:
    """The mapping of a version's bytes to files."""

    parts: int = field(default_factory=lambda: PARTS)
    stripe_bytes: int = field(default_factory=lambda: STRIPE_BYTES)

    def over(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield the part, offset in its file, and length of each piece of the bytes from `start` to `end`."""
        while start < end:
            stripe, within = divmod(start, self.stripe_bytes)
            length = min(self.stripe_bytes - within, end - start)
            yield stripe % self.parts, stripe // self.parts * self.stripe_bytes + within, length
            start += length

    def sizes(self, size_bytes: int) -> list[int]:
        """Return the size in bytes of each non-empty file of a version."""
        stripes, rest = divmod(size_bytes, self.stripe_bytes)
        sizes = [len(range(part, stripes, self.parts)) * self.stripe_bytes for part in range(self.parts)]
        sizes[stripes % self.parts] += rest
        return [size for size in sizes if size]


class Draft:
    """A version under construction. Threads may write concurrently."""

    def __init__(self, folder: Path, path: Path | None, opened: Callable[[Path], IO[bytes]] | None = None) -> None:
        self.folder = folder
        self._opened = opened or _open_blank
        self.path = path
        """The final path of the version, or None to discard it."""
        self._stripes = Stripes()
        self._turns = [threading.Lock() for _ in range(self._stripes.parts)]
        self._files: dict[int, IO[bytes]] = {}

    def put(self, data: bytes | memoryview, place: int) -> None:
        """Write all of `data` at offset `place`."""
        view = memoryview(data)
        for part, offset, length in self._stripes.over(place, place + len(view)):
            with self._turns[part]:  # otherwise threads would busy-wait for the kernel's lock
                put(self._file(part).fileno(), view[:length], offset)
            view = view[length:]

    def open_all(self) -> None:
        """Open all files, so that other processes can write to them as well (`joining`)."""
        for part in range(self._stripes.parts):
            self._file(part)

    def finish(self, size_bytes: int) -> None:
        """Truncate to `size_bytes` and write the manifest; the version is then readable from `folder`."""
        sizes = self._stripes.sizes(size_bytes)
        for part, size in enumerate(sizes):
            os.truncate(self._file(part).fileno(), size)
        for file in self.folder.iterdir():
            if file.name not in map(str, range(len(sizes))):
                file.unlink()
        (self.folder / _MANIFEST).write_text(json.dumps({"size_bytes": size_bytes, **asdict(self._stripes)}))

    def sync(self) -> None:
        """Flush all files to disk and close them."""
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
            self._files[part] = self._opened(self.folder / str(part))
        return self._files[part]


def put(file: int, data: bytes | memoryview, place: int) -> None:
    """Write all of `data` at `place` of an open file, retrying partial writes."""
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, place)
        view, place = view[written:], place + written


@contextmanager
def drafting(folder: Path, path: Path | None = None) -> Iterator[Draft]:
    """Provide a draft in `folder` to fill and finish; it is renamed to its `path` if the block succeeds."""
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


@contextmanager
def joining(folder: Path) -> Iterator[Draft]:
    """Provide the draft of another process, whose files are all open there, to write to."""
    draft = Draft(folder, None, lambda path: path.open("rb+"))
    try:
        yield draft
    finally:
        draft.close()


def spare(path: Path) -> None:
    """Drop a version, if it exists, keeping its files for reuse. Readers that have them open keep their contents."""
    dropped, kept = path.with_name(TEMPORARY_PREFIX + uuid4().hex), path.with_name(_SPARE)
    with suppress(FileNotFoundError):
        path.rename(dropped)
        shutil.rmtree(kept, ignore_errors=True)
        dropped.rename(kept)


def _open_blank(path: Path) -> IO[bytes]:
    """Open the file at `path` for writing: reuse it if no other process has it open, else create a new one."""
    try:
        file = path.open("rb+")
    except FileNotFoundError:
        return path.open("xb+")
    try:
        # The kernel grants the lease if nobody else has the file open or mapped. Nobody can open it later: its old name
        # is gone.
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        file.close()
        path.unlink()
        return path.open("xb+")
    return file


class OpenVersion:
    """A version with open files, which therefore cannot change. Use as a context manager."""

    def __init__(self, path: Path) -> None:
        """Open all files; raises FileNotFoundError if the version does not exist, TornVersion if it is damaged."""
        with ExitStack() as opened:
            try:
                said = json.loads((path / _MANIFEST).read_text())
                self.size_bytes: int = said.pop("size_bytes")
                self._stripes = Stripes(**said)
                sizes = self._stripes.sizes(self.size_bytes)
                # Opened by name one by one: once the version is dropped, the remaining parts cannot be found.
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
        """Yield the file, offset, and length of each piece of the bytes from `start` to `end`."""
        for part, offset, length in self._stripes.over(start, end):
            yield self._files[part], offset, length

    def mapped(self) -> mmap.mmap:
        """Map all bytes contiguously and privately; the map stays valid after the version is closed or dropped."""
        access = mmap.PROT_READ | mmap.PROT_WRITE
        reserved = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        memory = mmap.mmap(-1, max(self.size_bytes, 1), flags=reserved, prot=access)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        how = mmap.MAP_PRIVATE | _MAP_NORESERVE | _MAP_FIXED
        for file, offset, length in self.pieces(0, self.size_bytes):
            # Map over part of the reserved range; Python unmaps the whole range when it is no longer referenced.
            if _libc.mmap(address, length, access, how, file.fileno(), offset) != address:
                number = ctypes.get_errno()
                raise OSError(number, f"a part of a version cannot be mapped: {os.strerror(number)}")
            address += length
        return memory


def mapped(path: Path) -> mmap.mmap:
    """Map all bytes of a version. Raises FileNotFoundError and TornVersion."""
    with OpenVersion(path) as version:
        return version.mapped()
