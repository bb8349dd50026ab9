"""Offload tensors to the host and back, to let a function sleep.

Only the memory is released: tensors, views and aliases stay valid, and have their values again after `restore`. On a
GPU a storage is resized to 0 in place (torch's `UntypedStorage.resize_`), and its content is kept in pinned memory,
which stays allocated because pinning takes longer than the copy. On a CPU `madvise` releases the pages, and an
unnamed file keeps their content.
"""

from __future__ import annotations

import ctypes
import mmap
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import torch

from rlhfless.functions.sharding import local

GIB = 2**30

RELEASE_S = 30.0
"""Longest wait for memory that another process is releasing."""

RELEASE_POLL_S = 0.1

_LIBRARY = ctypes.CDLL(None, use_errno=True)


class HostOffload:
    """Storages of tensors, in use or offloaded. Not thread-safe."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        """Offload only this rank's shard of sharded tensors. Tensors that share a storage are offloaded together."""
        self._storages = storages_of(local(tensor.detach()) for tensor in tensors)
        self._sizes = [storage.nbytes() for storage in self._storages]
        self._pinned: list[torch.Tensor] = []
        self._file: BinaryIO | None = None
        self.offloaded = False

    @property
    def size_bytes(self) -> int:
        """Bytes of all storages in use."""
        return sum(self._sizes)

    def offload(self) -> None:
        """Copy the storages to the host and release their memory. Idempotent. A failed copy changes nothing."""
        if self.offloaded:
            return
        if self._on_gpu:
            self._pinned = self._pinned or [torch.empty(size, dtype=_BYTE, pin_memory=True) for size in self._sizes]
            for host, storage in zip(self._pinned, self._storages, strict=True):
                host.copy_(_as_bytes(storage), non_blocking=True)
            torch.cuda.synchronize()
        else:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - open until `restore`
            for storage in self._storages:
                self._file.write(_view(storage))
            self._file.flush()
        self.offloaded = True
        empty(self._storages)
        give_back_free_memory()

    def restore(self) -> None:
        """Fill the storages again. Idempotent. Raises MemoryError, and stays offloaded, if the GPU is still in use."""
        if not self.offloaded:
            return
        if self._on_gpu:
            require_free(self._storages[0].device, self.size_bytes)
        refill(self._storages, self._sizes)
        if self._on_gpu:
            for host, storage in zip(self._pinned, self._storages, strict=True):
                _as_bytes(storage).copy_(host, non_blocking=True)
            torch.cuda.synchronize()
        elif self._file is not None:
            self._file.seek(0)
            for storage in self._storages:
                _read_into(self._file, storage)
            self._file.close()
            self._file = None
        self.offloaded = False

    @contextmanager
    def lent(self, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
        """Fill some offloaded tensors within the block; writes to them are lost."""
        wanted = [local(tensor.detach()).untyped_storage() for tensor in tensors] if self.offloaded else []
        # Compare by identity: an emptied storage has no address.
        chosen = [number for number, mine in enumerate(self._storages) if any(each is mine for each in wanted)]
        storages = [self._storages[number] for number in chosen]
        refill(storages, [self._sizes[number] for number in chosen])
        try:
            for number, storage in zip(chosen, storages, strict=True):
                if self._on_gpu:
                    _as_bytes(storage).copy_(self._pinned[number], non_blocking=True)
                elif self._file is not None:
                    self._file.seek(sum(self._sizes[:number]))
                    _read_into(self._file, storage)
            yield
        finally:
            if self._on_gpu:
                torch.cuda.synchronize()
            empty(storages)

    @property
    def _on_gpu(self) -> bool:
        return bool(self._storages) and self._storages[0].device.type == "cuda"


def kept_by(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors of a frozen model."""
    yield from model.parameters()
    yield from model.buffers()


def storages_of(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Return the non-empty storages of tensors, each once."""
    storages = {storage.data_ptr(): storage for tensor in tensors if (storage := tensor.untyped_storage()).nbytes()}
    return list(storages.values())


def empty(storages: Iterable[torch.UntypedStorage]) -> None:
    """Release the memory of storages, with its content."""
    for storage in storages:
        if storage.device.type == "cuda":
            storage.resize_(0)
        else:
            _give_back_pages(storage)


def refill(storages: list[torch.UntypedStorage], sizes: list[int]) -> None:
    """Allocate emptied storages, without their values: all of them, or none if memory is short."""
    try:
        for storage, size in zip(storages, sizes, strict=True):
            if storage.nbytes() != size:  # pages on a CPU are allocated when touched
                storage.resize_(size)
    except BaseException:
        empty(storages)
        raise


def _give_back_pages(storage: torch.UntypedStorage) -> None:
    """Release the pages that a storage does not share."""
    begin = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (storage.data_ptr() + storage.nbytes() - begin) // mmap.PAGESIZE * mmap.PAGESIZE
    if size > 0 and _LIBRARY.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), mmap.MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), "the system did not take back the memory of a sleeping function")


def held_bytes(device: torch.device) -> int:
    """Return the bytes in use: on a GPU by all processes, on a CPU by this one, without mapped files."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon:"))


def require_free(device: torch.device, size_bytes: int, wait_s: float = RELEASE_S) -> None:
    """Wait until a GPU has `size_bytes` free. Raises MemoryError after `wait_s`.

    A killed process releases its memory only once the driver has torn its context down, which takes 1 to 3 s for 60
    GB: a function that wakes right after it must wait and not fail.
    """
    deadline = time.monotonic() + wait_s
    free, total = torch.cuda.mem_get_info(device)
    while free < size_bytes and time.monotonic() < deadline:
        time.sleep(RELEASE_POLL_S)
        free, total = torch.cuda.mem_get_info(device)
    if free < size_bytes:
        raise MemoryError(
            f"{size_bytes / GIB:.2f} GiB are needed to wake, but only {free / GIB:.2f} of {total / GIB:.2f} GiB are "
            f"free: "
            "another function, or another program, holds the device"
        )


def give_back_free_memory() -> None:
    """Return the allocators' free memory to the device and the system."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    # The allocator is tcmalloc if vLLM preloads it, else glibc's malloc.
    for name, arguments in (("MallocExtension_ReleaseFreeMemory", ()), ("malloc_trim", (0,))):
        function = getattr(_LIBRARY, name, None)
        if function is not None:
            function(*arguments)


_BYTE = torch.uint8


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=_BYTE, device=storage.device).set_(storage)  # type: ignore[call-overload]


def _view(storage: torch.UntypedStorage) -> memoryview:
    return memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())).cast("B")


def _read_into(file: BinaryIO, storage: torch.UntypedStorage) -> None:
    view = _view(storage)
    while len(view):
        count = file.readinto(view)  # type: ignore[attr-defined]
        if not count:
            raise OSError("the file of a sleeping function's state is shorter than the state")
        view = view[count:]
