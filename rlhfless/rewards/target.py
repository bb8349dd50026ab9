"""From `package.module:function` to the callable, and the arguments that it takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from rlhfless.rewards.protocol import RewardError
from rlhfless.spec.imports import TargetError, load_target

ARGUMENTS = ("prompt", "response", "response_tokens", "finish_reason", "prompt_id", "sample_index", "columns")
"""The fields of every sample; a data set's column of the same name is reached through `columns`."""

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True)
class Signature:
    """The names a callable takes."""

    required: frozenset[str]
    optional: frozenset[str]
    takes_all: bool
    """Whether it has `**kwargs`."""

    def takes(self, name: str) -> bool:
        return self.takes_all or name in self.required or name in self.optional

    def unknown(self, available: Iterable[str]) -> list[str]:
        """Required names without a value."""
        return sorted(self.required - set(available))


def load(reward: str, target: str) -> Callable[..., Any]:
    """Import the target. Raises RewardError that says which part of it fails and why."""
    try:
        loaded = load_target(target)
    except TargetError as error:
        raise RewardError(reward, str(error)) from error
    if inspect.isclass(loaded) or not callable(loaded):
        kind = "a class" if inspect.isclass(loaded) else f"a {type(loaded).__name__}"
        raise RewardError(reward, f"{target!r} is {kind}, not a function; name a function or a callable object")
    return loaded  # type: ignore[no-any-return]


def signature(reward: str, target: str, function: Callable[..., Any]) -> Signature:
    """The keyword parameters of the function. Raises RewardError if it cannot be called by keyword."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise RewardError(reward, f"{target!r} tells no signature ({error}); wrap it in a function") from error
    for parameter in parameters:
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            what = f"{target!r} takes `{parameter.name}` by position only; rewards are called by keyword"
            raise RewardError(reward, f"{what}. Take the `/` out of its signature")
    named = [parameter for parameter in parameters if parameter.kind in _NAMED]
    required = frozenset(each.name for each in named if each.default is each.empty)
    return Signature(
        required=required,
        optional=frozenset(each.name for each in named) - required,
        takes_all=any(each.kind is each.VAR_KEYWORD for each in parameters),
    )
