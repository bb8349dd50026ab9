"""Runs: create, list, get, cancel, pause, resume, delete."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Header, Query, Request, Response
from sqlalchemy.orm import Session

from rlhfless.control import store
from rlhfless.control.api.routes import DEEP, OfService, Runs, run_object
from rlhfless.control.database.tables import IdempotencyRow, RunRow
from rlhfless.control.errors import ApiError
from rlhfless.control.fleets import require_same_terms
from rlhfless.control.keys import Caller
from rlhfless.control.lifecycle import ENDED, DesiredState, NotPossible, Status, apply_request
from rlhfless.control.objects import ListObject, RunObject
from rlhfless.control.run_files import allow_changed
from rlhfless.control.service import Service
from rlhfless.control.spec_admission import accepted_spec, posted_spec
from rlhfless.control.store import RunOrder, ordered_runs
from rlhfless.control.supervisor import remove_folder
from rlhfless.prepare.inputs import KINDS
from rlhfless.scaling.accounting import Spent, reached
from rlhfless.spec import LimitsSpec, RunSpec
from rlhfless.spec.explain import shown

router = APIRouter(tags=["runs"])

KEY_CHARACTERS = 255

EXAMPLE = {
    "name": "math",
    "model": {"path": "Qwen/Qwen2.5-0.5B-Instruct"},
    "prompts": {
        "path": "agentica-org/DeepScaleR-Preview-Dataset",
        "prompt_field": "problem",
        "chat_template": True,
        "held_out": {"fraction": 0.01},
    },
    "rewards": [{"type": "math"}],
    "steps": 100,
}
"""A spec that can be planned anywhere, because its model's sizes are built in. The page's form starts with it."""


AGAIN: dict[int | str, dict[str, Any]] = {200: {"model": RunObject, "description": "The run of an earlier request."}}


@router.post("/runs", status_code=201, responses=AGAIN, summary="Start a run")
async def create_run(
    service: OfService,
    response: Response,
    caller: Runs,
    spec: Annotated[dict[str, Any], Body(openapi_examples={"small": {"value": EXAMPLE}})],
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=KEY_CHARACTERS)] = None,
) -> RunObject:
    """Queue a run. The spec's fields are checked now (422); files, hub names and devices are checked while the run is
    `validating`. With an `Idempotency-Key`, repeated requests create one run."""
    body_hash = hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()

    def answered(session: Session) -> RunObject | None:
        before = session.get(IdempotencyRow, (caller.owner, idempotency_key or ""))
        if before is None:
            return None
        if before.body_hash != body_hash:
            message = f"Idempotency-Key {idempotency_key!r} was used for another body, of run {before.run_id}"
            raise ApiError(409, "idempotency_conflict", message, "Idempotency-Key")
        return run_object(store.run_of(session, before.run_id))

    if idempotency_key is not None and (known := await service.database.read(answered)) is not None:
        response.status_code = 200
        return known
    checked = await accepted_spec(spec, service.settings)
    row = new_run(service, caller.owner, spec, checked)

    def create(session: Session) -> RunObject:
        if idempotency_key is not None and (known := answered(session)) is not None:  # a concurrent request created it
            return known
        require_same_terms(session, checked)
        session.add(row)
        session.flush()  # the rows below refer to it
        if idempotency_key is not None:
            made = {"owner": caller.owner, "key": idempotency_key, "body_hash": body_hash}
            session.add(IdempotencyRow(run_id=row.id, created_at=row.created_at, **made))
        store.add_event(session, row, "status", row.status_reason, data={"status": Status.QUEUED, "before": None})
        return run_object(row)

    made = await service.database.write(create)
    service.supervisor.wake()
    return made


def new_run(service: Service, owner: str, posted: dict[str, Any], spec: RunSpec) -> RunRow:
    now = time.time()
    run_id = f"{spec.name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime(now))}-{secrets.token_hex(4)}"
    return RunRow(
        id=run_id,
        name=spec.name,
        owner=owner,
        created_at=now,
        status=Status.QUEUED,
        status_reason="queued",
        status_since=now,
        desired_state=DesiredState.RUN,
        desired_at=now,
        priority=spec.priority,
        spec=posted,
        run_metadata=dict(spec.metadata),
        folder=str(service.settings.runs / run_id),
        steps=spec.steps,
    )


LABELS = {
    "name": "metadata",
    "in": "query",
    "style": DEEP,
    "explode": True,
    "required": False,
    "description": "Runs with these labels: `metadata[name]=value`.",
    "schema": {"type": "object", "additionalProperties": {"type": "string"}},
}


@router.get("/runs", summary="List runs", openapi_extra={"parameters": [LABELS]})
async def list_runs(
    request: Request,
    service: OfService,
    after: Annotated[str | None, Query(description="Id of the last run of the previous page.")] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    status: Annotated[list[Status] | None, Query()] = None,
    sort: Annotated[RunOrder, Query(description="Sort key. Runs without a value come last.")] = (RunOrder.CREATED),
    order: Annotated[Literal["asc", "desc"], Query(description="Sort direction.")] = "desc",
) -> ListObject[RunObject]:
    """List runs, newest first or by `sort`. `metadata[name]=value` selects runs by label."""
    labels = {
        name[len("metadata[") : -1]: value
        for name, value in request.query_params.items()
        if name.startswith("metadata[") and name.endswith("]")
    }
    rows, more = await service.database.read(
        lambda session: ordered_runs(session, limit, after, status or (), labels, sort, order == "desc")
    )
    return ListObject(data=[run_object(row) for row in rows], has_more=more)


@router.get("/runs/{run_id}", response_model=RunObject, summary="One run")
async def get_run(service: OfService, run_id: str) -> Response:
    """Return the status, progress, cost and spec of a run."""

    async def read() -> bytes:
        run = await service.database.read(lambda session: run_object(store.run_of(session, run_id)))
        return run.model_dump_json().encode()

    return Response(await service.run_events.json_of(run_id, read), media_type="application/json")


@router.post("/runs/{run_id}/cancel", summary="Cancel a run")
async def cancel_run(service: OfService, caller: Runs, run_id: str) -> RunObject:
    """Stop a run permanently. Its checkpoints are kept. Idempotent."""
    return await _request_state(service, caller, run_id, DesiredState.CANCEL)


@router.post("/runs/{run_id}/pause", summary="Pause a run")
async def pause_run(service: OfService, caller: Runs, run_id: str) -> RunObject:
    """Stop a run after its current step, with a checkpoint, and release its devices. Idempotent."""
    return await _request_state(service, caller, run_id, DesiredState.PAUSE)


@router.post("/runs/{run_id}/resume", summary="Resume a paused run")
async def resume_run(
    service: OfService,
    caller: Runs,
    run_id: str,
    changes: Annotated[
        dict[str, Any] | None,
        Body(
            description="`limits` to change, such as the one that was reached; `allow_changed`: which of `data`, "
            "`model` and `code` may have changed since the run started."
        ),
    ] = None,
) -> RunObject:
    """Queue a paused run again. It resumes from its newest checkpoint. `limits` replace those of its spec; null removes
    one. If its input files have changed, it pauses again and names them, unless `allow_changed` lists them.
    Idempotent."""
    allowed = allowed_of(changes or {})

    def change(session: Session) -> None:
        row = store.run_of(session, run_id)
        if allowed and row.status in (Status.PAUSED, Status.QUEUED):
            allow_changed(Path(row.folder), allowed)
        changed = row.spec | changes_of(row.spec, changes or {})
        if "limits" in (changes or {}):
            posted_spec(changed, service.settings)
        limits = LimitsSpec.model_validate(changed.get("limits") or {})
        if row.status == Status.PAUSED:
            require_below_limits(row, limits, changed != row.spec)
        if changed == row.spec:
            return
        if row.status not in (Status.PAUSED, Status.QUEUED):
            message = f"run {run_id} is {row.status}: its limits change when it is paused; pause it, then resume it"
            raise ApiError(409, "not_possible", message, "limits")
        row.spec = changed
        row.resolved = row.resolved and row.resolved | {"limits": limits.model_dump(mode="json")}

    return await _request_state(service, caller, run_id, DesiredState.RUN, change)


def require_below_limits(run: RunRow, limits: LimitsSpec, changed: bool) -> None:
    """Refuse to resume a run that has reached a limit, because it would stop again at once. Raises ApiError (409)."""
    # Only the run's driver knows the time in which it held devices.
    what = reached(limits, Spent(run.cost_usd, run.device_s, 0.0))
    if not what and not changed and run.error is not None and run.error["code"] == "limit_reached":
        what = run.error["message"]
    if what:
        hint = 'raise it: resume with `{"limits": {...}}`'
        raise ApiError(409, "limit_reached", f"run {run.id} would stop again: {what}; {hint}", "limits")


def changes_of(spec: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return the spec keys that change on resume. Raises ApiError (422)."""
    for name in changes:
        if name not in ("limits", "allow_changed"):
            message = f"{name!r} cannot change when a run is resumed; `limits` can, and what `allow_changed` lists"
            raise ApiError(422, "invalid_request", message, name)
    limits = changes.get("limits", {})
    if not isinstance(limits, dict):
        raise ApiError(422, "invalid_request", f"limits: {shown(limits)}: should be a dictionary", "limits")
    return {"limits": (spec.get("limits") or {}) | limits} if limits else {}


def allowed_of(changes: dict[str, Any]) -> tuple[str, ...]:
    """Return the kinds of inputs that may have changed when a run is resumed. Raises ApiError (422)."""
    kinds = changes.get("allow_changed", [])
    if not isinstance(kinds, list) or not all(isinstance(kind, str) and kind in KINDS for kind in kinds):
        message = f"allow_changed: {shown(kinds)}: should be a list of {', '.join(KINDS)}"
        raise ApiError(422, "invalid_request", message, "allow_changed")
    return tuple(dict.fromkeys(kinds))


def require_own(caller: Caller, run: RunRow) -> None:
    """Require that the caller's key created the run or is an admin key. Raises ApiError (403)."""
    if run.owner != caller.owner and "admin" not in caller.scopes:
        raise ApiError(403, "forbidden", f"run {run.id} belongs to {run.owner}; ask with its key, or an admin's")


async def _request_state(
    service: Service,
    caller: Caller,
    run_id: str,
    desired: DesiredState,
    change: Callable[[Session], None] | None = None,
) -> RunObject:
    words = {DesiredState.RUN: "resumed", DesiredState.PAUSE: "paused", DesiredState.CANCEL: "cancelled"}

    def request(session: Session) -> RunObject:
        row = store.run_of(session, run_id)
        require_own(caller, row)
        try:
            status, wanted = apply_request(Status(row.status), DesiredState(row.desired_state), desired)
        except NotPossible as error:
            raise ApiError(409, "not_possible", f"run {run_id}: {error}") from error
        if change is not None:
            change(session)
        if row.desired_state != wanted:
            row.desired_state, row.desired_at = wanted, time.time()
        if status != row.status:
            reason = {
                Status.PAUSING: "pausing after this step",
                Status.QUEUED: "queued again",
                Status.CANCELLING: "cancelled; its driver shuts down and releases its devices",
            }
            if status is Status.QUEUED:
                row.error = None  # of the previous attempt
            store.set_status(session, row, status, reason.get(status, words[desired]))
        return run_object(row)

    answer = await service.database.write(request)
    service.supervisor.wake()
    return answer


@router.delete("/runs/{run_id}", status_code=204, summary="Delete an ended run")
async def delete_run(service: OfService, caller: Runs, run_id: str) -> None:
    """Remove the run with its events, metrics and folder. Checkpoints at `checkpoint.url` are kept."""

    def forget(session: Session) -> str:
        row = store.run_of(session, run_id)
        require_own(caller, row)
        if row.status not in ENDED:
            first = "wait for its end" if row.status == Status.CANCELLING else "cancel it first"
            raise ApiError(409, "not_possible", f"run {run_id} is {row.status} and cannot be deleted yet; {first}")
        store.forget_run(session, run_id)
        store.touch(session, row)
        return row.folder

    folder = await service.database.write(forget)
    service.run_events.forget(run_id)
    await asyncio.to_thread(remove_folder, Path(folder), service.settings)
