"""The errors of the clients."""

from __future__ import annotations

from typing import Any

import httpx

from rlhfless.control.objects import ErrorObject
from rlhfless.util.errors import UserError

URL, KEY = "RLHFLESS_URL", "RLHFLESS_API_KEY"
"""Environment variables with the service's address and the API key."""


class ServiceAway(UserError):
    """The service does not answer."""

    status = 4


class ApiFault(UserError):
    """The service refused a request or failed to serve it."""

    def __init__(self, status_code: int, error: ErrorObject) -> None:
        super().__init__(status_code, error)
        self.status_code = status_code
        """The HTTP status code."""
        self.error = error
        """The error with code, message, param, and all problems."""

    def __str__(self) -> str:
        """Return the message, and each problem on its own line."""
        problems = self.error.problems
        if not problems:
            return self.error.message
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        lines = [f"{self.error.message.partition(':')[0]}: {count}"]
        for problem in problems:
            lines.append(f"- {problem.param}: {problem.message}" if problem.param else f"- {problem.message}")
            lines += [f"    {problem.hint}"] if problem.hint else []
        return "\n".join(lines)


class Invalid(ApiFault):
    """422: some fields of the request are invalid."""


class Unauthorized(ApiFault):
    """401: the API key is missing or unknown."""

    def __str__(self) -> str:
        return (
            f"{super().__str__()}\n    set {KEY} to a key of the service; `rlhfless keys create NAME` makes one there"
        )


class Forbidden(ApiFault):
    """403: the API key lacks the required scope."""


class NotFound(ApiFault):
    """404: the object does not exist."""


class Conflict(ApiFault):
    """409: not possible in the current state."""


_BY_STATUS: dict[int, type[ApiFault]] = {401: Unauthorized, 403: Forbidden, 404: NotFound, 409: Conflict, 422: Invalid}


def fault_of(response: httpx.Response) -> ApiFault:
    """Build the error of an answer. A foreign answer, such as a proxy's page, becomes an error with its status."""
    try:
        body: Any = response.json()
        error = ErrorObject.model_validate(body["error"])
    except (ValueError, KeyError, TypeError):
        error = ErrorObject(code="http", message=f"HTTP {response.status_code} {response.reason_phrase}")
    return _BY_STATUS.get(response.status_code, ApiFault)(response.status_code, error)
