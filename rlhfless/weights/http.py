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
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from typing import Any

import torch

from rlhfless.records import WeightVersion
from rlhfless.spec import Transport
from rlhfless.util.folders import wait_for_lock
from rlhfless.weights.digest import PieceHash, digest_by_threads, piece_hash, threads
from rlhfless.weights.errors import WeightFileError
from rlhfless.weights.files import Put, file_name, read_version, version_of, way_on_node
from rlhfless.weights.hash_cache import known_hashes, seal
from rlhfless.weights.http_server import PREFIX, STALL_TIMEOUT_S
from rlhfless.weights.parts import drafting, spare
from rlhfless.weights.store import FolderStore

_CHUNK_BYTES = 1 << 20
_PIECE_BYTES = 64 << 20  # per request; large enough that request latency is negligible
_CONNECTIONS = 4  # concurrent: one TCP stream rarely fills a fast network
_ATTEMPTS = 5
_FIRST_PAUSE_S = 0.2  # doubles: 0.2, 0.4, 0.8, 1.6 s, enough for a restart of the server's process
_LOCK_TIMEOUT_S = 600.0  # longest wait for another reader of the node to finish its download
_CACHED_VERSIONS = 2  # the newest, and its predecessor, which slower readers may still request


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
