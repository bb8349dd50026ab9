"""The life cycle of a replica. Pure: the time is an argument.

    STARTING -> STALE -> SERVING -> DRAINING -> SLEEPING | RETIRED
    SERVING  -> STALE      another version was requested
    STALE    -> DRAINING   scaled in between two steps
    STARTING -> RETIRED    cancelled before it was ready: nothing to drain
    SLEEPING -> STARTING   waking is a start, and billed as one
    SLEEPING -> RETIRED
    any live state -> SUSPECT -> STALE | DEAD

Invariant: SERVING means that the last requested version has been loaded. STALE -> SERVING is the only transition to
traffic, and only a completed load of that exact version triggers it.

Transitions that deliberately do not exist:
- STARTING, SLEEPING or SUSPECT -> SERVING. New, woken and recovered replicas may hold any weights, or none.
- SERVING -> SLEEPING | RETIRED. A replica with traffic is always drained first.
- DRAINING -> SERVING. A drain cannot be cancelled: its requests have already migrated.
- DEAD -> anything. A replica that was given up may still be running: if it came back, two replicas would have the
  same slot. The process may return under a new incarnation, which is a new life.
- RETIRED -> anything. Its device has been released.
- anything but SUSPECT -> DEAD. There is a single path to DEAD; a death observed with certainty enters SUSPECT and
  DEAD at the same instant (`died`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from rlhfless.records import Holding, ReplicaState, WeightVersion
from rlhfless.scaling.placement import Allocation

_S = ReplicaState

TRANSITIONS: Mapping[ReplicaState, frozenset[ReplicaState]] = MappingProxyType(
    {
        _S.STARTING: frozenset({_S.STALE, _S.RETIRED, _S.SUSPECT}),
        _S.STALE: frozenset({_S.SERVING, _S.DRAINING, _S.SUSPECT}),
        _S.SERVING: frozenset({_S.STALE, _S.DRAINING, _S.SUSPECT}),
        _S.DRAINING: frozenset({_S.SLEEPING, _S.RETIRED, _S.SUSPECT}),
        _S.SLEEPING: frozenset({_S.STARTING, _S.RETIRED, _S.SUSPECT}),
        _S.SUSPECT: frozenset({_S.STALE, _S.DEAD}),
        _S.RETIRED: frozenset(),
        _S.DEAD: frozenset(),
    }
)
"""All allowed transitions."""

ENTRY_STATES = frozenset({_S.STARTING, _S.STALE})
"""First states of a life: STARTING, or STALE if another driver started the replica."""


class IllegalTransition(RuntimeError):
    """Raised for an event that the replica's state does not allow, a caller fault. The message names both states."""

    def __init__(self, replica: str, before: ReplicaState, after: ReplicaState) -> None:
        allowed = ", ".join(sorted(TRANSITIONS[before])) or "nothing: this life is over"
        super().__init__(f"{replica} cannot go from {before} to {after}; from {before} it can go to {allowed}")
        self.before = before
        self.after = after


@dataclass(frozen=True, slots=True)
class ReplicaIdentity:
    """The identity of a life. A restarted replica keeps its name and gets a new incarnation."""

    function: str
    replica: str
    incarnation: str
    allocation: Allocation
    """The devices it holds, and its share of each."""


class Lifecycle:
    """One incarnation of a replica, from start to end.

    Every event returns the holdings it closes: one per device for the span that ended, none for an empty span. Together
    they cover the life without gap or overlap. A clock that steps back produces an empty span, never a negative one. An
    event that the state does not allow raises IllegalTransition and changes nothing.
    """

    def __init__(self, identity: ReplicaIdentity, at_s: float, state: ReplicaState = _S.STARTING) -> None:
        if state not in ENTRY_STATES:
            raise ValueError(f"a life cannot start as {state}; start as {' or '.join(sorted(ENTRY_STATES))}")
        self._identity = identity
        self.state = state
        self._since_s = at_s
        self._asked: WeightVersion | None = None

    @property
    def identity(self) -> ReplicaIdentity:
        return self._identity

    @property
    def since_s(self) -> float:
        """Return the start of the open span (unix time)."""
        return self._since_s

    @property
    def asked(self) -> WeightVersion | None:
        """Return the last requested version; SERVING means that it is loaded."""
        return self._asked

    def started(self, at_s: float) -> tuple[Holding, ...]:
        """Record that the replica is ready (or awake), with unknown weights."""
        if self.state is not _S.STARTING:  # recovery also leads to STALE, but by a probe: see `recovered`
            raise self._illegal(_S.STALE)
        return self._to(_S.STALE, at_s)

    def ask(self, version: WeightVersion, at_s: float) -> tuple[Holding, ...]:
        """Request `version`. A replica that serves another version becomes STALE immediately."""
        if not TRANSITIONS[self.state]:
            raise self._illegal(_S.STALE)
        closed = self._to(_S.STALE, at_s) if self.state is _S.SERVING and version != self._asked else ()
        self._asked = version
        return closed

    def loaded(self, version: WeightVersion, at_s: float) -> tuple[Holding, ...]:
        """Record a completed and verified load of `version`.

        A load of another version than the last requested one changes nothing.
        """
        if self.state is _S.STALE and version != self._asked:
            return ()
        return self._to(_S.SERVING, at_s)

    def drain(self, at_s: float) -> tuple[Holding, ...]:
        """Record that routing to the replica has stopped; running requests may finish."""
        return self._to(_S.DRAINING, at_s)

    def sleep(self, at_s: float) -> tuple[Holding, ...]:
        """Record that the drained replica sleeps: it keeps its devices and discards its weights."""
        return self._to(_S.SLEEPING, at_s)

    def wake(self, at_s: float) -> tuple[Holding, ...]:
        """Record that the replica has started to wake."""
        return self._to(_S.STARTING, at_s)

    def retire(self, at_s: float) -> tuple[Holding, ...]:
        """Record that the replica releases its devices, which ends this incarnation."""
        return self._to(_S.RETIRED, at_s)

    def suspect(self, at_s: float) -> tuple[Holding, ...]:
        """Record a failed probe or request: no traffic until a probe succeeds or the replica is given up."""
        return self._to(_S.SUSPECT, at_s)

    def recovered(self, at_s: float) -> tuple[Holding, ...]:
        """Record a successful probe of the suspect. Its contents are unknown, so it loads its weights again."""
        if self.state is not _S.SUSPECT:
            raise self._illegal(_S.STALE)
        return self._to(_S.STALE, at_s)

    def died(self, at_s: float) -> tuple[Holding, ...]:
        """Record that the replica is given up, or its process is known to be gone, which ends this incarnation."""
        closed = () if self.state is _S.SUSPECT else self._to(_S.SUSPECT, at_s)
        return closed + self._to(_S.DEAD, at_s)

    def cut(self, at_s: float) -> tuple[Holding, ...]:
        """Close the open span and continue in the same state, so that a flush of the ledger is complete."""
        return self._close(at_s) if self.state.holds_device else ()

    def _to(self, state: ReplicaState, at_s: float) -> tuple[Holding, ...]:
        if state not in TRANSITIONS[self.state]:
            raise self._illegal(state)
        closed = self._close(at_s)
        self.state = state
        return closed

    def _close(self, at_s: float) -> tuple[Holding, ...]:
        start_s, self._since_s = self._since_s, max(at_s, self._since_s)
        if self._since_s == start_s:
            return ()
        life = self._identity
        replica = life.function, life.replica, life.incarnation
        return tuple(
            Holding(*replica, device.name, device.kind, share, self.state, start_s, self._since_s)
            for device, share in life.allocation.billed(self.state)
        )

    def _illegal(self, state: ReplicaState) -> IllegalTransition:
        replica = f"{self._identity.replica} (incarnation {self._identity.incarnation})"
        return IllegalTransition(replica, self.state, state)
