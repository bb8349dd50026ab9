"""The options of the planner for a step: kinds of devices, and how soon an actor on each can work. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rlhfless.scaling.plan import DeviceOption, FleetOptions, Standby
from rlhfless.scaling.policies.fleet_layout import PolicyContext
from rlhfless.scaling.policy import ReplicaSlot

WARM, STARTING, COLD = "warm", "starting", "cold"


class FleetOptionsCache:
    """Makes FleetOptions, and caches the curve of an engine model as long as the model stays the same."""

    def __init__(self) -> None:
        self._devices: dict[str, DeviceOption] = {}

    def device(self, replica_slot: ReplicaSlot) -> DeviceOption:
        """The kind of a slot for generation, without any actors."""
        engine = replica_slot.engine
        assert engine is not None  # callers take slots from Layout.generation
        known = self._devices.get(replica_slot.kind)
        limits = engine.kv_capacity_tokens, engine.max_sequences, replica_slot.usd_per_s
        if known is None or known.engine is not engine.model or _limits(known) != limits:
            known = self._devices[replica_slot.kind] = DeviceOption(replica_slot.kind, engine.model, *limits, ())
        return known

    def options(
        self, now: PolicyContext, standby: Mapping[int, tuple[str, float]], between_usd: Callable[[int], float]
    ) -> tuple[FleetOptions, dict[tuple[str, str], list[int]]]:
        """The options that the slots in `standby` give (slot: tier, seconds until an actor there is up), and the slots
        of each (kind, tier). `between_usd` has the cost of a slot's actor between two steps."""
        behind: dict[tuple[str, str], list[int]] = {}
        for slot, (tier, _) in standby.items():
            behind.setdefault((now.layout.replica_slots[slot].kind, tier), []).append(slot)
        offered: dict[str, list[Standby]] = {}
        for (kind, tier), slots in behind.items():
            longest_s = max(0.0, *(standby[slot][1] for slot in slots))
            offered.setdefault(kind, []).append(Standby(tier, len(slots), longest_s))
        of_kind = {kind: behind[kind, tiers[0].tier][0] for kind, tiers in offered.items()}
        devices = tuple(
            self.device(now.layout.replica_slots[slot]).offered(tuple(offered[kind]), between_usd(slot))
            for kind, slot in of_kind.items()
        )
        fleet = now.view.fleet
        return FleetOptions(devices, len(standby), fleet.load_s, fleet.prefill), behind


def _limits(device: DeviceOption) -> tuple[int, int, float]:
    return device.kv_capacity_tokens, device.max_sequences, device.usd_per_s
