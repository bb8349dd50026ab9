"""Moves the cuts of a partition to where its cost is least, two neighbouring groups at a time.

`groups.fill` is optimal where a(B) is a straight line and no group waits for memory. Elsewhere the best cut between two
neighbours may lie below the largest group that the limit allows: at the gap of two modes of lengths, or where the
batch is full. All pairs are looked at together, first the even ones and then the odd ones: a coarse row of cuts, then
a fine one around the best. A cut is moved only if that lowers the cost and keeps the limit.
"""

from __future__ import annotations

import numpy as np

from rlhfless.scaling.plan.cost import GroupTimes
from rlhfless.scaling.plan.groups import Group, Partition, partition
from rlhfless.scaling.plan.responses import Floats, Ints

ROUNDS = 1
"""A moved cut changes what is best for its neighbours, but a second round gains little (benchmarks/plan.py)."""

ROW = np.arange(-8, 9)
"""Positions that are tried at once, in steps: 17 of them in each of two rows."""


def polish(cut: Partition, limit_s: float) -> Partition:
    """A partition that costs no more, with the same number of groups, each of which ends within the limit."""
    groups = list(cut.groups)
    for turn in range(2 * ROUNDS):
        pairs: dict[tuple[int, int], list[int]] = {}
        for upper in range(turn % 2, len(groups) - 1, 2):
            kinds = id(groups[upper].seats.times), id(groups[upper + 1].seats.times)
            pairs.setdefault(kinds, []).append(upper)
        for alike in pairs.values():
            _move(groups, alike, limit_s)
    return partition(cut.candidate, groups)


def _move(groups: list[Group], uppers: list[int], limit_s: float) -> None:
    """Moves the cut between each `uppers` group and the next; all upper ones are of one kind, and all lower ones."""
    pairs = [(groups[index], groups[index + 1]) for index in uppers]
    column = [(upper.begin, lower.begin, upper.end) for upper, lower in pairs]
    at, low, high = (np.array(values)[:, None] for values in zip(*column, strict=True))
    ready_s = np.array([(upper.seats.ready_s, lower.seats.ready_s) for upper, lower in pairs])
    usd_per_s = np.array([(upper.seats.device.usd_per_s, lower.seats.device.usd_per_s) for upper, lower in pairs])
    times = pairs[0][0].seats.times, pairs[0][1].seats.times
    before = at
    for step in (np.maximum((high - low) // ROW.size, 1), np.maximum((high - low) // ROW.size**2, 1)):
        middle = (high + low) // 2 if at is before else at
        tried = np.concatenate((at, np.clip(middle + step * ROW, low + 1, high - 1)), axis=1)
        best = _usd(times, (low, tried, high), ready_s, usd_per_s, limit_s).argmin(axis=1)
        at = np.take_along_axis(tried, best[:, None], axis=1)
    for index, (upper, lower), cut in zip(uppers, pairs, at[:, 0].tolist(), strict=True):
        if cut != upper.begin:
            groups[index] = upper._replace(begin=cut, work_s=times[0].one_s(cut, upper.end))
            groups[index + 1] = lower._replace(end=cut, work_s=times[1].one_s(lower.begin, cut))


def _usd(
    times: tuple[GroupTimes, GroupTimes],
    cuts: tuple[Ints, Ints, Ints],
    ready_s: Floats,
    usd_per_s: Floats,
    limit_s: float,
) -> Floats:
    """[pairs, cuts]: what a pair costs with each cut; infinite where one of the two ends too late."""
    low, tried, high = cuts
    upper_s = ready_s[:, :1] + times[0].time_s(tried, high)
    lower_s = ready_s[:, 1:] + times[1].time_s(low, tried)
    usd = upper_s * usd_per_s[:, :1] + lower_s * usd_per_s[:, 1:]
    return np.where(np.maximum(upper_s, lower_s) <= limit_s, usd, np.inf)
