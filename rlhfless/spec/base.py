"""The base class of all parts of a spec."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from rlhfless.redaction import user_in

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


class SpecModel(BaseModel):
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
