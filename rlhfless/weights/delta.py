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
from typing import IO, NoReturn

import numpy as np
import numpy.typing as npt

from rlhfless.weights.digest import threads
from rlhfless.weights.errors import WeightFileError
from rlhfless.weights.files import put

Words = npt.NDArray[np.uint16]

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
    """Writes what changed to `out`. Returns False, with nothing written, if the files are not alike, or most of their
    words differ. Raises OSError for a file that is not there."""
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
    """What changed in one chunk."""
    chunk = slice(number * CHUNK_WORDS, (number + 1) * CHUNK_WORDS)
    differ = before[chunk] != after[chunk]
    count = int(np.count_nonzero(differ))
    if not count:
        return b""
    places = np.packbits(differ) if count >= _DENSE_FROM else np.flatnonzero(differ).astype("<u2")
    return b"".join((_CHUNK.pack(number, count), places.tobytes(), after[chunk][differ].tobytes()))


def apply(old: Path, changes: IO[bytes], file: int) -> None:
    """Writes the new version to an open file: the old one's words, but for what changed.

    Raises WeightFileError if the changes are not of this version; the new version's digest says whether they were all.
    """
    _, before, _ = _parts(old)
    header_bytes, words, rest = _HEAD.unpack(_read(changes, _HEAD.size))
    if words != len(before):
        raise WeightFileError(f"changes of {words:,} words are not of {old}, which has {len(before):,}")
    put(file, _read(changes, header_bytes), 0)
    put(file, _read(changes, rest), header_bytes + 2 * words)
    at = 0
    for number, count in _chunks(changes):
        place = number * CHUNK_WORDS
        size = min(CHUNK_WORDS, words - place)
        if number * CHUNK_WORDS >= words or count > size or place < at:
            raise WeightFileError(f"changes of {old} name chunk {number} of {count:,} words, which it does not have")
        put(file, before[at:place].tobytes(), header_bytes + 2 * at)
        chunk = before[place : place + size].copy()
        places = _places(changes, count, size)
        chunk[places] = np.frombuffer(_read(changes, 2 * count), "<u2")
        put(file, chunk.tobytes(), header_bytes + 2 * place)
        at = place + size
    put(file, before[at:].tobytes(), header_bytes + 2 * at)


def _chunks(changes: IO[bytes]) -> Iterator[tuple[int, int]]:
    while head := changes.read(_CHUNK.size):
        yield _CHUNK.unpack(head) if len(head) == _CHUNK.size else _cut_short()


def _places(changes: IO[bytes], count: int, size: int) -> npt.NDArray[np.int64]:
    if count < _DENSE_FROM:
        places = np.frombuffer(_read(changes, 2 * count), "<u2").astype(np.int64)
        if places.size and int(places.max()) >= size:
            _cut_short()
        return places
    bits = np.unpackbits(np.frombuffer(_read(changes, -(-size // 8)), np.uint8), count=size)
    places = np.flatnonzero(bits)
    return places if places.size == count else _cut_short()


def _read(changes: IO[bytes], size: int) -> bytes:
    data = changes.read(size)
    return data if len(data) == size else _cut_short()


def _cut_short() -> NoReturn:
    raise WeightFileError("the changes of a version were cut short, or damaged")


def _parts(path: Path) -> tuple[bytes, Words, bytes]:
    """The header of a safetensors file, all words behind it, and the byte that may be left."""
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    begins = 8 + int.from_bytes(mapped[:8], "little")
    words = (len(mapped) - begins) // 2
    return mapped[:begins], np.frombuffer(mapped, "<u2", words, begins), mapped[begins + 2 * words :]


def _changed_share(before: Words, after: Words) -> float:
    """The share of words that differ in some of the chunks."""
    starts = range(0, len(after), CHUNK_WORDS * SAMPLED)
    parts = [(before[start : start + CHUNK_WORDS], after[start : start + CHUNK_WORDS]) for start in starts]
    differ = sum(int(np.count_nonzero(left != right)) for left, right in parts)
    return differ / max(sum(left.size for left, _ in parts), 1)
