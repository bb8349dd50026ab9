"""The loops of `migration`, compiled; nothing else calls them. What they compute is said in `outlook` and there."""

from __future__ import annotations

import math
from typing import NamedTuple

from rlhfless.scaling.compiled import compiled, part
from rlhfless.scaling.policies.counting import CONTEXT, NOBODY, SEQUENCES
from rlhfless.scaling.policies.forecasters import Floats
from rlhfless.scaling.policy import Ints


class Speeds(NamedTuple):
    """What an iteration takes at each place: straight pieces by the batch, and what reading a context takes."""

    curve: Ints  # [places]: row of the curves
    most: Ints  # [places]: sequences that run at once
    context_s: Floats  # [places]: per token
    at_zero_s: Floats  # [curves]
    slope_s: Floats  # [curves]: of the first piece
    knots: Floats  # [curves, knots]: where the next piece begins; infinite behind the last one
    bends_s: Floats  # [curves, knots]: by how much its slope is more


class Outlook(NamedTuple):
    """What all actors have still to do."""

    speeds: Speeds
    pace: Floats  # [places]: how much slower than its model an engine is
    grid: Floats  # [T]: iterations
    columns: Floats  # [3, places, T]


class Actors(NamedTuple):
    """The actors of a board. All [places]."""

    samples: Ints
    kv_tokens: Ints  # that they have room for
    freed: Floats  # USD per second that it works less
    ready_s: Floats
    hold_s: Floats
    end_s: Floats


@part
def _iteration_s(speeds: Speeds, place: int, sequences: float, context: float) -> float:
    """By which everybody in the batch comes one token on, by the models; at least one is alive."""
    batch, curve = min(max(sequences, 1.0), float(speeds.most[place])), speeds.curve[place]
    seconds, knot = speeds.at_zero_s[curve] + speeds.slope_s[curve] * batch, 0
    while knot < speeds.knots.shape[1] and speeds.knots[curve, knot] < batch:
        seconds += speeds.bends_s[curve, knot] * (batch - speeds.knots[curve, knot])
        knot += 1
    seconds += speeds.context_s[place] * context * min(1 / min(max(sequences, 1e-9), 1.0), 1e3)
    return float(seconds)


@part
def _span_s(outlook: Outlook, place: int, point: int, sequences: float, context: float) -> float:
    """From the point of the grid before to this one, with so many alive in between."""
    iterations = outlook.grid[point] - outlook.grid[point - 1]
    return float(_iteration_s(outlook.speeds, place, sequences, context) * outlook.pace[place] * iterations)


@compiled
def iterations_s(outlook: Outlook, places: Ints, out: Floats) -> None:
    """`out` [rows]: what an iteration takes now at each of the `places` [rows], by the models."""
    for row in range(places.size):
        place, columns = places[row], outlook.columns
        out[row] = _iteration_s(outlook.speeds, place, columns[SEQUENCES, place, 0], columns[CONTEXT, place, 0])


@compiled
def trial(outlook: Outlook, places: Ints, more: Floats, limits: Floats, out: Floats) -> None:
    """`out` [rows, 1 + limits]: expected seconds of work at each of the `places` [rows], and seconds until -log
    P(nobody is alive) falls below each of the `limits`; with `more` [3, 1, T] on top of what there is."""
    for row in range(places.size):
        _trial(outlook, places[row], more, 0, limits, out[row])


@part
def _trial(outlook: Outlook, place: int, more: Floats, extra: int, limits: Floats, out: Floats) -> None:
    """The same of one place, with row `extra` of `more` [3, rows, T]."""
    columns = outlook.columns
    total = sequences = context = nobody = somebody = 0.0
    for limit in range(1 + limits.size):
        out[limit] = 0.0
    for point in range(outlook.grid.size):
        total_before, sequences_before, context_before, nobody_before = total, sequences, context, nobody
        sequences = max(columns[SEQUENCES, place, point] + more[SEQUENCES, extra, point], 0.0)
        context = max(columns[CONTEXT, place, point] + more[CONTEXT, extra, point], 0.0)
        nobody = max(columns[NOBODY, place, point] + more[NOBODY, extra, point], 0.0)
        if point > 0:
            if nobody_before == 0:
                break
            middle = (sequences + sequences_before) / 2, (context + context_before) / 2
            seconds = _span_s(outlook, place, point, *middle)
            total += seconds
            out[0] += seconds * somebody / 2
            somebody = -math.expm1(-nobody)
            out[0] += seconds * somebody / 2
        else:
            somebody = -math.expm1(-nobody)
        for limit in range(limits.size):
            if nobody > limits[limit]:
                out[1 + limit] = total  # where nothing is behind it
            elif nobody_before > limits[limit]:
                share = (nobody_before - limits[limit]) / (nobody_before - nobody)
                out[1 + limit] = total_before + share * (total - total_before)


@compiled
def best_dissolved(
    outlook: Outlook,
    actors: Actors,
    sources: Ints,
    takers: Ints,
    recompute_s: Floats,
    limits: Floats,
    aim: tuple[float, float, float, float, float],
    scratch: Floats,
) -> tuple[int, int, float, float]:
    """Of all samples of one of the `sources` to one of the `takers`, what saves most: from where and to where, what it
    saves, and when the later of the two ends. (-1, -1, ...) if nothing saves enough.

    `limits` [2] are those of the end that counts, and of the one that has to be in time. The `aim`: until when, when
    all have ended now, what a second is worth, the least share of what is given up that it has to save, and how full KV
    may be. `scratch` [3].
    """
    limit_s, last_s, time_usd_per_s, least_gain, kv_share = aim
    found_source, found_target, found_usd, found_s = -1, -1, 0.0, 0.0
    for source in sources:
        given_up = actors.freed[source] * actors.hold_s[source]
        for target in takers:
            if source == target or not _has_room(outlook, actors, source, target, kv_share):
                continue
            _trial(outlook, target, outlook.columns, source, limits, scratch)
            before_s = actors.ready_s[target] + recompute_s[source]
            end_s = before_s + scratch[1]
            later_s = 0.0
            for place in range(actors.end_s.size):
                if place != source and place != target:
                    later_s = max(later_s, actors.end_s[place])
            usd = given_up - actors.freed[target] * (before_s + scratch[0] - actors.hold_s[target])
            usd -= time_usd_per_s * (max(end_s, later_s) - last_s)
            enough = usd > least_gain * given_up and before_s + scratch[2] <= limit_s
            if enough and (found_source < 0 or usd > found_usd):
                found_source, found_target, found_usd, found_s = source, target, usd, end_s
    return found_source, found_target, found_usd, found_s


@part
def _has_room(outlook: Outlook, actors: Actors, source: int, target: int, kv_share: float) -> bool:
    """Whether the samples of the one have room at the other."""
    columns = outlook.columns
    if actors.samples[target] + actors.samples[source] > outlook.speeds.most[target]:
        return False
    for point in range(columns.shape[2]):
        if columns[CONTEXT, target, point] + columns[CONTEXT, source, point] > kv_share * actors.kv_tokens[target]:
            return False
    return True


@compiled
def nobody_within(outlook: Outlook, places: Ints, within_s: Floats, out: Floats) -> None:
    """`out` [rows]: -log P(nobody is alive) after `within_s` [rows] seconds of work at each of the `places` [rows]."""
    columns = outlook.columns
    for row in range(places.size):
        place, total = places[row], 0.0
        out[row] = columns[NOBODY, place, 0]
        for point in range(1, outlook.grid.size):
            sequences = (columns[SEQUENCES, place, point] + columns[SEQUENCES, place, point - 1]) / 2
            context = (columns[CONTEXT, place, point] + columns[CONTEXT, place, point - 1]) / 2
            seconds = _span_s(outlook, place, point, sequences, context)
            if total + seconds >= within_s[row]:
                share = min(max((within_s[row] - total) / seconds, 0.0), 1.0)
                before, after = columns[NOBODY, place, point - 1], columns[NOBODY, place, point]
                out[row] = before + share * (after - before)
                break
            total += seconds
            out[row] = columns[NOBODY, place, point]
