"""The digest of a set of weights: two versions are the same if their digests are.

Each tensor is hashed on its own (name, dtype, shape, and the hash of each PIECE_BYTES of its bytes) with xxh3-128, and
the hashes are combined in the order of the names. So threads share the work on a large tensor, and a reader may take
the tensors in any order, layer by layer, and still arrive at the publisher's digest - so an engine can prove which
tensors it *consumed*, not only which were offered to it.

xxh3 is fast (memory bandwidth) and not cryptographic: it finds mistakes, not attackers.

Several readers may share the hashing of one version: each takes all tensors, hashes some, and the hashes are put
together (`merged`). A reader that is given a tensor's hash does not read its bytes for that.
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
"""What is hashed and then copied at once: it stays in a core's cache between the two."""

PIECE_BYTES = 1 << 24
"""What one thread hashes and copies at a time, and what is copied from a GPU at once: 16 MiB takes 0.3 ms there, far
more than starting the copy does."""

MOST_THREADS = 8
"""That hash and copy at the same time; about so many cores use up the bandwidth of a machine's memory."""

PieceHash = Callable[[torch.Tensor], bytes]
"""A hash of a piece `[bytes]`, 16 bytes: of xxh3 (`piece_hash`), or of a GPU's own (`device_piece_hash`)."""

NO_HASHES: Mapping[str, bytes] = MappingProxyType({})


def threads() -> int:
    """For hashing and copying: one on each core that this process may use."""
    return min(MOST_THREADS, len(os.sched_getaffinity(0)))


def pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The bytes `[bytes]` of `tensor` in row-major order, on its device, in pieces of PIECE_BYTES."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return torch.split(flat, PIECE_BYTES) if len(flat) else ()


def chunks(piece: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a piece, chunk by chunk; each is valid until the next one is asked for."""
    data = _staged(piece) if piece.is_cuda else piece.numpy().data
    for start in range(0, data.nbytes, CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES]


def _staged(piece: torch.Tensor) -> memoryview:
    """A copy of a piece in pinned memory, which comes from torch's cache of it: only a first version waits for it."""
    stream = torch.cuda.Stream(piece.device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(piece.device))
    buffer = torch.empty(len(piece), dtype=torch.uint8, pin_memory=True)
    with torch.cuda.stream(stream):
        buffer.copy_(piece, non_blocking=True)
    stream.synchronize()
    return buffer.numpy().data


def piece_hash(piece: torch.Tensor) -> bytes:
    """The hash of a piece. Other threads run meanwhile."""
    hasher = xxhash.xxh3_128()
    for chunk in chunks(piece):
        hasher.update(chunk)
    return hasher.digest()


def combined_hash(name: str, tensor: torch.Tensor, hashes: Iterable[bytes]) -> bytes:
    """The hash of a tensor, of which the pieces have these."""
    hasher = xxhash.xxh3_128(f"{name}\0{dtype_name(tensor.dtype)}\0{tuple(tensor.shape)}\0".encode())
    hasher.update(b"".join(hashes))
    return hasher.digest()


def hash_of(name: str, tensor: torch.Tensor, of_piece: PieceHash = piece_hash) -> bytes:
    """The hash of a tensor."""
    return combined_hash(name, tensor, map(of_piece, pieces(tensor)))


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of `tensor` in row-major order; no copy if it is contiguous and on the CPU already."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def tensor_at(memory: torch.Tensor, start: int, dtype_named: str, shape: Sequence[int]) -> torch.Tensor:
    """The tensor whose bytes begin at `start` of `memory` [bytes]; a copy only if it does not begin at a multiple of
    its element's size."""
    dtype: torch.dtype = getattr(torch, dtype_named)
    part = memory[start : start + dtype.itemsize * math.prod(shape)]
    return (part.clone() if start % dtype.itemsize else part).view(dtype).view(torch.Size(shape))


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a format, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


class Digest:
    """A digest under construction: `add` every tensor once, in any order."""

    def __init__(self, of_piece: PieceHash = piece_hash) -> None:
        self.of_piece = of_piece
        self.hashes: dict[str, bytes] = {}
        """By tensor; empty for a tensor that another reader hashes."""
        self.size_bytes = 0

    @property
    def tensors(self) -> int:
        return len(self.hashes)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Raises ValueError if a tensor of this name was added before."""
        self.record(name, hash_of(name, tensor, self.of_piece), tensor.nbytes)

    def record(self, name: str, known: bytes, size_bytes: int) -> None:
        """Add a tensor by its hash. Raises ValueError if a tensor of this name was added before."""
        if name in self.hashes:
            raise ValueError(f"tensor {name!r} came twice; a version holds every name once")
        self.hashes[name] = known
        self.size_bytes += size_bytes

    def hexdigest(self) -> str:
        """32 hexadecimal digits, over the tensors so far."""
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
        """Yields `tensors`, and adds only the tensors that the consumer really takes.

        Hashes that are `known` are not computed; of the others this one of several `readers` computes its share.
        """
        for number, (name, tensor) in enumerate(tensors):
            mine = number % readers == reader
            hashed = known.get(name) or (hash_of(name, tensor, self.of_piece) if mine else b"")
            self.record(name, hashed, tensor.nbytes)
            yield name, tensor


def merged(parts: Iterable[Mapping[str, bytes]]) -> Digest:
    """The hashes of all readers of one version; its `size_bytes` is not known."""
    digest = Digest()
    for part in parts:
        for name, known in part.items():
            digest.hashes[name] = known or digest.hashes.get(name, b"")
    return digest


def digest_of(tensors: Iterable[tuple[str, torch.Tensor]], of_piece: PieceHash = piece_hash) -> str:
    """The digest of all `tensors`."""
    return digest_by_threads(tensors, 1, of_piece).hexdigest()


def digest_by_threads(
    tensors: Iterable[tuple[str, torch.Tensor]], count: int, of_piece: PieceHash = piece_hash
) -> Digest:
    """The digest of all `tensors`, which `count` threads hash."""
    digest = Digest(of_piece)
    with ThreadPoolExecutor(count, "hash") as pool:
        hashed = [(name, each, [pool.submit(of_piece, piece) for piece in pieces(each)]) for name, each in tensors]
        for name, tensor, hashes in hashed:
            digest.record(name, combined_hash(name, tensor, (each.result() for each in hashes)), tensor.nbytes)
    return digest


_WORD_BYTES = 4
_SUMS = 2
_WORDS_IN_CACHE = 1 << 15  # whose products, on a CPU, are added while a core's cache has them
ON_GPUS: tuple[Transport, ...] = ("nccl", "cuda_ipc")
"""Transports by which weights go from GPU to GPU."""


def piece_hash_of(transport: Transport) -> PieceHash:
    """How versions that go by a transport are hashed."""
    return device_piece_hash if transport in ON_GPUS else piece_hash


def device_piece_hash(piece: torch.Tensor) -> bytes:
    """The hash of a piece `[bytes]`, 16 bytes, computed on the piece's own device: no byte of a GPU goes to the host.

    The bytes are taken as words w[i] of four bytes, little-endian, and the hash is two sums of products modulo 2^64:

        h[k] = sum over i of c[k, i] * w[i]    with fixed random odd numbers c

    (multilinear hashing; D. Lemire, O. Kaser, "Strongly universal string hashing is fast", 2014). Integers are exact,
    so the result is the same on every device, in whichever order they are added. A change of one word always shows,
    because an odd number has an inverse; any other change escapes with a probability of about 2^-64. On a CPU xxh3 is
    many times as fast.
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
    """Odd numbers `[sums, words]`, int64: the output of SplitMix64, which is the same everywhere."""
    with np.errstate(over="ignore"):
        state = np.arange(1, _SUMS * (PIECE_BYTES // _WORD_BYTES) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    return torch.from_numpy((state | np.uint64(1)).view(np.int64)).view(_SUMS, -1).to(device)
