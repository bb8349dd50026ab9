"""Events of runs, as a list and as a stream."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import StreamingResponse
from fastapi.sse import format_sse_event
from sqlalchemy.orm import Session

from rlhfless.control import store
from rlhfless.control.api.routes import OfService, answers, event_object, run_object
from rlhfless.control.database.tables import EventRow, RunRow
from rlhfless.control.lifecycle import ENDED
from rlhfless.control.objects import MOST_INTEGER, EventObject, ListObject
from rlhfless.control.service import Service

router = APIRouter(tags=["events"])

SSE = "text/event-stream"

KEEP_ALIVE_S = 15.0
"""Seconds between comments on a stream without events, because proxies close connections that are silent for a
minute."""

PER_READ = 500

SSE_DOC: dict[int | str, dict[str, Any]] = {
    200: {"content": {SSE: {"schema": {"type": "string"}}}, "description": "A list, or a stream of events."}
}

STREAM_DOC = answers(SSE, {"type": "string"}, "A stream of events.")


@router.get("/runs/{run_id}/events", response_model=ListObject[EventObject], responses=SSE_DOC, summary="Events")
async def list_events(
    request: Request,
    service: OfService,
    run_id: str,
    after: Annotated[int, Query(ge=0, le=MOST_INTEGER, description="Id of the last known event.")] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    last_event_id: Annotated[
        int | None, Header(ge=0, le=MOST_INTEGER, description="Like `after`; sent by clients that reconnect.")
    ] = None,
) -> ListObject[EventObject] | StreamingResponse:
    """List events, oldest first. With `Accept: text/event-stream`, stream past and future events until the run ends;
    `Last-Event-ID` resumes a stream after an event without loss or repetition."""
    run = await service.run(run_id)
    if SSE in request.headers.get("accept", ""):
        start = after if last_event_id is None else last_event_id
        return StreamingResponse(_stream(service, run, start), media_type=SSE, headers={"Cache-Control": "no-store"})
    rows, more = await service.database.read(lambda session: store.events(session, run_id, after, limit))
    return ListObject(data=[event_object(row) for row in rows], has_more=more)


async def _stream(service: Service, run: RunRow, after: int) -> AsyncIterator[bytes]:
    read = service.database.read
    while run.status not in ENDED or after < run.last_event:
        recent = service.run_events.recent(run.id, after)
        events: Sequence[EventRow] = recent or ()
        if recent is None:
            events, _ = await read(functools.partial(store.events, run_id=run.id, after=after, limit=PER_READ))
        for event in events:
            yield format_sse_event(data_str=event_object(event).model_dump_json(), event=event.type, id=str(event.seq))
            after = event.seq
            if event.type == "status" and event.data.get("status") in ENDED:
                return  # the run's last event
        if events or await service.run_events.more(run.id, after, KEEP_ALIVE_S):
            continue
        run = await read(functools.partial(store.run_of, run_id=run.id))
        yield b": still here\n\n"


@router.get("/events", responses=STREAM_DOC, response_class=StreamingResponse, summary="Changes of all runs")
async def watch_runs(service: OfService) -> StreamingResponse:
    """Stream each run whenever it changes (`event: run`), and its id when it is deleted (`event: deleted`)."""
    return StreamingResponse(_changes(service), media_type=SSE, headers={"Cache-Control": "no-store"})


async def _changes(service: Service) -> AsyncIterator[bytes]:
    watcher = service.run_events.watch()
    try:
        yield b": watching\n\n"
        while True:
            changed = await watcher.changed(KEEP_ALIVE_S)
            if not changed:
                yield b": still here\n\n"
            for run_id in changed:
                row = await service.database.read(functools.partial(Session.get, entity=RunRow, ident=run_id))
                if row is None:
                    yield format_sse_event(data_str=f'{{"id": "{run_id}"}}', event="deleted")
                else:
                    yield format_sse_event(data_str=run_object(row).model_dump_json(), event="run")
    finally:
        watcher.close()
