"""The fleet options of a step: kinds of devices, and how soon actors on them can work."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rlhfless.scaling.engine_model import EngineModel
from rlhfless.scaling.plan.contract import require_amount
from rlhfless.scaling.plan.curve import IterationCurve, fit_curve
from rlhfless.scaling.prefill_pool import PrefillPool


@dataclass(frozen=True, slots=True)
class Standby:
    """Actors that can work after the same wait."""

    tier: str
    """`warm`, `starting` or `cold`."""
    actors: int
    wait_s: float
    """From the start of the step until an actor is up: 0 if warm, else what is left of its start. It is paid for."""

    def __post_init__(self) -> None:
        if self.actors < 0:
            raise ValueError(f"{self.tier}: actors is {self.actors}; give 0 or more")
        require_amount(f"{self.tier}: wait_s", self.wait_s, "seconds")


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
    between_usd: float = 0.0
    """Cost of one actor from the end of the step until it works again in the next one: of staying, or of leaving and
    starting again."""

    def __post_init__(self) -> None:
        if self.max_sequences < 1:
            raise ValueError(f"{self.kind}: max_sequences is {self.max_sequences}; give 1 or more")
        if self.kv_capacity_tokens < 1:
            raise ValueError(f"{self.kind}: kv_capacity_tokens is {self.kv_capacity_tokens}; give 1 or more")
        require_amount(f"{self.kind}: usd_per_s", self.usd_per_s, "US dollars")
        require_amount(f"{self.kind}: between_usd", self.between_usd, "US dollars")

    @cached_property
    def curve(self) -> IterationCurve:
        """a(B) up to `max_sequences`."""
        return fit_curve([self.engine.iteration_s(size) for size in range(1, self.max_sequences + 1)])

    @cached_property
    def table_s(self) -> NDArray[np.float64]:
        """[max_sequences]: a(1), a(2), ... by the curve."""
        return self.curve.iteration_s(np.arange(1, self.max_sequences + 1, dtype=np.float64))

    def drain_s(self, tokens: NDArray[np.float64], context: NDArray[np.int64], longest: float) -> float:
        """Seconds until an actor has drawn `tokens` [samples] for samples with so much `context` [samples], of which
        one may take until `longest`: the closed form of `cost` without prefills. Samples that do not fit at once are
        the shorter ones, and draw at the rate of a full batch."""
        ordered, most = np.sort(tokens)[::-1], self.max_sequences
        running = ordered[:most]
        spans = running - np.append(running[1:], 0.0)
        seconds = float(spans @ self.table_s[: running.size])
        seconds += float(self.table_s[-1]) / most * float(ordered[most:].sum())
        seconds += float(self.table_s[0]) * max(longest - float(ordered[0]), 0.0)
        return seconds + self.engine.context_s * float(tokens @ (context + (tokens - 1) / 2))

    def offered(self, standby: tuple[Standby, ...], between_usd: float) -> DeviceOption:
        """The same kind with the actors of a step. It keeps the curve, which takes milliseconds to fit."""
        other = replace(self, standby=standby, between_usd=between_usd)
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
    prefill: PrefillPool | None = None
    """Other actors, which compute the prompts of these; the plan does not pay for them."""

    def __post_init__(self) -> None:
        kinds = [device.kind for device in self.devices]
        if len(set(kinds)) < len(kinds):
            raise ValueError(f"device kinds {', '.join(kinds)}: one of them is there twice; merge the two")
        if self.max_actors < 1:
            raise ValueError(f"max_actors is {self.max_actors}; give 1 or more")
        require_amount("weight_sync_s", self.weight_sync_s, "seconds")
        if not any(device.actors for device in self.devices):
            raise ValueError("the fleet has no actor in any tier; offer at least one `Standby` with actors")
