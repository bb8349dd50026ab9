"""Which replica is awake on which device: one at a time, except for replicas in slots that are `beside`."""

from __future__ import annotations

from collections.abc import Sequence

from rlhfless.scaling.prices import RentalTerms
from rlhfless.sim.setup import SlotSetup

ROUNDING_S = 1e-6
"""A device that is taken again within this time counts as held all along."""


class Devices:
    """Holders and leases of the devices of all slots."""

    def __init__(self, slot_setups: Sequence[SlotSetup], terms: RentalTerms) -> None:
        self._terms = terms
        self._since_s: dict[str, float] = {}
        """When the lease of a device began."""
        self._devices = [_in_turn(slot_setup) for slot_setup in slot_setups]
        """By slot: the devices on which its replica takes turns with other replicas."""
        self._holder: dict[str, int] = {}
        self._free_s: dict[str, float] = {}

    def change(self, slot: int, slot_setup: SlotSetup) -> None:
        """Other devices for a slot, which holds none now."""
        self._devices[slot] = _in_turn(slot_setup)

    def held(self, slot: int) -> tuple[str, int] | None:
        """A device that a slot needs and another slot holds, and that other slot."""
        for device in self._devices[slot]:
            if device in self._holder:
                return device, self._holder[device]
        return None

    def free_s(self, slot: int) -> float:
        """The time from which the devices of a slot are free; it may be in the future."""
        return max((self._free_s.get(device, 0.0) for device in self._devices[slot]), default=0.0)

    def gone(self, slot: int, at_s: float) -> tuple[bool, bool]:
        """Whether any device, and whether every device of a slot was given back and is no longer paid for."""
        gone = [device in self._free_s and at_s > self._paid_until_s(device) for device in self._devices[slot]]
        return any(gone), bool(gone) and all(gone)

    def take(self, slot: int, at_s: float) -> None:
        """Holds the devices of a slot from `at_s` on: their leases go on if they are still paid for."""
        for device in self._devices[slot]:
            self._holder[device] = slot
            if device not in self._since_s or at_s > self._paid_until_s(device):
                self._since_s[device] = at_s

    def _paid_until_s(self, device: str) -> float:
        free_s = self._free_s[device]
        return max(self._terms.paid_until_s(self._since_s[device], free_s), free_s) + ROUNDING_S

    def give(self, slot: int, at_s: float) -> None:
        """Frees the devices of a slot from `at_s` on."""
        for device in self._devices[slot]:
            del self._holder[device]
            self._free_s[device] = at_s


def _in_turn(slot_setup: SlotSetup) -> tuple[str, ...]:
    return () if slot_setup.beside else tuple(device.name for device in slot_setup.allocation.devices)
