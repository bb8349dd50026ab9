"""The samples expected to be alive at each point of a grid of iterations: compiled loops that only `completion`
calls."""

from __future__ import annotations

import math
from typing import NamedTuple

from rlhfless.scaling.compiled import compiled, part
from rlhfless.scaling.policies.cost_aware.forecasters import Floats
from rlhfless.scaling.policy import Flags, Ints

SEQUENCES, CONTEXT, ENDED = 0, 1, 2
"""Columns: S, sequences expected to be alive; C, tokens of context of those in the batch; N, -log P(all have ended)."""

SURE = 0.999
"""Largest probability that a sample is alive, so that sums stay finite."""


class Ranks(NamedTuple):
    """The positions in a row of quantiles of the lengths that represent a distribution. All [ranks]."""

    left: Ints  # column of the quantile before it
    right: Ints  # column of the quantile after it
    share: Floats  # how far it is from one to the other
    weight: Floats  # probability that it stands for


class Counted(NamedTuple):
    """Samples at slots. All [rows]."""

    home: Ints
    kind: Ints  # row of the table of quantiles
    context: Ints  # tokens, now
    delay: Floats  # iterations until it is admitted; from then on it draws a token in each iteration


@compiled
def count_alive(
    rows: Counted,
    table: Floats,
    ranks: Ranks,
    few: Flags,
    grid: Floats,
    scratch: Floats,
    waiting: Floats,
    columns: Floats,
) -> None:
    """Adds up the samples alive at each point k of the `grid` [T], in iterations. With the probability s(k) that a
    sample has not ended by then, and its context c, at a slot

        S(k) = sum of s(k)
        C(k) = sum of s(k) (c + k - delay), of samples in the batch: k >= delay
        N(k) = sum of -log(1 - s(k)) if `few` [slots] says that each sample counts separately;
               else S(k), which is nearly equal late in the step, where it matters

    `table` [kinds, Q] has the quantiles, in tokens. `scratch` [T], `waiting` [2, slots, T] and `columns` [3, slots,
    T] are 0."""
    row = 0
    while row < rows.home.size:
        count = 1
        while row + count < rows.home.size and _alike(rows, row, row + count):
            count += 1
        _add_samples(rows, row, count, table, ranks, few[rows.home[row]], grid, scratch, columns)
        if rows.delay[row] > 0:
            _add_waiting(rows, row, count, grid, waiting)
        row += count
    for slot in range(columns.shape[1]):
        sequences = context = queued = queued_context = 0.0
        for point in range(grid.size - 1, -1, -1):
            ends, took = columns[SEQUENCES, slot, point], columns[CONTEXT, slot, point]
            columns[SEQUENCES, slot, point] = sequences
            in_batch = context + sequences * grid[point] - (queued_context + queued * grid[point])
            columns[CONTEXT, slot, point] = max(in_batch, 0.0)
            if not few[slot]:
                columns[ENDED, slot, point] = sequences
            sequences += ends
            context += took
            queued += waiting[SEQUENCES, slot, point]
            queued_context += waiting[CONTEXT, slot, point]


@compiled
def add_waits(
    home: Ints,
    begun: Flags,
    most: Ints,
    means: Floats,
    longest: Ints,
    first: Ints,
    seen: Ints,
    work: Floats,
    delay: Floats,
) -> None:
    """`delay` [rows]: iterations until each is admitted (`completion.queue_iterations`): work / max_sequences - own
    length / 2. `means` [kinds] are the lengths, `longest` [kinds] has the longest first, and `first` [kinds + 1] says
    at which row each begins; `seen` and `work` [slots] are 0."""
    for waiting in (False, True):
        for kind in longest:
            for row in range(first[kind], first[kind + 1]):
                if begun[row] != waiting:
                    slot = home[row]
                    if seen[slot] >= most[slot]:
                        delay[row] = max(work[slot] / most[slot] - means[kind] / 2, 0.0)
                    seen[slot] += 1
                    work[slot] += means[kind]


@part
def _alike(rows: Counted, one: int, other: int) -> bool:
    same: bool = rows.kind[one] == rows.kind[other] and rows.home[one] == rows.home[other]
    return same and bool(rows.delay[one] == rows.delay[other])


@part
def _add_samples(
    rows: Counted,
    row: int,
    count: int,
    table: Floats,
    ranks: Ranks,
    alone: bool,
    grid: Floats,
    scratch: Floats,
    columns: Floats,
) -> None:
    """Adds `count` alike samples: where they may end and, if they count `alone`, the probability to be alive at each
    point."""
    slot, kind, delay = rows.home[row], rows.kind[row], rows.delay[row]
    cell, last = 0, grid.size - 1
    for rank in range(ranks.weight.size):
        low, high, share = table[kind, ranks.left[rank]], table[kind, ranks.right[rank]], ranks.share[rank]
        length = low * (1 - share) + high * share + delay
        while cell < last and grid[cell] < length:
            cell += 1
        weight = ranks.weight[rank] * count
        columns[SEQUENCES, slot, cell] += weight
        columns[CONTEXT, slot, cell] += weight * (rows.context[row] - delay)
        if alone:
            scratch[cell] += ranks.weight[rank]
    if alone:
        chance = 0.0
        for point in range(cell, -1, -1):
            columns[ENDED, slot, point] -= math.log1p(-min(chance, SURE)) * count
            chance += scratch[point]
            scratch[point] = 0.0


@part
def _add_waiting(rows: Counted, row: int, count: int, grid: Floats, waiting: Floats) -> None:
    """Subtracts, up to the point of their admission, the context that `_add_samples` counted for `count` alike
    samples."""
    slot, cell = rows.home[row], 0
    while cell < grid.size - 1 and grid[cell] < rows.delay[row]:
        cell += 1
    waiting[SEQUENCES, slot, cell] += count
    waiting[CONTEXT, slot, cell] += count * (rows.context[row] - rows.delay[row])
