"""The inner loops of a plan, compiled: times of groups, the pass that cuts a list, and moving its cuts.

`cost` and `groups` describe them, and are their only callers.
"""

from __future__ import annotations

from typing import NamedTuple

from rlhfless.scaling.compiled import compiled, part
from rlhfless.scaling.plan.responses import Floats, Ints


class Times(NamedTuple):
    """Times of all groups of one list on one kind of device. With n samples:"""

    end_s: Floats  # [pieces, n + 1]
    start_s: Floats  # [pieces, n + 1]
    again_s: Floats  # [n + 1]
    waiting_s: Floats  # [n + 1]
    floor: Ints  # [n + 1]
    knots: Ints  # [pieces + 1]


class Taken(NamedTuple):
    """The result of a pass of some actors over the long end of a list."""

    actors: int
    end: int
    """The samples before this position are left."""
    sum_s: float
    """The sum of their work."""
    most_s: float
    """The largest work of one of them."""


@compiled
def one_s(times: Times, begin: int, end: int) -> float:
    """Seconds for the group [begin, end), which is not empty."""
    return _one_s(times, begin, end)


@compiled
def take(
    times: Times,
    run_begins: Ints,
    limit_s: float,
    stop: int,
    actors: int,
    together: bool,
    end: int,
    begins: Ints,
    work_s: Floats,
) -> tuple[int, int, float, float]:
    """`begins` and `work_s` [actors]: each of so many actors in turn takes as many of the longest samples before `end`
    as it can end within the limit, until `stop`. `run_begins` [n + 1] is where siblings stay together, if `together`.

    Returns a `Taken`.
    """
    count, sum_s, most_s = 0, 0.0, 0.0
    while count < actors and end > stop:
        begin, seconds = _longest_group(times, end, limit_s)
        if begin == end:
            break
        wanted = max(begin, stop)
        if together and run_begins[wanted] < end:
            wanted = run_begins[wanted]
        if wanted != begin:
            begin, seconds = wanted, _one_s(times, wanted, end)
        begins[count], work_s[count] = begin, seconds
        sum_s, most_s, end, count = sum_s + seconds, max(most_s, seconds), begin, count + 1
    return count, end, sum_s, most_s


@compiled
def move_cuts(
    upper: Times,
    lower: Times,
    ready_s: Floats,
    usd_per_s: Floats,
    limit_s: float,
    reach: int,
    low: Ints,
    at: Ints,
    high: Ints,
    work_s: Floats,
) -> None:
    """`at` and `work_s` [pairs, 2]: where the cut between [low, at) and [at, high) costs least; the upper group of each
    pair comes first in `ready_s` and `usd_per_s` [pairs, 2]. Two rows of cuts are tried, `reach` to each side: a coarse
    one around the middle, then a fine one around the best."""
    for pair in range(at.size):
        best, middle, width = at[pair], (high[pair] + low[pair]) // 2, 2 * reach + 1
        upper_s, lower_s = _one_s(upper, best, high[pair]), _one_s(lower, low[pair], best)
        least_usd = _usd(ready_s[pair, 0] + upper_s, ready_s[pair, 1] + lower_s, usd_per_s, pair, limit_s)
        for divisor in (width, width * width):
            step = max((high[pair] - low[pair]) // divisor, 1)
            for index in range(-reach, reach + 1):
                cut = min(max(middle + step * index, low[pair] + 1), high[pair] - 1)
                cut_upper_s, cut_lower_s = _one_s(upper, cut, high[pair]), _one_s(lower, low[pair], cut)
                usd = _usd(ready_s[pair, 0] + cut_upper_s, ready_s[pair, 1] + cut_lower_s, usd_per_s, pair, limit_s)
                if usd < least_usd:
                    best, least_usd, upper_s, lower_s = cut, usd, cut_upper_s, cut_lower_s
            middle = best
        at[pair], work_s[pair, 0], work_s[pair, 1] = best, upper_s, lower_s


@part
def _usd(upper_s: float, lower_s: float, usd_per_s: Floats, pair: int, limit_s: float) -> float:
    """The cost of a pair; infinite if one of the two ends too late."""
    if max(upper_s, lower_s) > limit_s:
        return float("inf")
    usd: float = upper_s * usd_per_s[pair, 0] + lower_s * usd_per_s[pair, 1]
    return usd


@part
def _one_s(times: Times, begin: int, end: int) -> float:
    fitting, piece = max(begin, times.floor[end]), 0
    while piece + 2 < times.knots.size and times.knots[piece + 1] < end - fitting:
        piece += 1
    working_s = times.end_s[piece, end] - times.start_s[piece, fitting]
    seconds: float = working_s + times.waiting_s[fitting] - times.waiting_s[begin] + times.again_s[begin]
    return seconds


@part
def _longest_group(times: Times, end: int, limit_s: float) -> tuple[int, float]:
    """The smallest `begin` such that [begin, end) takes at most `limit_s`, and its seconds; (end, 0.0) if not even the
    last sample does."""
    begin, seconds = _without_repeat(times, end, limit_s)
    seconds += times.again_s[begin]
    # A group that begins among siblings prefills their prompt again.
    while begin < end and seconds > limit_s:
        begin += 1
        seconds = _one_s(times, begin, end) if begin < end else 0.0
    return begin, seconds if begin < end else 0.0


@part
def _without_repeat(times: Times, end: int, limit_s: float) -> tuple[int, float]:
    """As `_longest_group`, but the prompt of siblings that are cut through is not charged again."""
    knots, floor, piece = times.knots, times.floor[end], 0
    last = knots.size - 2
    while True:
        end_s = times.end_s[piece, end]
        low = floor if piece == last else max(end - knots[piece + 1], floor)
        if low == floor or end_s - times.start_s[piece, low] > limit_s:
            break
        piece += 1
    low = _first(times.start_s[piece], end_s - limit_s, low, end - knots[piece] if piece > 0 else end)
    if low > floor or floor == 0:
        return low, end_s - times.start_s[piece, low] if low < end else 0.0
    all_s = end_s - times.start_s[piece, floor] + times.waiting_s[floor]
    low = _first(times.waiting_s, all_s - limit_s, 0, floor)
    return low, all_s - times.waiting_s[low]


@part
def _first(ascending: Floats, least: float, low: int, high: int) -> int:
    """The first index in [low, high) whose value is not below `least`; `high` if there is none."""
    while low < high:
        middle = (low + high) // 2
        if ascending[middle] < least:
            low = middle + 1
        else:
            high = middle
    return low
