"""Moves the cuts of a partition to where its cost is least, two neighbouring groups at a time.

`groups.fill` is optimal where a(B) is a straight line and no group waits for memory. Elsewhere the best cut between two
neighbours may lie below the largest group that the limit allows: at the gap of two modes of lengths, or where the
batch is full. All pairs are handled together, first the even and then the odd pairs: a coarse row of cuts, then
a fine row around the best. A cut is moved only if that lowers the cost and keeps the limit.
"""

from __future__ import annotations

import numpy as np

from rlhfless.scaling.plan import kernel
from rlhfless.scaling.plan.groups import Partition, moved_to
from rlhfless.scaling.plan.responses import Floats, Ints

ROUNDS = 1
"""A moved cut changes the best cuts of its neighbours, but a second round gains little (benchmarks/plan.py)."""

REACH = 8
"""The number of positions that are tried to each side, in each of two rows."""


def polish(cut: Partition, limit_s: float) -> Partition:
    """A partition that costs no more, with the same number of groups, each of which ends within the limit."""
    begins, work_s = cut.begins.copy(), cut.work_s.copy()
    for turn in range(2 * ROUNDS):
        pairs: dict[tuple[int, int], list[int]] = {}
        for upper in range(turn % 2, begins.size - 1, 2):
            kinds = (id(cut.candidate.tiers[cut.tiers[index]].times) for index in (upper, upper + 1))
            pairs.setdefault((next(kinds), next(kinds)), []).append(upper)
        for alike in pairs.values():
            _move(cut, np.array(alike), limit_s, begins, work_s)
    return moved_to(cut, begins, work_s)


def _move(cut: Partition, uppers: Ints, limit_s: float, begins: Ints, work_s: Floats) -> None:
    """Moves the cut between each `uppers` group and the next; all upper groups are of one kind, and all lower groups of
    one kind."""
    tiers = [[cut.candidate.tiers[cut.tiers[index]] for index in (upper, upper + 1)] for upper in uppers.tolist()]
    ready_s = np.array([[each.ready_s for each in pair] for pair in tiers])
    usd_per_s = np.array([[each.device.usd_per_s for each in pair] for pair in tiers])
    ends = np.concatenate(([cut.candidate.samples], begins))
    at, pair_s = begins[uppers], np.empty((uppers.size, 2))
    upper, lower = (each.times.table for each in tiers[0])
    cuts = begins[uppers + 1], at, ends[uppers]
    kernel.move_cuts(upper, lower, ready_s, usd_per_s, limit_s, REACH, *cuts, pair_s)
    begins[uppers] = at
    work_s[uppers], work_s[uppers + 1] = pair_s.T
