"""Compile loops to machine code, for code that runs so often that numpy calls would take most of the time.

Such loops work on arrays that are passed to them, and allocate none. A file of such loops calls nothing compiled in
another file: the compiler's on-disk cache checks the file of a function, not the files it calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

F = TypeVar("F", bound=Callable[..., Any])

LIGHT = {"error_model": "numpy", "_nrt": False}
"""No division is by zero, and skipping the check doubles the speed. Nothing is allocated, so references to arrays are
not counted: a call of a part costs little and needs no inlining, which would be slow to compile."""


def compiled(function: F) -> F:
    """Compile a function to machine code at its first call."""
    return _jit(function)


def part(function: F) -> F:
    """Compile a function that is only called from machine code: without a Python entry point it compiles faster."""
    return _jit(function, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def inlined(function: F) -> F:
    """Compile a function inlined at its call.

    Use it for a function that returns a record, which compiled functions cannot, or for a long one with a single call,
    which is then optimised once.
    """
    return _jit(function, inline="always")


def _jit(function: F, **options: Any) -> F:
    try:
        return cast(F, njit(cache=True, **LIGHT, **options)(function))
    except RuntimeError:  # no writable folder, as in some containers: each process compiles again
        return cast(F, njit(**LIGHT, **options)(function))
