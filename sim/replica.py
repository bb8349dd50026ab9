"""One incarnation of a replica: its life cycle, its calls and its holdings for the ledger."""

from __future__ import annotations

from rlhfless.records import Holding, ReplicaState, WeightVersion, Work
from rlhfless.scaling.lifecycle import Lifecycle, ReplicaIdentity
from rlhfless.scaling.placement import Allocation
from rlhfless.sim.ledger import SimulatedLedger

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
        """Whether the replica wakes after a sleep: its state is STARTING meanwhile."""
        self.busy_s = at_s
        """When the replica will have finished all its work; an actor's engine knows its own time."""

    @property
    def state(self) -> ReplicaState:
        return self.life.state

    def note(self, closed: tuple[Holding, ...]) -> None:
        """Records the holdings that a transition of `life` closed."""
        self._ledger.holdings.extend(closed)

    def called(self, work: Work, step: int, start_s: float, end_s: float, **figures: int | str) -> None:
        """Records a call; `figures` are further fields of Invocation."""
        self._ledger.called(self.life.identity, work, step, start_s, end_s, **figures)

    def serve(self, version: WeightVersion, at_s: float) -> None:
        """From STARTING to SERVING, for functions that load their weights as part of the start."""
        self.note(self.life.started(at_s))
        self.note(self.life.ask(version, at_s))
        self.note(self.life.loaded(version, at_s))
        self.busy_s = at_s

    def sleep(self, at_s: float, asleep_s: float) -> None:
        """Drains the replica from `at_s` on; its device's memory is free at `asleep_s`."""
        self.note(self.life.drain(at_s))
        self.note(self.life.sleep(asleep_s))
        self.asleep = True

    def end(self, at_s: float) -> None:
        """Drains the replica, and gives its devices back."""
        if self.life.state in DRAINABLE:
            self.note(self.life.drain(at_s))
        if self.life.state.holds_device:
            self.note(self.life.retire(at_s))
