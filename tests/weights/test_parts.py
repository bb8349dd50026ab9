"""The bytes of a version in several files: what is written in parts is read as one, and is seen whole or not at all."""

from __future__ import annotations

import mmap
import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhfless.weights import digest, parts
from rlhfless.weights.check import WeightFileError
from rlhfless.weights.digest import digest_of
from rlhfless.weights.http import HttpStore, HttpStoreServer
from rlhfless.weights.parts import OpenVersion, Stripes, TornVersion, drafting, mapped
from rlhfless.weights.store import FolderStore

PAGE = mmap.PAGESIZE


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stripes of a page, over three files."""
    monkeypatch.setattr(parts, "STRIPE_BYTES", PAGE)
    monkeypatch.setattr(parts, "PARTS", 3)


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {f"w{number}": torch.full((PAGE // 2 + 7 * number,), value + number) for number in range(5)}


@given(st.integers(1, 5), st.integers(1, 7), st.integers(0, 100), st.data())
def test_each_byte_is_in_one_place_of_one_file(count: int, stripe: int, size: int, data: st.DataObject) -> None:
    stripes = Stripes(count, stripe)
    places = [(part, at + n) for part, at, length in stripes.over(0, size) for n in range(length)]
    assert len(places) == size
    by_file = [sorted(at for part, at in places if part == number) for number in range(count)]
    assert [len(each) for each in by_file if each] == stripes.sizes(size)
    assert all(each == list(range(len(each))) for each in by_file), "no file has holes"
    start, end = sorted((data.draw(st.integers(0, size)), data.draw(st.integers(0, size))))
    assert [(p, at + n) for p, at, length in stripes.over(start, end) for n in range(length)] == places[start:end]


def test_neighbours_lie_in_different_files() -> None:
    assert [part for part, *_ in Stripes().over(0, 9 * parts.STRIPE_BYTES)] == [*range(parts.PARTS), 0]
    assert Stripes().sizes(parts.STRIPE_BYTES) == [parts.STRIPE_BYTES], "a small version is one file"


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("size", [0, 1, PAGE, 3 * PAGE - 1, 3 * PAGE, 10 * PAGE + 13])
def test_threads_write_it_in_any_order_and_it_is_read_as_one(tmp_path: Path, size: int) -> None:
    data = random.Random(size).randbytes(size)
    starts = list(range(0, size, 1000))
    random.Random(1).shuffle(starts)
    with drafting(tmp_path, tmp_path / "version") as draft, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda start: draft.put(data[start : start + 1000], start), starts))
        draft.finish(size)
        assert mapped(draft.folder)[:size] == data
        assert not (tmp_path / "version").exists(), "it has no name before it is whole"
    assert mapped(tmp_path / "version")[:size] == data
    assert [path.name for path in tmp_path.iterdir()] == ["version"]
    with OpenVersion(tmp_path / "version") as version:
        for start, end in ((0, size), (size // 3, size // 2), (size, size)):
            found = b"".join(os.pread(file.fileno(), n, at) for file, at, n in version.pieces(start, end))
            assert found == data[start:end]


@pytest.mark.usefixtures("short")
def test_what_is_written_to_a_mapping_stays_with_its_reader(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    stored = store.put("run", 0, 0, tensors(1.0))
    mine = dict(store.read(stored.location))
    mine["w3"].fill_(9.0)
    assert digest_of(store.read(stored.location)) == stored.version.digest


@pytest.mark.usefixtures("short")
def test_a_store_of_parts_is_read_here_and_by_other_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "PIECE_BYTES", 1000)
    with HttpStoreServer(tmp_path / "store") as server:
        here, there = FolderStore(tmp_path / "store"), HttpStore(server.token, tmp_path / "cache")
        for step in range(3):
            stored = server.put("run", 0, step, tensors(step))
            assert len(list(here.path(stored.version).iterdir())) == 4
            for store, location in ((here, str(here.path(stored.version))), (there, stored.location)):
                read = dict(store.read(location))
                assert all(torch.equal(read[name], value) for name, value in tensors(step).items())
                assert digest_of(read.items()) == stored.version.digest
                assert store.hashes(location), "sealed: no byte is hashed again"


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("part", ["0", "2", "manifest.json"])
@pytest.mark.parametrize("damage", ["cut", "gone", "longer", "empty"])
def test_damage_of_any_file_is_found(tmp_path: Path, part: str, damage: str) -> None:
    store = FolderStore(tmp_path)
    stored = store.put("run", 0, 0, tensors(1.0))
    file = Path(stored.location) / part
    if damage == "gone":
        file.unlink()
    else:
        size = {"cut": file.stat().st_size - 1, "empty": 0, "longer": file.stat().st_size + 1}[damage]
        os.truncate(file, size)
    with pytest.raises(WeightFileError, match=stored.version.digest):
        dict(store.read(stored.location))
    assert store.put("run", 0, 0, tensors(1.0)) == stored
    assert digest_of(store.read(stored.location)) == stored.version.digest


@pytest.mark.usefixtures("short")
def test_a_changed_byte_of_any_part_breaks_the_seal(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    for part in "012":
        stored = store.put("run", 0, int(part), tensors(float(part)))
        assert store.hashes(stored.location)
        with (Path(stored.location) / part).open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"x")
        assert store.hashes(stored.location) == {}
        assert digest_of(store.read(stored.location)) != stored.version.digest


@pytest.mark.usefixtures("short")
def test_a_writer_that_breaks_off_leaves_nothing(tmp_path: Path) -> None:
    def breaks_off() -> None:
        with drafting(tmp_path, tmp_path / "version") as draft:
            draft.put(bytes(5 * PAGE), 0)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        breaks_off()
    assert list(tmp_path.iterdir()) == []


def test_of_a_dropped_version_only_the_parts_that_are_open_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "STRIPE_BYTES", PAGE)
    monkeypatch.setattr(parts, "PARTS", 3)
    store = FolderStore(tmp_path)

    def inodes(location: str) -> list[int]:
        return [(Path(location) / part).stat().st_ino for part in "012"]

    old = store.put("run", 0, 0, tensors(1.0))
    before = inodes(old.location)
    with (Path(old.location) / "1").open("rb") as reading:
        said = reading.read()
        store.delete(old.version)
        new = store.put("run", 0, 1, tensors(2.0))
        reading.seek(0)
        assert reading.read() == said
    kept = [mine == theirs for mine, theirs in zip(inodes(new.location), before, strict=True)]
    assert kept == [True, False, True]
    assert digest_of(store.read(new.location)) == new.version.digest
    monkeypatch.setattr(parts, "PARTS", 2)  # of another release
    assert digest_of(store.read(new.location)) == new.version.digest, "its manifest says how it was written"
    store.delete(new.version)
    third = store.put("run", 0, 2, tensors(3.0))
    assert {file.name for file in Path(third.location).iterdir()} == {"0", "1", "manifest.json"}
    assert digest_of(store.read(third.location)) == third.version.digest


def test_a_file_in_the_place_of_a_version_is_damage(tmp_path: Path) -> None:
    (tmp_path / "version").write_bytes(b"an older release wrote one file")
    with pytest.raises(TornVersion):
        mapped(tmp_path / "version")
