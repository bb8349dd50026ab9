"""One contract for all stores: a published version can be read, complete and right, by many, until none needs it."""

import multiprocessing
import os
import shutil
import stat
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlhfless.records import WeightVersion
from rlhfless.weights import digest as digest_module
from rlhfless.weights import http, parts
from rlhfless.weights import store as store_module
from rlhfless.weights.address import StoreAddress
from rlhfless.weights.check import WeightFileError
from rlhfless.weights.digest import Digest, digest_of
from rlhfless.weights.files import file_name, version_of
from rlhfless.weights.http import HttpStoreServer
from rlhfless.weights.store import FolderStore, StoredWeights, WeightReader, WeightStore


@dataclass
class Pair:
    """The two sides of one store."""

    store: WeightStore
    address: StoreAddress
    folder: Path
    """Where the publisher's files lie."""

    def reader(self) -> WeightReader:
        return self.address.connect()


@pytest.fixture(params=["folder", "http"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    folder = tmp_path / "store"
    if request.param == "folder":
        yield Pair(FolderStore(folder), StoreAddress("file", str(folder)), folder)
        return
    with HttpStoreServer(folder) as server:
        yield Pair(server, StoreAddress("http", str(tmp_path / "cache"), server.token), folder)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[HttpStoreServer]:
    with HttpStoreServer(tmp_path / "store") as server:
        yield server


def _tensors(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {
        "layer.weight": torch.full((300, 7), value, dtype=torch.bfloat16),
        "layer.bias": torch.arange(7, dtype=torch.float32) * value,
        "strided": torch.arange(6.0).reshape(2, 3).t() * value,
        "scalar": torch.tensor(value),
        "flag": torch.tensor([True, False]),
        "empty": torch.zeros(0, 3),
    }


def _same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


def test_what_is_put_can_be_read(pair: Pair) -> None:
    stored = pair.store.put("run-1", 2, 3, _tensors())
    assert stored.version == WeightVersion("run-1", 2, 3, digest_of(_tensors().items()))
    assert stored.tensors == 6
    assert _same(dict(pair.reader().read(stored.location)), _tensors())


def test_a_small_version_is_one_file_of_plain_safetensors(pair: Pair) -> None:
    stored = pair.store.put("run", 0, 0, _tensors())
    path = pair.folder / file_name(stored.version)
    assert {file.name for file in path.iterdir()} == {"0", "manifest.json"}
    assert _same(load_file(path / "0"), _tensors())
    assert stored.size_bytes == (path / "0").stat().st_size


def test_tied_tensors_are_published_under_both_names(pair: Pair) -> None:
    shared = torch.randn(4, 4)
    stored = pair.store.put("run", 0, 0, {"embed": shared, "head": shared})
    assert _same(dict(pair.reader().read(stored.location)), {"embed": shared, "head": shared})


def test_the_same_weights_twice_are_one_version(pair: Pair) -> None:
    first = pair.store.put("run", 0, 1, _tensors())
    inode = (pair.folder / file_name(first.version)).stat().st_ino
    assert pair.store.put("run", 0, 1, _tensors()) == first
    assert (pair.folder / file_name(first.version)).stat().st_ino == inode
    assert pair.store.versions() == (first.version,)


@pytest.mark.parametrize("damage", ["cut", "changed", "part gone", "gone"])
def test_a_damaged_version_is_written_again(pair: Pair, damage: str) -> None:
    stored = pair.store.put("run", 1, 5, _tensors())
    path = pair.folder / file_name(stored.version)
    part = path / "0"
    if damage == "cut":
        os.truncate(part, stored.size_bytes // 2)
    elif damage == "changed":
        part.write_bytes(part.read_bytes()[:-1] + b"x")
    elif damage == "part gone":
        part.unlink()
    else:
        shutil.rmtree(path)
    assert pair.store.put("run", 1, 5, _tensors()) == stored
    assert digest_of(pair.reader().read(stored.location)) == stored.version.digest


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_others_can_neither_list_nor_read_weights(umask: int, tmp_path: Path) -> None:
    """Nor write what actors draw with; whatever the umask, and also in a folder that was open to all before."""
    opened = tmp_path / "opened"
    opened.mkdir(mode=0o755)
    before = os.umask(umask)
    try:
        with HttpStoreServer(tmp_path / "store") as server:
            location = server.put("run", 1, 1, _tensors()).location
            address = StoreAddress("http", str(tmp_path / "cache"), server.token)
            assert list(address.connect().read(location))
        FolderStore(opened)
    finally:
        os.umask(before)
    assert {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("store", "cache", "opened")} == {0o700}


def test_versions_are_in_order(pair: Pair) -> None:
    put = [pair.store.put("run", attempt, step, _tensors(step)) for attempt, step in ((1, 9), (0, 11), (1, 10))]
    assert [(v.attempt, v.step) for v in pair.store.versions()] == [(0, 11), (1, 9), (1, 10)]
    assert set(pair.store.versions()) == {stored.version for stored in put}


def test_a_deleted_version_can_no_longer_be_read(pair: Pair) -> None:
    old, new = pair.store.put("run", 0, 1, _tensors(1)), pair.store.put("run", 0, 2, _tensors(2))
    pair.store.delete(old.version)
    assert pair.store.versions() == (new.version,)
    pair.store.delete(old.version)  # gone already: no error
    with pytest.raises(WeightFileError, match=rf"(?s){old.version.digest}.*"):
        dict(pair.reader().read(old.location))


def test_a_reader_keeps_what_it_opened(pair: Pair) -> None:
    stored = pair.store.put("run", 0, 1, _tensors())
    reading = pair.reader().read(stored.location)
    read = dict([next(reading)])
    pair.store.delete(stored.version)
    read |= dict(reading)
    assert _same(read, _tensors())


def test_empty_weights_are_refused(pair: Pair) -> None:
    with pytest.raises(ValueError, match="run 'run', step 4"):
        pair.store.put("run", 0, 4, {})


def test_unsafe_run_ids_are_refused(pair: Pair) -> None:
    for run_id in ("a/b", "../a", "a~b", ".hidden"):
        with pytest.raises(ValueError, match="run id"):
            pair.store.put(run_id, 0, 0, _tensors())


def _digest_read(address: StoreAddress, location: str) -> str:
    return digest_of(address.connect().read(location))


def test_many_processes_read_at_the_same_time(pair: Pair) -> None:
    stored = pair.store.put("run", 0, 1, {"w": torch.randn(1 << 20)})
    # spawn: a fork of a process with threads (the HTTP server's) may deadlock
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        digests = pool.starmap(_digest_read, [(pair.address, stored.location)] * 4)
    assert digests == [stored.version.digest] * 4


def test_readers_never_see_half_a_version(pair: Pair) -> None:
    """While versions are published and dropped, every version that is listed reads as what it says."""
    stop = threading.Event()
    folder = FolderStore(pair.folder)

    def watch() -> int:
        seen = 0
        while not stop.is_set():
            for version in folder.versions():
                try:
                    digest = digest_of(folder.read(str(folder.path(version))))
                except WeightFileError as error:
                    if "do not exist" in str(error):  # dropped after it was listed
                        continue
                    raise
                assert digest == version.digest
                seen += 1
        return seen

    with ThreadPoolExecutor(2) as pool:
        watchers = [pool.submit(watch) for _ in range(2)]
        for step in range(40):
            pair.store.put("run", 0, step, {"w": torch.full((50_000,), float(step))})
            for older in pair.store.versions()[:-1]:
                pair.store.delete(older)
        stop.set()
        assert all(watcher.result(timeout=30) > 0 for watcher in watchers)


def test_a_version_that_goes_while_it_is_opened_is_said_to_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opened are the manifest first and the parts after it; the version can go between the two."""
    store = FolderStore(tmp_path)
    stored = store.put("run", 0, 0, _tensors())
    sizes = parts.Stripes.sizes

    def too_late(stripes: parts.Stripes, size_bytes: int) -> list[int]:
        store.delete(stored.version)
        return sizes(stripes, size_bytes)

    monkeypatch.setattr(parts.Stripes, "sizes", too_late)
    with pytest.raises(WeightFileError, match="do not exist"):
        dict(store.read(stored.location))


def test_a_failed_publish_leaves_nothing(pair: Pair) -> None:
    with pytest.raises(KeyError):  # a dtype that safetensors has no name for
        pair.store.put("run", 0, 0, {"w": torch.ones(2, dtype=torch.complex64)})
    assert [path for path in pair.folder.iterdir() if path.name != ".lock"] == []
    assert pair.store.versions() == ()


@pytest.mark.parametrize("keep_bytes", [0, 7, 100, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, keep_bytes: int) -> None:
    store = FolderStore(tmp_path)
    stored = store.put("run", 0, 0, _tensors())
    os.truncate(Path(stored.location) / "0", keep_bytes % stored.size_bytes)
    with pytest.raises(WeightFileError) as refused:
        dict(store.read(stored.location))
    assert stored.location in str(refused.value)
    assert stored.version.digest in str(refused.value)


def test_a_changed_byte_shows_in_the_digest(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    stored = store.put("run", 0, 0, _tensors())
    part = Path(stored.location) / "0"
    data = bytearray(part.read_bytes())
    data[-20] ^= 1
    part.write_bytes(data)
    assert digest_of(store.read(stored.location)) != stored.version.digest


def test_names_are_reversible() -> None:
    version = WeightVersion("my-run-1", 3, 14, "ab" * 16)
    assert version_of(f"http://host:1/versions/{file_name(version)}") == version
    with pytest.raises(ValueError, match="not a version of weights"):
        version_of("/somewhere/model.bin")


# --- HTTP alone


def _put(served: HttpStoreServer, step: int = 0) -> StoredWeights:
    return served.put("run", 0, step, {"w": torch.full((1 << 18,), float(step))})


def test_http_wants_the_token(served: HttpStoreServer, tmp_path: Path) -> None:
    stored = _put(served)
    with pytest.raises(WeightFileError, match=f"{stored.version.digest}.*401"):
        dict(http.HttpStore("wrong", tmp_path / "cache").read(stored.location))


def test_http_serves_versions_and_nothing_else(served: HttpStoreServer, tmp_path: Path) -> None:
    (tmp_path / "store" / "secret.txt").write_text("x")
    for path in ("/versions/secret.txt", "/versions/../secret.txt", "/secret.txt", "/versions/", "/"):
        request = urllib.request.Request(served.url + path, headers={"Authorization": f"Bearer {served.token}"})
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=10)
        assert refused.value.code == 404


def test_http_downloads_once_per_node(served: HttpStoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = _put(served)
    downloads: list[str] = []
    download = http.HttpStore._download

    def counting(self: http.HttpStore, url: str, *given: object) -> None:
        downloads.append(url)
        download(self, url, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(http.HttpStore, "_download", counting)
    readers = [http.HttpStore(served.token, tmp_path / "cache") for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        digests = list(pool.map(lambda reader: digest_of(reader.read(stored.location)), readers))
    assert digests == [stored.version.digest] * 8
    assert downloads == [stored.location]


def test_http_fetches_a_file_of_the_cache_that_was_cut_short_again(served: HttpStoreServer, tmp_path: Path) -> None:
    stored = _put(served)
    reader = http.HttpStore(served.token, tmp_path / "cache")
    dict(reader.read(stored.location))
    os.truncate(tmp_path / "cache" / file_name(stored.version) / "0", stored.size_bytes // 2)
    assert digest_of(reader.read(stored.location)) == stored.version.digest


def test_http_continues_an_interrupted_download(
    served: HttpStoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = _put(served)
    ranges: list[str | None] = []
    answer = http._Handler._answer

    def hang_up_once(self: http._Handler, size: int, pieces: http.Pieces) -> None:
        ranges.append(self.headers.get("Range"))
        if len(ranges) == 1:
            self.send_response(206)
            self.send_header("Content-Range", f"bytes 0-{stored.size_bytes - 1}/{stored.size_bytes}")
            self.send_header("Content-Length", str(stored.size_bytes))
            self.end_headers()
            ((part, start, length),) = pieces(0, 1000)
            self.connection.sendfile(part, start, length)
            self.close_connection = True
        else:
            answer(self, size, pieces)

    monkeypatch.setattr(http._Handler, "_answer", hang_up_once)
    assert digest_of(http.HttpStore(served.token, tmp_path / "cache").read(stored.location)) == (stored.version.digest)
    piece = http._PIECE_BYTES
    assert ranges == [f"bytes=0-{piece - 1}", f"bytes=1000-{piece - 1}"]


def test_http_fetches_a_version_in_pieces(
    served: HttpStoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "_PIECE_BYTES", 100_000)
    ranges: list[str | None] = []
    answer = http._Handler._answer

    def noting(self: http._Handler, size: int, pieces: http.Pieces) -> None:
        ranges.append(self.headers.get("Range"))
        answer(self, size, pieces)

    monkeypatch.setattr(http._Handler, "_answer", noting)
    stored = _put(served)
    reader = http.HttpStore(served.token, tmp_path / "cache")
    assert digest_of(reader.read(stored.location)) == stored.version.digest
    assert sorted(ranges, key=str) == sorted(
        f"bytes={start}-{start + 99_999}" for start in range(0, stored.size_bytes, 100_000)
    )


def test_http_readers_beside_the_server_read_its_folder(served: HttpStoreServer, tmp_path: Path) -> None:
    """A cache there would hold the same bytes once more."""
    stored = _put(served)
    beside = StoreAddress("http", str(tmp_path / "cache"), served.token, home=str(tmp_path / "store")).connect()
    assert digest_of(beside.read(stored.location)) == stored.version.digest
    assert FolderStore(tmp_path / "cache").versions() == ()
    elsewhere = StoreAddress("http", str(tmp_path / "cache"), served.token, home=str(tmp_path / "nowhere")).connect()
    assert digest_of(elsewhere.read(stored.location)) == stored.version.digest
    assert FolderStore(tmp_path / "cache").versions() == (stored.version,)


# --- what is hashed once on a node


def test_bytes_that_were_hashed_on_this_node_are_not_hashed_again(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, reader = pair.store.put("run", 0, 1, _tensors()), pair.reader()
    known = reader.hashes(stored.location)
    monkeypatch.setattr(digest_module, "hash_of", None)  # a call of it fails
    consumed = Digest()
    assert _same(dict(consumed.passing(reader.read(stored.location), known)), _tensors())
    assert (consumed.hexdigest(), consumed.tensors) == (stored.version.digest, 6)


@pytest.mark.parametrize("how", ["written to", "replaced", "copied", "other machine"])
def test_of_a_file_that_was_changed_no_hash_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    store = FolderStore(tmp_path / "store")
    old, stored = store.put("run", 0, 0, _tensors(2.0)), store.put("run", 0, 1, _tensors())
    path = Path(stored.location) / "0"
    assert store.hashes(stored.location)
    if how == "written to":
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"x")
    elif how == "replaced":
        (Path(old.location) / "0").rename(path)
    elif how == "copied":
        path.write_bytes(path.read_bytes())
    else:
        monkeypatch.setattr(store_module, "_boot", lambda: "another boot")
    assert store.hashes(stored.location) == {}


def test_http_refuses_a_damaged_download_and_caches_none(served: HttpStoreServer, tmp_path: Path) -> None:
    stored = _put(served)
    path = tmp_path / "store" / file_name(stored.version) / "0"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(WeightFileError, match=f"expected digest {stored.version.digest}, received"):
        dict(http.HttpStore(served.token, tmp_path / "cache").read(stored.location))
    assert {entry.name for entry in (tmp_path / "cache").iterdir()} == {".lock"}


def test_http_gives_up_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_FIRST_PAUSE_S", 0.001)
    with HttpStoreServer(tmp_path / "store") as server:
        stored = _put(server)
    with pytest.raises(WeightFileError, match=r"5 attempts failed: .*[Rr]efused"):
        dict(http.HttpStore(server.token, tmp_path / "cache").read(stored.location))


def test_http_keeps_the_last_two_versions_of_the_cache(served: HttpStoreServer, tmp_path: Path) -> None:
    reader = http.HttpStore(served.token, tmp_path / "cache")
    stored = [_put(served, step) for step in range(4)]
    for version in stored:
        dict(reader.read(version.location))
    cached = FolderStore(tmp_path / "cache").versions()
    assert [version.step for version in cached] == [2, 3]


# --- the file of a dropped version


def _inode(stored: StoredWeights) -> int:
    return (Path(stored.location) / "0").stat().st_ino


def test_a_new_version_is_written_over_one_that_was_dropped(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    old = store.put("run", 0, 0, _tensors(5.0) | {"more": torch.ones(9000)})
    kept = store.put("run", 0, 1, _tensors(2.0))
    inode = _inode(old)
    store.delete(old.version)
    with pytest.raises(WeightFileError):
        dict(store.read(old.location))
    new = store.put("run", 0, 2, _tensors())
    assert _inode(new) == inode
    assert (Path(new.location) / "0").stat().st_size == new.size_bytes
    assert _same(dict(store.read(new.location)), _tensors())
    assert _same(dict(store.read(kept.location)), _tensors(2.0))


def test_what_a_reader_has_open_is_never_written_over(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    old = store.put("run", 0, 0, _tensors(2.0))
    mapped, inode = dict(store.read(old.location)), _inode(old)
    store.delete(old.version)
    new = store.put("run", 0, 1, _tensors())
    assert _inode(new) != inode
    assert _same(mapped, _tensors(2.0))
    assert _same(dict(store.read(new.location)), _tensors())
