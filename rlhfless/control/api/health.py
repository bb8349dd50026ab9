"""Whether the service lives, and whether runs can start."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from sqlalchemy import text

from rlhfless.control.database.access import Unavailable
from rlhfless.control.service import service_of

router = APIRouter(tags=["health"])


@router.get("/healthz", summary="The service lives")
async def healthz() -> dict[str, str]:
    """Says nothing of the database or Ray: a service that waits for them must not be restarted."""
    return {"status": "ok"}


@router.get("/readyz", summary="Runs can start", responses={503: {"description": "What is waited for."}})
async def readyz(request: Request) -> JSONResponse:
    """200 when database and Ray are there; 503 says what is waited for."""
    service = service_of(request.app)
    waiting = []
    try:
        await service.database.read(lambda session: session.execute(text("SELECT 1")).scalar())
    except Unavailable as error:
        waiting.append(str(error))
    ray = service.ray()
    if ray is None:
        where = service.settings.ray_address
        waiting.append(f"waiting for the Ray cluster at {where}" if where else "waiting for Ray to start")
    devices = service.devices_there()
    body = {"status": "waiting" if waiting else "ok", "waiting_for": waiting, "devices": devices}
    return JSONResponse(body, 503 if waiting else 200)
