"""The format of a version and how it is written and read: the bytes of one safetensors file, in parts (`parts`).

The format is 8 bytes with the length of the header, a JSON header, then the bytes of the tensors. The safetensors
package is not used for writing because it copies every tensor once more and rejects tensors that share memory (tied
embeddings), nor for reading because it reads single files.

Several threads hash and write pieces of tensors chunk by chunk while the next tensors are produced.

`read_ahead` copies a version's tensors to a GPU, prefetching the next ones while one is in use: a copy from unpinned
pages, such as those of a mapped version, uses a single thread and a fraction of the bus bandwidth. Several threads
copy pieces into pinned memory, and a stream copies from there.
"""

from __future__ import annotations

import json
import math
import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

import torch
import xxhash

from rlhfless.records import WeightVersion
from rlhfless.spec import Transport
from rlhfless.util.folders import in_memory
from rlhfless.weights.check import WeightFileError
from rlhfless.weights.digest import (
    Digest,
    PieceHash,
    chunks,
    combined_hash,
    dtype_name,
    piece_hash,
    pieces,
    tensor_at,
    threads,
)
from rlhfless.weights.parts import TornVersion, mapped, put

SUFFIX = ".weights"
_SEPARATOR = "~"  # cannot occur in a run's name, and needs no escaping in paths and URLs

_SAFETENSORS_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
_HEADER_ALIGNMENT_BYTES = 64  # a cache line: mapped tensors then start aligned for every dtype


def file_name(version: WeightVersion) -> str:
    """Return the file name of a version: its label with `~` for `/`. Raises ValueError for an invalid run ID."""
    if _SEPARATOR in version.run_id or "/" in version.run_id or version.run_id.startswith("."):
        raise ValueError(f"run id {version.run_id!r} must not contain `~` or `/`, nor start with a dot")
    return version.label.replace("/", _SEPARATOR) + SUFFIX


def version_of(path: str | Path) -> WeightVersion:
    """Parse the version from a path or URL; inverse of `file_name`. Raises ValueError for any other name."""
    name = str(path).rsplit("/", 1)[-1]
    if not name.endswith(SUFFIX):
        raise ValueError(f"{path} is not a version of weights: the name must end with {SUFFIX}")
    return WeightVersion.parse(name.removesuffix(SUFFIX).replace(_SEPARATOR, "/"))


Layout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtype and shape of each tensor, by name."""


@dataclass(frozen=True, slots=True)
class TensorStream:
    """Tensors that are produced one at a time, so that they need not all fit in memory."""

    layout: Layout
    tensors: Iterator[tuple[str, torch.Tensor]]
    """Yields each tensor of the layout once, in any order."""

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> TensorStream:
        """Wrap tensors that are already in memory."""
        layout = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        return cls(layout, iter(tensors.items()))


Put = Callable[[bytes | memoryview, int], None]
"""Writes bytes at an offset; must be thread-safe."""


def write_tensors(
    put: Put,
    stream: TensorStream,
    metadata: Callable[[], Mapping[str, str]],
    digest: Digest | None = None,
    others: Callable[[int], Callable[[], Mapping[str, bytes]]] | None = None,
) -> int:
    """Write a whole version, add its tensors to `digest`, and return its size in bytes.

    `metadata` is called after all tensors are written, and once before, only to determine its length. `others` is
    called with the offset of the first tensor, so that other processes begin to write tensors that the stream lacks;
    what it returns waits for them, and gives the hashes. Raises ValueError if a tensor of the layout is missing.
    """
    digest = digest or Digest()
    header, size_bytes = _header(stream.layout, metadata())
    joined = others(len(header)) if others is not None else None
    left = write_pieces(put, stream, len(header), digest.record, digest.of_piece)
    for name, known in joined().items() if joined is not None else ():
        start, end = left.pop(name)
        digest.record(name, known, end - start)
    if left:
        raise ValueError(f"the stream ended without {sorted(left)[:3]}")
    put(_header(stream.layout, metadata())[0], 0)
    return len(header) + size_bytes


def write_pieces(
    put: Put,
    stream: TensorStream,
    begins: int,
    record: Callable[[str, bytes, int], None],
    of_piece: PieceHash = piece_hash,
) -> dict[str, tuple[int, int]]:
    """Write the stream's tensors at their places after `begins`, and return the places of those that did not come.

    `record` is called with the name, hash and bytes of each tensor. Raises ValueError for a tensor that is not the one
    of its layout.
    """
    left = dict(_offsets(stream.layout))
    count = threads()
    with ThreadPoolExecutor(count, "write") as pool:
        writing: deque[tuple[str, torch.Tensor, list[Future[bytes]]]] = deque()

        def take() -> None:
            name, tensor, hashes = writing.popleft()
            record(name, combined_hash(name, tensor, (each.result() for each in hashes)), tensor.nbytes)

        for name, tensor in stream.tensors:
            if name not in left or left[name][1] - left[name][0] != tensor.nbytes:
                raise ValueError(f"tensor {name!r} came twice, or is not the one of its layout")
            place, written = begins + left.pop(name)[0], []
            for piece in pieces(tensor):
                written.append(pool.submit(_write, put, place, piece, of_piece))
                place += len(piece)
            writing.append((name, tensor, written))
            if len(writing) > count:  # waiting tensors use memory
                take()
        while writing:
            take()
    return left


def write_file(file: IO[bytes], stream: TensorStream, metadata: Mapping[str, str]) -> None:
    """Write a safetensors file."""
    turn = threading.Lock()  # the kernel allows one writing thread per file

    def put_in_turn(data: bytes | memoryview, place: int) -> None:
        with turn:
            put(file.fileno(), data, place)

    write_tensors(put_in_turn, stream, lambda: metadata)


def _write(put: Put, place: int, piece: torch.Tensor, of_piece: PieceHash) -> bytes:
    """Write a piece at `place` and return its hash.

    xxh3 hashes each chunk while it is in a core's cache; other hashes take the whole piece on its device.
    """
    hasher = xxhash.xxh3_128() if of_piece is piece_hash else None
    for chunk in chunks(piece):
        if hasher is not None:
            hasher.update(chunk)
        put(chunk, place)
        place += len(chunk)
    return of_piece(piece) if hasher is None else hasher.digest()


def _offsets(layout: Layout) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the first byte and end of each tensor, relative to the end of the header."""
    offset = 0
    for name, (dtype, shape) in layout.items():
        end = offset + dtype.itemsize * math.prod(shape)
        yield name, (offset, end)
        offset = end


def _header(layout: Layout, metadata: Mapping[str, str]) -> tuple[bytes, int]:
    """Return the header and the total size of all tensors in bytes."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    size_bytes = 0
    for name, (start, end) in _offsets(layout):
        dtype, shape = layout[name]
        header[name] = {
            "dtype": _SAFETENSORS_DTYPES[dtype_name(dtype)],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
        size_bytes = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-(8 + len(encoded)) % _HEADER_ALIGNMENT_BYTES)
    return len(encoded).to_bytes(8, "little") + encoded, size_bytes


def way_on_node(folder: Path) -> Transport:
    """Return the transport by which files in a local folder reach this node's processes."""
    return "shared_memory" if in_memory(folder) else "file"


def read_header(memory: mmap.mmap) -> tuple[int, list[tuple[str, str, list[int], int, int]], Mapping[str, str]]:
    """Return the offset of the tensor data, the tensors in file order, and the metadata.

    Each tensor is (name, dtype, shape, start, end), with start and end relative to the offset. Raises ValueError,
    KeyError or TypeError if the bytes are not safetensors.
    """
    begins = 8 + int.from_bytes(memory[:8], "little")
    header = json.loads(memory[8:begins])
    metadata = header.pop("__metadata__", {})
    names = {short: name for name, short in _SAFETENSORS_DTYPES.items()}
    tensors = [(name, names[of["dtype"]], of["shape"], *of["data_offsets"]) for name, of in header.items()]
    if begins + max((end for *_, end in tensors), default=0) != len(memory):
        raise ValueError("its tensors do not end where it does")
    return begins, sorted(tensors, key=lambda tensor: tensor[3:]), metadata


def read_version(path: Path, digest: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield `(name, tensor)` for all tensors, as views of the mapped version.

    The views stay valid if the version is deleted meanwhile: the kernel keeps the bytes until the last view is gone.
    `digest` only appears in errors; the consumer of the tensors checks it.

    Raises:
        WeightFileError: the version is missing, truncated, or has no safetensors header.
    """
    try:
        memory = mapped(path)
        begins, layout, _ = read_header(memory)
    except FileNotFoundError as error:
        raise WeightFileError(
            f"weights {path} (digest {digest}) do not exist; they were never published, or were already deleted as an "
            "old version"
        ) from error
    except (TornVersion, ValueError, KeyError, TypeError) as error:
        raise WeightFileError(
            f"weights {path} (digest {digest}) are truncated or damaged ({error}); publish them again"
        ) from error
    data = torch.frombuffer(memory, dtype=torch.uint8)
    for name, dtype_named, shape, start, _ in layout:
        yield name, tensor_at(data, begins + start, dtype_named, shape)


READERS = 4
"""Threads per GPU; this many together read about as fast as the bus."""

AHEAD_BYTES = 256 << 20
"""Bytes of tensors prefetched on the GPU and in pinned memory; no more than the engine's activations, which are idle
during a load."""

Arrived = Callable[[], torch.Tensor]
"""Return the copy, ready on the current stream; called by the consuming thread."""

Copy = Callable[[], Arrived]
"""Make a copy; called by a reading thread."""


def read_ahead(tensors: Iterable[tuple[str, torch.Tensor]], device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the same tensors on `device` if it is a GPU. A tensor larger than AHEAD_BYTES stays where it is."""
    if device.type != "cuda":
        yield from tensors
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    yield from ahead(tensors, partial(_copy, device=device, stream=stream))


def ahead(
    tensors: Iterable[tuple[str, torch.Tensor]], begin: Callable[[torch.Tensor], Copy]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield copies of tensors in order, while threads copy the next AHEAD_BYTES."""
    waiting: deque[tuple[str, torch.Tensor, Future[Arrived] | None]] = deque()
    held = 0
    with ThreadPoolExecutor(READERS, "read") as pool:

        def take() -> tuple[str, torch.Tensor]:
            nonlocal held
            name, tensor, copy = waiting.popleft()
            if copy is None:
                return name, tensor
            held -= tensor.nbytes
            return name, copy.result()()

        for name, tensor in tensors:
            size = tensor.nbytes
            if tensor.is_cuda or not 0 < size <= AHEAD_BYTES:
                waiting.append((name, tensor, None))
                continue
            while waiting and held + size > AHEAD_BYTES:
                yield take()
            waiting.append((name, tensor, pool.submit(begin(tensor))))
            held += size
        while waiting:
            yield take()


def _copy(tensor: torch.Tensor, device: torch.device, stream: torch.cuda.Stream) -> Copy:
    """Prepare the copy of a tensor to a GPU on `stream`.

    Its memory comes from the current stream's pool, and so returns to the activations afterwards.
    """
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    copy.record_stream(stream)
    empty = torch.cuda.current_stream(device).record_event()

    def made() -> Arrived:
        with torch.cuda.stream(stream):
            stream.wait_event(empty)
            left = copy.view(-1).view(torch.uint8)
            for piece in pieces(tensor):
                staged = torch.empty(len(piece), dtype=torch.uint8, pin_memory=True).copy_(piece)
                left[: len(piece)].copy_(staged, non_blocking=True)  # torch keeps the staged data until it is read
                left = left[len(piece) :]
            done = stream.record_event()

        def arrived() -> torch.Tensor:
            torch.cuda.current_stream(device).wait_event(done)
            return copy

        return arrived

    return made
