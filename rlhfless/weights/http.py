"""A store over HTTP, for nodes without a shared file system: one node serves its folder, the others have a cache.

Server and client speak plain HTTP with a random bearer token. A reader on the serving node reads the folder
directly. Any other reader looks in its node's cache first. If the version is missing, one reader downloads it in
pieces over several connections while the node's other readers wait for its lock, so each node pulls and hashes a
version once. A download is checked against the version's digest before it gets its final name in the cache; as in
`FolderStore`, every visible version is complete and correct.

Not implemented: TLS (run it inside the cluster's network).
"""

from __future__ import annotations

import fcntl
import hmac
import json
import secrets
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, Any

import torch

from rlhfless.records import WeightVersion
from rlhfless.spec import Transport
from rlhfless.util.folders import wait_for_lock
from rlhfless.weights.check import WeightFileError
from rlhfless.weights.coauthors import Coauthors
from rlhfless.weights.digest import PieceHash, digest_by_threads, piece_hash, threads
from rlhfless.weights.files import Put, file_name, read_version, version_of, way_on_node
from rlhfless.weights.parts import OpenVersion, TornVersion, drafting, spare
from rlhfless.weights.store import FolderStore, StoredWeights, Tensors, known_hashes, seal

_CHUNK_BYTES = 1 << 20
_PIECE_BYTES = 64 << 20  # per request; large enough that request latency is negligible
_CONNECTIONS = 4  # concurrent: one TCP stream rarely fills a fast network
_ATTEMPTS = 5
_FIRST_PAUSE_S = 0.2  # doubles: 0.2, 0.4, 0.8, 1.6 s, enough for a restart of the server's process
_LOCK_TIMEOUT_S = 600.0  # longest wait for another reader of the node to finish its download
_CACHED_VERSIONS = 2  # the newest, and its predecessor, which slower readers may still request
PREFIX = "/versions/"
JOIN = "/join/"  # requests a broadcast
MEMBER = "?member="
STALL_TIMEOUT_S = 20.0  # longest silence of the other side; a long but steady download is fine
_CLOSE_POLL_S = 0.05  # how often the server checks whether to close

Join = Callable[[str, str], Mapping[str, Any] | None]
"""(version name, member) -> how to receive it, or None."""

Pieces = Callable[[int, int], Iterable[tuple[IO[bytes], int, int]]]
"""(first byte, end) -> file, offset, and length of each piece."""


class HttpStore:
    """A `WeightReader` of an `HttpStoreServer`, with a cache folder shared by all readers of a node."""

    def __init__(self, token: str, cache_folder: str | Path, home: str = "", of_piece: PieceHash = piece_hash) -> None:
        """`home`: the server's folder, which exists on its own node only."""
        self._token = token
        self._cache = FolderStore(cache_folder)
        self.of_piece = of_piece
        self._home = Path(home) if home else None
        self.transport: Transport = "http"
        # Bypass proxies: the server is a node of the same cluster.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def read(self, location: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the version's tensors, downloading it if necessary.

        Raises WeightFileError also if the download fails.
        """
        yield from read_version(self._local(location), version_of(location).digest)

    def hashes(self, location: str) -> Mapping[str, bytes]:
        """Return the version's known hashes, downloading it if necessary."""
        return known_hashes(self._local(location), version_of(location).digest)

    def release(self) -> None:
        """Do nothing: dropped files remain as long as they are mapped."""

    def _local(self, location: str) -> Path:
        """Return the local path of a version, downloading it if it is missing."""
        version = version_of(location)
        if self._home is not None and _is_sound(at_home := self._home / file_name(version), version):
            self.transport = way_on_node(self._home)
            return at_home
        self.transport = "http"
        path = self._cache.path(version)
        if not _is_sound(path, version):
            with (self._cache.folder / ".lock").open("w") as lock:
                if not wait_for_lock(lock, fcntl.LOCK_EX, _LOCK_TIMEOUT_S):
                    raise WeightFileError(
                        f"waited {_LOCK_TIMEOUT_S:g} s for another engine's download to {self._cache.folder}"
                    )
                if not _is_sound(path, version):
                    self._download(location, path, version)
                    self._drop_old(path)
        return path

    def _download(self, url: str, path: Path, version: WeightVersion) -> None:
        """Download a version, check its digest, and cache it. Raises WeightFileError if the digest differs."""
        what = f"weights {url} (digest {version.digest})"
        with drafting(path.parent, path) as draft:
            size = self._download_piece(url, draft.put, 0, what)
            with ThreadPoolExecutor(_CONNECTIONS, "pieces") as pool:
                rest = range(_PIECE_BYTES, size, _PIECE_BYTES)
                list(pool.map(lambda start: self._download_piece(url, draft.put, start, what), rest))
            draft.finish(size)
            tensors = read_version(draft.folder, version.digest)
            received = digest_by_threads(tensors, threads(), self.of_piece).hexdigest()
            if received != version.digest:
                raise WeightFileError(f"weights {url}: expected digest {version.digest}, received {received}")
            seal(draft.folder, version.digest)

    def _download_piece(self, url: str, put: Put, start: int, what: str) -> int:
        """Download the piece that starts at byte `start` and return the size of the whole file."""
        place = start
        for attempt in range(_ATTEMPTS):
            try:
                with self._open(url, place, start + _PIECE_BYTES) as response:
                    size = int(response.headers["Content-Range"].rpartition("/")[2])
                    while data := response.read(_CHUNK_BYTES):
                        put(data, place)
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
            if attempt + 1 < _ATTEMPTS:
                time.sleep(_FIRST_PAUSE_S * 2**attempt)
        raise WeightFileError(f"{what}: {_ATTEMPTS} attempts failed: {failure}") from failure

    def _open(self, url: str, start: int, end: int) -> Any:
        """Request the bytes from `start` to `end` of a file."""
        headers = {"Authorization": f"Bearer {self._token}", "Range": f"bytes={start}-{end - 1}"}
        return self._opener.open(urllib.request.Request(url, headers=headers), timeout=STALL_TIMEOUT_S)

    def query(self, location: str, path: str, query: str, timeout_s: float) -> bytes:
        """Query another server path about a version. Raises OSError."""
        url = location.replace(PREFIX, path) + query
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {self._token}"})
        with self._opener.open(request, timeout=timeout_s) as response:
            answer: bytes = response.read()
            return answer

    def _drop_old(self, newest: Path) -> None:
        """Keep only the newest versions. Deleting the others is safe for their readers (see `FolderStore`)."""
        cached = sorted(
            (self._cache.path(version) for version in self._cache.versions()),
            key=lambda path: path.stat().st_ctime_ns,  # the modification time holds the seal
        )
        for path in cached[:-_CACHED_VERSIONS]:
            if path != newest:
                spare(path)


def _is_sound(path: Path, version: WeightVersion) -> bool:
    """Return whether the version exists and is complete.

    A truncated version must be downloaded again; otherwise engines that load it keep failing and being replaced. The
    consuming engine checks the digest.
    """
    try:
        return path.exists() and all(True for _ in read_version(path, version.digest))
    except WeightFileError:
        return False


class HttpStoreServer:
    """A `WeightStore` in a folder of this node; other nodes read its versions by URL. Use as a context manager."""

    def __init__(
        self,
        folder: str | Path,
        host: str = "127.0.0.1",
        token: str | None = None,
        join: Join | None = None,
        of_piece: PieceHash = piece_hash,
    ) -> None:
        """Start serving from threads of this process.

        Args:
            folder: the store.
            host: address to listen on, at any free port.
            token: bearer token for readers, if it must be known before the server starts; random by default.
            join: answers readers that can receive a broadcast (rlhfless.weights.broadcast).
            of_piece: see FolderStore.
        """
        self.folder = Path(folder)
        self.of_piece = of_piece
        self.token = token or secrets.token_urlsafe(32)
        self._folder = FolderStore(folder, of_piece)
        handler = type("Handler", (_Handler,), {"store": self._folder, "token": self.token, "join": join})
        self._server = ThreadingHTTPServer((host, 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://{host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_CLOSE_POLL_S,), name="weight-store", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> HttpStoreServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop serving; the folder stays."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def put(
        self, run_id: str, attempt: int, step: int, tensors: Tensors, coauthors: Coauthors | None = None
    ) -> StoredWeights:
        """Publish `tensors`; the location in the result is a URL."""
        stored = self._folder.put(run_id, attempt, step, tensors, coauthors)
        return replace(stored, location=f"{self.url}{PREFIX}{Path(stored.location).name}")

    def versions(self) -> tuple[WeightVersion, ...]:
        return self._folder.versions()

    def delete(self, version: WeightVersion) -> None:
        self._folder.delete(version)


class _Handler(BaseHTTPRequestHandler):
    """Handle GET requests for one version, whole or a range (`Range: bytes=N-M`)."""

    store: FolderStore
    token: str
    join: Join | None
    timeout = STALL_TIMEOUT_S

    def do_GET(self) -> None:  # named by http.server
        if not hmac.compare_digest(self.headers.get("Authorization", ""), f"Bearer {self.token}"):
            self.send_error(HTTPStatus.UNAUTHORIZED, "wrong or missing bearer token")
            return
        if self.path.startswith(JOIN):
            self._answer_join()
            return
        try:
            with OpenVersion(self._path(self.path.removeprefix(PREFIX))) as version:
                self._answer(version.size_bytes, version.pieces)
        except (ValueError, FileNotFoundError, TornVersion):
            self.send_error(HTTPStatus.NOT_FOUND, "no such version")

    def _answer_join(self) -> None:
        name, _, member = self.path.removeprefix(JOIN).partition(MEMBER)
        join = type(self).join  # from the class, so that it is not bound as a method
        answer = None if join is None else join(name, member)
        body = b"" if answer is None else json.dumps(answer).encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _path(self, name: str) -> Path:
        if "/" in name:
            raise ValueError(f"{self.path} is not a version")
        return self.store.path(version_of(name))

    def _answer(self, size: int, pieces: Pieces) -> None:
        asked = self.headers.get("Range")
        first, _, last = (asked or "bytes=0-").removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last or size) + 1, size)
        self.send_response(HTTPStatus.PARTIAL_CONTENT if asked else HTTPStatus.OK)
        self.send_header("Content-Length", str(end - start))
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
        self.end_headers()
        for file, offset, length in pieces(start, end):
            self.connection.sendfile(file, offset, length)  # zero-copy

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: readers report their own failures."""
