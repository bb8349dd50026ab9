"""Shared code of the routes: the service and the caller as dependencies, the check of query parameters, the errors in
the OpenAPI document, and conversion of database rows into API objects."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request
from fastapi.dependencies.utils import get_flat_dependant
from fastapi.routing import APIRoute

from rlhfless.control.database.tables import Base, EventRow, RolloutRow, RunRow
from rlhfless.control.errors import invalid_request
from rlhfless.control.keys import Caller, requires
from rlhfless.control.objects import ApiObject, CheckpointObject, ErrorBody, EventObject, RolloutObject, RunObject
from rlhfless.control.service import Service
from rlhfless.scaling.prices import SECONDS_PER_HOUR
from rlhfless.spec.errors import Problem
from rlhfless.spec.explain import nearest
from rlhfless.util.text import redacted, redacted_text

DEEP = "deepObject"
"""OpenAPI style of `name[key]=value`. Routes declare it in their `openapi_extra`."""


async def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


OfService = Annotated[Service, Depends(_service)]
"""The service that received the request."""

Runs = Annotated[Caller, Depends(requires("run"))]
"""The caller of a route that starts or controls runs."""


async def known_query(request: Request) -> None:
    """Refuse unknown query parameters, which FastAPI ignores. Raises ApiError (422)."""
    if not request.query_params:
        return
    route: APIRoute = request.scope["route"]
    names = [field.alias for field in get_flat_dependant(route.dependant).query_params]
    extra = (route.openapi_extra or {}).get("parameters", [])
    deep = tuple(f"{parameter['name']}[" for parameter in extra if parameter.get("style") == DEEP)
    unknown = [
        name for name in request.query_params if name not in names and not (name.startswith(deep) and name[-1] == "]")
    ]
    if unknown:
        known = [*names, *(f"{name}...]" for name in deep)]
        listed = f"Parameters here: {', '.join(known)}" if known else "There are none here"
        problems = [Problem(name, "unknown query parameter", nearest(name, known) + listed) for name in unknown]
        raise invalid_request(problems)


_TEXTS = {
    401: "There is no API key, or the service does not know it.",
    403: "The API key lacks the required scope.",
    404: "There is no such object.",
    409: "The request is not possible in this state.",
    413: "The body is too large.",
    422: "Fields of the request are wrong; each is named.",
    429: "Too many requests; `Retry-After` says when to ask again.",
    500: "A fault of the service; its log has more.",
    503: "The database, or Ray, does not answer; ask again.",
    504: "The computation took too long.",
}

ERRORS: dict[int | str, dict[str, Any]] = {
    code: {"model": ErrorBody, "description": text} for code, text in _TEXTS.items()
}

_SCHEMA = {"application/json": {"schema": {"$ref": f"#/components/schemas/{ErrorBody.__name__}"}}}


def answers(content_type: str, schema: dict[str, Any], description: str) -> dict[int | str, dict[str, Any]]:
    """Return the documentation of a route that does not answer in JSON. Its errors are JSON."""
    errors: dict[int | str, dict[str, Any]] = {
        code: {"description": text, "content": _SCHEMA} for code, text in _TEXTS.items()
    }
    return {200: {"description": description, "content": {content_type: {"schema": schema}}}} | errors


T = TypeVar("T", bound=ApiObject)


def object_of(kind: type[T], row: Base, **others: Any) -> T:
    """Return an API object with fields taken from equally named columns and from `others`."""
    columns = kind.model_fields.keys() - {"object"} - others.keys()
    return kind(**{name: getattr(row, name) for name in columns}, **others)


def run_object(row: RunRow) -> RunObject:
    checkpoints = checkpoint_objects(row)
    return object_of(
        RunObject,
        row,
        status_reason=redacted_text(row.status_reason),
        device_hours=row.device_s / SECONDS_PER_HOUR,
        metadata=row.run_metadata,
        latest_checkpoint=checkpoints[0] if checkpoints else None,
        best_checkpoint=next((each for each in checkpoints if each.best), None),
        error=redacted(row.error or None),
        spec=redacted(row.resolved or row.spec),
    )


def checkpoint_objects(row: RunRow) -> list[CheckpointObject]:
    """Return the checkpoints of a run, newest first."""
    checkpoints = [CheckpointObject.model_validate(_known(CheckpointObject, entry)) for entry in row.checkpoints]
    return sorted(checkpoints, key=lambda checkpoint: -checkpoint.step)


def event_object(row: EventRow) -> EventObject:
    return object_of(EventObject, row, id=row.seq, message=redacted_text(row.message), data=redacted(row.data))


def rollout_object(row: RolloutRow) -> RolloutObject:
    values = _known(RolloutObject, row.data)
    return RolloutObject(
        run_id=row.run_id, step=row.step, **values | {"failures": redacted(values.get("failures", {}))}
    )


def _known(kind: type[ApiObject], values: dict[str, Any]) -> dict[str, Any]:
    """Drop fields of a driver's report that this version does not know (delivery.PROTOCOL)."""
    return {name: value for name, value in values.items() if name in kind.model_fields}
