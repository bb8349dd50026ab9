"""The rows of a simulated run, and the part of its holdings that is paid for.

Live, a sleeping replica pays for its share of a device. A simulated device has one owner at a time, and is paid
for once, however many replicas sleep on it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import replace
from operator import attrgetter
from typing import Any

from rlhfless.records import Decision, FunctionName, Holding, Invocation, ReplicaState, StepRecord
from rlhfless.records.traces import Trace, TraceMeta
from rlhfless.scaling.accounting import Interval, clip, union
from rlhfless.scaling.prices import PriceBook


class MemoryTrace:
    """Keeps the rows of a trace in memory, in the order in which they were closed."""

    def __init__(self) -> None:
        self.holdings: list[Holding] = []
        self.invocations: list[Invocation] = []
        self._steps: list[StepRecord] = []
        self._decisions: list[Decision] = []
        self._rows: dict[type, list[Any]] = {
            Holding: self.holdings,
            Invocation: self.invocations,
            StepRecord: self._steps,
            Decision: self._decisions,
        }

    def add(self, record: Any) -> None:
        self._rows[type(record)].append(record)

    def flush(self, step: int) -> None: ...

    def close(self) -> None: ...

    def trace(
        self, prices: PriceBook, beside: Collection[str], paid_around: tuple[float, float] | None = None
    ) -> Trace:
        """Return the trace, without a row per response.

        `beside` names replicas that hold a share of their own; `paid_around`: see LearnerShape.
        """
        held = self.holdings if paid_around is None else by_use(self.holdings, self.invocations, *paid_around)
        return Trace(
            TraceMeta("simulated", 1, prices.snapshot(), {}, {}),
            tuple(paid_holdings(held, prices, beside)),
            tuple(self.invocations),
            steps=tuple(self._steps),
            decisions=tuple(self._decisions),
        )


def by_use(holdings: Iterable[Holding], calls: Iterable[Invocation], before_s: float, after_s: float) -> list[Holding]:
    """Return the holdings, reducing those of the learner to the time around its calls."""
    learner = FunctionName.LEARNER
    spans = union((call.start_s - before_s, call.end_s + after_s) for call in calls if call.function == learner)
    kept: list[Holding] = []
    for holding in holdings:
        if holding.function != learner:
            kept.append(holding)
            continue
        parts = clip(spans, holding.start_s, holding.end_s)
        kept += [replace(holding, start_s=start_s, end_s=end_s) for start_s, end_s in parts]
    return kept


def paid_holdings(holdings: Iterable[Holding], prices: PriceBook, beside: Collection[str]) -> list[Holding]:
    """Return the holdings that are paid for: a device is paid for once, however many replicas sleep on it.

    If the book has a price for residency, that is the price of sleep. Otherwise a sleeping replica keeps the device
    rented, but pays for it only while no other replica does, whether awake or asleep for longer.
    """
    paid: list[Holding] = []
    asleep: list[Holding] = []
    taken: dict[str, list[Interval]] = defaultdict(list)
    for holding in holdings:
        in_turn = holding.replica not in beside
        if holding.state is ReplicaState.SLEEPING and in_turn and prices.occupies(holding):
            asleep.append(holding)
            continue
        paid.append(holding)
        if in_turn and prices.occupies(holding):
            taken[holding.device].append((holding.start_s, holding.end_s))
    occupied = {device: union(intervals) for device, intervals in taken.items()}
    paid_until_s: dict[str, float] = {}
    for holding in sorted(asleep, key=attrgetter("start_s", "incarnation", "device")):
        begin_s = max(holding.start_s, paid_until_s.get(holding.device, holding.start_s))
        free = _gaps(occupied.get(holding.device, []), begin_s, holding.end_s)
        paid += [replace(holding, start_s=start_s, end_s=end_s) for start_s, end_s in free]
        paid_until_s[holding.device] = max(begin_s, holding.end_s)
    return paid


def _gaps(disjoint: list[Interval], start_s: float, end_s: float) -> list[Interval]:
    """Return the parts of [start_s, end_s) that none of the sorted, disjoint intervals covers."""
    edges = [start_s, *(edge for interval in clip(disjoint, start_s, end_s) for edge in interval), end_s]
    return [(low, high) for low, high in zip(edges[::2], edges[1::2], strict=True) if high > low]
