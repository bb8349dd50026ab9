"""Record a simulated run in the runtime's records, so that `rlhfless.scaling.accounting` bills both."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rlhfless.records import Decision, Holding, Invocation, ReplicaState, StepRecord, WeightVersion, Work
from rlhfless.records.traces import Trace, TraceMeta
from rlhfless.scaling.lifecycle import Lifecycle, ReplicaIdentity
from rlhfless.scaling.placement import Allocation
from rlhfless.scaling.prices import PriceBook
from rlhfless.sim.billing import by_use, paid_holdings


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
        holdings = tuple(paid_holdings(held, prices, frozenset(beside)))
        return Trace(meta, holdings, tuple(self.invocations), steps=tuple(self.steps), decisions=tuple(self.decisions))


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
