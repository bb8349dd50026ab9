"""Stream weights from the learner's ranks to the engines on the same GPUs, through one bucket per GPU (CUDA IPC).

Every rank listens on a socket named after its GPU. During `feed`, all ranks gather the version tensor by tensor, as
for a publication. A rank with engines on its GPU writes the gathered tensors to its bucket of BUCKET_BYTES, which
their workers have mapped, and continues once every worker has copied them to its own memory. A bucket exists for one
feed only, so no GPU memory stays allocated between feeds. Lost workers are skipped; a worker that asks for a
different version than the one being fed gets an error.

vLLM's packed IPC consumer does not fit: its buckets hold whole tensors, and it counts a single reader per bucket.

On CPUs, a file in shared memory replaces the GPU bucket; the tests use this path. Not yet run on a GPU.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import xxhash
from torch.multiprocessing import reductions

from rlhfless.records import WeightVersion
from rlhfless.records.ledger import BUCKET_BYTES
from rlhfless.spec import Transport
from rlhfless.weights.check import WeightFileError
from rlhfless.weights.coauthors import Coauthors
from rlhfless.weights.digest import NO_HASHES, Digest, device_piece_hash, dtype_name
from rlhfless.weights.files import TensorStream, file_name, version_of
from rlhfless.weights.store import StoredWeights, Tensors

ARRIVE_S = 60.0
"""Seconds a feed waits for the expected workers to connect."""

STALL_S = 60.0
"""Longest silence of the other side during a feed, in seconds."""

_ALIGNMENT_BYTES = 256

Piece = tuple[str, str, list[int], int, int, int]
"""Name, dtype and shape of a tensor; the piece's offset in the tensor, offset in the bucket, and size in bytes."""


class BucketStore:
    """A `WeightStore` that keeps only the newest version, in the learner's own memory."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._version: WeightVersion | None = None
        path = _socket_path(self._folder)
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(64)

    def put(
        self, run_id: str, attempt: int, step: int, tensors: Tensors, coauthors: Coauthors | None = None
    ) -> StoredWeights:
        """Compute the version's digest without storing anything; `feed` receives the same tensors again."""
        assert coauthors is None, "every rank gathers all tensors"
        stream = tensors if isinstance(tensors, TensorStream) else TensorStream.of(tensors)
        digest = Digest(device_piece_hash)
        for name, tensor in stream.tensors:
            digest.add(name, tensor)
        if digest.hashes.keys() != stream.layout.keys():
            raise ValueError(f"the stream ended without {sorted(stream.layout.keys() - digest.hashes.keys())[:3]}")
        self._version = WeightVersion(run_id, attempt, step, digest.hexdigest())
        location = str(self._folder / file_name(self._version))
        return StoredWeights(self._version, location, digest.size_bytes, digest.tensors)

    def versions(self) -> tuple[WeightVersion, ...]:
        return () if self._version is None else (self._version,)

    def delete(self, version: WeightVersion) -> None:
        if version == self._version:
            self._version = None

    def feed(self, version: WeightVersion, workers: int, stream: TensorStream) -> int:
        """Send a version to `workers` on this GPU and return the number that received all of it."""
        with contextlib.ExitStack() as opened:
            readers = [opened.enter_context(each) for each in self._arrived(version.label, workers)]
            bucket: _Bucket | None = None
            for name, tensor in stream.tensors if readers else ():
                bucket = bucket or opened.enter_context(_Bucket(self._folder, tensor.device, readers))
                bucket.add(name, tensor)
            if bucket is not None:
                bucket.end()
            return len(readers)

    def _arrived(self, label: str, workers: int) -> list[_Connection]:
        """Wait up to ARRIVE_S for the workers that ask for a version."""
        arrived: list[_Connection] = []
        deadline_s = time.monotonic() + ARRIVE_S
        while len(arrived) < workers and (left_s := deadline_s - time.monotonic()) > 0:
            self._listener.settimeout(left_s)
            try:
                connection = _Connection(self._listener.accept()[0], left_s)
            except TimeoutError:
                break
            asked = connection.receive()
            connection.end.settimeout(STALL_S)
            if asked is None or connection.is_closed:  # the engine exited after connecting
                connection.close()
            elif asked["version"] != label:
                connection.send({"error": f"{label} is fed, and not {asked['version']}"})
                connection.close()
            else:
                arrived.append(connection)
        return arrived


class _Connection:
    """One end of a socket that exchanges JSON objects, one per line. Use as a context manager."""

    def __init__(self, end: socket.socket, silence_s: float | None) -> None:
        end.settimeout(silence_s)
        self.end = end
        self._lines = end.makefile("rb")

    def __enter__(self) -> _Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._lines.close()
        self.end.close()

    def send(self, message: Mapping[str, Any]) -> bool:
        """Send a message and return whether the other side is still connected."""
        try:
            self.end.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def receive(self) -> dict[str, Any] | None:
        """Return the next message, or None if the other side disconnected or was silent for too long."""
        try:
            line = self._lines.readline()
        except OSError:
            return None
        return json.loads(line) if line else None

    @property
    def is_closed(self) -> bool:
        """Return whether the other side, which should be silent, disconnected."""
        readable, _, _ = select.select([self.end], [], [], 0)
        return bool(readable)


class _Bucket:
    """The memory that the workers on one GPU have mapped. Use as a context manager."""

    def __init__(self, folder: Path, device: torch.device, readers: list[_Connection]) -> None:
        self._readers = readers
        self._file = folder / f".bucket-{uuid4().hex}"
        on_gpu = device.type == "cuda"
        if on_gpu:
            self._memory = torch.empty(BUCKET_BYTES, dtype=torch.uint8, device=device)
        else:
            self._memory = torch.from_file(str(self._file), shared=True, size=BUCKET_BYTES, dtype=torch.uint8)
        self._pieces: list[Piece] = []
        self._place = 0
        for reader in list(readers):
            # Export once per reader: torch counts the readers of a bucket by its exports.
            self._tell(reader, {"bucket": _export(self._memory) if on_gpu else {"file": str(self._file)}})

    def __enter__(self) -> _Bucket:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.unlink(missing_ok=True)
        on_gpu = self._memory.is_cuda
        del self._memory
        if on_gpu:
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        about, start = (name, dtype_name(tensor.dtype), list(tensor.shape)), 0
        while True:
            size = min(BUCKET_BYTES - self._place, len(flat) - start)
            self._memory[self._place : self._place + size].copy_(flat[start : start + size])
            self._pieces.append((*about, start, self._place, size))
            start += size
            self._place += -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            if self._place >= BUCKET_BYTES:
                self._flush()
            if start == len(flat):
                return

    def end(self) -> None:
        """Signal the end of the feed to the workers; each one releases the bucket."""
        self._flush()
        self._ask([])

    def _flush(self) -> None:
        """Wait until every worker has copied the bucket's contents."""
        if self._pieces:
            _synchronize(self._memory)
            self._ask(self._pieces)
            self._pieces, self._place = [], 0

    def _ask(self, pieces: list[Piece]) -> None:
        """Announce pieces to the workers and wait for their acknowledgements."""
        for reader in [each for each in list(self._readers) if self._tell(each, {"pieces": pieces})]:
            if reader.receive() is None:
                self._readers.remove(reader)

    def _tell(self, reader: _Connection, message: Mapping[str, Any]) -> bool:
        if reader.send(message):
            return True
        self._readers.remove(reader)
        return False


class BucketReader:
    """A `WeightReader` of a `BucketStore`, for a worker on the same GPU as a rank of the learner."""

    def __init__(self, folder: str | Path, wait_s: float | None) -> None:
        """`wait_s`: longest wait for a feed to start, because the learner may be busy."""
        self._wait_s = wait_s
        self._folder = Path(folder)
        self.of_piece = device_piece_hash
        """Hashes data on the GPU, where it already is."""
        self.transport: Transport = "cuda_ipc"

    def read(self, location: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the version's tensors; see `WeightReader.read`.

        Raises WeightFileError also if this GPU has no learner rank or the learner does not send the whole version.
        """
        version = version_of(location)
        what = f"weights {location} from the learner on GPU {_gpu_name()}"
        try:
            end = socket.socket(socket.AF_UNIX)
            end.connect(str(_socket_path(self._folder)))
        except OSError as error:
            raise WeightFileError(f"{what}: no rank of it is there ({error}); set weights.transport to auto") from error
        with _Connection(end, self._wait_s) as connection:
            connection.send({"version": version.label})
            asked_s = time.monotonic()
            first = connection.receive()
            if first is None:
                waited = f"the learner did not start to feed them within {time.monotonic() - asked_s:.0f} s, or ended"
                raise WeightFileError(f"{what}: {waited}; it works, or waits for other engines")
            yield from _received(connection, first, what)

    def hashes(self, location: str) -> Mapping[str, bytes]:  # noqa: ARG002 (see WeightReader)
        """Return no hashes: none are known for data on the GPU."""
        return NO_HASHES

    def release(self) -> None:
        """Do nothing: the tensors belong to this process."""


def _received(connection: _Connection, first: dict[str, Any], what: str) -> Iterator[tuple[str, torch.Tensor]]:
    memory: torch.Tensor | None = None
    tensor = torch.empty(0)
    connection.end.settimeout(STALL_S)
    said: dict[str, Any] | None = first
    while True:
        if said is None or "error" in said:
            raise WeightFileError(f"{what}: {said['error'] if said else 'it ended, or fell silent, on the way'}")
        if "bucket" in said:
            memory = _mapped(said["bucket"])
            said = connection.receive()
            continue
        if not said["pieces"]:
            memory = None  # the learner frees it when all workers have released it
            connection.send({})
            return
        assert memory is not None, "the bucket comes first"
        whole = []
        for name, dtype_named, shape, start, place, size in said["pieces"]:
            if not start:
                tensor = torch.empty(shape, dtype=getattr(torch, dtype_named), device=memory.device)
            tensor.view(-1).view(torch.uint8)[start : start + size].copy_(memory[place : place + size])
            if start + size == tensor.nbytes:
                whole.append((name, tensor))
        _synchronize(memory)
        connection.send({})  # the bucket may be overwritten
        yield from whole
        said = connection.receive()


def _synchronize(memory: torch.Tensor) -> None:
    """Wait for copies before notifying another process: its streams do not wait for this process's streams."""
    if memory.is_cuda:
        torch.cuda.synchronize(memory.device)


def _gpu_name() -> str:
    """Return an ID of this process's GPU that is the same in all processes."""
    if not torch.cuda.is_available():
        return "cpu"
    return str(torch.cuda.get_device_properties(torch.accelerator.current_device_index()).uuid)


def _socket_path(folder: Path) -> Path:
    return folder / f".gpu-{xxhash.xxh3_64_hexdigest(_gpu_name().encode())}"  # a socket's path must be short


def _export(memory: torch.Tensor) -> dict[str, Any]:
    """Return the arguments with which another process maps the memory, from torch's `reduce_tensor`."""
    _, arguments = reductions.reduce_tensor(memory)  # type: ignore[no-untyped-call]
    _, handle, size, offset, _, counter, counter_offset, event, waits = arguments[6:]
    return {
        "bytes": memory.nbytes,
        "handle": handle.hex(),
        "storage": [size, offset],
        "counter": [counter.hex(), counter_offset],
        "event": [event.hex(), waits],
    }


def _mapped(exported: Mapping[str, Any]) -> torch.Tensor:
    """Map the exported memory of another process."""
    if "file" in exported:
        return torch.from_file(exported["file"], shared=True, size=BUCKET_BYTES, dtype=torch.uint8)
    rebuild: Any = reductions.rebuild_cuda_tensor
    memory: torch.Tensor = rebuild(
        torch.Tensor,
        (exported["bytes"],),
        (1,),
        0,
        torch.storage.TypedStorage,
        torch.uint8,
        torch.accelerator.current_device_index(),
        bytes.fromhex(exported["handle"]),
        *exported["storage"],
        False,
        bytes.fromhex(exported["counter"][0]),
        exported["counter"][1],
        bytes.fromhex(exported["event"][0]),
        exported["event"][1],
    )
    return memory
