"""The digest of a set of weights: two versions are the same if their digests are.

Each tensor is hashed separately with xxh3-128 (name, dtype, shape, and the hash of each PIECE_BYTES of its bytes),
and the hashes are combined in name order. Threads can therefore share the work on a large tensor, and a reader can
take the tensors in any order, layer by layer, and still compute the publisher's digest. An engine can thus prove
which tensors it *consumed*, not only which ones it was offered.

xxh3 is fast (memory bandwidth) but not cryptographic: it detects mistakes, not attackers.

Several readers can share the hashing of one version: each takes all tensors and hashes some, and `merged` combines
the hashes. A reader that already knows a tensor's hash does not read its bytes to hash them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from types import MappingProxyType

import numpy as np
import torch
import xxhash

from rlhfless.spec import Transport

CHUNK_BYTES = 1 << 20
"""Bytes hashed and then copied in one go: they stay in a core's cache between the two."""

PIECE_BYTES = 1 << 24
"""Bytes that a thread hashes and copies at a time, and that one GPU copy moves: 16 MiB takes 0.3 ms there, far
longer than the launch of a copy."""

MOST_THREADS = 8
"""Most threads that hash and copy concurrently; about this many cores saturate a machine's memory bandwidth."""

PieceHash = Callable[[torch.Tensor], bytes]
"""A 16-byte hash of a piece `[bytes]`: xxh3 (`piece_hash`), or computed on the GPU (`device_piece_hash`)."""

NO_HASHES: Mapping[str, bytes] = MappingProxyType({})


def threads() -> int:
    """Return the number of hashing and copying threads: one per core available to this process, up to MOST_THREADS."""
    return min(MOST_THREADS, len(os.sched_getaffinity(0)))


def pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the bytes of `tensor` in row-major order, on its device, as `[bytes]` pieces of PIECE_BYTES."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return torch.split(flat, PIECE_BYTES) if len(flat) else ()


def chunks(piece: torch.Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a piece in chunks; each chunk is valid until the next is requested."""
    data = _staged(piece) if piece.is_cuda else piece.numpy().data
    for start in range(0, data.nbytes, CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES]


def _staged(piece: torch.Tensor) -> memoryview:
    """Copy a piece to pinned memory from torch's cache; only the first version waits for an allocation."""
    stream = torch.cuda.Stream(piece.device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(piece.device))
    buffer = torch.empty(len(piece), dtype=torch.uint8, pin_memory=True)
    with torch.cuda.stream(stream):
        buffer.copy_(piece, non_blocking=True)
    stream.synchronize()
    return buffer.numpy().data


def piece_hash(piece: torch.Tensor) -> bytes:
    """Hash a piece with xxh3-128; releases the GIL."""
    hasher = xxhash.xxh3_128()
    for chunk in chunks(piece):
        hasher.update(chunk)
    return hasher.digest()


def combined_hash(name: str, tensor: torch.Tensor, hashes: Iterable[bytes]) -> bytes:
    """Combine the hashes of a tensor's pieces into the tensor's hash."""
    hasher = xxhash.xxh3_128(f"{name}\0{dtype_name(tensor.dtype)}\0{tuple(tensor.shape)}\0".encode())
    hasher.update(b"".join(hashes))
    return hasher.digest()


def hash_of(name: str, tensor: torch.Tensor, of_piece: PieceHash = piece_hash) -> bytes:
    return combined_hash(name, tensor, map(of_piece, pieces(tensor)))


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of `tensor` in row-major order, without a copy if it is contiguous and on the CPU."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def tensor_at(memory: torch.Tensor, start: int, dtype_named: str, shape: Sequence[int]) -> torch.Tensor:
    """Return the tensor that starts at byte `start` of `memory` [bytes]; copies only if `start` is unaligned."""
    dtype: torch.dtype = getattr(torch, dtype_named)
    part = memory[start : start + dtype.itemsize * math.prod(shape)]
    return (part.clone() if start % dtype.itemsize else part).view(dtype).view(torch.Size(shape))


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


class Digest:
    """A digest under construction: `add` each tensor once, in any order."""

    def __init__(self, of_piece: PieceHash = piece_hash) -> None:
        self.of_piece = of_piece
        self.hashes: dict[str, bytes] = {}
        """By tensor name; empty for tensors that another reader hashes."""
        self.size_bytes = 0

    @property
    def tensors(self) -> int:
        return len(self.hashes)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Hash and add a tensor. Raises ValueError if its name was already added."""
        self.record(name, hash_of(name, tensor, self.of_piece), tensor.nbytes)

    def record(self, name: str, known: bytes, size_bytes: int) -> None:
        """Add a tensor by its known hash. Raises ValueError if its name was already added."""
        if name in self.hashes:
            raise ValueError(f"tensor {name!r} came twice; a version holds every name once")
        self.hashes[name] = known
        self.size_bytes += size_bytes

    def hexdigest(self) -> str:
        """Return 32 hexadecimal digits over the tensors added so far."""
        combined = xxhash.xxh3_128()
        for name in sorted(self.hashes):
            combined.update(self.hashes[name])
        return combined.hexdigest()

    def passing(
        self,
        tensors: Iterable[tuple[str, torch.Tensor]],
        known: Mapping[str, bytes] = NO_HASHES,
        reader: int = 0,
        readers: int = 1,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield `tensors`, adding only those that the consumer takes.

        Hashes in `known` are not computed again; of the others, this reader hashes its share as one of several
        `readers`.
        """
        for number, (name, tensor) in enumerate(tensors):
            mine = number % readers == reader
            hashed = known.get(name) or (hash_of(name, tensor, self.of_piece) if mine else b"")
            self.record(name, hashed, tensor.nbytes)
            yield name, tensor


def merged(parts: Iterable[Mapping[str, bytes]]) -> Digest:
    """Merge the hashes of all readers of one version; `size_bytes` of the result is unknown."""
    digest = Digest()
    for part in parts:
        for name, known in part.items():
            digest.hashes[name] = known or digest.hashes.get(name, b"")
    return digest


def digest_of(tensors: Iterable[tuple[str, torch.Tensor]], of_piece: PieceHash = piece_hash) -> str:
    return digest_by_threads(tensors, 1, of_piece).hexdigest()


def digest_by_threads(
    tensors: Iterable[tuple[str, torch.Tensor]], count: int, of_piece: PieceHash = piece_hash
) -> Digest:
    """Compute the digest of all `tensors` with `count` threads."""
    digest = Digest(of_piece)
    with ThreadPoolExecutor(count, "hash") as pool:
        hashed = [(name, each, [pool.submit(of_piece, piece) for piece in pieces(each)]) for name, each in tensors]
        for name, tensor, hashes in hashed:
            digest.record(name, combined_hash(name, tensor, (each.result() for each in hashes)), tensor.nbytes)
    return digest


_WORD_BYTES = 4
_SUMS = 2
_WORDS_IN_CACHE = 1 << 15  # on a CPU, the products of this many words stay in a core's cache until they are added
ON_GPUS: tuple[Transport, ...] = ("nccl", "cuda_ipc")
"""Transports that move weights from GPU to GPU."""


def piece_hash_of(transport: Transport) -> PieceHash:
    """Return the piece hash for versions sent over a transport."""
    return device_piece_hash if transport in ON_GPUS else piece_hash


def device_piece_hash(piece: torch.Tensor) -> bytes:
    """Hash a piece `[bytes]` into 16 bytes on the piece's own device, without copying GPU data to the host.

    The bytes are read as little-endian four-byte words w[i]; the hash is two sums of products modulo 2^64:

        h[k] = sum over i of c[k, i] * w[i]  with fixed random odd numbers c

    (multilinear hashing; D. Lemire, O. Kaser, "Strongly universal string hashing is fast", 2014). Integer sums are
    exact, so the result is the same on every device and in any order of addition. A change of a single word is
    always detected, because an odd number has an inverse; any other change is missed with a probability of about
    2^-64. On a CPU, xxh3 is many times faster.
    """
    words = -(-len(piece) // _WORD_BYTES)
    if len(piece) % _WORD_BYTES or piece.storage_offset() % _WORD_BYTES:
        aligned = piece.new_zeros(words * _WORD_BYTES)
        aligned[: len(piece)] = piece
        piece = aligned
    numbers, factors = piece.view(torch.int32), _coefficients(piece.device)
    sums = torch.zeros(_SUMS, dtype=torch.int64, device=piece.device)
    step = _WORDS_IN_CACHE if piece.device.type == "cpu" else words
    for start in range(0, words, step):
        end = min(start + step, words)
        sums += (factors[:, start:end] * numbers[start:end]).sum(1)  # all devices keep the lower 64 bits
    return sums.cpu().numpy().tobytes()


@cache
def _coefficients(device: torch.device) -> torch.Tensor:
    """Return odd int64 numbers `[sums, words]`: the output of SplitMix64, identical on every device."""
    with np.errstate(over="ignore"):
        state = np.arange(1, _SUMS * (PIECE_BYTES // _WORD_BYTES) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    return torch.from_numpy((state | np.uint64(1)).view(np.int64)).view(_SUMS, -1).to(device)
