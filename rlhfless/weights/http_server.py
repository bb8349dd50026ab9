"""The server of a store over HTTP (rlhfless.weights.http): one node serves its folder to requests with its token."""

from __future__ import annotations

import hmac
import json
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, Any

from rlhfless.records import WeightVersion
from rlhfless.weights.digest import PieceHash, piece_hash
from rlhfless.weights.files import version_of
from rlhfless.weights.parts import OpenVersion, TornVersion
from rlhfless.weights.store import FolderStore, StoredWeights, Tensors

PREFIX = "/versions/"
JOIN = "/join/"  # requests a broadcast
MEMBER = "?member="
STALL_TIMEOUT_S = 20.0  # longest silence of the other side; a long but steady download is fine
_CLOSE_POLL_S = 0.05  # how often the server checks whether to close


Join = Callable[[str, str], Mapping[str, Any] | None]
"""(version name, member) -> how to receive it, or None."""


Pieces = Callable[[int, int], Iterable[tuple[IO[bytes], int, int]]]
"""(first byte, end) -> file, offset, and length of each piece."""


class HttpStoreServer:
    """A `WeightStore` in a folder of this node; other nodes read its versions by URL. Use as a context manager."""

    def __init__(
        self,
        folder: str | Path,
        host: str = "127.0.0.1",
        port: int = 0,
        advertised_host: str | None = None,
        token: str | None = None,
        join: Join | None = None,
        of_piece: PieceHash = piece_hash,
    ) -> None:
        """Start serving from threads of this process.

        Args:
            folder: the store.
            host: address to listen on.
            port: 0 for any free port.
            advertised_host: host name in the URLs, if readers know this node by another name than `host`.
            token: bearer token for readers, if it must be known before the server starts; random by default.
            join: answers readers that can receive a broadcast (rlhfless.weights.broadcast).
            of_piece: see FolderStore.
        """
        self.token = token or secrets.token_urlsafe(32)
        self._folder = FolderStore(folder, of_piece)
        common = {"store": self._folder, "token": self.token, "join": join}
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
        """Stop serving; the folder stays."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def put(self, run_id: str, attempt: int, step: int, tensors: Tensors) -> StoredWeights:
        """Publish `tensors`; the location in the result is a URL."""
        stored = self._folder.put(run_id, attempt, step, tensors)
        return replace(stored, location=f"{self.url}{PREFIX}{Path(stored.location).name}")

    def versions(self) -> tuple[WeightVersion, ...]:
        return self._folder.versions()

    def delete(self, version: WeightVersion) -> None:
        self._folder.delete(version)

    def retain(self, keep: set[WeightVersion]) -> None:
        self._folder.retain(keep)


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
