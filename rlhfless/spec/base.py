"""The base class of all parts of a spec."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rlhfless.spec.errors import Problem
from rlhfless.spec.explain import several
from rlhfless.util.redaction import user_in

MOST_PROCESSES = 4096
"""The most replicas, ranks, devices or workers of one function: the driver keeps an object and a connection for
each."""

MOST_TOKENS = 1 << 24
"""The most tokens of a sequence or a batch: 16 times the longest context of a model."""

MOST_STEPS = 10_000_000

MOST_S = 1e8
"""Three years. Timers and locks of Python raise OverflowError for times much longer than that."""

Processes = Annotated[int, Field(ge=1, le=MOST_PROCESSES)]
Tokens = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
Steps = Annotated[int, Field(ge=1, le=MOST_STEPS)]
Duration = Annotated[float, Field(gt=0, le=MOST_S)]
"""Seconds."""

Ranks = Processes | Literal["auto"]
"""Processes that share a model; `auto` is decided by the memory plan."""


def count_of(ranks: Ranks) -> int:
    """`ranks` as a number: 1 where `auto` is still to be decided."""
    return 1 if ranks == "auto" else ranks


def without_user(url: str, hint: str) -> str:
    """The URL. Raises ValueError, with the hint, if it has a user or a password: URLs are shown and logged."""
    if user_in(url):
        raise ValueError(f"a user or a password in a URL would show in logs and traces; {hint}")
    return url


class StrictModel(BaseModel):
    """Takes `true` for no number and 1 for no `true`: pydantic would convert one to the other without a word."""

    @model_validator(mode="before")
    @classmethod
    def _numbers_are_not_booleans(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        problems = [
            Problem(".".join((name, *place)), f"{each!r}: {what}")
            for name, field in cls.model_fields.items()
            if name in values
            for wrong, what in _refused(frozenset(_scalars(field.annotation)))
            for place, each in _leaves(values[name])
            if type(each) in wrong
        ]
        if problems:
            raise several(problems)
        return values


def _refused(allowed: frozenset[type]) -> Iterator[tuple[tuple[type, ...], str]]:
    """The types of values that a field refuses, by the types that it allows, and what it should be instead."""
    if bool in allowed and not allowed & {int, float, object}:
        yield (int, float), "should be true or false"
    elif allowed & {int, float} and not allowed & {bool, object}:
        yield (bool,), "should be a number, not true or false"


def _scalars(annotation: Any) -> Iterator[type]:
    """The types of the plain values that an annotation allows; `object` where it allows any, or has models: these check
    their own values."""
    if isinstance(annotation, type) and annotation in (bool, int, float):
        yield annotation
    elif (
        annotation is Any
        or annotation is object
        or (isinstance(annotation, type) and issubclass(annotation, BaseModel))
    ):
        yield object
    elif get_origin(annotation) is Literal:
        yield from (type(value) for value in get_args(annotation) if isinstance(value, bool | int))
    elif get_origin(annotation) is Annotated:
        yield from _scalars(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, types.UnionType, tuple, list, set, frozenset):
        for part in get_args(annotation):
            yield from _scalars(part)
    elif get_origin(annotation) in (dict, Mapping):
        yield from _scalars(get_args(annotation)[1])


def _leaves(value: Any, place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The plain values in a value, each with the keys that lead to it."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, each in items:
        yield from _leaves(each, (*place, str(key)))
    if not isinstance(value, Mapping | list | tuple):
        yield place, value


class SpecModel(StrictModel):
    """A frozen part of a `RunSpec`.

    Unknown keys are refused: a key that silently does nothing would be hard to find. Defaults live
    here and nowhere else. Each field's docstring is its help text, in the JSON schema and in editors.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        # Users expect a key `model`; pydantic needs the prefix `model_` only for its own methods.
        protected_namespaces=(),
    )
