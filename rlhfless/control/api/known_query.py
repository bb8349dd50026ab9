"""Query parameters that a route does not know are refused, as unknown keys of a body are: FastAPI ignores them."""

from __future__ import annotations

from fastapi import Request
from fastapi.dependencies.utils import get_flat_dependant
from fastapi.routing import APIRoute

from rlhfless.control.errors import ApiError
from rlhfless.spec.errors import Problem
from rlhfless.spec.explain import nearest

DEEP = "deepObject"
"""OpenAPI's style of `name[key]=value`, which routes that take it say in their `openapi_extra`."""


def known_query(request: Request) -> None:
    """A dependency of every route of the API. Raises ApiError (422)."""
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
        raise _unknown(unknown, known)


def _unknown(names: list[str], known: list[str]) -> ApiError:
    parameters = f"Parameters here: {', '.join(known)}" if known else "There are none here"
    problems = [Problem(name, "unknown query parameter", nearest(name, known) + parameters) for name in names]
    message = f"{names[0]}: {problems[0].what}; {problems[0].hint}"
    return ApiError(422, "invalid_request", message, names[0], problems)
