"""The fleet options of a step: kinds of devices, and how soon actors on them can work."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from rlhfless.scaling.engine_model import EngineModel
from rlhfless.scaling.plan.curve import IterationCurve, fit_curve


@dataclass(frozen=True, slots=True)
class Standby:
    """Actors that can work after the same wait."""

    tier: str
    """`warm`, the name of a sleeping tier, or `cold`."""
    actors: int
    wait_s: float
    """From the start of the step until an actor is up: 0 if warm, else the time to wake or to start. It is paid for."""

    def __post_init__(self) -> None:
        if self.actors < 0:
            raise ValueError(f"{self.tier}: actors is {self.actors}; give 0 or more")
        if not (math.isfinite(self.wait_s) and self.wait_s >= 0):
            raise ValueError(f"{self.tier}: wait_s is {self.wait_s}; give a finite number of seconds, 0 or more")


@dataclass(frozen=True)
class DeviceOption:
    """One kind of device, with the figures of one actor on it."""

    kind: str
    engine: EngineModel
    kv_capacity_tokens: int
    max_sequences: int
    """Most sequences the engine runs at once."""
    usd_per_s: float
    """Price of all devices of one actor."""
    standby: tuple[Standby, ...]

    def __post_init__(self) -> None:
        if self.max_sequences < 1:
            raise ValueError(f"{self.kind}: max_sequences is {self.max_sequences}; give 1 or more")
        if self.kv_capacity_tokens < 1:
            raise ValueError(f"{self.kind}: kv_capacity_tokens is {self.kv_capacity_tokens}; give 1 or more")
        if not (math.isfinite(self.usd_per_s) and self.usd_per_s >= 0):
            raise ValueError(f"{self.kind}: usd_per_s is {self.usd_per_s}; give a finite price, 0 or more")

    @cached_property
    def curve(self) -> IterationCurve:
        """a(B) up to `max_sequences`."""
        return fit_curve([self.engine.iteration_s(size) for size in range(1, self.max_sequences + 1)])

    def with_standby(self, standby: tuple[Standby, ...]) -> DeviceOption:
        """The same kind with other actors on it. It keeps the curve, which takes milliseconds to fit."""
        return self._with(standby=standby)

    def _with(self, **changes: Any) -> DeviceOption:
        other = replace(self, **changes)
        vars(other)["curve"] = self.curve
        return other

    @property
    def ready(self) -> tuple[Standby, ...]:
        """The tiers that have an actor, soonest first."""
        return tuple(sorted((s for s in self.standby if s.actors), key=lambda s: (s.wait_s, s.tier)))

    @property
    def actors(self) -> int:
        """The number of actors in all tiers."""
        return sum(s.actors for s in self.standby)


@dataclass(frozen=True)
class FleetOptions:
    """All actors that a plan may use."""

    devices: tuple[DeviceOption, ...]
    max_actors: int
    weight_sync_s: float = 0.0
    """One actor's load of the new weights, after its wait and before its work; it is paid for."""

    def __post_init__(self) -> None:
        kinds = [device.kind for device in self.devices]
        if len(set(kinds)) < len(kinds):
            raise ValueError(f"device kinds {', '.join(kinds)}: one of them is there twice; merge the two")
        if self.max_actors < 1:
            raise ValueError(f"max_actors is {self.max_actors}; give 1 or more")
        if not (math.isfinite(self.weight_sync_s) and self.weight_sync_s >= 0):
            raise ValueError(f"weight_sync_s is {self.weight_sync_s}; give a finite number of seconds, 0 or more")
        if not any(device.actors for device in self.devices):
            raise ValueError("the fleet has no actor in any tier; offer at least one `Standby` with actors")


def orders(options: FleetOptions, samples: int) -> list[tuple[tuple[int, int], ...]]:
    """Which kinds take the list from its long end on: (index of the device, where in the list it stops).

    One kind alone; two kinds, where the first stops after 1, 4, 16, ... of the longest samples or when all its actors
    have work; and all kinds, dearest or cheapest first, so that a fleet of many small kinds is used in full if it
    must be.
    """
    present = [i for i, device in enumerate(options.devices) if device.actors]
    stops = [0, *(samples - 4**power for power in range(samples.bit_length()) if 4**power < samples)]
    permutations: list[tuple[tuple[int, int], ...]] = [((i, 0),) for i in present]
    for first, then in itertools.permutations(present, 2):
        permutations += [((first, stop), (then, 0)) for stop in stops]
    if len(present) > 2:
        by_price = sorted(present, key=lambda i: (options.devices[i].usd_per_s, i))
        permutations += [tuple((i, 0) for i in way) for way in (by_price, by_price[::-1])]
    return permutations
