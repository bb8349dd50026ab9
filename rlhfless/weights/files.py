"""One safetensors file per version: a reader sees all of it or none of it, and reads it without a copy.

The writer fills a temporary file in the same folder, syncs it and renames it: a file that can be seen is
complete. (`fsync` is what makes that true after a power cut as well. On tmpfs, such as /dev/shm, it does
nothing and costs nothing.) A file is never changed after its rename, so readers may map it into memory.

The format is safetensors' own: 8 bytes with the length of the header, a JSON header, then the bytes of
the tensors. It is written here and not by the safetensors package because that copies every tensor once
more, and refuses tensors which share memory (tied embeddings). It is read by the package.

Several threads hash and write, each a tensor of its own, chunk by chunk, while the next tensors are made. The file of a
version that was dropped is written over if no reader has it open or mapped any more (`spare`): to get fresh memory from
the kernel takes longer than to fill it.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from uuid import uuid4

import torch
from safetensors import SafetensorError, safe_open

from rlhfless.folders import in_memory, private
from rlhfless.records import WeightVersion
from rlhfless.spec import Transport
from rlhfless.weights.digest import Digest, dtype_name, hasher_of, host_chunks, threads
from rlhfless.weights.errors import WeightFileError

SUFFIX = ".safetensors"
TEMPORARY_PREFIX = ".writing-"
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
    """The file of a version: its label, with `~` for `/`."""
    if _SEPARATOR in version.run_id or "/" in version.run_id or version.run_id.startswith("."):
        raise ValueError(f"run id {version.run_id!r} must not contain `~` or `/`, nor start with a dot")
    return version.label.replace("/", _SEPARATOR) + SUFFIX


def version_of(path: str | Path) -> WeightVersion:
    """The inverse of `file_name`, for a path or URL. Raises ValueError for any other name."""
    name = str(path).rsplit("/", 1)[-1]
    if not name.endswith(SUFFIX):
        raise ValueError(f"{path} is not a weight file: the name must end with {SUFFIX}")
    return WeightVersion.parse(name.removesuffix(SUFFIX).replace(_SEPARATOR, "/"))


Layout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Format and shape of each tensor, by name."""


@dataclass(frozen=True, slots=True)
class TensorStream:
    """Tensors that are made one after the other, so that never all of them need to be in memory."""

    layout: Layout
    tensors: Iterator[tuple[str, torch.Tensor]]
    """Each tensor of the layout once, in any order."""

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> TensorStream:
        """A stream of tensors that are in memory already."""
        layout = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        return cls(layout, iter(tensors.items()))


def write_tensors(
    file: IO[bytes], stream: TensorStream, metadata: Callable[[], Mapping[str, str]], digest: Digest | None = None
) -> int:
    """Writes a whole safetensors file, and adds what it writes to `digest`. Returns its size in bytes.

    `metadata` is asked when all tensors have been written; before that, for its length alone. Raises ValueError if the
    stream does not have the tensors of its layout.
    """
    digest = digest or Digest()
    header, size_bytes = _header(stream.layout, metadata())
    left = dict(_offsets(stream.layout))
    count, turn = threads(), threading.Lock()
    with ThreadPoolExecutor(count, "write") as pool:
        writing: deque[tuple[str, Future[bytes], int]] = deque()

        def take() -> None:
            name, future, size = writing.popleft()
            digest.record(name, future.result(), size)

        for name, tensor in stream.tensors:
            if name not in left or left[name][1] - left[name][0] != tensor.nbytes:
                raise ValueError(f"tensor {name!r} came twice, or is not the one of its layout")
            place = len(header) + left.pop(name)[0]
            writing.append((name, pool.submit(_write, file.fileno(), turn, place, name, tensor), tensor.nbytes))
            if len(writing) > count:  # tensors that wait are memory
                take()
        while writing:
            take()
    if left:
        raise ValueError(f"the stream ended without {sorted(left)[:3]}")
    os.truncate(file.fileno(), len(header) + size_bytes)  # the last tensors may be empty
    put(file.fileno(), _header(stream.layout, metadata())[0], 0)
    return len(header) + size_bytes


def _write(file: int, turn: threading.Lock, place: int, name: str, tensor: torch.Tensor) -> bytes:
    """Write a tensor at `place`; its hash. Threads take turns: the kernel lets one at a time write to a file, and the
    others would wait for that at work."""
    hasher = hasher_of(name, tensor)
    for chunk in host_chunks(tensor):
        hasher.update(chunk)
        with turn:
            put(file, chunk, place)
        place += len(chunk)
    return hasher.digest()


def put(file: int, data: bytes | memoryview, place: int) -> None:
    """Write all of `data` at `place` of an open file; the kernel may take less at once."""
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, place)
        view, place = view[written:], place + written


def _offsets(layout: Layout) -> Iterator[tuple[str, tuple[int, int]]]:
    """First byte and end of each tensor, counted from the end of the header."""
    offset = 0
    for name, (dtype, shape) in layout.items():
        end = offset + dtype.itemsize * math.prod(shape)
        yield name, (offset, end)
        offset = end


def _header(layout: Layout, metadata: Mapping[str, str]) -> tuple[bytes, int]:
    """The header, and the size of all tensors in bytes."""
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
    """How files in a folder of this node reach its processes."""
    return "shared_memory" if in_memory(folder) else "file"


def read_layout(path: Path) -> tuple[int, list[tuple[str, str, list[int], int, int]]]:
    """Where the tensors of a file begin; and name, dtype, shape, first byte from there and end of each, in order."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    names = {short: name for name, short in _SAFETENSORS_DTYPES.items()}
    tensors = [
        (name, names[of["dtype"]], of["shape"], *of["data_offsets"])
        for name, of in header.items()
        if name != "__metadata__"
    ]
    return 8 + length, sorted(tensors, key=lambda tensor: tensor[3:])


@dataclass(slots=True)
class Draft:
    """A file that is being written."""

    file: IO[bytes]
    path: Path | None
    """The name that it will take; None to drop it."""


@contextmanager
def replacing(folder: Path, path: Path | None = None) -> Iterator[Draft]:
    """Gives a temporary file in `folder` to fill; it takes the draft's `path` there if the block succeeds."""
    private(folder)  # weights may be secret, and a process that can write them controls the actors' weights
    temporary = folder / (TEMPORARY_PREFIX + uuid4().hex)
    draft: Draft | None = None
    try:
        with _open_blank(temporary) as file:
            draft = Draft(file, path)
            yield draft
            file.flush()
            os.fsync(file.fileno())
        if draft.path is not None:
            temporary.rename(draft.path)
    finally:
        temporary.unlink(missing_ok=True)


_SPARE = TEMPORARY_PREFIX + "spare"


def spare(path: Path) -> None:
    """Drop a version, if it is there; its file waits for the next one. Readers that have it open keep what it holds."""
    with suppress(FileNotFoundError):
        path.rename(path.with_name(_SPARE))


def _open_blank(path: Path) -> IO[bytes]:
    """A file at `path` to write to: the folder's spare one if it is this process's alone, or else a new one."""
    try:
        path.with_name(_SPARE).rename(path)
        file = path.open("rb+")
    except FileNotFoundError:
        return path.open("xb+")
    try:
        # The kernel grants it if no one else has the file open or mapped. From now on nobody can: the name is gone.
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        file.close()
        path.unlink()
        return path.open("xb+")
    return file


def read_file(path: Path, digest: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields `(name, tensor)` of all tensors; the tensors are views of the mapped file.

    They stay valid when the file is deleted meanwhile: the kernel keeps the bytes until the last view
    is gone. `digest` is only named in errors; the consumer of the tensors checks it.

    Raises:
        WeightFileError: the file is missing, truncated, or not a safetensors file.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                yield name, file.get_tensor(name)
    except (FileNotFoundError, RuntimeError) as error:
        # safetensors opens a file twice, the second time through torch, which raises RuntimeError for every failure
        if isinstance(error, RuntimeError) and path.exists():
            raise
        raise WeightFileError(
            f"weight file {path} (digest {digest}) does not exist; it was never published, or was already "
            "deleted as an old version"
        ) from error
    except SafetensorError as error:
        raise WeightFileError(
            f"weight file {path} (digest {digest}) is truncated or damaged ({error}); publish it again"
        ) from error
