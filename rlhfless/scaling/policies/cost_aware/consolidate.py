"""Generate the rest of a step on fewer actors when episodes wait for their environment. Pure.

An actor whose episodes mostly wait is paid for and hardly works. Its episodes migrate for the price of a prefill. With
m actors, each with every m-th of the unfinished samples, the rest of the step takes t(m), the time of the closed
queueing network (`group_times.NetworkTimes`), and costs

    (w + m d) t(m)

where w is the value of a second of the step, and d that of a second of an actor. The m of least cost is kept, if it
saves at least a tenth, as long as t(m) keeps the step's limit and the KV of all sessions fits into m actors: a session
whose KV is evicted while it waits has to compute it again at each turn, which costs more than the turn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rlhfless.scaling.policies.cost_aware.rebalance import LEAST_GAIN, Actors, Goal
from rlhfless.scaling.policies.fleet import PolicyContext, note, shares_to_least
from rlhfless.scaling.policy import Action, Assign, Ints, Move


def actors_to_keep(now: PolicyContext, actors: Actors, goal: Goal) -> tuple[int, ...]:
    """Return the slots whose actors generate the rest of a step, those with the most samples first.

    All awake actors stay if `goal` counts time alone.
    """
    loads = now.loads
    awake = sorted(filter(now.awake, now.layout.generation), key=lambda slot: (-loads[slot], slot))
    if len(awake) < 2 or not actors.samples.size:
        return tuple(awake)
    usd_per_s = now.layout.replica_slots[awake[0]].usd_per_s
    engine = now.layout.replica_slots[awake[0]].engine
    assert engine is not None  # of a slot for generation
    least = max(math.ceil(int(actors.context.sum()) / engine.kv_capacity_tokens), 1)
    by_length = np.argsort(actors.means, kind="stable")[::-1]

    def ends_s(count: int) -> float:
        return actors.end_of(awake[0], by_length[::count], goal.confidence ** (1 / count))

    def usd(count: int, end_s: float) -> float:
        return (goal.time_usd_per_s + count * usd_per_s) * end_s

    all_usd = usd(len(awake), ends_s(len(awake)))
    fewer = ((count, ends_s(count)) for count in range(least, len(awake)))
    kept = [(usd(count, end_s), count) for count, end_s in fewer if end_s <= goal.limit_s]
    best_usd, best = min(kept, default=(math.inf, 0))
    return tuple(awake[:best] if best_usd < (1 - LEAST_GAIN) * all_usd else awake)


def leave_for(now: PolicyContext, actors: Actors, kept: Sequence[int]) -> list[Action]:
    """Migrate the samples of all actors that are not kept to those that are, evenly."""
    loads, actions = now.loads, list[Action]()
    for slot in now.layout.generation:
        if slot in kept or not loads[slot]:
            continue
        samples = now.view.samples_at(slot)
        for target, share in _split(samples, kept, loads):
            actions.append(Move(slot, target, share))
            actors.home[np.isin(actors.samples, share)] = target
            loads[target] += share.size
        actions.append(note(now, "migrate", f"slot {slot}: all {samples.size} samples leave", {"actors": len(kept)}))
    return actions


def give_to(now: PolicyContext, samples: Ints, slots: Ints, kept: Sequence[int]) -> list[Action]:
    """Assign answered samples to the kept ones of the `slots` [samples] that they had, and the others evenly."""
    targets = slots.copy()
    for slot, share in _split(samples[~np.isin(slots, kept)], kept, now.loads):
        targets[np.isin(samples, share)] = slot
    return [Assign(slot, samples[targets == slot]) for slot in np.unique(targets).tolist()]


def _split(samples: Ints, kept: Sequence[int], loads: Ints) -> list[tuple[int, Ints]]:
    """Return the samples of each kept slot: first to those with the smallest `loads` [slots]."""
    shares = np.split(samples, np.cumsum(shares_to_least(samples.size, loads[list(kept)]))[:-1])
    return [(slot, share) for slot, share in zip(kept, shares, strict=True) if share.size]
