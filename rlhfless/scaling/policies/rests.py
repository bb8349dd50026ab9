"""What an idle replica does until it is wanted again: stays, sleeps in a tier, or gives its devices back. Pure.

The ski-rental problem of `rlhfless.scaling.holding`, with a tier as one more way between renting and buying. For a gap
of g seconds, a replica whose devices cost d a second, and which is up again after u seconds (by tier), pays

    stay    d g
    sleep   r (g - u) + d u + w x      r: residency of the tier
    leave   d u + w x

where x is how much of u is waited for by what costs w a second: all of it, or, if it can be started ahead of time, only
what does not fit into the gap. Sleep on a device that others take turns on, where residency has no price of its own,
is paid for only while nobody else is awake there.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlhfless.scaling.policies.learned import Starts
from rlhfless.scaling.policy import Room


@dataclass(frozen=True, slots=True)
class Gap:
    """Idle time that is foreseen."""

    seconds: float
    taken_s: float = 0.0
    """For so much of it somebody else is awake on its devices."""
    shared: bool = False
    """Somebody else will want its devices: it cannot stay, and not start ahead of time."""
    waiting_usd_per_s: float = 0.0
    """What waits for it while it comes up."""


@dataclass(frozen=True, slots=True)
class Rest:
    """The cheapest of the three."""

    keep: bool
    tier: str | None
    usd: float
    freed_usd_per_s: float
    """What each second of it saves against staying, its beginning and its end aside."""


def cheapest_rest(room: Room, gap: Gap, starts: Starts) -> Rest:
    """What costs least over the gap; between equals, what is up sooner."""
    price = room.usd_per_s
    ways = [] if gap.shared else [Rest(True, None, price * gap.seconds, 0.0)]
    for tier in (*sorted(room.wake_s, key=lambda tier: room.wake_s[tier]), None):
        up_s = starts.wait_s(room, tier)
        rate = 0.0 if tier is None else room.resident_usd_per_s[tier]
        unpaid_s = gap.taken_s if rate >= price else 0.0
        late_s = up_s if gap.shared else max(up_s - gap.seconds, 0.0)
        asleep_s = max(gap.seconds - unpaid_s - (up_s - late_s), 0.0)
        usd = rate * asleep_s + price * up_s + gap.waiting_usd_per_s * late_s
        ways.append(Rest(False, tier, usd, price - rate))
    return min(ways, key=lambda rest: rest.usd)
