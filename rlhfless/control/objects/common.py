"""The base of all objects of the API, lists and errors."""

from __future__ import annotations

from typing import Generic, Literal, TypeVar

from pydantic import Field

from rlhfless.planning.objects import ApiObject

T = TypeVar("T")


MOST_INTEGER = 2**63 - 1
"""Largest integer that a database stores."""


class ProblemObject(ApiObject):
    """A wrong field of a request."""

    param: str | None
    message: str
    hint: str | None


class ErrorObject(ApiObject):
    """An error: why a request or a run has failed."""

    code: str
    """The kind of error, for programs; never changes."""
    message: str
    param: str | None = None
    """The dotted field of the request."""
    problems: list[ProblemObject] = Field(default_factory=list)
    """All wrong fields; empty if there is only the message."""


class ErrorBody(ApiObject):
    """The body of every answer with an error."""

    error: ErrorObject


class ListObject(ApiObject, Generic[T]):
    """A page of a list, newest first unless said otherwise."""

    object: Literal["list"] = "list"
    data: list[T]
    has_more: bool
    """There is a next page: ask with `after` set to the id of the last object."""
