"""Rooms as the planner wants them: kinds of devices, and how soon an actor on each can work. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from rlhfless.scaling.engine_model import EngineModel
from rlhfless.scaling.plan import DeviceOption, FleetOptions, Standby
from rlhfless.scaling.policies.crew import Layout
from rlhfless.scaling.policy import Room, StepView

WARM, STARTING, COLD = "warm", "starting", "cold"


class Offers:
    """Makes FleetOptions, and keeps the curve of an engine model as long as the model stays the same."""

    def __init__(self) -> None:
        self._devices: dict[str, DeviceOption] = {}

    def device(self, room: Room, engine: EngineModel | None = None) -> DeviceOption:
        """The kind of a room for generation, without any actors; `engine` in place of the room's own model."""
        assert room.engine is not None  # callers come from Layout.generation
        model = engine or room.engine.model
        known = self._devices.get(room.kind)
        limits = room.engine.kv_capacity_tokens, room.engine.max_sequences, room.usd_per_s
        if known is None or known.engine is not model or _limits(known) != limits:
            known = self._devices[room.kind] = DeviceOption(room.kind, model, *limits, ())
        return known

    def options(
        self, view: StepView, layout: Layout, waits_s: Mapping[int, tuple[str, float]], max_actors: int
    ) -> tuple[FleetOptions, dict[tuple[str, str], list[int]]]:
        """What the planner may use of the places in `waits_s` (place: tier, seconds until it is up), and the places
        behind each (kind, tier)."""
        behind: dict[tuple[str, str], list[int]] = {}
        longest_s: dict[tuple[str, str], float] = {}
        for place, (tier, wait_s) in waits_s.items():
            key = layout.rooms[place].kind, tier
            behind.setdefault(key, []).append(place)
            longest_s[key] = max(longest_s.get(key, 0.0), wait_s)
        devices = []
        for kind in dict.fromkeys(kind for kind, _ in behind):
            tiers = [tier for of, tier in behind if of == kind]
            standby = tuple(Standby(tier, len(behind[kind, tier]), longest_s[kind, tier]) for tier in tiers)
            devices.append(self.device(layout.rooms[behind[kind, tiers[0]][0]]).with_standby(standby))
        return FleetOptions(tuple(devices), max_actors, view.fleet.load_s), behind


def _limits(device: DeviceOption) -> tuple[int, int, float]:
    return device.kv_capacity_tokens, device.max_sequences, device.usd_per_s
