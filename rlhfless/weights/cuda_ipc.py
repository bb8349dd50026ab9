"""Weights that stay on the learner's GPU: an engine on the same one maps the learner's memory (CUDA IPC).

Beside its shards the learner holds one copy of its weights, as they are published, and writes each version over the one
before. A file in the store's folder says which version is there, and how to map it. A reader locks that file for as
long as it uses the tensors, and the writer waits for it; the kernel frees the lock of a reader that dies. The perturbed
version, which every new engine asks for, is in the folder as for any other transport.

Not yet run on a GPU: the tests replace the two functions of torch that share memory, and run the rest.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch.multiprocessing import reductions

from rlhfless.folders import wait_for_lock
from rlhfless.records import WeightVersion
from rlhfless.spec import Transport
from rlhfless.weights.device_hash import device_piece_hash
from rlhfless.weights.digest import Digest, dtype_name, tensor_at
from rlhfless.weights.errors import WeightFileError
from rlhfless.weights.files import TensorStream, version_of
from rlhfless.weights.store import FolderStore, StoredWeights, Tensors

NOTE = ".on-gpu"
"""A file of the store's folder: the version that is on the GPU, and how to map it. Empty while there is none."""

_ALIGNMENT_BYTES = 256  # of each tensor, as torch's own allocations have
_LOCK_TIMEOUT_S = 120.0


class IpcStore:
    """A `WeightStore` whose newest version is on the GPU of this process; the perturbed one is in a folder."""

    def __init__(self, folder: str | Path) -> None:
        self._files = FolderStore(folder, device_piece_hash)
        self._memory: torch.Tensor | None = None
        self._export: Mapping[str, Any] = {}
        self._version: WeightVersion | None = None

    def put(self, run_id: str, attempt: int, step: int, tensors: Tensors) -> StoredWeights:
        """See `WeightStore.put`. Waits until no engine uses the version before; raises TimeoutError."""
        if step < 0:
            return self._files.put(run_id, attempt, step, tensors)
        stream = tensors if isinstance(tensors, TensorStream) else TensorStream.of(tensors)
        with (self._files.folder / NOTE).open("a") as note:
            _lock(note, fcntl.LOCK_EX)
            self._version = None
            note.truncate(0)
            layout = self._write(stream)
            assert self._memory is not None
            digest = Digest(device_piece_hash)
            for name, tensor in _tensors(self._memory, layout):
                digest.add(name, tensor)
            self._version = WeightVersion(run_id, attempt, step, digest.hexdigest())
            # What was copied must be there before another process is told: its streams do not wait for this one's.
            _synchronize(self._memory)
            json.dump({"version": self._version.label, "memory": self._export, "layout": layout}, note)
        return StoredWeights(self._version, str(self._files.path(self._version)), self._memory.nbytes, digest.tensors)

    def _write(self, stream: TensorStream) -> list[list[Any]]:
        """Copy the stream to the GPU's memory; returns name, dtype, shape and first byte of each tensor."""
        layout, size = [], 0
        for name, (dtype, shape) in stream.layout.items():
            layout.append([name, dtype_name(dtype), list(shape), size])
            size += -(-dtype.itemsize * torch.Size(shape).numel() // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        places: dict[str, torch.Tensor] = {}
        for name, tensor in stream.tensors:
            if self._memory is None or self._memory.nbytes != size:
                self._memory = torch.empty(size, dtype=torch.uint8, device=tensor.device)
                # Once: what torch has exported it keeps until as many readers have opened it.
                self._export = _export_handle(self._memory)
            places = places or dict(_tensors(self._memory, layout))
            places.pop(name).copy_(tensor)
        if places or self._memory is None:
            raise ValueError(f"the stream ended without {sorted(places)[:3]}")
        return layout

    def versions(self) -> tuple[WeightVersion, ...]:
        """See `WeightStore.versions`."""
        return (*self._files.versions(), *([self._version] if self._version else []))

    def delete(self, version: WeightVersion) -> None:
        """See `WeightStore.delete`. The memory stays, for the next version."""
        if version != self._version:
            self._files.delete(version)
            return
        with (self._files.folder / NOTE).open("a") as note:
            _lock(note, fcntl.LOCK_EX)
            self._version = None
            note.truncate(0)

    def retain(self, keep: set[WeightVersion]) -> None:
        """See `WeightStore.retain`."""
        for version in self.versions():
            if version not in keep:
                self.delete(version)


class IpcReader:
    """A `WeightReader` of an `IpcStore`, for a process on the same GPU."""

    def __init__(self, folder: str | Path) -> None:
        self._files = FolderStore(folder, device_piece_hash)
        self.of_piece = device_piece_hash
        """See `WeightReader.of_piece`: what is on the GPU is hashed there."""
        self._lock: IO[str] | None = None
        self.transport: Transport = "cuda_ipc"
        """See `WeightReader.transport`."""

    def read(self, location: str) -> Iterator[tuple[str, torch.Tensor]]:
        """See `WeightReader.read`. The tensors are the learner's own, and stay as they are until `release`.

        Raises WeightFileError also if the learner's weights are on another GPU.
        """
        self.release()
        self._lock = (self._files.folder / NOTE).open("a+")
        _lock(self._lock, fcntl.LOCK_SH)
        self._lock.seek(0)
        written = self._lock.read()
        note: dict[str, Any] = json.loads(written) if written else {"version": ""}
        if note["version"] == version_of(location).label:
            self.transport = "cuda_ipc"
            yield from _tensors(_map_memory(note["memory"]), note["layout"])
        else:
            self.release()
            self.transport = self._files.transport
            yield from self._files.read(location)

    def hashes(self, location: str) -> Mapping[str, bytes]:
        """See `WeightReader.hashes`: of what is on the GPU none is known."""
        return self._files.hashes(location)

    def release(self) -> None:
        """See `WeightReader.release`."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _lock(file: IO[str], how: int) -> None:
    """Lock an open file, shared or exclusively. Raises TimeoutError if others hold it for too long."""
    if not wait_for_lock(file, how, _LOCK_TIMEOUT_S):
        user = "an engine reads" if how == fcntl.LOCK_EX else "the learner writes"
        raise TimeoutError(f"waited {_LOCK_TIMEOUT_S:g} s for the weights on the GPU, which {user}")


def _tensors(memory: torch.Tensor, layout: list[list[Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in the GPU's memory, by the layout that the learner wrote down."""
    for name, dtype_named, shape, start in layout:
        yield name, tensor_at(memory, start, dtype_named, shape)


def _synchronize(memory: torch.Tensor) -> None:
    if memory.is_cuda:
        torch.cuda.synchronize(memory.device)


def _gpu(index: int) -> str:
    """The name of a GPU that is the same in all processes."""
    return str(torch.cuda.get_device_properties(index).uuid)


def _export_handle(memory: torch.Tensor) -> dict[str, Any]:
    """How another process maps the memory: what torch's `reduce_tensor` says of it."""
    _, arguments = reductions.reduce_tensor(memory)  # type: ignore[no-untyped-call]
    device, handle, size, offset, _, counter, counter_offset, event, waits = arguments[6:]
    return {
        "gpu": _gpu(device),
        "bytes": memory.nbytes,
        "handle": handle.hex(),
        "storage": [size, offset],
        "counter": [counter.hex(), counter_offset],
        "event": [event.hex(), waits],
    }


def _map_memory(exported: Mapping[str, Any]) -> torch.Tensor:
    """The memory of another process on this process's GPU."""
    device = torch.accelerator.current_device_index()
    if exported["gpu"] != _gpu(device):
        raise WeightFileError(
            f"weights.transport is cuda_ipc, but the learner's weights are on GPU {exported['gpu']} and this engine is "
            f"on {_gpu(device)}; set it to auto"
        )
    rebuild: Any = reductions.rebuild_cuda_tensor
    memory: torch.Tensor = rebuild(
        torch.Tensor,
        (exported["bytes"],),
        (1,),
        0,
        torch.storage.TypedStorage,
        torch.uint8,
        device,
        bytes.fromhex(exported["handle"]),
        *exported["storage"],
        False,
        bytes.fromhex(exported["counter"][0]),
        exported["counter"][1],
        bytes.fromhex(exported["event"][0]),
        exported["event"][1],
    )
    return memory
