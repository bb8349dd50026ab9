"""Whose turn it is on devices that runs share. Pure: requests in, owners out, the clock handed in.

A *seat* is a group of devices that several runs are put on. It has one owner at a time, which alone has replicas awake
there; all others sleep, or wait. A run asks for all seats of a phase at once and gets them together, so that two runs
that need the same seats never hold one each and wait for the other.

Requests have an order: priority, which grows while a run waits; then the earliest deadline of the step (Liu and
Layland, J. ACM 20, 1973), which runs without a deadline do not have; then the time of asking. A request that waits
keeps its seats from all requests behind it, so nothing smaller overtakes it for ever.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

AGING_S = 600.0
"""A waiting run gains one level of priority in this time: a run of the lowest priority waits for a day and a half at
most behind a stream of runs of the highest one."""


def aged_priority(priority: int, waited_s: float) -> float:
    """The priority of a run that has waited, for seats or for devices."""
    return priority + max(waited_s, 0.0) // AGING_S


@dataclass(frozen=True, slots=True)
class _Request:
    run_id: str
    seats: frozenset[str]
    priority: int
    due_s: float
    asked_s: float


class TurnScheduler:
    """The owners of seats, and the runs that wait for them."""

    def __init__(self) -> None:
        self._owners: dict[str, str] = {}
        self._requests: dict[tuple[str, frozenset[str]], _Request] = {}

    def ask(self, run_id: str, seats: Collection[str], priority: int, now_s: float, due_s: float = math.inf) -> bool:
        """Ask for seats, all together. `due_s`: when the run's step should have ended. Returns whether the run owns
        them now; if not, it waits for them: ask again."""
        wanted = frozenset(seats)
        known = self._requests.get((run_id, wanted))
        asked_s = now_s if known is None else known.asked_s
        self._requests[run_id, wanted] = _Request(run_id, wanted, priority, due_s, asked_s)
        self._grant(now_s)
        return all(self._owners.get(seat) == run_id for seat in wanted)

    def owners(self, seats: Collection[str]) -> list[str]:
        """The runs whose turn it is on one of the seats."""
        return sorted({self._owners[seat] for seat in seats if seat in self._owners})

    def wanted(self, run_id: str, seats: Collection[str]) -> bool:
        """Whether another run waits for a seat of these that the run owns."""
        owned = {seat for seat in seats if self._owners.get(seat) == run_id}
        return any(request.run_id != run_id and request.seats & owned for request in self._requests.values())

    def pass_on(self, run_id: str, seats: Collection[str], now_s: float) -> None:
        """Give up the seats, on which the run has nothing awake any more, and its requests for them. Idempotent."""
        given = frozenset(seats)
        self._owners = {seat: owner for seat, owner in self._owners.items() if owner != run_id or seat not in given}
        self._requests = {
            key: request for key, request in self._requests.items() if key[0] != run_id or not key[1] & given
        }
        self._grant(now_s)

    def leave(self, run_id: str, now_s: float) -> None:
        """Give up all seats and requests of a run that has gone."""
        asked = (request.seats for request in self._requests.values())
        self.pass_on(run_id, frozenset(self._owners).union(*asked), now_s)

    def _grant(self, now_s: float) -> None:
        def rank(request: _Request) -> tuple[float, float, float, str]:
            priority = aged_priority(request.priority, now_s - request.asked_s)
            return -priority, request.due_s, request.asked_s, request.run_id

        kept: set[str] = set()
        for request in sorted(self._requests.values(), key=rank):
            if not request.seats & kept and all(self._owners.get(s, request.run_id) == request.run_id
                                                for s in request.seats):  # fmt: skip
                self._owners |= dict.fromkeys(request.seats, request.run_id)
                del self._requests[request.run_id, request.seats]
            else:
                kept |= request.seats
