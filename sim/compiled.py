"""Loops as machine code, for code that runs so often that calls of numpy would take most of the time.

Such loops work on arrays that are passed to them, and allocate none. Each file of them calls nothing compiled in
another file: the compiler's cache on disk looks at the file of a function, not at what it calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

F = TypeVar("F", bound=Callable[..., Any])

LIGHT = {"error_model": "numpy", "_nrt": False}
"""No division is by zero, and not checking for it doubles the speed. Nothing is allocated, so no references to arrays
are counted: a call of a part costs little, and need not be inlined, which would take long to compile."""


def compiled(function: F) -> F:
    """The function as machine code, compiled when it is first called."""
    return _jit(function)


def part(function: F) -> F:
    """The same for a function that is only called from machine code: without an entry from Python it compiles
    faster."""
    return _jit(function, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def inlined(function: F) -> F:
    """The same, inlined at its call: for a function that returns a record, which compiled functions cannot, and for a
    long function with one call, which is then optimised once."""
    return _jit(function, inline="always")


def _jit(function: F, **options: Any) -> F:
    try:
        return cast(F, njit(cache=True, **LIGHT, **options)(function))
    except RuntimeError:  # no folder is writable, as in some containers: each process compiles again
        return cast(F, njit(**LIGHT, **options)(function))
