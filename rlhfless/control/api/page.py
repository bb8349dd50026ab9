"""The page at `/`: static files that load nothing from other sites."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import mimetypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fastapi import APIRouter, Request, Response

from rlhfless.control.errors import not_found

router = APIRouter(include_in_schema=False)

FOLDER = Path(__file__).parents[1] / "page"

ASK = "no-cache"
"""Clients cache a file, and revalidate it on each request (ETag)."""

MIN_BYTES = 1024
"""Minimum size of a compressed file."""

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


@dataclass(frozen=True, slots=True)
class Asset:
    content: bytes
    compressed: bytes
    """The content compressed with gzip."""
    media_type: str
    etag: str


@cache
def assets() -> dict[str, Asset]:
    """Read and compress all files of the page. Cached."""
    return {file.name: _read(file) for file in FOLDER.iterdir() if file.is_file()}


def _read(file: Path) -> Asset:
    content = file.read_bytes()
    media_type = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
    if file.suffix in (".js", ".mjs"):
        media_type = "text/javascript"  # the system's type tables differ between machines
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    return Asset(content, gzip.compress(content, 6, mtime=0), media_type, etag)


@router.get("/")
async def index(request: Request) -> Response:
    """Return the page. It has no data, so it needs no key."""
    return _answer(request, (await asyncio.to_thread(assets))["index.html"])


@router.get("/page/{name}")
async def file_of_page(request: Request, name: str) -> Response:
    """Return a file of the page. Raises ApiError (404)."""
    asset = (await asyncio.to_thread(assets)).get(name)
    if asset is None:
        raise not_found("file", name)
    return _answer(request, asset)


def _answer(request: Request, asset: Asset) -> Response:
    headers = HEADERS | {"ETag": asset.etag, "Cache-Control": ASK, "Vary": "Accept-Encoding"}
    if asset.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    content = asset.content
    if len(content) >= MIN_BYTES and "gzip" in request.headers.get("accept-encoding", ""):
        content = asset.compressed
        headers["Content-Encoding"] = "gzip"
    return Response(content, media_type=asset.media_type, headers=headers)
