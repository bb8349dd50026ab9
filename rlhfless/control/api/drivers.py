"""Routes for drivers and for the host of a remote cluster. They are not part of the public interface."""

from __future__ import annotations

import asyncio
import hmac
import time
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Header
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from sqlalchemy.orm import Session

from rlhfless.control import ingest, store
from rlhfless.control.api.routes import OfService
from rlhfless.control.database.tables import LeaseRow, RunRow
from rlhfless.control.delivery import PROTOCOL, HostAnswer, Introduction, Push, PushAnswer
from rlhfless.control.errors import ApiError
from rlhfless.control.keys import hashed
from rlhfless.control.lifecycle import ENDED, DesiredState, Status
from rlhfless.control.ray_host import RayReport
from rlhfless.control.run_files import finds_mark, not_shared
from rlhfless.control.service import Service
from rlhfless.telemetry.sinks import FOR_DEVICES

router = APIRouter(prefix="/internal")

M = TypeVar("M", bound=BaseModel)


@router.post("/ray")
async def take_ray_report(
    service: OfService, report: RayReport, authorization: Annotated[str, Header()] = ""
) -> HostAnswer:
    """Take the report of a cluster's host, and answer with the nodes that are about to leave and the devices to
    request."""
    if not hmac.compare_digest(authorization.removeprefix("Bearer "), service.host_token):
        raise ApiError(401, "unauthorized", "this is not the host of this service's cluster")
    service.update_ray_report(report)
    return HostAnswer(leaving={} if service.pods is None else service.pods.leaving, wanted=service.supervisor.wanted)


@router.post("/runs/{run_id}/deliveries")
async def deliver(
    service: OfService, run_id: str, body: dict[str, Any], authorization: Annotated[str, Header()] = ""
) -> PushAnswer:
    """Take a push of a driver, and answer with the service's requests. Idempotent."""
    token = authorization.removeprefix("Bearer ")
    introduction = _parsed(Introduction, body)
    if introduction.protocol != PROTOCOL:
        protocol = introduction.protocol
        raise await service.database.write(
            lambda session: ingest.refuse_protocol(session, _driven_by(session, run_id, introduction, token), protocol)
        )
    push = _parsed(Push, body)
    if push.marked:
        await _require_one_folder(service, run_id, introduction, token)

    def take(session: Session) -> PushAnswer:
        run = _driven_by(session, run_id, introduction, token)
        waits = run.status == Status.PROVISIONING or push.now.reason.startswith(FOR_DEVICES)
        pods = service.pods.status_clause if service.pods is not None and waits else ""
        if pods and push.now.reason:
            push.now.reason += f"; {pods}"
        pushed = ingest.apply(session, run, push)
        lease = session.get(LeaseRow, run_id)
        desired: Any = run.desired_state
        if desired == DesiredState.RUN:
            desired = "cancel" if run.status in ENDED else "yield" if run_id in service.supervisor.yields else "run"
        reason = service.supervisor.lease_reasons.get(run_id, "")
        granted = lease.granted if lease else 0
        return PushAnswer(
            pushed=pushed,
            desired_state=desired,
            granted=granted,
            lease_reason=reason,
            size_reason=lease.size_reason if lease else "",
        )

    answer = await service.database.write(take)
    service.device_history.add(run_id, push.now.worked, time.time())
    service.fleets.add(push.now.fleet)
    if push.now.replicas:
        service.replicas[run_id] = push.now.replicas
    else:
        service.replicas.pop(run_id, None)
    if push.now.lease is not None and answer.granted == 0:
        service.supervisor.wake()
    return answer


def _parsed(message: type[M], body: dict[str, Any]) -> M:
    try:
        return message.model_validate(body)
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from error


def _driven_by(session: Session, run_id: str, introduction: Introduction, token: str) -> RunRow:
    """Return the run if the token is its driver's. Raises ApiError."""
    run = store.run_of(session, run_id)
    if not hmac.compare_digest(hashed(token), run.driver_token):
        status, code = (409, "stale_attempt") if introduction.attempt < run.attempt else (401, "unauthorized")
        raise ApiError(status, code, f"this is not the secret of attempt {run.attempt} of {run_id}")
    return run


async def _require_one_folder(service: Service, run_id: str, introduction: Introduction, token: str) -> None:
    """Require that the driver and the service see the same run folder. Raises ApiError."""
    run = await service.database.read(lambda session: _driven_by(session, run_id, introduction, token))
    folder = Path(run.folder)
    if not await asyncio.to_thread(finds_mark, folder, introduction.attempt, run.driver_token):
        message = not_shared(folder, "the service does not find there what the driver has written")
        raise await service.database.write(
            lambda session: ingest.refuse_folder(session, _driven_by(session, run_id, introduction, token), message)
        )
