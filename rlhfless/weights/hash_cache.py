"""Cache the hashes of a version's tensors, so that a node hashes each byte once.

The header of a version stores the hash of each tensor. The process that hashed all bytes on a node, because it wrote
or downloaded them, seals the files there; other readers on that node then take the hashes from the header. The seal
is part of the files' modification time, so any later write breaks it and readers hash the bytes themselves. Stores
to a shared mapping do not change the modification time and so do not break the seal.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path

import xxhash

from rlhfless.weights.digest import Digest
from rlhfless.weights.files import read_header
from rlhfless.weights.parts import TornVersion, mapped

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
