"""Downloads of a run's folders, as tar files that are made while they are sent."""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import StreamingResponse

from rlhfless.control.api.compute import trace_folder
from rlhfless.control.api.routes import OfService, answers
from rlhfless.control.errors import ApiError, not_found
from rlhfless.records.checkpoints import files_of

router = APIRouter(tags=["runs"])

TAR = "application/x-tar"

CHUNK_BYTES = 1 << 20

TAR_DOC = answers(TAR, {"type": "string", "format": "binary"}, "A tar file.")


@router.get("/runs/{run_id}/trace", responses=TAR_DOC, response_class=StreamingResponse, summary="Download the trace")
async def download_trace(service: OfService, run_id: str) -> StreamingResponse:
    """The run's ledger (docs/trace.md): what `rlhfless trace` and `rlhfless simulate --replay` read."""
    folder = await trace_folder(service, run_id)
    return _answer(folder, f"{run_id}-trace")


@router.get(
    "/runs/{run_id}/checkpoints/{checkpoint_id}/download",
    responses=TAR_DOC,
    response_class=StreamingResponse,
    summary="Download a checkpoint",
)
async def download_checkpoint(service: OfService, run_id: str, checkpoint_id: str) -> StreamingResponse:
    """Model and tokenizer in Hugging Face format, with what a resumed run needs."""
    run = await service.run(run_id)
    checkpoint = next((entry for entry in run.checkpoints if entry["id"] == checkpoint_id), None)
    if checkpoint is None:
        raise not_found("checkpoint", checkpoint_id)
    if not await asyncio.to_thread(_has_files, checkpoint["location"]):
        message = f"checkpoint {checkpoint_id} of run {run_id} is not in {checkpoint['location']} any more"
        raise ApiError(404, "not_found", message)
    return _answer(checkpoint["location"], f"{run_id}-{checkpoint_id}")


def _has_files(location: str) -> bool:
    files, root = files_of(location)
    return bool(files.find(root))


def _answer(location: str, name: str) -> StreamingResponse:
    headers = {"Content-Disposition": f'attachment; filename="{name}.tar"'}
    return StreamingResponse(_in_thread(_tar(location, name)), media_type=TAR, headers=headers)


async def _in_thread(chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
    while True:
        chunk = await asyncio.to_thread(next, chunks, None)
        if chunk is None:
            return
        yield chunk


def _tar(location: str, name: str) -> Iterator[bytes]:
    """A tar file of a folder or URL, in pieces. A file has the size that it has when it is reached: later appends are
    left out, and so are files that were removed."""
    files, root = files_of(location)
    for path in sorted(files.find(root)):
        try:
            size = int(files.size(path))
            with files.open(path, "rb") as stream:
                entry = tarfile.TarInfo(f"{name}/{Path(path).relative_to(root)}")
                entry.size = size
                yield entry.tobuf(tarfile.GNU_FORMAT)
                rest = size
                while rest:
                    chunk = stream.read(min(rest, CHUNK_BYTES)) or bytes(rest)
                    rest -= len(chunk)
                    yield chunk
        except FileNotFoundError:
            continue
        yield bytes(-size % tarfile.BLOCKSIZE)
    end = io.BytesIO()
    tarfile.open(fileobj=end, mode="w").close()
    yield end.getvalue()
