"""One version for all workers at once: gloo is in the place of NCCL, between threads of one process."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhfless.functions.learner.controller import StoreHome
from rlhfless.weights import broadcast
from rlhfless.weights.address import StoreAddress
from rlhfless.weights.broadcast import BroadcastReader
from rlhfless.weights.check import WeightFileError
from rlhfless.weights.digest import Digest
from rlhfless.weights.files import SUFFIX
from rlhfless.weights.http import HttpStoreServer
from rlhfless.weights.store import StoredWeights

READERS = 2


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {
        "odd": torch.tensor([True, False, True]),  # what follows is not aligned
        "weight": torch.arange(70.0, dtype=torch.bfloat16).reshape(7, 10) * value,
        "bias": torch.arange(5.0) * value,
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(value),
        "last": torch.full((40, 3), value),
    }


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpStoreServer]:
    monkeypatch.setattr(broadcast, "PACK_BYTES", 200)
    monkeypatch.setattr(broadcast, "GATHER_S", 1.0)
    store = StoreHome(str(tmp_path / "store"), "secret", "nccl", READERS).open("127.0.0.1")
    assert isinstance(store, HttpStoreServer)
    with store:
        yield store


def reader(server: HttpStoreServer, tmp_path: Path, node: str) -> Any:
    return StoreAddress("nccl", str(tmp_path / f"cache-{node}"), server.token).connect()


def received(reader: BroadcastReader, stored: StoredWeights) -> tuple[str, str]:
    """The digest of what came, hashed where it came, and how it came."""
    digest = Digest(reader.of_piece)
    for _ in digest.passing(reader.read(stored.location), reader.hashes(stored.location)):
        pass
    transport = reader.transport
    reader.release()
    return digest.hexdigest(), transport


def together(readers: list[BroadcastReader], stored: StoredWeights) -> list[tuple[str, str]]:
    with ThreadPoolExecutor(len(readers)) as pool:
        return list(pool.map(lambda each: received(each, stored), readers))


def test_all_workers_receive_each_version_in_one_broadcast(server: HttpStoreServer, tmp_path: Path) -> None:
    readers = [reader(server, tmp_path, node) for node in "ab"]
    groups = []
    for step in (1, 2, 3):
        stored = server.put("run", 1, step, tensors(step))
        assert together(readers, stored) == [(stored.version.digest, "nccl")] * READERS
        groups.append(readers[0]._group)
    assert groups[0] == groups[1] == groups[2], "the same members stay one group"
    assert not list(tmp_path.glob(f"cache-*/*{SUFFIX}")), "nothing was pulled"


def test_a_replacement_pulls_and_is_in_the_next_broadcast(server: HttpStoreServer, tmp_path: Path) -> None:
    readers = [reader(server, tmp_path, node) for node in "ab"]
    first = server.put("run", 1, 1, tensors(1.0))
    together(readers, first)
    readers[1] = reader(server, tmp_path, "b")
    assert received(readers[1], first) == (first.version.digest, "http")
    second = server.put("run", 1, 2, tensors(2.0))
    assert together(readers, second) == [(second.version.digest, "nccl")] * READERS


def test_workers_that_wait_for_a_lost_one_pull(server: HttpStoreServer, tmp_path: Path) -> None:
    stored = server.put("run", 1, 1, tensors(1.0))
    assert received(reader(server, tmp_path, "a"), stored) == (stored.version.digest, "http")


def test_a_broadcast_that_breaks_off_fails_each_load_and_the_next_one_works(
    server: HttpStoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers = [reader(server, tmp_path, node) for node in "ab"]
    stored = server.put("run", 1, 1, tensors(1.0))
    monkeypatch.setattr(broadcast, "STALL_TIMEOUT_S", 2.0)
    send, parts = broadcast._broadcast, []

    def breaks_off(group: Any, data: torch.Tensor) -> None:
        if group.rank() == 0:
            parts.append(len(data))
            if len(parts) == 2:
                raise OSError("the GPU is gone")
        send(group, data)

    monkeypatch.setattr(broadcast, "_broadcast", breaks_off)
    with ThreadPoolExecutor(READERS) as pool:
        failures = [pool.submit(received, each, stored) for each in readers]
        for failure in failures:
            with pytest.raises(WeightFileError, match="broke off"):
                failure.result()
    readers = [reader(server, tmp_path, node) for node in "ab"]  # as engines are replaced
    again = server.put("run", 1, 2, tensors(2.0))
    assert together(readers, again) == [(again.version.digest, "nccl")] * READERS
