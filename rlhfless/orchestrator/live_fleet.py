"""The policies' view of a run's fleet: its slots (rlhfless.orchestrator.fleet_slots) with prices and measured times.

Migrated samples recompute their KV. The price of an actor is the saving if it is released: 0 in a fixed fleet, and on
devices that the learner holds as a whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Protocol

from rlhfless.fleet.pool import ReplicaPool
from rlhfless.functions.calls import Call
from rlhfless.orchestrator.fleet_slots import FleetFigures, FleetSlots
from rlhfless.records import FunctionRole
from rlhfless.scaling.engine_model import EngineModel
from rlhfless.scaling.fleet_constants import MOVE_S
from rlhfless.scaling.latency.roofline import START_S
from rlhfless.scaling.placement import Allocation
from rlhfless.scaling.policy import EngineLimits, FleetView, ReplicaSlot
from rlhfless.scaling.prices import Rate
from rlhfless.spec import RunSpec

ROUNDING = 1e-9
"""Shares of a device that add up to 1 may differ from it by less."""


class EngineModels(Protocol):
    """The latency models of a run's engines (rlhfless.scaling.latency.fitted.EngineSpeeds)."""

    def model(self, kind: str) -> EngineModel:
        """Return the best known model of the engines on a kind of device."""


class ExpectedEngines(Protocol):
    """What is expected of a run's engines until it is measured (rlhfless.orchestrator.engine_starts)."""

    def expected_s(self, kind: str) -> float:
        """Return the seconds of a start on devices of a kind, excluding the first load of the run's weights."""

    def expected_load_s(self, kind: str) -> float:
        """Return the seconds of a weight load; 0 if unknown."""

    def expected_kv_tokens(self, kind: str) -> int:
        """Return the capacity of an engine's KV cache."""

    def keep(self, kind: str, phases: Mapping[str, float]) -> None:
        """Save the measured seconds of each phase of a start for later runs."""


class LiveFleet(FleetSlots):
    """The slots of a run, with the best estimates so far."""

    def __init__(
        self,
        spec: RunSpec,
        call: Call,
        pools: Sequence[ReplicaPool],
        ledger: FleetFigures,
        speeds: EngineModels,
        starts: ExpectedEngines,
    ) -> None:
        super().__init__(call, pools, ledger)
        self._spec = spec
        self._speeds = speeds
        self._starts = starts

    def keep_starts(self) -> None:
        """See FleetSlots."""
        phases = self._ledger.mean_start_phases()
        if phases and self._actors.allocations:
            self._starts.keep(self._actors.allocations[0].devices[0].kind, phases)

    def view(self) -> FleetView:
        """Return the slots with the best estimates so far."""
        return FleetView(
            replica_slots=tuple(replica_slot for pool in self._pools for replica_slot in self._replica_slots(pool)),
            load_s=self._ledger.mean_load_s() or max(map(self._starts.expected_load_s, self._kinds()), default=0.0),
            move_s=MOVE_S.value,
            heartbeat_s=self._spec.generation.progress_interval_s,
            max_tokens=self._spec.generation.max_tokens,
            kept_usd_per_s=self._kept_usd_per_s(),
            terms=self._ledger.terms(self._kinds()),
        )

    def _replica_slots(self, pool: ReplicaPool) -> list[ReplicaSlot]:
        """Return the slots of a pool. The expected start time is the mean of the pool's starts; before the first one,
        it is the estimate for the engine."""
        function, samples = pool.function, pool is self._actors
        measured_s = self._ledger.mean_start_s(function)
        kinds = {allocation.devices[0].kind for allocation in pool.allocations} if samples else ()
        engines = {kind: self._engine(kind) for kind in kinds}
        expected_s = {} if measured_s is not None else {kind: self._starts.expected_s(kind) for kind in kinds}
        kept = self._kept_shares()
        return [
            ReplicaSlot(
                function=function,
                role=pool.kind.role,
                kind=allocation.devices[0].kind,
                devices=tuple(device.name for device in allocation.devices),
                node=allocation.devices[0].node,
                usd_per_s=0.0 if self._is_kept(pool) else self._saved_usd_per_s(allocation, kept),
                start_s=expected_s.get(allocation.devices[0].kind, START_S) if measured_s is None else measured_s,
                engine=engines.get(allocation.devices[0].kind),
                usable=not samples or number not in self._unusable,
                reacquire_s=self._reacquire_s(pool, number),
            )
            for number, allocation in enumerate(pool.allocations)
        ]

    def _reacquire_s(self, pool: ReplicaPool, number: int) -> float:
        """See ReplicaSlot."""
        return self._ledger.reacquire_s(pool.allocations[number].devices[0].kind) if pool.must_come(number) else 0.0

    def _kinds(self) -> set[str]:
        """Return the kinds of the actors' devices."""
        return {device.kind for allocation in self._actors.allocations for device in allocation.devices}

    def _is_kept(self, pool: ReplicaPool) -> bool:
        """Return whether policies never release replicas of the pool."""
        fixed = pool is self._actors and self._spec.scaling.generation.fixed
        return fixed or pool.kind.role in (FunctionRole.UPDATES, FunctionRole.PREFILLS)

    def _kept_shares(self) -> Mapping[str, float]:
        """Return the shares of devices that are paid for whatever is released, by name of the device. Replicas that
        take turns on a device may each have all of it."""
        kept: dict[str, float] = defaultdict(float)
        for pool in filter(self._is_kept, (*self._pools, *self._prefill)):
            for allocation in pool.allocations:
                if not allocation.lent:  # another run pays while the replica sleeps
                    for device, share in allocation.shared:
                        kept[device.name] += share
        return kept

    def _saved_usd_per_s(self, allocation: Allocation, kept: Mapping[str, float]) -> float:
        """Return the saving of a release: the price of the shares that nothing else pays for."""
        shared = ((device, _at_most(share, 1 - kept.get(device.name, 0.0))) for device, share in allocation.shared)
        return self._ledger.prices.usd_per_s(shared, "saved_usd_per_hour")

    def _kept_usd_per_s(self) -> float:
        """Return the cost that releases do not save, of all devices. A learner that gives its devices back after each
        use is paid for by its work."""
        prices = self._ledger.prices
        held: dict[str, float] = defaultdict(float)
        usd_per_s = 0.0
        for pool in sorted((*self._pools, *self._prefill), key=self._is_kept, reverse=True):
            if self._is_kept(pool) and not pool.bounds.idle:
                continue
            rate: Rate = "usd_per_hour" if self._is_kept(pool) else "released_usd_per_hour"
            for allocation in pool.allocations:
                shared = [(device, _at_most(share, 1 - held[device.name])) for device, share in allocation.shared]
                usd_per_s += prices.usd_per_s(shared, rate)
                for device, share in shared:
                    held[device.name] += share
        return usd_per_s

    def _engine(self, kind: str) -> EngineLimits:
        limits = self._spec.generation.engine
        alike = (actor for actor in self._actors.replicas() if actor.allocation.devices[0].kind == kind)
        reported = [actor.info.kv_capacity_tokens for actor in alike if actor.info]
        return EngineLimits(
            model=self._speeds.model(kind),
            kv_capacity_tokens=max(reported, default=0) or self._starts.expected_kv_tokens(kind),
            max_sequences=limits.sequence_limit,
        )


def _at_most(share: float, room: float) -> float:
    """Return the part of a share that fits into the room on its device."""
    return share if share <= room + ROUNDING else max(room, 0.0)
