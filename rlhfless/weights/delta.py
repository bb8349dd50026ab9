"""What changed between two versions: the elements whose stored bits differ, so that applying it is exact.

A step of training in bfloat16 changes few elements, because most updates are smaller than what two bytes can tell
apart. Files of one model have their tensors at the same places behind their headers, so two versions are compared as
words of two bytes, in chunks of CHUNK_WORDS:

    new header | for each chunk: its number, how many words differ, where, and the new words

Where is a list of places, two bytes each, or from a sixteenth of the words on a bit for each word, which is shorter.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from rlhfless.weights.digest import threads
from rlhfless.weights.errors import WeightFileError
from rlhfless.weights.files import Put
from rlhfless.weights.parts import mapped

Words = npt.NDArray[np.uint16]
Places = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]
Data = bytes | mmap.mmap

CHUNK_WORDS = 1 << 16
"""So that a place within a chunk takes two bytes."""

_DENSE_FROM = CHUNK_WORDS // 16
_HEAD = struct.Struct("<QQQ")  # bytes of the new header, words behind it, bytes behind these
_CHUNK = struct.Struct("<II")  # its number, how many words differ

MOST_CHANGED = 0.4
"""A larger share of changed words is not worth it: each takes its place beside its value, and both files are read."""

_BATCH = 64
"""Chunks for each thread whose changes are in memory at a time: 8 MiB of both files."""

SAMPLED = 64
"""One of so many chunks is compared before all are: with float32 weights every element changes in every step."""


def delta(old: Path, new: Path, out: IO[bytes]) -> bool:
    """Writes the changes from `old` to `new` to `out`. Returns False, with nothing written, if the files are not alike,
    or too many of their words differ. Raises OSError for a version that is not there, TornVersion for a damaged one."""
    header, after, rest = _parts(new)
    _, before, _ = _parts(old)
    if len(before) != len(after) or _changed_share(before, after) > MOST_CHANGED:
        return False
    out.write(_HEAD.pack(len(header), len(after), len(rest)) + header + rest)
    count, batch = -(-len(after) // CHUNK_WORDS), threads() * _BATCH
    with ThreadPoolExecutor(threads(), "compare") as pool:  # numpy compares without Python's lock
        for first in range(0, count, batch):
            numbers = range(first, min(first + batch, count))
            out.writelines(pool.map(lambda number: _changes(before, after, number), numbers))
    return True


def _changes(before: Words, after: Words, number: int) -> bytes:
    """The changes of one chunk."""
    chunk = slice(number * CHUNK_WORDS, (number + 1) * CHUNK_WORDS)
    differ = before[chunk] != after[chunk]
    count = int(np.count_nonzero(differ))
    if not count:
        return b""
    places = np.flatnonzero(differ)
    where = np.packbits(differ) if count >= _DENSE_FROM else places.astype("<u2")
    return b"".join((_CHUNK.pack(number, count), where.tobytes(), after[chunk][places].tobytes()))


def apply(old: Path, changes: Data, put: Put) -> int:
    """Writes the new version: the old one's words, with the changed ones replaced. Returns its size in bytes.

    Raises WeightFileError if the changes are not of this version; the new version's digest shows whether they were
    complete.
    """
    _, before, _ = _parts(old)
    header_bytes: int
    words: int
    rest: int
    header_bytes, words, rest = _HEAD.unpack(_part(changes, 0, _HEAD.size))
    if words != len(before):
        raise WeightFileError(f"changes of {words:,} words are not of {old}, which has {len(before):,}")
    begins = _HEAD.size + header_bytes + rest
    changed = dict(_chunks(changes, begins, words))
    put(_part(changes, _HEAD.size, header_bytes), 0)
    put(_part(changes, _HEAD.size + header_bytes, rest), header_bytes + 2 * words)

    def fill(number: int) -> None:
        # Through a buffer that stays in a core's cache: to map the new file costs a fault for each of its pages.
        chunk = before[number * CHUNK_WORDS : (number + 1) * CHUNK_WORDS].copy()
        if number in changed:
            where, values = changed[number]
            chunk[_places(where, chunk.size)] = values
        put(chunk.view(np.uint8).data, header_bytes + 2 * number * CHUNK_WORDS)

    with ThreadPoolExecutor(threads(), "apply") as pool:
        for _ in pool.map(fill, range(-(-words // CHUNK_WORDS))):
            pass
    return header_bytes + 2 * words + rest


def _chunks(changes: Data, at: int, words: int) -> Iterator[tuple[int, tuple[Places, Words]]]:
    """By number of a chunk: where its words differ, as they were sent, and the new words."""
    while at < len(changes):
        number, count = _CHUNK.unpack(_part(changes, at, _CHUNK.size))
        size = min(CHUNK_WORDS, words - number * CHUNK_WORDS)
        if not 0 < count <= size:
            raise WeightFileError(
                f"the changes of a version name {count:,} words of chunk {number}, which has {size:,}"
            )
        dense = count >= _DENSE_FROM
        bytes_of_places = -(-size // 8) if dense else 2 * count
        where = np.frombuffer(_part(changes, at + _CHUNK.size, bytes_of_places), np.uint8 if dense else "<u2")
        at += _CHUNK.size + bytes_of_places
        yield number, (where, np.frombuffer(_part(changes, at, 2 * count), "<u2"))
        at += 2 * count


def _places(where: Places, size: int) -> npt.NDArray[np.bool_] | Places:
    """The places of a chunk that differ, as numpy takes them."""
    return np.unpackbits(where.view(np.uint8), count=size).view(np.bool_) if where.dtype == np.uint8 else where


def _part(changes: Data, start: int, size: int) -> memoryview:
    part = memoryview(changes)[start : start + size]
    if len(part) < size:
        raise WeightFileError("the changes of a version were cut short, or damaged")
    return part


def _parts(path: Path) -> tuple[bytes, Words, bytes]:
    """The header of a version, all words behind it, and the last byte where their number of bytes is odd."""
    memory = mapped(path)
    begins = 8 + int.from_bytes(memory[:8], "little")
    words = (len(memory) - begins) // 2
    return memory[:begins], np.frombuffer(memory, "<u2", words, begins), memory[begins + 2 * words :]


def _changed_share(before: Words, after: Words) -> float:
    """The share of words that differ in some of the chunks."""
    starts = range(0, len(after), CHUNK_WORDS * SAMPLED)
    parts = [(before[start : start + CHUNK_WORDS], after[start : start + CHUNK_WORDS]) for start in starts]
    differ = sum(int(np.count_nonzero(left != right)) for left, right in parts)
    return differ / max(sum(left.size for left, _ in parts), 1)
