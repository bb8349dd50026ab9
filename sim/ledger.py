"""What the simulated run did, in the records of the runtime, so that `rlhfless.scaling.accounting` bills both."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlhfless.records import FunctionName, Holding, Invocation, ReplicaState, StepRecord, WeightVersion, Work
from rlhfless.scaling.lifecycle import Lifecycle, ReplicaIdentity
from rlhfless.scaling.placement import Seat

DRAINABLE = frozenset({ReplicaState.STALE, ReplicaState.SERVING})


def version_of(step: int) -> WeightVersion:
    """The weights after so many training steps."""
    return WeightVersion("simulated", 1, step, "none")


@dataclass
class Ledger:
    """Records, in the order in which they were closed."""

    holdings: list[Holding] = field(default_factory=list)
    invocations: list[Invocation] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)


class Replica:
    """One incarnation of a replica: its life cycle, with everything it did written down."""

    def __init__(
        self, ledger: Ledger, function: FunctionName, name: str, seat: Seat, at_s: float, life: int = 1
    ) -> None:
        self._ledger = ledger
        self.name = name
        self.life = Lifecycle(ReplicaIdentity(function, name, f"{name}-life{life}", seat), at_s)

    def note(self, closed: tuple[Holding, ...]) -> None:
        """Writes down what a transition of `life` closed."""
        self._ledger.holdings.extend(closed)

    def called(self, work: Work, step: int, start_s: float, end_s: float, **figures: int | str) -> None:
        """Writes down a call; `figures` are further fields of Invocation."""
        who = self.life.identity
        call = Invocation(who.function, who.replica, who.incarnation, work, step, start_s, end_s, **figures)  # type: ignore[arg-type]
        self._ledger.invocations.append(call)

    def serve(self, version: WeightVersion, at_s: float) -> None:
        """From STARTING or STALE to SERVING, for functions whose loading is not simulated by itself."""
        self.note(self.life.started(at_s))
        self.note(self.life.ask(version, at_s))
        self.note(self.life.loaded(version, at_s))

    def end(self, at_s: float) -> None:
        """Gives its device back, in order."""
        if self.life.state in DRAINABLE:
            self.note(self.life.drain(at_s))
        if self.life.state.holds_device:
            self.note(self.life.retire(at_s))
