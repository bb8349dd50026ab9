"""A version written by several at once is the one that a single writer gives."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Mapping
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch

from rlhfless.weights import parts
from rlhfless.weights.coauthors import Begun, write_share
from rlhfless.weights.digest import digest_of, piece_hash
from rlhfless.weights.files import TensorStream
from rlhfless.weights.http import HttpStoreServer
from rlhfless.weights.store import FolderStore, StoreFull, known_hashes

PAGE = mmap.PAGESIZE


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stripes of a page, over three files: neighbouring tensors share pages and files."""
    monkeypatch.setattr(parts, "STRIPE_BYTES", PAGE)
    monkeypatch.setattr(parts, "PARTS", 3)


def tensors(value: float = 0.0) -> dict[str, torch.Tensor]:
    return {f"w{number}": torch.full((PAGE // 3 + 7 * number,), value + number) for number in range(7)}


def share(everything: Mapping[str, torch.Tensor], number: int, of: int) -> TensorStream:
    layout = TensorStream.of(everything).layout
    chosen = [pair for index, pair in enumerate(everything.items()) if index % of == number]
    return TensorStream(layout, iter(chosen))


class Threads:
    """Coauthors in threads of this process."""

    def __init__(self, everything: Mapping[str, torch.Tensor], writers: int, failing: int | None = None) -> None:
        self._everything, self._writers, self._failing = everything, writers, failing
        self._answers: Queue[Any] = Queue()

    def begin(self, begun: Begun) -> None:
        for number in range(1, self._writers):
            threading.Thread(target=self._write, args=(begun, number)).start()

    def _write(self, begun: Begun, number: int) -> None:
        try:
            if number == self._failing:
                raise OSError(28, "No space left on device")
            self._answers.put(write_share(begun, share(self._everything, number, self._writers), piece_hash))
        except OSError as error:
            self._answers.put(error)

    def hashes(self) -> Mapping[str, bytes]:
        found = {}
        for _ in range(1, self._writers):
            answer = self._answers.get(timeout=60)
            if isinstance(answer, OSError):
                raise answer
            found |= answer
        return found


@pytest.mark.parametrize("writers", [1, 2, 3])
def test_several_writers_are_one(tmp_path: Path, writers: int) -> None:
    everything = tensors()
    alone = FolderStore(tmp_path / "alone").put("run", 1, 1, everything)
    store = FolderStore(tmp_path / "store")
    stored = store.put("run", 1, 1, share(everything, 0, writers), Threads(everything, writers))
    assert (stored.version, stored.size_bytes, stored.tensors) == (alone.version, alone.size_bytes, alone.tensors)
    read = dict(store.read(stored.location))
    assert all(torch.equal(read[name], value) for name, value in everything.items())
    assert digest_of(read.items()) == stored.version.digest
    ours, theirs = (known_hashes(Path(each.location), each.version.digest) for each in (stored, alone))
    assert ours == theirs
    assert ours.keys() == everything.keys()


def test_the_files_of_a_dropped_version_are_written_again_by_all(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    for step in (1, 2, 3):
        everything = tensors(10.0 * step)
        stored = store.put("run", 1, step, share(everything, 0, 2), Threads(everything, 2))
        read = {name: value.clone() for name, value in store.read(stored.location)}
        assert all(torch.equal(read[name], value) for name, value in everything.items())
        store.delete(stored.version)


def test_a_server_has_coauthors_too(tmp_path: Path) -> None:
    everything = tensors()
    with HttpStoreServer(tmp_path) as server:
        stored = server.put("run", 1, 1, share(everything, 0, 2), Threads(everything, 2))
        assert server.versions() == (stored.version,)


def test_a_coauthor_that_fails_leaves_no_version(tmp_path: Path) -> None:
    everything, store = tensors(), FolderStore(tmp_path)
    with pytest.raises(StoreFull, match="does not fit"):
        store.put("run", 1, 1, share(everything, 0, 3), Threads(everything, 3, failing=2))
    assert store.versions() == ()


def test_a_tensor_that_nobody_writes_is_missed(tmp_path: Path) -> None:
    everything, store = tensors(), FolderStore(tmp_path)
    with pytest.raises(ValueError, match="the stream ended without"):
        store.put("run", 1, 1, share(everything, 0, 3), Threads(everything, 1))
    assert store.versions() == ()
