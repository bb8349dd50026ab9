"""Weights from a rank to the workers on its GPU. On cores a file in shared memory is the bucket, so all but the two
functions of torch that share a GPU's memory runs, between processes, too. Not yet run on a GPU."""

from __future__ import annotations

import multiprocessing
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhfless.functions.learner.controller import StoreHome
from rlhfless.weights import buckets
from rlhfless.weights.address import StoreAddress
from rlhfless.weights.buckets import BucketReader, BucketStore
from rlhfless.weights.check import WeightFileError
from rlhfless.weights.digest import Digest, device_piece_hash, digest_of
from rlhfless.weights.files import SUFFIX, TensorStream
from rlhfless.weights.store import StoredWeights


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 2048)
    monkeypatch.setattr(buckets, "ARRIVE_S", 1.0)
    monkeypatch.setattr(buckets, "STALL_S", 10.0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BucketStore]:
    store = StoreHome(str(tmp_path), transport="cuda_ipc").open("127.0.0.1")
    assert isinstance(store, BucketStore)
    yield store
    store._listener.close()


def reader(folder: Path, wait_s: float | None = None) -> BucketReader:
    made = StoreAddress("cuda_ipc", str(folder), wait_s=wait_s).connect()
    assert isinstance(made, BucketReader)
    return made


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {
        "flag": torch.tensor([True, False, True]),
        "strided": torch.arange(6.0, dtype=torch.bfloat16).reshape(2, 3).t() * value,
        "empty": torch.zeros(0, 3),
        "weight": torch.full((300, 7), value),  # four buckets and a part
        "scalar": torch.tensor(value),
        "exact": torch.arange(512.0) * value,  # one bucket
        "last": torch.full((5, 2), value),
    }


def received(folder: Path, stored: StoredWeights) -> tuple[str, dict[str, torch.Tensor]]:
    mine = reader(folder)
    digest = Digest(mine.of_piece)
    took = dict(digest.passing(mine.read(stored.location), mine.hashes(stored.location)))
    assert mine.transport == "cuda_ipc"
    return digest.hexdigest(), took


def stream(value: float) -> TensorStream:
    return TensorStream.of(tensors(value))


@pytest.mark.parametrize("workers", [1, 3])
def test_all_workers_take_all_of_it_and_nothing_stays(store: BucketStore, tmp_path: Path, workers: int) -> None:
    for step in (1, 2):
        stored = store.put("run", 1, step, stream(step))
        assert stored.version.digest == digest_of(tensors(step).items(), device_piece_hash)
        with ThreadPoolExecutor(workers) as pool:
            taking = [pool.submit(received, tmp_path, stored) for _ in range(workers)]
            assert store.feed(stored.version, workers, stream(step)) == workers
            for digest, took in (each.result() for each in taking):
                assert digest == stored.version.digest
                assert all(torch.equal(took[name], tensor) for name, tensor in tensors(step).items())
    assert [version.step for version in store.versions()] == [2]
    assert not list(tmp_path.glob(f"*{SUFFIX}"))
    assert not list(tmp_path.glob(".bucket-*")), "the bucket is there for a feed only"


def _in_a_process(folder: Path, stored: StoredWeights, answers: Any) -> None:
    buckets.BUCKET_BYTES = 2048
    answers.put(received(folder, stored)[0])


def test_workers_are_other_processes(store: BucketStore, tmp_path: Path) -> None:
    stored = store.put("run", 1, 1, stream(3.0))
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    workers = [context.Process(target=_in_a_process, args=(tmp_path, stored, answers)) for _ in range(2)]
    for worker in workers:
        worker.start()
    buckets.ARRIVE_S = 120.0  # a process imports torch; the fixture restores it
    assert store.feed(stored.version, 2, stream(3.0)) == 2
    assert [answers.get(timeout=60) for _ in workers] == [stored.version.digest] * 2
    for worker in workers:
        worker.join()


def test_who_asks_for_another_version_is_told(store: BucketStore, tmp_path: Path) -> None:
    old, new = store.put("run", 1, 1, stream(1.0)), store.put("run", 1, 2, stream(2.0))
    with ThreadPoolExecutor(2) as pool:
        late = pool.submit(received, tmp_path, old)
        while not late.running():
            pass
        other = pool.submit(received, tmp_path, new)
        assert store.feed(new.version, 1, stream(2.0)) == 1
        assert other.result()[0] == new.version.digest
        if not late.done():  # it asked after the other: the next feed finds it
            store.feed(new.version, 1, stream(2.0))
        with pytest.raises(WeightFileError, match=r"/2/.* is fed, and not .*/1/"):
            late.result()


def test_a_worker_that_does_not_come_is_not_waited_for_long(store: BucketStore, tmp_path: Path) -> None:
    stored = store.put("run", 1, 1, stream(1.0))
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(received, tmp_path, stored)
        assert store.feed(stored.version, 2, stream(1.0)) == 1
        assert taking.result()[0] == stored.version.digest
    assert store.feed(stored.version, 1, stream(1.0)) == 0


def test_a_worker_that_came_too_late_is_in_the_next_feed(store: BucketStore, tmp_path: Path) -> None:
    stored = store.put("run", 1, 1, stream(1.0))
    assert store.feed(stored.version, 1, stream(1.0)) == 0
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(received, tmp_path, stored)
        assert store.feed(stored.version, 1, stream(1.0)) == 1
        assert late.result()[0] == stored.version.digest


def test_a_feed_that_does_not_begin_is_waited_for_no_longer_than_a_sync(store: BucketStore, tmp_path: Path) -> None:
    stored = store.put("run", 1, 1, stream(1.0))
    with pytest.raises(WeightFileError, match="the learner did not start to feed them within 0 s"):
        next(reader(tmp_path, wait_s=0.2).read(stored.location))


def test_a_worker_that_is_lost_on_the_way_is_left_out(store: BucketStore, tmp_path: Path) -> None:
    stored = store.put("run", 1, 1, stream(1.0))

    def ends() -> None:
        reading = reader(tmp_path).read(stored.location)
        next(reading)
        reading.close()

    with ThreadPoolExecutor(2) as pool:
        lost, taking = pool.submit(ends), pool.submit(received, tmp_path, stored)
        assert store.feed(stored.version, 2, stream(1.0)) == 1
        assert taking.result()[0] == stored.version.digest
        lost.result()


def test_a_worker_that_had_ended_before_does_not_count(store: BucketStore, tmp_path: Path) -> None:
    stored = store.put("run", 1, 1, stream(1.0))
    gone = socket.socket(socket.AF_UNIX)
    gone.connect(str(buckets._socket_path(tmp_path)))
    gone.sendall(f'{{"version": "{stored.version.label}"}}\n'.encode())
    gone.close()
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(received, tmp_path, stored)
        assert store.feed(stored.version, 1, stream(1.0)) == 1
        assert taking.result()[0] == stored.version.digest


def test_a_learner_that_ends_on_the_way_fails_the_load(store: BucketStore, tmp_path: Path) -> None:
    stored = store.put("run", 1, 1, stream(1.0))

    def breaks_off() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(tensors(1.0).items())[:4]
        raise RuntimeError("a rank was lost")

    with ThreadPoolExecutor(1) as pool:
        taking: Future[Any] = pool.submit(received, tmp_path, stored)
        with pytest.raises(RuntimeError, match="a rank was lost"):
            store.feed(stored.version, 1, TensorStream(stream(1.0).layout, breaks_off()))
        with pytest.raises(WeightFileError, match="it ended, or fell silent, on the way"):
            taking.result()


def test_a_worker_where_the_learner_has_no_rank_is_told(tmp_path: Path) -> None:
    stored = StoredWeights(SimpleNamespace(), str(tmp_path / f"run~1~1~{'ab' * 16}{SUFFIX}"), 0, 0)  # type: ignore[arg-type]
    with pytest.raises(WeightFileError, match=r"on GPU cpu: no rank of it is there .*; set weights\.transport to auto"):
        received(tmp_path, stored)


def test_a_stream_that_lacks_a_tensor_is_refused(store: BucketStore) -> None:
    short = TensorStream(stream(1.0).layout, iter(list(tensors(1.0).items())[:-1]))
    with pytest.raises(ValueError, match=r"ended without \['last'\]"):
        store.put("run", 1, 1, short)


def test_a_gpu_bucket_is_exported_for_each_worker_and_mapped(
    store: BucketStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arguments and order are those of torch's own `reduce_tensor` and `rebuild_cuda_tensor`."""
    exports: dict[bytes, torch.Tensor] = {}

    def reduce_tensor(memory: torch.Tensor) -> Any:
        handle = f"handle-{len(exports)}".encode()
        exports[handle] = memory
        ours = (type(memory), memory.size(), memory.stride(), 0, torch.storage.TypedStorage, memory.dtype)
        return None, (*ours, 3, handle, memory.nbytes, 512, False, b"counter", 7, b"event", True)

    def rebuild_cuda_tensor(*arguments: Any) -> torch.Tensor:
        cls, size, stride, offset, storage, dtype, device, handle, size_bytes, storage_offset, *rest = arguments
        assert (cls, stride, offset, dtype, device, storage_offset) == (torch.Tensor, (1,), 0, torch.uint8, 5, 512)
        assert storage is torch.storage.TypedStorage
        assert rest == [False, b"counter", 7, b"event", True]
        assert size == (size_bytes,)
        return exports[handle]

    monkeypatch.setattr(buckets.reductions, "reduce_tensor", reduce_tensor)
    monkeypatch.setattr(buckets.reductions, "rebuild_cuda_tensor", rebuild_cuda_tensor)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 5)  # the worker's own number of that GPU
    exported, lock = buckets._export, threading.Lock()

    def on_gpu(bucket: Any, folder: Path, device: torch.device, readers: list[Any]) -> None:
        bucket._readers, bucket._file = readers, folder / ".none"
        bucket._memory, bucket._pieces, bucket._place = torch.empty(2048, dtype=torch.uint8), [], 0
        for each in list(readers):
            with lock:
                bucket._tell(each, {"bucket": exported(bucket._memory)})

    monkeypatch.setattr(buckets._Bucket, "__init__", on_gpu)
    stored = store.put("run", 1, 1, stream(1.0))
    with ThreadPoolExecutor(2) as pool:
        taking = [pool.submit(received, tmp_path, stored) for _ in range(2)]
        assert store.feed(stored.version, 2, stream(1.0)) == 2
        assert {each.result()[0] for each in taking} == {stored.version.digest}
    assert len(exports) == 2
