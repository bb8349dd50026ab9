"""Device selection for a learner with a variable number of ranks (`learner.min_ranks`). Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from rlhfless.scaling.placement import Allocation, Placement, rank_devices

LEARNER_RANKS = "learner_ranks"
"""Kind of the decisions about the number of ranks."""

Candidates = Mapping[int, Sequence[Allocation]]
"""The possible allocations of a learner, by number of ranks."""


def allocations_with(placement: Placement, whole: Allocation, ranks: int, count: int) -> tuple[Allocation, ...]:
    """Return the allocations of `count` neighbouring ranks, where `whole` holds all `ranks`.

    Devices of one group stay together, so several choices of ranks may use the same devices; each set is listed once.
    """
    if count >= ranks:
        return (whole,)
    found: dict[tuple[str, ...], Allocation] = {}
    for first in range(ranks):
        of_ranks = [rank_devices(whole.devices, (first + each) % ranks, ranks) for each in range(count)]
        own = Allocation.of([device for devices in of_ranks for device in devices])
        taken = {device for group in placement.groups_of(own) for device in group.devices}
        pairs = [(device, share) for device, share in whole.shared if device in taken]
        devices, shares = zip(*pairs, strict=True)
        found.setdefault(
            tuple(device.name for device in devices), replace(whole, devices=devices, shares=shares, ranks=count)
        )
    return tuple(found.values())


def most_ranks(
    candidates: Candidates, available: Callable[[Allocation], bool], below: int | None = None
) -> Allocation | None:
    """Return the allocation with the most ranks whose devices are all available, or None if there is none.

    `below`: prefer fewer ranks than this, because a learner of that size was lost twice in one step.
    """
    order = sorted(candidates, reverse=True)
    if below is not None:
        order = [ranks for ranks in order if ranks < below] or order[-1:]
    return next((each for ranks in order for each in candidates[ranks] if available(each)), None)
