"""The ranks of a function as one: a call goes to all of them, and if one fails all of them end.

Ranks wait for each other inside collective operations. When one raises, dies or hangs, the others notice late, with an
error of the network, or never. So the first failure ends the wait; after a short grace, in which the failure that began
it may still arrive, the ranks are ended, and that failure is the one that is named. An error that all ranks raise
alike, such as a refused argument, leaves them in step, and they go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from rlhfless.functions.base import FunctionBroken
from rlhfless.util.errors import UserError, class_and_line, first_line

GRACE_S = 10.0
"""The wait for failures of other ranks after the first: Ray reports a killed process after 1 to 5 seconds, and gloo's
ranks see its connections closed before that."""

_OF_NETWORK = ("gloo", "nccl", "connection", "socket", "broken pipe", "timed out", "timeout")
"""Words in the errors of a rank that waits for another one (torch's backends have no type of error in common)."""


class RankGroup:
    """1..N rank actors, by rank. `function` is its name in errors."""

    def __init__(self, ranks: Sequence[Any], limit_s: float, function: str) -> None:
        self.ranks = tuple(ranks)
        self._limit_s = limit_s
        self._function = function
        self._broken: BaseException | None = None

    async def all(self, method: str, *arguments: object, limit_s: float | None = None) -> list[Any]:
        """Call a method of every rank at the same time; the answers, by rank. See `_judge` for what it raises, also
        after `limit_s`, or else the group's own limit."""
        calls = [getattr(rank, method).remote(*arguments) for rank in self.ranks]
        return await self._answers(method, calls, limit_s or self._limit_s)

    async def first(self, method: str, *arguments: object) -> Any:
        """Call a method of rank 0 alone."""
        return (await self._answers(method, [getattr(self.ranks[0], method).remote(*arguments)], self._limit_s))[0]

    def end(self) -> None:
        """Kill the ranks."""
        for rank in self.ranks:
            ray.kill(rank)

    async def _answers(self, method: str, calls: Sequence[Awaitable[Any]], limit_s: float) -> list[Any]:
        tasks = [asyncio.ensure_future(call) for call in calls]
        try:
            done, waiting = await asyncio.wait(tasks, timeout=limit_s, return_when=asyncio.FIRST_EXCEPTION)
            if waiting and any(task.exception() for task in done):
                await asyncio.wait(waiting, timeout=GRACE_S)
            failures = {number: task.exception() for number, task in enumerate(tasks) if task.done()}
            causes = {number: error for number, error in failures.items() if error is not None}
            late = [number for number, task in enumerate(tasks) if not task.done()]
        finally:
            for task in tasks:
                task.cancel()
        if not causes and not late:
            return [task.result() for task in tasks]
        # Other calls that are under way fail because the ranks were ended; all of them get the reason.
        raise self._broken or self._judge(method, causes, late, len(tasks), limit_s)

    def _judge(
        self, method: str, failures: Mapping[int, BaseException], late: list[int], asked: int, limit_s: float
    ) -> BaseException:
        """The error to raise: the ranks' own if all raised alike, which leaves them in step; else they are ended."""
        causes = {number: _cause(error) for number, error in failures.items()}
        if len(failures) == asked and all(map(_raised, failures.values())):
            kinds = {type(cause) for cause in causes.values()}
            if len(kinds) == 1 and (asked == 1 or not any(map(_of_network, causes.values()))):
                return causes[0]
        self._broken = self._blamed(method, failures, causes, late, limit_s)
        self.end()
        return self._broken

    def _blamed(
        self,
        method: str,
        failures: Mapping[int, BaseException],
        causes: Mapping[int, BaseException],
        late: list[int],
        limit_s: float,
    ) -> BaseException:
        """An error that the user can correct, or else FunctionBroken that names the rank which failed first and its
        error."""
        if not causes:
            ranks = ", ".join(map(str, late))
            return FunctionBroken(
                f"a {self._function} rank did not finish `{method}` within {limit_s:.0f} s (still at work: {ranks})"
            )
        number = min(causes, key=lambda number: (_order(failures[number], causes[number]), number))
        cause = causes[number]
        if isinstance(cause, UserError):
            return cause
        what = f"was lost during `{method}`" if not _raised(failures[number]) else f"failed in `{method}`"
        reason = class_and_line(cause) if _raised(failures[number]) else first_line(cause)
        broken = FunctionBroken(f"{self._function} rank {number} {what}: {reason}")
        broken.__cause__ = cause
        return broken


def _cause(error: BaseException) -> BaseException:
    """The error that the rank's method raised, or else the error of the call."""
    return error.cause if isinstance(error, RayTaskError) else error


def _raised(error: BaseException) -> bool:
    return isinstance(error, RayTaskError) or not isinstance(error, RayError)


def _order(error: BaseException, cause: BaseException) -> int:
    """The order of blame: lost ranks first, then errors of a rank's own, last errors of ranks that waited for
    another."""
    return 0 if not _raised(error) else 2 if _of_network(cause) else 1


def _of_network(cause: BaseException) -> bool:
    if isinstance(cause, UserError):
        return False
    names = {kind.__name__ for kind in type(cause).__mro__}
    message = str(cause).lower()
    return "DistError" in names or (isinstance(cause, RuntimeError) and any(word in message for word in _OF_NETWORK))
