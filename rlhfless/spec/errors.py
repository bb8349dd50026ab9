"""Errors of a spec. They can be pickled, because functions raise them in other processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlhfless.util.errors import UserError


@dataclass(frozen=True, slots=True)
class Problem:
    """A single problem."""

    where: str
    """Dotted field of the spec, such as `rewards.0.weight`; empty if no single field is at fault."""
    what: str
    """Description of the problem, including the value."""
    hint: str = ""
    """How to fix it."""
    origin: str = ""
    """Where the user wrote it: `line 12`, or the `--set` text."""

    def __str__(self) -> str:
        place = f"{self.where} ({self.origin})" if self.where and self.origin else self.where or self.origin
        head = f"{place}: {self.what}" if place else self.what
        return f"{head}\n    {self.hint}" if self.hint else head


class _Problems(UserError):
    """An error that lists all problems of a check, not only the first."""

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        super().__init__(source, tuple(problems))
        self.source = source
        self.problems = tuple(problems)

    def __str__(self) -> str:
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        return "\n".join([f"{self.source}: {count}", *(f"- {problem}" for problem in self.problems)])


class SpecError(_Problems):
    """The spec is not a valid `RunSpec`. `source` is the file."""


class InputError(_Problems):
    """The spec is valid, but something it names (model, prompts, rewards, devices) does not fit."""
