"""Routes for a run's results: samples, checkpoints, usage, logs, device timeline and downloads."""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from fastapi.responses import PlainTextResponse, StreamingResponse
from sqlalchemy.orm import Session

from rlhfless.control import store
from rlhfless.control.api.routes import OfService, answers, checkpoint_objects, object_of, rollout_object
from rlhfless.control.drivers import LOG_FILE as DRIVER_LOG
from rlhfless.control.errors import ApiError, not_found
from rlhfless.control.objects import (
    MOST_INTEGER,
    CheckpointObject,
    FunctionUsage,
    ListObject,
    RolloutObject,
    StaticFleet,
    TimelineObject,
    UsageObject,
)
from rlhfless.control.run_files import trace_of
from rlhfless.control.service import Service
from rlhfless.planning.objects import PlannedCost
from rlhfless.records.checkpoints import files_of, is_of_model
from rlhfless.telemetry.logs import LOG_FILE as RUN_LOG
from rlhfless.util.text import redacted_text, tail

router = APIRouter(tags=["runs"])

LOGS_DOC = answers("text/plain", {"type": "string"}, "The ends of the logs.")


@router.get("/runs/{run_id}/checkpoints", summary="Checkpoints")
async def list_checkpoints(service: OfService, run_id: str) -> ListObject[CheckpointObject]:
    """List the kept checkpoints, newest first."""
    run = await service.run(run_id)
    return ListObject(data=checkpoint_objects(run), has_more=False)


@router.get("/runs/{run_id}/rollouts", summary="Samples to read")
async def list_rollouts(
    service: OfService,
    run_id: str,
    step: Annotated[int | None, Query(ge=0, le=MOST_INTEGER, description="By default the newest steps.")] = None,
    before_step: Annotated[int | None, Query(ge=0, le=MOST_INTEGER, description="Only earlier steps.")] = None,
    data_set: Annotated[
        str | None, Query(max_length=200, description="`train`, `held_out`, or the name of a set of the spec.")
    ] = None,
    prompt_id: Annotated[str | None, Query(max_length=1_000, description="Only samples of this prompt.")] = None,
    search: Annotated[
        str | None,
        Query(min_length=1, max_length=200, description="Text in prompt or response, ignoring case."),
    ] = None,
    result: Annotated[
        Literal["failed", "zero", "nonzero"] | None,
        Query(description="Only samples whose reward failed, is zero, or is not zero."),
    ] = None,
    reward: Annotated[
        str | None, Query(max_length=200, description="Reward part to which `result` applies; by default the total.")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> ListObject[RolloutObject]:
    """List a few samples of the newest steps and evaluations, newest first. Each has, for four prompts, the samples
    with the lowest and the highest reward, and samples whose reward failed. Evaluations have the same prompts."""
    wanted = store.SampleFilter(step, before_step, data_set, prompt_id, search, result, reward)

    def read(session: Session) -> ListObject[RolloutObject]:
        store.run_of(session, run_id)
        rows = store.rollouts(session, run_id, wanted, limit + 1)
        return ListObject(data=[rollout_object(row) for row in rows[:limit]], has_more=len(rows) > limit)

    return await service.database.read(read)


@router.get("/runs/{run_id}/usage", summary="Devices and cost")
async def get_usage(service: OfService, run_id: str) -> UsageObject:
    """Return the usage by function over all attempts, with the plan and the best static fleet for comparison."""

    def read(session: Session) -> UsageObject:
        run = store.run_of(session, run_id)
        return UsageObject(
            run_id=run_id,
            functions=[object_of(FunctionUsage, row) for row in store.usage(session, run_id)],
            device_s=run.device_s,
            cost_usd=run.cost_usd,
            best_static=StaticFleet.model_validate(run.best_static) if run.best_static else None,
            planned=PlannedCost.model_validate(run.plan) if run.plan else None,
            measured=store.measured_cost(session, run_id),
        )

    return await service.database.read(read)


@router.get("/runs/{run_id}/logs", summary="Logs", response_class=PlainTextResponse, responses=LOGS_DOC)
async def get_logs(
    service: OfService,
    run_id: str,
    lines: Annotated[int, Query(ge=1, le=5_000, description="Number of last lines of each of the two logs.")] = 200,
) -> PlainTextResponse:
    """Return the end of the run's log and of its driver's output, each after a line with its name. Empty before the
    first driver starts."""
    run = await service.run(run_id)
    texts = [(name, await asyncio.to_thread(tail, Path(run.folder) / name, lines)) for name in (RUN_LOG, DRIVER_LOG)]
    text = "\n".join(f"==> {name} <==\n{content}" for name, content in texts if content)
    return PlainTextResponse(redacted_text(text), headers={"Cache-Control": "no-store"})


TAR = "application/x-tar"

CHUNK_BYTES = 1 << 20

TAR_DOC = answers(TAR, {"type": "string", "format": "binary"}, "A tar file.")


@router.get("/runs/{run_id}/trace", responses=TAR_DOC, response_class=StreamingResponse, summary="Download the trace")
async def download_trace(service: OfService, run_id: str) -> StreamingResponse:
    """Download the run's ledger (docs/trace.md), which `rlhfless trace` and `rlhfless simulate --replay` read."""
    folder = await trace_folder(service, run_id)
    return _answer(folder, f"{run_id}-trace")


@router.get(
    "/runs/{run_id}/checkpoints/{checkpoint_id}/download",
    responses=TAR_DOC,
    response_class=StreamingResponse,
    summary="Download a checkpoint",
)
async def download_checkpoint(service: OfService, run_id: str, checkpoint_id: str) -> StreamingResponse:
    """Download model and tokenizer in Hugging Face format, with the state that a resumed run needs."""
    run = await service.run(run_id)
    checkpoint = next((entry for entry in run.checkpoints if entry["id"] == checkpoint_id), None)
    if checkpoint is None:
        raise not_found("checkpoint", checkpoint_id)
    if not await asyncio.to_thread(_has_files, checkpoint["location"]):
        message = f"checkpoint {checkpoint_id} of run {run_id} is not in {checkpoint['location']} any more"
        raise ApiError(404, "not_found", message)
    return _answer(checkpoint["location"], f"{run_id}-{checkpoint_id}")


@router.get(
    "/runs/{run_id}/adapter", responses=TAR_DOC, response_class=StreamingResponse, summary="Download the adapter"
)
async def download_adapter(
    service: OfService,
    run_id: str,
    step: Annotated[
        int | None, Query(ge=0, le=MOST_INTEGER, description="Of the checkpoint of this step; by default the newest.")
    ] = None,
) -> StreamingResponse:
    """Download the adapter of a run with `model.lora`, with its tokenizer, in PEFT's format."""
    run = await service.run(run_id)
    if not (run.spec.get("model") or {}).get("lora"):
        raise ApiError(409, "no_adapter", f"run {run_id} trains all weights; download a checkpoint", "model.lora")
    found = [entry for entry in run.checkpoints if step in (None, entry["step"])]
    kept = ", ".join(str(entry["step"]) for entry in run.checkpoints) or "none"
    if not found:
        which = "no checkpoint yet" if step is None else f"no checkpoint of step {step}"
        raise ApiError(404, "not_found", f"run {run_id} has {which}; it has those of steps: {kept}", "step")
    newest = max(found, key=lambda entry: int(entry["step"]))
    if not await asyncio.to_thread(_has_files, newest["location"]):
        message = f"the checkpoint of step {newest['step']} is not in {newest['location']} any more"
        raise ApiError(404, "not_found", message)
    return _answer(newest["location"], f"{run_id}-step-{newest['step']:06d}-adapter", model_only=True)


def _has_files(location: str) -> bool:
    files, root = files_of(location)
    return bool(files.find(root))


def _answer(location: str, name: str, *, model_only: bool = False) -> StreamingResponse:
    headers = {"Content-Disposition": f'attachment; filename="{name}.tar"'}
    return StreamingResponse(_in_thread(_tar(location, name, model_only)), media_type=TAR, headers=headers)


async def _in_thread(chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
    while True:
        chunk = await asyncio.to_thread(next, chunks, None)
        if chunk is None:
            return
        yield chunk


def _tar(location: str, name: str, model_only: bool) -> Iterator[bytes]:
    """Yield a tar file of a folder or URL; with `model_only`, of a checkpoint without the state to resume from. The
    size of a file is fixed when it is reached: later appends and removed files are left out."""
    files, root = files_of(location)
    for path in sorted(files.find(root)):
        if model_only and not is_of_model(str(Path(path).relative_to(root))):
            continue
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


TIMELINE_S = 60.0
"""Maximum duration of the job that reads the timeline from the trace."""


async def trace_folder(service: Service, run_id: str) -> str:
    """Return the folder of a run's trace. Raises ApiError (404) before the first step."""
    run = await service.run(run_id)
    folder = trace_of(run.folder)
    if folder is None:
        raise ApiError(404, "not_found", f"run {run_id} has no trace yet: it starts with the first step")
    return folder


@router.get("/runs/{run_id}/timeline", summary="Devices over the last steps")
async def get_timeline(
    service: OfService, run_id: str, steps: Annotated[int, Query(ge=1, le=50)] = 5
) -> TimelineObject:
    """Return the work of each device in the last steps of the run's trace, which is written about once a step."""
    folder = await trace_folder(service, run_id)
    timeline = await service.runner.run("timeline", {"trace": folder, "steps": steps}, TIMELINE_S)
    return TimelineObject.model_validate({"run_id": run_id} | timeline)
