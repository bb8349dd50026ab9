"""The web application: its routes, its error handlers, and its lifespan."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from rlhfless import __version__
from rlhfless.control.api import compute, drivers, events, fleet, health, metrics, page, results, runs
from rlhfless.control.api.routes import ERRORS, known_query
from rlhfless.control.database.access import Unavailable
from rlhfless.control.errors import ApiError, invalid_request
from rlhfless.control.gate import Gate
from rlhfless.control.keys import requires
from rlhfless.control.service import Service
from rlhfless.spec.errors import Problem
from rlhfless.spec.explain import PROBLEMS_ERROR, shown

PLACES = ("body", "query", "path", "header")
"""Parts of a request that have fields."""

RETRY_AFTER_S = 2.0
"""Seconds after which a client may retry while the database does not answer."""


def make_app(service: Service) -> FastAPI:
    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        asyncio.get_running_loop().run_in_executor(None, page.assets)
        async with service.working():
            yield

    app = FastAPI(
        title="rlhfless",
        version=__version__,
        description="Runs of reinforcement learning from feedback on devices that come and go.",
        lifespan=lifespan,
        docs_url=None,  # its page loads scripts from elsewhere
        redoc_url=None,
    )
    app.state.service = service
    app.add_middleware(Gate, settings=service.settings, open_to_all=lambda: not service.keys.are_required)
    of_all = [Depends(known_query), Depends(requires("read"))]
    for router in (runs.router, events.router, metrics.router, results.router, fleet.router, compute.router):
        app.include_router(router, prefix="/v1", responses=ERRORS, dependencies=of_all)
    app.include_router(drivers.router, include_in_schema=False)
    app.include_router(health.router)
    app.include_router(page.router)
    for kind, handler in ((ApiError, _api), (RequestValidationError, _invalid), (Unavailable, _away)):
        app.add_exception_handler(kind, handler)  # type: ignore[arg-type]  # Starlette's type is of any exception
    app.add_exception_handler(Exception, _fault)
    app.add_exception_handler(HTTPException, _http)  # type: ignore[arg-type]
    return app


async def _api(_: Request, error: ApiError) -> JSONResponse:
    return error.response()


async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
    content_type = request.headers.get("content-type", "")
    problems = [problem for each in error.errors() for problem in problems_of(each, content_type)]
    return invalid_request(problems).response()


def problems_of(error: Mapping[str, Any], content_type: str) -> list[Problem]:
    """Return the wrong fields of one error of a RequestValidationError."""
    if error["type"] != PROBLEMS_ERROR:
        return [problem_of(error, content_type)]
    section = [str(part) for part in error["loc"] if part not in PLACES]
    found: Sequence[Problem] = error["ctx"]["problems"]
    return [replace(problem, where=".".join(filter(None, (*section, problem.where)))) for problem in found]


def problem_of(error: Mapping[str, Any], content_type: str) -> Problem:
    source, *rest = error["loc"]
    if error["type"] == "json_invalid":
        return Problem("", f"is no JSON: {error['ctx']['error']} at character {rest[0]}")
    where = ".".join(str(part) for part in ([source, *rest] if source not in PLACES else rest))
    if error["type"] == "missing":
        return Problem(where, "is missing")
    what = "unknown key" if error["type"] == "extra_forbidden" else error["msg"].removeprefix("Input ")
    if not where and "json" not in content_type:
        return Problem("", "is not read as JSON", "send it with `Content-Type: application/json`")
    return Problem(where, f"{shown(error['input'])}: {what}")


async def _away(_: Request, error: Unavailable) -> JSONResponse:
    message = f"{error}; nothing was changed, ask again"
    return ApiError(503, "database_unavailable", message, retry_after_s=RETRY_AFTER_S).response()


async def _fault(_: Request, error: Exception) -> JSONResponse:
    return ApiError(500, "internal_error", f"{type(error).__name__}; the service's log has more").response()


async def _http(request: Request, error: HTTPException) -> JSONResponse:
    if error.status_code == 400:  # FastAPI's only use of 400: a body unreadable despite valid syntax
        message = "the body: is no JSON that can be read: it is not UTF-8, or nested too deeply"
        return ApiError(422, "invalid_request", message).response()
    code, what = {
        404: ("not_found", f"there is nothing at {request.url.path}; /openapi.json lists what there is"),
        405: ("method_not_allowed", f"{request.url.path} takes no {request.method}; /openapi.json lists what it takes"),
    }.get(error.status_code, ("error", str(error.detail)))
    return JSONResponse(ApiError(error.status_code, code, what).body(), error.status_code, error.headers)
