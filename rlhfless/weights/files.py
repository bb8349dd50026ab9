"""One safetensors file per version: a reader sees all of it or none of it, and reads it without a copy.

The writer fills a temporary file in the same folder, syncs it and renames it: a file that can be seen is
complete. (`fsync` is what makes that true after a power cut as well. On tmpfs, such as /dev/shm, it does
nothing and costs nothing.) A file is never changed after its rename, so readers may map it into memory.

The format is safetensors' own: 8 bytes with the length of the header, a JSON header, then the bytes of
the tensors. It is written here and not by the safetensors package because that copies every tensor once
more, and refuses tensors which share memory (tied embeddings). It is read by the package.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO
from uuid import uuid4

import torch
from safetensors import SafetensorError, safe_open

from rlhfless.records import WeightVersion
from rlhfless.weights.digest import dtype_name, tensor_bytes
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


PRIVATE_MODE = 0o700
"""For the owner only: weights may be secret, and a process that can write them controls the actors' weights."""


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


def write_file(path: Path, tensors: Mapping[str, torch.Tensor], label: str) -> int:
    """Writes `tensors` to `path`, which appears complete or not at all. Returns the file's size in bytes."""
    header: dict[str, object] = {"__metadata__": {"version": label}}
    parts: list[memoryview] = []
    offset = 0
    for name, tensor in tensors.items():
        data = tensor_bytes(tensor)
        header[name] = {
            "dtype": _SAFETENSORS_DTYPES[dtype_name(tensor.dtype)],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + data.nbytes],
        }
        parts.append(data)
        offset += data.nbytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-(8 + len(encoded)) % _HEADER_ALIGNMENT_BYTES)
    with replacing(path) as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for part in parts:
            file.write(part)
    return 8 + len(encoded) + offset


def make_private(folder: Path) -> None:
    """Make a folder that only its owner can list, read or write, whatever the umask."""
    folder.mkdir(mode=PRIVATE_MODE, parents=True, exist_ok=True)
    if stat.S_IMODE(folder.stat().st_mode) != PRIVATE_MODE:
        folder.chmod(PRIVATE_MODE)


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Gives a temporary neighbour of `path` to fill; it takes the name `path` if the block succeeds."""
    make_private(path.parent)
    temporary = path.with_name(TEMPORARY_PREFIX + uuid4().hex)
    try:
        with temporary.open("xb+") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        temporary.unlink()
        raise


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
