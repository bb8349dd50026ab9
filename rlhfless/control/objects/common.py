"""The base of all objects of the API, lists and errors."""

from __future__ import annotations

from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, model_validator

T = TypeVar("T")


MOST_INTEGER = 2**63 - 1
"""Largest integer that a database keeps."""


class ApiObject(BaseModel):
    """The base of all objects."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, protected_namespaces=())


class ProblemObject(ApiObject):
    """One wrong field."""

    param: str | None
    message: str
    hint: str | None

    @model_validator(mode="before")
    @classmethod
    def _of_earlier_versions(cls, values: Any) -> Any:
        """Accept stored errors, and errors of older drivers, whose hint is named `mend`."""
        if isinstance(values, dict) and "mend" in values:
            values = {key: value for key, value in values.items() if key != "mend"} | {"hint": values["mend"]}
        return values


class ErrorObject(ApiObject):
    """Why something failed."""

    code: str
    """For programs; does not change."""
    message: str
    param: str | None = None
    """Dotted field of the request."""
    problems: list[ProblemObject] = []
    """All of them; empty if there is only the message."""


class ErrorBody(ApiObject):
    """The body of every answer that is no success."""

    error: ErrorObject


class ListObject(ApiObject, Generic[T]):
    """A page of a list, newest first unless said otherwise."""

    object: Literal["list"] = "list"
    data: list[T]
    has_more: bool
    """There are further ones: ask with `after` set to the last one's id."""
