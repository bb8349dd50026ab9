"""`package.module:function` to the callable, and what that callable wants to be called with.

The current folder is looked in last, so that a user's own file is found without being installed and cannot
stand before an installed package of the same name.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from rlhfless.rewards.protocol import RewardError
from rlhfless.spec.explain import nearest

ARGUMENTS = ("prompt", "response", "response_tokens", "finish_reason", "prompt_id", "sample_index", "columns")
"""What every sample has; a data set's column of the same name is reached through `columns`."""

# Code between this room and the user's: its own files, and the import system's.
_NOT_THEIRS = (os.path.dirname(__file__), os.path.dirname(importlib.__file__), "<frozen")

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True)
class Signature:
    """The names a callable takes."""

    required: frozenset[str]
    optional: frozenset[str]
    takes_all: bool
    """It has `**kwargs`."""

    def takes(self, name: str) -> bool:
        return self.takes_all or name in self.required or name in self.optional

    def unknown(self, available: Iterable[str]) -> list[str]:
        """Required names that nothing fills."""
        return sorted(self.required - set(available))


def load(reward: str, target: str) -> Callable[..., Any]:
    """Import the target. Raises RewardError that says which part of it fails and why."""
    module_name, _, attribute = target.partition(":")
    here: Any = _module(reward, target, module_name)
    for name in attribute.split("."):
        if not hasattr(here, name):
            names = [key for key in vars(here) if not key.startswith("_")] if hasattr(here, "__dict__") else []
            hint = nearest(name, names).strip()
            where = getattr(here, "__file__", None) or module_name
            raise RewardError(reward, f"{target!r}: there is no `{name}` in {where}. {hint}".rstrip(" ."))
        here = getattr(here, name)
    if inspect.isclass(here) or not callable(here):
        kind = "a class" if inspect.isclass(here) else f"a {type(here).__name__}"
        raise RewardError(reward, f"{target!r} is {kind}, not a function; name a function or a callable object")
    return here  # type: ignore[no-any-return]


def signature(reward: str, target: str, function: Callable[..., Any]) -> Signature:
    """What the function can be called with by name. Raises RewardError if it cannot be called so."""
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


def _module(reward: str, target: str, module_name: str) -> Any:
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if module_name == missing or module_name.startswith(f"{missing}."):
            what = f"{target!r}: there is no module {missing!r}, installed or in {here}"
            raise RewardError(reward, f"{what}. Start from its folder, or add that to PYTHONPATH") from error
        what = f"{target!r}: importing {module_name!r} needs the module {missing!r}, which is not installed"
        raise RewardError(reward, what) from error
    except (Exception, SystemExit) as error:  # whatever the user's module does while it is imported
        what = f"{target!r}: importing {module_name!r} failed: {cause(error)}"
        raise RewardError(reward, what) from error


def cause(error: BaseException) -> str:
    """`ValueError: text (file.py:12)`, with the line at which the user's own code was left."""
    text = traceback.format_exception_only(error)[-1].strip()
    if isinstance(error, SyntaxError):
        return f"{text} ({error.filename}:{error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    theirs = next((frame for frame in frames if not frame.filename.startswith(_NOT_THEIRS)), None)
    return f"{text} ({theirs.filename}:{theirs.lineno})" if theirs else text
