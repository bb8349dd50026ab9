"""The hashes of a version's tensors, so that a node hashes each byte once.

The header of a version keeps the hash of each tensor. The process that has hashed all of its bytes on a node, because
it wrote or fetched them, seals the files there, and readers of that node take the hashes from the header. The seal is
in the files' time of modification, so whatever writes to them afterwards breaks it; then readers hash the bytes
themselves. Stores to a shared mapping leave that time as it is, so they do not break the seal.
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
    """Metadata with the hashes of all tensors, by name; zeros for the ones that are not known yet."""
    return {_HASHES: "".join(digest.hashes.get(name, bytes(_HASH_BYTES)).hex() for name in sorted(names))}


def seal(folder: Path, digest: str) -> None:
    """Seals a version. The caller has hashed all its bytes, and has written the last one."""
    now = time.time_ns()
    for file in folder.iterdir():
        os.utime(file, ns=(now, now // _SECOND * _SECOND + _mark(digest)))


_SECOND = 10**9


@cache
def _boot() -> str:
    """Names this machine, up to its next start; equal in all its containers."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _mark(digest: str) -> int:
    """The nanoseconds of the time of modification of sealed files."""
    return xxhash.xxh3_64_intdigest(f"{_boot()}/{digest}".encode()) % _SECOND


def known_hashes(path: Path, digest: str) -> dict[str, bytes]:
    """By tensor: the hashes of a version that is sealed on this node; empty for any other."""
    try:
        if any(file.stat().st_mtime_ns % _SECOND != _mark(digest) for file in path.iterdir()):
            return {}
        _, layout, metadata = read_header(mapped(path))
        packed = bytes.fromhex(metadata.get(_HASHES, ""))
    except (OSError, TornVersion, ValueError, KeyError, TypeError):  # `read_version` says what is wrong with it
        return {}
    names = sorted(name for name, *_ in layout)
    each = [packed[start : start + _HASH_BYTES] for start in range(0, len(packed), _HASH_BYTES)]
    return dict(zip(names, each, strict=True)) if len(each) == len(names) else {}
