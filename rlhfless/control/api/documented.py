"""What the OpenAPI document says of errors."""

from __future__ import annotations

from typing import Any

from rlhfless.control.objects import ErrorBody

_TEXTS = {
    401: "No API key, or none that is known.",
    403: "The key's scopes do not reach so far.",
    404: "There is no such object.",
    409: "Not possible in this state.",
    413: "The body is too large.",
    422: "Fields of the request are wrong; each is named.",
    429: "Too many requests; `Retry-After` says when to ask again.",
    500: "A fault of the service; its log has more.",
    503: "The database, or Ray, is away; ask again.",
    504: "What was to be computed took too long.",
}

ERRORS: dict[int | str, dict[str, Any]] = {
    code: {"model": ErrorBody, "description": text} for code, text in _TEXTS.items()
}

_SCHEMA = {"application/json": {"schema": {"$ref": f"#/components/schemas/{ErrorBody.__name__}"}}}


def answers(content_type: str, schema: dict[str, Any], description: str) -> dict[int | str, dict[str, Any]]:
    """The documented answers of a route that does not answer in JSON; its errors are JSON all the same."""
    errors: dict[int | str, dict[str, Any]] = {
        code: {"description": text, "content": _SCHEMA} for code, text in _TEXTS.items()
    }
    return {200: {"description": description, "content": {content_type: {"schema": schema}}}} | errors
