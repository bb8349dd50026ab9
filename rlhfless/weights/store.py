"""The store of versions between the learner, which publishes, and the engines, which pull.

Pulling needs no process group, so engines may come and go, and a late engine simply reads the newest version.

Invariants: every visible version is complete (see `parts`); a version never changes; its name contains its digest,
so publishing it twice is harmless. Deleting is always safe for readers: `delete` removes the name at once, and the
bytes remain while any reader has the file open or mapped; the next version overwrites them only after that. No lock
is needed. A reader fails if a version that was *announced* to it is deleted before the reader opens it.

A node hashes each byte once: the header of a version stores the hash of each tensor. The process that hashed all bytes
on a node, because it wrote or downloaded them, seals the files there; other readers on that node then take the hashes
from the header. The seal is part of the files' modification time, so any later write breaks it and readers hash the
bytes themselves. Stores to a shared mapping do not change the modification time and so do not break the seal.

Not implemented: stores with several publishing learners (fencing by attempt is up to the caller).
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Protocol

import torch
import xxhash

from rlhfless.records import WeightVersion
from rlhfless.spec import Transport
from rlhfless.util.errors import UserError
from rlhfless.util.folders import private
from rlhfless.weights.check import WeightFileError
from rlhfless.weights.coauthors import Begun, Coauthors
from rlhfless.weights.digest import Digest, PieceHash, digest_of, piece_hash
from rlhfless.weights.files import (
    SUFFIX,
    TensorStream,
    file_name,
    read_header,
    read_version,
    version_of,
    way_on_node,
    write_tensors,
)
from rlhfless.weights.parts import TEMPORARY_PREFIX, Draft, TornVersion, drafting, mapped, spare

Tensors = Mapping[str, torch.Tensor] | TensorStream


class StoreFull(UserError):
    """A version does not fit into the store's folder."""


@dataclass(frozen=True, slots=True)
class StoredWeights:
    version: WeightVersion
    location: str
    """The path or URL that a reader of the same store opens."""
    size_bytes: int
    tensors: int


class WeightReader(Protocol):
    """The engine-side interface of a store."""

    def read(self, location: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield `(name, tensor)` for all tensors at `location`. The tensors must not be written to.

        Raises:
            WeightFileError: the version does not exist or is damaged.
        """
        ...

    def hashes(self, location: str) -> Mapping[str, bytes]:
        """Return the version's hashes by tensor, or {} if unknown on this node.

        Hashes are known if the bytes at `location` were hashed on this node and not written to since.
        """
        ...

    @property
    def transport(self) -> Transport:
        """Return how the last-read version reached this process."""
        ...

    @property
    def of_piece(self) -> PieceHash:
        """Return the publisher's hash function."""
        ...

    def release(self) -> None:
        """End the use of the tensors that were read."""
        ...


class WeightStore(Protocol):
    """The learner-side interface of a store."""

    def put(
        self, run_id: str, attempt: int, step: int, tensors: Tensors, coauthors: Coauthors | None = None
    ) -> StoredWeights:
        """Publish `tensors` and compute their digest; streams are written as they arrive. Raises StoreFull.

        `coauthors` write the tensors of the layout that the stream lacks (rlhfless.weights.coauthors).

        Publishing the same weights again does nothing unless the stored file is damaged, in which case it is
        rewritten.
        """
        ...

    def versions(self) -> tuple[WeightVersion, ...]:
        """Return all versions in the store, oldest first by (run, attempt, step)."""
        ...

    def delete(self, version: WeightVersion) -> None:
        """Remove a version, if it exists."""
        ...


class FolderStore:
    """A folder that both learner and engines can read: shared memory on one node, or a shared file system."""

    def __init__(self, folder: str | Path, of_piece: PieceHash = piece_hash) -> None:
        self.folder = Path(folder)
        self.of_piece = of_piece
        private(self.folder)

    def path(self, version: WeightVersion) -> Path:
        """Return the path of a version, whether or not it exists."""
        return self.folder / file_name(version)

    def put(
        self, run_id: str, attempt: int, step: int, tensors: Tensors, coauthors: Coauthors | None = None
    ) -> StoredWeights:
        """Publish `tensors`; see `WeightStore.put`. Raises ValueError for an empty set of tensors."""
        stream = tensors if isinstance(tensors, TensorStream) else TensorStream.of(tensors)
        if not stream.layout:
            raise ValueError(f"nothing to publish for run {run_id!r}, step {step}: the set of tensors is empty")
        digest = Digest(self.of_piece)

        def version() -> WeightVersion:
            return WeightVersion(run_id, attempt, step, digest.hexdigest())

        def notes() -> Mapping[str, str]:
            return {"version": version().label, **hashes_note(stream.layout, digest)}

        file_name(version())  # rejects a bad name before anything is written
        with _reporting_full(self.folder), drafting(self.folder) as draft:
            others = None if coauthors is None else partial(_begun, coauthors, draft)
            size_bytes = write_tensors(draft.put, stream, notes, digest, others)
            draft.finish(size_bytes)
            seal(draft.folder, version().digest)
            path = self.path(version())
            draft.path = None if self._is_whole(path, version().digest) else path
        return StoredWeights(version(), str(path), size_bytes, digest.tensors)

    def _is_whole(self, path: Path, digest: str) -> bool:
        """Return whether the version exists and is intact."""
        if not path.exists():
            return False
        try:
            return digest_of(read_version(path, digest), self.of_piece) == digest
        except WeightFileError:
            return False

    def read(self, location: str) -> Iterator[tuple[str, torch.Tensor]]:
        return read_version(Path(location), version_of(location).digest)

    def hashes(self, location: str) -> Mapping[str, bytes]:
        return known_hashes(Path(location), version_of(location).digest)

    @property
    def transport(self) -> Transport:
        return way_on_node(self.folder)

    def release(self) -> None:
        """Do nothing: dropped files remain as long as they are mapped."""

    def versions(self) -> tuple[WeightVersion, ...]:
        versions = [
            version_of(path) for path in self.folder.glob(f"*{SUFFIX}") if not path.name.startswith(TEMPORARY_PREFIX)
        ]
        return tuple(sorted(versions, key=lambda version: (version.run_id, version.attempt, version.step)))

    def delete(self, version: WeightVersion) -> None:
        spare(self.path(version))


def _begun(coauthors: Coauthors, draft: Draft, begins: int) -> Callable[[], Mapping[str, bytes]]:
    draft.open_all()
    coauthors.begin(Begun(str(draft.folder), begins))
    return coauthors.hashes


@contextmanager
def _reporting_full(folder: Path) -> Iterator[None]:
    """Raise StoreFull if the block fails because the folder's file system is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free = shutil.disk_usage(folder).free >> 20
        raise StoreFull(
            f"weights.folder: a version of the weights does not fit into {str(folder)!r}, which has {free:,} MiB free "
            "without it. Give its file system more room (containers: --shm-size; Kubernetes: sharedMemory), or name "
            "another folder"
        ) from error


_HASHES = "hashes"
_HASH_BYTES = 16


def hashes_note(names: Collection[str], digest: Digest) -> Mapping[str, str]:
    """Return metadata with the hashes of all tensors, by name; zeros for unknown hashes."""
    return {_HASHES: "".join(digest.hashes.get(name, bytes(_HASH_BYTES)).hex() for name in sorted(names))}


def seal(folder: Path, digest: str) -> None:
    """Seal a version. The caller must have hashed all its bytes and finished writing."""
    now = time.time_ns()
    for file in folder.iterdir():
        os.utime(file, ns=(now, now // _SECOND * _SECOND + _mark(digest)))


_SECOND = 10**9


@cache
def _boot() -> str:
    """Return the ID of this machine's current boot; equal in all its containers."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _mark(digest: str) -> int:
    """Return the nanosecond part of a sealed file's modification time."""
    return xxhash.xxh3_64_intdigest(f"{_boot()}/{digest}".encode()) % _SECOND


def known_hashes(path: Path, digest: str) -> dict[str, bytes]:
    """Return the hashes by tensor of a version sealed on this node; empty for any other version."""
    try:
        if any(file.stat().st_mtime_ns % _SECOND != _mark(digest) for file in path.iterdir()):
            return {}
        _, layout, metadata = read_header(mapped(path))
        packed = bytes.fromhex(metadata.get(_HASHES, ""))
    except (OSError, TornVersion, ValueError, KeyError, TypeError):  # `read_version` reports what is wrong with it
        return {}
    names = sorted(name for name, *_ in layout)
    each = [packed[start : start + _HASH_BYTES] for start in range(0, len(packed), _HASH_BYTES)]
    return dict(zip(names, each, strict=True)) if len(each) == len(names) else {}
