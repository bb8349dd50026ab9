"""The policies' view of a live fleet: its slots (rlhfless.orchestrator.fleet_slots) with prices and measured times.

Migrated samples recompute their KV. The price of an actor is the saving if it is released; in a fixed fleet, it is 0.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlhfless.fleet.pool import ReplicaPool
from rlhfless.functions.calls import Call
from rlhfless.functions.generation.vllm.arguments import SUPPORTED_RELEASE, installed_version
from rlhfless.orchestrator.fleet_slots import FleetFigures, FleetSlots
from rlhfless.records import FunctionRole, StartPhase
from rlhfless.scaling.fleet_constants import MOVE_S, load_s
from rlhfless.scaling.latency.fitted import EngineSpeeds
from rlhfless.scaling.latency.roofline import START_S, start_phases
from rlhfless.scaling.latency.shape import ModelShape
from rlhfless.scaling.placement import CPU_KIND
from rlhfless.scaling.policy import EngineLimits, FleetView, ReplicaSlot
from rlhfless.scaling.prices import Rate, RentalTerms, mean_phases
from rlhfless.spec import RunSpec
from rlhfless.util.folders import home, replace_text

log = logging.getLogger(__name__)

FILE = "starts.json"


class EngineStarts:
    """Expected start times of a run's engines, learned over runs and kept in a file."""

    def __init__(self, spec: RunSpec, shape: ModelShape | None) -> None:
        self._spec = spec
        self._shape = shape

    def expected_s(self, kind: str) -> float:
        """Return the seconds of a start on devices of a kind, excluding the first load of the run's weights."""
        return sum(self.expected(kind).values())

    def expected(self, kind: str) -> dict[str, float]:
        """Return the seconds of each phase of a start, by StartPhase."""
        kept = _kept().get(self._key(kind))
        if kept is not None:
            return kept
        if kind == CPU_KIND or self._shape is None:
            return {StartPhase.BUILD: START_S}
        return start_phases(self._shape)

    def expected_load_s(self, kind: str) -> float:
        """Return the seconds of a weight load; 0 if unknown."""
        if kind == CPU_KIND or self._shape is None:
            return 0.0
        return load_s(self._shape, self._spec.generation.engine.devices_per_actor)

    def keep(self, kind: str, phases: Mapping[str, float]) -> None:
        """Save the measured seconds of each phase, averaged with earlier ones. Errors of the file are only logged."""
        kept = _kept()
        kept[self._key(kind)] = mean_phases([phases, kept.get(self._key(kind), phases)])
        file = _file()
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            replace_text(file, json.dumps(kept, indent=1) + "\n")
        except OSError as error:
            log.warning("cannot save engine start times to %s: %s", file, error)

    def _key(self, kind: str) -> str:
        tensor_parallel = self._spec.generation.engine.devices_per_actor
        try:
            version = installed_version()
        except RuntimeError:  # a driver on a machine without engines
            version = SUPPORTED_RELEASE
        return f"{self._spec.model.path} on {tensor_parallel} x {kind}, vLLM {version}"


def _file() -> Path:
    return home() / FILE


def _kept() -> dict[str, dict[str, float]]:
    """Return the saved seconds of each phase, by engine; empty if there is no file, or it cannot be read."""
    try:
        values = json.loads(_file().read_text("utf-8"))
        return {key: {str(phase): float(s) for phase, s in phases.items()} for key, phases in values.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        log.warning("cannot read saved engine start times from %s: %s", _file(), error)
        return {}


NODE = "cluster"
"""The node of every slot: policies do not distinguish nodes."""


class LiveFleet(FleetSlots):
    """The slots of a live run, with the best estimates so far."""

    def __init__(
        self,
        spec: RunSpec,
        call: Call,
        pools: Sequence[ReplicaPool],
        ledger: FleetFigures,
        speeds: EngineSpeeds,
        max_model_len: int,
        starts: EngineStarts | None = None,
    ) -> None:
        super().__init__(call, pools, ledger)
        self._spec = spec
        self._speeds = speeds
        self._max_model_len = max_model_len
        self._starts = starts or EngineStarts(spec, None)

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
            kept_usd_per_s=sum(map(self._kept_usd_per_s, [*self._pools, *self._prefill])),
            terms=self._terms(),
        )

    def _replica_slots(self, pool: ReplicaPool) -> list[ReplicaSlot]:
        """Return the slots of a pool. The expected start time is the mean of the pool's starts; before the first one,
        it is the estimate for the engine."""
        function, samples = pool.function, pool is self._actors
        measured_s = self._ledger.mean_start_s(function)
        kinds = {allocation.devices[0].kind for allocation in pool.allocations} if samples else ()
        engines = {kind: self._engine(kind) for kind in kinds}
        expected_s = {} if measured_s is not None else {kind: self._starts.expected_s(kind) for kind in kinds}
        return [
            ReplicaSlot(
                function=function,
                role=pool.kind.role,
                kind=allocation.devices[0].kind,
                devices=tuple(device.name for device in allocation.devices),
                node=NODE,
                usd_per_s=0.0
                if self._is_kept(pool)
                else self._ledger.prices.usd_per_s(allocation.shared, "saved_usd_per_hour"),
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

    def _terms(self) -> RentalTerms:
        """Return the rental terms of the actors' devices, from the price book and the measured waits."""
        kinds = self._kinds()
        prices = [self._ledger.prices.device(kind) for kind in sorted(kinds)]
        lag_s = max(self._ledger.reacquire_s(kind) for kind in kinds)
        return RentalTerms.of([price.billing for price in prices], lag_s)

    def _kinds(self) -> set[str]:
        """Return the kinds of the actors' devices."""
        return {device.kind for allocation in self._actors.allocations for device in allocation.devices}

    def _is_kept(self, pool: ReplicaPool) -> bool:
        """Return whether policies never release replicas of the pool."""
        fixed = pool is self._actors and self._spec.scaling.generation.fixed
        return fixed or pool.kind.role in (FunctionRole.UPDATES, FunctionRole.PREFILLS)

    def _kept_usd_per_s(self, pool: ReplicaPool) -> float:
        """Return the part of the pool's cost that releases do not save."""
        rate: Rate = "usd_per_hour" if self._is_kept(pool) else "released_usd_per_hour"
        return sum(self._ledger.prices.usd_per_s(allocation.shared, rate) for allocation in pool.allocations)

    def _engine(self, kind: str) -> EngineLimits:
        limits = self._spec.generation.engine
        alike = (actor for actor in self._actors.replicas() if actor.allocation.devices[0].kind == kind)
        reported = [actor.info.kv_capacity_tokens for actor in alike if actor.info]
        return EngineLimits(
            model=self._speeds.model(kind),
            # Until an engine reports the size of its KV cache, only its sequence limit is known.
            kv_capacity_tokens=max(reported, default=0) or limits.sequence_limit * self._max_model_len,
            max_sequences=limits.sequence_limit,
        )
