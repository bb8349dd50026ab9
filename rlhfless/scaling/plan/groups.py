"""Cuts a list into contiguous groups of unequal size under a time limit. One pass, from the long end.

Each actor in turn takes as many of the longest samples that are left as it can end within the limit. If a(B) is a
straight line and the actors are alike, that is the cheapest partition: the time of a group is
`at_zero x its longest length` plus a sum over its samples, which no partition can change. By induction the k-th
group of this pass begins no later in the list than that of any other feasible partition, so each next group's
longest length is least, and so is the number of groups. The same induction makes the least feasible limit the
least possible step time, for any a(B). Where a(B) bends, tests hold the cost against an exact dynamic programme.

Actors that begin later come later, so they get the shorter samples.

Where a(B) bends or a group waits for memory, the best cut between two neighbours may lie below the largest group that
the limit allows: at the gap of two modes of lengths, or where the batch is full. So `polish` moves cuts, two
neighbouring groups at a time: first the even and then the odd pairs, along a coarse row of cuts, then a fine row around
the best. A cut is moved only if that lowers the cost and keeps the limit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from rlhfless.scaling.plan import kernel
from rlhfless.scaling.plan.cost import GroupTimes
from rlhfless.scaling.plan.kernel import Taken
from rlhfless.scaling.plan.options import DeviceOption, Standby
from rlhfless.scaling.plan.responses import Floats, Ints

ROUNDS = 1
"""A moved cut changes the best cuts of its neighbours, but a second round gains little (benchmarks/plan.py)."""

REACH = 8
"""The number of positions that are tried to each side, in each of two rows."""


@dataclass(frozen=True, slots=True)
class TierActors:
    """The actors of one kind in one tier, with the times of all groups on them."""

    device: DeviceOption
    standby: Standby
    actors: int
    ready_s: float
    """From the start of the step until the new weights are loaded."""
    times: GroupTimes
    stop: int = 0
    """The position in the list at which they stop."""


class ActorGroup(NamedTuple):
    """The samples [begin, end) of a list on one actor."""

    begin: int
    end: int
    tier: TierActors
    work_s: float

    @property
    def finish_s(self) -> float:
        """Seconds from the start of the step until it ends. The actor is paid for until then, and not longer."""
        return self.tier.ready_s + self.work_s

    @property
    def usd(self) -> float:
        return self.finish_s * self.tier.device.usd_per_s


@dataclass(frozen=True, slots=True)
class Candidate:
    """A list, and the tiers in the order in which they take from its long end."""

    listed: int
    """The index of the list among the step's lists."""
    samples: int
    tiers: tuple[TierActors, ...]
    run_begins: Ints
    """[samples + 1]: for each cut, the first cut at or after it that keeps siblings together."""


@dataclass(frozen=True)
class Partition:
    """All samples of a list, each on one actor; the longest samples first."""

    candidate: Candidate
    begins: Ints
    """[groups]: each ends where the one before begins, the first one at the end of the list."""
    work_s: Floats  # [groups]
    tiers: tuple[int, ...]
    """[groups]: index into the candidate's tiers."""
    step_s: float
    usd: float

    @cached_property
    def groups(self) -> tuple[ActorGroup, ...]:
        """One for each actor."""
        ends = (self.candidate.samples, *self.begins.tolist())
        tiers = (self.candidate.tiers[index] for index in self.tiers)
        return tuple(map(ActorGroup, self.begins.tolist(), ends, tiers, self.work_s.tolist()))


def fill(
    candidate: Candidate, limit_s: float, max_actors: int, *, most_usd: float = math.inf, together: bool = False
) -> Partition | float:
    """The partition of this pass. If the actors do not suffice, the seconds that one of them would take for the rest;
    infinity if the partition would cost more than `most_usd`.

    `together` cuts through siblings only where a group could not hold all of them.
    """
    begins, work_s = np.empty(max_actors, np.int64), np.empty(max_actors)
    end, usd, step_s, left_s, taken = candidate.samples, 0.0, 0.0, math.inf, list[int]()
    for index, tier in enumerate(candidate.tiers):
        done, actors = len(taken), min(tier.actors, max_actors - len(taken))
        got = Taken(
            *kernel.take(
                tier.times.table,
                candidate.run_begins,
                limit_s - tier.ready_s,
                tier.stop,
                actors,
                together,
                end,
                begins[done:],
                work_s[done:],
            )
        )
        if got.actors:
            end, step_s = got.end, max(step_s, tier.ready_s + got.most_s)
            usd += (got.actors * tier.ready_s + got.sum_s) * tier.device.usd_per_s
            taken += [index] * got.actors
        if usd > most_usd:
            return math.inf
        if end == 0:
            return Partition(candidate, begins[: len(taken)], work_s[: len(taken)], tuple(taken), step_s, usd)
        left_s = tier.times.one_s(0, end)
    return left_s


def polish(cut: Partition, limit_s: float) -> Partition:
    """A partition that costs no more, with the same number of groups, each of which ends within the limit."""
    begins, work_s = cut.begins.copy(), cut.work_s.copy()
    for turn in range(2 * ROUNDS):
        pairs: dict[tuple[int, int], list[int]] = {}
        for upper in range(turn % 2, begins.size - 1, 2):
            kinds = (id(cut.candidate.tiers[cut.tiers[index]].times) for index in (upper, upper + 1))
            pairs.setdefault((next(kinds), next(kinds)), []).append(upper)
        for alike in pairs.values():
            _move_cuts(cut, np.array(alike), limit_s, begins, work_s)
    return moved_to(cut, begins, work_s)


def _move_cuts(cut: Partition, uppers: Ints, limit_s: float, begins: Ints, work_s: Floats) -> None:
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


def heal(cut: Partition, limit_s: float) -> Partition:
    """Moves cuts between siblings to where they stay together, if that ends within the limit and is no dearer."""
    groups, candidate = list(cut.groups), cut.candidate
    for index in range(len(groups) - 1):
        upper, lower = groups[index], groups[index + 1]
        at = upper.begin
        whole = int(candidate.run_begins[at])
        if whole == at:
            continue
        before = at - 1
        while candidate.run_begins[before] != before:
            before -= 1
        for moved in (whole, before):
            if lower.begin < moved < upper.end:
                pair = _group(moved, upper.end, upper.tier), _group(lower.begin, moved, lower.tier)
                late = max(group.finish_s for group in pair) > limit_s
                if not late and sum(group.usd for group in pair) <= upper.usd + lower.usd:
                    groups[index : index + 2] = pair
                    break
    begins, work_s = zip(*((group.begin, group.work_s) for group in groups), strict=True)
    return moved_to(cut, np.array(begins), np.array(work_s))


def moved_to(cut: Partition, begins: Ints, work_s: Floats) -> Partition:
    """The same actors with other begins [groups] of their groups; computes its time and cost."""
    tiers = [cut.candidate.tiers[index] for index in cut.tiers]
    ends_s = work_s + [each.ready_s for each in tiers]
    usd = float(ends_s @ [each.device.usd_per_s for each in tiers])
    return Partition(cut.candidate, begins, work_s, cut.tiers, float(ends_s.max()), usd)


def _group(begin: int, end: int, tier: TierActors) -> ActorGroup:
    return ActorGroup(begin, end, tier, tier.times.one_s(begin, end))
