"""The hashes of a file's tensors, so that a node hashes each byte once.

The header of a file keeps the hash of each tensor. The process that has hashed all of a file's bytes on a node, because
it wrote or fetched them, seals the file there, and readers of that node take the hashes from the header. The seal is in
the file's time of modification, so whatever writes to the file afterwards breaks it; then readers hash the bytes
themselves. Stores to a shared mapping leave that time as it is, so they do not break the seal.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path

import xxhash
from safetensors import SafetensorError, safe_open

from rlhfless.weights.digest import Digest

_HASHES = "hashes"
_HASH_BYTES = 16


def hashes_note(names: Collection[str], digest: Digest) -> Mapping[str, str]:
    """Metadata with the hashes of all tensors, by name; zeros for the ones that are not known yet."""
    return {_HASHES: "".join(digest.hashes.get(name, bytes(_HASH_BYTES)).hex() for name in sorted(names))}


def seal(file: int, digest: str) -> None:
    """Seals an open file. The caller has hashed all its bytes, and has written the last one."""
    now = time.time_ns()
    os.utime(file, ns=(now, now // _SECOND * _SECOND + _mark(digest)))


_SECOND = 10**9


@cache
def _boot() -> str:
    """Names this machine, up to its next start; equal in all its containers."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _mark(digest: str) -> int:
    """The nanoseconds of the time of modification of a sealed file."""
    return xxhash.xxh3_64_intdigest(f"{_boot()}/{digest}".encode()) % _SECOND


def known_hashes(path: Path, digest: str) -> dict[str, bytes]:
    """By tensor: the hashes of a file that is sealed on this node; empty for any other file."""
    try:
        if path.stat().st_mtime_ns % _SECOND != _mark(digest):
            return {}
        with safe_open(path, framework="pt", device="cpu") as file:
            names, packed = sorted(file.keys()), bytes.fromhex((file.metadata() or {}).get(_HASHES, ""))
    except (OSError, RuntimeError, SafetensorError, ValueError):  # `read_file` says what is wrong with it
        return {}
    each = [packed[start : start + _HASH_BYTES] for start in range(0, len(packed), _HASH_BYTES)]
    return dict(zip(names, each, strict=True)) if len(each) == len(names) else {}
