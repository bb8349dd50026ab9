"""Checks and their outcomes. A check that needs another's result is skipped unless that check succeeds."""

from __future__ import annotations

import inspect
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rlhfless.selftest.subject import Subject

State = Literal["ok", "failed", "not applicable"]

Measured = Mapping[str, Any]
"""Figures by name; a name ends with its unit. Values are plain, so that JSON can hold them."""


class NotHere(Exception):
    """The check does not apply to this machine. The message gives the reason."""


class Wrong(Exception):
    """The check found a fault. The message names it, and `measured` holds the figures."""

    def __init__(self, why: str, **measured: Any) -> None:
        super().__init__(why)
        self.measured = measured


Run = Callable[[Subject], Measured]
"""Raises NotHere or Wrong. Any other error is a failure as well."""


@dataclass(frozen=True, slots=True)
class Check:
    """A check of one property of the machine. The docstring of `run` is shown as its description."""

    name: str
    remedy: str
    """Advice for a failed check."""
    run: Run
    needs: tuple[str, ...] = ()
    """Checks that must have succeeded."""
    gpus: int = 0
    """Fewest GPUs of a node for the check to apply."""


def check(name: str, remedy: str, *, needs: tuple[str, ...] = (), gpus: int = 0) -> Callable[[Run], Check]:
    """Turn a function into a check."""
    return lambda run: Check(name, remedy, run, needs, gpus)


@dataclass(frozen=True, slots=True)
class CheckOutcome:
    """The outcome of a check."""

    name: str
    measures: str
    state: State
    seconds: float
    measured: Measured = field(default_factory=dict)
    why: str = ""
    """Reason for a failure, or for not applying."""
    remedy: str = ""
    """Advice for a failed check."""


def outcomes(subject: Subject, checks: Sequence[Check]) -> Iterator[CheckOutcome]:
    """Run the checks in order."""
    states: dict[str, State] = {}
    for each in checks:
        outcome = _outcome(each, subject, states)
        states[each.name] = outcome.state
        yield outcome


def _outcome(check: Check, subject: Subject, states: Mapping[str, State]) -> CheckOutcome:
    def run() -> Measured:
        if subject.gpus < check.gpus:
            raise NotHere(f"it needs {check.gpus} GPU(s), and this node has {subject.gpus}")
        if missing := [name for name in check.needs if states.get(name) != "ok"]:
            raise NotHere(f"it needs what {' and '.join(missing)} did not find")
        return check.run(subject)

    return outcome_of(check.name, check.remedy, inspect.getdoc(check.run) or "", run)


def outcome_of(name: str, remedy: str, measures: str, run: Callable[[], Measured]) -> CheckOutcome:
    """Run one check."""
    began_s = time.monotonic()

    def ended(state: State, measured: Measured, why: str = "") -> CheckOutcome:
        seconds = time.monotonic() - began_s
        return CheckOutcome(name, measures, state, seconds, measured, why, remedy if state == "failed" else "")

    try:
        return ended("ok", run())
    except NotHere as reason:
        return ended("not applicable", {}, str(reason))
    except Wrong as fault:
        return ended("failed", fault.measured, str(fault))
    except Exception as error:
        return ended("failed", {"trace": traceback.format_exc()}, f"{type(error).__name__}: {error}")
