"""Record a simulated run in the runtime's records, so that `rlhfless.scaling.accounting` bills both."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from operator import attrgetter

from rlhfless.records import Decision, FunctionName, Holding, Invocation, ReplicaState, StepRecord, WeightVersion, Work
from rlhfless.records.traces import Trace, TraceMeta
from rlhfless.scaling.accounting import Interval, clip, union
from rlhfless.scaling.lifecycle import Lifecycle, ReplicaIdentity
from rlhfless.scaling.placement import Allocation
from rlhfless.scaling.prices import PriceBook


def version_of(step: int) -> WeightVersion:
    """Return the version of the weights after `step` training steps."""
    return WeightVersion("simulated", 1, step, "none")


@dataclass
class SimulatedLedger:
    """Records, in the order in which they were closed."""

    holdings: list[Holding] = field(default_factory=list)
    invocations: list[Invocation] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)

    def called(
        self, caller: ReplicaIdentity, work: Work, step: int, start_s: float, end_s: float, **figures: int | str
    ) -> None:
        """Record a call; `figures` are further fields of Invocation."""
        call = Invocation(caller.function, caller.replica, caller.incarnation, work, step, start_s, end_s, **figures)  # type: ignore[arg-type]
        self.invocations.append(call)

    def trace(self, prices: PriceBook, beside: Iterable[str], paid_around: tuple[float, float] | None = None) -> Trace:
        """Return the trace, without a row per response.

        `beside` names replicas that hold a share of their own; `paid_around`: see LearnerShape.
        """
        meta = TraceMeta("simulated", 1, prices.snapshot(), {}, {})
        held = self.holdings if paid_around is None else by_use(self.holdings, self.invocations, *paid_around)
        holdings = tuple(slept(held, prices, frozenset(beside)))
        return Trace(meta, holdings, tuple(self.invocations), steps=tuple(self.steps), decisions=tuple(self.decisions))


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


def slept(holdings: Iterable[Holding], prices: PriceBook, beside: frozenset[str]) -> list[Holding]:
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


DRAINABLE = frozenset({ReplicaState.STALE, ReplicaState.SERVING})


class SimulatedReplica:
    """One incarnation of the replica at a slot."""

    def __init__(
        self, ledger: SimulatedLedger, function: str, name: str, allocation: Allocation, at_s: float, number: int
    ) -> None:
        self._ledger = ledger
        self.number = number
        """The number of this life at the slot."""
        self.life = Lifecycle(ReplicaIdentity(function, name, f"{name}-life{number}", allocation), at_s)
        self.asleep = False
        self.waking = False
        """Whether the replica is waking from sleep; its state is STARTING meanwhile."""
        self.busy_s = at_s
        """When the replica will have finished all its work; an actor's engine keeps its own time."""

    @property
    def state(self) -> ReplicaState:
        return self.life.state

    def note(self, closed: tuple[Holding, ...]) -> None:
        """Record the holdings that a transition of `life` closed."""
        self._ledger.holdings.extend(closed)

    def called(self, work: Work, step: int, start_s: float, end_s: float, **figures: int | str) -> None:
        """Record a call; `figures` are further fields of Invocation."""
        self._ledger.called(self.life.identity, work, step, start_s, end_s, **figures)

    def serve(self, version: WeightVersion, at_s: float) -> None:
        """Go from STARTING to SERVING, for functions that load their weights as part of the start."""
        self.note(self.life.started(at_s))
        self.note(self.life.ask(version, at_s))
        self.note(self.life.loaded(version, at_s))
        self.busy_s = at_s

    def sleep(self, at_s: float, asleep_s: float) -> None:
        """Drain the replica from `at_s` on; its device's memory is free at `asleep_s`."""
        self.note(self.life.drain(at_s))
        self.note(self.life.sleep(asleep_s))
        self.asleep = True

    def end(self, at_s: float) -> None:
        """Drain the replica, and give its devices back."""
        if self.life.state in DRAINABLE:
            self.note(self.life.drain(at_s))
        if self.life.state.holds_device:
            self.note(self.life.retire(at_s))
