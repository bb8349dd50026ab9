"""Weights on the learner's GPU. The two functions of torch that share memory between processes are replaced: what one
exports the other finds in a table. Not yet run on a GPU."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhfless.functions.learner.actor import StoreHome
from rlhfless.weights import cuda_ipc
from rlhfless.weights.address import StoreAddress
from rlhfless.weights.cuda_ipc import IpcReader, IpcStore
from rlhfless.weights.device_hash import device_piece_hash
from rlhfless.weights.digest import Digest, digest_of
from rlhfless.weights.errors import WeightFileError
from rlhfless.weights.files import SUFFIX
from rlhfless.weights.store import StoredWeights

EXPORTED: dict[bytes, torch.Tensor] = {}


def reduce_tensor(memory: torch.Tensor) -> Any:
    handle = f"handle-{len(EXPORTED)}".encode()
    EXPORTED[handle] = memory
    ours = (type(memory), memory.size(), memory.stride(), 0, torch.storage.TypedStorage, memory.dtype)
    return None, (*ours, 3, handle, memory.nbytes, 512, False, b"counter", 7, b"event", True)


def rebuild_cuda_tensor(*arguments: Any) -> torch.Tensor:
    """Takes what torch's own takes, in its order."""
    cls, size, stride, offset, storage, dtype, device, handle, size_bytes, storage_offset, *rest = arguments
    assert (cls, stride, offset, dtype, device, storage_offset) == (torch.Tensor, (1,), 0, torch.uint8, 5, 512)
    assert storage is torch.storage.TypedStorage
    assert rest == [False, b"counter", 7, b"event", True]
    assert size == (size_bytes,)
    return EXPORTED[handle]


@pytest.fixture(autouse=True)
def same_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    EXPORTED.clear()
    monkeypatch.setattr(cuda_ipc.reductions, "reduce_tensor", reduce_tensor)
    monkeypatch.setattr(cuda_ipc.reductions, "rebuild_cuda_tensor", rebuild_cuda_tensor)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="GPU-1"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 5)  # the engine's own number of that GPU


@pytest.fixture
def store(tmp_path: Path) -> IpcStore:
    store = StoreHome(str(tmp_path), transport="cuda_ipc").open("127.0.0.1")
    assert isinstance(store, IpcStore)
    return store


@pytest.fixture
def reader(tmp_path: Path) -> IpcReader:
    reader = StoreAddress("cuda_ipc", str(tmp_path)).connect()
    assert isinstance(reader, IpcReader)
    return reader


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {
        "flag": torch.tensor([True, False, True]),
        "strided": torch.arange(6.0, dtype=torch.bfloat16).reshape(2, 3).t() * value,
        "empty": torch.zeros(0, 3),
        "weight": torch.full((300, 7), value),
    }


def received(reader: IpcReader, stored: StoredWeights) -> str:
    digest = Digest(reader.of_piece)
    for _ in digest.passing(reader.read(stored.location), reader.hashes(stored.location)):
        pass
    return digest.hexdigest()


def test_each_version_is_read_from_the_learners_memory(store: IpcStore, reader: IpcReader, tmp_path: Path) -> None:
    for step in (1, 2):
        stored = store.put("run", 1, step, tensors(step))
        assert (received(reader, stored), reader.transport) == (stored.version.digest, "cuda_ipc")
        mapped = dict(reader.read(stored.location))
        assert all(torch.equal(mapped[name], tensor) for name, tensor in tensors(step).items())
        assert mapped["weight"].untyped_storage().data_ptr() == EXPORTED[b"handle-0"].data_ptr(), "no copy"
        reader.release()
    assert len(EXPORTED) == 1, "all versions take turns in one piece of memory"
    assert not list(tmp_path.glob(f"*{SUFFIX}"))
    assert [version.step for version in store.versions()] == [2]


def test_the_digest_is_that_of_the_devices(store: IpcStore) -> None:
    stored = store.put("run", 1, 1, tensors(1.0))
    assert stored.version.digest == digest_of(tensors(1.0).items(), device_piece_hash)
    assert stored.tensors == 4


def test_the_perturbed_version_is_a_file_and_stays(store: IpcStore, reader: IpcReader) -> None:
    perturbed = store.put("run", 1, -1, tensors(3.0))
    store.put("run", 1, 1, tensors(1.0))
    assert received(reader, perturbed) == perturbed.version.digest
    assert reader.transport in ("file", "shared_memory")


def test_a_version_that_was_written_over_is_gone(store: IpcStore, reader: IpcReader) -> None:
    first = store.put("run", 1, 1, tensors(1.0))
    second = store.put("run", 1, 2, tensors(2.0))
    with pytest.raises(WeightFileError, match="already deleted as an old version"):
        received(reader, first)
    assert received(reader, second) == second.version.digest
    reader.release()
    store.retain(set())
    with pytest.raises(WeightFileError):
        received(reader, second)


def test_the_learner_waits_for_an_engine_that_uses_the_memory(store: IpcStore, reader: IpcReader) -> None:
    first = store.put("run", 1, 1, tensors(1.0))
    used = dict(reader.read(first.location))
    learner = threading.Thread(target=lambda: store.put("run", 1, 2, tensors(2.0)))
    learner.start()
    learner.join(0.2)
    assert used["weight"].eq(1.0).all(), "it has not been written over"
    reader.release()
    learner.join(60)
    assert [version.step for version in store.versions()] == [2]


def test_an_engine_that_never_ends_is_named(
    store: IpcStore, reader: IpcReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = store.put("run", 1, 1, tensors(1.0))
    next(iter(reader.read(stored.location)))
    held = reader._lock
    monkeypatch.setattr(cuda_ipc, "_LOCK_TIMEOUT_S", 0.0)
    with pytest.raises(TimeoutError, match="which an engine reads"):
        store.put("run", 1, 2, tensors(2.0))
    assert held is not None


def test_an_engine_on_another_gpu_is_refused(
    store: IpcStore, reader: IpcReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = store.put("run", 1, 1, tensors(1.0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="GPU-2"))
    with pytest.raises(WeightFileError, match=r"on GPU GPU-1 and this engine is on GPU-2; set it to auto"):
        received(reader, stored)
