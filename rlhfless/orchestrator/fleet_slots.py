"""The slots of a run as its scaling policy knows them: the states of their replicas, starts and releases.

A slot has an allocation of the placement. Functions on the same device hold shares of it or take turns
(rlhfless.fleet.turns); policies have no part in that. The learner is never released, so its part of its devices is
paid for throughout.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from rlhfless.fleet.pool import ReplicaPool
from rlhfless.functions.calls import Call
from rlhfless.orchestrator.stage_samples import AssignedSamples
from rlhfless.records import Decision, FunctionRole, Invocation
from rlhfless.records.traces import TracedRollout
from rlhfless.scaling.assignment import PolicyFault
from rlhfless.scaling.policy import FleetView, SlotView
from rlhfless.scaling.prices import PriceBook, RentalTerms
from rlhfless.util.clock import unix_s


class FleetFigures(Protocol):
    """The part of a run's ledger (rlhfless.orchestrator.ledger) that scaling uses."""

    prices: PriceBook

    def mean_start_s(self, function: str) -> float | None:
        """Return the mean duration of the function's cold starts; None if there was none."""

    def mean_start_phases(self) -> dict[str, float]:
        """Return the mean seconds of each phase of the engines' starts, by StartPhase; empty if there was none."""

    def mean_load_s(self) -> float:
        """Return the mean duration of recent weight loads of actors; 0 if there was none."""

    def reacquire_s(self, kind: str) -> float:
        """Return the expected, unbilled wait for devices of a kind whose node must first join the cluster."""

    def terms(self, kinds: Collection[str]) -> RentalTerms:
        """Return the rental terms of devices of these kinds."""

    def cost_usd(self, pools: Iterable[ReplicaPool]) -> float:
        """Return the cost of the run so far, including the open holdings of these pools."""

    def has_rollouts_of(self, step: int) -> bool:
        """Return whether the step's rollouts are in the trace, as in a step that is repeated after an interruption."""

    def done_in_step(self, step: int) -> tuple[tuple[Invocation, ...], tuple[TracedRollout, ...]]:
        """Return the calls and the recorded rollouts of a step in progress."""

    def add_decision(self, decision: Decision) -> None:
        """Record a decision of the scaler."""


class FleetSlots(ABC):
    """All slots of a run: first those of its generation actors, then those of each other function."""

    def __init__(
        self,
        call: Call,
        pools: Sequence[ReplicaPool],
        ledger: FleetFigures,
    ) -> None:
        """`pools`: the pool of the generation actors first. The others have one replica each, except for those of
        the environment and of prefill actors. The latter scale with their queue (rlhfless.orchestrator.prompt_kv), and
        policies do not see them."""
        self._call = call
        self._actors = pools[0]
        self._pools = [pool for pool in pools if pool.kind.role is not FunctionRole.PREFILLS]
        self._unusable: frozenset[int] = frozenset()
        """Slots of actors whose devices another run has."""
        self._prefill = [pool for pool in pools if pool.kind.role is FunctionRole.PREFILLS]
        self._slots = [(pool, number) for pool in self._pools for number in range(len(pool.allocations))]
        self._ledger = ledger

    @abstractmethod
    def view(self) -> FleetView:
        """Return the slots with the best estimates so far."""

    def keep_starts(self) -> None:  # noqa: B027
        """Save the measured start times of the engines for later runs. By default, does nothing."""

    def slots_of(self, function: str) -> list[int]:
        """Return the slots of a function, in order."""
        return [slot for slot, (pool, _) in enumerate(self._slots) if pool.function == function]

    def kinds(self) -> dict[str, str]:
        """Return the device kinds of the engines, by name of the replica."""
        engines = (actor for pool in (self._actors, *self._prefill) for actor in pool.replicas())
        return {actor.name: actor.allocation.devices[0].kind for actor in engines}

    def limit_actors(self, most: int) -> None:
        """Limit the slots of generation actors to `most`, and release the actors at other slots. Call it only between
        steps: the slots of a step do not change."""
        slots = range(len(self._actors.allocations))
        in_use_first = sorted(slots, key=lambda slot: (not self._actors.expects(slot), slot))
        self._unusable = frozenset(in_use_first[most:])
        for slot in self._unusable:
            if self._actors.expects(slot):
                self._actors.release(slot)

    def slots(self, table: AssignedSamples) -> tuple[SlotView, ...]:
        """Return the state of each slot, and its number of samples."""
        states = [pool.state(number) for pool, number in self._slots]
        running, waiting = (counts.tolist() for counts in table.counts())
        of_others = [0] * (len(states) - len(running))
        return tuple(map(SlotView, states, running + of_others, waiting + of_others))

    def expects(self, slot: int) -> bool:
        """Return whether a generation actor is up or starting at a slot."""
        return slot < len(self._actors.allocations) and self._actors.expects(slot)

    def start(self, slot: int, at_s: float | None, step: int) -> None:
        """Carry out rlhfless.scaling.policy.Start in the background. Raises PolicyFault.

        Ignored for the learner: recovery starts it, because it must load a checkpoint.
        """
        pool, number = self._at_slot(slot)
        if pool.kind.role is FunctionRole.UPDATES:
            return
        if at_s is None and (state := pool.state(number)) is not None:
            raise PolicyFault(f"slot {slot} is asked to start, and has an actor ({state})")
        pool.start(number, self._at(step), at_s)

    def release(self, slot: int, step: int) -> None:
        """Carry out rlhfless.scaling.policy.Release. If the spec's bounds require the replica, keep it and record that
        in the ledger. Raises PolicyFault."""
        pool, number = self._at_slot(slot)
        if pool.kind.role is FunctionRole.UPDATES:
            raise PolicyFault(f"slot {slot} is released, and its {pool.function} keeps the run's state")
        if not pool.expects(number):
            raise PolicyFault(f"slot {slot} is released, and has no actor")
        if not pool.release(number):
            self._note(step, "keep", f"slot {slot} stays", pool)

    def idle(self, slot: int, step: int) -> None:
        """Release a slot's idle replica if the spec forbids idle ones. Called after the policy's decision."""
        pool, number = self._slots[slot]
        if not pool.bounds.idle and pool.expects(number):
            pool.release(number)
            self._note(step, "release", f"slot {slot} gives its devices back", pool)

    def _at_slot(self, slot: int) -> tuple[ReplicaPool, int]:
        if not 0 <= slot < len(self._slots):
            raise PolicyFault(f"there is no slot {slot}; the fleet has the slots 0 to {len(self._slots) - 1}")
        return self._slots[slot]

    def _note(self, step: int, kind: str, choice: str, pool: ReplicaPool) -> None:
        inputs: dict[str, float | int | str | bool] = {"function": pool.function, "reason": pool.bounds.reason}
        self._ledger.add_decision(Decision(step, unix_s(), kind, choice, inputs))

    def _at(self, step: int) -> Call:
        return Call(self._call.run_id, self._call.attempt, step)
