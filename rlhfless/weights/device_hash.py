"""The hash of a piece of a tensor, computed where the tensor is: of weights on a GPU no byte goes to the host for it.

The bytes are taken as words w[i] of four bytes, little-endian, and the hash is two sums of products modulo 2^64:

    h[k] = sum over i of c[k, i] * w[i]    with fixed random odd numbers c

(multilinear hashing; D. Lemire, O. Kaser, "Strongly universal string hashing is fast", 2014). Integers are exact, so
the result is the same on every device, in whichever order they are added. A change of one word always shows, because
an odd number has an inverse; any other change escapes with a probability of about 2^-64. Pieces are combined, with
name, dtype and shape, as all hashes are (`digest.combined_hash`). On a CPU xxh3 is many times as fast.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from rlhfless.spec import Transport
from rlhfless.weights.digest import PIECE_BYTES, PieceHash, piece_hash

_WORD_BYTES = 4
_SUMS = 2
_WORDS_IN_CACHE = 1 << 15  # whose products, on a CPU, are added while a core's cache has them
ON_GPUS: tuple[Transport, ...] = ("nccl", "cuda_ipc")
"""Transports by which weights go from GPU to GPU."""


def piece_hash_of(transport: Transport) -> PieceHash:
    """How versions that go by a transport are hashed."""
    return device_piece_hash if transport in ON_GPUS else piece_hash


def device_piece_hash(piece: torch.Tensor) -> bytes:
    """The hash of a piece `[bytes]`; 16 bytes."""
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
