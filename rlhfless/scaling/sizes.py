"""Sizes of elastic runs, and their seconds per step by number of devices. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass


def sizes_up_to(most: int, node_devices: int) -> list[int]:
    """Return the sizes that an elastic run may have.

    Within a node 1, 2, 3, 4, 6, 8, 12, ... and all its devices; above, whole nodes, so that no run is on parts of
    several nodes.
    """
    within = {1 << power for power in range(node_devices.bit_length())}
    within |= {3 * size for size in within} | {node_devices}
    whole = range(node_devices, most + 1, node_devices)
    return sorted(size for size in {*(each for each in within if each <= node_devices), *whole} if size <= most)


UNKNOWN_EXPONENT = 0.75
"""Assumed exponent of speed by devices before a run has a plan or steps: of the bundled scenarios it is 0.6 to 0.9."""


@dataclass(frozen=True, slots=True)
class SpeedCurve:
    """Seconds per step of a run by its number of devices."""

    step_s: Mapping[int, float]
    """Known sizes. Empty: seconds are unknown, and only their ratio is assumed, by UNKNOWN_EXPONENT."""

    def at(self, devices: int) -> float:
        """Return the seconds per step: interpolated between known sizes, and inverse to the devices outside them."""
        if devices in self.step_s:
            return self.step_s[devices]
        known = sorted(self.step_s)
        if not known:
            return float(devices**-UNKNOWN_EXPONENT)
        if devices < known[0]:
            return self.step_s[known[0]] * known[0] / devices
        if devices > known[-1]:
            return self.step_s[known[-1]]
        place = bisect_left(known, devices)
        low, high = known[place - 1], known[place]
        share = math.log(devices / low) / math.log(high / low)
        return math.exp((1 - share) * math.log(self.step_s[low]) + share * math.log(self.step_s[high]))

    def measured(self, seen_s: Mapping[int, float]) -> SpeedCurve:
        """Return the curve with measured seconds at the sizes that the run has had.

        Other sizes are scaled by the ratio of measured to predicted seconds at the nearest of these sizes.
        """
        if not seen_s:
            return self
        sizes = {*self.step_s, *seen_s}

        def scaled(size: int) -> float:
            nearest = min(seen_s, key=lambda seen: (abs(math.log(seen / size)), seen))
            return self.at(size) * seen_s[nearest] / self.at(nearest)

        return SpeedCurve({size: scaled(size) for size in sorted(sizes)})
