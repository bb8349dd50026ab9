"""Tensors whose memory is given up for a while and comes back: the sleep of a function.

The storage behind a tensor is emptied in place, so each view and alias of it stays what it is, and is whole again after
`restore` (torch's `UntypedStorage.resize_`). What was in it waits in the host's memory: of a GPU's tensors in pinned
memory, which is kept for the next time, because to pin it takes longer than the copy; of a CPU's tensors in a file that
has no name, because their memory is the host's.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import torch

from rlhfless.functions.sharding import local


class Parking:
    """The storages of some tensors, in use or parked. Not thread-safe."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        """Of a sharded tensor, this rank's part. Tensors that share a storage are parked together; one that is mapped
        from a file, as a model's own is on a CPU, is in no device's memory and stays."""
        storages = storages_of(local(tensor.detach()) for tensor in tensors)
        self._storages = [storage for storage in storages if storage.resizable()]
        self._sizes = [storage.nbytes() for storage in self._storages]
        self._pinned: list[torch.Tensor] = []
        self._file: BinaryIO | None = None
        self.parked = False

    @property
    def size_bytes(self) -> int:
        """Of all storages while they are in use."""
        return sum(self._sizes)

    def park(self) -> None:
        """Move what the storages hold, and empty them. Idempotent. If the move fails nothing has changed."""
        if self.parked:
            return
        if self._storages and self._storages[0].device.type == "cuda":
            self._pinned = self._pinned or [_bytes_like(storage) for storage in self._storages]
            for host, storage in zip(self._pinned, self._storages, strict=True):
                host.copy_(_as_bytes(storage), non_blocking=True)
            torch.cuda.synchronize()
        else:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - open until `restore`
            for storage in self._storages:
                self._file.write(_view(storage))
            self._file.flush()
        self.parked = True
        for storage in self._storages:
            storage.resize_(0)
        give_back_free_memory()

    def restore(self) -> None:
        """Fill the storages again. Idempotent. Raises MemoryError, or torch's OutOfMemoryError, if the device is still
        in use; what was parked stays parked then."""
        if not self.parked:
            return
        try:
            for storage, size in zip(self._storages, self._sizes, strict=True):
                storage.resize_(size)
        except BaseException:
            for storage in self._storages:
                storage.resize_(0)
            raise
        if self._file is not None:
            self._file.seek(0)
            for storage in self._storages:
                _read_into(self._file, storage)
            self._file.close()
            self._file = None
        else:
            for storage, host in zip(self._storages, self._pinned, strict=True):
                _as_bytes(storage).copy_(host, non_blocking=True)
            if self._pinned:
                torch.cuda.synchronize()
        self.parked = False


def storages_of(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """The storages of tensors, each once, without those that hold nothing."""
    storages = {storage.data_ptr(): storage for tensor in tensors if (storage := tensor.untyped_storage()).nbytes()}
    return list(storages.values())


def held_bytes(device: torch.device) -> int:
    """What is in use: of a GPU by all processes on it; of the memory of a CPU by this process, without mapped files."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon:"))


def give_back_free_memory() -> None:
    """What allocators keep for their next request goes back to the device and to the system."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    program = ctypes.CDLL(None)
    # vLLM preloads tcmalloc; where it is not, the functions are glibc's.
    release = getattr(program, "MallocExtension_ReleaseFreeMemory", None)
    if release is not None:
        release()
    trim = getattr(program, "malloc_trim", None)
    if trim is not None:
        trim(0)


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]


def _view(storage: torch.UntypedStorage) -> memoryview:
    array: Any = _as_bytes(storage).numpy()
    return memoryview(array)


def _bytes_like(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)


def _read_into(file: BinaryIO, storage: torch.UntypedStorage) -> None:
    view = _view(storage)
    while len(view):
        count = file.readinto(view)  # type: ignore[attr-defined]
        if not count:
            raise OSError("the file of a sleeping function's state is shorter than the state")
        view = view[count:]
