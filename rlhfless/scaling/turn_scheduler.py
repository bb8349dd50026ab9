"""Turns of runs on shared device groups. Pure: requests in, owners out; the time is an argument.

A device group has one owner at a time. Only the owner has awake replicas there; the other runs sleep or wait. A run
requests all groups of a phase at once and gets them together, which avoids deadlocks between runs that need the same
groups.

Requests are ordered by priority, which grows while a run waits; then by the earliest deadline of the step (Liu and
Layland, J. ACM 20, 1973), if the run has one; then by request time. A waiting request reserves its groups against all
requests behind it, so smaller requests cannot overtake it forever.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

AGING_S = 600.0
"""Time in which a waiting run gains one level of priority. A run of the lowest priority thus waits at most a day and
a half behind a stream of runs of the highest priority."""


def aged_priority(priority: int, waited_s: float) -> float:
    """Return the priority of a run that has waited for a turn or for devices."""
    return priority + max(waited_s, 0.0) // AGING_S


@dataclass(frozen=True, slots=True)
class _Request:
    run_id: str
    groups: frozenset[str]
    priority: int
    due_s: float
    asked_s: float


class TurnScheduler:
    """The owners of device groups, and the runs that wait for them."""

    def __init__(self) -> None:
        self._owners: dict[str, str] = {}
        self._requests: dict[tuple[str, frozenset[str]], _Request] = {}

    def ask(self, run_id: str, groups: Collection[str], priority: int, now_s: float, due_s: float = math.inf) -> bool:
        """Request groups together, and return whether the run owns all of them now. If not, it waits: call again.

        `due_s` is the deadline of the run's step.
        """
        wanted = frozenset(groups)
        known = self._requests.get((run_id, wanted))
        asked_s = now_s if known is None else known.asked_s
        self._requests[run_id, wanted] = _Request(run_id, wanted, priority, due_s, asked_s)
        self._grant(now_s)
        return all(self._owners.get(group) == run_id for group in wanted)

    def owners(self, groups: Collection[str]) -> list[str]:
        """Return the runs that own at least one of the groups."""
        return sorted({self._owners[group] for group in groups if group in self._owners})

    def wanted(self, run_id: str, groups: Collection[str]) -> bool:
        """Return whether another run waits for one of these groups that the run owns."""
        owned = {group for group in groups if self._owners.get(group) == run_id}
        return any(request.run_id != run_id and request.groups & owned for request in self._requests.values())

    def pass_on(self, run_id: str, groups: Collection[str], now_s: float) -> None:
        """Release groups on which the run has nothing awake any more, and its requests for them. Idempotent."""
        given = frozenset(groups)
        self._owners = {group: owner for group, owner in self._owners.items() if owner != run_id or group not in given}
        self._requests = {
            key: request for key, request in self._requests.items() if key[0] != run_id or not key[1] & given
        }
        self._grant(now_s)

    def leave(self, run_id: str, now_s: float) -> None:
        """Release all groups and requests of a run that has ended."""
        asked = (request.groups for request in self._requests.values())
        self.pass_on(run_id, frozenset(self._owners).union(*asked), now_s)

    def _grant(self, now_s: float) -> None:
        def rank(request: _Request) -> tuple[float, float, float, str]:
            priority = aged_priority(request.priority, now_s - request.asked_s)
            return -priority, request.due_s, request.asked_s, request.run_id

        kept: set[str] = set()
        for request in sorted(self._requests.values(), key=rank):
            free = all(self._owners.get(group, request.run_id) == request.run_id for group in request.groups)
            if free and not request.groups & kept:
                self._owners |= dict.fromkeys(request.groups, request.run_id)
                del self._requests[request.run_id, request.groups]
            else:
                kept |= request.groups
