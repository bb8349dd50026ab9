"""The live fleet behind the policies' door: rooms with prices and measured times, their replicas, starts and releases.

A room is a seat of the placement. Co-located functions hold shares of a slot at the same time, so all rooms may be
awake beside each other. There are no sleep tiers, and no KV moves between actors. The learner is always there. An actor
costs what releasing it would save, so in a fleet that never changes it costs nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from rlhfless.autoscaling.engine_speeds import EngineSpeeds
from rlhfless.autoscaling.figures import FleetFigures
from rlhfless.autoscaling.sample_table import SampleTable
from rlhfless.fleet.pool import Pool
from rlhfless.functions.base import Call
from rlhfless.records import Decision, FunctionName
from rlhfless.scaling.assignment import PolicyFault
from rlhfless.scaling.latency.startup import START_S
from rlhfless.scaling.placement import Seat
from rlhfless.scaling.policy import EngineRoom, FleetView, PlaceView, Room
from rlhfless.scaling.prices import SECONDS_PER_HOUR
from rlhfless.spec import RunSpec

MOVE_S = 0.05
"""An abort, its way through the driver, and a new request, between actors whose cores are all at work."""

NODE = "cluster"
"""Slots do not say which node they are on."""


class LiveFleet:
    """All rooms of a run: those of its generation actors first, then one for each other function."""

    def __init__(
        self,
        spec: RunSpec,
        call: Call,
        pools: Sequence[Pool],
        ledger: FleetFigures,
        speeds: EngineSpeeds,
        max_model_len: int,
    ) -> None:
        """`pools`: that of the generation actors first; of all others the first replica is the only one."""
        self._spec = spec
        self._call = call
        self._actors = pools[0]
        self._pools = pools
        self._places = [(pool, number) for pool in pools for number in range(len(pool.seats))]
        self._ledger = ledger
        self._speeds = speeds
        self._max_model_len = max_model_len

    def place_of(self, function: FunctionName) -> int:
        """The place of a function that has one replica."""
        return next(place for place, (pool, _) in enumerate(self._places) if pool.function is function)

    def kinds(self) -> dict[str, str]:
        """Device kinds of the generation actors, by name."""
        return {actor.name: actor.seat.slots[0].kind for actor in self._actors.replicas()}

    def view(self) -> FleetView:
        """See rlhfless.autoscaling.policy_runner.Fleet."""
        return FleetView(
            rooms=tuple(room for pool in self._pools for room in self._rooms(pool)),
            load_s=self._ledger.mean_load_s(),
            move_s=MOVE_S,
            kv_token_s=float("inf"),
            beat_s=self._spec.generation.progress_interval_s,
            max_tokens=self._spec.generation.max_tokens,
        )

    def places(self, table: SampleTable) -> tuple[PlaceView, ...]:
        """See rlhfless.autoscaling.policy_runner.Fleet."""
        actors = len(self._actors.seats)
        return tuple(
            PlaceView(pool.state(number), None, *(table.counts(place) if place < actors else ()))
            for place, (pool, number) in enumerate(self._places)
        )

    def expects(self, place: int) -> bool:
        """See rlhfless.autoscaling.policy_runner.Fleet."""
        return place < len(self._actors.seats) and self._actors.expects(place)

    def start(self, place: int, at_s: float | None, step: int) -> None:
        """See rlhfless.autoscaling.policy_runner.Fleet. At once, or at a time to come; either way in the background.

        A lost learner is started by the run's recovery: it has to go on from a checkpoint.
        """
        pool, number = self._places[place]
        if pool.function is FunctionName.LEARNER:
            return
        if at_s is None and (state := pool.state(number)) is not None:
            raise PolicyFault(f"place {place} is asked to start, and has an actor ({state})")
        pool.start(number, self._at(step), at_s)

    def release(self, place: int, tier: str | None, step: int) -> None:
        """See rlhfless.autoscaling.policy_runner.Fleet. What the spec's bounds keep stays, which the ledger notes."""
        if tier is not None:
            raise PolicyFault(f"place {place} is to sleep in {tier!r}: this fleet has no sleep tiers")
        pool, number = self._places[place]
        if pool.function is FunctionName.LEARNER:
            raise PolicyFault(f"place {place} is released: it is the learner's, which keeps the run's state")
        if not pool.expects(number):
            raise PolicyFault(f"place {place} is released, and has no actor")
        if not pool.release(number):
            self._note(step, "keep", f"place {place} stays", pool.bounds.reason)

    def idle(self, function: FunctionName, step: int) -> None:
        """A function has done its work of a step, and the policy has said what it wants: what the spec does not let
        wait is released."""
        place = self.place_of(function)
        pool, number = self._places[place]
        if not pool.bounds.idle and pool.expects(number):
            pool.release(number)
            self._note(step, "release", f"place {place} gives its devices back", pool.bounds.reason)

    def _note(self, step: int, kind: str, choice: str, reason: str) -> None:
        self._ledger.add_decision(Decision(step, time.time(), kind, choice, {"reason": reason}))

    def _at(self, step: int) -> Call:
        return Call(self._call.run_id, self._call.attempt, step)

    def _rooms(self, pool: Pool) -> list[Room]:
        """Those of a pool. A start takes as long as the pool's starts have taken on average."""
        function = pool.function
        start_s = self._ledger.mean_start_s(function)
        kinds = {seat.slots[0].kind for seat in pool.seats} if function is FunctionName.GENERATION else ()
        engines = {kind: self._engine(kind) for kind in kinds}
        return [
            Room(
                function=function,
                kind=seat.slots[0].kind,
                devices=tuple(slot.name for slot in seat.slots),
                node=NODE,
                usd_per_s=self._usd_per_s(function, seat),
                start_s=START_S if start_s is None else start_s,
                wake_s={},
                resident_usd_per_s={},
                engine=engines.get(seat.slots[0].kind),
                beside=True,
            )
            for seat in pool.seats
        ]

    def _usd_per_s(self, function: FunctionName, seat: Seat) -> float:
        """What releasing it would save: nothing if it is never released."""
        bounds = self._spec.scaling.generation
        if function is FunctionName.GENERATION and bounds.fixed:
            return 0.0
        prices = (self._ledger.prices.device(slot.kind) for slot in seat.slots)
        return sum(price.saved_usd_per_hour for price in prices) * seat.share / SECONDS_PER_HOUR

    def _engine(self, kind: str) -> EngineRoom:
        limits = self._spec.generation.engine
        alike = (actor for actor in self._actors.replicas() if actor.seat.slots[0].kind == kind)
        told = [actor.info.kv_capacity_tokens for actor in alike if actor.info]
        return EngineRoom(
            model=self._speeds.model(kind),
            # Until an engine has said how much it holds, only its limit of sequences is known.
            kv_capacity_tokens=max(told, default=0) or limits.max_sequences * self._max_model_len,
            max_sequences=limits.max_sequences,
        )
