"""What it costs to give a device back for a while: paid time that is lost, another lease, and the wait for it. Pure.

A device that is given back stays paid for until its lease is over (`RentalTerms`). If it is needed again before,
nothing is saved and nothing lost. If later, the next lease is rounded up as well, and the function that needs the
device waits.
"""

from __future__ import annotations

from rlhfless.scaling.policies.fleet_layout import PolicyContext


class HeldDevices:
    """The leases of a run's devices, from what the policy sees at its events."""

    def __init__(self) -> None:
        self._leases: dict[str, tuple[float, float]] = {}
        """By device: when its lease began, and when it was last seen to be held."""

    def see(self, now: PolicyContext) -> None:
        """Notes the devices that are held; called at every event."""
        terms = now.view.fleet.terms
        if terms.free:
            return
        for slot, replica_slot in enumerate(now.layout.replica_slots):
            if now.awake(slot):
                for device in replica_slot.devices:
                    since_s, until_s = self._leases.get(device, (now.at_s, now.at_s))
                    if now.at_s > terms.paid_until_s(since_s, until_s) and until_s < now.at_s - now.view.fleet.beat_s:
                        since_s = now.at_s
                    self._leases[device] = since_s, now.at_s

    def again_usd(self, now: PolicyContext, slot: int, gap_s: float, lease_s: float) -> float:
        """Cost of giving a slot's devices back for a gap, beside what is saved: paid time in the gap; and, if the lease
        ends before it does, another lease of about `lease_s` and the wait for it."""
        replica_slot, terms = now.layout.replica_slots[slot], now.view.fleet.terms
        ends = [
            terms.paid_until_s(self._leases.get(device, (now.at_s, now.at_s))[0], now.at_s)
            for device in replica_slot.devices
        ]
        paid_s = max(max(ends) - now.at_s, 0.0)
        if gap_s <= paid_s:
            return replica_slot.usd_per_s * gap_s
        return replica_slot.usd_per_s * (paid_s + terms.another_s(lease_s)) + self._wait_usd(now, slot)

    def _wait_usd(self, now: PolicyContext, slot: int) -> float:
        """Cost of the wait for a slot's devices."""
        waiting = now.layout.replica_slots[slot].usd_per_s + now.view.fleet.kept_usd_per_s
        return waiting * now.view.fleet.terms.reacquire_s
