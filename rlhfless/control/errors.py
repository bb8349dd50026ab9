"""Errors of the API in one envelope: `{"error": {"code", "message", "param", "problems"}}`."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.responses import JSONResponse

from rlhfless.control.delivery import failure
from rlhfless.spec.errors import Problem
from rlhfless.util.text import redacted


class ApiError(Exception):
    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        param: str | None = None,
        problems: Sequence[Problem] = (),
        retry_after_s: float | None = None,
    ) -> None:
        """`code`: stable, for programs. `message`: names the value and the hint. `param`: the dotted field."""
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.problems = tuple(problems)
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, object]:
        return {"error": redacted(failure(self.code, self.message, self.param, self.problems))}

    def response(self) -> JSONResponse:
        headers = {} if self.retry_after_s is None else {"Retry-After": f"{self.retry_after_s:.0f}"}
        return JSONResponse(self.body(), self.status, headers)


def not_found(what: str, name: str) -> ApiError:
    return ApiError(404, "not_found", f"there is no {what} {name!r}")


def invalid_request(problems: Sequence[Problem]) -> ApiError:
    """Return the 422 error for wrong fields of a request. Its message names the first field."""
    first = problems[0]
    hint = f"; {first.hint}" if first.hint else ""
    message = f"{first.where or 'the body'}: {first.what}{hint}"
    return ApiError(422, "invalid_request", message, first.where or None, problems)


def refused(source: str, problems: Sequence[Problem]) -> ApiError:
    """Return the 422 error of a spec or another document, with every wrong field."""
    first = problems[0]
    count = "" if len(problems) == 1 else f" (and {len(problems) - 1} more)"
    hint = f"; {first.hint}" if first.hint else ""
    message = f"{source}: {first.where + ': ' if first.where else ''}{first.what}{hint}{count}"
    return ApiError(422, "invalid_spec", message, first.where or None, problems)
