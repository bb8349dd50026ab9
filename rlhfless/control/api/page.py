"""The page at `/`: plain files, which need nothing from elsewhere."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import mimetypes
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from fastapi import APIRouter, Request, Response

from rlhfless.control.errors import not_found

router = APIRouter(include_in_schema=False)

FOLDER = Path(__file__).parents[1] / "page"

ASK = "no-cache"
"""Kept, but asked for each time whether it is still the same (ETag)."""

MIN_BYTES = 1024
"""Smaller files are not worth compressing."""

HEADERS = {
    "Content-Security-Policy": "; ".join(
        [
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src 'self' data:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass
class Asset:
    """A file of the page, read once."""

    content: bytes
    media_type: str
    etag: str = field(init=False)
    _compressed: bytes | None = None

    def __post_init__(self) -> None:
        self.etag = f'"{hashlib.sha256(self.content).hexdigest()[:32]}"'

    def compressed(self) -> bytes:
        """With gzip, compressed once."""
        if self._compressed is None:
            self._compressed = gzip.compress(self.content, 6, mtime=0)
        return self._compressed


@cache
def assets() -> dict[str, Asset]:
    """All files of the page by name."""
    return {file.name: Asset(file.read_bytes(), _media_type(file)) for file in FOLDER.iterdir() if file.is_file()}


def prepare() -> None:
    """Read and compress all files, so that the first one to look need not wait for it."""
    for one in assets().values():
        one.compressed()


def _media_type(file: Path) -> str:
    if file.suffix in (".js", ".mjs"):
        return "text/javascript"  # what a machine's table of types says of them differs
    return mimetypes.guess_type(file.name)[0] or "application/octet-stream"


@router.get("/")
async def index(request: Request) -> Response:
    """The page. It has no data of its own, so it needs no key."""
    return await _answer(request, (await asyncio.to_thread(assets))["index.html"])


@router.get("/page/{name}")
async def asset(request: Request, name: str) -> Response:
    """A file of the page. Raises ApiError (404)."""
    content = (await asyncio.to_thread(assets)).get(name)
    if content is None:
        raise not_found("file", name)
    return await _answer(request, content)


async def _answer(request: Request, found: Asset) -> Response:
    headers = HEADERS | {"ETag": found.etag, "Cache-Control": ASK, "Vary": "Accept-Encoding"}
    if found.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    content = found.content
    if len(content) >= MIN_BYTES and "gzip" in request.headers.get("accept-encoding", ""):
        content = await asyncio.to_thread(found.compressed)
        headers["Content-Encoding"] = "gzip"
    return Response(content, media_type=found.media_type, headers=headers)
