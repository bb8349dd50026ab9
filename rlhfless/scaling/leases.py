"""The cost of machines whose time is rounded up, so that a released machine may still be paid for. Pure.

A *lease* is the time in which a device is held, by any replicas, until no replica holds it. The seller bills a
lease in whole multiples of the granularity and no less than a minimum. A replica that takes the device before that time
is over finds it paid: the lease goes on. So rounding is a property of the sequence of holdings, not of any one of them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from rlhfless.records import Holding
from rlhfless.scaling.intervals import Interval, union
from rlhfless.scaling.prices import SECONDS_PER_HOUR, Billing, PriceBook

# A time that is a multiple of the granularity but for rounding is not rounded up to the next one.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class RentalTerms:
    """How devices are rented, for policies and the simulator."""

    granularity_s: float = 0.0
    """A lease is billed in multiples of this; 0 bills the time used."""
    minimum_s: float = 0.0
    """Shortest lease that is billed."""
    reacquire_s: float = 0.0
    """Seconds from asking for a device that was given back until it is there, each time; not billed."""

    @classmethod
    def of(cls, billings: Iterable[Billing | None], reacquire_s: float) -> RentalTerms:
        """The dearest of the terms of several kinds of devices."""
        known = [billing for billing in billings if billing is not None]
        granularity_s = max((billing.granularity_s for billing in known), default=0.0)
        return cls(granularity_s, max((billing.minimum_s for billing in known), default=0.0), reacquire_s)

    @property
    def free(self) -> bool:
        """Whether a device can be given back and taken again at no cost."""
        return self == RentalTerms()

    def paid_until_s(self, start_s: float, end_s: float) -> float:
        """The end of the time that is paid for, of a lease that is held from `start_s` to `end_s`."""
        return start_s + self._billed_s(end_s - start_s)

    def _billed_s(self, held_s: float) -> float:
        if held_s <= 0:
            return 0.0
        at_least_s = max(held_s, self.minimum_s)
        if self.granularity_s == 0:
            return at_least_s
        return max(math.ceil(at_least_s / self.granularity_s - _ROUNDING) * self.granularity_s, held_s)

    def another_s(self, lease_s: float) -> float:
        """Expected seconds that one more lease of about `lease_s` is billed beyond its use."""
        return self.granularity_s / 2 + max(self.minimum_s - lease_s, 0.0)


@dataclass(frozen=True, slots=True)
class DeviceLease:
    """The time of a device from taking it until giving it back, and until it is no longer paid for."""

    device: str
    device_kind: str
    start_s: float
    end_s: float
    paid_until_s: float
    held_s: float
    """Time in which a replica held it."""

    @property
    def unused_s(self) -> float:
        """Time that is paid for, and in which no replica held it."""
        return self.paid_until_s - self.start_s - self.held_s


def billed_s(held_s: float, billing: Billing | None) -> float:
    """The seconds that the seller bills for a machine that was kept for `held_s`."""
    return RentalTerms.of([billing], reacquire_s=0.0).paid_until_s(0.0, held_s)


def leases(holdings: Iterable[Holding], prices: PriceBook) -> list[DeviceLease]:
    """The leases under the holdings, by device and time. Raises PriceError for a kind without a price."""
    held: dict[tuple[str, str], list[Interval]] = defaultdict(list)
    for holding in holdings:
        if prices.occupies(holding):
            held[holding.device_kind, holding.device].append((holding.start_s, holding.end_s))
    return [
        lease
        for (kind, device), intervals in sorted(held.items())
        for lease in _of_device(device, kind, union(intervals), prices.device(kind).billing)
    ]


def leased_usd(holdings: Iterable[Holding], prices: PriceBook) -> float:
    """The cost of the holdings with rounding by sellers: `cost_usd`, and paid time in which no replica held the device.

    Equal to `cost_usd` where no kind has `billing`. Raises PriceError for a kind without a price.
    """
    known = list(holdings)
    unused = (
        lease.unused_s * prices.device(lease.device_kind).usd_per_hour / SECONDS_PER_HOUR
        for lease in leases(known, prices)
    )
    return prices.cost_usd(known) + math.fsum(unused)


def _of_device(device: str, kind: str, disjoint: list[Interval], billing: Billing | None) -> list[DeviceLease]:
    merged: list[DeviceLease] = []
    for start_s, end_s in disjoint:
        held_s = end_s - start_s
        if merged and start_s <= merged[-1].paid_until_s:
            before = merged.pop()
            start_s, held_s = before.start_s, before.held_s + held_s
        merged.append(DeviceLease(device, kind, start_s, end_s, start_s + billed_s(end_s - start_s, billing), held_s))
    return merged
