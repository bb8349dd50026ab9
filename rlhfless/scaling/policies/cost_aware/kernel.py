"""How long actors work, and when they end: compiled loops that only `migration` calls. S, C and N as in `counting`."""

from __future__ import annotations

import math
from typing import NamedTuple

from rlhfless.scaling.compiled import compiled, part
from rlhfless.scaling.policies.cost_aware.counting import CONTEXT, ENDED, SEQUENCES
from rlhfless.scaling.policies.cost_aware.forecasters import Floats
from rlhfless.scaling.policy import Ints


class Speeds(NamedTuple):
    """The seconds of an iteration at each slot: linear pieces by the batch size, plus seconds per token of context."""

    curve: Ints  # [slots]: row of the curves
    most: Ints  # [slots]: sequences that run at once
    context_s: Floats  # [slots]: per token
    at_zero_s: Floats  # [curves]
    slope_s: Floats  # [curves]: of the first piece
    knots: Floats  # [curves, knots]: where the next piece begins; infinite after the last piece
    bends_s: Floats  # [curves, knots]: by how much its slope is more


class ExpectedWork(NamedTuple):
    """The remaining work of all actors."""

    speeds: Speeds
    pace: Floats  # [slots]: how much slower than its model an engine is
    grid: Floats  # [T]: iterations
    columns: Floats  # [3, slots, T]


@part
def _iteration_s(speeds: Speeds, slot: int, sequences: float, context: float) -> float:
    """a(max(S, 1)) + g C / min(S, 1): the seconds of an iteration by the models, given that at least one sample is
    alive."""
    batch, curve = min(max(sequences, 1.0), float(speeds.most[slot])), speeds.curve[slot]
    seconds, knot = speeds.at_zero_s[curve] + speeds.slope_s[curve] * batch, 0
    while knot < speeds.knots.shape[1] and speeds.knots[curve, knot] < batch:
        seconds += speeds.bends_s[curve, knot] * (batch - speeds.knots[curve, knot])
        knot += 1
    seconds += speeds.context_s[slot] * context * min(1 / min(max(sequences, 1e-9), 1.0), 1e3)
    return float(seconds)


@part
def _span_s(work: ExpectedWork, slot: int, point: int, sequences: float, context: float) -> float:
    """Seconds from the previous point of the grid to this one, with the given samples alive, at the actor's measured
    pace."""
    iterations = work.grid[point] - work.grid[point - 1]
    return float(_iteration_s(work.speeds, slot, sequences, context) * work.pace[slot] * iterations)


@compiled
def iterations_s(work: ExpectedWork, slots: Ints, out: Floats) -> None:
    """`out` [rows]: seconds of an iteration now at each of the `slots` [rows], by the models."""
    for row in range(slots.size):
        slot, columns = slots[row], work.columns
        out[row] = _iteration_s(work.speeds, slot, columns[SEQUENCES, slot, 0], columns[CONTEXT, slot, 0])


@compiled
def trial(work: ExpectedWork, slots: Ints, more: Floats, limits: Floats, out: Floats) -> None:
    """`out` [rows, 1 + limits], for each of the `slots` [rows], with `more` [3, 1, T] added:

    expected seconds of work       sum of iterations x the chance 1 - exp(-N) that a sample is alive
    seconds until the actor ends   until N falls below each of the `limits`: after the iterations k with
                                   exp(-N(k)) = p it has ended with probability p
    """
    for row in range(slots.size):
        _trial(work, slots[row], more, 0, limits, out[row])


@part
def _trial(work: ExpectedWork, slot: int, more: Floats, extra: int, limits: Floats, out: Floats) -> None:
    """The same of one slot, with row `extra` of `more` [3, rows, T]."""
    columns = work.columns
    total = sequences = context = unended = alive = 0.0
    for limit in range(1 + limits.size):
        out[limit] = 0.0
    for point in range(work.grid.size):
        total_before, sequences_before, context_before, unended_before = total, sequences, context, unended
        sequences = max(columns[SEQUENCES, slot, point] + more[SEQUENCES, extra, point], 0.0)
        context = max(columns[CONTEXT, slot, point] + more[CONTEXT, extra, point], 0.0)
        unended = max(columns[ENDED, slot, point] + more[ENDED, extra, point], 0.0)
        if point > 0:
            if unended_before == 0:
                break
            middle = (sequences + sequences_before) / 2, (context + context_before) / 2
            seconds = _span_s(work, slot, point, *middle)
            total += seconds
            out[0] += seconds * alive / 2
            alive = -math.expm1(-unended)
            out[0] += seconds * alive / 2
        else:
            alive = -math.expm1(-unended)
        for limit in range(limits.size):
            if unended > limits[limit]:
                out[1 + limit] = total  # where nothing is behind it
            elif unended_before > limits[limit]:
                share = (unended_before - limits[limit]) / (unended_before - unended)
                out[1 + limit] = total_before + share * (total - total_before)


@compiled
def unended_within(work: ExpectedWork, slots: Ints, within_s: Floats, out: Floats) -> None:
    """`out` [rows]: N after `within_s` [rows] seconds of work at each of the `slots` [rows]."""
    columns = work.columns
    for row in range(slots.size):
        slot, total = slots[row], 0.0
        out[row] = columns[ENDED, slot, 0]
        for point in range(1, work.grid.size):
            sequences = (columns[SEQUENCES, slot, point] + columns[SEQUENCES, slot, point - 1]) / 2
            context = (columns[CONTEXT, slot, point] + columns[CONTEXT, slot, point - 1]) / 2
            seconds = _span_s(work, slot, point, sequences, context)
            if total + seconds >= within_s[row]:
                share = min(max((within_s[row] - total) / seconds, 0.0), 1.0)
                before, after = columns[ENDED, slot, point - 1], columns[ENDED, slot, point]
                out[row] = before + share * (after - before)
                break
            total += seconds
            out[row] = columns[ENDED, slot, point]
