"""Simulate continuous batching in closed form, in compiled code. Only `sim.engine` calls this module.

A *boundary* is the instant between two iterations. At each boundary, in this order:

1. Sequences that have reached their target length leave.
2. While the decoding sequences need more blocks than are free, the sequence admitted last is preempted: its blocks are
   freed, it keeps its tokens and returns to the head of the queue, to be recomputed later.
3. Sequences are admitted from the head of the queue while fewer than max_sequences run and there are blocks for
   everything they must prefill, in addition to the blocks that decoding sequences need next. A sequence that was just
   preempted never fits again at once, and repeating this step at the same boundary changes nothing, so a run may be
   interrupted anywhere.
4. If a sequence prefills, one iteration runs. Otherwise B sequences decode, and all iterations up to the next finish,
   the last free block or the next arrival run in one jump. A part of a jump may run before a change from outside.

The end of such an iteration or jump, or the arrival at an idle engine, is the engine's next *event*. `advance`
runs engines one after the other, as far as the caller knows that nothing else happens. `run` runs the events of all
engines in the order of time, and stops at the one at which a step has the complete groups that it awaits, or a sample
leaves to wait for its environment: what the caller does then may change the engines.

Prompts and the prefixes that they share are the *nodes* of a tree. All sequences that start with a node hold its blocks
together. When the last of them leaves, the blocks are free, and stay findable until other sequences have taken all
blocks that became free before them (vLLM's order: least recently used first, and within a sequence the last block
first). The count of blocks taken so far therefore tells how much of a node is left, without any ordered list.

Two facts make the jump exact. A decoding sequence gains one token per iteration, so its `(context - iteration) mod
block` never changes: a histogram of it (`phase`) tells how many new blocks each coming iteration needs. And finishes
are iteration numbers, so the heap holds integers, and rounding cannot change an order.

All of it is in one file because the compiler's on-disk cache checks the file of a function, not the files it calls. The
layout of `sim.kernel_state` is part of the functions' types, so the cache checks it too.
"""

from __future__ import annotations

import math

from rlhfless.scaling.policy import UNASSIGNED
from rlhfless.sim.compiled import compiled, inlined, part
from rlhfless.sim.kernel_state import UNKNOWN, Costs, Flags, Ints, Limits, Pool, State, Table

JOIN_S = 0.030
"""Work that follows other work within this time counts as one call with it, as in the runtime."""

STRIDE = 1 << 24
"""Heap keys are finish iteration * STRIDE + sample: at most 16.8 M samples, and ties go to the lower sample."""

ENDED, OVER, STOPPED, PARKED = 0, 1, 2, 3
"""Indices into `Pool.totals`."""


@compiled
def advance(
    pool: Pool, table: Table, costs: Costs, limits: Limits, first: int, last: int, until_s: float, one: bool
) -> int:
    """Run all iterations that end at or before `until_s` in engines [first, last).

    With `one`, run the next iteration, whenever it ends. An idle engine's clock advances to its next arrival. Returns
    `last`, or the first engine that cannot continue because it lacks a prefill price or room for a span.
    """
    stuck = last
    for row in range(first, last):
        if not _advance(_state(pool, row), table, costs, limits, until_s, one):
            stuck = min(stuck, row)
    return stuck


@inlined
def _state(pool: Pool, row: int) -> State:
    return State(
        pool.engine[row],
        pool.heap[row],
        pool.filling[row],
        pool.left[row],
        pool.done[row],
        pool.queue[row],
        pool.phase[row],
        pool.residents[row],
        pool.idle[row],
        pool.evicts[row],
        pool.ended,
        pool.span,
        pool.totals,
    )


@compiled
def run(pool: Pool, table: Table, costs: Costs, limits: Limits, until_s: float) -> float:
    """Run the events up to `until_s` of all engines in order, up to the first at which a step has all groups that it
    awaits, or a sample leaves to wait (`Pool.totals[STOPPED]`).

    Returns the time of the next event of any engine; UNKNOWN if an engine lacks a prefill price or room for a span.
    Engines stay at their last events.
    """
    for row in range(len(pool.engine)):
        if pool.engine[row].due_s == UNKNOWN and not _foresee(_state(pool, row), table, costs, limits):
            return UNKNOWN
    while True:
        first = 0
        for row in range(1, len(pool.engine)):
            if pool.engine[row].due_s < pool.engine[first].due_s:
                first = row
        due_s: float = pool.engine[first].due_s
        if due_s > until_s or math.isinf(due_s) or pool.totals[STOPPED] > 0:
            return due_s
        state = _state(pool, first)
        _do(state, table, limits)
        if not _foresee(state, table, costs, limits):
            return UNKNOWN


@inlined
def _advance(state: State, table: Table, costs: Costs, limits: Limits, until_s: float, one: bool) -> bool:
    """Run `advance` for one engine, and return whether it could continue."""
    n = state.n
    while True:
        if n.due_s == UNKNOWN and not _foresee(state, table, costs, limits):
            return False
        working = n.running + n.filling > 0
        if (n.due_s <= until_s and n.due_s < math.inf) or (one and working and n.jump <= 1):
            _do(state, table, limits)
            if one and working:
                return True
        else:
            iterations = 0
            if n.jump > 0:
                iterations = 1 if one else _iterations_until(state, costs, n.jump - 1, until_s)
            if iterations > 0:
                n.now_s += _decode_s(state, costs, iterations)
                n.jump -= iterations
                _decode(state, limits, iterations)
            _count_tokens(state, table)
            return True


@part
def _foresee(state: State, table: Table, costs: Costs, limits: Limits) -> bool:
    """Begin an engine's next event at its boundary, and compute the end; return False if it lacks something for it."""
    n = state.n
    n.jump = 0
    if n.running + n.filling == 0:
        if n.queued == 0:
            n.due_s = math.inf
            return True
        if state.totals[OVER] == len(state.span):
            return False
        n.due_s = max(n.now_s, table.sample[state.queue[n.head]].arrival_s)
        return True
    _make_room(state, table, limits)
    _admit(state, table, limits)
    if n.filling > 0:
        spent_s = _filling_s(state, costs, limits)
        if spent_s < 0:
            return False
        n.due_s = n.now_s + spent_s
    else:
        n.way = _way(state, costs)
        n.jump = _jump(state, table, costs, limits)
        n.due_s = n.now_s + _decode_s(state, costs, n.jump)
    return True


@part
def _do(state: State, table: Table, limits: Limits) -> None:
    """End an engine's event."""
    n = state.n
    n.now_s, n.due_s = n.due_s, UNKNOWN
    if n.running + n.filling == 0:
        _awake(state)
        _admit(state, table, limits)
        return
    if n.filling > 0:
        _fill(state, table, limits)
    else:
        _decode(state, limits, n.jump)
    _finish(state, table, limits)
    if n.running + n.filling == 0:
        n.rested_s = n.now_s


@part
def _awake(state: State) -> None:
    """Begin to work after a rest, in the last span of work or in another one."""
    n = state.n
    if n.now_s > n.rested_s + JOIN_S:
        if n.rested_s > -math.inf:
            over = state.span[state.totals[OVER]]
            over.engine, over.start_s, over.end_s = n.row, n.since_s, n.rested_s
            state.totals[OVER] += 1
        n.since_s = n.now_s


@part
def _count_tokens(state: State, table: Table) -> None:
    n = state.n
    for i in range(n.running):
        sample = state.heap[i] % STRIDE
        table.tokens[sample] = table.sample[sample].target - (state.heap[i] // STRIDE - n.iteration)


@compiled
def take_out(pool: Pool, table: Table, limits: Limits, row: int, chosen: Flags) -> None:
    """Remove the chosen samples from an engine, wherever they are. They keep their tokens and lose their KV."""
    state = _state(pool, row)
    n = state.n
    size, n.running = n.running, 0
    _sort(state.heap, size)  # the order in which their blocks become free must not depend on the heap's history
    for i in range(size):
        key = state.heap[i]  # kept keys are pushed to places before this one
        if chosen[key % STRIDE]:
            _stop(state, table, limits, key)
        else:
            _push(state, key)
    kept = 0
    for i in range(n.filling):
        sample = state.filling[i]
        if chosen[sample]:
            context = table.sample[sample].prompt + table.tokens[sample]
            _release(state, table, limits, sample, context, state.done[i])
        else:
            state.filling[kept], state.left[kept], state.done[kept] = sample, state.left[i], state.done[i]
            kept += 1
    n.filling = kept
    kept = 0
    for i in range(n.queued):
        sample = state.queue[(n.head + i) % len(state.queue)]
        if not chosen[sample]:
            state.queue[(n.head + kept) % len(state.queue)] = sample
            kept += 1
    n.queued = kept


@part
def _make_room(state: State, table: Table, limits: Limits) -> None:
    """Preempt sequences until the next decode iteration has its blocks."""
    n = state.n
    while state.phase[(1 - n.iteration) % limits.block_tokens] > n.free:
        if n.filling > 0:  # prompts prefill in order of admission, so a prefilling one was admitted last
            n.filling -= 1
            sample = state.filling[n.filling]
            context = table.sample[sample].prompt + table.tokens[sample]
            _release(state, table, limits, sample, context, state.done[n.filling])
        else:
            last = 0
            for i in range(1, n.running):
                if table.sample[state.heap[i] % STRIDE].admitted > table.sample[state.heap[last] % STRIDE].admitted:
                    last = i
            key = state.heap[last]
            sample = key % STRIDE
            _remove(state, last)
            _stop(state, table, limits, key)
        n.head = (n.head - 1) % len(state.queue)
        state.queue[n.head] = sample
        n.queued += 1
        n.preempted += 1


@part
def _admit(state: State, table: Table, limits: Limits) -> None:
    n = state.n
    while n.queued > 0 and n.running + n.filling < limits.max_sequences:
        sample = state.queue[n.head]
        leaf, context = table.sample[sample].leaf, table.sample[sample].prompt + table.tokens[sample]
        blocks = -(-context // limits.block_tokens) - _held(state, table, limits, leaf)
        promised = state.phase[(1 - n.iteration) % limits.block_tokens]
        if table.sample[sample].arrival_s > n.now_s or blocks + promised > n.free:
            return
        n.head = (n.head + 1) % len(state.queue)
        n.queued -= 1
        cached = _hold(state, table, limits, leaf, blocks) * limits.block_tokens
        n.admitted += 1
        table.sample[sample].admitted = n.admitted
        if math.isnan(table.sample[sample].start_s):
            table.sample[sample].start_s = n.now_s
        table.sample[sample].cached = cached
        n.cached += cached
        state.filling[n.filling] = sample
        state.left[n.filling], state.done[n.filling] = context - cached, cached
        n.filling += 1


@part
def _own(table: Table, limits: Limits, node: int) -> int:
    """Return the blocks of a node, without its parent's."""
    own: int = table.depth[node] // limits.block_tokens
    parent = table.parent[node]
    return own - table.depth[parent] // limits.block_tokens if parent >= 0 else own


@part
def _held(state: State, table: Table, limits: Limits, node: int) -> int:
    """Return how many blocks of a node and its ancestors are held by sequences."""
    while node >= 0 and state.residents[node] == 0:
        node = table.parent[node]
    held: int = table.depth[node] // limits.block_tokens if node >= 0 else 0
    return held


@part
def _findable(state: State, node: int) -> int:
    """Return how many blocks of an idle node can still be found in the cache."""
    gone = max(state.n.taken - state.evicts[node], 0)
    left: int = max(state.idle[node] - gone, 0)
    return left


@part
def _hold(state: State, table: Table, limits: Limits, leaf: int, blocks: int) -> int:
    """Take `blocks` more blocks for a sequence and hold the nodes from `leaf` upwards; return how many were cached."""
    n, node, matched, revived = state.n, leaf, 0, 0
    while node >= 0:
        own = _own(table, limits, node)
        findable = own
        if state.residents[node] == 0:
            findable = _findable(state, node)
        matched = matched + own if findable == own else findable
        node = table.parent[node]
    cached: int = matched
    node = leaf
    while node >= 0:  # found blocks are counted from the first block of the sequence
        if state.residents[node] == 0:
            own = _own(table, limits, node)
            before = table.depth[table.parent[node]] // limits.block_tokens if table.parent[node] >= 0 else 0
            findable = min(max(matched - before, 0), own)
            n.evicted += max(state.idle[node] - findable, 0) * limits.block_tokens
            if findable > 0:
                _revive(state, node, findable)
                revived += findable
            state.idle[node] = 0
        state.residents[node] += 1
        node = table.parent[node]
    n.free -= blocks
    n.taken += blocks - revived
    return cached


@part
def _revive(state: State, node: int, blocks: int) -> None:
    """Take found blocks of a node out of the free list, so blocks freed after them are evicted that much earlier."""
    for other in range(len(state.idle)):
        if state.idle[other] > 0 and state.evicts[other] > state.evicts[node]:
            state.evicts[other] -= blocks


@compiled
def put(pool: Pool, table: Table, limits: Limits, row: int, node: int) -> bool:
    """Put the blocks of an idle node into a cache that already has its parent's, and return whether they fit."""
    state = _state(pool, row)
    n, own = state.n, _own(table, limits, node)
    if own > n.free:
        return False
    findable = _findable(state, node)
    if findable > 0:
        _revive(state, node, findable)
    n.taken += own - findable
    state.idle[node], state.evicts[node] = own, n.taken + n.free - own
    return True


@compiled
def lacks(pool: Pool, table: Table, limits: Limits, row: int, node: int) -> int:
    """Return how many blocks of a node, without its parent's, an engine's cache lacks."""
    state = _state(pool, row)
    if state.residents[node] > 0:
        return 0
    lacking: int = _own(table, limits, node) - _findable(state, node)
    return lacking


@part
def _filling_s(state: State, costs: Costs, limits: Limits) -> float:
    """Return the seconds of the next iteration, in which a sequence prefills; negative if a price is missing."""
    n = state.n
    budget = limits.chunk_tokens - n.running
    spent_s = 0.0
    if limits.chunk_tokens > 0 and n.running > 0:
        way = _way(state, costs)
        spent_s = costs.iteration_s[way, n.running] + costs.context_s[way] * n.context
    for i in range(n.filling):
        take = state.left[i] if limits.chunk_tokens == 0 else min(state.left[i], budget)
        if take == 0:
            break
        place = find_price(costs.price_key, take, state.done[i])
        if costs.price_key[place] < 0:
            n.wanted_tokens, n.wanted_context = take, state.done[i]
            return -1.0
        spent_s += costs.price_s[place]
        budget -= take
    stretched_s: float = spent_s * n.slowdown
    return stretched_s


@compiled
def find_price(price_key: Ints, tokens: int, context: int) -> int:
    """Return the index at which the price of prefilling `tokens` after `context` is, or is to be stored."""
    mask = len(price_key) - 1
    key = price_key_of(tokens, context)
    place = (key ^ key >> 31) * 40503 & mask
    while price_key[place] >= 0 and price_key[place] != key:
        place = (place + 1) & mask
    return place


@compiled
def price_key_of(tokens: int, context: int) -> int:
    """Return the key of a prefill price in `Costs.price_key`."""
    return tokens << 31 | context


@part
def _fill(state: State, table: Table, limits: Limits) -> None:
    """Run one iteration in which a sequence prefills."""
    n = state.n
    budget = limits.chunk_tokens - n.running
    if limits.chunk_tokens > 0 and n.running > 0:
        _decode(state, limits, 1)
    ready = 0
    for i in range(n.filling):
        take = state.left[i] if limits.chunk_tokens == 0 else min(state.left[i], budget)
        budget -= take
        state.left[i] -= take
        state.done[i] += take
        n.prefilled += take
        if state.left[i] == 0:
            ready += 1
    for i in range(ready):
        sample = state.filling[i]
        table.tokens[sample] += 1
        n.decoded += 1
        if table.tokens[sample] == table.sample[sample].target:
            _complete(state, table, limits, sample)
        else:
            _join(state, table, limits, sample)
    n.filling -= ready
    for i in range(n.filling):
        state.filling[i] = state.filling[i + ready]
        state.left[i], state.done[i] = state.left[i + ready], state.done[i + ready]


@part
def _jump(state: State, table: Table, costs: Costs, limits: Limits) -> int:
    """Return how many decode iterations pass until something else happens."""
    n = state.n
    most = _iterations_with_blocks(state, limits, state.heap[0] // STRIDE - n.iteration)
    if n.queued > 0 and n.running < limits.max_sequences:
        arrival_s = table.sample[state.queue[n.head]].arrival_s
        if arrival_s > n.now_s:
            before = _iterations_until(state, costs, most, arrival_s)
            if n.now_s + _decode_s(state, costs, before) < arrival_s:
                before += 1
            most = min(most, before)
    return most


@part
def _iterations_with_blocks(state: State, limits: Limits, most: int) -> int:
    """Return the largest number of iterations, up to `most`, for which the free blocks suffice."""
    n, block = state.n, limits.block_tokens
    if n.running * (most // block + 1) <= n.free:
        return most
    turns = min(most // block, n.free // n.running)
    iterations: int = turns * block
    needed = turns * n.running
    place = (1 - n.iteration) % block
    while iterations < most:
        needed += state.phase[place]
        if needed > n.free:
            break
        iterations += 1
        place = place - 1 if place > 0 else block - 1
    return iterations


@part
def _iterations_until(state: State, costs: Costs, most: int, until_s: float) -> int:
    """Return the largest number of decode iterations, up to `most`, that end at or before `until_s`."""
    n, now_s = state.n, state.n.now_s
    if now_s + _decode_s(state, costs, most) <= until_s:
        return most
    growth_s = costs.context_s[n.way] * n.running * n.slowdown
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
    """Return the seconds of the next `iterations`; the compiled form of `rlhfless.scaling.engine_model.decode_s`."""
    n, way = state.n, state.n.way
    grown = iterations * n.context + n.running * iterations * (iterations - 1) / 2
    spent_s: float = (iterations * costs.iteration_s[way, n.running] + costs.context_s[way] * grown) * n.slowdown
    return spent_s


@part
def _way(state: State, costs: Costs) -> int:
    """Return the fastest way to run the next decode iteration; it stays the fastest until something else happens."""
    n, best = state.n, 0
    fewest_s = costs.iteration_s[0, n.running] + costs.context_s[0] * n.context
    for way in range(1, len(costs.context_s)):
        spent_s = costs.iteration_s[way, n.running] + costs.context_s[way] * n.context
        if spent_s < fewest_s:
            best, fewest_s = way, spent_s
    return best


@part
def _decode(state: State, limits: Limits, iterations: int) -> None:
    n, block = state.n, limits.block_tokens
    before = n.free
    n.free -= iterations // block * n.running
    place = (1 - n.iteration) % block
    for _ in range(iterations % block):
        n.free -= state.phase[place]
        place = place - 1 if place > 0 else block - 1
    n.taken += before - n.free
    n.iteration += iterations
    n.context += iterations * n.running
    n.decoded += iterations * n.running


@part
def _finish(state: State, table: Table, limits: Limits) -> None:
    n = state.n
    while n.running > 0 and state.heap[0] // STRIDE == n.iteration:
        key = state.heap[0]
        _remove(state, 0)
        _leave(state, table, limits, key)
        _complete(state, table, limits, key % STRIDE)


@part
def _join(state: State, table: Table, limits: Limits, sample: int) -> None:
    """Start to decode a sample in the next iteration."""
    n = state.n
    context = table.sample[sample].prompt + table.tokens[sample]
    n.context += context
    state.phase[(context - n.iteration) % limits.block_tokens] += 1
    _push(state, (n.iteration + table.sample[sample].target - table.tokens[sample]) * STRIDE + sample)


@part
def _leave(state: State, table: Table, limits: Limits, key: int) -> None:
    """Stop decoding a sample, and update its tokens."""
    n, sample = state.n, key % STRIDE
    table.tokens[sample] = table.sample[sample].target - (key // STRIDE - n.iteration)
    context = table.sample[sample].prompt + table.tokens[sample]
    n.context -= context
    state.phase[(context - n.iteration) % limits.block_tokens] -= 1


@part
def _stop(state: State, table: Table, limits: Limits, key: int) -> None:
    """Stop an unfinished sample, and release its blocks."""
    sample = key % STRIDE
    _leave(state, table, limits, key)
    context = table.sample[sample].prompt + table.tokens[sample] - 1
    _release(state, table, limits, sample, context, context)


@part
def _complete(state: State, table: Table, limits: Limits, sample: int) -> None:
    n = state.n
    context = table.sample[sample].prompt + table.tokens[sample] - 1
    turn, ready_s = table.sample[sample].turn, n.now_s
    if table.sample[sample].leaf != table.sample[sample].group:
        ready_s = _asked_s(table, sample, n.now_s)
    if turn < table.sample[sample].last:
        table.depth[table.sample[sample].leaf] = context  # what the next turn finds in the cache
        _release(state, table, limits, sample, context, context)
        table.sample[sample].turn = turn + 1
        table.tokens[sample] += table.turn_given[turn]
        table.sample[sample].target = table.turn_end[turn + 1]
        table.sample[sample].arrival_s = ready_s
        if ready_s > n.now_s + limits.park_s:
            table.sample[sample].leaves_s = n.now_s + limits.park_s
            state.totals[PARKED] += 1
            state.totals[STOPPED] = 1
        else:
            _queue(state, table, sample)
        return
    _release(state, table, limits, sample, context, context)
    table.sample[sample].finish_s = ready_s
    table.home[sample], table.actor[sample] = UNASSIGNED, n.slot
    state.ended[state.totals[ENDED]] = sample
    state.totals[ENDED] += 1
    if table.tokens[sample] < table.sample[sample].target:
        return  # only its prefill has ended
    group = table.sample[sample].group
    table.finished[sample], table.truncated[sample] = True, table.sample[sample].cut
    table.complete_s[group] = max(table.complete_s[group], ready_s)
    table.left[group] -= 1
    if table.left[group] == 0:
        step = table.step[group]
        table.awaited[step] -= 1
        if table.awaited[step] == 0:
            state.totals[STOPPED] = 1


@part
def _asked_s(table: Table, sample: int, now_s: float) -> float:
    """Ask the environment about a turn; return when it answers. It makes each call once."""
    record = table.sample[sample]
    if record.turn >= record.answered:
        record.answered, record.ready_s = record.turn + 1, now_s + table.turn_wait_s[record.turn]
        record.waited_s += table.turn_wait_s[record.turn]
    if record.turn + 1 < record.answered:
        return now_s
    ready_s: float = max(record.ready_s, now_s)
    return ready_s


@part
def _queue(state: State, table: Table, sample: int) -> None:
    """Queue a sample that waits for its environment. The queue is in the order of arrivals."""
    n = state.n
    place = n.queued
    while place > 0:
        before = state.queue[(n.head + place - 1) % len(state.queue)]
        if table.sample[before].arrival_s <= table.sample[sample].arrival_s:
            break
        state.queue[(n.head + place) % len(state.queue)] = before
        place -= 1
    state.queue[(n.head + place) % len(state.queue)] = sample
    n.queued += 1


@part
def _release(state: State, table: Table, limits: Limits, sample: int, held_tokens: int, computed_tokens: int) -> None:
    """Free the blocks of a sequence, and of the nodes that no other sequence holds.

    Computed blocks of these nodes stay findable until they are evicted.
    """
    n, node = state.n, table.sample[sample].leaf
    n.free += -(-held_tokens // limits.block_tokens) - table.depth[node] // limits.block_tokens
    while node >= 0:
        state.residents[node] -= 1
        if state.residents[node] == 0:
            own = _own(table, limits, node)
            before = table.depth[node] // limits.block_tokens - own
            state.idle[node] = min(max(computed_tokens // limits.block_tokens - before, 0), own)
            state.evicts[node] = n.taken + n.free + own - state.idle[node]
            n.free += own
        node = table.parent[node]


@part
def _sort(values: Ints, size: int) -> None:
    """Sort the first `size` values by insertion: a heap is nearly in order."""
    for i in range(1, size):
        value, place = values[i], i
        while place > 0 and values[place - 1] > value:
            values[place] = values[place - 1]
            place -= 1
        values[place] = value


@part
def _push(state: State, key: int) -> None:
    n, heap = state.n, state.heap
    heap[n.running] = key
    n.running += 1
    _rise(heap, n.running - 1)


@part
def _remove(state: State, place: int) -> None:
    n, heap = state.n, state.heap
    n.running -= 1
    size = n.running
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
