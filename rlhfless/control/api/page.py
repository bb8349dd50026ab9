"""The page at `/`: plain files, with plotly's script from its own package. Nothing comes from elsewhere."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import mimetypes
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path

import plotly
from fastapi import APIRouter, Request, Response

from rlhfless.control.errors import not_found

router = APIRouter(include_in_schema=False)

FOLDER = Path(__file__).parents[1] / "page"

PLOTLY = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"

PLOTLY_VERSION = version("plotly")

PLOTLY_PLACE = "PLOTLY_VERSION"
"""What index.html has where the version goes."""

FOR_EVER = "public, max-age=31536000, immutable"
"""For a file whose address has its version."""

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
    cache_control: str
    etag: str = field(init=False)
    _compressed: bytes | None = None

    def __post_init__(self) -> None:
        self.etag = f'"{hashlib.sha256(self.content).hexdigest()[:32]}"'

    async def compressed(self) -> bytes:
        """With gzip, compressed once: plotly's script is 4.8 MB, and 1.5 MB then."""
        if self._compressed is None:
            self._compressed = await asyncio.to_thread(gzip.compress, self.content, 6, mtime=0)
        return self._compressed


@cache
def assets() -> dict[str, Asset]:
    """All files of the page by name."""
    found = {file.name: Asset(file.read_bytes(), _media_type(file), ASK) for file in FOLDER.iterdir() if file.is_file()}
    index = found["index.html"]
    found["index.html"] = Asset(
        index.content.replace(PLOTLY_PLACE.encode(), PLOTLY_VERSION.encode()), index.media_type, ASK
    )
    found[f"plotly-{PLOTLY_VERSION}.min.js"] = Asset(PLOTLY.read_bytes(), "text/javascript", FOR_EVER)
    return found


def _media_type(file: Path) -> str:
    if file.suffix == ".js":
        return "text/javascript"  # what a machine's table of types says of .js differs
    return mimetypes.guess_type(file.name)[0] or "application/octet-stream"


@router.get("/")
async def index(request: Request) -> Response:
    """The page. It has no data of its own, so it needs no key."""
    return await _answer(request, assets()["index.html"])


@router.get("/page/{name}")
async def asset(request: Request, name: str) -> Response:
    """A file of the page. Raises ApiError (404)."""
    found = (await asyncio.to_thread(assets)).get(name)
    if found is None:
        raise not_found("file", name)
    return await _answer(request, found)


async def _answer(request: Request, found: Asset) -> Response:
    headers = HEADERS | {"ETag": found.etag, "Cache-Control": found.cache_control, "Vary": "Accept-Encoding"}
    if found.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    content = found.content
    if len(content) >= MIN_BYTES and "gzip" in request.headers.get("accept-encoding", ""):
        content = await found.compressed()
        headers["Content-Encoding"] = "gzip"
    return Response(content, media_type=found.media_type, headers=headers)
