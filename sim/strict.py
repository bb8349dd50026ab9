"""The policy runner of a simulation: a fault of the policy ends the run, and so does a policy that asks for no work."""

from __future__ import annotations

from collections.abc import Callable

from rlhfless.orchestrator.fleet_slots import FleetSlots
from rlhfless.orchestrator.scaler import PolicyRunner
from rlhfless.records import Decision
from rlhfless.scaling.assignment import PolicyFault
from rlhfless.scaling.policy import Event, Policy

MAX_QUERIES = 20_000
"""Limit on consecutive queries of a policy between which no function works: hours of heartbeats."""


class SimulationError(RuntimeError):
    """A policy leaves samples unassigned, requests something impossible, or lets the run wait forever."""


class StrictRunner(PolicyRunner):
    """Runs one policy, and raises its faults as SimulationError."""

    def __init__(
        self, policy: Policy, fleet: FleetSlots, note: Callable[[Decision], None], done: Callable[[], int]
    ) -> None:
        """`done` returns a count of the run's work so far, which grows while a function works."""
        super().__init__(policy, fleet, note)
        self._done = done
        self._queries = self._before = 0

    def ask(self, event: Event, number: int) -> None:
        """See PolicyRunner. Raises SimulationError."""
        self._queries += 1
        if self._queries % MAX_QUERIES == 0:
            done = self._done()
            if done == self._before:
                raise SimulationError(
                    f"step {number}: no function has worked between {MAX_QUERIES} queries of the policy; Start an "
                    "actor and give it samples"
                )
            self._before = done
        super().ask(event, number)

    def _count_fault(self, event: Event, fault: Exception) -> None:  # noqa: ARG002
        if isinstance(fault, PolicyFault):
            raise SimulationError(str(fault)) from fault
        raise fault
