"""The inner loops of a plan, compiled: times of groups, and the pass that cuts a list. `cost` and `planner` describe
them, and are their only callers."""

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


@compiled
def one_s(times: Times, begin: int, end: int) -> float:
    """Seconds for the group [begin, end), which is not empty."""
    return _one_s(times, begin, end)


@compiled
def take(
    times: Times, limit_s: float, stop: int, actors: int, end: int, begins: Ints, work_s: Floats
) -> tuple[int, int]:
    """`begins` and `work_s` [actors]: each of so many actors in turn takes as many of the longest samples before `end`
    as it can end within the limit, until `stop`. Returns how many actors took some, and how many samples are left."""
    count = 0
    while count < actors and end > stop:
        begin, seconds = _longest_group(times, end, limit_s)
        if begin == end:
            break
        if begin < stop:
            begin, seconds = stop, _one_s(times, stop, end)
        begins[count], work_s[count] = begin, seconds
        end, count = begin, count + 1
    return count, end


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
