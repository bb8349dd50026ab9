"""Loops as machine code: what is looked at so often that calls of numpy would take most of the time.

Such loops work on arrays that are handed to them, and allocate none. Each file of them calls nothing compiled in
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
    """The same, of what is only called from machine code: without a way in from Python it compiles in less time."""
    return _jit(function, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def inlined(function: F) -> F:
    """The same, put where it is called: for what returns a record, which no function can, and for what is long and
    called once, which then is optimised once."""
    return _jit(function, inline="always")


def _jit(function: F, **options: Any) -> F:
    try:
        return cast(F, njit(cache=True, **LIGHT, **options)(function))
    except RuntimeError:  # no folder that could be written, as in some containers: compiled anew by each process
        return cast(F, njit(**LIGHT, **options)(function))
