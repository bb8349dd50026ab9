"""Continuous batching in closed form, compiled. `sim.engine` is its face; nothing else calls it.

A *boundary* is the instant between two iterations. At each one, in this order:

1. What reached its length has left.
2. If the decoding sequences need more blocks than are free, the one admitted last is preempted: its blocks are freed,
   it keeps its tokens and returns to the head of the queue, to be recomputed later. Until they fit.
3. Sequences are admitted from the head of the queue, while there is a place and there are blocks for all they must
   prefill, beside those that the decoding ones need next. Whoever was preempted just now never fits again at once, and
   looking again at the same boundary changes nothing, so a run may be interrupted anywhere.
4. If someone prefills, one iteration is run. Else B sequences decode, and as many iterations are run at once as pass
   before the next finish, the last free block, the next arrival or the end of the time asked for.

Two facts make the jump exact. Everyone who decodes gains one token per iteration, so `(context - iteration) mod block`
of a sequence never changes: a histogram of it (`phase`) says how many new blocks each coming iteration needs. And the
finish is known as an iteration number, so the heap holds integers, and no rounding can change an order.

All of it is one file, because the compiler's cache on disk looks at the file of a function, not at what it calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt
from numba import njit

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """The function as machine code, kept on disk between processes.

    Inlined, because a call counts references of every array in its arguments (1.5 times as fast); no division is by
    zero, and not checking for it doubles the speed.
    """
    return cast(F, njit(cache=True, error_model="numpy", forceinline=True)(function))


def part(function: F) -> F:
    """The same, of what is only called from machine code: without a way in from Python it compiles in less time."""
    options = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return cast(F, njit(cache=True, error_model="numpy", forceinline=True, **options)(function))


STRIDE = 1 << 24
"""Heap keys are finish iteration * STRIDE + sample: at most 16.8 M samples, and ties go to the lower sample."""

IDLE, REACHED, UNPRICED = 0, 1, 2
"""Why `run` returned: nothing to do; the next iteration ends too late; a price of prefill is missing."""

NOW, SLOWDOWN = 0, 1
"""Places in `State.clock`."""

ITERATION, CONTEXT, RUNNING, FILLING, HEAD, QUEUED, FREE, FINISHED = 0, 1, 2, 3, 4, 5, 6, 7
ADMITTED, PREEMPTED, PREFILLED, CACHED, DECODED, WANTED_TOKENS, WANTED_CONTEXT, COUNTS = 8, 9, 10, 11, 12, 13, 14, 15
"""Places in `State.counts`. PREFILLED, CACHED and DECODED are tokens; WANTED_*: the prefill without a price."""


class Limits(NamedTuple):
    """What bounds the batch."""

    max_sequences: int
    block_tokens: int
    chunk_tokens: int
    """Tokens of a mixed iteration; 0: prompts are prefilled whole, in iterations in which nobody decodes."""
    hands_over: bool
    """A sequence leaves after its prefill: it decodes on another actor."""


class Costs(NamedTuple):
    """An EngineModel as numbers."""

    iteration_s: Floats  # [max_sequences + 1]
    context_s: float
    price_key: Ints  # [prices]: open addressing; -1 is empty
    price_s: Floats  # [prices]


class Table(NamedTuple):
    """All samples of a step; the engines share it. All columns but the last three are [samples]."""

    prompt: Ints
    target: Ints
    group: Ints
    tokens: Ints
    """Drawn so far; of a sequence that decodes, when its engine was last asked to go on."""
    has_kv: Flags
    """Its KV comes with it, so that nothing has to be prefilled."""
    arrival_s: Floats
    start_s: Floats
    finish_s: Floats
    admitted: Ints
    cached: Ints
    finished: Flags
    truncated: Flags
    """Of those that have finished: by their length, not by themselves."""
    cut: Flags
    """Who will be; no policy sees it before."""
    left: Ints  # [groups]: samples that have not finished
    complete_s: Floats  # [groups]: when the last of those that have finished did
    complete: Ints  # [1]: groups without any left


class State(NamedTuple):
    """One engine."""

    clock: Floats  # [2]
    counts: Ints  # [COUNTS]
    heap: Ints  # [max_sequences]
    filling: Ints  # [max_sequences]: samples that prefill, in order of admission
    left: Ints  # [max_sequences]: tokens they have yet to prefill
    done: Ints  # [max_sequences]: tokens of theirs that are in the cache
    queue: Ints  # [samples]: a ring
    phase: Ints  # [block_tokens]: see above
    residents: Ints  # [groups]: sequences of the group that hold blocks
    finished: Ints  # [samples]


@compiled
def run(state: State, table: Table, costs: Costs, limits: Limits, until_s: float, one: bool) -> int:
    """Runs all iterations that end at or before `until_s`; with `one`, the next one, whenever it ends. Returns why it
    stopped."""
    n, clock = state.counts, state.clock
    while True:
        _make_room(state, table, limits)
        _admit(state, table, limits)
        if n[FILLING] > 0:
            spent_s = _filling_s(state, costs, limits)
            if spent_s < 0:
                return UNPRICED
            if clock[NOW] + spent_s > until_s and not one:
                _count_tokens(state, table)
                return REACHED
            clock[NOW] += spent_s
            _fill(state, table, limits)
        elif n[RUNNING] > 0:
            iterations = 1 if one else _jump(state, table, costs, limits, until_s)
            if iterations == 0:
                _count_tokens(state, table)
                return REACHED
            clock[NOW] += _decode_s(state, costs, iterations)
            _decode(state, limits, iterations)
        else:
            return IDLE
        _finish(state, table, limits)
        if one:
            return REACHED


@part
def _count_tokens(state: State, table: Table) -> None:
    """Writes down how far those that decode have come."""
    n = state.counts
    for i in range(n[RUNNING]):
        sample = state.heap[i] % STRIDE
        table.tokens[sample] = table.target[sample] - (state.heap[i] // STRIDE - n[ITERATION])


@compiled
def take_out(state: State, table: Table, limits: Limits, chosen: Flags) -> None:
    """Takes the chosen samples out, wherever they are, with their tokens so far. Blocks are freed, KV is lost."""
    n = state.counts
    size, n[RUNNING] = n[RUNNING], 0
    keys = state.heap[:size].copy()
    for key in keys:
        if chosen[key % STRIDE]:
            _stop(state, table, limits, key)
            table.has_kv[key % STRIDE] = False
        else:
            _push(state, key)
    kept = 0
    for i in range(n[FILLING]):
        sample = state.filling[i]
        if chosen[sample]:
            _release(state, table, limits, sample, table.prompt[sample] + table.tokens[sample])
        else:
            state.filling[kept], state.left[kept], state.done[kept] = sample, state.left[i], state.done[i]
            kept += 1
    n[FILLING] = kept
    kept = 0
    for i in range(n[QUEUED]):
        sample = state.queue[(n[HEAD] + i) % len(state.queue)]
        if chosen[sample]:
            table.has_kv[sample] = False
        else:
            state.queue[(n[HEAD] + kept) % len(state.queue)] = sample
            kept += 1
    n[QUEUED] = kept


@part
def _make_room(state: State, table: Table, limits: Limits) -> None:
    """Preempts until the next decode iteration has its blocks."""
    n = state.counts
    while state.phase[(1 - n[ITERATION]) % limits.block_tokens] > n[FREE]:
        if n[FILLING] > 0:  # prompts prefill in order of admission, so whoever still does came last
            n[FILLING] -= 1
            sample = state.filling[n[FILLING]]
            _release(state, table, limits, sample, table.prompt[sample] + table.tokens[sample])
        else:
            last = 0
            for i in range(1, n[RUNNING]):
                if table.admitted[state.heap[i] % STRIDE] > table.admitted[state.heap[last] % STRIDE]:
                    last = i
            key = state.heap[last]
            sample = key % STRIDE
            _remove(state, last)
            _stop(state, table, limits, key)
        table.has_kv[sample] = False
        n[HEAD] = (n[HEAD] - 1) % len(state.queue)
        state.queue[n[HEAD]] = sample
        n[QUEUED] += 1
        n[PREEMPTED] += 1


@part
def _admit(state: State, table: Table, limits: Limits) -> None:
    n = state.counts
    while n[QUEUED] > 0 and n[RUNNING] + n[FILLING] < limits.max_sequences:
        sample = state.queue[n[HEAD]]
        group, context = table.group[sample], table.prompt[sample] + table.tokens[sample]
        if table.has_kv[sample]:
            context -= 1  # the token drawn last has no KV yet
        shared = (table.prompt[sample] - 1) // limits.block_tokens
        blocks = -(-context // limits.block_tokens) - (shared if state.residents[group] > 0 else 0)
        promised = state.phase[(1 - n[ITERATION]) % limits.block_tokens]
        if table.has_kv[sample] and context % limits.block_tokens == 0:
            promised += 1  # it decodes at once, behind a full block
        if table.arrival_s[sample] > state.clock[NOW] or blocks + promised > n[FREE]:
            return
        n[HEAD] = (n[HEAD] + 1) % len(state.queue)
        n[QUEUED] -= 1
        n[FREE] -= blocks
        cached = shared * limits.block_tokens if state.residents[group] > 0 else 0
        state.residents[group] += 1
        n[ADMITTED] += 1
        table.admitted[sample] = n[ADMITTED]
        if math.isnan(table.start_s[sample]):
            table.start_s[sample] = state.clock[NOW]
        if table.has_kv[sample]:
            _join(state, table, limits, sample)
            continue
        table.cached[sample] = cached
        n[CACHED] += cached
        state.filling[n[FILLING]] = sample
        state.left[n[FILLING]], state.done[n[FILLING]] = context - cached, cached
        n[FILLING] += 1


@part
def _filling_s(state: State, costs: Costs, limits: Limits) -> float:
    """Seconds of the next iteration, in which someone prefills; negative if a price is missing."""
    n = state.counts
    budget = limits.chunk_tokens - n[RUNNING]
    spent_s = 0.0
    if limits.chunk_tokens > 0 and n[RUNNING] > 0:
        spent_s = costs.iteration_s[n[RUNNING]] + costs.context_s * n[CONTEXT]
    for i in range(n[FILLING]):
        take = state.left[i] if limits.chunk_tokens == 0 else min(state.left[i], budget)
        if take == 0:
            break
        place = find_price(costs.price_key, take, state.done[i])
        if costs.price_key[place] < 0:
            n[WANTED_TOKENS], n[WANTED_CONTEXT] = take, state.done[i]
            return -1.0
        spent_s += costs.price_s[place]
        budget -= take
    stretched_s: float = spent_s * state.clock[SLOWDOWN]
    return stretched_s


@compiled
def find_price(price_key: Ints, tokens: int, context: int) -> int:
    """Where the price of prefilling `tokens` behind `context` is, or is to be put."""
    mask = len(price_key) - 1
    key = price_key_of(tokens, context)
    place = (key ^ key >> 31) * 40503 & mask
    while price_key[place] >= 0 and price_key[place] != key:
        place = (place + 1) & mask
    return place


@compiled
def price_key_of(tokens: int, context: int) -> int:
    """The key of that price in `Costs.price_key`."""
    return tokens << 31 | context


@part
def _fill(state: State, table: Table, limits: Limits) -> None:
    """One iteration in which someone prefills."""
    n = state.counts
    budget = limits.chunk_tokens - n[RUNNING]
    if limits.chunk_tokens > 0 and n[RUNNING] > 0:
        _decode(state, limits, 1)
    ready = 0
    for i in range(n[FILLING]):
        take = state.left[i] if limits.chunk_tokens == 0 else min(state.left[i], budget)
        budget -= take
        state.left[i] -= take
        state.done[i] += take
        n[PREFILLED] += take
        if state.left[i] == 0:
            ready += 1
    for i in range(ready):
        sample = state.filling[i]
        table.tokens[sample] += 1
        n[DECODED] += 1
        if limits.hands_over or table.tokens[sample] == table.target[sample]:
            _complete(state, table, limits, sample)
        else:
            _join(state, table, limits, sample)
    n[FILLING] -= ready
    for i in range(n[FILLING]):
        state.filling[i] = state.filling[i + ready]
        state.left[i], state.done[i] = state.left[i + ready], state.done[i + ready]


@part
def _jump(state: State, table: Table, costs: Costs, limits: Limits, until_s: float) -> int:
    """How many decode iterations pass until something else happens; 0 if the first ends after `until_s`."""
    n = state.counts
    most = _iterations_with_blocks(state, limits, state.heap[0] // STRIDE - n[ITERATION])
    if n[QUEUED] > 0 and n[RUNNING] < limits.max_sequences:
        arrival_s = table.arrival_s[state.queue[n[HEAD]]]
        if arrival_s > state.clock[NOW]:
            before = _iterations_until(state, costs, most, arrival_s)
            if state.clock[NOW] + _decode_s(state, costs, before) < arrival_s:
                before += 1
            most = min(most, before)
    return _iterations_until(state, costs, most, until_s)


@part
def _iterations_with_blocks(state: State, limits: Limits, most: int) -> int:
    """The largest number of iterations, up to `most`, that the free blocks suffice for."""
    n, block = state.counts, limits.block_tokens
    turns = min(most // block, n[FREE] // n[RUNNING])
    iterations: int = turns * block
    needed = turns * n[RUNNING]
    while iterations < most:
        needed += state.phase[(1 - n[ITERATION] - iterations) % block]
        if needed > n[FREE]:
            break
        iterations += 1
    return iterations


@part
def _iterations_until(state: State, costs: Costs, most: int, until_s: float) -> int:
    """The largest number of decode iterations, up to `most`, that end at or before `until_s`."""
    n, now_s = state.counts, state.clock[NOW]
    if now_s + _decode_s(state, costs, most) <= until_s:
        return most
    growth_s = costs.context_s * n[RUNNING] * state.clock[SLOWDOWN]
    first_s = _decode_s(state, costs, 1) - growth_s / 2
    wait_s = max(until_s - now_s, 0.0)
    root = 2 * wait_s / (first_s + math.sqrt(first_s * first_s + 2 * growth_s * wait_s))
    iterations = min(int(root), most)
    # Rounding can put the root on the other side of a whole number.
    while iterations < most and now_s + _decode_s(state, costs, iterations + 1) <= until_s:
        iterations += 1
    while iterations > 0 and now_s + _decode_s(state, costs, iterations) > until_s:
        iterations -= 1
    return iterations


@part
def _decode_s(state: State, costs: Costs, iterations: int) -> float:
    """`rlhfless.scaling.engine_model.decode_s`, compiled."""
    n = state.counts
    grown = iterations * n[CONTEXT] + n[RUNNING] * iterations * (iterations - 1) / 2
    spent_s: float = (iterations * costs.iteration_s[n[RUNNING]] + costs.context_s * grown) * state.clock[SLOWDOWN]
    return spent_s


@part
def _decode(state: State, limits: Limits, iterations: int) -> None:
    """So many decode iterations of everyone who decodes."""
    n, block = state.counts, limits.block_tokens
    n[FREE] -= iterations // block * n[RUNNING]
    for i in range(iterations % block):
        n[FREE] -= state.phase[(1 - n[ITERATION] - i) % block]
    n[ITERATION] += iterations
    n[CONTEXT] += iterations * n[RUNNING]
    n[DECODED] += iterations * n[RUNNING]


@part
def _finish(state: State, table: Table, limits: Limits) -> None:
    n = state.counts
    while n[RUNNING] > 0 and state.heap[0] // STRIDE == n[ITERATION]:
        key = state.heap[0]
        _remove(state, 0)
        _leave(state, table, limits, key)
        _complete(state, table, limits, key % STRIDE)


@part
def _join(state: State, table: Table, limits: Limits, sample: int) -> None:
    """From the next iteration on it decodes."""
    n = state.counts
    context = table.prompt[sample] + table.tokens[sample]
    n[CONTEXT] += context
    state.phase[(context - n[ITERATION]) % limits.block_tokens] += 1
    _push(state, (n[ITERATION] + table.target[sample] - table.tokens[sample]) * STRIDE + sample)


@part
def _leave(state: State, table: Table, limits: Limits, key: int) -> None:
    """It no longer decodes; its tokens are written down."""
    n, sample = state.counts, key % STRIDE
    table.tokens[sample] = table.target[sample] - (key // STRIDE - n[ITERATION])
    context = table.prompt[sample] + table.tokens[sample]
    n[CONTEXT] -= context
    state.phase[(context - n[ITERATION]) % limits.block_tokens] -= 1


@part
def _stop(state: State, table: Table, limits: Limits, key: int) -> None:
    """It no longer decodes, and is not done."""
    sample = key % STRIDE
    _leave(state, table, limits, key)
    _release(state, table, limits, sample, table.prompt[sample] + table.tokens[sample] - 1)


@part
def _complete(state: State, table: Table, limits: Limits, sample: int) -> None:
    n = state.counts
    _release(state, table, limits, sample, table.prompt[sample] + table.tokens[sample] - 1)
    table.finish_s[sample] = state.clock[NOW]
    state.finished[n[FINISHED]] = sample
    n[FINISHED] += 1
    if table.tokens[sample] < table.target[sample]:
        return  # it has only ended its prefill
    group = table.group[sample]
    table.finished[sample], table.truncated[sample] = True, table.cut[sample]
    table.complete_s[group] = max(table.complete_s[group], state.clock[NOW])
    table.left[group] -= 1
    table.complete[0] += table.left[group] == 0


@part
def _release(state: State, table: Table, limits: Limits, sample: int, held_tokens: int) -> None:
    """Frees the blocks of a sequence, and those of its prompt if no sibling is left."""
    group, shared = table.group[sample], (table.prompt[sample] - 1) // limits.block_tokens
    state.residents[group] -= 1
    state.counts[FREE] += -(-held_tokens // limits.block_tokens) - (shared if state.residents[group] > 0 else 0)


@part
def _push(state: State, key: int) -> None:
    n, heap = state.counts, state.heap
    heap[n[RUNNING]] = key
    n[RUNNING] += 1
    _rise(heap, n[RUNNING] - 1)


@part
def _remove(state: State, place: int) -> None:
    n, heap = state.counts, state.heap
    n[RUNNING] -= 1
    size = n[RUNNING]
    if place == size:
        return
    heap[place] = heap[size]
    _rise(heap, place)
    while True:
        child = 2 * place + 1
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if child >= size or heap[place] <= heap[child]:
            return
        heap[place], heap[child] = heap[child], heap[place]
        place = child


@part
def _rise(heap: Ints, place: int) -> None:
    while place > 0:
        parent = (place - 1) // 2
        if heap[parent] <= heap[place]:
            return
        heap[parent], heap[place] = heap[place], heap[parent]
        place = parent
