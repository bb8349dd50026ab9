"""The digest of a set of weights: two versions are the same if their digests are.

Each tensor is hashed on its own (name, dtype, shape, bytes) with xxh3-128, and the hashes are combined in
the order of the names. So a reader may take the tensors in any order, layer by layer, and still arrive at
the publisher's digest - so an engine can prove which tensors it *consumed*, not only which were offered to it.

xxh3 is fast (memory bandwidth) and not cryptographic: it finds mistakes, not attackers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import xxhash


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of `tensor` in row-major order; no copy if it is contiguous and on the CPU already."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def dtype_name(dtype: torch.dtype) -> str:
    """Such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


class Digest:
    """A digest under construction: `add` every tensor once, in any order."""

    def __init__(self) -> None:
        self._hashes: dict[str, bytes] = {}
        self.size_bytes = 0

    @property
    def tensors(self) -> int:
        return len(self._hashes)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Raises ValueError if a tensor of this name was added before."""
        if name in self._hashes:
            raise ValueError(f"tensor {name!r} came twice; a version holds every name once")
        data = tensor_bytes(tensor)
        header = f"{name}\0{dtype_name(tensor.dtype)}\0{tuple(tensor.shape)}\0"
        hasher = xxhash.xxh3_128(header.encode())
        hasher.update(data)
        self._hashes[name] = hasher.digest()
        self.size_bytes += data.nbytes

    def hexdigest(self) -> str:
        """32 hexadecimal digits, over the tensors so far."""
        combined = xxhash.xxh3_128()
        for name in sorted(self._hashes):
            combined.update(self._hashes[name])
        return combined.hexdigest()

    def passing(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields `tensors`, and adds only the tensors that the consumer really takes."""
        for name, tensor in tensors:
            self.add(name, tensor)
            yield name, tensor


def digest_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """The digest of all `tensors`."""
    digest = Digest()
    for name, tensor in tensors:
        digest.add(name, tensor)
    return digest.hexdigest()
