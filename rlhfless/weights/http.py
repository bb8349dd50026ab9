"""A store over HTTP, for nodes that share no file system: one node serves its folder, each other node has a cache.

Server and client speak plain HTTP with a random bearer token. A reader on the serving node reads the folder itself.
Any other asks its node's cache first; if the version is not there, one reader downloads it, in pieces over several
connections, while the others of the node wait for the lock, so a node pulls and hashes each version once. Over a slow
network a node that has the version before asks for what changed (`delta`), and gets the whole version if that is no
shorter, or does not come to it. A download is checked against the version's digest before it takes its name in the
cache, so that, as in `FolderStore`, every version that can be seen is complete and right.

Not done: TLS (run it inside the cluster's network).
"""

from __future__ import annotations

import fcntl
import hmac
import logging
import mmap
import os
import secrets
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, Any

import torch

from rlhfless.records import WeightVersion
from rlhfless.weights.delta import apply, delta
from rlhfless.weights.digest import digest_by_threads, threads
from rlhfless.weights.errors import WeightFileError
from rlhfless.weights.files import Draft, file_name, put, read_file, replacing, spare, version_of
from rlhfless.weights.seal import known_hashes, seal
from rlhfless.weights.store import FolderStore, StoredWeights, Tensors

_PREFIX = "/versions/"
_CHUNK_BYTES = 1 << 20
_PIECE_BYTES = 64 << 20  # of a version, in one request: long enough that its start does not count
_CONNECTIONS = 4  # at the same time: one TCP stream rarely fills a fast network
_STALL_TIMEOUT_S = 20.0  # longest silence of the server; a long but steady download is fine
_ATTEMPTS = 5
_FIRST_PAUSE_S = 0.2  # doubles: 0.2, 0.4, 0.8, 1.6 s, enough for a restart of the server's process
_LOCK_TIMEOUT_S = 600.0  # longest wait for another reader of the node to finish its download
_LOCK_POLL_S = 0.02
_CLOSE_POLL_S = 0.05  # how often the server looks whether it is to close
_CACHED_VERSIONS = 2  # the newest, and the one before that slower readers may still ask for
_FAST_BYTES_PER_S = 1e9
"""A network from which on a whole version is there sooner. On two cores that do both sides, of 1 GB with 5 % of its
elements changed 0.9 GB fewer are sent, and 1.0 s more is spent on finding and applying what changed."""

_RATE = ".rate"
"""A file of the cache: at how many bytes per second the last whole version came."""

_SINCE = "?since="  # asks for what changed since another version
_CHANGES = ".changes"  # a file of the server's, beside its versions

log = logging.getLogger(__name__)


class HttpStoreServer:
    """A `WeightStore` in a folder of this node; other nodes read its versions by URL. A context manager."""

    def __init__(
        self,
        folder: str | Path,
        host: str = "127.0.0.1",
        port: int = 0,
        advertised_host: str | None = None,
        token: str | None = None,
    ) -> None:
        """Serves at once, from threads of this process.

        Args:
            folder: the store.
            host: address to listen on.
            port: 0 for any free one.
            advertised_host: host name in the URLs, if readers know this node by another name than `host`.
            token: the bearer token of readers, if it must be known before the server starts; random by default.
        """
        self.token = token or secrets.token_urlsafe(32)
        self._folder = FolderStore(folder)
        common = {"store": self._folder, "token": self.token, "comparing": threading.Lock()}
        handler = type("Handler", (_Handler,), common)
        self._server = ThreadingHTTPServer((host, port), handler)
        self._server.daemon_threads = True
        self.url = f"http://{advertised_host or host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_CLOSE_POLL_S,), name="weight-store", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> HttpStoreServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops serving; the folder stays."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def put(self, run_id: str, attempt: int, step: int, tensors: Tensors) -> StoredWeights:
        """See `WeightStore.put`; the location is a URL."""
        stored = self._folder.put(run_id, attempt, step, tensors)
        return replace(stored, location=f"{self.url}{_PREFIX}{Path(stored.location).name}")

    def versions(self) -> tuple[WeightVersion, ...]:
        """See `WeightStore.versions`."""
        return self._folder.versions()

    def delete(self, version: WeightVersion) -> None:
        """See `WeightStore.delete`."""
        self._folder.delete(version)

    def retain(self, keep: set[WeightVersion]) -> None:
        """See `WeightStore.retain`."""
        self._folder.retain(keep)


class _Handler(BaseHTTPRequestHandler):
    """GET of one version, whole or a range of it (`Range: bytes=N-M`), or of what changed since another one."""

    store: FolderStore
    token: str
    comparing: threading.Lock
    """One request at a time looks what changed; the others find it then."""
    timeout = _STALL_TIMEOUT_S

    def do_GET(self) -> None:  # the name is http.server's
        if not hmac.compare_digest(self.headers.get("Authorization", ""), f"Bearer {self.token}"):
            self.send_error(HTTPStatus.UNAUTHORIZED, "wrong or missing bearer token")
            return
        name, _, since = self.path.removeprefix(_PREFIX).partition(_SINCE)
        try:
            file = (self._changes(name, since) if since else self._path(name)).open("rb")
        except (ValueError, FileNotFoundError):
            self.send_error(HTTPStatus.NOT_FOUND, "no such version, or no changes that are shorter")
            return
        with file:
            self._answer(file)

    def _path(self, name: str) -> Path:
        if "/" in name:
            raise ValueError(f"{self.path} is not a version")
        return self.store.path(version_of(name))

    def _changes(self, name: str, since: str) -> Path:
        """The file with what changed, made when it is asked for first; it is empty if all should be sent instead.
        Raises FileNotFoundError then, or if a version is not there any more."""
        new, old = self._path(name), self._path(since)
        path = new.with_name(f"{version_of(name).digest}-{version_of(since).digest}{_CHANGES}")
        with self.comparing:
            if not path.exists():
                _drop_changes(new.parent)
                with replacing(new.parent, path) as draft:
                    delta(old, new, draft.file)
                    draft.file.truncate()  # it may have been another file before
        if not path.stat().st_size:
            raise FileNotFoundError(path)
        return path

    def _answer(self, file: IO[bytes]) -> None:
        size, asked = os.fstat(file.fileno()).st_size, self.headers.get("Range")
        first, _, last = (asked or "bytes=0-").removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last or size) + 1, size)
        self.send_response(HTTPStatus.PARTIAL_CONTENT if asked else HTTPStatus.OK)
        self.send_header("Content-Length", str(end - start))
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
        self.end_headers()
        self.connection.sendfile(file, start, end - start)  # without a copy of its own

    def log_message(self, format: str, *args: object) -> None:
        """Silent: readers report their own failures."""


class HttpStore:
    """A `WeightReader` of an `HttpStoreServer`, with a cache folder that all readers of a node share."""

    def __init__(self, token: str, cache_folder: str | Path, home: str = "") -> None:
        """`home`: the server's folder, which is there on its own node."""
        self._token = token
        self._cache = FolderStore(cache_folder)
        self._home = Path(home) if home else None
        # Never through a proxy: the server is a node of the same cluster.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def read(self, location: str) -> Iterator[tuple[str, torch.Tensor]]:
        """See `WeightReader.read`. Raises WeightFileError also if the download fails for good."""
        yield from read_file(self._local(location), version_of(location).digest)

    def hashes(self, location: str) -> Mapping[str, bytes]:
        """See `WeightReader.hashes`. Downloads as `read` does."""
        return known_hashes(self._local(location), version_of(location).digest)

    def _local(self, location: str) -> Path:
        """The version's file on this node, which is downloaded if there is none."""
        version = version_of(location)
        if self._home is not None and _is_sound(at_home := self._home / file_name(version), version):
            return at_home
        path = self._cache.path(version)
        if not _is_sound(path, version):
            with self._only_downloader():
                if not _is_sound(path, version):
                    self._download(location, path, version)
                    self._drop_old(path)
        return path

    @contextmanager
    def _only_downloader(self) -> Iterator[None]:
        """One reader of the node at a time. The kernel frees the lock of a reader that dies."""
        deadline = time.monotonic() + _LOCK_TIMEOUT_S
        with (self._cache.folder / ".lock").open("w") as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise WeightFileError(
                            f"waited {_LOCK_TIMEOUT_S:g} s for another download to {self._cache.folder}"
                        ) from None
                    time.sleep(_LOCK_POLL_S)
            yield

    def _download(self, url: str, path: Path, version: WeightVersion) -> None:
        before = [each for each in self._cache.versions() if each != version]
        rate = self._cache.folder / _RATE
        slow = rate.exists() and float(rate.read_text()) < _FAST_BYTES_PER_S
        if before and slow and self._patched(url, path, version, self._cache.path(before[-1])):
            return
        with replacing(path.parent, path) as draft:
            began_s = time.monotonic()
            size = self._pieces(url, draft.file.fileno(), f"weights {url} (digest {version.digest})")
            rate.write_text(str(size / max(time.monotonic() - began_s, 1e-9)))
            _check(url, draft, version)

    def _patched(self, url: str, path: Path, version: WeightVersion, before: Path) -> bool:
        """Makes the version from the one before and what changed. Returns False if all is to be downloaded instead."""
        what = f"changes of weights {url} (digest {version.digest})"
        try:
            with replacing(path.parent, path) as draft, tempfile.TemporaryFile(dir=path.parent) as changes:
                self._pieces(f"{url}{_SINCE}{before.name}", changes.fileno(), what, attempts=1)
                with mmap.mmap(changes.fileno(), 0, access=mmap.ACCESS_READ) as data:
                    apply(before, data, draft.file.fileno())
                _check(url, draft, version)
        except WeightFileError as error:
            log.debug("the whole version is downloaded: %s", error)
            return False
        return True

    def _pieces(self, url: str, file: int, what: str, attempts: int = _ATTEMPTS) -> int:
        """Download all of a URL; returns its size."""
        size = self._piece(url, file, 0, what, attempts)
        with ThreadPoolExecutor(_CONNECTIONS, "pieces") as pool:
            rest = range(_PIECE_BYTES, size, _PIECE_BYTES)
            list(pool.map(lambda start: self._piece(url, file, start, what, attempts), rest))
        return size

    def _piece(self, url: str, file: int, start: int, what: str, attempts: int) -> int:
        """Download the piece that begins at byte `start`; returns the size of the whole file."""
        place = start
        for attempt in range(attempts):
            try:
                with self._opened(url, place, start + _PIECE_BYTES) as response:
                    size = int(response.headers["Content-Range"].rpartition("/")[2])
                    while data := response.read(_CHUNK_BYTES):
                        put(file, data, place)
                        place += len(data)
                if place == min(start + _PIECE_BYTES, size):
                    return size
                failure: Exception = ConnectionError(f"the server hung up at byte {place} of {size}")
            except urllib.error.HTTPError as error:
                if error.code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.NOT_FOUND):
                    raise WeightFileError(f"{what}: {error.code} {error.reason}") from error
                failure = error
            except OSError as error:  # refused, reset, timed out, cut short
                failure = error
            if attempt + 1 < attempts:
                time.sleep(_FIRST_PAUSE_S * 2**attempt)
        raise WeightFileError(f"{what}: {attempts} attempts failed: {failure}") from failure

    def _opened(self, url: str, start: int, end: int) -> Any:
        """The server's answer, with bytes from `start` to `end` of the file."""
        headers = {"Authorization": f"Bearer {self._token}", "Range": f"bytes={start}-{end - 1}"}
        return self._opener.open(urllib.request.Request(url, headers=headers), timeout=_STALL_TIMEOUT_S)

    def _drop_old(self, newest: Path) -> None:
        """Keeps the newest few versions. Deleting the others is safe for their readers (see `FolderStore`)."""
        cached = sorted(
            (self._cache.path(version) for version in self._cache.versions()),
            key=lambda path: path.stat().st_ctime_ns,  # the time of modification is the seal's
        )
        for path in cached[:-_CACHED_VERSIONS]:
            if path != newest:
                spare(path)


def _check(url: str, draft: Draft, version: WeightVersion) -> None:
    """Seals a version that has been received. Raises WeightFileError if it is not the one that its name says."""
    draft.file.flush()
    received = digest_by_threads(read_file(Path(draft.file.name), version.digest), threads()).hexdigest()
    if received != version.digest:
        raise WeightFileError(f"weights {url}: expected digest {version.digest}, received {received}")
    seal(draft.file.fileno(), version.digest)


def _drop_changes(folder: Path) -> None:
    """Of the version before: no node asks for them any more, or it gets all."""
    for path in folder.glob(f"*{_CHANGES}"):
        path.unlink(missing_ok=True)


def _is_sound(path: Path, version: WeightVersion) -> bool:
    """Whether the file is there and complete. A file that was cut short must be fetched again: an engine that loads it
    would fail, be replaced, and load it again. The engine that consumes the bytes checks their digest."""
    try:
        return path.exists() and all(True for _ in read_file(path, version.digest))
    except WeightFileError:
        return False
