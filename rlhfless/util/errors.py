"""Errors that the user can correct. Other exceptions are faults of the program and keep their traceback."""

from __future__ import annotations


class UserError(Exception):
    """An error that the user can correct. Its text is the complete message: the problem, its place, and a hint."""

    status = 2
    """Exit code of a command that this error ends."""
    where = ""
    """The field of the spec at fault; empty if there is none."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its class name if it has no text."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def class_and_line(error: BaseException) -> str:
    """Return an error's class and the first line of its text."""
    name, line = type(error).__name__, first_line(error)
    return name if line == name else f"{name}: {line}"
