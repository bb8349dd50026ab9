"""Which replica is awake on which device: one at a time, except for replicas that may be awake beside others."""

from __future__ import annotations

from collections.abc import Sequence

from rlhfless.sim.setup import Site


class Devices:
    """The slots of all sites."""

    def __init__(self, sites: Sequence[Site]) -> None:
        self._slots = [() if site.beside else tuple(slot.name for slot in site.seat.slots) for site in sites]
        """By place: the slots that its replica takes in turn with others."""
        self._holder: dict[str, int] = {}
        self._free_s: dict[str, float] = {}

    def held(self, place: int) -> tuple[str, int] | None:
        """A slot that a place needs and another place holds, and that other place."""
        for slot in self._slots[place]:
            if slot in self._holder:
                return slot, self._holder[slot]
        return None

    def free_s(self, place: int) -> float:
        """From when on the slots of a place are free; they may have been given back as of a time to come."""
        return max((self._free_s.get(slot, 0.0) for slot in self._slots[place]), default=0.0)

    def take(self, place: int) -> None:
        for slot in self._slots[place]:
            self._holder[slot] = place

    def give(self, place: int, at_s: float) -> None:
        """Frees the slots of a place as of `at_s`."""
        for slot in self._slots[place]:
            del self._holder[slot]
            self._free_s[slot] = at_s
